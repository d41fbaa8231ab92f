"""The kernels with E4M3 and E5M2 elements in Triton's interpreter equal the reference bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401  (first: it decides how kernels run)
from engine.formats import mxfp8
from engine.formats.mxfp8 import MXFP8Options
from tests.helpers.quantise import assert_mxfp8_equals_reference, assert_mxfp8_two_equal_reference, sample

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _kernels_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTCTL_KERNELS", "triton")


@pytest.mark.parametrize("mode", mxfp8.SCALE_MODES)
@pytest.mark.parametrize("element", mxfp8.ELEMENTS)
def test_every_mode_and_layout(element: Any, mode: Any) -> None:
    for (shape, where), dtype in itertools.product(
        (
            ((3, 5, 64), {"axis": -1}),
            ((64, 40), {"axis": -2}),
            ((2, 32, 7), {"axis": 1}),
            ((64, 96), {"block": "2d"}),
            ((2, 32, 32), {"block": "2d", "axis": -2}),
        ),
        DTYPES,
    ):
        options = MXFP8Options(element=element, scale_mode=mode, **where)
        other = DTYPES[dtype is torch.float32]
        assert_mxfp8_equals_reference(sample(shape, dtype), options, out_dtype=other)


@pytest.mark.parametrize("exponent", [-149, -140, -126, -120, 100, 120, 126])
@pytest.mark.parametrize("element", mxfp8.ELEMENTS)
def test_the_ends_of_the_range(element: Any, exponent: int) -> None:
    for dtype, axis in itertools.product(DTYPES, (-1, -2)):
        options = MXFP8Options(element=element, scale_mode="ceil", axis=axis)
        x = sample((64, 64), dtype, exponent=exponent)
        assert_mxfp8_equals_reference(x, options)


@pytest.mark.parametrize("element", mxfp8.ELEMENTS)
def test_every_element_and_tie(element: Any) -> None:
    """All values with one mantissa bit more than the format's, down to below its smallest, under one scale."""
    steps = torch.arange(0, 1 << 7, dtype=torch.float64)
    exponents = torch.arange(-20.0, 16.0, dtype=torch.float64)
    x = ((1 + steps / 128) * torch.exp2(exponents)[:, None]).flatten()
    x = x[x <= mxfp8.TOP[element]].float()
    x = torch.cat([x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(1e9)).clamp_max(mxfp8.TOP[element])])
    blocks = torch.full((len(x), 32), 0.0)
    blocks[:, 0] = mxfp8.TOP[element]
    blocks[:, 5], blocks[:, 6] = x, -x
    assert_mxfp8_equals_reference(blocks, MXFP8Options(element=element))


def test_non_finite_blocks() -> None:
    x = sample((64, 64), torch.float32)
    x[3, 5], x[40, 2], x[41, 60] = float("nan"), float("inf"), float("-inf")
    for element, where in itertools.product(mxfp8.ELEMENTS, ({"axis": -1}, {"axis": -2}, {"block": "2d"})):
        assert_mxfp8_equals_reference(x, MXFP8Options(element=element, **where))


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    element=st.sampled_from(mxfp8.ELEMENTS),
    mode=st.sampled_from(mxfp8.SCALE_MODES),
    block=st.sampled_from(["1d", "2d"]),
    blocks=st.integers(0, 4),
    other=st.integers(0, 9),
    axis=st.sampled_from([-1, -2]),
    dtype=st.sampled_from(DTYPES),
    exponent=st.sampled_from([-149, -30, 0, 90, 126]),
)
def test_any_shape(
    element: Any, mode: Any, block: Any, blocks: int, other: int, axis: int, dtype: torch.dtype, exponent: int
) -> None:
    shape = [2, 32 * other, 32 * blocks] if block == "2d" else [2, 32 * blocks, other]
    options = MXFP8Options(element=element, scale_mode=mode, block=block, axis=axis)
    if block == "1d" and axis == -1:
        shape = [2, other, 32 * blocks]
    assert_mxfp8_equals_reference(sample(tuple(shape), dtype, exponent=exponent), options)


@pytest.mark.parametrize("element", mxfp8.ELEMENTS)
def test_two_orientations(element: Any) -> None:
    x = sample((64, 288), torch.bfloat16)
    x[5, 5] = float("nan")
    for block in ("1d", "2d"):
        rows = MXFP8Options(element=element, block=block)
        columns = MXFP8Options(element=element, block=block, axis=-2, scale_mode="even")
        assert_mxfp8_two_equal_reference(x, rows, columns)
