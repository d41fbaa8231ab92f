"""The Linear's operators: traced without a break, exact under every option, functional."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tests.helpers.triton_interpreter  # noqa: F401  (first: it decides how kernels run)
from engine.config import ConfigError, RecipeConfig, from_dict, resolve_recipe
from engine.lowp.convert import convert
from engine.lowp.linear import LowpLinear, LowpOptions, LowpState
from engine.lowp.operands import plan_of
from engine.lowp.ops import GemmCounter, linear
from engine.lowp.scheme import LinearScheme
from engine.models.common import rope_table
from engine.models.llama3 import TransformerBlock
from engine.models.registry import build_model
from engine.recipes.table import RECIPES
from tests.helpers.models import NANO, tiny_loss

CPU = torch.device("cpu")
QUANTISED = [name for name, row in RECIPES.items() if row.switches.elem_format != "none"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def recipe(name: str, **overrides: object) -> RecipeConfig:
    return from_dict(RecipeConfig, resolve_recipe({"name": name, **overrides}))


def one_layer(
    config: RecipeConfig, *, options: LowpOptions | None = None, scheme: LinearScheme | None = None
) -> tuple[nn.Module, LowpState]:
    """Return a converted Linear 64 -> 96, its state set to a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96))
    state = convert(model, config, options=options, scheme=scheme).state
    state.set_step(11, 5, 2)
    return model, state


