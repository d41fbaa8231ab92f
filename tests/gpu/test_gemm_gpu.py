"""The GEMM kernels on a real GPU: ``python -m pytest tests/gpu -m gpu``."""

from __future__ import annotations

import pytest
import torch

from engine.formats import MXFP4Tensor
from engine.kernels.gemm import INTERPRETED, GemmTile, packed_matmul, repack, transpose
from engine.kernels.grouped import grouped_matmul, grouped_wgrad, pad_groups
from engine.kernels.mx_units import has_mx_units
from tests.helpers.gemm import assert_is_product, check_rows, check_wgrad, exact, packed, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
    pytest.mark.skipif(INTERPRETED, reason="kernels run in Triton's interpreter here; run tests/gpu on its own"),
]
GPU = torch.device("cuda")


def operands(layout: str, m: int, n: int, k: int, block: str = "1d") -> tuple[MXFP4Tensor, MXFP4Tensor]:
    if layout == "fprop":
        a, b = spread((m, k), seed=1, device=GPU), spread((n, k), seed=2, device=GPU)
        return packed(a, 1), transpose(packed(b, 1, block))
    if layout == "dgrad":
        return packed(spread((m, k), seed=1, device=GPU), 1), packed(spread((k, n), seed=2, device=GPU), 0, block)
    a, b = spread((k, m), seed=1, device=GPU), spread((k, n), seed=2, device=GPU)
    return transpose(packed(a, 0)), packed(b, 0)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 32), (129, 200, 96), (1024, 768, 512), (300, 2880, 2880), (2880, 333, 4096)]
)
@pytest.mark.parametrize("layout", ["fprop", "dgrad", "wgrad"])
def test_packed_gemm(layout: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> None:
    a, b = operands(layout, m, n, k)
    assert_is_product(packed_matmul(a, b, out_dtype=out_dtype), exact(a), exact(b))


@pytest.mark.parametrize("layout", ["fprop", "dgrad"])
def test_packed_gemm_with_weight_tiles(layout: str) -> None:
    a, b = operands(layout, 500, 2880, 2880, "2d")
    assert_is_product(packed_matmul(a, b, out_dtype=torch.float32), exact(a), exact(b))


def test_repack() -> None:
    x = spread((4, 2880, 1056), seed=1, device=GPU)
    by_row, by_col = packed(x, -1, "2d"), packed(x, -2, "2d")
    assert torch.equal(repack(by_row, -2).codes, by_col.codes)
    assert torch.equal(repack(by_col, -1).codes, by_row.codes)


def test_every_pair_of_codes_multiplies_exactly_down_to_the_smallest_scale() -> None:
    codes = torch.zeros(16, 16, dtype=torch.uint8, device=GPU)
    codes[:, 2] = torch.arange(16, device=GPU)
    for left, right in [(0, 252), (0, 200), (127, 127), (1, 240), (100, 60), (252, 100)]:
        a, b = (
            MXFP4Tensor(
                codes=codes,
                scales=torch.full((16, 1), scale, dtype=torch.uint8, device=GPU),
                axis=1,
                block="1d",
                shape=torch.Size((16, 32)),
                clip="none",
            )
            for scale in (left, right)
        )
        y = packed_matmul(a, transpose(b), out_dtype=torch.float32)
        assert torch.equal(y.double(), exact(a) @ exact(b).t()), (left, right)


def test_a_non_finite_block_reaches_its_row_and_no_other() -> None:
    x, w = spread((200, 256), seed=1, device=GPU), spread((160, 256), seed=2, device=GPU)
    x[7, 40], w[3, 200] = float("inf"), float("nan")
    y = packed_matmul(packed(x, 1), transpose(packed(w, 1)), out_dtype=torch.float32)
    expected = torch.zeros(200, 160, dtype=torch.bool, device=GPU)
    expected[7], expected[:, 3] = True, True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.skipif(has_mx_units(GPU) if torch.cuda.is_available() else True, reason="runs natively here")
def test_tritons_own_upcast_gives_the_same_products() -> None:
    """``tl.dot_scaled`` where there is no scaled matrix unit (blocks with scale 2^-127 aside, which it flushes)."""
    a, b = operands("fprop", 300, 256, 512)
    assert_is_product(
        packed_matmul(a, b, out_dtype=torch.float32, native=True, tile=GemmTile(bk=64)), exact(a), exact(b)
    )


@pytest.mark.parametrize("sizes", [[40, 0, 33, 32, 1], [0, 0, 1000], [0, 0], [700, 1, 500, 0]], ids=str)
@pytest.mark.parametrize("kind", ["torch", "triton", "packed"])
def test_grouped(kind: str, sizes: list[int]) -> None:
    n, k, experts, total = 2880, 320, len(sizes), sum(sizes)
    groups = pad_groups(torch.tensor(sizes, device=GPU), num_tokens=total)
    x, dy = groups.pad(spread((total, k), seed=1, device=GPU)), groups.pad(spread((total, n), seed=2, device=GPU))
    w = spread((experts, n, k), seed=3, device=GPU)
    if kind == "packed":
        options: dict[str, object] = {"out_dtype": torch.float32}
        xq, dyq, x_cols, dy_cols = packed(x, 1), packed(dy, 1), packed(x, 0), transpose(packed(dy, 0))
        wq = packed(w, 2, "2d")
        w_fprop, w_dgrad, value = transpose(wq), repack(wq, 1), exact
    else:
        options = {"impl": kind, "out_dtype": torch.bfloat16}
        xq = x_cols = x.bfloat16()
        dyq, w_dgrad = dy.bfloat16(), w.bfloat16()
        dy_cols, w_fprop, value = dyq.t(), w_dgrad.transpose(1, 2), torch.Tensor.double
    check_rows(grouped_matmul(xq, w_fprop, groups.ends, **options), value(xq), value(w_fprop), groups.ends)
    check_rows(grouped_matmul(dyq, w_dgrad, groups.ends, **options), value(dyq), value(w_dgrad), groups.ends)
    dw = grouped_wgrad(dy_cols, x_cols, groups.ends, **options)
    check_wgrad(dw, value(dy_cols), value(x_cols), groups.ends)
    assert all(not dw[expert].any() for expert, size in enumerate(sizes) if size == 0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_one_cuda_graph_serves_every_routing(kind: str) -> None:
    """Nothing waits for the device, and the group sizes of a replay are those in device memory."""
    total, n, k, experts = 512, 320, 256, 4
    sizes = torch.tensor([128, 128, 128, 128], device=GPU)
    x, w = spread((total, k), seed=1, device=GPU).bfloat16(), spread((experts, n, k), seed=2, device=GPU).bfloat16()

    def layer() -> torch.Tensor:
        groups = pad_groups(sizes, num_tokens=total)
        padded = groups.pad(x)
        y = grouped_matmul(padded, w.transpose(1, 2), groups.ends, impl=kind)
        grouped_wgrad(y.t(), padded, groups.ends, impl=kind)
        return groups.unpad(y)

    layer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for routing in ([128, 128, 128, 128], [0, 500, 12, 0], [1, 2, 3, 506]):
        sizes.copy_(torch.tensor(routing))
        graph.replay()
        expert = torch.repeat_interleave(torch.arange(experts), torch.tensor(routing)).to(GPU)
        expected = torch.einsum("tk,tnk->tn", x.float(), w[expert].float())
        assert torch.allclose(out.float(), expected, rtol=2e-2, atol=1e-3 * expected.abs().max().item())
