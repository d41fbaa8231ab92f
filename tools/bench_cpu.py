"""Quantise-dequantise (QDQ) on this CPU against torchao's eager ``to_mx`` + dequantisation and ``torch.clone``.

All candidates of a table run interleaved on the same tensor; the page shows medians. Writes
docs/benchmarks/cpu-quantise.md. ``--rounds`` sets how often each candidate runs, ``--threads`` torch's threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchao
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from engine import formats, kernels
from engine.formats import OperandOptions, make_hadamard
from tools.machine import describe_machine, write_page

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (4096, 2048)


def candidates(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return name -> one pass over ``x``; the first two are the yardsticks."""
    random = make_hadamard("random", seed=1, step=1)

    def torchao_qdq(mode: ScaleCalculationMode) -> torch.Tensor:
        packed = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=mode)
        return packed.dequantize(x.dtype)

    def ours(run: Callable[..., Any], options: dict[str, Any]) -> Callable[[], Any]:
        chosen = OperandOptions(**options)
        transform = random if chosen.hadamard == "random" else None
        return lambda: run(x, chosen, transform=transform, key=12345 if chosen.rounding == "sr" else None)

    cases: dict[str, dict[str, Any]] = {
        "even": {},
        "floor": {"scale_mode": "floor"},
        "even, along the other axis": {"axis": -2},
        "even, 32x32 tiles": {"block": "2d"},
        "even, stochastic rounding": {"rounding": "sr"},
        "even, Hadamard-32": {"hadamard": "random"},
    }
    return {
        "torch.clone": lambda: torch.clone(x),
        "torchao eager, even": lambda: torchao_qdq(ScaleCalculationMode.EVEN),
        "torchao eager, floor": lambda: torchao_qdq(ScaleCalculationMode.FLOOR),
        **{f"reference, {name}": ours(formats.qdq, options) for name, options in cases.items()},
        **{f"compiled, {name}": ours(kernels.qdq, options) for name, options in cases.items()},
    }


def measure(x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return name -> median seconds."""
    passes = candidates(x)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        run()
    for _ in range(rounds):
        for name, run in passes.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure both dtypes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = [
        "# Quantise-dequantise on a CPU",
        "",
        f"`make bench-cpu` on {describe_machine()}, torch {torch.__version__}, torchao {torchao.__version__}, "
        f"{args.threads} threads; {SHAPE[0]}x{SHAPE[1]} values of N(0, 1); medians of {args.rounds} interleaved "
        "rounds.",
        "Bandwidth counts the tensor read once and written once. `reference` is engine.formats in PyTorch, `compiled` "
        f"what the layers call (engine.kernels, path `{kernels.kernel_path('cpu').path}` here).",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
        medians = measure(x, args.rounds)
        bytes_moved = 2 * x.numel() * x.element_size()
        clone, peer = medians["torch.clone"], medians["torchao eager, even"]
        lines += ["", f"## {str(dtype).removeprefix('torch.')}", ""]
        lines += ["| QDQ | time | GB/s | fraction of torch.clone | speed against torchao eager, even |"]
        lines += ["|---|---:|---:|---:|---:|"]
        lines += [
            f"| {name} | {s * 1e3:.1f} ms | {bytes_moved / s / 1e9:.2f} | {clone / s:.3f} | {peer / s:.2f}x |"
            for name, s in medians.items()
        ]
    write_page(ROOT / "docs" / "benchmarks" / "cpu-quantise.md", lines)


if __name__ == "__main__":
    main()
