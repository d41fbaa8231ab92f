"""Every recipe as data: a row of switches, the recipe it differs from, and in what. Torch-free.

A recipe name is a preset over :class:`Switches`. ``lptctl`` reads this table to validate sweep files and to explain
recipes; the engine turns the switches of a run into one frozen options object per GEMM operand
(:mod:`engine.lowp.scheme`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.strict import ConfigError, Problem, did_you_mean

ScaleMode = Literal["floor", "ceil", "rceil", "even", "midmax", "uos", "uos6"]
SCALE_MODES: tuple[str, ...] = ("floor", "ceil", "rceil", "even", "midmax", "uos", "uos6")


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """What a recipe does to the three GEMMs of a Linear layer; every field is one axis of an ablation."""

    elem_format: Literal["none", "mxfp4"] = "none"
    """Element format of quantised operands; ``none`` leaves every GEMM in the compute dtype."""
    weight_block: Literal["1d", "2d"] = "1d"
    """``2d``: one scale per 32x32 tile, so that fprop and dgrad see the same quantised weight."""
    hadamard: Literal["none", "random", "fixed", "3rht"] = "none"
    """Hadamard-32 over the token axis of both wgrad operands: randomised once a step, fixed Sylvester, or triple."""
    sr: bool = False
    """Stochastic rounding of gradient operands (dgrad and wgrad); everything else rounds to nearest even."""
    scale_mode: ScaleMode = "even"
    """Rule that picks the shared exponent of a block."""
    scale_mode_sr: ScaleMode | None = None
    """Scale mode of stochastically rounded operands; null uses ``scale_mode``."""
    clip: Literal["none", "static"] = "none"
    """``static``: both wgrad operands are multiplied by 3/4 before rounding and by 4/3 after it."""
    backward: Literal["quantised", "hp"] = "quantised"
    """``hp``: dgrad and wgrad in the compute dtype, on unquantised grad_output and the saved QDQ operands."""

    def problems(self) -> list[Problem]:
        """Return the contradictions between switches (empty for a sound row)."""
        found = []
        defaults = Switches()
        if self.elem_format == "none":
            for f in dataclasses.fields(self):
                if f.name != "elem_format" and getattr(self, f.name) != getattr(defaults, f.name):
                    found.append(
                        Problem(
                            path=(f.name,), message="has no effect with elem_format none", hint="drop it or set mxfp4"
                        )
                    )
        if self.backward == "hp":
            for name in ("hadamard", "sr", "clip", "scale_mode_sr"):
                if getattr(self, name) != getattr(defaults, name):
                    found.append(
                        Problem(path=(name,), message="never fires with backward hp, which quantises no gradient")
                    )
        if self.scale_mode_sr is not None and not self.sr:
            found.append(Problem(path=("scale_mode_sr",), message="never fires without sr: true"))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRow:
    """One row of the recipe table."""

    name: str
    summary: str
    """One line for people."""
    reference: str | None
    """The one recipe this row is to be compared with; null for bf16."""
    change: str
    """The named change against the reference; where it bundles several switches, all of them."""
    switches: Switches
    aliases: tuple[str, ...] = field(default=())
    """Upstream names."""
    note: str = ""
    """What a reader of its results must know."""


_BASELINE = Switches(elem_format="mxfp4")
_LPT = Switches(elem_format="mxfp4", weight_block="2d", hadamard="random", sr=True)


def _baseline(name: str, change: str, summary: str, **switches: Any) -> RecipeRow:
    return RecipeRow(
        name=name,
        summary=summary,
        reference="baseline",
        change=change,
        switches=dataclasses.replace(_BASELINE, **switches),
    )


def _lpt(
    name: str, change: str, summary: str, aliases: tuple[str, ...] = (), note: str = "", **switches: Any
) -> RecipeRow:
    return RecipeRow(
        name=name,
        summary=summary,
        reference="lpt",
        change=change,
        switches=dataclasses.replace(_LPT, **switches),
        aliases=aliases,
        note=note,
    )


_ROWS = (
    RecipeRow(
        name="bf16",
        summary="no quantisation: every GEMM in the compute dtype of the run",
        reference=None,
        change="",
        switches=Switches(),
        aliases=("bfloat16", "fwd_bwd_bf16"),
    ),
    RecipeRow(
        name="baseline",
        summary="plain MXFP4 in all three GEMMs: 1D blocks, even scale, no Hadamard, round to nearest",
        reference="bf16",
        change="MXFP4 in fprop, dgrad and wgrad",
        switches=_BASELINE,
        aliases=("mxfp4_base",),
    ),
    RecipeRow(
        name="lpt",
        summary="baseline + 32x32 weight blocks + randomised Hadamard-32 on wgrad + SR on gradients",
        reference="baseline",
        change="weight_block 2d, hadamard random, sr true (single-switch rows: wblock2d, hadamard, sr)",
        switches=_LPT,
        aliases=("lpt_recipe", "lpt_hadamard"),
    ),
    _baseline("wblock2d", "weight_block 2d", "baseline with 32x32 weight blocks", weight_block="2d"),
    _baseline("sr", "sr true", "baseline with stochastic rounding on gradients", sr=True),
    _baseline("hadamard", "hadamard random", "baseline with a randomised Hadamard-32 on wgrad", hadamard="random"),
    _lpt(
        "lpt_wblock1d", "weight_block 1d", "lpt with 1D weight blocks", weight_block="1d", aliases=("lpt_recipe_1dw",)
    ),
    _lpt("lpt_nosr", "sr false", "lpt with round to nearest on gradients", sr=False),
    _lpt("lpt_nohadamard", "hadamard none", "lpt without the Hadamard transform", hadamard="none"),
    _lpt("hadamard_3rht", "hadamard 3rht", "lpt with a triple randomised Hadamard", hadamard="3rht"),
    _lpt("hadamard_fixed", "hadamard fixed", "lpt with the fixed Sylvester-Hadamard", hadamard="fixed"),
    _lpt(
        "midmax",
        "scale_mode midmax",
        "lpt with the midmax scale",
        aliases=("midmax-legacy", "lpt_recipe_midmax", "lpt_midmax"),
        note="A/A control: midmax differs from the default scale only where a block's amax is exactly 7*2^k, "
        "so its curve should be indistinguishable from lpt's.",
        scale_mode="midmax",
    ),
    _lpt(
        "uos",
        "scale_mode uos",
        "lpt with the scale bumped from 7.25 on",
        aliases=("lpt_recipe_uos", "lpt_uos"),
        scale_mode="uos",
    ),
    _lpt(
        "uos6",
        "scale_mode uos6",
        "lpt with the scale bumped from 6 on (never clips)",
        aliases=("lpt_recipe_uos6", "lpt_uos6"),
        note="Not idempotent: an amax rounded to 6*2^k is bumped when it is quantised again.",
        scale_mode="uos6",
    ),
    _lpt(
        "floor", "scale_mode floor", "lpt with the OCP floor scale (clips up to a quarter of amax)", scale_mode="floor"
    ),
    _lpt("rceil", "scale_mode rceil", "lpt with the round-up scale (bumped above 6)", scale_mode="rceil"),
    _lpt("ceil", "scale_mode ceil", "lpt with the ceil scale (bumped above 4)", scale_mode="ceil"),
    _lpt(
        "uos_mixed",
        "scale_mode uos, scale_mode_sr uos6",
        "lpt with uos on round-to-nearest operands and uos6 on stochastically rounded ones",
        scale_mode="uos",
        scale_mode_sr="uos6",
    ),
    _lpt(
        "forward_only",
        "backward hp (hadamard and sr are then inert and off)",
        "lpt's forward (32x32 weight blocks); backward in the compute dtype on the saved QDQ operands",
        aliases=("fwdonly", "fwd_only"),
        hadamard="none",
        sr=False,
        backward="hp",
    ),
    RecipeRow(
        name="full_precision_backward",
        summary="baseline's forward (1D weight blocks); backward in the compute dtype on the saved QDQ operands",
        reference="baseline",
        change="backward hp",
        switches=dataclasses.replace(_BASELINE, backward="hp"),
    ),
)

RECIPES: dict[str, RecipeRow] = {row.name: row for row in _ROWS}
ALIASES: dict[str, str] = {alias: row.name for row in _ROWS for alias in row.aliases}


def resolve(name: str) -> RecipeRow:
    """Return the row for a recipe name or one of its upstream aliases.

    Raises:
        ConfigError: for an unknown name, with the closest known one.
    """
    row = RECIPES.get(ALIASES.get(name, name))
    if row is None:
        hint = did_you_mean(name, [*RECIPES, *ALIASES])
        known = "known recipes: " + ", ".join(RECIPES)
        raise ConfigError([Problem(path=("name",), message=f'unknown recipe "{name}"', hint=f"{hint} {known}".strip())])
    return row
