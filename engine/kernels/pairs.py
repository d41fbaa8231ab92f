"""Device functions on pairs of neighbouring bfloat16 values, held as one int32 word: the even one is the low half.

A GPU issues instructions at a rate that leaves about 25 of them for a value while memory moves it in and out, so half
an instruction a value is worth having. ``PTX`` is on for NVIDIA GPUs of compute capability 9.0 and later, which compute
on such words; off, the same operations are done on the halves, in fp32. What is rounded here is either exact in
bfloat16 or meant to be rounded to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.numerics import as_float, as_int, block_scale

_ABS = tl.constexpr(0x7FFF7FFF)
_HIGH = tl.constexpr(-(1 << 16))
_ONE_MANTISSA_BIT = tl.constexpr(0xFFC0FFC0 - (1 << 32))


@triton.jit
def pair_of(BITS: tl.constexpr):
    """Return the word of twice the bfloat16 number with these bits."""
    return tl.full((), (BITS | (BITS << 16)) - ((BITS >> 15) << 32), tl.int32)


@triton.jit
def halves(word):
    """Return the low and the high half as fp32."""
    return as_float(word << 16), as_float(word & _HIGH)


@triton.jit
def _rounded_bits(x):
    bits = as_int(x)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def rounded_pair(low, high):
    """Return the word of two fp32 values rounded to nearest, ties to even."""
    return _rounded_bits(low) | (_rounded_bits(high) << 16)


@triton.jit
def upper_halves(low, high, PTX: tl.constexpr):
    """Return the word of the upper 16 bits of two int32 values."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((low >> 16) & 0xFFFF) | (high & _HIGH)


@triton.jit
def mul2(a, b, PTX: tl.constexpr):
    """Multiply."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        a_low, a_high = halves(a)
        b_low, b_high = halves(b)
        return rounded_pair(a_low * b_low, a_high * b_high)


@triton.jit
def fma2(a, b, c, PTX: tl.constexpr):
    """Return a * b + c, where the product is exact, or c is so small beside it that rounding twice is the same."""
    if PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        a_low, a_high = halves(a)
        b_low, b_high = halves(b)
        c_low, c_high = halves(c)
        return rounded_pair(tl.fma(a_low, b_low, c_low), tl.fma(a_high, b_high, c_high))


@triton.jit
def min2(a, b, PTX: tl.constexpr):
    """Return the smaller values; b is not NaN."""
    if PTX:
        return tl.inline_asm_elementwise(
            "min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        a_low, a_high = halves(a)
        b_low, b_high = halves(b)
        return rounded_pair(tl.minimum(a_low, b_low), tl.minimum(a_high, b_high))


@triton.jit
def abs2(a, PTX: tl.constexpr):
    """Return magnitudes; in PTX by floating-point arithmetic, since the logic units have more to do."""
    if PTX:
        return tl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", [a], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return a & _ABS


@triton.jit
def max_magnitude2(a, b, PTX: tl.constexpr):
    """Return the larger of values without a sign, NaN above Inf."""
    if PTX:
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | tl.maximum(a & _HIGH, b & _HIGH)


@triton.jit
def below_one2(a, PTX: tl.constexpr):
    """Return 1.0 where a < 1, else 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "set.lt.bf16x2.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [a, pair_of(0x3F80)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low, high = halves(a)
        return tl.where(low < 1.0, 0x3F80, 0) | tl.where(high < 1.0, 0x3F800000, 0)


@triton.jit
def magnitude2(x):
    """Return |x|."""
    return x & _ABS


@triton.jit
def with_signs2(magnitude, x):
    """Return the magnitudes, whatever their signs, with the signs of x."""
    return (magnitude & _ABS) | (x & ~_ABS)


@triton.jit
def _max2(a, b):
    return max_magnitude2(a, b, True)


@triton.jit
def amax2(magnitude, AXIS: tl.constexpr, PTX: tl.constexpr):
    """Return the largest of each half along an axis, NaN if there is a NaN."""
    if PTX:
        return tl.reduce(magnitude, AXIS, _max2)
    else:
        return tl.max(magnitude & 0xFFFF, axis=AXIS) | tl.max(magnitude & _HIGH, axis=AXIS)


