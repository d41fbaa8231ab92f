"""How figures look: sizes, type, colours, dashes. No data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plotting.group import Group

FONT = "DejaVu Sans"
"""Comes with matplotlib, so that figures are the same on every machine."""
HASH_SALT = "lptctl"
"""Fixes the ids in SVG files, so that the same input gives the same bytes."""

# Okabe and Ito, "Color universal design" (2008): distinguishable with every common colour vision. Black is the
# baseline's; the yellow is left out, because a thin yellow line on white cannot be seen.
BLACK = "#000000"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#6b6b6b"
HAIRLINE = "#9a9a9a"
GRID = "#e6e6e6"
ALARM = "#b3261e"

Dash = tuple[float, tuple[float, ...]]
"""Offset and on-off lengths in line widths, as matplotlib wants them; no lengths is a solid line."""
DASHES: tuple[Dash, ...] = (
    (0.0, ()),
    (0.0, (4.0, 1.5)),
    (0.0, (1.2, 1.2)),
    (0.0, (6.0, 1.5, 1.2, 1.5)),
    (0.0, (2.5, 1.0, 2.5, 1.0, 1.0, 1.0)),
    (0.0, (9.0, 2.0)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A figure size and what goes with it. Lengths in inches, type in points."""

    width_in: float
    """Width of the figure."""
    columns: int
    """Panels side by side."""
    panel_height_in: float
    """Height of one panel's axes."""
    tallest_panel_in: float
    """Height that a panel may grow to when the labels beside its lines need it."""
    height_in: float | None
    """Height of the figure; None lets it follow the panels."""
    font_pt: float
    """Type of axis labels and legend; ticks, direct labels and the caption are a little smaller."""
    line_pt: float
    """Width of a smoothed line; the baseline's is 1.2 times that."""

    @property
    def small_pt(self) -> float:
        """Type of ticks, direct labels and caption."""
        return 0.87 * self.font_pt


PRESETS: dict[str, Preset] = {
    "page": Preset(
        width_in=6.9, columns=2, panel_height_in=1.85, tallest_panel_in=3.2, height_in=None, font_pt=7.5, line_pt=1.2
    ),
    "column": Preset(
        width_in=3.35, columns=1, panel_height_in=1.6, tallest_panel_in=2.4, height_in=None, font_pt=7.0, line_pt=1.0
    ),
    "slides": Preset(
        width_in=12.8, columns=2, panel_height_in=2.45, tallest_panel_in=2.45, height_in=7.2, font_pt=13.0, line_pt=2.0
    ),
}
"""A page's full width, one column of two, a 16:9 slide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Colour and dash of one group."""

    color: str
    dash: Dash
    width_pt: float

    @property
    def ink(self) -> str:
        """The colour for text, darkened to a contrast of 3 to 1 on white (WCAG 2.1, 1.4.11)."""
        channels = [int(self.color[i : i + 2], 16) for i in (1, 3, 5)]
        while _contrast(channels) < 3.0:
            channels = [int(0.97 * c) for c in channels]
        return "#" + "".join(f"{c:02X}" for c in channels)


def _contrast(channels: Sequence[int]) -> float:
    """Return the contrast of an sRGB colour with white (WCAG 2.1, relative luminance)."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


def rc_params(preset: Preset) -> dict[Any, Any]:
    """Return the matplotlib settings of a preset; text stays text in SVG and PDF."""
    return {
        "font.family": "sans-serif",
        "font.sans-serif": [FONT],
        "font.size": preset.font_pt,
        "axes.labelsize": preset.font_pt,
        "xtick.labelsize": preset.small_pt,
        "ytick.labelsize": preset.small_pt,
        "axes.linewidth": 0.6,
        "axes.edgecolor": GREY,
        "axes.labelcolor": "#222222",
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": "#222222",
        "ytick.labelcolor": "#222222",
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "ytick.minor.width": 0.4,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "ytick.minor.size": 1.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "lines.solid_capstyle": "round",
        "path.simplify": False,
        "text.hinting": "none",  # so that widths are those that were measured, at every resolution
        "svg.fonttype": "none",
        "svg.hashsalt": HASH_SALT,
        "pdf.fonttype": 42,
        "figure.dpi": 100,
        "axes.unicode_minus": True,
    }


def styles(groups: Sequence[Group], baseline: str, preset: Preset) -> dict[str, Style]:
    """Return label to style: one colour a recipe, the baseline black and thicker, dashes once colours run out.

    Groups of one recipe that differ in swept keys share the colour and differ in dashes.
    """
    variants: dict[tuple[Any, ...], int] = {}
    keys: dict[tuple[Any, ...], int] = {}
    for group in groups:
        keys.setdefault(group.keys, len(keys))
        if group.recipe != baseline or group.overrides:
            variants.setdefault((group.recipe, group.overrides), len(variants))
    out = {}
    for group in groups:
        key = keys[group.keys]
        if group.recipe == baseline and not group.overrides:
            out[group.label] = Style(color=BLACK, dash=DASHES[key % len(DASHES)], width_pt=1.2 * preset.line_pt)
        else:
            turn, index = divmod(variants[(group.recipe, group.overrides)], len(PALETTE))
            dash = DASHES[(turn * len(keys) + key) % len(DASHES)]
            out[group.label] = Style(color=PALETTE[index], dash=dash, width_pt=preset.line_pt)
    return out
