"""The four panels: each function draws one quantity of every group into the axes it is given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.transforms import blended_transform_factory

from plotting.clean import Run
from plotting.curves import Curve, GroupCurves
from plotting.schema import FloatArray, IntArray
from plotting.theme import ALARM, GREY, GRID, HAIRLINE, Preset, Style
from plotting.transform import thin

PIXELS_PER_INCH = 200
"""Resolution that thinning works for, and that PNG files have."""
MOST_BANDS = 8
"""Groups up to which bands are drawn; more would lie on top of each other and hide the lines."""
_FAR = 10.0  # a group with a gap this many times the median group's leaves the view, so that the others can be read
_TICKS_ONLY_ABOVE = 24  # resumed attempts; more full-height hairlines than this would be a hatching


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """What every panel needs beside its axes."""

    styles: Mapping[str, Style]
    """Group label to style."""
    preset: Preset
    columns: int
    """Pixel columns of a panel, for thinning."""
    raw_alpha: float
    """Opacity of a line of logged values."""
    band_alpha: float
    """Opacity of a band; 0 draws none."""

    @classmethod
    def of(cls, curves: Sequence[GroupCurves], *, styles: Mapping[str, Style], preset: Preset, columns: int) -> Canvas:
        """Choose opacities that keep the overlap of all groups readable."""
        groups = max(len(curves), 1)
        return cls(
            styles=styles,
            preset=preset,
            columns=columns,
            raw_alpha=min(0.2, max(0.08, 1 - 0.5 ** (1 / groups))),
            band_alpha=min(0.13, 0.45 / groups) if has_bands(curves) else 0.0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LineEnd:
    """Where a line ends, for a label beside it."""

    label: str
    value: float
    """y at the end, data units."""
    style: Style


def has_bands(curves: Sequence[GroupCurves]) -> bool:
    """Return whether the figure shows spreads as bands."""
    return len(curves) <= MOST_BANDS and any(len(c.group.runs) > 1 for c in curves)


def gid(*parts: object) -> str:
    """Return an element id for SVG files from readable parts."""
    return re.sub(r"[^A-Za-z0-9.@-]+", "_", "-".join(str(p) for p in parts))


def draw_loss(ax: Axes, curves: Sequence[GroupCurves], canvas: Canvas) -> None:
    """Training loss: logged values faint, smoothed mean and band, the end enlarged, resumes, non-finite marks."""
    ax.set_ylabel("training loss (nats/token)")
    drawn = [c for c in curves if not c.loss.is_empty]
    if not drawn:
        _empty(ax, "no training step logged yet")
    for c in _baseline_last(drawn):
        style = canvas.styles[c.group.label]
        _raw(ax, c.loss, style, canvas, "loss")
        _replaced(ax, c.group.runs, style, canvas)
        _line(ax, c.loss, style, canvas, gid("loss", c.group.label))
    if drawn:
        values = _finite([s for c in drawn for _, s in c.loss.raw])
        starts = [float(_finite([y])[0]) for c in drawn for _, y in c.loss.raw if len(_finite([y]))]
        if len(values):
            top = min(float(values.max()), 1.15 * max(starts))  # a diverging run must not flatten the others
            _limits(ax, float(values.min()), top)
            _mark_outside(ax, drawn, lambda c: c.loss, canvas)
            has_crosses = any(r.status.kind == "nonfinite" for c in curves for r in c.group.runs)
            _zoom(ax, drawn, canvas, ceiling=0.9 if has_crosses else 0.97)
    _boundaries(ax, curves, canvas)
    _mark_stops(ax, curves, canvas, "loss")


def draw_gap(ax: Axes, curves: Sequence[GroupCurves], canvas: Canvas, baseline: str) -> list[LineEnd]:
    """Smoothed difference of the training loss to the baseline, mean and ±1 sd over seed pairs.

    The grey band is ±1 sd of the baseline's own smoothed loss over its seeds: how far one run of it lies from the mean
    of all. Limits follow the gaps after the first tenth of the run, those of diverging groups aside; a mean outside is
    marked.
    """
    ax.set_ylabel(f"gap to {baseline} (nats/token)")
    bases = [c for c in curves if c.is_baseline and not c.loss.is_empty]
    drawn = [(c, c.gap) for c in curves if c.gap is not None]
    if not bases or not drawn:
        missing = f"no {baseline} run" if not bases else f"no recipe shares a seed and settings with {baseline}"
        _empty(ax, f"{missing}: nothing to compare")
        return []
    ends: list[LineEnd] = []
    last = max(int(gap.stacked.steps[-1]) for _, gap in drawn)
    extents: list[FloatArray] = []
    for c, gap in drawn:
        style = canvas.styles[c.group.label]
        _line(ax, gap, style, canvas, gid("gap", c.group.label))
        late = gap.stacked.steps >= last / 10
        sd = gap.stacked.sd
        inner = [gap.stacked.values[:, late]]
        if sd is not None and canvas.band_alpha:
            inner += [(gap.stacked.mean - sd)[late], (gap.stacked.mean + sd)[late]]
        extents.append(_finite(inner))
        ends += _end(c, gap, last, style)
    values = _near(extents)
    if not len(values):
        values = _finite([gap.stacked.values for _, gap in drawn])
    low, high = (min(0.0, float(values.min())), max(0.0, float(values.max()))) if len(values) else (-1.0, 1.0)
    _limits(ax, low, high, pad=0.08)
    _noise_band(ax, bases, canvas, baseline)
    base_style = canvas.styles[bases[0].group.label]
    zero = ax.axhline(0.0, color=base_style.color, linewidth=base_style.width_pt, zorder=2.5)
    zero.set_gid("gap-zero")
    ends.append(LineEnd(label=baseline, value=0.0, style=base_style))
    _mark_outside(ax, [c for c, _ in drawn], lambda c: c.gap, canvas)
    _mark_stops(ax, [c for c in curves if c.gap is not None], canvas, "gap")
    return ends


def draw_grad_norm(ax: Axes, curves: Sequence[GroupCurves], canvas: Canvas) -> None:
    """Global gradient norm before clipping, logarithmic."""
    ax.set_ylabel("grad norm (before clipping)")
    drawn = [c for c in curves if not c.grad_norm.is_empty]
    values = _finite([y for c in drawn for _, y in c.grad_norm.raw])
    values = values[values > 0]
    if not len(values):
        _empty(ax, "no gradient norm logged yet")
    else:
        ax.set_yscale("log")
        for c in _baseline_last(drawn):
            style = canvas.styles[c.group.label]
            _raw(ax, c.grad_norm, style, canvas, "grad_norm")
            _line(ax, c.grad_norm, style, canvas, gid("grad_norm", c.group.label))
        low, high = float(values.min()), float(values.max())
        ax.set_ylim(low / 1.1, high * 1.1 if high > low else low * 2)
        _plain_log_ticks(ax)
    _mark_points(ax, curves, canvas, "grad_norm")


def draw_validation(ax: Axes, curves: Sequence[GroupCurves], canvas: Canvas) -> list[LineEnd]:
    """Validation loss where it was evaluated; the entropy of the corpus's token frequencies as a hairline.

    The first fifth of the run sets no limit, because its descent would flatten the rest: it is marked at the edge.
    """
    ax.set_ylabel("validation loss (nats/token)")
    drawn = [c for c in curves if not c.val_loss.is_empty]
    ends: list[LineEnd] = []
    if not drawn:
        _empty(ax, "no validation yet")
        _mark_points(ax, curves, canvas, "val_loss")
        return ends
    last = max(int(c.val_loss.stacked.steps[-1]) for c in drawn)
    for c in _baseline_last(drawn):
        style = canvas.styles[c.group.label]
        _line(ax, c.val_loss, style, canvas, gid("val_loss", c.group.label), marker=True)
        ends += _end(c, c.val_loss, last, style)
    values = _finite([y[steps > last / 5] for c in drawn for steps, y in c.val_loss.smoothed])
    if not len(values):
        values = _finite([y for c in drawn for _, y in c.val_loss.smoothed])
    entropies = sorted({r.started.unigram_entropy for c in curves for r in c.group.runs} - {None}, key=str)
    if len(values):
        shown = [h for h in entropies if h is not None]
        _limits(ax, min([float(values.min()), *shown]), max([float(values.max()), *shown]), pad=0.07)
        for entropy in shown:
            line = ax.axhline(entropy, color=HAIRLINE, linewidth=0.6, zorder=1.5)
            line.set_gid(gid("unigram_entropy", f"{entropy:.4f}"))
            ax.text(
                0.99, entropy, f"unigram entropy {entropy:.2f}", ha="right", va="bottom", color=GREY,
                fontsize=canvas.preset.small_pt * 0.93, transform=blended_transform_factory(ax.transAxes, ax.transData),
            )  # fmt: skip
        _mark_outside(ax, drawn, lambda c: c.val_loss, canvas)
    _mark_points(ax, curves, canvas, "val_loss")
    return sorted(ends, key=lambda e: e.value)


def finish(ax: Axes, *, last_step: int, xlabel: str | None) -> None:
    """Give a panel its step axis and its grid."""
    ax.set_xlim(0, max(last_step, 1) * 1.005)
    ax.grid(axis="y", color=GRID, linewidth=0.5)
    ax.tick_params(axis="x", labelbottom=xlabel is not None)
    if xlabel is not None:
        ax.set_xlabel(xlabel)


def _baseline_last(curves: Sequence[GroupCurves]) -> list[GroupCurves]:
    """Order for drawing: the baseline lies below the others where they coincide, as it is the thicker line."""
    return sorted(curves, key=lambda c: not c.is_baseline)


def _finite(arrays: Sequence[FloatArray]) -> FloatArray:
    joined = np.concatenate([np.ravel(a) for a in arrays]) if arrays else np.zeros(0)
    finite: FloatArray = joined[np.isfinite(joined)]
    return finite


def _line(
    ax: Axes, curve: Curve, style: Style, canvas: Canvas, name: str, *, marker: bool = False, bands: bool = True
) -> None:
    """Draw mean and ±1 sd where all seeds have a value, and thin single-seed lines beyond."""
    stacked = curve.stacked
    steps, mean = stacked.steps[stacked.complete], stacked.mean[stacked.complete]
    sd = stacked.sd
    if sd is not None and bands and canvas.band_alpha and len(steps):
        low, high = mean - sd[stacked.complete], mean + sd[stacked.complete]
        ax.fill_between(
            steps, low, high, color=style.color, alpha=canvas.band_alpha, linewidth=0, zorder=2, gid=f"{name}-band"
        )
    look: dict[str, Any] = {"color": style.color, "linestyle": style.dash}
    dot: dict[str, Any] = {"marker": "o", "markersize": 2.1 * style.width_pt, "markeredgewidth": 0.0} if marker else {}
    x, y = thin(steps, mean, canvas.columns)
    ax.plot(x, y, linewidth=style.width_pt, zorder=3, gid=name, **look, **dot)
    whole = int(steps[-1]) if len(steps) else -1
    for run, (own, values) in zip(curve.runs, curve.smoothed, strict=True):
        beyond = own >= whole
        if len(curve.runs) > 1 and np.isfinite(values[own > whole]).any():
            x, y = thin(own[beyond], values[beyond], canvas.columns)
            ax.plot(x, y, linewidth=0.5 * style.width_pt, zorder=3, gid=f"{name}-seed{run.info.seed}", **look, **dot)


def _raw(ax: Axes, curve: Curve, style: Style, canvas: Canvas, panel: str) -> None:
    for run, (steps, values) in zip(curve.runs, curve.raw, strict=True):
        x, y = thin(steps, np.where(np.isfinite(values), values, np.nan), canvas.columns)
        name = gid("raw", panel, run.info.run_id)
        ax.plot(x, y, color=style.color, linewidth=0.45 * style.width_pt, alpha=canvas.raw_alpha, zorder=1.8, gid=name)


def _replaced(ax: Axes, runs: Sequence[Run], style: Style, canvas: Canvas) -> None:
    for run in runs:
        for steps, values in run.replaced("loss"):
            order = np.argsort(steps, kind="stable")
            x, y = thin(steps[order], np.where(np.isfinite(values), values, np.nan)[order], canvas.columns)
            name = gid("superseded", run.info.run_id)
            ax.plot(
                x, y, color=style.color, linewidth=0.6 * style.width_pt, alpha=0.3, linestyle=":", zorder=1.7, gid=name
            )


def _limits(ax: Axes, low: float, high: float, pad: float = 0.04) -> None:
    margin = pad * (high - low) or pad * max(abs(high), 1e-6)
    ax.set_ylim(low - margin, high + margin)


def _near(extents: Sequence[FloatArray]) -> FloatArray:
    """Join the values of groups that are no more than ``_FAR`` times as far from 0 as the (lower) median group."""
    reach = [float(np.abs(values).max()) if len(values) else 0.0 for values in extents]
    typical = sorted(reach)[(len(reach) - 1) // 2]
    return _finite([values for values, r in zip(extents, reach, strict=True) if r <= _FAR * typical])


def _end(c: GroupCurves, curve: Curve, last: int, style: Style) -> list[LineEnd]:
    """Return where the mean ends, or the mean of the seeds that go on; nothing before the last tenth of the axis."""
    lasting = []
    for steps, values in curve.smoothed:
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite) and steps[finite[-1]] >= 0.9 * last:
            lasting.append(float(values[finite[-1]]))
    if not lasting:
        return []
    whole = curve.stacked.steps[curve.stacked.complete]
    if len(whole) and whole[-1] >= 0.9 * last:
        value, count = float(curve.stacked.mean[curve.stacked.complete][-1]), len(c.group.runs)
    else:
        value, count = float(np.mean(lasting)), len(lasting)
    label = c.group.label if count == len(c.group.runs) else f"{c.group.label} ({count}/{len(c.group.runs)})"
    return [LineEnd(label=label, value=value, style=style)]


def _zoom(ax: Axes, drawn: Sequence[GroupCurves], canvas: Canvas, *, ceiling: float) -> None:
    """Enlarge the last fifth in the empty corner above a falling curve; leave it out where there is no empty corner.

    ``ceiling`` is the upper edge of the corner as a fraction of the axes.
    """
    last = max(int(c.loss.stacked.steps[-1]) for c in drawn)
    start = 0.8 * last
    bottom, top = ax.get_ylim()
    below = _finite([y[steps > 0.42 * last] for c in drawn for steps, y in c.loss.raw])
    values = _finite([y[steps >= start] for c in drawn for steps, y in c.loss.smoothed])
    if last < 20 or len(values) < 4:
        return
    floor = max(0.45, (float(below.max()) - bottom) / (top - bottom) + 0.12)  # with room for the ticks
    if ceiling - floor < 0.3:
        return
    # Hairlines of resumed runs would cross the tick labels.
    ax.add_patch(Rectangle((0.40, floor - 0.1), 0.6, ceiling - floor + 0.1, color="white", transform=ax.transAxes))
    inset = ax.inset_axes((0.50, floor, 0.485, ceiling - floor))
    inset.set_gid("loss-zoom")
    for c in _baseline_last(drawn):
        style = canvas.styles[c.group.label]
        thinner = Style(color=style.color, dash=style.dash, width_pt=0.8 * style.width_pt)
        _line(inset, c.loss, thinner, canvas, gid("zoom", c.group.label), bands=False)
    inset.set_xlim(start, last)
    _limits(inset, float(values.min()), float(values.max()), pad=0.06)
    inset.tick_params(labelsize=canvas.preset.small_pt * 0.85, pad=1.5, length=1.8)
    inset.locator_params(axis="both", nbins=4)
    inset.grid(axis="y", color=GRID, linewidth=0.5)
    inset.set_title("last 20 %", fontsize=canvas.preset.small_pt * 0.93, pad=2, color=GREY, loc="right")


def _noise_band(ax: Axes, bases: Sequence[GroupCurves], canvas: Canvas, baseline: str) -> None:
    if len(bases) != 1:
        return
    stacked = bases[0].loss.stacked
    sd = stacked.sd
    if sd is None or not stacked.complete.any():
        return
    steps, half = stacked.steps[stacked.complete], _pooled(sd[stacked.complete])
    steps, half = thin(steps, half, canvas.columns)
    typical = float(np.median(half[steps >= steps[-1] / 10]))
    bottom, top = ax.get_ylim()
    if typical >= max(top, -bottom):
        # The whole panel would be grey and say nothing, so it is said in words.
        ax.text(
            0.985, 0.975, f"{baseline} seed-to-seed sd ≈ {typical:.2g}, wider than this view", ha="right", va="top",
            color=GREY, fontsize=canvas.preset.small_pt * 0.93, transform=ax.transAxes, gid="gap-noise-note",
        )  # fmt: skip
        return
    ax.fill_between(steps, -half, half, color="#000000", alpha=0.08, linewidth=0, zorder=1, gid="gap-noise")


def _pooled(sd: FloatArray) -> FloatArray:
    """Average the variance over a tenth of the run around each point: that of two or three seeds alone is mostly noise.

    Near the ends the window holds fewer points.
    """
    window = np.ones(max(1, len(sd) // 10))
    pooled: FloatArray = np.sqrt(np.convolve(sd**2, window, "same") / np.convolve(np.ones(len(sd)), window, "same"))
    return pooled


def _mark_outside(
    ax: Axes, drawn: Sequence[GroupCurves], pick: Callable[[GroupCurves], Curve | None], canvas: Canvas
) -> None:
    """Put a triangle on the edge where a group's mean is farthest outside the view."""
    bottom, top = ax.get_ylim()
    transform = blended_transform_factory(ax.transData, ax.transAxes)
    for c in drawn:
        curve = pick(c)
        if curve is None:
            continue
        steps, mean = curve.stacked.steps, curve.stacked.mean
        for sign, edge, y, shape in ((1.0, top, 0.985, "^"), (-1.0, -bottom, 0.015, "v")):
            beyond = np.where(np.isfinite(mean), sign * mean - edge, -math.inf)
            if len(beyond) and float(beyond.max()) > 0:
                at = int(steps[int(beyond.argmax())])
                style = canvas.styles[c.group.label]
                ax.plot(
                    [at], [y], marker=shape, markersize=2.6 * style.width_pt, color=style.color, markeredgewidth=0,
                    linestyle="none", transform=transform, clip_on=False, zorder=4,
                    gid=gid("outside", c.group.label, at),
                )  # fmt: skip


