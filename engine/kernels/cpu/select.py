"""Which code quantises: the compiled CPU path where it can run, else the reference; both give the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import formats
from engine.formats import Hadamard, OperandOptions
from engine.kernels.cpu import compiled
from engine.kernels.cpu.build import load


def describe_path() -> str:
    """Return one sentence for the run log: what quantises on this CPU, and why."""
    return load().reason


def qdq(
    x: Tensor,
    options: OperandOptions,
    *,
    key: int | None = None,
    transform: Hadamard | None = None,
    row_offset: int = 0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise and dequantise; arguments, result and errors as :func:`engine.formats.qdq`."""
    fast = x.device.type == "cpu" and load().library is not None
    run = compiled.qdq if fast else formats.qdq
    return run(x, options, key=key, transform=transform, row_offset=row_offset, out_dtype=out_dtype)
