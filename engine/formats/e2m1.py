"""E2M1, the element format of MXFP4 (OCP MX v1.0, section 5.3.3): sign, two exponent bits, one mantissa bit.

Magnitudes of the codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign, kept on zeros. There is no Inf and no
NaN. Throughout, q is a value already divided by its block's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 6.0
"""Largest magnitude."""
VALUES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each code without its sign bit."""

_SIGN = -(1 << 31)
_MAGNITUDE = (1 << 31) - 1
_EXPONENT = 0x7F800000
_ONE = 0x3F800000
_KEPT = ~0x3FFFFF  # sign, exponent and the first mantissa bit
_MAGIC = 1.5 * 2.0**22


def round_nearest_(q: Tensor, scratch: Tensor) -> Tensor:
    """Round q to the nearest E2M1 value, ties to the even code, magnitudes above 6 to 6; signs of zero are kept.

    The spacing of E2M1 at q is 2^(e - 1) with e = max(exponent of q, 0). Adding and subtracting 1.5 * 2^23 spacings
    makes the fp32 adder round to a multiple of the spacing, ties to even, which are the ties of E2M1.

    Args:
        q: contiguous float32 of magnitude below 2^100, or NaN, which stays NaN; overwritten with the result.
        scratch: float32 of q's shape, overwritten.
    """
    torch.bitwise_and(q.view(torch.int32), _EXPONENT, out=scratch.view(torch.int32)).clamp_min_(_ONE)
    rounded = torch.add(q, scratch, alpha=_MAGIC).sub_(scratch, alpha=_MAGIC).clamp_(-MAX, MAX)
    return torch.copysign(rounded, q, out=q)


def round_stochastic_(q: Tensor, noise: Tensor, scratch: Tensor) -> Tensor:
    """Round q to one of its two E2M1 neighbours, up with a probability linear in the distance.

    With 16 noise bits r in 0..65535, centred (r + 1/2) so that they leave no mean bias, the magnitude a of q:

    * a >= 6 becomes 6 before rounding.
    * a < 1, cells [0, 0.5) and [0.5, 1): with t = 2a, or 2a - 1, it goes up iff (r + 1/2) < t * 2^16, compared exactly.
    * 1 <= a < 6: (r << 6 | 32) is added to the fp32 mantissa, which is then truncated to one bit.

    A representable q never moves. The chance to go up is the distance rounded to a multiple of 2^-16, so the mean of
    the result over all r differs from q by at most 2^-17 of a cell, with either sign. For q with the 8 significant bits
    of bfloat16 it is q exactly from a = 2^-10 on. Below a = 2^-18 a value always becomes zero.

    Args:
        q: contiguous float32, finite or NaN; overwritten with the result.
        noise: int32 of q's shape, 0..65535, overwritten.
        scratch: float32 of q's shape, overwritten.
    """
    q_bits = q.view(torch.int32)
    sign_bits = torch.bitwise_and(q_bits, _SIGN)
    a = q.abs_().clamp_max_(MAX)
    centred = noise.bitwise_left_shift_(6).bitwise_or_(32)  # (r + 1/2) * 2^6
    # Below 1, half of ceil(2q - (r + 1/2) / 2^16): the sign of that difference is right in fp32 however small q is.
    # From 1 on, this part is 1 whatever r is, and below 1 the other part is 1, so their sum less 1 is the result.
    below = scratch.copy_(centred)
    below.mul_(-(2.0**-22)).add_(a.clamp_max(1.0), alpha=2.0).ceil_()
    above = centred.add_(a.clamp_min_(1.0).view(torch.int32)).bitwise_and_(_KEPT).view(torch.float32)
    rounded = above.sub_(1.0).add_(below, alpha=0.5)
    return torch.bitwise_or(rounded.view(torch.int32), sign_bits, out=q_bits).view(torch.float32)


def encode(values: Tensor) -> Tensor:
    """Return the codes 0..15 (uint8) of float32 values that are exactly representable in E2M1; NaN gives 0 or 8."""
    bits = values.contiguous().view(torch.int32)
    doubled = values.abs().mul_(2.0).nan_to_num_(0.0).to(torch.uint8)  # 0, 1, 2, 3, 4, 6, 8 or 12
    codes = doubled.clamp_max(4).add_(doubled > 4).add_(doubled > 6).add_(doubled > 8)
    return codes.bitwise_or_(((bits >> 28) & 8).to(torch.uint8))


def decode(codes: Tensor) -> Tensor:
    """Return the float32 values of codes 0..15 of any shape and integer dtype."""
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int64)]


def pack(codes: Tensor, axis: int) -> Tensor:
    """Pack uint8 codes two a byte along ``axis``, whose size must be even: the even index takes the low nibble."""
    axis %= codes.ndim
    shape = codes.shape
    pairs = codes.reshape(*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
    return pairs.select(axis + 1, 0) | (pairs.select(axis + 1, 1) << 4)


def unpack(packed: Tensor, axis: int) -> Tensor:
    """Undo :func:`pack`: uint8 codes 0..15, the size along ``axis`` doubled."""
    axis %= packed.ndim
    return torch.stack((packed & 15, packed >> 4), dim=axis + 1).flatten(axis, axis + 1)
