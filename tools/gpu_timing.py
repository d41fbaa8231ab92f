"""Interleaved timing on a GPU: every candidate in turn, round after round, medians of device events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch


def medians_ms(passes: Mapping[str, Callable[[], Any]], *, rounds: int, warm_up: int = 3) -> dict[str, float]:
    """Return name -> median milliseconds; what a pass leaves behind is freed outside of its own time."""
    for run in passes.values():
        for _ in range(warm_up):
            run()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, run in passes.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}
