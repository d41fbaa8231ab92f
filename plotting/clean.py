"""From the log of a run to its one history: stitch attempts, find non-finite numbers, name the state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from plotting.schema import BoolArray, Event, FloatArray, IntArray, RawRun, ReadReport, Records, RunInfo

LOSSES = ("loss", "val_loss", "grad_norm")
"""Metrics whose non-finite value makes a run non-finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Steps that were run more than once, and how far their losses differ."""

    steps: int
    """Steps with a superseded and a surviving training loss."""
    max_abs_dloss: float
    """Largest |difference| of the training loss, nats/token: 0 for a bit-exact resume, inf if only one is finite."""
    step: int
    """Step of that difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How far a run has got."""

    kind: Literal["finished", "nonfinite", "unfinished", "not started"]
    step: int
    """Last step of the surviving history; of a non-finite run the first non-finite step."""
    text: str
    """For tables: ``finished``, ``nonfinite@137``, ``at step 80 of 200``, ``crash at step 80 of 200``, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One non-finite number of the surviving history."""

    metric: str
    step: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What the ``started`` events of a run say; each field the set of distinct values, so that a change shows."""

    init_digests: frozenset[str]
    """Digests of the initial weights."""
    batch_digests: frozenset[str]
    """Digests of the first batch's token ids."""
    data_digests: frozenset[str]
    """Digests of the corpus."""
    code_digests: frozenset[str]
    """Digests of the engine's code, over the attempts that own surviving records."""
    devices: frozenset[str]
    """Devices, e.g. ``cpu``."""
    threads: frozenset[int]
    """CPU threads."""
    unigram_entropy: float | None
    """Entropy of the corpus's token frequencies, nats/token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run with its history stitched."""

    info: RunInfo
    records: Records
    superseded: BoolArray
    """bool[N]: the record belongs to a part of the history that a later attempt has replaced."""
    report: ReadReport
    status: Status
    overlap: Overlap | None
    """None if no step was run twice."""
    attempts: int
    """Attempts that left a record or an event."""
    boundaries: tuple[int, ...]
    """First surviving step of each attempt but the first."""
    nonfinite: tuple[Point, ...]
    """Non-finite losses and gradient norms of the surviving history, by step."""
    started: Started

    def series(self, metric: str) -> tuple[IntArray, FloatArray]:
        """Return steps int64[M], strictly increasing, and values float64[M] of the surviving history, NaN included."""
        keep = ~self.superseded & self.records.present[metric]
        steps, values = self.records.step[keep], self.records.values[metric][keep]
        order = np.argsort(steps, kind="stable")
        return steps[order], values[order]

    def replaced(self, metric: str) -> Iterator[tuple[IntArray, FloatArray]]:
        """Yield the superseded part of each attempt, as steps and values."""
        mask = self.superseded & self.records.present[metric]
        for attempt in np.unique(self.records.attempt[mask]):
            part = mask & (self.records.attempt == attempt)
            yield self.records.step[part], self.records.values[metric][part]

    @property
    def last_step(self) -> int:
        """Last step of the surviving history; 0 without one."""
        steps = self.records.step[~self.superseded]
        return int(steps.max()) if len(steps) else 0


def clean(raw: RawRun) -> Run:
    """Stitch a run and judge its state."""
    superseded = stitch(raw.records)
    records = raw.records
    nonfinite = tuple(_nonfinite(records, superseded))
    attempts = {int(a) for a in records.attempt} | {e.attempt for e in raw.events}
    alive = ~superseded
    owners = sorted({int(a) for a in records.attempt[alive]})
    boundaries = tuple(int(records.step[alive & (records.attempt == a)].min()) for a in owners if a != min(attempts))
    return Run(
        info=raw.info,
        records=records,
        superseded=superseded,
        report=raw.report,
        status=_status(raw, superseded, nonfinite),
        overlap=_overlap(records, superseded),
        attempts=len(attempts),
        boundaries=boundaries,
        nonfinite=nonfinite,
        started=_started(raw.events, owners),
    )


