"""The final table: one row a group, every number with its n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plotting import transform
from plotting.clean import Run
from plotting.group import Group, own_reference, pick_reference
from plotting.schema import IntArray, PlotError, RecipeInfo
from plotting.stats import Estimate, PairedDifference, estimate, paired_difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A group against another one, paired by seed, on the mean training loss of the last W common points."""

    reference: str
    """Label of the group compared with."""
    loss: PairedDifference
    """Difference of the training loss, nats/token."""
    val_loss: PairedDifference | None
    """Difference of the validation loss at the last step evaluated in all pairs; None without one."""
    seeds: tuple[int, ...]
    """Seeds of the pairs."""
    at_step: int
    """Last step averaged."""
    is_final: bool
    """False while no pair has finished: the numbers are those of ``at_step``."""
    left_out: tuple[int, ...]
    """Seeds without a pair: one side is non-finite, unfinished or absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    group: Group
    window: int
    """Logged points that the training loss averages (W)."""
    steps: int
    """Optimizer steps planned."""
    loss: Estimate | None
    """Mean training loss of the last W logged points up to ``at_step``, over the seeds used, nats/token."""
    val_loss: Estimate | None
    """Validation loss at the last step that all seeds used have evaluated, nats/token."""
    val_step: int | None
    """That step."""
    at_step: int
    """Last step averaged."""
    is_final: bool
    """False while no seed has finished."""
    seeds_used: tuple[int, ...]
    """Seeds in the means: the finished ones, or, while none is, those that are under way."""
    against_baseline: Comparison | None
    """Against the baseline of the whole comparison; None for itself and without pairs."""
    against_reference: Comparison | None
    """Against the recipe's own reference; None without one."""
    time_ratio: float | None
    """Median step time divided by the baseline's, median over seed pairs."""
    status: str
    """State of the seeds in words."""
    attempts: int
    """Largest number of attempts of a seed."""
    nonfinite_blocks: int
    """Quantised blocks with an Inf or NaN, over all logged steps and seeds."""


def build_rows(
    groups: Sequence[Group], *, baseline: str, recipes: Mapping[str, RecipeInfo], last: int | None
) -> list[Row]:
    """Compute the table; ``last`` is the number of points averaged, None for :func:`transform.default_window`.

    Raises:
        PlotError: if ``last`` is below 1 or more than a run logs.
    """
    _check_window(groups, last)
    rows = []
    for group in groups:
        window = window_of(group, last)
        used, at_step, is_final = _usable(group.runs)
        val_step, val_loss = _validation(used, at_step)
        losses = [_tail_mean(run.series("loss"), at_step, window) for run in used]
        base = pick_reference(groups, baseline, group)
        own = own_reference(groups, group, recipes)
        rows.append(
            Row(
                group=group,
                window=window,
                steps=group.runs[0].info.steps,
                loss=estimate(losses) if losses else None,
                val_loss=val_loss,
                val_step=val_step,
                at_step=at_step,
                is_final=is_final,
                seeds_used=tuple(run.info.seed for run in used),
                against_baseline=None if base is None or base is group else compare(group, base, window),
                against_reference=None if own is None or own is group else compare(group, own, window),
                time_ratio=None if base is None else _time_ratio(group, base),
                status=status_text(group.runs),
                attempts=max(run.attempts for run in group.runs),
                nonfinite_blocks=sum(_nonfinite_blocks(run) for run in group.runs),
            )
        )
    return rows


def window_of(group: Group, last: int | None) -> int:
    """Return W for a group: ``last``, or the default for the number of points its runs log."""
    info = group.runs[0].info
    return last if last is not None else transform.default_window(transform.logged_points(info.steps, info.log_every))