@triton.jit
def both2(word, PTX: tl.constexpr):
    """Return the larger of the halves of magnitudes, twice."""
    return max_magnitude2(word, (word << 16) | (word.to(tl.uint32) >> 16).to(tl.int32), PTX)


@triton.jit
def block_scale2(top, BUMP: tl.constexpr, EMAX: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr):
    """Return (scale code << 7, 1 / scale, scale) of ``numerics.block_scale`` for pairs of amax."""
    if PTX:
        # bfloat16 has the upper 7 bits of the mantissa; the lower ones of the bump decide nothing.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            max.u16x2 t, $3, $4;
            sub.s32 t, t, $4;
            min.u16x2 t, t, $5;
            and.b32 $0, t, 0x7F807F80;
            sub.s32 $1, 0x7F007F00, $0;
            mov.b32 u, 0x00400040;
            max.u16x2 t, $0, u;
            mov.b32 u, 0;
            fma.rn.bf16x2 $2, $3, u, t;
            }""",
            "=&r,=&r,=&r,r,r,r",
            [top, pair_of((EMAX << 7) - (BUMP >> 16)), pair_of(LIMIT << 7)],
            dtype=(tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = halves(top)
        code_low, inverse_low, scale_low = block_scale(low, BUMP, EMAX, LIMIT)
        code_high, inverse_high, scale_high = block_scale(high, BUMP, EMAX, LIMIT)
        code = (code_low >> 16) | code_high
        return code, rounded_pair(inverse_low, inverse_high), rounded_pair(scale_low, scale_high)


@triton.jit
def round_nearest2(a, MBITS: tl.constexpr, EMIN: tl.constexpr, TOP: tl.constexpr, PTX: tl.constexpr):
    """Return the magnitudes of the elements nearest to a >= 0; ``numerics.round_nearest`` with bfloat16's mantissa."""
    MAGIC: tl.constexpr = 0x4340 - (MBITS << 7)  # 1.5 * 2^(7 - MBITS)
    binade = max_magnitude2(a & 0x7F807F80, pair_of((127 + EMIN) << 7), PTX)
    rounded = fma2(binade, pair_of(0x8000 | MAGIC), fma2(binade, pair_of(MAGIC), a, PTX), PTX)
    return min2(rounded, pair_of(TOP), PTX)


@triton.jit
def _folded(a, PTX: tl.constexpr):
    """Return the bits of |a| from 1 on, and below those of 2 - |a|, rounded down."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t, u; abs.f32 t, $1; sub.rm.f32 u, 0f40000000, t; max.f32 $0, t, u; }",
            "=r,r",
            [a],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        a = tl.abs(a)
        below = 2.0 - a
        below = as_float(as_int(below) - (2.0 - below < a).to(tl.int32))
        return as_int(tl.maximum(a, below))


@triton.jit
def _noise_low(word, half, PTX: tl.constexpr):
    """Return r << 8 | half for the low half r of a noise word (all uint32)."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7104;", "=r,r,r", [word, half], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return ((word & 0xFFFF) << 8) | half


