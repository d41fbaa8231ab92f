"""The comparison figure: legend, four panels, direct labels, caption; laid out in inches, so that nothing collides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from plotting import panels
from plotting.curves import GroupCurves
from plotting.labels import Ruler, drawable, spread
from plotting.panels import Canvas, LineEnd
from plotting.theme import ALARM, GREY, Preset, rc_params, styles

_LINE, _LEGEND_LINE, _LABEL_LINE = 1.28, 1.45, 1.18  # line spacing, in type sizes
_TOP, _BOTTOM, _SIDE = 0.06, 0.05, 0.05  # outer margins, inches
_HANDLE_EM = 2.4  # a legend's line sample and the space behind it, in type sizes
_LEADER_IN = 0.13  # from the axes to a direct label


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureText:
    """Words on the figure."""

    caption: str
    """What lines, bands and marks are."""
    provenance: str
    """Command, runs, revision: one line."""
    warnings: tuple[str, ...]
    """Why the comparison is not what it seems; drawn in red."""


def draw(curves: Sequence[GroupCurves], *, baseline: str, preset: Preset, text: FigureText) -> Figure:
    """Draw the comparison. The figure belongs to no global state; save it with :func:`plotting.export.save_figure`."""
    with matplotlib.rc_context(rc_params(preset)):
        return _Layout(curves, baseline=baseline, preset=preset, text=text).figure


class _Layout:
    """Sizes first, from measured text; then the panels."""

    def __init__(self, curves: Sequence[GroupCurves], *, baseline: str, preset: Preset, text: FigureText) -> None:
        self.curves, self.preset, self.ruler = curves, preset, Ruler()
        self.styles = styles([c.group for c in curves], baseline, preset)
        self.width = preset.width_in
        self.em = preset.font_pt / 72
        self.small = preset.small_pt / 72
        left = self.left = 4.6 * self.em + _SIDE
        margin = self.width - 2 * _SIDE
        warnings = [line for w in text.warnings for line in self.ruler.wrap(w, preset.small_pt, margin)]
        caption = self.ruler.wrap(text.caption, preset.small_pt, margin)
        caption += self.ruler.wrap(
            self.ruler.shorten(text.provenance, preset.small_pt, 1.8 * margin), preset.small_pt, margin
        )
        legend = self._place_legend(self._legend_entries())
        legend_height = (1 + max((row for _, _, row, _ in legend), default=0)) * _LEGEND_LINE * self.em
        warning_height = len(warnings) * _LINE * self.small + (0.5 * self.small if warnings else 0.0)
        caption_height = len(caption) * _LINE * self.small
        rows = 4 // preset.columns
        row_gap, xlabel = 1.3 * self.em, 3.3 * self.em
        above = _TOP + legend_height + warning_height + 1.1 * self.em
        below = xlabel + 0.5 * self.small + caption_height + _BOTTOM
        panel_height = self._panel_height()
        if preset.height_in is None:
            self.height = above + rows * panel_height + (rows - 1) * row_gap + below
        else:
            self.height = preset.height_in
            panel_height = max(1.0, (self.height - above - below - (rows - 1) * row_gap) / rows)
            self.height = above + rows * panel_height + (rows - 1) * row_gap + below
        self.label_width = self._label_width(baseline) if self._labels_height() <= panel_height else 0.0
        right = _LEADER_IN + self.label_width + 0.05 + _SIDE if self.label_width else 1.5 * self.em
        between = 6.0 * self.em
        panel_width = (self.width - left - right - between * (preset.columns - 1)) / preset.columns
        self.figure = Figure(figsize=(self.width, self.height))
        self._write_legend(legend)
        self._write_lines(warnings, _TOP + legend_height + 0.3 * self.small, ALARM)
        axes = []
        for index in range(4):
            row, column = divmod(index, preset.columns)
            x = left + column * (panel_width + between)
            y = self.height - above - panel_height - row * (panel_height + row_gap)
            axes.append(self._axes(x, y, panel_width, panel_height))
        self._draw_panels(axes, baseline, int(panel_width * panels.PIXELS_PER_INCH))
        self._write_lines(caption, self.height - _BOTTOM - caption_height, GREY)
        self._make_ids_unique()

    def _labels_height(self) -> float:
        """Return the height that the labels beside a panel take, one a group, inches."""
        return (_LABEL_LINE * len(self.curves) - 1.0) * self.small

    def _panel_height(self) -> float:
        needed = self._labels_height()
        preset = self.preset
        return max(preset.panel_height_in, needed) if needed <= preset.tallest_panel_in else preset.panel_height_in

    def _label_width(self, baseline: str) -> float:
        names = [baseline]
        for c in self.curves:
            total = len(c.group.runs)
            is_whole = all(run.status.kind == "finished" for run in c.group.runs)
            names.append(c.group.label if is_whole else f"{c.group.label} ({total}/{total})")
        return min(max(self.ruler.width(name, self.preset.small_pt) for name in names), 0.19 * self.width)

    def _axes(self, x: float, y: float, width: float, height: float) -> Axes:
        return self.figure.add_axes((x / self.width, y / self.height, width / self.width, height / self.height))

    def _draw_panels(self, axes: Sequence[Axes], baseline: str, pixel_columns: int) -> None:
        canvas = Canvas.of(self.curves, styles=self.styles, preset=self.preset, columns=pixel_columns)
        last = panels.last_step(self.curves)
        sizes = {run.info.tokens_per_step for c in self.curves for run in c.group.runs}
        xlabel = f"step ({sizes.pop():,} tokens each)" if len(sizes) == 1 else "step"
        loss, gap, grad_norm, validation = axes
        panels.draw_loss(loss, self.curves, canvas)
        gap_ends = panels.draw_gap(gap, self.curves, canvas, baseline)
        panels.draw_grad_norm(grad_norm, self.curves, canvas)
        val_ends = panels.draw_validation(validation, self.curves, canvas)
        for index, ax in enumerate(axes):
            is_lowest = index >= len(axes) - self.preset.columns
            panels.finish(ax, last_step=last, xlabel=xlabel if is_lowest else None)
            ax.yaxis.set_label_coords(-3.7 * self.em / (ax.get_position().width * self.width), 0.5)
        self._direct_labels(gap, gap_ends, "gap")
        self._direct_labels(validation, val_ends, "val_loss")

    def _direct_labels(self, ax: Axes, ends: Sequence[LineEnd], panel: str) -> None:
        """Write labels right of the axes, spread so that none overlaps, each joined to its line's end."""
        if not self.label_width:
            return  # the legend names them all
        box = ax.get_position()
        bottom, top = ax.get_ylim()
        height = box.height * self.height
        visible = [e for e in ends if bottom <= e.value <= top]
        wanted = [(e.value - bottom) / (top - bottom) * height for e in visible]
        placed = spread(wanted, _LABEL_LINE * self.small, -0.5 * self.small, height + 0.5 * self.small)
        if placed is None:
            return
        x, y = box.x1 * self.width, box.y0 * self.height
        for end, start, centre in zip(visible, wanted, placed, strict=True):
            line = Line2D(
                [x / self.width, (x + 0.35 * _LEADER_IN) / self.width, (x + 0.85 * _LEADER_IN) / self.width],
                [(y + start) / self.height, (y + start) / self.height, (y + centre) / self.height],
                transform=self.figure.transFigure, color=end.style.color, linewidth=0.5,
            )  # fmt: skip
            self.figure.add_artist(line)
            self._text(
                x + _LEADER_IN, y + centre, self.ruler.shorten(end.label, self.preset.small_pt, self.label_width),
                color=end.style.ink, size_pt=self.preset.small_pt, va="center_baseline",
                gid=panels.gid("label", panel, end.label),
            )  # fmt: skip

    def _make_ids_unique(self) -> None:
        """Number repeated element ids (equal run ids of two sweeps, several superseded parts of a run) for SVG."""
        seen: dict[str, int] = {}
        drawn = [*self.figure.artists, *self.figure.lines, *self.figure.texts]
        for ax in self.figure.axes:
            for part in (ax, *ax.child_axes):
                drawn += [part, *part.lines, *part.collections, *part.texts]
        for artist in drawn:
            name = artist.get_gid()
            if name is not None:
                seen[name] = seen.get(name, 0) + 1
                if seen[name] > 1:
                    artist.set_gid(f"{name}.{seen[name]}")

    def _legend_entries(self) -> list[tuple[Line2D, str]]:
        most = max((len(c.group.runs) for c in self.curves), default=0)
        entries = []
        for c in self.curves:
            style = self.styles[c.group.label]
            runs = c.group.runs
            bad = [f"seed {r.info.seed} {r.status.text}" for r in runs if r.status.kind == "nonfinite"]
            remarks = [bad[0].split(" ", 2)[2]] if bad and len(runs) == 1 else bad
            if len(runs) != most:
                remarks.append(f"n = {len(runs)}")
            name = c.group.label + (f"  [{', '.join(remarks)}]" if remarks else "")
            entries.append((Line2D([], [], color=style.color, linestyle=style.dash, linewidth=style.width_pt), name))
        if any(r.status.kind == "nonfinite" for c in self.curves for r in c.group.runs):
            cross = Line2D([], [], color=GREY, marker="X", linestyle="none", markersize=0.8 * self.preset.font_pt)
            cross.set_markeredgewidth(0.0)
            entries.append((cross, "non-finite (NaN or Inf)"))
        return entries

    def _place_legend(self, entries: Sequence[tuple[Line2D, str]]) -> list[tuple[Line2D, str, int, float]]:
        """Set entries in as many columns as fit, row by row; return each with its row and its x, inches."""
        widths = [_HANDLE_EM * self.em + self.ruler.width(name, self.preset.font_pt) for _, name in entries]
        gap, available = 1.6 * self.em, self.width - _SIDE - self.left
        for count in range(max(len(entries), 1), 0, -1):
            columns = [max(widths[i::count]) for i in range(min(count, len(entries)))]
            if sum(columns) + gap * (len(columns) - 1) <= available:
                break
        starts = [self.left + sum(columns[:i]) + gap * i for i in range(len(columns))]
        return [(handle, name, i // count, starts[i % count]) for i, (handle, name) in enumerate(entries)]

    def _write_legend(self, placed: Sequence[tuple[Line2D, str, int, float]]) -> None:
        for handle, name, row, x in placed:
            y = self.height - _TOP - (row + 0.5) * _LEGEND_LINE * self.em
            length = (_HANDLE_EM - 0.6) * self.em
            xs = [x + length / 2] if handle.get_marker() == "X" else [x, x + length]
            handle.set_transform(self.figure.transFigure)
            handle.set_data([v / self.width for v in xs], [y / self.height] * len(xs))
            self.figure.add_artist(handle)
            self._text(
                x + _HANDLE_EM * self.em, y, name, color="#111111", size_pt=self.preset.font_pt, va="center_baseline",
                gid=panels.gid("legend", name),
            )  # fmt: skip

    def _write_lines(self, lines: Sequence[str], from_top: float, color: str) -> None:
        for index, line in enumerate(lines):
            y = self.height - from_top - (index + 0.5) * _LINE * self.small
            self._text(_SIDE, y, line, color=color, size_pt=self.preset.small_pt, va="center_baseline", gid=None)

    def _text(self, x: float, y: float, text: str, *, color: str, size_pt: float, va: str, gid: str | None) -> None:
        artist = Text(
            x / self.width, y / self.height, drawable(text), color=color, fontsize=size_pt, ha="left", va=va,
            transform=self.figure.transFigure, parse_math=False,
        )  # fmt: skip
        artist.set_gid(gid)
        self.figure.add_artist(artist)