def _boundaries(ax: Axes, curves: Sequence[GroupCurves], canvas: Canvas) -> None:
    found = [(c, run, step) for c in curves for run in c.group.runs for step in run.boundaries]
    height = 1.0 if len(found) <= _TICKS_ONLY_ABOVE else 0.03
    for c, run, step in found:
        ax.axvline(
            step, ymax=height, color=canvas.styles[c.group.label].color, linewidth=0.5, alpha=0.45, zorder=1.2,
            gid=gid("resumed", run.info.run_id, step),
        )  # fmt: skip


def _mark_stops(ax: Axes, curves: Sequence[GroupCurves], canvas: Canvas, panel: str) -> None:
    for c in curves:
        for run in c.group.runs:
            if run.status.kind == "nonfinite":
                _cross(ax, run, run.status.step, canvas.styles[c.group.label], panel)


def _mark_points(ax: Axes, curves: Sequence[GroupCurves], canvas: Canvas, metric: str) -> None:
    for c in curves:
        for run in c.group.runs:
            for point in run.nonfinite:
                if point.metric == metric:
                    _cross(ax, run, point.step, canvas.styles[c.group.label], metric)


def _cross(ax: Axes, run: Run, step: int, style: Style, panel: str) -> None:
    """Draw ✕ on the upper edge: there is a number here and it is NaN or infinite."""
    ax.plot(
        [step], [1.0], marker="X", markersize=4.5 * style.width_pt, color=style.color, markeredgecolor="white",
        markeredgewidth=0.4, linestyle="none", transform=blended_transform_factory(ax.transData, ax.transAxes),
        clip_on=False, zorder=6, gid=gid("nonfinite", panel, run.info.run_id, f"step{step}"),
    )  # fmt: skip


def _plain_log_ticks(ax: Axes) -> None:
    """Label a short logarithmic axis with plain numbers; one decade would otherwise show a single power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_ylim()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(LogLocator(base=10, subs=tuple(range(2, 10))))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _empty(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, ha="center", va="center", color=ALARM, transform=ax.transAxes, wrap=True)
    ax.set_yticks([])


def last_step(curves: Sequence[GroupCurves]) -> int:
    """Return the last step that any run has reached, for the common x axis."""
    arrays: list[IntArray] = [c.loss.stacked.steps for c in curves] + [c.val_loss.stacked.steps for c in curves]
    return max((int(a[-1]) for a in arrays if len(a)), default=0)
