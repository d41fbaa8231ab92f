"""Device functions of the quantise kernels: scales, rounding and codes, equal bit for bit to ``engine.formats``.

The kernels work on |x| and put the sign back at the end. Every ``tl.fma`` here has an exact product, so that it is one
addition however it is compiled, and no division, logarithm or float-to-integer conversion is used: on a GPU those run
at a fraction of the rate of additions, and the kernels are meant to wait for memory only.

A format is given by three constants of its elements: ``MBITS`` mantissa bits, ``EMIN`` the exponent of the smallest
normal value, and ``TOP`` the largest magnitude (E2M1: 1, 0, 6; E4M3: 3, -6, 448; E5M2: 2, -14, 57344).
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""True when Triton runs kernels in its interpreter (TRITON_INTERPRET=1), on CPU tensors."""

_EXPONENT = tl.constexpr(0x7F800000)
_INF = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-(1 << 31))
_ONE_MANTISSA_BIT = tl.constexpr(~0x3FFFFF)
_CLIP_IN = tl.constexpr(0.75)
_CLIP_OUT = tl.constexpr(1.3333333730697632)  # fp32(4/3)


@triton.jit
def as_int(x):
    """Return the bits of fp32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """Return the fp32 values of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """Return float32 or bfloat16 values as float32; Triton 3.6's interpreter mishandles subnormal bfloat16."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return as_float(x.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return fp32 values in ``dtype``, rounded to nearest, ties to even (which the interpreter does not do)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = as_int(x)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16) & 0xFFFF
        rounded = tl.where((bits & 0x7FFFFFFF) > _INF, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x, AXIS: tl.constexpr):
    """Return the largest magnitude of fp32 values along an axis; NaN if there is a NaN."""
    if INTERPRETED:  # its own maximum ignores NaN; as integers, NaN > Inf > the finite
        return as_float(tl.max(as_int(x) & 0x7FFFFFFF, axis=AXIS))
    return tl.reduce(tl.abs(x), AXIS, _max_nan)


@triton.jit
def block_scale(top, BUMP: tl.constexpr, EMAX: tl.constexpr, LIMIT: tl.constexpr):
    """Return (scale code << 23, 1 / scale, scale) for the amax ``top`` of blocks; see ``engine.formats.scale``.

    ``BUMP`` is the mode's constant, ``EMAX`` the exponent of the format's largest power of two and ``LIMIT`` the
    largest code of a finite block. Where top is Inf or NaN, the scale is NaN and the code that of a finite block.
    """
    bits = as_int(top)
    code = tl.minimum(tl.maximum(bits + (BUMP - (EMAX << 23)), 0), LIMIT << 23) & _EXPONENT
    inverse = as_float(0x7F000000 - code)
    scale = as_float(tl.maximum(code, 0x400000))  # code 0 is 2^-127, a subnormal
    return code, inverse, tl.fma(top, 0.0, scale)


@triton.jit
def scale_byte(code, top):
    """Return the E8M0 byte of :func:`block_scale`'s code: 255 where the amax ``top`` is not finite."""
    return tl.where(as_int(top) >= _INF, 255, code >> 23).to(tl.uint8)


@triton.jit
def round_nearest(a, MBITS: tl.constexpr, EMIN: tl.constexpr):
    """Round a >= 0 to the nearest multiple of an element's spacing there, ties to the even code.

    The spacing at a is a power of two, 2^(max(exponent, EMIN) - MBITS); adding and subtracting 1.5 * 2^23 of them
    makes the fp32 adder round.
    """
    MAGIC: tl.constexpr = 1.5 * 2.0 ** (23 - MBITS)
    SMALLEST: tl.constexpr = (127 + EMIN) << 23
    binade = as_float(tl.maximum(as_int(a) & _EXPONENT, SMALLEST))
    return tl.fma(binade, -MAGIC, tl.fma(binade, MAGIC, a))


