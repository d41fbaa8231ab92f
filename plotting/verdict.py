"""The sentences below the table: what the numbers allow one to say, and what they do not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plotting.group import Group, Pairing, check_pairing, code_digests
from plotting.schema import RecipeInfo
from plotting.stats import PairedDifference
from plotting.table import Comparison, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One sentence for the reader."""

    level: Literal["warning", "info"]
    """``warning``: the comparison is not what it seems; it is drawn on the figure too."""
    text: str
    """The sentence."""
    short: str = ""
    """A form that fits on the figure; empty leaves the note off it."""


def notes(
    groups: Sequence[Group], rows: Sequence[Row], *, baseline: str, recipes: Mapping[str, RecipeInfo]
) -> tuple[Pairing, list[Note]]:
    """Return the pairing verdict and every sentence, warnings first."""
    pairing = check_pairing(groups)
    found = [
        *_pairing_notes(pairing),
        *_code_notes(groups),
        *_state_notes(groups),
        *_resume_notes(groups),
        *_baseline_notes(groups, rows, baseline),
        *_difference_notes(rows, baseline),
        *_control_notes(rows, recipes),
        *_recipe_notes(groups, recipes),
        *_time_notes(groups, rows, baseline),
    ]
    return pairing, sorted(found, key=lambda n: n.level != "warning")


def signed(value: float) -> str:
    """Write a loss difference with its sign, four decimals (the noise of short runs starts at the third)."""
    return f"{value:+.4f}"


def interval(difference: PairedDifference) -> str:
    """Write ``+0.0123 [+0.0100, +0.0146]``, or ``+0.0123 (1 seed, no interval)``."""
    if difference.low is None or difference.high is None:
        return f"{signed(difference.mean)} (1 seed, no interval)"
    return f"{signed(difference.mean)} [{signed(difference.low)}, {signed(difference.high)}]"


def _pairing_notes(pairing: Pairing) -> Iterator[Note]:
    listed = ". ".join(pairing.problems)
    if pairing.verdict == "paired":
        yield Note(level="info", text="Paired: per seed, all recipes share initial weights, first batch and corpus.")
    elif pairing.verdict == "unpaired":
        yield Note(
            level="warning",
            text=f"UNPAIRED: {listed}. Differences between these runs mix the recipe with another start or other data.",
            short="unpaired runs: the gap is not the recipe's alone",
        )
    else:
        yield Note(level="info", text=f"Pairing not verified: {listed}.")


def _code_notes(groups: Sequence[Group]) -> Iterator[Note]:
    digests = code_digests(groups)
    if len(digests) > 1:
        listed = "; ".join(f"{digest[:8]}: {', '.join(labels)}" for digest, labels in digests.items())
        yield Note(
            level="warning",
            text=f"MIXED CODE: the runs executed {len(digests)} versions of the engine ({listed}). "
            "Launch under a new sweep name to compare runs of one version.",
            short=f"runs of {len(digests)} code versions mixed",
        )


def _state_notes(groups: Sequence[Group]) -> Iterator[Note]:
    runs = [(group, run) for group in groups for run in group.runs]
    for group in groups:
        bad = [run for run in group.runs if run.status.kind == "nonfinite"]
        if not bad:
            continue
        listed = ", ".join(f"seed {run.info.seed} at step {run.status.step}" for run in bad)
        left = len(group.runs) - len(bad)
        rest = f" Its numbers are those of the other {_seeds(left)} and flatter it." if left else ""
        yield Note(
            level="warning",
            text=f"NON-FINITE: {group.label}: {len(bad)} of {_seeds(len(group.runs))} ({listed}).{rest}",
        )
    open_runs = [(g, r) for g, r in runs if r.status.kind in ("unfinished", "not started")]
    if open_runs:
        listed = "; ".join(f"{g.label} seed {r.info.seed}: {r.status.text}" for g, r in open_runs[:8])
        more = f"; and {len(open_runs) - 8} more" if len(open_runs) > 8 else ""
        yield Note(
            level="warning",
            text=f"UNFINISHED: {len(open_runs)} of {len(runs)} runs ({listed}{more}). This is what there is so far; "
            "means use the finished seeds where there are any.",
            short=f"{len(open_runs)} of {len(runs)} runs unfinished",
        )
    torn = [(g, r) for g, r in runs if r.report.torn_bytes]
    if torn:
        listed = ", ".join(f"{g.label} seed {r.info.seed} ({r.report.torn_bytes} bytes)" for g, r in torn)
        yield Note(level="info", text=f"A last line was not (yet) written whole and is left out: {listed}.")


