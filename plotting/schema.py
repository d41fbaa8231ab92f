"""What the readers produce and everything else consumes: runs, their records and events, and the error type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

METRICS = (
    "loss",
    "val_loss",
    "grad_norm",
    "clip_coef",
    "lr",
    "nonfinite_blocks",
    "step_time_s",
    "tps",
    "tflops",
    "mfu",
    "memory_gib",
)
"""Numbers a StepRecord may carry, in the order of ``docs/run-directory.md``."""


class PlotError(Exception):
    """The input cannot be plotted; ``problems`` holds every finding, one sentence each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeInfo:
    """What the caller knows about a recipe beyond its name; the run directory does not hold it."""

    reference: str | None
    """Recipe that this one is to be compared with; None for the unquantised one."""
    preset: Mapping[str, Any] = field(default_factory=dict)
    """The recipe section of run.json as the preset has it, dotted keys; what differs from it is an override."""
    note: str = ""
    """What a reader of this recipe's results must know, a sentence."""
    is_control: bool = False
    """True if the recipe should be indistinguishable from its reference (an A/A control)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """The part of run.json that plots need."""

    path: Path
    """The run directory."""
    sweep: str
    """Name of the sweep."""
    run_id: str
    """Unique within the sweep."""
    seed: int
    """Seed of initial weights and data order; equal seeds make pairs."""
    recipe: str
    """Recipe name."""
    recipe_config: Mapping[str, Any]
    """The recipe section without its name, dotted keys, e.g. ``switches.scale_mode``."""
    config: Mapping[str, Any]
    """Every other setting that changes results, dotted keys, e.g. ``optimizer.lr``; the seed is left out."""
    steps: int
    """Optimizer steps the run is to make."""
    log_every: int
    """Optimizer steps between records."""
    tokens_per_step: int
    """Training tokens of one optimizer step."""
    revision: str | None
    """Git revision of the launch, with ``+dirty`` if the tree was changed; None without git."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The records of one run as columns, in the order of the file. All arrays have the length of the log, N."""

    step: IntArray
    """Optimizer step, int64[N]."""
    attempt: IntArray
    """Attempt that wrote the record, int64[N]."""
    tokens: IntArray
    """Training tokens consumed, int64[N]."""
    time: FloatArray
    """Seconds since the epoch, float64[N]."""
    values: Mapping[str, FloatArray]
    """Metric name to float64[N]; NaN where the number is NaN or missing, see ``present``."""
    present: Mapping[str, BoolArray]
    """Metric name to bool[N]; False where the log holds null."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of events.jsonl."""

    kind: str
    """What happened, e.g. ``started``."""
    attempt: int
    """Attempt it happened in."""
    time: float
    """Seconds since the epoch."""
    payload: Mapping[str, Any]
    """The other fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadReport:
    """What reading one run's logs came across."""

    lines: int
    """Complete lines of metrics.jsonl."""
    torn_bytes: int
    """Bytes after the last newline of metrics.jsonl and events.jsonl: lines not yet, or never, written whole."""
    nonfinite: int
    """Numbers that are NaN or infinite, over all metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRun:
    """One run as its logs have it."""

    info: RunInfo
    records: Records
    events: tuple[Event, ...]
    report: ReadReport
