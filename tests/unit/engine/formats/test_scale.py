"""Scale codes of every mode against exact rational arithmetic and the published tables."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from engine.formats import SCALE_MODES, OperandOptions, dequantise, qdq, quantise, scale_codes
from engine.formats.e8m0 import decode, reciprocal
from engine.recipes import table
from tests.unit.engine.formats import rational

MODES = list(SCALE_MODES)

# n, then b for floor, ceil, rceil, uos6, even, midmax, uos.
GOLDEN = [
    (4.0, (0, 0, 0, 0, 0, 0, 0)),
    (4.03125, (0, 1, 0, 0, 0, 0, 0)),
    (6.0, (0, 1, 0, 1, 0, 0, 0)),
    (6.03125, (0, 1, 1, 1, 0, 0, 0)),
    (7.0, (0, 1, 1, 1, 1, 0, 0)),
    (7.03125, (0, 1, 1, 1, 1, 1, 0)),
    (7.25, (0, 1, 1, 1, 1, 1, 1)),
    (7.28125, (0, 1, 1, 1, 1, 1, 1)),
    (7.7, (0, 1, 1, 1, 1, 1, 1)),
]
GOLDEN_MODES = ("floor", "ceil", "rceil", "uos6", "even", "midmax", "uos")


def block(amax: float, dtype: torch.dtype) -> torch.Tensor:
    x = torch.zeros(32, dtype=dtype)
    x[7] = amax
    return x


def test_the_recipe_table_and_the_formats_name_the_same_modes() -> None:
    assert SCALE_MODES == table.SCALE_MODES


@pytest.mark.parametrize("mode", MODES)
def test_every_positive_finite_bf16_amax_gets_the_exact_code(mode: str) -> None:
    bits = torch.arange(0, 0x7F80, dtype=torch.int16)
    assert len(bits) == 32_640  # zero and every positive finite value
    amax = bits.view(torch.bfloat16)
    expected = [rational.scale_codes(Fraction(value))[mode] for value in amax.double().tolist()]
    assert scale_codes(amax, mode).tolist() == expected
    assert scale_codes(amax.float(), mode).tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_fp32_amax_next_to_the_thresholds_gets_the_exact_code(mode: str) -> None:
    exponents = torch.arange(1, 255, dtype=torch.int32) << 23
    mantissas = [0x000000, 0x400000, 0x600000, 0x680000]  # n = 4, 6, 7, 7.25
    near = torch.cat([exponents + m + ulps for m in mantissas for ulps in (-1, 0, 1)])
    amax = near[near < 0x7F800000].view(torch.float32)
    expected = [rational.scale_codes(Fraction(value))[mode] for value in amax.double().tolist()]
    assert scale_codes(amax, mode).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "expected"), GOLDEN)
def test_golden_table(n: float, expected: tuple[int, ...], dtype: torch.dtype) -> None:
    for power in (-100, -2, 0, 5, 90):
        amax = torch.tensor(n * 2.0**power, dtype=dtype)
        bumps = tuple(int(scale_codes(amax, mode)) - (127 + power) for mode in GOLDEN_MODES)
        assert bumps == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_123_2_becomes_96_under_floor_and_128_under_the_others(dtype: torch.dtype) -> None:
    for mode in MODES:
        values, _ = qdq(block(123.2, dtype), OperandOptions(scale_mode=mode))
        assert values[7].item() == (96.0 if mode == "floor" else 128.0)


# amax, then S for floor, ceil, even, rceil.
EDGES = [
    (0.0, (0, 0, 0, 0)),
    (-0.0, (0, 0, 0, 0)),
    (2.0**-133, (0, 0, 0, 0)),
    (2.0**-127, (0, 0, 0, 0)),
    (2.0**-126, (0, 0, 0, 0)),
    (1.5 * 2.0**-126, (0, 0, 0, 0)),
    (2.0**-125, (0, 0, 0, 0)),
    (1.5078125 * 2.0**-125, (0, 1, 0, 1)),
    (1.75 * 2.0**-125, (0, 1, 1, 1)),
    (2.0**-124, (1, 1, 1, 1)),
    (2.0**127, (252, 252, 252, 252)),
    # Bumping here would make the block's scale 2^126 and its 4.0 the Inf 2^128.
    (1.5078125 * 2.0**127, (252, 252, 252, 252)),
    (torch.finfo(torch.bfloat16).max, (252, 252, 252, 252)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("amax", "expected"), EDGES)
def test_edges_of_the_exponent_range(amax: float, expected: tuple[int, ...], dtype: torch.dtype) -> None:
    for mode, code in zip(("floor", "ceil", "even", "rceil"), expected, strict=True):
        options = OperandOptions(scale_mode=mode)
        assert quantise(block(amax, dtype), options).scales.tolist() == [code]
        values, nonfinite = qdq(block(amax, dtype), options)
        assert nonfinite.item() == 0
        assert values.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_blocks_with_scale_code_0_keep_their_values(mode: str) -> None:
    # Magnitudes up to 6 * 2^-127, half of them fp32 subnormals: flushing or a scale of 2^-126 would change them.
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.9], dtype=torch.float64)
    x = torch.cat([magnitudes, -magnitudes, magnitudes, -magnitudes]) * 2.0**-127
    options = OperandOptions(scale_mode=mode)
    bumped = mode == "ceil"  # amax n = 5.9 > 4
    expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] if not bumped else [0.0, 0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 6.0]
    for dtype in (torch.float32, torch.bfloat16):
        q = quantise(x.to(torch.float32).to(dtype), options)
        assert q.scales.tolist() == [1 if bumped else 0]
        want = torch.tensor([*expected, *(-v for v in expected)] * 2, dtype=torch.float64) * 2.0**-127
        got = dequantise(q, dtype).double()
        assert torch.equal(got, want)
        assert torch.equal(got.signbit(), x.signbit())


def test_e8m0_decodes_every_code_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes)
    assert [Fraction(v) for v in values[:255].double().tolist()] == [Fraction(2) ** (s - 127) for s in range(255)]
    assert values[255].isnan()
    inverse = reciprocal(torch.arange(253, dtype=torch.int32))
    assert [Fraction(v) for v in inverse.double().tolist()] == [Fraction(2) ** (127 - s) for s in range(253)]


def test_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"amax is torch\.float16; expected torch\.float32 or torch\.bfloat16"):
        scale_codes(torch.ones(3, dtype=torch.float16), "even")
