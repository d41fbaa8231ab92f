"""What a kernel must know of an operand's format and options, as its compile-time constants. Without Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.formats import e2m1, e8m0, mxfp8, scale
from engine.formats.mxfp8 import MXFP8Options
from engine.formats.options import OperandOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """An element format."""

    mbits: int
    """Mantissa bits."""
    emin: int
    """Exponent of the smallest normal value."""
    top: float
    """Largest magnitude."""
    ebits: int
    """Exponent bits."""
    emax: int
    """Exponent of the largest power of two."""


E2M1 = Element(mbits=1, emin=0, top=e2m1.MAX, ebits=2, emax=2)
FP8 = {
    "e4m3": Element(mbits=3, emin=-6, top=mxfp8.TOP["e4m3"], ebits=4, emax=mxfp8.EMAX["e4m3"]),
    "e5m2": Element(mbits=2, emin=-14, top=mxfp8.TOP["e5m2"], ebits=5, emax=mxfp8.EMAX["e5m2"]),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """How the kernels see an operand."""

    axis: int
    """Quantised axis, not negative."""
    block: Literal["1d", "2d"]
    """As in the options."""
    element: Element
    """Element format."""
    bump: int
    """The scale mode's constant, added to the bits of amax before its exponent is read."""
    limit: int
    """Largest scale code of a finite block."""
    sr: bool = False
    """Round stochastically."""
    clip: bool = False
    """Static 3/4 clip."""

    @classmethod
    def of(cls, options: OperandOptions, ndim: int) -> Operand:
        """Return the operand of an MXFP4 tensor of ``ndim`` dimensions."""
        bump = scale.BUMP[options.scale_mode]
        return cls(
            axis=options.axis % ndim,
            block=options.block,
            element=E2M1,
            bump=bump,
            limit=e8m0.MAX_FINITE_CODE,
            sr=options.rounding == "sr",
            clip=options.clip == "static",
        )

    @classmethod
    def of_fp8(cls, options: MXFP8Options, ndim: int) -> Operand:
        """Return the operand of an MXFP8 tensor of ``ndim`` dimensions."""
        return cls(
            axis=options.axis % ndim,
            block=options.block,
            element=FP8[options.element],
            bump=mxfp8.bump(options.element, options.scale_mode),
            limit=mxfp8.LIMIT[options.element],
        )

    def constants(self, suffix: str = "") -> dict[str, Any]:
        """Return the kernel's keyword arguments, each name with the suffix."""
        element = self.element
        values = {
            "SCALE": (self.bump, element.emax, self.limit),
            "ELEMENT": (element.mbits, element.emin, element.top, element.ebits),
            "SR": self.sr,
            "CLIP": self.clip,
        }
        return {name + suffix: value for name, value in values.items()}
