"""The low-precision Linear on a real GPU: ``python -m pytest tests/gpu -m gpu``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.config import RecipeConfig, from_dict, resolve_recipe
from engine.kernels import kernel_path
from engine.lowp.convert import convert
from engine.lowp.linear import LowpOptions, LowpState
from engine.models.common import rope_table
from engine.models.registry import build_model
from engine.recipes.table import RECIPES
from tests.helpers.models import NANO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
GPU = torch.device("cuda")
QUANTISED = [name for name, row in RECIPES.items() if row.switches.elem_format != "none"]
TOKENS = 256


def recipe(name: str) -> RecipeConfig:
    return from_dict(RecipeConfig, resolve_recipe(name))


class Layer:
    """A converted Linear 256 -> 384 with fixed data, gradients in fixed memory."""

    def __init__(self, name: str, device: torch.device = GPU, options: LowpOptions | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 384)).to(device, torch.bfloat16)
        self.state: LowpState = convert(self.model, recipe(name), options=options).state
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(TOKENS, 256, generator=generator).to(device, torch.bfloat16).requires_grad_()
        self.dy = torch.randn(TOKENS, 384, generator=generator).to(device, torch.bfloat16)
        for tensor in self.leaves():
            tensor.grad = torch.zeros_like(tensor)

    def leaves(self) -> list[Tensor]:
        return [self.x, *self.model.parameters()]

    def step(self) -> Tensor:
        for tensor in self.leaves():
            assert tensor.grad is not None
            tensor.grad.zero_()
        y = self.model(self.x)
        y.backward(self.dy)
        return y.detach()

    def results(self, y: Tensor) -> list[Tensor]:
        return [y.clone(), *(tensor.grad.clone() for tensor in self.leaves() if tensor.grad is not None)]


def test_kernels_run_here() -> None:
    assert kernel_path(GPU).path == "triton", kernel_path(GPU).why


@pytest.mark.parametrize("name", QUANTISED)
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    """The operands are equal bit for bit (noise and transform included), so only the order of the sums differs."""
    on_gpu, on_cpu = Layer(name), Layer(name, torch.device("cpu"))
    for layer in (on_gpu, on_cpu):
        layer.state.set_step(3, 5, 1)
    for a, b in zip(on_gpu.results(on_gpu.step()), on_cpu.results(on_cpu.step()), strict=True):
        assert (a.cpu().float() - b.float()).norm() <= 4e-3 * b.float().norm()
    assert on_gpu.state.take_nonfinite() == on_cpu.state.take_nonfinite() == 0


@pytest.mark.parametrize("name", QUANTISED)
def test_saving_packed_changes_no_bit(name: str) -> None:
    plain, packed = Layer(name), Layer(name, options=LowpOptions(save_packed=True))
    for layer in (plain, packed):
        layer.state.set_step(3, 5, 1)
    for a, b in zip(plain.results(plain.step()), packed.results(packed.step()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", QUANTISED)
def test_packed_gemms_equal_those_on_dequantised_values(name: str) -> None:
    plain, packed = Layer(name, options=LowpOptions(gemm="qdq")), Layer(name, options=LowpOptions(gemm="packed"))
    for layer in (plain, packed):
        layer.state.set_step(3, 5, 1)
    for a, b in zip(plain.results(plain.step()), packed.results(packed.step()), strict=True):
        assert (a.float() - b.float()).norm() <= 4e-3 * a.float().norm()


@pytest.mark.parametrize("options", [LowpOptions(), LowpOptions(save_packed=True), LowpOptions(gemm="packed")], ids=str)
@pytest.mark.parametrize("name", ["lpt", "baseline", "hadamard_3rht"])
def test_a_step_waits_for_nothing_and_one_cuda_graph_serves_every_step(name: str, options: LowpOptions) -> None:
    """A replay draws the noise and the transform of the step that the state was set to."""
    layer = Layer(name, options=options)
    steps = [(3, number, micro_batch) for number in (1, 2) for micro_batch in (0, 1)]
    expected = []
    for step in steps:
        layer.state.set_step(*step)
        expected.append(layer.results(layer.step()))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.step()
    for step, want in zip(steps, expected, strict=True):
        layer.state.set_step(*step)
        graph.replay()
        for a, b in zip(layer.results(y), want, strict=True):
            assert torch.equal(a, b), step
    if RECIPES[name].switches.sr:
        assert not torch.equal(expected[0][1], expected[1][1])


def test_a_captured_step_counts_non_finite_blocks() -> None:
    layer = Layer("baseline")
    layer.state.set_step(1, 1, 0)
    layer.step()
    layer.state.take_nonfinite()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.step()
    layer.state.take_nonfinite()
    with torch.no_grad():
        layer.dy[7, 40] = float("nan")
    graph.replay()
    graph.replay()
    # dy along N and along M, twice.
    assert layer.state.take_nonfinite() == 4


def test_packed_activations_take_less_than_a_third_of_the_memory() -> None:
    kept = {}
    for options in (LowpOptions(), LowpOptions(save_packed=True)):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).to(GPU, torch.bfloat16)
        convert(model, recipe("lpt"), options=options).state.set_step(1, 1, 0)
        x = torch.randn(16384, 1024, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()  # compiles; gradients exist from here on
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = model(x)
        kept[options.save_packed] = torch.cuda.memory_allocated() - before - y.nbytes - 4 * 1024 * 1024 * 2
        del y
    bf16 = 4 * 16384 * 1024 * 2
    assert kept[True] <= 0.30 * bf16
    assert kept[False] <= 1.02 * bf16


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_transformer_block_compiles_whole(mode: str | None) -> None:
    model = build_model(NANO, compute_dtype="bfloat16", seed=1, device=GPU)
    state = convert(model, recipe("lpt")).state
    block, rope = model.layers[0], rope_table(32, NANO.head_dim, NANO.rope_theta, GPU)
    x = torch.randn(8, 32, NANO.dim, device=GPU, dtype=torch.bfloat16)

    def run(f: Callable[..., Tensor], number: int) -> list[Tensor]:
        state.set_step(7, number, 0)
        block.zero_grad()
        y = f(x, rope)
        y.float().square().sum().backward()
        return [y.detach().clone(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for number in (1, 2, 3):
        for got, want in zip(run(compiled, number), run(block, number), strict=True):
            assert (got.float() - want.float()).norm() <= 0.1 * want.float().norm()
