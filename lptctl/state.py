"""The state of a run, read from its directory alone."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.config import RunPaths, read_lines


class State(StrEnum):
    """Where a run stands."""

    NEW = "new"
    """Never submitted."""
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
    attempt: int = 0
    """Newest attempt; 0 before the first."""
    step: int = 0
    """Last logged step."""
    loss: float | None = None
    """Last logged training loss, nats per token."""
    val_loss: float | None = None
    """Last validation loss, nats per token."""
    tps: float | None = None
    """Tokens per second of the last logged step."""
    step_time_s: float | None = None
    """Seconds of the last logged step."""

    def eta_s(self, steps: int) -> float | None:
        """Estimate the seconds to the end from the last step's time."""
        return None if self.step_time_s is None else (steps - self.step) * self.step_time_s


def is_live(paths: RunPaths) -> bool:
    """Tell whether a process holds the run's lock. An unreadable lock counts as live: never double a run."""
    try:
        with paths.lock.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def last_record(path: Path, *, block: int = 1 << 16) -> dict[str, Any] | None:
    """Return the last whole line of metrics.jsonl that holds a training loss, without reading the whole file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - block))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    whole = lines[1:-1] if size > block else lines[:-1]
    for raw in reversed(whole):
        record: dict[str, Any] = json.loads(raw)
        if record.get("loss") is not None:
            return record
    return None


def read_status(paths: RunPaths) -> RunStatus:
    """Read the state of one run."""
    if not paths.run_json.exists():
        return RunStatus(state=State.NEW)
    attempt, newest, last_val = 0, None, None
    for event in read_lines(paths.events):
        attempt = max(attempt, event["attempt"])
        if event["kind"] in ("submitted", "started", "exit"):
            newest = event
        elif event["kind"] == "validated":
            last_val = event["val_loss"]
    record = last_record(paths.metrics) or {}
    state, reason = _classify(newest, live=is_live(paths))
    return RunStatus(
        state=state,
        reason=reason,
        attempt=attempt,
        step=record.get("step", 0),
        loss=_number(record.get("loss")),
        val_loss=last_val,
        tps=_number(record.get("tps")),
        step_time_s=_number(record.get("step_time_s")),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _classify(newest: dict[str, Any] | None, *, live: bool) -> tuple[State, str]:
    if live:
        return State.RUNNING, ""
    if newest is None:
        return State.NEW, ""
    if newest["kind"] != "exit":
        return State.INTERRUPTED, "its process ended without a word (killed?)"
    code, message = newest["code"], newest.get("message") or ""
    if code == 0:
        return State.FINISHED, ""
    if code == 70:
        return State.NONFINITE, message
    if code == 75:
        return State.INTERRUPTED, f"stopped at step {newest.get('step')}, checkpointed"
    if newest["cause"] == "killed":
        return State.INTERRUPTED, message
    return State.FAILED, message or f"exit code {code}"
