"""The quantise kernels in Triton's interpreter equal the reference bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401  (first: it decides how kernels run)
from engine import kernels
from engine.formats import SCALE_MODES, OperandOptions, make_hadamard
from engine.kernels import DeviceHadamard, launch
from tests.helpers.quantise import (
    KEY,
    assert_equals_reference,
    assert_two_equal_reference,
    noise_and_transform,
    same_bits,
    sample,
)

# NumPy, which the interpreter computes with, warns where IEEE arithmetic overflows or meets a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows": ((3, 5, 64), {"axis": -1}),
    "columns": ((64, 72), {"axis": -2}),
    "columns of odd length": ((2, 32, 7), {"axis": 1}),
    "tiles": ((64, 96), {"block": "2d"}),
    "tiles packed down": ((2, 32, 32), {"block": "2d", "axis": -2}),
}
TRANSFORMS = ("none", "random", "fixed", "3rht")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _kernels_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTCTL_KERNELS", "triton")


@pytest.mark.parametrize("rounding", ["rtn", "sr"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", SCALE_MODES)
def test_every_mode_layout_and_rounding(mode: Any, layout: str, rounding: Any) -> None:
    shape, where = LAYOUTS[layout]
    options = OperandOptions(scale_mode=mode, rounding=rounding, **where)
    dtype, other = (DTYPES, DTYPES[::-1])[SCALE_MODES.index(mode) % 2]
    assert_equals_reference(sample(shape, dtype), options, out_dtype=other, row_offset=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", ["none", "static"])
@pytest.mark.parametrize("rounding", ["rtn", "sr"])
@pytest.mark.parametrize("transform", TRANSFORMS[1:])
@pytest.mark.parametrize("axis", [-1, -2])
def test_every_transform(axis: int, transform: Any, rounding: Any, clip: Any, dtype: torch.dtype) -> None:
    options = OperandOptions(axis=axis, hadamard=transform, rounding=rounding, clip=clip)
    assert_equals_reference(sample((64, 96), dtype), options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exponent", [-149, -140, -126, -120, 100, 120, 126])
def test_the_ends_of_the_range(exponent: int, layout: str) -> None:
    shape, where = LAYOUTS[layout]
    for dtype, (rounding, clip) in zip(itertools.cycle(DTYPES), itertools.product(("rtn", "sr"), ("none", "static"))):
        options = OperandOptions(rounding=rounding, clip=clip, scale_mode="ceil", **where)
        assert_equals_reference(sample(shape, dtype, exponent=exponent, seed=exponent + 200), options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bfloat16_value_at_every_scale(dtype: torch.dtype) -> None:
    """All finite bfloat16 bit patterns, once with the amax of their own binade and once below 1 of it."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    x = (bits << 16).view(torch.float32)
    x = x[x.isfinite()].to(torch.bfloat16).to(dtype)
    x = x[: len(x) // 32 * 32]
    assert_equals_reference(x, OperandOptions())
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    assert_equals_reference(shuffled.view(32, -1), OperandOptions(axis=-2, rounding="sr", scale_mode="floor"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_non_finite_blocks_are_nan_and_counted(layout: str, bad: float) -> None:
    shape, where = LAYOUTS[layout]
    for rounding, dtype in itertools.product(("rtn", "sr"), DTYPES):
        x = sample(shape, dtype)
        x.view(-1)[[0, 40, -1]] = bad
        options = OperandOptions(rounding=rounding, clip="static", **where)
        assert_equals_reference(x, options)
        assert kernels.qdq(x, options, **noise_and_transform(options))[1].item() >= 2


def test_a_whole_tensor_of_nan() -> None:
    x = torch.full((64, 64), float("nan"))
    for options in (OperandOptions(), OperandOptions(axis=-2, hadamard="random"), OperandOptions(block="2d")):
        assert_equals_reference(x, options)


def test_thresholds_of_the_modes() -> None:
    """Amax at each mode's threshold and one ulp beside it, over the exponents."""
    exponents = torch.cat([torch.arange(0, 255, 7), torch.arange(0, 5), torch.arange(250, 255)]).to(torch.int32)
    for dtype, ulp in ((torch.float32, 1), (torch.bfloat16, 1 << 16)):
        rows = []
        for mantissa in (0, 0x400000, 0x600000, 0x680000):
            for step in (-1, 0, 1):
                top = ((exponents << 23) + mantissa + step * ulp).clamp(0, 0x7F7FFFFF)
                below = top.unsqueeze(1) - torch.arange(32, dtype=torch.int32) * 0x180000
                rows.append(below.clamp_min(0).view(torch.float32))
        x = torch.cat(rows).to(dtype)
        x[~x.isfinite()] = 0
        for mode in SCALE_MODES:
            assert_equals_reference(x, OperandOptions(scale_mode=mode))


@st.composite
def cases(draw: st.DrawFn) -> tuple[OperandOptions, tuple[int, ...]]:
    tiled = draw(st.booleans())
    ndim = draw(st.integers(2 if tiled else 1, 3))
    axis = draw(st.sampled_from([ndim - 1, ndim - 2] if tiled else list(range(ndim))))
    shape = []
    for dim in range(ndim):
        blocked = dim >= ndim - 2 if tiled else dim == axis
        shape.append(32 * draw(st.integers(0, 3)) if blocked else draw(st.integers(0, 7)))
    options = OperandOptions(
        block="2d" if tiled else "1d",
        axis=draw(st.sampled_from([axis, axis - ndim])),
        scale_mode=draw(st.sampled_from(SCALE_MODES)),
        rounding=draw(st.sampled_from(["rtn", "sr"])),
        hadamard="none" if tiled else draw(st.sampled_from(TRANSFORMS)),
        clip=draw(st.sampled_from(["none", "static"])),
    )
    return options, tuple(shape)


def check_any_case(
    drawn: tuple[OperandOptions, tuple[int, ...]],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    exponent: int,
    bad: float | None,
    row_offset: int,
    tile: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options, shape = drawn
    x = sample(shape, dtype, exponent=exponent, seed=seed)
    if bad is not None and x.numel():
        x.view(-1)[seed % x.numel()] = bad
    monkeypatch.setattr(launch, "INTERPRETER_TILE", launch.Tile(size=tile, num_warps=1))
    assert_equals_reference(x, options, out_dtype=out_dtype, row_offset=row_offset, seed=seed)


ANY_CASE = {
    "drawn": cases(),
    "dtype": st.sampled_from(DTYPES),
    "out_dtype": st.sampled_from(DTYPES),
    "exponent": st.sampled_from([-149, -140, -126, -40, 0, 60, 120, 126]),
    "bad": st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")]),
    "row_offset": st.sampled_from([0, 1, 8, 1 << 20, (1 << 31) + 5, (1 << 40) + 3]),
    "tile": st.sampled_from([32, 64, 256]),
    "seed": st.integers(0, 1000),
}
HYPOTHESIS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    "derandomize": True,
}


@settings(max_examples=40, **HYPOTHESIS)
@given(**ANY_CASE)
def test_any_shape(monkeypatch: pytest.MonkeyPatch, **case: Any) -> None:
    check_any_case(monkeypatch=monkeypatch, **case)


@pytest.mark.soak
@settings(max_examples=3000, **HYPOTHESIS)
@given(**ANY_CASE)
def test_any_shape_for_long(monkeypatch: pytest.MonkeyPatch, **case: Any) -> None:
    check_any_case(monkeypatch=monkeypatch, **case)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_full_product(layout: str) -> None:
    shape, where = LAYOUTS[layout]
    transforms = ("none",) if where.get("block") == "2d" else TRANSFORMS
    product = itertools.product(SCALE_MODES, ("rtn", "sr"), transforms, ("none", "static"), DTYPES, DTYPES)
    for mode, rounding, hadamard, clip, dtype, out_dtype in product:
        options = OperandOptions(scale_mode=mode, rounding=rounding, hadamard=hadamard, clip=clip, **where)
        assert_equals_reference(sample(shape, dtype), options, out_dtype=out_dtype, row_offset=5)


TWO = [
    (OperandOptions(), OperandOptions(axis=-2)),
    (OperandOptions(rounding="sr"), OperandOptions(axis=-2, rounding="sr", hadamard="random")),
    (OperandOptions(scale_mode="uos6", clip="static"), OperandOptions(axis=0, hadamard="3rht", clip="static")),
    (OperandOptions(axis=1, rounding="sr"), OperandOptions(axis=-2, hadamard="fixed", scale_mode="uos")),
    (OperandOptions(hadamard="random"), OperandOptions(axis=-2, rounding="sr")),
    (OperandOptions(block="2d"), OperandOptions(axis=-2, block="2d")),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), TWO)
def test_two_orientations_equal_two_calls(rows: OperandOptions, columns: OperandOptions, dtype: torch.dtype) -> None:
    x = sample((64, 288), dtype)
    x[40, 3], x[2, 200] = float("nan"), float("inf")
    for out_dtype, row_offset in ((None, 0), (DTYPES[dtype is torch.float32], 7)):
        assert_two_equal_reference(x, rows, columns, out_dtype=out_dtype, row_offset=row_offset)


@pytest.mark.parametrize(("size", "columns"), [(32, 96), (64, 96), (128, 2880)])
@pytest.mark.parametrize(
    "options",
    [
        OperandOptions(rounding="sr"),
        OperandOptions(axis=-2, rounding="sr", hadamard="random"),
        OperandOptions(block="2d", rounding="sr", axis=-2),
    ],
)
def test_the_size_of_tiles_changes_nothing(
    size: int, columns: int, options: OperandOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2880 columns, gpt-oss's width, are 22.5 tiles of 128."""
    monkeypatch.setattr(launch, "INTERPRETER_TILE", launch.Tile(size=size, num_warps=1))
    x = sample((32, columns), torch.bfloat16)
    assert_equals_reference(x, options)
    if options.block == "1d" and options.axis == -1 and columns == 96:
        assert_two_equal_reference(x, options, OperandOptions(axis=-2))


def test_counters_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Element 2^35 is the first whose counter has a high word."""
    for options in (OperandOptions(rounding="sr"), OperandOptions(axis=-2, rounding="sr")):
        for row_offset in ((1 << 35) // 64 - 3, (1 << 35) // 64, 1 << 50):
            assert_equals_reference(sample((32, 64), torch.float32), options, row_offset=row_offset)


@pytest.mark.parametrize(("name", "dtype"), [("columns_kernel", torch.float32), ("columns_paired_kernel", DTYPES[1])])
def test_offsets_beyond_31_bits_within_a_block(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 2^26 values and more put 32 rows beyond 2^31; here the 64-bit offsets run on a small matrix."""
    x = sample((32, 96), dtype)
    options = OperandOptions(axis=-2)
    expected, _ = kernels.qdq(x, options)
    calls = []
    kernel = getattr(launch, name)

    class Long:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **constants: Any) -> None:
                calls.append(constants.pop("LONG"))
                kernel[grid](*args, LONG=True, **constants)

            return run

    monkeypatch.setattr(launch, name, Long())
    values, _ = kernels.qdq(x, options)
    assert calls == [False]
    assert same_bits(values, expected)


@pytest.mark.parametrize(
    "options",
    [
        OperandOptions(rounding="sr"),
        OperandOptions(axis=-2, hadamard="random"),
        OperandOptions(block="2d"),
    ],
)
def test_strides_do_not_matter_and_the_input_is_not_changed(options: OperandOptions) -> None:
    base = sample((128, 128), torch.bfloat16)
    for x in (base.t(), base[::2, 64:], base[:, ::2], base[3].expand(64, 128), base.view(128, 2, 64).transpose(0, 1)):
        before = x.clone()
        assert_equals_reference(x, options)
        assert torch.equal(x, before)
    packed = kernels.quantise(base, OperandOptions())
    moved = kernels.dequantise(
        type(packed)(
            codes=packed.codes.t().contiguous().t(),
            scales=packed.scales.t().contiguous().t(),
            axis=packed.axis,
            block=packed.block,
            shape=packed.shape,
            clip=packed.clip,
        ),
        torch.bfloat16,
    )
    assert same_bits(moved, kernels.dequantise(packed, torch.bfloat16))


def test_keys_and_transforms_may_be_tensors() -> None:
    x = sample((64, 96), torch.bfloat16)
    options = OperandOptions(axis=-2, rounding="sr", hadamard="3rht")
    transform = make_hadamard("3rht", seed=3, step=4)
    expected, _ = kernels.qdq(x, options, key=KEY, transform=transform)
    on_device = DeviceHadamard.from_transform(make_hadamard("3rht", seed=0, step=0), "cpu")
    key = torch.tensor([0], dtype=torch.int64)
    first, _ = kernels.qdq(x, options, key=key, transform=on_device)
    key.fill_(KEY - (1 << 64))
    on_device.copy_(transform)
    second, _ = kernels.qdq(x, options, key=key, transform=on_device)
    assert not torch.equal(first, expected)
    assert same_bits(second, expected)
    assert on_device.to_transform() == transform


def test_the_count_is_added_to_a_counter() -> None:
    x = sample((64, 64), torch.float32)
    x[5, 5] = float("inf")
    counter = torch.tensor(10)
    values, returned = kernels.qdq(x, OperandOptions(), counter=counter)
    assert returned is counter
    assert counter.item() == 11
    kernels.qdq_two(x, OperandOptions(), OperandOptions(axis=-2), counter=counter)
    assert counter.item() == 13
    assert values.isnan().sum() == 32
