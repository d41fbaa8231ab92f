"""E8M0, the scale format of OCP MX v1.0 (section 5.4.1): a byte S stands for 2^(S - 127), 255 for NaN.

S = 0 is 2^-127, a subnormal of fp32. It is used as it is, never replaced by 2^-126, so these functions need a CPU or
device that keeps subnormals (torch's default; ``torch.set_flush_denormal(True)`` breaks it).
"""

from __future__ import annotations

import torch
from torch import Tensor

NAN_CODE = 255
"""Scale code of a block that holds an Inf or a NaN."""
MAX_FINITE_CODE = 252
"""Largest code of a finite block: 6 * 2^(252 - 127) is the largest E2M1 value below 2^128."""

_NAN_BITS = 0x7FC00000
_HALF_MIN_NORMAL_BITS = 0x00400000  # 2^-127


def decode(codes: Tensor) -> Tensor:
    """Return 2^(S - 127) as float32 for integer codes S of any shape; NaN for 255. Exact for every code."""
    codes = codes.to(torch.int32)
    bits = (codes << 23).clamp_min_(_HALF_MIN_NORMAL_BITS).masked_fill_(codes == NAN_CODE, _NAN_BITS)
    return bits.view(torch.float32)


def reciprocal(codes: Tensor) -> Tensor:
    """Return 2^(127 - S) as float32 for the int32 codes S of finite blocks, 0..252; of 255 it makes -Inf.

    Exact, and normal: multiplying by it divides by the scale without error unless the quotient is itself below 2^-126,
    where every rounding of E2M1 gives zero.
    """
    return torch.rsub(codes, 254).bitwise_left_shift_(23).view(torch.float32)