def compare(group: Group, reference: Group, window: int) -> Comparison | None:
    """Compare two groups by seed pairs; None if no seed has usable runs in both."""
    others = reference.by_seed()
    pairs = [(run, others[run.info.seed]) for run in group.runs if run.info.seed in others]
    finished = [p for p in pairs if all(run.status.kind == "finished" for run in p)]
    used = finished or [p for p in pairs if all(run.status.kind in ("finished", "unfinished") for run in p)]
    common = [(p, transform.difference(p[0].series("loss"), p[1].series("loss"))) for p in used]
    common = [(p, d) for p, d in common if len(d[0])]
    if not common:
        return None
    at_step = min(int(steps[-1]) for _, (steps, _) in common)
    differences = [_tail_mean(d, at_step, window) for _, d in common]
    seeds = tuple(p[0].info.seed for p, _ in common)
    every = {run.info.seed for run in (*group.runs, *reference.runs)}
    return Comparison(
        reference=reference.label,
        loss=paired_difference(differences),
        val_loss=_validation_difference([p for p, _ in common], at_step),
        seeds=seeds,
        at_step=at_step,
        is_final=bool(finished),
        left_out=tuple(sorted(every - set(seeds))),
    )


def status_text(runs: Sequence[Run]) -> str:
    """Return ``finished`` if all seeds are in one state, else the states with their seeds."""
    texts: dict[str, list[int]] = {}
    for run in runs:
        texts.setdefault(run.status.text, []).append(run.info.seed)
    if len(texts) == 1:
        return next(iter(texts))
    parts = []
    for text, seeds in texts.items():
        named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        parts.append(f"{len(seeds)} finished" if text == "finished" else f"{named}: {text}")
    return "; ".join(parts)


def _check_window(groups: Sequence[Group], last: int | None) -> None:
    if last is None:
        return
    if last < 1:
        raise PlotError([f"--last {last}: expected auto or a number of logged points, at least 1"])
    problems = []
    for group in groups:
        info = group.runs[0].info
        logged = transform.logged_points(info.steps, info.log_every)
        if last > logged:
            problems.append(
                f"--last {last}: the runs of {group.label} log {logged} points; expected 1 to {logged}, or auto"
            )
    if problems:
        raise PlotError(problems)


def _usable(runs: Sequence[Run]) -> tuple[list[Run], int, bool]:
    """Return the runs to average, the last step to average and whether they have finished.

    Finished runs if there are any, else those under way, cut to the step that the slowest has reached. Non-finite runs
    have no final loss; the status column and the sentences below the table name them.
    """
    finished = [run for run in runs if run.status.kind == "finished" and len(run.series("loss")[0])]
    if finished:
        return finished, min(int(run.series("loss")[0][-1]) for run in finished), True
    running = [run for run in runs if run.status.kind == "unfinished" and len(run.series("loss")[0])]
    if running:
        return running, min(int(run.series("loss")[0][-1]) for run in running), False
    return [], 0, False


def _tail_mean(series: transform.Series, at_step: int, window: int) -> float:
    steps, values = series
    return float(values[steps <= at_step][-window:].mean())


def _validation(runs: Sequence[Run], at_step: int) -> tuple[int | None, Estimate | None]:
    series = [run.series("val_loss") for run in runs]
    common = _last_common([s for s, _ in series], at_step)
    if common is None:
        return None, None
    return common, estimate([float(v[s == common][0]) for s, v in series])


def _validation_difference(pairs: Sequence[tuple[Run, Run]], at_step: int) -> PairedDifference | None:
    differences = [transform.difference(a.series("val_loss"), b.series("val_loss")) for a, b in pairs]
    common = _last_common([s for s, _ in differences], at_step)
    if common is None:
        return None
    return paired_difference([float(v[s == common][0]) for s, v in differences])


def _last_common(steps: Sequence[IntArray], at_step: int) -> int | None:
    if not steps:
        return None
    shared = set(steps[0].tolist()).intersection(*(s.tolist() for s in steps[1:]))
    return max((s for s in shared if s <= at_step), default=None)


def _time_ratio(group: Group, baseline: Group) -> float | None:
    others = baseline.by_seed()
    ratios = []
    for run in group.runs:
        other = others.get(run.info.seed)
        mine, theirs = _step_time(run), None if other is None else _step_time(other)
        if mine is not None and theirs:
            ratios.append(mine / theirs)
    return float(np.median(ratios)) if ratios else None


def _step_time(run: Run) -> float | None:
    _, seconds = run.series("step_time_s")
    return float(np.median(seconds)) if len(seconds) else None


def _nonfinite_blocks(run: Run) -> int:
    _, counts = run.series("nonfinite_blocks")
    return int(counts.sum())
