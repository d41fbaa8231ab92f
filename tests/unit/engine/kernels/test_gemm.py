"""The packed GEMM in Triton's interpreter against float64 products of the dequantised operands."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401  (first: it decides how kernels run)
from engine.formats import MXFP4Tensor
from engine.formats.e2m1 import pack
from engine.kernels.gemm import GemmTile, packed_matmul, repack, transpose
from engine.kernels.mx_units import has_mx_units
from tests.helpers.gemm import assert_is_product, exact, packed, spread

TILE = GemmTile(bm=64, bn=32, bk=64)
LAYOUTS = ("fprop", "dgrad", "wgrad")


def operands(layout: str, m: int, n: int, k: int, block: str = "1d") -> tuple[MXFP4Tensor, MXFP4Tensor]:
    """Return A [m, k] and B [k, n] as a Linear layer stores them for one of its GEMMs."""
    if layout == "fprop":
        return packed(spread((m, k), seed=1), 1), transpose(packed(spread((n, k), seed=2), 1, block))
    if layout == "dgrad":
        return packed(spread((m, k), seed=1), 1), packed(spread((k, n), seed=2), 0, block)
    return transpose(packed(spread((k, m), seed=1), 0)), packed(spread((k, n), seed=2), 0)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(70, 33, 96), (64, 64, 128), (1, 1, 32), (129, 40, 160)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_product_of_the_dequantised_operands(
    layout: str, m: int, n: int, k: int, out_dtype: torch.dtype
) -> None:
    a, b = operands(layout, m, n, k)
    y = packed_matmul(a, b, out_dtype=out_dtype, tile=TILE)
    assert y.shape == (m, n)
    assert y.dtype == out_dtype
    assert_is_product(y, exact(a), exact(b))


@pytest.mark.parametrize("layout", ["fprop", "dgrad"])
def test_weight_tiles_are_found_by_index(layout: str) -> None:
    a, b = operands(layout, 40, 96, 64, block="2d")
    assert_is_product(packed_matmul(a, b, out_dtype=torch.float32, tile=TILE), exact(a), exact(b))


def test_tiled_left_operand() -> None:
    a, b = packed(spread((96, 64), seed=1), 1, "2d"), packed(spread((64, 40), seed=2), 0)
    assert_is_product(packed_matmul(a, b, out_dtype=torch.float32, tile=TILE), exact(a), exact(b))


@settings(max_examples=12, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    m=st.integers(1, 80),
    n=st.integers(1, 80),
    blocks=st.integers(1, 5),
    tile=st.sampled_from([GemmTile(bm=32, bn=32, bk=32), GemmTile(bm=64, bn=32, bk=128, band=2), TILE]),
)
def test_any_shape_and_tile(layout: str, m: int, n: int, blocks: int, tile: GemmTile) -> None:
    a, b = operands(layout, m, n, 32 * blocks)
    assert_is_product(packed_matmul(a, b, out_dtype=torch.float32, tile=tile), exact(a), exact(b))


def test_every_pair_of_codes_and_scales_multiplies_exactly() -> None:
    """One product a sum: codes 0..15 on both sides under every pair of scales whose product fp32 can hold."""
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[:, 5] = torch.arange(16)
    scales = [0, 1, 2, 100, 127, 130, 200, 252]
    for left, right in itertools.product(scales, scales):
        if not 130 < left + right < 370:  # 0.25·2^-126 .. 36·2^113: normal in fp32
            continue
        a, b = (
            MXFP4Tensor(
                codes=pack(codes, 1),
                scales=torch.full((16, 1), scale, dtype=torch.uint8),
                axis=1,
                block="1d",
                shape=torch.Size((16, 32)),
                clip="none",
            )
            for scale in (left, right)
        )
        y = packed_matmul(a, transpose(b), out_dtype=torch.float32, tile=GemmTile(bm=32, bn=32, bk=32))
        assert torch.equal(y.double(), exact(a) @ exact(b).t()), (left, right)


def test_a_non_finite_block_reaches_its_row_and_no_other() -> None:
    x, w = spread((40, 64), seed=1), spread((32, 64), seed=2)
    x[7, 40] = float("inf")
    w[3, 2] = float("nan")
    y = packed_matmul(packed(x, 1), transpose(packed(w, 1)), out_dtype=torch.float32, tile=TILE)
    expected = torch.zeros(40, 32, dtype=torch.bool)
    expected[7], expected[:, 3] = True, True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("clips", [("static", "static"), ("static", "none")])
def test_static_clip_multiplies_the_sum(clips: tuple[str, str]) -> None:
    a, b = packed(spread((40, 64), seed=1), 1, clip=clips[0]), packed(spread((64, 33), seed=2), 0, clip=clips[1])
    y = packed_matmul(a, b, out_dtype=torch.float32, tile=TILE)
    # dequantise() multiplies by fp32(4/3) and rounds, value by value: an error of 2^-24 of each factor more.
    product = exact(a) @ exact(b)
    assert torch.allclose(y.double(), product, rtol=0, atol=(2.0**-20 * (exact(a).abs() @ exact(b).abs())).max().item())
    plain = packed_matmul(*(_unclipped(t) for t in (a, b)), out_dtype=torch.float32, tile=TILE)
    assert torch.allclose(y, plain * (4 / 3) ** clips.count("static"), rtol=1e-6, atol=0)


def _unclipped(q: MXFP4Tensor) -> MXFP4Tensor:
    return MXFP4Tensor(codes=q.codes, scales=q.scales, axis=q.axis, block=q.block, shape=q.shape, clip="none")


@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 64), (96, 2112)])
def test_repacked_tiles_equal_tiles_packed_along_the_other_axis(shape: tuple[int, ...]) -> None:
    x = spread(shape, seed=3)
    by_row, by_col = packed(x, -1, "2d"), packed(x, -2, "2d")
    there = repack(by_row, -2)
    assert there.axis == by_col.axis
    assert torch.equal(there.codes, by_col.codes)
    assert torch.equal(repack(by_col, -1).codes, by_row.codes)
    assert repack(by_row, -1).codes is by_row.codes


def test_repacked_weight_serves_dgrad() -> None:
    w, dy = packed(spread((64, 96), seed=1), 1, "2d"), packed(spread((40, 64), seed=2), 1)
    dx = packed_matmul(dy, repack(w, 0), out_dtype=torch.float32, tile=TILE)
    assert_is_product(dx, exact(dy), exact(w))


def test_repack_refuses_1d_blocks() -> None:
    with pytest.raises(ValueError, match="only 2d tiles"):
        repack(packed(spread((32, 64), seed=1), 1), 0)


def test_transposed_storage_and_transpose_twice() -> None:
    a, b = operands("wgrad", 40, 33, 64)
    columns = MXFP4Tensor(
        codes=b.codes.t().contiguous().t(), scales=b.scales, axis=b.axis, block=b.block, shape=b.shape, clip=b.clip
    )
    assert_is_product(packed_matmul(a, columns, out_dtype=torch.float32, tile=TILE), exact(a), exact(b))
    twice = transpose(transpose(a))
    assert torch.equal(twice.codes, a.codes)
    assert (twice.axis, twice.shape) == (a.axis, a.shape)


def test_operand_of_more_than_2_to_31_bytes() -> None:
    a, b = operands("fprop", 96, 32, 64)
    stride = (1 << 25) + 64
    # Allocated, but never touched outside the 96 rows.
    far = torch.empty(96 * stride, dtype=torch.uint8).as_strided(a.codes.shape, (stride, 1))
    far.copy_(a.codes)
    wide = MXFP4Tensor(codes=far, scales=a.scales, axis=1, block="1d", shape=a.shape, clip="none")
    tile = GemmTile(bm=32, bn=32, bk=32)
    y = packed_matmul(wide, b, out_dtype=torch.float32, tile=tile)
    assert torch.equal(y, packed_matmul(a, b, out_dtype=torch.float32, tile=tile))
    with pytest.raises(ValueError, match=r"stride of 33554496 elements.*Make the tensor contiguous"):
        packed_matmul(wide, b, out_dtype=torch.float32, tile=TILE)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 32, 32), (32, 0, 32), (32, 33, 0)])
def test_empty(m: int, n: int, k: int) -> None:
    y = packed_matmul(*operands("fprop", m, n, k))
    assert y.shape == (m, n)
    assert not y.any()


def test_bad_operands_are_refused_with_the_reason() -> None:
    a, b = operands("fprop", 32, 64, 96)
    with pytest.raises(ValueError, match=r"cannot multiply \(32, 96\) by \(64, 96\)"):
        packed_matmul(a, transpose(b))
    with pytest.raises(ValueError, match="summed over axis 1, but quantised along axis 0; quantise it along that axis"):
        packed_matmul(packed(spread((32, 96), seed=1), 0), b)
    with pytest.raises(ValueError, match=r"quantised along axis 1; repack\(\)"):
        packed_matmul(a, packed(spread((96, 64), seed=1), 1, "2d"))
    with pytest.raises(TypeError, match=r"torch\.float16; ask for torch\.float32 or torch\.bfloat16"):
        packed_matmul(a, b, out_dtype=torch.float16)
    elsewhere = MXFP4Tensor(
        codes=b.codes.to("meta"), scales=b.scales.to("meta"), axis=b.axis, block=b.block, shape=b.shape, clip=b.clip
    )
    with pytest.raises(ValueError, match="different devices: cpu, meta"):
        packed_matmul(a, elsewhere)
    with pytest.raises(ValueError, match="cannot transpose"):
        transpose(packed(spread((32, 2, 2), seed=1), 0))


def test_a_cpu_has_no_matrix_units() -> None:
    assert not has_mx_units(torch.device("cpu"))


def test_without_the_interpreter_a_cpu_is_refused() -> None:
    program = (
        "import torch\n"
        "from engine.formats import OperandOptions, quantise\n"
        "from engine.kernels.gemm import packed_matmul, repack, transpose\n"
        "q = quantise(torch.randn(32, 64), OperandOptions(block='2d'))\n"
        "other = quantise(torch.zeros(32, 64), OperandOptions(block='2d', axis=0))\n"
        "assert repack(q, 0).codes.shape == other.codes.shape\n"
        "packed_matmul(q, transpose(q))\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert "ValueError: the packed GEMM kernels need a GPU" in done.stderr
