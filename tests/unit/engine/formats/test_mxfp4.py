"""Quantise, dequantise and QDQ as a whole: layouts, agreement, chunks, noise by element, bad values, bad calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.formats import (
    SCALE_MODES,
    MXFP4Tensor,
    OperandOptions,
    dequantise,
    make_hadamard,
    mxfp4,
    noise16,
    qdq,
    quantise,
)
from engine.strict import ConfigError

KEY = 0xFEDCBA9876543210


def sample(*shape: int, seed: int = 6) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(options: OperandOptions, row_offset: int = 0) -> dict[str, Any]:
    """Return the key and the transform that the options call for."""
    kind = options.hadamard
    return {
        "key": KEY if options.rounding == "sr" else None,
        "transform": make_hadamard(kind, seed=1, step=2) if kind != "none" else None,
        "row_offset": row_offset,
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit, any NaN equal to any NaN."""
    nan = a.isnan()
    words = torch.int32 if a.dtype is torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(nan, b.isnan()) and torch.equal(a.view(words)[~nan], b.view(words)[~nan])


@st.composite
def options_and_shapes(draw: st.DrawFn) -> tuple[OperandOptions, tuple[int, ...]]:
    tiled = draw(st.booleans())
    ndim = draw(st.integers(2 if tiled else 1, 4))
    axis = draw(st.sampled_from([ndim - 1, ndim - 2] if tiled else list(range(ndim))))
    shape = []
    for dim in range(ndim):
        blocked = dim >= ndim - 2 if tiled else dim == axis
        shape.append(32 * draw(st.integers(0, 3)) if blocked else draw(st.integers(0, 5)))
    options = OperandOptions(
        block="2d" if tiled else "1d",
        axis=draw(st.sampled_from([axis, axis - ndim])),
        scale_mode=draw(st.sampled_from(SCALE_MODES)),
        rounding=draw(st.sampled_from(["rtn", "sr"])),
        hadamard="none" if tiled else draw(st.sampled_from(["none", "random", "fixed", "3rht"])),
        clip=draw(st.sampled_from(["none", "static"])),
    )
    return options, tuple(shape)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    drawn=options_and_shapes(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    exponent=st.sampled_from([-149, -140, -126, -40, 0, 60, 120, 127]),
    bad=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
    row_offset=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_qdq_equals_dequantised_quantised(
    drawn: tuple[OperandOptions, tuple[int, ...]],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    exponent: int,
    bad: float | None,
    row_offset: int,
    seed: int,
) -> None:
    options, shape = drawn
    x = (sample(*shape, seed=seed).double() * 2.0**exponent).float().to(dtype)
    if bad is not None and x.numel():
        x.view(-1)[seed % x.numel()] = bad
    kwargs = arguments(options, row_offset)
    values, nonfinite = qdq(x, options, out_dtype=out_dtype, **kwargs)
    q = quantise(x, options, **kwargs)
    assert values.shape == x.shape
    assert values.dtype == out_dtype
    assert values.is_contiguous()
    assert nonfinite.dtype == torch.int64
    assert nonfinite.shape == ()
    assert same_bits(values, dequantise(q, out_dtype))
    assert nonfinite.item() == q.nonfinite_blocks.item()
    if bad is not None and x.numel():
        assert nonfinite.item() >= 1
    if bad is None and x.isfinite().all() and options.hadamard == "none":
        assert nonfinite.item() == 0
        assert values.isfinite().all()
    assert q.shape == x.shape
    assert q.axis == options.axis % x.ndim
    assert q.codes.shape == tuple(size // 2 if dim == q.axis else size for dim, size in enumerate(shape))
    blocked = (x.ndim - 2, x.ndim - 1) if options.block == "2d" else (q.axis,)
    assert q.scales.shape == tuple(size // 32 if dim in blocked else size for dim, size in enumerate(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_along_any_axis_are_those_of_the_last_axis_moved(dtype: torch.dtype) -> None:
    x = sample(64, 96, 32).to(dtype)
    for axis in (0, 1, 2, -1, -2, -3):
        options = OperandOptions(axis=axis)
        values, _ = qdq(x, options)
        moved, _ = qdq(x.movedim(axis, -1), OperandOptions())
        assert torch.equal(values, moved.movedim(-1, axis))
        assert torch.equal(
            quantise(x, options).scales.movedim(axis, -1), quantise(x.movedim(axis, -1), OperandOptions()).scales
        )


def test_2d_codes_and_scales_serve_both_orientations() -> None:
    x = sample(96, 64)
    by_rows = quantise(x, OperandOptions(block="2d", axis=-1))
    by_columns = quantise(x, OperandOptions(block="2d", axis=-2))
    transposed = quantise(x.t(), OperandOptions(block="2d", axis=-1))
    assert by_rows.codes.shape == (96, 32)
    assert by_columns.codes.shape == (48, 64)
    assert torch.equal(by_rows.unpacked_codes(), by_columns.unpacked_codes())
    assert torch.equal(by_columns.codes, transposed.codes.t())
    assert torch.equal(by_rows.scales, by_columns.scales)
    assert torch.equal(by_rows.scales, transposed.scales.t())
    amax = x.abs().view(3, 32, 2, 32).amax(dim=(1, 3))
    one = quantise(amax.flatten().repeat_interleave(32), OperandOptions())
    assert torch.equal(by_rows.scales.flatten(), one.scales)


def test_tiles_of_experts_are_those_of_each_matrix() -> None:
    x = sample(3, 64, 96)
    for options in (OperandOptions(block="2d"), OperandOptions(axis=-2), OperandOptions(axis=-1)):
        whole, _ = qdq(x, options)
        assert torch.equal(whole, torch.stack([qdq(matrix, options)[0] for matrix in x]))


def test_values_share_the_grid_of_their_blocks_scale() -> None:
    x = sample(64, 64)
    q = quantise(x, OperandOptions(axis=-2))
    units = torch.exp2(q.scales.double() - 127).repeat_interleave(32, dim=0)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    quotients = dequantise(q, torch.float32).double().abs() / units
    assert torch.isin(quotients, grid).all()
    assert len(quotients.unique()) == 8


@pytest.mark.parametrize("chunk", [1, 32, 5000, 1 << 30])
@pytest.mark.parametrize(
    "options",
    [
        OperandOptions(rounding="sr"),
        OperandOptions(axis=-2, rounding="sr", hadamard="random"),
        OperandOptions(block="2d", rounding="sr"),
        OperandOptions(axis=-2, hadamard="3rht", clip="static"),
    ],
)
def test_the_size_of_the_working_chunks_changes_nothing(
    chunk: int, options: OperandOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = sample(128, 96)
    expected, _ = qdq(x, options, **arguments(options))
    monkeypatch.setattr(mxfp4, "_CPU_CHUNK", chunk)
    values, _ = qdq(x, options, **arguments(options))
    assert torch.equal(values, expected)
    assert torch.equal(dequantise(quantise(x, options, **arguments(options)), x.dtype), expected)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("rows", [32, 64, 96])
def test_chunks_of_rows_with_their_offset_draw_the_noise_of_the_whole(axis: int, rows: int) -> None:
    x = sample(192, 64)
    options = OperandOptions(axis=axis, rounding="sr")
    whole, _ = qdq(x, options, key=KEY, row_offset=7)
    parts = [qdq(x[i : i + rows], options, key=KEY, row_offset=7 + i)[0] for i in range(0, 192, rows)]
    assert torch.equal(whole, torch.cat(parts))
    shifted, _ = qdq(x, options, key=KEY)
    assert not torch.equal(whole, shifted)


def test_the_noise_belongs_to_the_element_whatever_the_quantised_axis_or_block() -> None:
    # All amaxes are 4 and all scales 1, so each element is 1/4 or 0 rounded by its own noise, in every layout.
    x = torch.full((64, 96), 0.25)
    x[torch.arange(64), torch.arange(64) % 32] = 4.0
    x[torch.arange(64), torch.arange(64) % 32 + 32] = 4.0
    x[torch.arange(64), torch.arange(64) % 32 + 64] = 4.0
    noise = noise16(KEY, (64, 96), row_offset=5)
    expected = torch.where(x == 4.0, 4.0, torch.where(noise < 32768, 0.5, 0.0))
    for options in (
        OperandOptions(axis=-1, rounding="sr"),
        OperandOptions(axis=-2, rounding="sr"),
        OperandOptions(block="2d", rounding="sr"),
    ):
        values, _ = qdq(x, options, key=KEY, row_offset=5)
        assert torch.equal(values, expected)
    batched, _ = qdq(x.view(2, 32, 96), OperandOptions(rounding="sr"), key=KEY, row_offset=5)
    assert torch.equal(batched.view(64, 96), expected)
    strided, _ = qdq(x.t().contiguous().t(), OperandOptions(rounding="sr"), key=KEY, row_offset=5)
    assert torch.equal(strided, expected)


@pytest.mark.parametrize(
    "options",
    [
        OperandOptions(),
        OperandOptions(axis=-2, rounding="sr"),
        OperandOptions(block="2d"),
        OperandOptions(axis=-2, hadamard="random"),
        OperandOptions(axis=-1, hadamard="random", rounding="sr"),
        OperandOptions(clip="static"),
    ],
)
def test_strides_do_not_matter_and_the_input_is_not_changed(options: OperandOptions) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = sample(128, 128).to(dtype)
        for x in (
            base.t(),
            base[::2, 64:],
            base[:, ::2],
            base[3].expand(64, 128),
            base.view(128, 2, 64).transpose(0, 1),
        ):
            before = x.clone()
            expected, _ = qdq(x.contiguous(), options, **arguments(options))
            values, _ = qdq(x, options, **arguments(options))
            assert torch.equal(values, expected)
            assert torch.equal(dequantise(quantise(x, options, **arguments(options)), dtype), expected)
            assert torch.equal(x, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rounding", ["rtn", "sr"])
@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_block_becomes_nan_and_is_counted(
    bad: float, rounding: str, mode: str, dtype: torch.dtype
) -> None:
    x = sample(64, 96).to(dtype)
    x[3, 40] = x[40, 0] = bad
    for block, axis, region in (
        ("1d", -1, (3, slice(32, 64))),
        ("1d", -2, (slice(0, 32), 40)),
        ("2d", -1, (slice(0, 32), slice(32, 64))),
    ):
        options = OperandOptions(block=block, axis=axis, scale_mode=mode, rounding=rounding)
        clean, none = qdq(x.nan_to_num(0, 0, 0), options, **arguments(options))
        values, nonfinite = qdq(x, options, **arguments(options))
        assert none.item() == 0
        assert nonfinite.item() == 2
        assert values[region].isnan().all()
        assert values.isnan().sum() == 2 * values[region].numel()
        finite = ~values.isnan()
        assert torch.equal(values[finite], clean[finite])
        q = quantise(x, options, **arguments(options))
        assert (q.scales == 255).sum() == 2
        assert (q.unpacked_codes()[~finite] == 0).all()


def test_the_largest_finite_values_stay_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((2, 32), torch.finfo(dtype).max, dtype=dtype)
        x[1] *= -1
        for mode in SCALE_MODES:
            for rounding in ("rtn", "sr"):
                for clip in ("none", "static"):
                    options = OperandOptions(scale_mode=mode, rounding=rounding, clip=clip)
                    values, nonfinite = qdq(x, options, **arguments(options))
                    assert nonfinite.item() == 0
                    largest = 1.5 * 2.0**127 if clip == "none" else torch.finfo(dtype).max
                    assert torch.equal(values.double(), x.double().sign() * largest)


def test_static_clip_scales_before_rounding_and_after_it() -> None:
    x = sample(64, 64)
    options = OperandOptions(clip="static", scale_mode="floor")
    plain = quantise(x, OperandOptions(scale_mode="floor"))
    q = quantise(x, options)
    assert torch.equal(q.scales, plain.scales)  # of the unclipped block
    unit = torch.exp2(q.scales.float() - 127).repeat_interleave(32, dim=1)
    # With the scale's amax kept, rounding 3/4·x on the same grid is what a block of 3/4·x with that amax would give.
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = (x * 0.75).abs() / unit
    distance, nearest = (scaled.unsqueeze(-1) - grid).abs().min(dim=-1)
    assert ((scaled.unsqueeze(-1) - grid).abs() == distance.unsqueeze(-1)).sum() == x.numel()  # no ties in this sample
    expected = grid[nearest] * unit * x.sign() * torch.tensor(4.0 / 3.0)
    assert torch.equal(dequantise(q, torch.float32), expected)
    assert torch.equal(dequantise(q, torch.bfloat16), expected.bfloat16())


def test_the_hadamard_is_applied_before_quantisation_and_left_to_the_gemm_to_cancel() -> None:
    x = sample(64, 48)
    h = make_hadamard("random", seed=1, step=2)
    transformed, _ = qdq(h.apply(x, -2), OperandOptions(axis=-2))
    values, _ = qdq(x, OperandOptions(axis=-2, hadamard="random"), transform=h)
    assert torch.equal(values, transformed)
    y = sample(64, 40, seed=7)
    product = values.t() @ qdq(y, OperandOptions(axis=-2, hadamard="random"), transform=h)[0]
    exact = x.t() @ y
    assert (product - exact).norm() < 0.25 * exact.norm()


def test_bfloat16_and_float32_of_the_same_values_agree() -> None:
    x = sample(64, 64).bfloat16()
    for options in (OperandOptions(), OperandOptions(rounding="sr"), OperandOptions(axis=-2, hadamard="3rht")):
        a, b = quantise(x, options, **arguments(options)), quantise(x.float(), options, **arguments(options))
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)


def test_results_carry_no_gradient() -> None:
    x = sample(32, 32).requires_grad_()
    values, _ = qdq(x, OperandOptions())
    assert not values.requires_grad
    assert not quantise(x, OperandOptions()).codes.requires_grad


BAD_CALLS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (
        torch.zeros(32, dtype=torch.float16),
        {},
        TypeError,
        r"cannot quantise torch\.float16: convert the tensor to torch\.float32",
    ),
    (torch.zeros(32, dtype=torch.int64), {}, TypeError, r"cannot quantise torch\.int64"),
    (torch.zeros(4, 40), {}, ValueError, r"axis 1 of shape \(4, 40\) has 40 values, not a multiple of 32: 32 values"),
    (torch.zeros(4, 64), {"options": OperandOptions(axis=-2)}, ValueError, r"axis 0 of shape \(4, 64\) has 4 values"),
    (
        torch.zeros(4, 64),
        {"options": OperandOptions(block="2d")},
        ValueError,
        r"axis 0 of shape \(4, 64\) has 4 values",
    ),
    (
        torch.zeros(64),
        {"options": OperandOptions(block="2d")},
        ValueError,
        "2d blocks need the axis among the last two",
    ),
    (
        torch.zeros(32, 64, 64),
        {"options": OperandOptions(block="2d", axis=0)},
        ValueError,
        r"got axis 0 of shape \(32, 64, 64\)",
    ),
    (torch.zeros(64), {"options": OperandOptions(axis=1)}, ValueError, r"axis 1 is out of range .* shape \(64,\)"),
    (torch.tensor(1.0), {}, ValueError, r"axis -1 is out of range .* shape \(\)"),
    (torch.zeros(32), {"options": OperandOptions(rounding="sr")}, ValueError, "rounding 'sr' needs a key; pass key="),
    (torch.zeros(32), {"key": 5}, ValueError, "a key was given, but rounding 'rtn' draws no noise"),
    (
        torch.zeros(32),
        {"options": OperandOptions(rounding="sr"), "key": -1, "row_offset": -2},
        ValueError,
        r"key -1 is not in 0\.\.2\^64 - 1; row_offset -2 is negative",
    ),
    (
        torch.zeros(32),
        {"options": OperandOptions(hadamard="random")},
        ValueError,
        "hadamard 'random' was asked for, but the transform given is 'none'; pass the one of make_hadamard",
    ),
    (
        torch.zeros(32),
        {"transform": make_hadamard("fixed", seed=0, step=0)},
        ValueError,
        "but the transform given is 'fixed'",
    ),
]


@pytest.mark.parametrize(("x", "arguments", "error", "message"), BAD_CALLS)
@pytest.mark.parametrize("function", [qdq, quantise])
def test_a_bad_call_says_what_is_wrong(
    x: Tensor, arguments: dict[str, Any], error: type[Exception], message: str, function: Any
) -> None:
    kwargs = {"options": OperandOptions(), **arguments}
    with pytest.raises(error, match=message):
        function(x, **kwargs)


def test_another_output_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot dequantise to torch\.float16"):
        qdq(torch.zeros(32), OperandOptions(), out_dtype=torch.float16)
    q: MXFP4Tensor = quantise(torch.zeros(32), OperandOptions())
    with pytest.raises(TypeError, match=r"cannot dequantise to torch\.float64"):
        dequantise(q, torch.float64)


def test_unknown_options_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        OperandOptions(block="3d", scale_mode="midmaxx", rounding="rne", hadamard="rht", clip="dynamic", axis="last")  # type: ignore[arg-type]
    assert [problem.dotted for problem in caught.value.problems] == [
        "block",
        "scale_mode",
        "rounding",
        "hadamard",
        "clip",
        "axis",
    ]
    assert '\'midmaxx\' is not one of "floor", "ceil"' in str(caught.value)
    assert 'did you mean "midmax"?' in str(caught.value)


def test_a_hadamard_on_2d_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'random' does not go with block '2d'"):
        OperandOptions(block="2d", hadamard="random")
