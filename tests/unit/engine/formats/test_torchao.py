"""Bit equality with torchao's ``to_mx`` (codes and scales), an independent implementation, where it is an oracle.

Where it is not, the blocks are excluded by name and checked against exact rational arithmetic instead:

* ``scale_zero``: blocks with S = 0. torchao divides by 2^-126 (floor, ceil, even) or flushes (rceil); scales agree.
* ``scale_above_252``: torchao bumps the top binade to S = 253, where 4 * 2^126 is Inf.
* ``rceil_ulps``: fp32 rceil up to 34 ulps above 6 * 2^k, where its ceil(log2(amax / 6)) misses the bump.
* Inf and NaN: the generated data are finite; torchao gives Inf blocks a finite scale, see test_mxfp4.py for ours.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from engine.formats import OperandOptions, ScaleMode, quantise
from tests.unit.engine.formats import rational

MODES: dict[ScaleMode, ScaleCalculationMode] = {
    "floor": ScaleCalculationMode.FLOOR,
    "ceil": ScaleCalculationMode.CEIL,
    "even": ScaleCalculationMode.EVEN,
    "rceil": ScaleCalculationMode.RCEIL,
}
CHUNK_BLOCKS = 1 << 15
CHUNKS = 12
CHECKED_BLOCKS = 16
"""Excluded blocks a chunk, mode and exclusion that are recomputed with fractions."""


def chunk(dtype: torch.dtype, index: int) -> Tensor:
    """Return [blocks, 32] finite values that stress the format, six kinds of blocks, the last half as often.

    Any bit pattern; values within 2^8 of a base exponent that runs through all 254; exact ties and representable
    values; the same ± a few ulps; amaxes at the modes' thresholds ± 40 ulps; subnormals and zeros.
    """
    g = torch.Generator().manual_seed(1000 + index)
    ulp = 1 if dtype is torch.float32 else 1 << 16
    n = CHUNK_BLOCKS

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    kind = torch.arange(n, dtype=torch.int32).unsqueeze(1) % 11 // 2
    base = (torch.arange(n, dtype=torch.int32) // 11 % 254 + 1).unsqueeze(1)
    exponent = (base - integers(0, 9, n, 32)).clamp_min(0)
    mantissa = integers(0, 1 << 23, n, 32)
    short = integers(0, 8, n, 32) << 20  # three mantissa bits hold every value and tie of E2M1 from its binade on
    jitter = integers(-2, 3, n, 32) * ulp
    anywhere = integers(0, 0x7F800000, n, 32)
    spread = (exponent << 23) | mantissa
    ties = (exponent << 23) | short
    near = (ties + jitter).clamp(0, 0x7F7FFFFF)
    thresholds = torch.tensor([0x000000, 0x400000, 0x600000, 0x680000], dtype=torch.int32)
    top = (base << 23) + thresholds[integers(0, 4, n, 1)] + integers(-40, 41, n, 1) * ulp
    edge = torch.minimum((exponent - 1).clamp_min(0) << 23 | mantissa, top.clamp(max=0x7F7FFFFF))
    edge[:, 5] = top[:, 0].clamp(0, 0x7F7FFFFF)
    small = integers(0, 0x01800000, n, 32) >> integers(0, 25, n, 1)  # zero to 2^-124
    bits = torch.zeros(n, 32, dtype=torch.int32)
    for i, candidate in enumerate((anywhere, spread, ties, near, edge, small)):
        bits = torch.where(kind == i, candidate, bits)
    bits = torch.where(integers(0, 16, n, 32) == 0, 0, bits)
    bits[(kind == 4).squeeze(1), 5] = edge[(kind == 4).squeeze(1), 5]
    bits |= integers(0, 2, n, 32) << 31
    if dtype is torch.bfloat16:
        return (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return bits.view(torch.float32)


def assert_exact(x: Tensor, scales: Tensor, codes: Tensor, mode: ScaleMode) -> None:
    """Recompute a few blocks [blocks, 32] with fractions."""
    for row, scale, row_codes in zip(x.double().tolist(), scales.tolist(), codes.tolist(), strict=True):
        magnitudes = [abs(Fraction(v)) for v in row]
        assert scale == rational.scale_codes(max(magnitudes))[mode]
        unit = rational.scale(scale)
        signs = torch.tensor(row, dtype=torch.float64).signbit().tolist()
        expected = [
            rational.round_nearest(m / unit) + 8 * negative for m, negative in zip(magnitudes, signs, strict=True)
        ]
        assert row_codes == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_million_elements_equal_torchao_bit_for_bit(dtype: torch.dtype) -> None:
    compared = dict.fromkeys(MODES, 0)
    excluded: dict[tuple[str, str], int] = {}
    exponents = torch.zeros(256, dtype=torch.bool)
    amax_exponents = torch.zeros(256, dtype=torch.bool)
    for index in range(CHUNKS):
        x = chunk(dtype, index)
        assert x.isfinite().all()
        bits = x.float().view(torch.int32) & 0x7FFFFFFF
        amax_bits = bits.amax(dim=1)
        exponents[(bits >> 23).unique()] = True
        amax_exponents[(amax_bits >> 23).unique()] = True
        for mode, theirs in MODES.items():
            q = quantise(x, OperandOptions(scale_mode=mode))
            scale_e8m0, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, theirs)
            their_scales = scale_e8m0.view(torch.uint8).flatten()
            our_scales = q.scales.flatten()
            exclusions = {"scale_zero": their_scales == 0, "scale_above_252": their_scales > 252}
            skip_scales = exclusions["scale_above_252"]
            if mode == "rceil" and dtype is torch.float32:
                mantissa = amax_bits & 0x7FFFFF
                exclusions["rceil_ulps"] = (mantissa > 0x400000) & (mantissa <= 0x400000 + 34)
                skip_scales = skip_scales | exclusions["rceil_ulps"]
            assert torch.equal(our_scales[~skip_scales], their_scales[~skip_scales]), mode
            keep = ~torch.stack(list(exclusions.values())).any(dim=0)
            assert torch.equal(q.codes[keep], packed.view(torch.uint8)[keep]), mode
            compared[mode] += int(keep.sum()) * 32
            codes = q.unpacked_codes()
            for name, mask in exclusions.items():
                excluded[mode, name] = excluded.get((mode, name), 0) + int(mask.sum())
                chosen = mask.nonzero().flatten()[:CHECKED_BLOCKS]
                assert_exact(x[chosen], our_scales[chosen], codes[chosen], mode)
    # Every exponent of the dtype occurs as a value and as an amax: subnormals, 1..254, none of 255.
    assert exponents[:255].all()
    assert amax_exponents[:255].all()
    assert not exponents[255]
    # Every exclusion occurs where it can, and ten million elements remain besides.
    assert all(count > 0 for (mode, name), count in excluded.items() if (mode, name) != ("floor", "scale_above_252"))
    assert excluded["floor", "scale_above_252"] == 0
    assert min(compared.values()) >= 10_000_000, compared
