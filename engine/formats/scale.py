"""The shared exponent of a block, by integer arithmetic on the bits of its largest magnitude.

Write amax = n * 2^(E - 127) / 4 with n in [4, 8) and E the biased fp32 exponent. The scale code is
S = clamp(E - 2 + b, 0, 254), for finite blocks at most 252, and b = 1 iff n passes the mode's threshold:

======  ==========  =====================================================================
mode    b = 1 iff   origin
======  ==========  =====================================================================
floor   never       OCP MX v1.0, section 6.3
ceil    n > 4       torchao CEIL
rceil   n > 6       truncation-free (arXiv 2506.08027), torchao RCEIL, cuBLAS
uos6    n >= 6      ALTO
even    n >= 7      torchao EVEN, ALTO's default: amax rounded to one mantissa bit, then floor
midmax  n > 7       tensorcast: 7 is the midpoint of 6 and the next binade, 8
uos     n >= 7.25   ALTO, "universal optimal scaling"
======  ==========  =====================================================================

"n passes a threshold" is "adding a constant to the mantissa carries into the exponent", so each mode is one integer
addition and no logarithm. Zero and subnormal amax give S = 0 in every mode; Inf and NaN give 255.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.formats import e8m0
from engine.formats.options import ScaleMode

_INF_BITS = 0x7F800000
_TARGET_EXPONENT = 2  # of 4, the largest power of two of E2M1

BUMP: dict[ScaleMode, int] = {
    "floor": 0,
    "ceil": 0x7FFFFF,
    "rceil": 0x3FFFFF,
    "uos6": 0x400000,
    "even": 0x200000,
    "midmax": 0x1FFFFF,
    "uos": 0x180000,
}
"""Added to the fp32 bits of amax before its exponent is read: 2^23 - (mantissa of the threshold), one less where the
threshold itself does not bump."""


def bump_to_target(mode: ScaleMode) -> int:
    """Return what is added to the bits of amax before their exponent is the scale code: the bump less 2 exponents."""
    return BUMP[mode] - (_TARGET_EXPONENT << 23)


def codes_from_bits(amax_bits: Tensor, mode: ScaleMode) -> Tensor:
    """Return the int32 scale codes, 0..252 or 255, for the int32 bits of non-negative fp32 maxima of any shape."""
    codes = torch.add(amax_bits, bump_to_target(mode)).bitwise_right_shift_(23)
    codes.clamp_(0, e8m0.MAX_FINITE_CODE)
    return codes.masked_fill_(amax_bits >= _INF_BITS, e8m0.NAN_CODE)


def scale_codes(amax: Tensor, mode: ScaleMode) -> Tensor:
    """Return the E8M0 codes (uint8) of blocks with the largest magnitudes ``amax``.

    Args:
        amax: float32 or bfloat16, any shape, not negative; Inf and NaN allowed.
        mode: one of the modes of this module's table.

    Returns:
        uint8 of the same shape: 0..252, or 255 where amax is not finite.

    Raises:
        TypeError: for another dtype.
    """
    if amax.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"amax is {amax.dtype}; expected torch.float32 or torch.bfloat16")
    bits = amax.to(torch.float32).abs().view(torch.int32)
    return codes_from_bits(bits, mode).to(torch.uint8)
