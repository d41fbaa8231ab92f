"""Run directories written line by line, for tests of readers: only what a test says is in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.config import RunConfig, RunPaths, StepRecord, append_step, dump_run
from engine.config.records import append_line
from tests.helpers.synthetic_runs import START, config


def bare_run(folder: Path, run: RunConfig | None = None) -> Path:
    """Write a directory that holds run.json and nothing else."""
    folder.mkdir(parents=True)
    RunPaths(folder).run_json.write_text(dump_run(run or config("bf16", 1)))
    return folder


def add_steps(folder: Path, rows: Iterable[tuple[int, int, float]], **fields: Any) -> None:
    """Append a record for each (step, attempt, loss)."""
    for step, attempt, loss in rows:
        record = StepRecord(
            step=step, attempt=attempt, time=START + step, tokens=1024 * step, loss=loss, **{"grad_norm": 1.0, **fields}
        )
        append_step(RunPaths(folder).metrics, record)


def add_event(folder: Path, kind: str, attempt: int, **payload: Any) -> None:
    """Append an event."""
    append_line(RunPaths(folder).events, {"time": START, "kind": kind, "attempt": attempt, "node": "n0", **payload})
