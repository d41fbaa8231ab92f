"""Grouped GEMMs in Triton's interpreter and in torch against float64 products, group by group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tests.helpers.triton_interpreter  # noqa: F401  (first: it decides how kernels run)
from engine.kernels.gemm import GemmTile, repack, transpose
from engine.kernels.grouped import PaddedGroups, grouped_matmul, grouped_wgrad, pad_groups
from tests.helpers.gemm import check_rows, check_wgrad, exact, grouped_product, packed, spread

TILE = GemmTile(bm=64, bn=32, bk=64)
SIZES = ([40, 0, 33, 32, 1], [0, 0, 100], [0, 0], [96], [1] * 5, [0, 200, 0])


def layout(sizes: list[int]) -> PaddedGroups:
    return pad_groups(torch.tensor(sizes), num_tokens=sum(sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pad_and_unpad_are_inverse_and_groups_are_whole_blocks(sizes: list[int]) -> None:
    groups = layout(sizes)
    total = sum(sizes)
    assert groups.num_rows == (total + 31 * len(sizes)) // 32 * 32
    assert (groups.ends % 32 == 0).all()
    assert groups.ends.dtype == torch.int32
    assert groups.ends[-1] <= groups.num_rows
    x = torch.arange(1.0, total + 1)[:, None].repeat(1, 3).requires_grad_()
    padded = groups.pad(x)
    assert padded.shape == (groups.num_rows, 3)
    start = token = 0
    for size, end in zip(sizes, groups.ends.tolist(), strict=True):
        assert end - start == (size + 31) // 32 * 32
        assert torch.equal(padded[start : start + size, 0], torch.arange(token + 1.0, token + size + 1))
        assert not padded[start + size : end].any()
        start, token = end, token + size
    assert not padded[start:].any()
    assert torch.equal(groups.unpad(padded), x)
    (groups.unpad(padded) * 2).sum().backward()
    assert x.grad is not None
    assert (x.grad == 2).all()


def test_pad_groups_traces_without_a_graph_break() -> None:
    def through(x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        groups = pad_groups(sizes, num_tokens=len(x))
        return groups.unpad(groups.pad(x)), groups.ends

    sizes = torch.tensor([3, 0, 40])
    x = torch.randn(43, 4)
    compiled = torch.compile(through, fullgraph=True, backend="eager")
    y, ends = compiled(x, sizes)
    assert torch.equal(y, x)
    assert ends.tolist() == [32, 32, 96]


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(RuntimeError, match="do not add up to the 10 tokens"):
        pad_groups(torch.tensor([4, 5]), num_tokens=10)
    with pytest.raises(ValueError, match="sizes must be int32 or int64"):
        pad_groups(torch.tensor([4.0, 5.0]), num_tokens=9)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        pad_groups(torch.tensor([4, 5]), num_tokens=-1)
    groups = layout([4, 5])
    with pytest.raises(ValueError, match="x has 8 rows, the groups hold 9"):
        groups.pad(torch.zeros(8, 2))
    with pytest.raises(ValueError, match="y has 9 rows, expected the 64 padded ones"):
        groups.unpad(torch.zeros(9, 2))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["torch", "triton", "packed"])
def test_three_gemms_of_an_expert_layer(kind: str, sizes: list[int]) -> None:
    groups, experts, n, k = layout(sizes), len(sizes), 64, 96
    x, dy = groups.pad(spread((sum(sizes), k), seed=1)), groups.pad(spread((sum(sizes), n), seed=2))
    w = spread((experts, n, k), seed=3)
    if kind == "packed":
        xq, wq, dyq = packed(x, 1), packed(w, 2, "2d"), packed(dy, 1)
        x_cols, dy_cols = packed(x, 0), packed(dy, 0)
        options = {"out_dtype": torch.float32, "tile": TILE}
        y = grouped_matmul(xq, transpose(wq), groups.ends, **options)
        check_rows(y, exact(xq), exact(wq).transpose(1, 2), groups.ends)
        dx = grouped_matmul(dyq, repack(wq, 1), groups.ends, **options)
        check_rows(dx, exact(dyq), exact(wq), groups.ends)
        dw = grouped_wgrad(transpose(dy_cols), x_cols, groups.ends, **options)
        check_wgrad(dw, exact(dy_cols).t(), exact(x_cols), groups.ends)
    else:
        options = {"impl": kind, "tile": TILE}
        y = grouped_matmul(x, w.transpose(1, 2), groups.ends, **options)
        check_rows(y, x.double(), w.double().transpose(1, 2), groups.ends)
        dx = grouped_matmul(dy, w, groups.ends, **options)
        check_rows(dx, dy.double(), w.double(), groups.ends)
        dw = grouped_wgrad(dy.t(), x, groups.ends, **options)
        check_wgrad(dw, dy.t().double(), x.double(), groups.ends)
    assert y.shape == (groups.num_rows, n)
    assert dx.shape == (groups.num_rows, k)
    assert dw.shape == (experts, n, k)
    assert all(not dw[expert].any() for expert, size in enumerate(sizes) if size == 0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_bfloat16_operands(impl: str) -> None:
    groups = layout([40, 0, 33])
    x = groups.pad(spread((73, 64), seed=1)).bfloat16()
    w = spread((3, 32, 64), seed=2).bfloat16()
    y = grouped_matmul(x, w.transpose(1, 2), groups.ends, impl=impl, tile=TILE)
    assert y.dtype == torch.bfloat16
    product = grouped_product(x.double(), w.double().transpose(1, 2), groups.ends.tolist())
    assert torch.allclose(y.double(), product, rtol=2.0**-7, atol=1e-3 * product.abs().max().item())


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    n=st.integers(1, 40),
    tile=st.sampled_from([GemmTile(bm=32, bn=32, bk=32), GemmTile(bm=128, bn=32, bk=64)]),
)
def test_any_group_sizes(sizes: list[int], n: int, tile: GemmTile) -> None:
    groups = layout(sizes)
    x, dy = groups.pad(spread((sum(sizes), 64), seed=1)), groups.pad(spread((sum(sizes), n), seed=2))
    xq, wq = packed(x, 1), packed(spread((len(sizes), n, 64), seed=3), 2)
    y = grouped_matmul(xq, transpose(wq), groups.ends, out_dtype=torch.float32, tile=tile)
    check_rows(y, exact(xq), exact(wq).transpose(1, 2), groups.ends)
    x_cols, dy_cols = packed(x, 0), packed(dy, 0)
    dw = grouped_wgrad(transpose(dy_cols), x_cols, groups.ends, out_dtype=torch.float32, tile=tile)
    check_wgrad(dw, exact(dy_cols).t(), exact(x_cols), groups.ends)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_behind_the_last_group_do_not_count(impl: str) -> None:
    """What pads the batch (here NaN) reaches no output."""
    ends = torch.tensor([32, 64], dtype=torch.int32)
    x, dy, w = spread((128, 32), seed=1), spread((128, 64), seed=2), spread((2, 64, 32), seed=3)
    x[64:], dy[64:] = float("nan"), float("nan")
    y = grouped_matmul(x, w.transpose(1, 2), ends, impl=impl, tile=TILE)
    assert not y[64:].any()
    assert y[:64].isfinite().all()
    assert grouped_wgrad(dy.t(), x, ends, impl=impl, tile=TILE).isfinite().all()


def test_bad_input_is_refused_with_the_reason() -> None:
    x, w, ends = torch.randn(64, 32), torch.randn(2, 32, 48), torch.tensor([32, 64], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected \[R, K\] and \[E, K, N\]"):
        grouped_matmul(x, w.transpose(1, 2), ends)
    with pytest.raises(ValueError, match=r"expected \[N, R\] and \[R, K\]"):
        grouped_wgrad(x, x, ends)
    with pytest.raises(ValueError, match="ends must be int32"):
        grouped_matmul(x, w, ends.long())
    with pytest.raises(ValueError, match="ends names 1 groups, the weights hold 2 experts"):
        grouped_matmul(x, w, ends[:1])
    with pytest.raises(ValueError, match="ends is on meta"):
        grouped_matmul(x, w, ends.to("meta"))
    with pytest.raises(TypeError, match=r"torch\.float32 and torch\.bfloat16"):
        grouped_matmul(x, w.bfloat16(), ends)
    with pytest.raises(TypeError, match=r"torch\.float16; ask for"):
        grouped_matmul(x, w, ends, out_dtype=torch.float16)
    with pytest.raises(TypeError, match="one operand is packed and the other plain"):
        grouped_matmul(packed(x, 1), w, ends)
    with pytest.raises(ValueError, match="torch has no grouped GEMM for packed"):
        grouped_matmul(packed(x, 1), packed(w, 1), ends, impl="torch")


@pytest.mark.parametrize(("rows", "k", "n"), [(0, 32, 8), (64, 0, 8), (64, 32, 0)])
def test_empty(rows: int, k: int, n: int) -> None:
    ends = torch.tensor([0, rows], dtype=torch.int32)
    y = grouped_matmul(torch.randn(rows, k), torch.randn(2, k, n), ends)
    assert y.shape == (rows, n)
    assert not y.any()
    assert grouped_wgrad(torch.randn(n, rows), torch.randn(rows, k), ends).shape == (2, n, k)
