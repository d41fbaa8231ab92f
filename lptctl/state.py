"""The state of a run, read from its directory alone."""

from __future__ import annotations

import fcntl
import json
import math
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.config import RunPaths, SweepPaths
from engine.config.records import decode_number

TAIL_BYTES = 1 << 15
"""Bytes read from the end of metrics.jsonl; about a hundred records."""
RATE_RECORDS = 20
"""Newest records the estimate of the time left is made from."""


class State(StrEnum):
    """Where a run stands."""

    NEW = "new"
    """Never started."""
    QUEUED = "queued"
    """A live launcher will start it."""
    RUNNING = "running"
    """A process holds its lock."""
    INTERRUPTED = "interrupted"
    """Stopped, killed or died without a word; the same command continues it."""
    FINISHED = "finished"
    NONFINITE = "nonfinite"
    """Loss or gradient became Inf or NaN; that is its result, and it is not run again unless asked."""
    FAILED = "failed"
    """Configuration error or crash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What is known about one run."""

    state: State
    """Where it stands."""
    reason: str = ""
    """Why, in plain words."""
    cause: str = ""
    """Cause of the newest exit event (docs/run-directory.md), empty while there is none."""
    attempt: int = 0
    """Newest attempt; 0 before the first."""
    code_digest: str = ""
    """Digest of the engine snapshot of the newest attempt."""
    step: int = 0
    """Last logged step."""
    loss: float | None = None
    """Last logged training loss, nats per token."""
    val_loss: float | None = None
    """Last validation loss, nats per token."""
    tps: float | None = None
    """Tokens per second of the last logged step."""
    step_time_s: float | None = None
    """Seconds of wall time a step lately took, validation and checkpoints included."""

    def eta_s(self, steps: int) -> float | None:
        """Estimate the seconds to the end from the time the last steps took."""
        return None if self.step_time_s is None else max(0, steps - self.step) * self.step_time_s


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock file. A lock that cannot be tried counts as held: never double a run."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def is_live(paths: RunPaths) -> bool:
    """Tell whether an engine holds the run's lock."""
    return is_locked(paths.lock)


def is_launching(sweep: SweepPaths) -> bool:
    """Tell whether a launcher of the sweep is alive."""
    return is_locked(sweep.lock)


def read_events(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the readable events, and a sentence about the first line that is none (empty if all are fine).

    A torn last line, not yet ended, is left out silently: it is being written, or a kill cut it off.
    """
    events: list[dict[str, Any]] = []
    damage = ""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return events, damage
    for number, raw in enumerate(data.split(b"\n")[:-1], 1):
        event = _record(raw)
        if event is not None and isinstance(event.get("attempt"), int) and isinstance(event.get("kind"), str):
            events.append(event)
        elif not damage:
            damage = f"{path.name}:{number} is no event"
    return events, damage


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return {key: decode_number(item) if isinstance(item, str) else item for key, item in value.items()}


def last_records(path: Path, *, tail_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the last training records of metrics.jsonl, oldest first, without reading the whole file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    whole = lines[1:-1] if size > tail_bytes else lines[:-1]
    records = [record for record in map(_record, whole) if record is not None]
    return [r for r in records if r.get("loss") is not None and isinstance(r.get("step"), int)]


def _step_time_s(records: list[dict[str, Any]]) -> float | None:
    """Return the wall time of a step over the newest records of the newest attempt."""
    if not records:
        return None
    recent = [r for r in records if r.get("attempt") == records[-1].get("attempt")][-RATE_RECORDS:]
    steps = recent[-1]["step"] - recent[0]["step"]
    if steps < 1:
        return _number(recent[-1].get("step_time_s"))
    elapsed_s = float(recent[-1]["time"]) - float(recent[0]["time"])
    return elapsed_s / float(steps)


def read_status(paths: RunPaths, *, live: bool | None = None, queued: bool = False) -> RunStatus:
    """Read the state of one run.

    ``live`` is given by who knows it better than the lock; ``queued`` says that a live launcher has yet to start it.
    """
    if not paths.run_json.exists():
        return RunStatus(state=State.QUEUED if queued else State.NEW)
    events, damage = read_events(paths.events)
    attempt, digest, newest, last_val = 0, "", None, None
    for event in events:
        attempt = max(attempt, event["attempt"])
        if event["kind"] in ("submitted", "started", "exit"):
            newest = event
            digest = str(event.get("code_digest") or digest)
        elif event["kind"] == "validated":
            last_val = _number(event.get("val_loss"))
    records = last_records(paths.metrics)
    record = records[-1] if records else {}
    state, reason = _classify(newest, live=is_live(paths) if live is None else live)
    if damage:
        reason = f"{reason}; {damage}" if reason else damage
    if queued and state is not State.RUNNING:
        state = State.QUEUED
    return RunStatus(
        state=state,
        reason=reason,
        cause=str(newest.get("cause") or "") if newest is not None else "",
        attempt=attempt,
        code_digest=digest,
        step=record.get("step", 0),
        loss=_number(record.get("loss")),
        val_loss=last_val,
        tps=_number(record.get("tps")),
        step_time_s=_step_time_s(records),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _classify(newest: dict[str, Any] | None, *, live: bool) -> tuple[State, str]:
    if live:
        return State.RUNNING, ""
    if newest is None:
        return State.NEW, ""
    if newest["kind"] == "submitted":
        return State.INTERRUPTED, "it was submitted and never began (its launcher was killed?)"
    if newest["kind"] == "started":
        return State.INTERRUPTED, "its process ended without a word (killed, or the machine went down)"
    code, message = newest.get("code"), str(newest.get("message") or "")
    if code == 0:
        return State.FINISHED, ""
    if code == 70:
        return State.NONFINITE, message
    if code == 75:
        return State.INTERRUPTED, message or f"stopped at step {newest.get('step')}, checkpointed"
    if newest.get("cause") in ("killed", "stopped"):
        return State.INTERRUPTED, message
    return State.FAILED, message or f"exit code {code}"


def finite_or_text(value: float | None) -> float | str | None:
    """Return a number for JSON, which has no NaN: it becomes text, as in metrics.jsonl."""
    return value if value is None or math.isfinite(value) else str(value)