def step(model: nn.Module, dtype: torch.dtype = torch.float32, tokens: int = 64) -> tuple[Tensor, ...]:
    """Return y, dx, dw, db of one forward and backward on fixed data."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, tokens // 2, 64, generator=generator).to(dtype).requires_grad_()
    y = model(x)
    model.zero_grad()
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    assert x.grad is not None
    return y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad


def saved_tensors(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what forward keeps for backward."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return saved


class Block:
    """A converted transformer block with its inputs."""

    def __init__(self, config: RecipeConfig, dtype: str) -> None:
        model = build_model(NANO, compute_dtype=dtype, seed=1, device=CPU)
        self.state = convert(model, config).state
        self.block: TransformerBlock = model.layers[0]
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(2, 32, NANO.dim, generator=generator).to(getattr(torch, dtype))
        self.rope = rope_table(32, NANO.head_dim, NANO.rope_theta, CPU)

    def run(self, block: Callable[..., Tensor], number: int) -> list[Tensor]:
        """Return y, dx, every weight gradient and the number of non-finite blocks of one step."""
        self.state.set_step(7, number, 0)
        self.block.zero_grad()
        x = self.x.clone().requires_grad_()
        y = block(x, self.rope)
        y.float().square().sum().backward()
        assert x.grad is not None
        grads = [p.grad.clone() for p in self.block.parameters() if p.grad is not None]
        return [y.detach(), x.grad, *grads, torch.tensor(self.state.take_nonfinite())]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lpt", "baseline", "forward_only", "hadamard_3rht"])
def test_a_transformer_block_traces_whole_and_is_traced_once(name: str, dtype: str) -> None:
    block = Block(recipe(name), dtype)
    eager = [block.run(block.block, number) for number in (1, 2)]
    torch._dynamo.reset()
    compiled = torch.compile(block.block, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number, expected in enumerate(eager, 1):
            for got, want in zip(block.run(compiled, number), expected, strict=True):
                assert torch.equal(got, want)
    if RECIPES[name].switches.sr:
        assert not torch.equal(eager[0][1], eager[1][1]), "another step draws other noise"


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's imports
def test_inductor_compiles_a_transformer_block_whole() -> None:
    block = Block(recipe("lpt"), "float32")
    eager = block.run(block.block, 1)
    torch._dynamo.reset()
    compiled = torch.compile(block.block, fullgraph=True)
    for got, want in zip(block.run(compiled, 1), eager, strict=True):
        # Inductor sums the norms in another order; where that moves a value across a rounding edge, a code changes.
        assert (got.double() - want.double()).norm() <= 1e-2 * want.double().norm()


def test_non_finite_blocks_are_counted_in_a_traced_step() -> None:
    model, state = one_layer(recipe("baseline"))
    with torch.no_grad():
        model[0].weight[3, 40] = float("inf")
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(32, 64)).sum().backward()
    # fprop: the block of w along K; dx is not needed. The forward's NaNs reach no operand of wgrad.
    assert state.take_nonfinite() == 1
    step(model)
    # w along K and, for dgrad, along N.
    assert state.take_nonfinite() == 2


@pytest.mark.parametrize("save_packed", [False, True])
@pytest.mark.parametrize("name", ["lpt", "forward_only"])
def test_operator_meets_torchs_contract(name: str, save_packed: bool) -> None:
    """Schema, fake shapes and strides, autograd registration, and tracing with fixed and free sizes."""
    model, state = one_layer(recipe(name))
    layer = model[0]
    args = (
        torch.randn(64, 64, requires_grad=True),
        layer.weight,
        state.tally,
        state.keys[:2],
        state.permutation,
        state.signs,
        state.counter.layer("0"),
        layer.scheme.to_text(),
        0,
        True,
        save_packed,
        False,
    )
    torch.library.opcheck(linear, args)


@DTYPES
@pytest.mark.parametrize("name", [*QUANTISED, "lpt_static_clip"])
def test_saving_packed_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    config = recipe("lpt", clip="static") if name == "lpt_static_clip" else recipe(name)
    plain, _ = one_layer(config)
    packed, _ = one_layer(config, options=LowpOptions(save_packed=True))
    for a, b in zip(step(plain, dtype), step(packed, dtype), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["lpt", "baseline", "forward_only"])
def test_packed_activations_take_4_25_bits_a_value(name: str) -> None:
    sizes = {}
    for save_packed in (False, True):
        model, _ = one_layer(recipe(name), options=LowpOptions(save_packed=save_packed))
        saved = saved_tensors(model, torch.randn(1024, 64, dtype=torch.bfloat16, requires_grad=True))
        # Tensors of tokens; the weight and the constants do not grow with them.
        sizes[save_packed] = sum(t.numel() * t.element_size() for t in saved if t.numel() >= 1024)
        sizes[save_packed] -= sum(t.numel() * t.element_size() for t in saved if t.shape == (96, 64))
    assert sizes[False] == 1024 * 64 * 2
    assert sizes[True] == 1024 * 64 * 4.25 / 8
    assert sizes[True] <= 0.30 * sizes[False]


@pytest.mark.parametrize("name", [*QUANTISED, "lpt_static_clip"])
def test_packed_gemms_equal_those_on_dequantised_values(name: str) -> None:
    config = recipe("lpt", clip="static") if name == "lpt_static_clip" else recipe(name)
    plain, plain_state = one_layer(config, options=LowpOptions(gemm="qdq"))
    packed, packed_state = one_layer(config, options=LowpOptions(gemm="packed"))
    for a, b in zip(step(plain), step(packed), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert packed_state.gemms == plain_state.gemms


def test_packed_gemms_count_non_finite_blocks() -> None:
    model, state = one_layer(recipe("baseline"), options=LowpOptions(gemm="packed"))
    x = torch.randn(32, 64)
    x[3, 40] = float("inf")
    model(x).sum().backward()
    assert state.take_nonfinite() == 2
    assert state.take_nonfinite() == 0


def test_packed_gemms_without_a_gpu_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match='"packed" needs a GPU'):
        one_layer(recipe("lpt"), options=LowpOptions(gemm="packed"))
    _, state = one_layer(recipe("lpt"), options=LowpOptions(gemm="auto"))
    assert state.gemms == {}


def test_the_state_may_not_move_on_before_backward() -> None:
    model, state = one_layer(recipe("lpt"))
    y = model(torch.randn(32, 64))
    state.set_step(11, 6, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_state_keeps_its_tensors_from_step_to_step() -> None:
    """A captured graph reads addresses: what changes from step to step must stay in place."""
    _, state = one_layer(recipe("lpt"))
    names = ("keys", "permutation", "signs", "tally")
    before = {name: (getattr(state, name).data_ptr(), getattr(state, name).clone()) for name in names}
    state.set_step(11, 6, 0)
    for name, (address, value) in before.items():
        assert getattr(state, name).data_ptr() == address
        assert torch.equal(getattr(state, name), value) == (name == "tally")


def test_state_moves_with_the_model() -> None:
    model, state = one_layer(recipe("lpt"))
    model.to("meta")
    assert {t.device.type for t in (state.keys, state.operand_keys, state.permutation, state.signs, state.tally)} == {
        "meta"
    }
    assert state.tally.requires_grad
    assert model(torch.empty(32, 64, device="meta")).shape == (32, 96)


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_only_the_gradients_asked_for(frozen: str) -> None:
    model, state = one_layer(recipe("lpt"))
    x = torch.randn(32, 64, requires_grad=frozen == "weight")
    model[0].weight.requires_grad_(frozen == "input")
    model[0].bias.requires_grad_(False)
    y = model(x)
    assert y.requires_grad == (frozen != "both")
    if frozen == "both":
        assert state.gemms == {}
        return
    y.sum().backward()
    assert (x.grad is None) == (frozen == "input")
    assert (model[0].weight.grad is None) == (frozen == "weight")
    assert state.gemms["0"] == {"fprop": 1, "dgrad": int(frozen == "weight"), "wgrad": int(frozen == "input")}


def test_operator_refuses_a_gradient_that_it_did_not_prepare() -> None:
    model, state = one_layer(recipe("lpt"))
    args = (model[0].weight, state.tally, state.keys[:2], state.permutation, state.signs)
    with pytest.raises(RuntimeError, match="training=False where a gradient is needed"):
        linear(torch.randn(32, 64), *args, "0:x", model[0].scheme.to_text(), 0, False, False, False)


def test_counts_of_two_models_are_apart_and_die_with_them() -> None:
    first, second = (build_model(NANO, compute_dtype="float32", seed=1, device=CPU) for _ in range(2))
    states = [convert(model, recipe("lpt")).state for model in (first, second)]
    tiny_loss(first, NANO.vocab_size).backward()
    assert states[0].gemms["layers.0.attention.wq"] == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    assert not states[1].gemms
    layer = GemmCounter().layer("gone")
    GemmCounter.add(layer, "fprop")  # its counter is no more: nothing to count in, nothing to fail


@pytest.mark.parametrize("name", QUANTISED)
def test_scheme_text_is_lossless(name: str) -> None:
    scheme = LinearScheme.from_switches(RECIPES[name].switches)
    assert LinearScheme.from_text(scheme.to_text()) == scheme
    assert plan_of(scheme.to_text(), False, False).scheme == scheme


def test_first_layer_of_each_model_has_its_own_keys() -> None:
    model = build_model(NANO, compute_dtype="float32", seed=1, device=CPU)
    state = convert(model, recipe("lpt")).state
    layers = [m for m in model.modules() if isinstance(m, LowpLinear)]
    assert len(state.keys) == 2 * len(layers)
    assert len(set(state.keys.tolist())) == 2 * len(layers)
