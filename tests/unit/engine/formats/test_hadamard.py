"""Hadamard-32: orthogonality, inverse, the fixed order of operations, and what the draws depend on."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.linalg import hadamard as sylvester
from torch import Tensor

from engine.formats import Hadamard, make_hadamard

KINDS = ("random", "fixed", "3rht")


def sample(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_is_orthogonal(kind: str) -> None:
    h = make_hadamard(kind, seed=3, step=8).matrix()
    assert h.dtype == torch.float64
    assert (h @ h.t() - torch.eye(32, dtype=torch.float64)).abs().max() < 1e-14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, -1, -2, -3])
def test_apply_equals_the_matrix_within_fp32_rounding(kind: str, axis: int) -> None:
    h = make_hadamard(kind, seed=3, step=8)
    x = sample(64, 32, 96)
    y = h.apply(x, axis)
    assert y.dtype == torch.float32
    assert y.shape == x.shape
    blocks = x.double().movedim(axis, -1).unflatten(-1, (-1, 32))
    expected = (blocks @ h.matrix().t()).flatten(-2).movedim(-1, axis)
    # 5 additions and a product a stage, of sums up to √32 times the values.
    bound = len(h.stages) * 6 * 2**-24 * math.sqrt(32) * x.abs().max().item()
    assert (y.double() - expected).abs().max() < bound
    assert (h.apply_transpose(y, axis) - x).abs().max() < 2 * bound


def test_the_fixed_transform_is_sylvesters_for_every_seed_and_step() -> None:
    h = make_hadamard("fixed", seed=1, step=2)
    expected = torch.from_numpy(sylvester(32)).double() / math.sqrt(32)
    assert (h.matrix() - expected).abs().max() < 1e-15
    assert h == make_hadamard("fixed", seed=9, step=9)


@pytest.mark.parametrize("kind", ["random", "3rht"])
def test_draws_depend_on_seed_and_step_and_on_nothing_else(kind: str) -> None:
    draws = {make_hadamard(kind, seed=seed, step=step) for seed in range(4) for step in range(8)}
    assert len(draws) == 32
    assert make_hadamard(kind, seed=2, step=5) in draws
    torch.manual_seed(123)
    assert make_hadamard(kind, seed=2, step=5) == make_hadamard(kind, seed=2, step=5)


def test_the_triple_is_three_independent_stages() -> None:
    h = make_hadamard("3rht", seed=0, step=1)
    assert len(set(h.stages)) == 3
    product = torch.eye(32, dtype=torch.float64)
    for stage in h.stages:
        product = Hadamard(kind="random", stages=(stage,)).matrix() @ product
    assert torch.equal(h.matrix(), product)


def by_the_definition(h: Hadamard, x: list[float], *, transpose: bool) -> list[Tensor]:
    """Transform 32 values one fp32 operation at a time, in the documented order."""
    scale = torch.tensor(1 / math.sqrt(32), dtype=torch.float32)
    values = [torch.tensor(v, dtype=torch.float32) for v in x]
    for stage in h.stages[::-1] if transpose else h.stages:
        z = [values[p] for p in stage.permutation]
        if transpose:
            z = [(value * scale) * sign for value, sign in zip(z, stage.signs, strict=True)]
        for stride in (16, 8, 4, 2, 1) if transpose else (1, 2, 4, 8, 16):
            for i in range(32):
                if not i & stride:
                    z[i], z[i + stride] = z[i] + z[i + stride], z[i] - z[i + stride]
        if not transpose:
            z = [(value * sign) * scale for value, sign in zip(z, stage.signs, strict=True)]
        for p, value in zip(stage.permutation, z, strict=True):
            values[p] = value
    return values


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_operations_is_the_documented_one_bit_for_bit(kind: str, transpose: bool) -> None:
    h = make_hadamard(kind, seed=5, step=6)
    x = sample(4, 32)
    expected = torch.stack([torch.stack(by_the_definition(h, row, transpose=transpose)) for row in x.tolist()])
    along_rows = h.apply_transpose(x, 1) if transpose else h.apply(x, 1)
    along_columns = h.apply_transpose(x.t(), 0) if transpose else h.apply(x.t(), 0)
    assert torch.equal(along_rows, expected)
    assert torch.equal(along_columns, expected.t())


def test_the_transform_cancels_in_a_product_over_the_same_axis() -> None:
    h = make_hadamard("random", seed=0, step=1)
    dy, x = sample(128, 48), sample(128, 80)
    exact = dy.double().t() @ x.double()
    error = h.apply(dy, 0).double().t() @ h.apply(x, 0).double() - exact
    assert error.abs().max() < 1e-5 * exact.abs().max()


def test_an_outlier_is_spread_over_its_block() -> None:
    x = torch.zeros(64)
    x[40] = 32.0
    y = make_hadamard("random", seed=0, step=1).apply(x)
    assert (y[:32] == 0).all()
    assert torch.allclose(y[32:].abs(), torch.full((32,), 32 / math.sqrt(32)))


def test_bfloat16_is_transformed_in_float32() -> None:
    h = make_hadamard("3rht", seed=0, step=1)
    x = sample(64, 64).bfloat16()
    assert torch.equal(h.apply(x), h.apply(x.float()))


def test_an_empty_tensor_stays_empty() -> None:
    assert make_hadamard("random", seed=0, step=1).apply(torch.empty(0, 64)).shape == (0, 64)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"axis 1 of shape \(4, 40\) has 40 values, not a multiple of 32"):
        make_hadamard("random", seed=0, step=1).apply(torch.zeros(4, 40))
    with pytest.raises(ValueError, match="unknown Hadamard kind 'rht'; expected"):
        make_hadamard("rht", seed=0, step=1)  # type: ignore[arg-type]
