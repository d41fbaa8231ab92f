"""Shapes, counts, causality and initial weights of the Llama-3 family."""

from __future__ import annotations

import pytest
import torch

from engine.config import MODELS, ModelConfig, from_dict, resolve_model
from engine.models.common import apply_rope, rope_table, weights_digest
from engine.models.registry import build_model
from tests.helpers.models import NANO

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", list(MODELS))
def test_parameter_count_equals_the_formula(name: str) -> None:
    model = build_model(MODELS[name], compute_dtype="float32", seed=1, device=CPU)
    assert sum(p.numel() for p in model.parameters()) == MODELS[name].num_parameters()


def test_debugmodel_has_the_published_size() -> None:
    assert MODELS["llama3_debugmodel"].num_parameters() == pytest.approx(6.16e6, rel=1e-3)


def test_no_position_sees_the_future() -> None:
    model = build_model(NANO, compute_dtype="float32", seed=1, device=CPU)
    tokens = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 64
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :20], b[:, :20])
    assert not torch.equal(a[:, 20:], b[:, 20:])


def test_rope_is_a_rotation_by_relative_position() -> None:
    table = rope_table(16, 8, 10_000.0, CPU)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 16, 1, 8) for _ in range(2))
    rq, rk = apply_rope(q, table), apply_rope(k, table)
    assert torch.allclose(rq.norm(dim=-1), q.norm(dim=-1), atol=1e-5)
    scores = torch.einsum("bqhf,bkhf->bqk", rq, rk)[0]
    for offset in (0, 1, 5):
        diagonal = scores.diagonal(-offset)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    digests = {
        (seed, dtype): weights_digest(build_model(NANO, compute_dtype=dtype, seed=seed, device=CPU))
        for seed in (1, 2)
        for dtype in ("float32", "bfloat16")
    }
    assert digests[1, "float32"] == digests[1, "bfloat16"]
    assert digests[1, "float32"] != digests[2, "float32"]


def test_initial_weights_have_the_stated_spread() -> None:
    model = build_model(MODELS["llama3_nano"], compute_dtype="float32", seed=1, device=CPU)
    weights = dict(model.named_parameters())
    # A normal truncated at 3 std has 0.9866 of its std.
    assert weights["layers.0.attention.wq.weight"].detach().std() == pytest.approx(0.02 * 0.9866, rel=0.02)
    assert weights["layers.0.feed_forward.w2.weight"].detach().std() == pytest.approx(0.02 * 0.9866 / 8**0.5, rel=0.02)
    assert weights["tok_embeddings.weight"].abs().max() <= 0.06


def test_tied_output_shares_the_embedding() -> None:
    config = from_dict(ModelConfig, {**resolve_model("llama3_nano"), "tied": True})
    model = build_model(config, compute_dtype="float32", seed=1, device=CPU)
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()