@triton.jit
def round_stochastic_doubled(a, noise):
    """Return twice the E2M1 magnitude to which a >= 0 is rounded under ``noise`` = (r << 6 | 32), r of 16 bits.

    Both rules of ``engine.formats.e2m1.round_stochastic_`` at once, the one
    below 1 from the signs of d and d - 1/2, where d = a - (r + 1/2) / 2^17 for a < 1:

        r(a) = [d > 1/2] * above(max(a, 1)) + ([d > 0] - [d > 1/2]) / 2

    From a = 1 on both brackets are 1; below, above() is 1. A difference of two fp32 values that is positive here is at
    least 2^-41, so a product clamped to [0, 1] is the bracket, and a GPU clamps for free. The noise as it stands is a
    subnormal fp32 number, r + 1/2 in units of 2^-143.
    """
    low = tl.clamp(a, 0.0, 1.0)
    a = tl.minimum(a, 6.0)
    d = tl.fma(as_float(noise), -(2.0**126), low)
    positive = tl.clamp(d * 2.0**50, 0.0, 1.0)
    above_half = tl.clamp(tl.fma(d, 2.0**50, -(2.0**49)), 0.0, 1.0)
    doubled = tl.fma(a - low, 2.0, 2.0)  # 2 max(a, 1)
    above = as_float((as_int(doubled) + noise) & _ONE_MANTISSA_BIT)
    return tl.fma(above, above_half, positive - above_half)


@triton.jit
def quantise_magnitude(x, inverse, noise, SR: tl.constexpr, CLIP: tl.constexpr, FORMAT: tl.constexpr):
    """Return the rounded element of |x| / scale: its magnitude, twice that for SR."""
    a = tl.abs(x)
    if CLIP:
        a = a * _CLIP_IN
    a = a * inverse
    if SR:
        return round_stochastic_doubled(a, noise)
    return round_nearest(tl.minimum(a, FORMAT[2]), FORMAT[0], FORMAT[1])


@triton.jit
def with_sign(magnitude, x):
    """Return fp32 values >= 0 with the signs of x."""
    return as_float(as_int(magnitude) | (as_int(x) & _SIGN))


@triton.jit
def scaled(rounded, scale, SR: tl.constexpr, CLIP: tl.constexpr, LIMIT: tl.constexpr):
    """Return the dequantised magnitude of :func:`quantise_magnitude`'s result; ``LIMIT`` caps it under static clip."""
    value = rounded * (scale * 0.5 if SR else scale)
    if CLIP:
        value = tl.minimum(value * _CLIP_OUT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return value


@triton.jit
def magnitude_bits(rounded, DOUBLED: tl.constexpr, EMIN: tl.constexpr):
    """Return the bits of an element without its sign, moved up to bit 23 - MBITS (int32), from its magnitude.

    ``DOUBLED``: ``rounded`` is twice the magnitude. Scaled so that the format's smallest normal number is fp32's, the
    top bits of fp32 are the element's.
    """
    DOWN: tl.constexpr = 2.0 ** (-126 - EMIN - DOUBLED)
    return as_int(rounded * DOWN)


@triton.jit
def element_byte(bits, x, MBITS: tl.constexpr):
    """Return the bits of an 8-bit element (int32) from :func:`magnitude_bits` and x's sign."""
    return (bits >> (23 - MBITS)) | ((as_int(x) >> 24) & 0x80)


@triton.jit
def pair_byte(low_bits, low_x, high_bits, high_x):
    """Return two E2M1 codes as a byte (int32), from :func:`magnitude_bits` and signs of the low and the high nibble.

    Both are put together in the top byte of a word, where the sign of x is already that of the high nibble.
    """
    word = low_bits * 4 + high_bits * 64
    word = word | (as_int(high_x) & _SIGN)
    word = word | ((as_int(low_x) >> 4) & 0x08000000)
    return (word >> 24) & 0xFF


@triton.jit
def element_value(code, MBITS: tl.constexpr, EMIN: tl.constexpr, EBITS: tl.constexpr):
    """Return the fp32 value of an element's bits (int32, no NaN or Inf)."""
    MASK: tl.constexpr = (1 << (EBITS + MBITS)) - 1
    UP: tl.constexpr = 2.0 ** (126 + EMIN)
    magnitude = as_float((code & MASK) << (23 - MBITS)) * UP
    return as_float(as_int(magnitude) | ((code >> (EBITS + MBITS)) << 31))


@triton.jit
def scale_value(byte):
    """Return the fp32 scale of E8M0 bytes (int32), NaN for 255."""
    bits = tl.maximum(byte << 23, 0x400000)
    return as_float(tl.where(byte == 255, 0x7FC00000, bits))


@triton.jit
def descaled(value, scale, CLIP: tl.constexpr, LIMIT: tl.constexpr):
    """Return signed element values times their scale; ``LIMIT`` caps the magnitude under static clip."""
    value = value * scale
    if CLIP:
        value = value * _CLIP_OUT
        value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        value = tl.maximum(value, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return value