def _resume_notes(groups: Sequence[Group]) -> Iterator[Note]:
    overlaps = [(g, r, r.overlap) for g in groups for r in g.runs if r.overlap is not None]
    exact = [o for o in overlaps if o[2].max_abs_dloss == 0]
    if exact:
        steps = sum(o[2].steps for o in exact)
        yield Note(
            level="info",
            text=f"Resumed bit for bit: {len(exact)} run{'s' * (len(exact) > 1)} repeated {steps} "
            f"step{'s' * (steps > 1)} with the same loss (largest |Δloss| 0).",
        )
    for group, run, overlap in overlaps:
        if overlap.max_abs_dloss > 0:
            yield Note(
                level="warning",
                text=f"RESUME DIFFERS: {group.label} seed {run.info.seed} repeated {overlap.steps} steps with losses "
                f"up to {overlap.max_abs_dloss:.3g} nats/token apart (step {overlap.step}); the last attempt is used.",
                short=f"{group.label} seed {run.info.seed}: resume differs by {overlap.max_abs_dloss:.2g}",
            )


def _baseline_notes(groups: Sequence[Group], rows: Sequence[Row], baseline: str) -> Iterator[Note]:
    if not any(g.recipe == baseline for g in groups):
        there = ", ".join(dict.fromkeys(g.recipe for g in groups))
        yield Note(
            level="warning",
            text=f"NO BASELINE: no {baseline} run among these, so there is no gap to it. "
            f"Choose another with --baseline (recipes here: {there}).",
        )
        return
    alone = [
        r.group.label for r in rows if r.group.recipe != baseline and r.against_baseline is None and r.loss is not None
    ]
    if alone:
        yield Note(
            level="warning",
            text=f"NO PARTNER: {', '.join(alone)}: no usable {baseline} run with the same settings and seed.",
        )


