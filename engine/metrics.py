"""One StepRecord goes three ways: a line on stdout, metrics.jsonl (the truth), TensorBoard."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from engine.config import RunPaths, StepRecord, append_step

# Dense bf16 matrix rates from the vendors' datasheets, TFLOP/s. A device not named here has no MFU.
PEAK_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "MI300X": 1307.0, "MI355X": 2516.0}


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak, TFLOP/s, or None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BF16_TFLOPS.items() if key in name), None)


def memory_gib(device: torch.device) -> float:
    """Return peak allocated device memory, or the process's peak resident set on a CPU, GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def total_memory_gib(device: torch.device) -> float:
    """Return the device's memory, or the machine's on a CPU, GiB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


class MetricsLogger:
    """Writes StepRecords; a context manager, because TensorBoard's writer owns a thread."""

    def __init__(self, paths: RunPaths, *, attempt: int, device: torch.device, tensorboard: bool) -> None:
        self._path: Path = paths.metrics
        self._total_gib = total_memory_gib(device)
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, optional

            self._writer = SummaryWriter(str(paths.tb(attempt)), flush_secs=10)

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def log(self, record: StepRecord) -> None:
        """Write one record everywhere; metrics.jsonl first.

        Raises:
            OSError: if metrics.jsonl cannot take the line.
        """
        append_step(self._path, record)
        for line in stdout_lines(record, self._total_gib):
            print(line, flush=True)
        if self._writer is not None:
            for tag, value in tensorboard_scalars(record).items():
                self._writer.add_scalar(tag, value, record.step, walltime=record.time)


def stdout_lines(record: StepRecord, total_gib: float) -> list[str]:
    """Return the lines of a record in torchtitan's grammar (without its logger prefix)."""
    lines = []
    memory = record.memory_gib or 0.0
    tail = f"memory: {memory:5.2f}GiB({100 * memory / total_gib:.2f}%)  tps: {round(record.tps or 0):,}"
    if record.loss is not None:
        mfu = "N/A" if record.mfu is None else f"{record.mfu:.2f}%"
        lines.append(
            f"step: {record.step:2}  loss: {record.loss:8.5f}  grad_norm: {record.grad_norm:7.4f}  "
            f"{tail}  tflops: {record.tflops or 0:,.2f}  mfu: {mfu}"
        )
    if record.val_loss is not None:
        lines.append(f"validate step: {record.step}  loss: {record.val_loss:7.4f}  {tail}")
    return lines


def tensorboard_scalars(record: StepRecord) -> dict[str, float]:
    """Return tag -> value with torchtitan's tags, present values only."""
    values = {
        "loss_metrics/global_avg_loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "throughput(tps)": record.tps,
        "tflops": record.tflops,
        "mfu(%)": record.mfu,
        "memory/max_reserved(GiB)": record.memory_gib,
        "n_tokens_seen": record.tokens,
        "nonfinite_blocks": record.nonfinite_blocks,
        "validation_metrics/loss": record.val_loss,
    }
    return {tag: float(value) for tag, value in values.items() if value is not None}