@triton.jit
def _noise_high(word, half, PTX: tl.constexpr):
    """Return r << 8 | half for the high half r of a noise word (all uint32)."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7324;", "=r,r,r", [word, half], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return ((word >> 16) << 8) | half


@triton.jit
def round_stochastic2(low, high, a, noise, half, PTX: tl.constexpr):
    """Return E2M1 values whose magnitudes are those to which ``low`` and ``high`` (fp32) are rounded.

    ``a`` is the word of the upper halves of their magnitudes, ``noise`` (uint32) that of their noise bits r, and
    ``half`` the number 128 as an argument of the kernel, see ``engine.kernels.noise.group_noise``. From 1 on,
    ``engine.formats.e2m1.round_stochastic_`` adds n = r << 6 | 32 to the bits of a and keeps one bit of the mantissa.
    Below 1 it rounds up iff a > n / 2^23, or iff the bits of 2 - a plus n stay below those of 2 (or of 1.5 for the
    upper cell): the same addition rounds 2 - a to 2 minus the result. Rounding that difference down, by less than
    its last bit, does not change on which side of n, a whole number of such bits, a is.
    """
    half = half.to(tl.uint32)
    low_bits = _folded(low, PTX) + (_noise_low(noise, half, PTX) >> 2).to(tl.int32)
    high_bits = _folded(high, PTX) + (_noise_high(noise, half, PTX) >> 2).to(tl.int32)
    folded = upper_halves(low_bits, high_bits, PTX) & _ONE_MANTISSA_BIT
    return min2(fma2(below_one2(a, PTX), pair_of(0xC000), folded, PTX), pair_of(0x40C0), PTX)


@triton.jit
def rounded2(
    magnitude,
    inverse,
    noise,
    half,
    SR: tl.constexpr,
    ELEMENT: tl.constexpr,
    TOP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Return elements with the magnitudes, whatever their signs, to which pairs of |x| / scale are rounded."""
    a = mul2(magnitude, inverse, PTX)
    if SR:
        low, high = halves(a)
        return round_stochastic2(low, high, a, noise, half, PTX)
    return round_nearest2(a, ELEMENT[0], ELEMENT[1], TOP, PTX)


@triton.jit
def code_bits2(rounded, EMIN: tl.constexpr, PTX: tl.constexpr):
    """Return the elements' codes without sign, moved up to bit 7 - MBITS of each half; see ``magnitude_bits``."""
    return mul2(magnitude2(rounded), pair_of((1 - EMIN) << 7), PTX)


@triton.jit
def bytes_along(bits, x, keep, PTX: tl.constexpr):
    """Return a byte (uint8) of two E2M1 codes for each word; ``keep`` is -1, or 0 in non-finite blocks.

    In PTX four words make one of four bytes: first their even codes beside each other, then the odd ones above them.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, u, v;
            shr.b32 t, $1, 6;
            shl.b32 s, $2, 2;
            or.b32 t, t, s;
            prmt.b32 s, $5, $6, 0xFBD9;
            and.b32 s, s, 0x08080808;
            or.b32 t, t, s;
            shr.b32 u, $3, 6;
            shl.b32 s, $4, 2;
            or.b32 u, u, s;
            prmt.b32 s, $7, $8, 0xFBD9;
            and.b32 s, s, 0x08080808;
            or.b32 u, u, s;
            prmt.b32 v, t, u, 0x7632;
            prmt.b32 t, t, u, 0x5410;
            shl.b32 v, v, 4;
            or.b32 t, t, v;
            and.b32 $0, t, $9;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [bits, x, keep],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        byte = ((bits >> 6) & 7) | ((bits >> 18) & 0x70) | ((x >> 12) & 8) | ((x >> 24) & 0x80)
        return (byte & keep).to(tl.uint8)


@triton.jit
def bytes_down(even_bits, even_x, odd_bits, odd_x, keep, PTX: tl.constexpr):
    """Return two bytes (uint16), one a column, for words of an even row and the odd row below it; keep as 0xFFFF."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            shl.b32 t, $5, 4;
            or.b32 t, t, $1;
            shr.b32 t, t, 6;
            shl.b32 u, $6, 4;
            or.b32 u, u, $2;
            shr.b32 u, u, 6;
            prmt.b32 t, t, u, 0x6420;
            prmt.b32 u, $3, $4, 0xFDB9;
            and.b32 u, u, 0x08080808;
            or.b32 t, t, u;
            prmt.b32 u, $7, $8, 0xFDB9;
            and.b32 u, u, 0x80808080;
            or.b32 t, t, u;
            prmt.b32 u, $9, $10, 0x6420;
            and.b32 $0, t, u;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r",
            [even_bits, even_x, odd_bits, odd_x, keep],
            dtype=tl.uint16,
            is_pure=True,
            pack=2,
        )
    else:
        t = (even_bits >> 6) | (odd_bits >> 2) | ((even_x >> 12) & 0x80008) | ((odd_x >> 8) & 0x800080)
        t = t & keep
        return ((t & 0xFF) | ((t >> 8) & 0xFF00)).to(tl.uint16)
