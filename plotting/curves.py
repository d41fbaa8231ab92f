"""The curves of a comparison, ready to draw and to export: smoothed, differenced, stacked over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plotting.clean import Run
from plotting.group import Group, pick_reference
from plotting.transform import Ensemble, Series, Smoothing, difference, ensemble


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One quantity of one group: a series a seed, raw and smoothed, and the smoothed ones stacked."""

    runs: tuple[Run, ...]
    """The runs behind the series, in the same order."""
    raw: tuple[Series, ...]
    """As logged (for the gap: the difference of what was logged)."""
    smoothed: tuple[Series, ...]
    """Smoothed over every point, before any thinning."""
    stacked: Ensemble
    """The smoothed series on the union of their steps."""

    @property
    def is_empty(self) -> bool:
        """True if no seed has a point."""
        return len(self.stacked.steps) == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCurves:
    """What the four panels show of one group."""

    group: Group
    loss: Curve
    """Training loss, nats/token."""
    grad_norm: Curve
    """Gradient norm before clipping."""
    val_loss: Curve
    """Validation loss, nats/token; never smoothed."""
    gap: Curve | None
    """Training loss minus the baseline's of the same seed on the steps both have; None for the baseline itself and
    without a partner."""
    is_baseline: bool
    """True for the groups that gaps are measured from."""


def build_curves(groups: Sequence[Group], *, baseline: str, smoothing: Smoothing) -> list[GroupCurves]:
    """Compute the curves of every group."""
    out = []
    raw = Smoothing(weight=None)
    for group in groups:
        reference = pick_reference(groups, baseline, group)
        gap = None
        if reference is not None and reference is not group:
            others = reference.by_seed()
            runs = tuple(run for run in group.runs if run.info.seed in others)
            pairs = [difference(run.series("loss"), others[run.info.seed].series("loss")) for run in runs]
            gap = _curve(runs, pairs, smoothing)
        out.append(
            GroupCurves(
                group=group,
                loss=_curve(group.runs, [r.series("loss") for r in group.runs], smoothing),
                grad_norm=_curve(group.runs, [r.series("grad_norm") for r in group.runs], smoothing),
                val_loss=_curve(group.runs, [r.series("val_loss") for r in group.runs], raw),
                gap=None if gap is None or gap.is_empty else gap,
                is_baseline=reference is group,
            )
        )
    return out


def _curve(runs: Sequence[Run], series: Sequence[Series], smoothing: Smoothing) -> Curve:
    filled = [(run, s) for run, s in zip(runs, series, strict=True) if len(s[0])]
    smoothed = tuple((steps, smoothing(values)) for _, (steps, values) in filled)
    return Curve(
        runs=tuple(run for run, _ in filled),
        raw=tuple(s for _, s in filled),
        smoothed=smoothed,
        stacked=ensemble(smoothed),
    )
