"""MXFP8 quantisation in plain PyTorch: E4M3 or E5M2 elements (OCP MX v1.0, section 5.3.1), rounded to nearest.

Blocks, non-finite blocks and signs of zero are those of :mod:`engine.formats.mxfp4`. The scale code is
S = clamp(E - emax + b, 0, limit) for amax with the biased fp32 exponent E and the significand m in [1, 2); emax is 8
for E4M3 (largest value 448 = 1.75 * 2^8) and 15 for E5M2 (57344 = 1.75 * 2^15). The limit, 246 and 239, keeps every
finite value finite, and

======  ===================================================  =================================================
mode    b = 1 iff                                            origin
======  ===================================================  =================================================
floor   never                                                OCP MX v1.0, section 6.3; saturates up to 1/8 of amax
ceil    m > 1                                                torchao CEIL
even    m >= 1.9375 (E4M3), 1.875 (E5M2)                     torchao EVEN: amax rounded to the element's mantissa
rceil   m > 1.75, that is amax / scale would exceed the top  arXiv 2506.08027, torchao RCEIL, cuBLAS; the default
======  ===================================================  =================================================

The other modes of MXFP4 are thresholds of E2M1 and have no counterpart here; so has stochastic rounding.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.formats import e8m0
from engine.formats.mxfp4 import check_output, layout_of
from engine.formats.options import BLOCK_SIZE, OperandOptions
from engine.strict import ConfigError, Problem, did_you_mean

ElementName = Literal["e4m3", "e5m2"]
Mode = Literal["floor", "ceil", "even", "rceil"]
ELEMENTS: tuple[ElementName, ...] = typing.get_args(ElementName)
SCALE_MODES: tuple[Mode, ...] = typing.get_args(Mode)
DTYPES: dict[ElementName, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The torch dtype of each element format."""
EMAX: dict[ElementName, int] = {"e4m3": 8, "e5m2": 15}
"""Exponent of each format's largest power of two."""
TOP: dict[ElementName, float] = {"e4m3": 448.0, "e5m2": 57344.0}
"""Each format's largest value."""
LIMIT: dict[ElementName, int] = {"e4m3": 254 - 8, "e5m2": 254 - 15}
"""Largest scale code of a finite block: the largest element times its scale is 1.75 * 2^127."""

_MANTISSA_BITS: dict[ElementName, int] = {"e4m3": 3, "e5m2": 2}


