"""What a recipe asks of one GEMM operand, as one frozen value. Torch-free."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from engine.strict import ConfigError, Problem, did_you_mean

BLOCK_SIZE = 32
"""Values that share one scale (OCP MX v1.0, section 5.2)."""

ScaleMode = Literal["floor", "ceil", "rceil", "even", "midmax", "uos", "uos6"]
SCALE_MODES: tuple[ScaleMode, ...] = typing.get_args(ScaleMode)
HadamardKind = Literal["none", "random", "fixed", "3rht"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "block": ("1d", "2d"),
    "scale_mode": SCALE_MODES,
    "rounding": ("rtn", "sr"),
    "hadamard": typing.get_args(HadamardKind),
    "clip": ("none", "static"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandOptions:
    """How one GEMM operand is quantised to MXFP4.

    Raises:
        ConfigError: for every unknown word at once, and for a Hadamard transform on 2D blocks: the transform mixes
            32 values along one axis only, so the codes would no longer serve both orientations.
    """

    block: Literal["1d", "2d"] = "1d"
    """``1d``: 32 values along ``axis`` share a scale; ``2d``: a 32x32 tile of the last two dimensions does."""
    axis: int = -1
    """The quantised axis, the one the GEMM sums over; for ``2d`` it only decides along which axis codes are packed."""
    scale_mode: ScaleMode = "even"
    """Rule that picks the shared exponent, see :mod:`engine.formats.scale`."""
    rounding: Literal["rtn", "sr"] = "rtn"
    """Round to nearest, ties to even, or stochastic rounding with a key."""
    hadamard: HadamardKind = "none"
    """Hadamard-32 along ``axis`` before quantisation; ``1d`` only. Both operands of a GEMM need the same transform."""
    clip: Literal["none", "static"] = "none"
    """``static``: values times 3/4 before rounding and times 4/3 after it, the scale being the unclipped block's."""

    def __post_init__(self) -> None:
        problems = []
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                expected = ", ".join(f'"{word}"' for word in known)
                problems.append(
                    Problem(
                        path=(name,),
                        message=f"{value!r} is not one of {expected}",
                        hint=did_you_mean(str(value), known),
                    )
                )
        if not isinstance(self.axis, int) or isinstance(self.axis, bool):
            problems.append(Problem(path=("axis",), message=f"{self.axis!r} is not an integer"))
        if self.block == "2d" and self.hadamard != "none":
            problems.append(
                Problem(
                    path=("hadamard",),
                    message=f"{self.hadamard!r} does not go with block '2d', whose codes serve both orientations",
                    hint="use block '1d' or hadamard 'none'",
                )
            )
        if problems:
            raise ConfigError(problems)
