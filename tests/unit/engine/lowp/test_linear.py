"""The swapped Linear against an ordinary one and against the three explicit GEMMs of the operand table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.config import RecipeConfig, from_dict, resolve_recipe
from engine.formats import OperandOptions, combine_keys, make_hadamard, operand_key, qdq, step_key
from engine.lowp.convert import convert
from engine.lowp.linear import LowpLinear
from engine.lowp.scheme import LinearScheme
from engine.models.registry import build_model
from engine.recipes.table import RECIPES
from tests.helpers.models import NANO, tiny_loss

QUANTISED = [name for name, row in RECIPES.items() if row.switches.elem_format != "none"]


def recipe(name: str, **overrides: object) -> RecipeConfig:
    return from_dict(RecipeConfig, resolve_recipe({"name": name, **overrides}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swap_with_quantisation_off_changes_no_bit(dtype: str) -> None:
    plain, swapped = (build_model(NANO, compute_dtype=dtype, seed=3, device=torch.device("cpu")) for _ in range(2))
    conversion = convert(swapped, recipe("lpt"), scheme=LinearScheme())
    assert len(conversion.layers) == 7 * NANO.n_layers
    losses = [tiny_loss(model, NANO.vocab_size) for model in (plain, swapped)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), swapped.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*QUANTISED, "lpt_static_clip"])
def test_gemms_equal_the_operand_table(name: str, dtype: torch.dtype) -> None:
    config = recipe("lpt", clip="static") if name == "lpt_static_clip" else recipe(name)
    s = config.switches
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=True)
    x = torch.randn(2, 64, 64, dtype=dtype, requires_grad=True)
    dy = torch.randn(2, 64, 96, dtype=dtype)
    model = nn.Sequential(linear)
    conversion = convert(model, config)
    conversion.state.set_step(11, 5, 2)
    hadamard = make_hadamard(s.hadamard, seed=11, step=5) if s.hadamard != "none" else None
    y = model(x)
    y.backward(dy)

    x2, dy2, w = x.detach().reshape(-1, 64), dy.reshape(-1, 96), linear.weight.detach().to(dtype)
    mode, grad_mode = s.scale_mode, (s.scale_mode_sr or s.scale_mode) if s.sr else s.scale_mode
    xq = qdq(x2, OperandOptions(axis=-1, scale_mode=mode))[0]
    wq = qdq(w, OperandOptions(axis=-1, block=s.weight_block, scale_mode=mode))[0]
    assert torch.equal(y.reshape(-1, 96), xq @ wq.t() + linear.bias.to(dtype))
    if s.backward == "hp":
        dx, dw = dy2 @ wq, dy2.t() @ xq
    else:
        key = {o: combine_keys(step_key(11, 5, 2), operand_key("0", o)) for o in ("dgrad_dy", "wgrad_dy")}
        rounding = "sr" if s.sr else "rtn"
        dyq = qdq(
            dy2,
            OperandOptions(axis=-1, scale_mode=grad_mode, rounding=rounding),
            key=key["dgrad_dy"] if s.sr else None,
        )[0]
        wd = wq if s.weight_block == "2d" else qdq(w, OperandOptions(axis=-2, scale_mode=mode))[0]
        dx = dyq @ wd
        left = OperandOptions(axis=-2, scale_mode=grad_mode, rounding=rounding, hadamard=s.hadamard, clip=s.clip)
        right = OperandOptions(axis=-2, scale_mode=mode, hadamard=s.hadamard, clip=s.clip)
        dw = (
            qdq(dy2, left, key=key["wgrad_dy"] if s.sr else None, transform=hadamard)[0].t()
            @ qdq(x2, right, transform=hadamard)[0]
        )
    assert x.grad is not None
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    assert torch.equal(x.grad.reshape(-1, 64), dx)
    assert torch.equal(linear.weight.grad, dw.float())
    assert torch.allclose(linear.bias.grad, dy2.float().sum(0), rtol=2e-2, atol=1e-1)


def test_reference_recipes_differ_in_their_gradient() -> None:
    """Every recipe changes the first gradient against its reference (midmax and inert ones may not)."""
    grads = {}
    for name in RECIPES:
        model = build_model(NANO, compute_dtype="float32", seed=1, device=torch.device("cpu"))
        config = recipe(name)
        if config.switches.elem_format != "none":
            convert(model, config).state.set_step(1, 1, 0)
        tiny_loss(model, NANO.vocab_size).backward()
        grads[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert grads[name].isfinite().all()
    for name, row in RECIPES.items():
        if row.reference and name != "midmax":
            assert not torch.equal(grads[name], grads[row.reference]), name


def test_parameters_and_optimizer_are_untouched_by_the_swap() -> None:
    model = build_model(NANO, compute_dtype="float32", seed=1, device=torch.device("cpu"))
    before = {name: id(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    conversion = convert(model, recipe("lpt"))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert "output" in conversion.skipped
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    tiny_loss(model, NANO.vocab_size).backward()
    optimizer.step()
    assert all(not torch.equal(old[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        (["*"], ["output"], 14),
        (["Linear"], [], 15),
        (["layers.0.*"], [], 7),
        (["layers.*.attention.w?"], [], 8),
        ([r"re:layers\.\d+\.feed_forward"], [], 6),
        (["*"], ["output", r"re:.*\.(wk|wv)$"], 10),
    ],
)
def test_targets_and_ignore_lists(targets: list[str], ignore: list[str], expected: int) -> None:
    model = build_model(NANO, compute_dtype="float32", seed=1, device=torch.device("cpu"))
    conversion = convert(model, recipe("baseline", targets=targets, ignore=ignore))
    swapped = [fqn for fqn, m in model.named_modules() if isinstance(m, LowpLinear)]
    assert len(swapped) == expected
    assert tuple(swapped) == conversion.layers


def test_validation_forward_counts_no_training_gemm() -> None:
    model = build_model(NANO, compute_dtype="float32", seed=1, device=torch.device("cpu"))
    state = convert(model, recipe("lpt")).state
    with torch.no_grad():
        tiny_loss(model, NANO.vocab_size)
    assert not state.gemms
    assert state.take_nonfinite() == 0


def test_nonfinite_blocks_are_counted() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    state = convert(model, recipe("baseline")).state
    x = torch.randn(32, 64)
    x[3, 40] = float("inf")
    model(x).sum().backward()
    # fprop: one 1x32 block of x; wgrad: one 32x1 block of x. dy is all ones.
    assert state.take_nonfinite() == 2
    assert state.take_nonfinite() == 0
