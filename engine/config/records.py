"""The two append-only logs of a run: StepRecords (``metrics.jsonl``) and events (``events.jsonl``). Torch-free.

Each record is one line of JSON, written by a single ``write`` to a file opened for appending. Numbers keep their full
float repr; a non-finite number is the string ``"nan"``, ``"inf"`` or ``"-inf"``, because JSON has no such number.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One logged optimizer step. Step 0 is the state before training and carries only a validation loss."""

    step: int
    """Optimizer step, 1-based; 0 is before the first step."""
    attempt: int
    """Attempt that wrote the line; for a step run twice the last attempt wins."""
    time: float
    """Seconds since the epoch when the step ended. Clock field."""
    tokens: int
    """Training tokens consumed up to and including this step."""
    loss: float | None = None
    """Mean training loss of this step's global batch, nats per token."""
    val_loss: float | None = None
    """Mean validation loss after this step, nats per token; null where not evaluated."""
    grad_norm: float | None = None
    """Global L2 norm of the gradient before clipping."""
    clip_coef: float | None = None
    """Factor the gradient was multiplied by (1 when it was not clipped)."""
    lr: float | None = None
    """Learning rate applied in this step."""
    nonfinite_blocks: int | None = None
    """Quantised blocks with an Inf or NaN in this step, over all operands."""
    step_time_s: float | None = None
    """Wall time of the step, seconds, validation and checkpointing excluded. Clock field."""
    tps: float | None = None
    """Training tokens per second and device. Clock field."""
    tflops: float | None = None
    """Model TFLOP/s per device: flops_per_token x tps. Clock field."""
    mfu: float | None = None
    """tflops in percent of the device's peak; null where the peak is unknown or GEMMs are quantised. Clock field."""
    memory_gib: float | None = None
    """Peak device memory (GPU) or resident set (CPU) so far, GiB. Clock field."""


CLOCK_FIELDS = ("attempt", "time", "step_time_s", "tps", "tflops", "mfu", "memory_gib")
"""Fields of a StepRecord that may differ between an interrupted and an uninterrupted run."""


def encode_number(value: Any) -> Any:
    """Replace a non-finite float by its text form."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def decode_number(value: Any) -> Any:
    """Undo :func:`encode_number`."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line with a single write.

    Raises:
        OSError: if the line could not be written whole; a partial line is cut off again first.
    """
    line = json.dumps({k: encode_number(v) for k, v in record.items()}, allow_nan=False).encode() + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(fd, line)
        if written != len(line):  # disk full: take back our own part, unless somebody has appended behind it
            end = os.lseek(fd, 0, os.SEEK_CUR)
            if os.fstat(fd).st_size == end:
                os.ftruncate(fd, end - written)
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes written", str(path))
    finally:
        os.close(fd)


def repair_tail(path: Path) -> int:
    """Cut off a torn last line (a kill or a full disk can leave one); return the number of bytes removed."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        data = file.read()
        keep = data.rfind(b"\n") + 1
        if keep < len(data):
            file.truncate(keep)
        return len(data) - keep


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log; a torn last line (no newline yet) is left out, being not yet written."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield {k: decode_number(v) if isinstance(v, str) else v for k, v in json.loads(raw).items()}


def append_event(path: Path, kind: str, *, attempt: int, **payload: Any) -> None:
    """Append an event: ``{"time", "kind", "attempt", "node", ...}``. ``docs/run-directory.md`` lists the kinds."""
    append_line(path, {"time": time.time(), "kind": kind, "attempt": attempt, "node": socket.gethostname(), **payload})


def append_step(path: Path, record: StepRecord) -> None:
    """Append a StepRecord to ``metrics.jsonl``."""
    append_line(path, dataclasses.asdict(record))
