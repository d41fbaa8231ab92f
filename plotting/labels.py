"""Text that does not collide: measuring, wrapping, and placing labels beside line ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import FT2Font
from scipy.optimize import isotonic_regression

from plotting.theme import FONT

_DPI = 720  # high, so that hinting does not round widths


def drawable(text: str) -> str:
    """Replace what the figure's font cannot draw (a path may hold anything) by a question mark."""
    return "".join(c if c.isprintable() and _glyphs().get_char_index(ord(c)) else "?" for c in text)


@functools.cache
def _glyphs() -> FT2Font:
    return get_font(findfont(FontProperties(family=FONT)))


class Ruler:
    """Measures text as it will be drawn, in inches."""

    def __init__(self) -> None:
        self._renderer = RendererAgg(_DPI, _DPI, _DPI)  # type: ignore[no-untyped-call]  # matplotlib leaves it untyped

    def width(self, text: str, size_pt: float) -> float:
        """Return the width of one line of text, inches."""
        if not text:
            return 0.0
        font = FontProperties(family=FONT, size=size_pt)
        width, _, _ = self._renderer.get_text_width_height_descent(drawable(text), font, False)  # type: ignore[no-untyped-call]
        return float(width) / _DPI

    def wrap(self, text: str, size_pt: float, width_in: float) -> list[str]:
        """Break text at spaces into lines no wider than ``width_in``; a longer word gets a line of its own."""
        lines: list[str] = []
        for word in text.split(" "):
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self.width(longer, size_pt) <= width_in:
                lines[-1] = longer
            else:
                lines.append(word)
        return lines

    def shorten(self, text: str, size_pt: float, width_in: float) -> str:
        """Cut the middle out of text that is too wide, so that its start and its end stay."""
        if self.width(text, size_pt) <= width_in:
            return text
        for keep in range(len(text) - 1, 1, -1):
            head = (keep + 1) // 2
            short = f"{text[:head]}…{text[len(text) - (keep - head) :]}"
            if self.width(short, size_pt) <= width_in:
                return short
        return text[:1] + "…"


def spread(wanted: Sequence[float], height: float, low: float, high: float) -> list[float] | None:
    """Move label centres as little as possible (least squares) so that boxes of ``height`` do not overlap.

    All boxes stay between ``low`` and ``high``. With z_i = y_i - i·height over the sorted labels, no overlap means that
    z does not decrease, so the optimum is the isotonic regression of z, clipped. Returns None if they do not fit.
    """
    n = len(wanted)
    if n * height > high - low:
        return None
    if n == 0:
        return []
    order = np.argsort(np.asarray(wanted), kind="stable")
    offsets = height * np.arange(n)
    z = isotonic_regression(np.asarray(wanted, dtype=np.float64)[order] - offsets).x
    placed = np.clip(z, low + height / 2, high - height / 2 - offsets[-1]) + offsets
    out = np.empty(n)
    out[order] = placed
    return [float(y) for y in out]
