"""From recipe switches to one options object per GEMM operand.

Shapes: x [M, K] activations (M tokens), w [N, K] weight, dy [M, N] gradient of the output. The table is recipes.md
§1.4 of the design's reference pages:

=====  =========================================  ==========================================
GEMM   left operand                               right operand
=====  =========================================  ==========================================
fprop  x along K, 1D, RTN                         w along K, 1D or 32x32 tiles, RTN
dgrad  dy along N, 1D, SR if ``sr``               w: the fprop operand if 2D, else along N, 1D
wgrad  H·dy along M, 1D, SR if ``sr``, clip       H·x along M, 1D, RTN, clip
=====  =========================================  ==========================================
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass

from engine.formats import OperandOptions
from engine.recipes.table import Switches


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScheme:
    """Options of the six operands of a Linear layer's three GEMMs; None leaves an operand in the compute dtype."""

    fprop_x: OperandOptions | None = None
    """x in y = x·wᵀ."""
    fprop_w: OperandOptions | None = None
    """w in y = x·wᵀ."""
    dgrad_dy: OperandOptions | None = None
    """dy in dx = dy·w."""
    dgrad_w: OperandOptions | None = None
    """w in dx = dy·w; ignored with ``dgrad_reuses_fprop_w``."""
    wgrad_dy: OperandOptions | None = None
    """dy in dw = dyᵀ·x."""
    wgrad_x: OperandOptions | None = None
    """x in dw = dyᵀ·x; ignored with ``backward_on_fprop_operands``."""
    dgrad_reuses_fprop_w: bool = False
    """dgrad multiplies with the very w that fprop used (2D tiles serve both orientations)."""
    backward_on_fprop_operands: bool = False
    """dgrad and wgrad multiply the unquantised dy with the saved QDQ operands of fprop."""

    @classmethod
    def from_switches(cls, switches: Switches) -> LinearScheme:
        """Build the operand table of a recipe's switches."""
        s = switches
        if s.elem_format == "none":
            return cls()
        x = OperandOptions(axis=-1, scale_mode=s.scale_mode)
        w = OperandOptions(axis=-1, block=s.weight_block, scale_mode=s.scale_mode)
        if s.backward == "hp":
            return cls(fprop_x=x, fprop_w=w, backward_on_fprop_operands=True)
        rounding = "sr" if s.sr else "rtn"
        grad_mode = (s.scale_mode_sr or s.scale_mode) if s.sr else s.scale_mode
        return cls(
            fprop_x=x,
            fprop_w=w,
            dgrad_dy=OperandOptions(axis=-1, scale_mode=grad_mode, rounding=rounding),
            dgrad_w=OperandOptions(axis=-2, scale_mode=s.scale_mode),
            wgrad_dy=OperandOptions(axis=-2, scale_mode=grad_mode, rounding=rounding, hadamard=s.hadamard, clip=s.clip),
            wgrad_x=OperandOptions(axis=-2, scale_mode=s.scale_mode, hadamard=s.hadamard, clip=s.clip),
            dgrad_reuses_fprop_w=s.weight_block == "2d",
        )

    def to_text(self) -> str:
        """Return the scheme as JSON with sorted keys: a hashable name for it, for operators and traces."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> LinearScheme:
        """Undo :meth:`to_text`."""
        return _parsed(text)

    @property
    def quantised(self) -> dict[str, bool]:
        """Tell for each GEMM whether at least one operand is quantised."""
        return {
            "fprop": self.fprop_x is not None or self.fprop_w is not None,
            "dgrad": self.dgrad_dy is not None,
            "wgrad": self.wgrad_dy is not None,
        }


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> LinearScheme:
    values = json.loads(text)
    return LinearScheme(**{k: OperandOptions(**v) if isinstance(v, dict) else v for k, v in values.items()})