def _difference_notes(rows: Sequence[Row], baseline: str) -> Iterator[Note]:
    windows = sorted({row.window for row in rows if row.loss is not None})
    if windows:
        yield Note(
            level="info",
            text=f"Final training loss: mean of the last {' or '.join(map(str, windows))} logged steps. "
            "Differences are paired by seed; positive is worse.",
        )
    against: list[tuple[Row, Comparison]] = []
    for row in rows:
        pair = [c for c in (row.against_baseline, row.against_reference) if c is not None]
        against += [(row, c) for i, c in enumerate(pair) if c.reference not in {p.reference for p in pair[:i]}]
    if not against:
        return
    measured = [(row, c) for row, c in against if c.loss.low is not None]
    equal = [(row, c) for row, c in measured if c.loss.mean == 0 and c.loss.sd == 0]
    resolved = [(row, c) for row, c in measured if c.loss.is_resolved]
    if resolved:
        yield Note(level="info", text="Resolved (the 95 % interval excludes 0): " + _listed(resolved) + ".")
    for row, c in equal:
        yield Note(level="info", text=f"{row.group.label} equals {c.reference} bit for bit over the steps averaged.")
    unresolved: dict[int, list[str]] = {}
    for row, c in measured:
        if not c.loss.is_resolved and (row, c) not in equal and c.loss.detectable is not None:
            text = f"{row.group.label} - {c.reference} = {signed(c.loss.mean)} ({c.loss.detectable:.2g})"
            unresolved.setdefault(c.loss.n, []).append(text)
    for pairs, texts in sorted(unresolved.items()):
        yield Note(
            level="info",
            text=f"Not resolved: too short, or too few seeds ({pairs}), to separate {'; '.join(texts)}. In brackets: "
            "the smallest true difference that would be found (80 % power); a smaller one may be there.",
        )
    single = [f"{row.group.label} - {c.reference}" for row, c in against if c.loss.low is None]
    if single:
        yield Note(
            level="info",
            text=f"One seed pair only: {', '.join(single)}. Without a spread there is no interval and nothing is "
            "resolved, however large it looks: add seeds (3 or more).",
        )
    if len(measured) > 1:
        expected = 0.05 * len(measured)
        yield Note(
            level="info",
            text=f"Intervals are per comparison: of {len(measured)} without any true difference about {expected:.2g} "
            "would exclude 0 by chance.",
        )
    early = [(row, c) for row, c in against if not c.is_final]
    if early:
        listed = ", ".join(f"{row.group.label} - {c.reference} at step {c.at_step}" for row, c in early)
        yield Note(
            level="warning", text=f"PROVISIONAL: no finished pair yet for {listed}.", short="gaps are provisional"
        )


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def _listed(pairs: Sequence[tuple[Row, Comparison]]) -> str:
    return "; ".join(f"{row.group.label} - {c.reference} = {interval(c.loss)}" for row, c in pairs)


def _control_notes(rows: Sequence[Row], recipes: Mapping[str, RecipeInfo]) -> Iterator[Note]:
    for row in rows:
        info = recipes.get(row.group.recipe)
        if info is None or not info.is_control or row.group.overrides:
            continue
        name = f"{row.group.label} is an A/A control of {info.reference}"
        c = row.against_reference
        if c is None:
            yield Note(level="info", text=f"{name}; there is no {info.reference} run to compare it with.")
        elif c.loss.low is None:
            yield Note(
                level="info",
                text=f"{name}: their difference, {interval(c.loss)}, is what this setup shows between two recipes that "
                "are practically the same. Believe no other difference of that size.",
            )
        elif c.loss.is_resolved:
            yield Note(
                level="warning",
                text=f"A/A CONTROL FAILS: {name}, yet {interval(c.loss)} excludes 0. Treat differences of up to "
                f"{abs(c.loss.mean):.2g} as noise of this setup.",
                short=f"A/A control {row.group.label} is resolved",
            )
        else:
            yield Note(level="info", text=f"{name}: {interval(c.loss)}, not resolved, as it should be.")


def _recipe_notes(groups: Sequence[Group], recipes: Mapping[str, RecipeInfo]) -> Iterator[Note]:
    for name in dict.fromkeys(g.recipe for g in groups):
        info = recipes.get(name)
        if info is not None and info.note:
            yield Note(level="info", text=f"{name}: {info.note}")


def _time_notes(groups: Sequence[Group], rows: Sequence[Row], baseline: str) -> Iterator[Note]:
    ratios = [row.time_ratio for row in rows if row.time_ratio is not None and math.isfinite(row.time_ratio)]
    if not ratios:
        return
    devices = sorted({d for g in groups for r in g.runs for d in r.started.devices})
    threads = {t for g in groups for r in g.runs for t in r.started.threads}
    if "cpu" in devices:
        yield Note(
            level="info",
            text=f"Step time relative to {baseline} is that of an emulation on CPU; it says nothing about speed on "
            "hardware with FP4 units.",
        )
    if len(devices) > 1 or len(threads) > 1:
        yield Note(
            level="info",
            text=f"Step times are not comparable: devices {', '.join(devices)}; "
            f"threads {', '.join(map(str, sorted(threads)))}.",
        )