def stitch(records: Records) -> BoolArray:
    """Mark superseded records, bool[N].

    A record is superseded if a later attempt logged this step or an earlier one: that attempt resumed from a checkpoint
    before it, so the step is no longer part of the model's history. Once the later attempt has got as far, this is the
    run directory's rule that of a step run twice the last attempt wins. Within an attempt the later line wins.
    """
    superseded = np.zeros(len(records), np.bool_)
    resumed_at = math.inf  # earliest step that attempts later than the one at hand have logged
    for attempt in sorted({int(a) for a in records.attempt}, reverse=True):
        rows = np.flatnonzero(records.attempt == attempt)
        steps = records.step[rows]
        superseded[rows] = steps >= resumed_at
        _, last = np.unique(steps[::-1], return_index=True)
        repeated = np.ones(len(rows), np.bool_)
        repeated[len(rows) - 1 - last] = False
        superseded[rows[repeated]] = True
        resumed_at = min(resumed_at, float(steps.min()))
    return superseded


def _overlap(records: Records, superseded: BoolArray) -> Overlap | None:
    has_loss = records.present["loss"]
    loss = records.values["loss"]
    winners = {int(records.step[i]): i for i in np.flatnonzero(has_loss & ~superseded)}
    best: tuple[float, int] | None = None
    steps: set[int] = set()
    for i in np.flatnonzero(has_loss & superseded):
        step = int(records.step[i])
        if step not in winners:
            continue
        steps.add(step)
        old, new = float(loss[i]), float(loss[winners[step]])
        if old == new or (math.isnan(old) and math.isnan(new)):
            delta = 0.0
        else:
            delta = abs(old - new) if math.isfinite(old) and math.isfinite(new) else math.inf
        if best is None or delta > best[0]:
            best = (delta, step)
    return None if best is None else Overlap(steps=len(steps), max_abs_dloss=best[0], step=best[1])


def _nonfinite(records: Records, superseded: BoolArray) -> Iterator[Point]:
    points = []
    for metric in LOSSES:
        values = records.values[metric]
        for i in np.flatnonzero(records.present[metric] & ~superseded & ~np.isfinite(values)):
            points.append(Point(metric=metric, step=int(records.step[i]), value=float(values[i])))
    yield from sorted(points, key=lambda p: (p.step, LOSSES.index(p.metric)))


def _status(raw: RawRun, superseded: BoolArray, nonfinite: tuple[Point, ...]) -> Status:
    total = raw.info.steps
    newest = max((e.attempt for e in raw.events), default=0)
    newest = max(newest, int(raw.records.attempt.max()) if len(raw.records) else 0)
    exits = [e for e in raw.events if e.kind == "exit" and e.attempt == newest]
    cause = str(exits[-1].payload.get("cause")) if exits else ""
    alive = raw.records.step[~superseded]
    step = int(alive.max()) if len(alive) else 0
    if nonfinite:
        return Status(kind="nonfinite", step=nonfinite[0].step, text=f"nonfinite@{nonfinite[0].step}")
    if cause == "nonfinite":  # the event survived, the record did not (a full disk)
        reported = [e.payload.get("step") for e in raw.events if e.kind == "nonfinite" and e.attempt == newest]
        at = reported[-1] if reported and isinstance(reported[-1], int) else step + 1
        return Status(kind="nonfinite", step=at, text=f"nonfinite@{at}")
    if cause == "finished":
        return Status(kind="finished", step=step, text="finished")
    failed = f"{cause} " if cause else ""
    if not len(alive):
        return Status(kind="not started", step=0, text=f"{failed}before step 1" if failed else "not started")
    return Status(kind="unfinished", step=step, text=f"{failed}at step {step} of {total}")


def _started(events: tuple[Event, ...], owners: list[int]) -> Started:
    started = [e for e in events if e.kind == "started"]

    def distinct(key: str, among: list[Event]) -> frozenset[Any]:
        return frozenset(e.payload[key] for e in among if e.payload.get(key) is not None)

    entropies = [e.payload.get("unigram_entropy") for e in started]
    numbers = [float(h) for h in entropies if isinstance(h, (int, float)) and math.isfinite(h)]
    submitted = [e for e in events if e.kind == "submitted" and e.attempt in owners]
    return Started(
        init_digests=distinct("init_digest", started),
        batch_digests=distinct("batch_digest", started),
        data_digests=distinct("data_digest", started),
        code_digests=distinct("code_digest", submitted),
        devices=distinct("device", started),
        threads=distinct("threads", started),
        unigram_entropy=numbers[-1] if numbers else None,
    )