def bump(element: ElementName, mode: Mode) -> int:
    """Return what is added to the fp32 bits of amax before its exponent is read; see :mod:`engine.formats.scale`."""
    return {
        "floor": 0,
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - _MANTISSA_BITS[element]),
        "rceil": 0x1FFFFF,
    }[mode]


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8Options:
    """How one GEMM operand is quantised to MXFP8.

    Raises:
        ConfigError: for every unknown word at once.
    """

    element: ElementName = "e4m3"
    """``e4m3`` for all operands in the published recipes; ``e5m2`` has four times the range a block and half the
    precision."""
    axis: int = -1
    """The quantised axis, the one the GEMM sums over."""
    block: Literal["1d", "2d"] = "1d"
    """``1d``: 32 values along ``axis`` share a scale; ``2d``: a 32x32 tile of the last two dimensions does."""
    scale_mode: Mode = "rceil"
    """Rule that picks the shared exponent; see the module."""

    def __post_init__(self) -> None:
        problems = []
        for name, known in (("element", ELEMENTS), ("block", ("1d", "2d")), ("scale_mode", SCALE_MODES)):
            value = getattr(self, name)
            if value not in known:
                expected = ", ".join(f'"{word}"' for word in known)
                message = f"{value!r} is not one of {expected}"
                problems.append(Problem(path=(name,), message=message, hint=did_you_mean(str(value), known)))
        if not isinstance(self.axis, int) or isinstance(self.axis, bool):
            problems.append(Problem(path=("axis",), message=f"{self.axis!r} is not an integer"))
        if problems:
            raise ConfigError(problems)

    @property
    def layout(self) -> OperandOptions:
        """The same blocks as MXFP4 options."""
        return OperandOptions(block=self.block, axis=self.axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8Tensor:
    """A quantised tensor: elements of one byte and E8M0 scales."""

    elements: Tensor
    """float8_e4m3fn or float8_e5m2, in the logical shape; zero in non-finite blocks."""
    scales: Tensor
    """uint8 E8M0, one a block: the logical shape with ``axis`` / 32, or the last two dimensions / 32 for ``2d``."""
    axis: int
    """The quantised axis, not negative."""
    block: Literal["1d", "2d"]
    """Shape of a block."""

    @property
    def nonfinite_blocks(self) -> Tensor:
        """Number of blocks that held an Inf or a NaN, 0-dim int64."""
        return (self.scales == e8m0.NAN_CODE).sum()


def check_input(x: Tensor) -> None:
    """Raise TypeError for another dtype than float32 and bfloat16."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"cannot quantise {x.dtype}: convert the tensor to torch.float32 or torch.bfloat16 first")


def _per_block(view: tuple[int, ...]) -> list[int]:
    """Return the view's shape with one scale a block."""
    return [1 if size == BLOCK_SIZE and i in (1, 3) else size for i, size in enumerate(view)]


def quantise(x: Tensor, options: MXFP8Options) -> MXFP8Tensor:
    """Quantise a tensor to MXFP8, round to nearest, ties to even.

    Args:
        x: float32 or bfloat16, any strides; the quantised axis (both last dimensions for 2D blocks) a multiple of 32.
        options: element, blocks, axis and scale mode.

    Raises:
        TypeError: for another dtype.
        ValueError: for a size that is no multiple of 32, or an axis out of range.
    """
    check_input(x)
    layout = layout_of(x.shape, options.layout)
    dtype = DTYPES[options.element]
    if x.numel() == 0:
        scales = torch.empty(layout.scales, dtype=torch.uint8, device=x.device)
        elements = torch.empty(x.shape, dtype=dtype, device=x.device)
        return MXFP8Tensor(elements=elements, scales=scales, axis=layout.axis, block=options.block)
    values = x.detach().reshape(layout.view).to(torch.float32)
    bits = values.abs().view(torch.int32)
    amax = bits.amax(dim=(1, 3) if len(layout.view) == 4 else 1, keepdim=True)
    offset = bump(options.element, options.scale_mode) - (EMAX[options.element] << 23)
    codes = torch.add(amax, offset).bitwise_right_shift_(23).clamp_(0, LIMIT[options.element])
    quotients = values * e8m0.reciprocal(codes)
    bad = amax >= 0x7F800000
    quotients.masked_fill_(bad, 0.0).clamp_(-TOP[options.element], TOP[options.element])
    codes.masked_fill_(bad, e8m0.NAN_CODE)
    return MXFP8Tensor(
        elements=quotients.to(dtype).view(x.shape),
        scales=codes.to(torch.uint8).view(layout.scales),
        axis=layout.axis,
        block=options.block,
    )


def dequantise(q: MXFP8Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a quantised tensor: exact in float32, and in bfloat16 down to 2^-126.

    Raises:
        TypeError: for another dtype than float32 and bfloat16.
    """
    check_output(dtype)
    shape = q.elements.shape
    layout = layout_of(shape, OperandOptions(block=q.block, axis=q.axis))
    if q.elements.numel() == 0:
        return torch.empty(shape, dtype=dtype, device=q.elements.device)
    values = q.elements.to(torch.float32).reshape(layout.view)
    return values.mul_(e8m0.decode(q.scales.reshape(_per_block(layout.view)))).view(shape).to(dtype)


def qdq(x: Tensor, options: MXFP8Options, *, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Quantise and dequantise: ``dequantise(quantise(x, options), out_dtype)``.

    Returns:
        The values in ``out_dtype`` (float32 or bfloat16; default x's), contiguous and of x's shape, and the number of
        non-finite blocks as a 0-dim int64 tensor on x's device.

    Raises:
        TypeError, ValueError: as :func:`quantise` and :func:`dequantise`.
    """
    check_input(x)
    check_output(out_dtype or x.dtype)
    q = quantise(x, options)
    return dequantise(q, out_dtype or x.dtype), q.nonfinite_blocks
