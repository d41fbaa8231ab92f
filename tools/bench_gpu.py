"""MXFP4 and MXFP8 quantise kernels on a GPU as fractions of its copy bandwidth.

``python -m tools.bench_gpu`` writes docs/benchmarks/gpu-quantise-<device>.md. Every pass is captured in a CUDA graph of
several calls, the graphs of a table are replayed in turn, and the page shows medians. A pass's bytes are what it must
move: operands, outputs and scales, each once. The ceilings, ``Tensor.copy_`` of the same tensor and a bf16 GEMM, run in
the same turns.

``--check`` compares the kernels with the reference on this GPU first; ``--peers`` adds torchao's compiled ``to_mx``;
``--tiles`` measures other tiles instead, and writes no page; ``--quick`` takes a quarter of the rows and fewer rounds;
``--only WORD`` measures the passes whose name has the word; ``--json FILE`` also writes the numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from engine import formats, kernels
from engine.formats import SCALE_MODES, OperandOptions, make_hadamard
from engine.formats.mxfp8 import MXFP8Options
from engine.kernels import DeviceHadamard, kernel_path, launch, mxfp8
from tools.gpu_timing import medians_ms
from tools.machine import write_page

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (16384, 8192)
GEMM = 8192
CALLS = 8
"""Calls in a graph, so that the gap between two replays is small beside them."""
BF16, FP4, SCALES, FP8 = 2.0, 0.5, 1 / 32, 1.0
"""Bytes a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One measured call."""

    name: str
    """Row of the table."""
    run: Callable[[], Any]
    """The call."""
    moved_bytes: float
    """Operands, outputs and scales."""
    aim: float | None = None
    """Least fraction of the copy bandwidth that the project asks for, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A pass's numbers."""

    name: str
    """Row of the table."""
    time_ms: float
    """Median."""
    moved_bytes: float
    """Operands, outputs and scales."""
    fraction: float
    """Bandwidth over the copy's, in the same run."""
    aim: float | None
    """As in :class:`Pass`."""


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replay of :data:`CALLS` calls, captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return graph.replay


def passes(x: Tensor) -> list[Pass]:
    """Return the passes over x [M, K] bf16, the copy first."""
    numel, like = x.numel(), torch.empty_like(x)
    counter = torch.zeros((), dtype=torch.int64, device=x.device)
    key = torch.tensor([0x0123456789ABCDEF], device=x.device)
    transforms = {
        kind: DeviceHadamard.from_transform(make_hadamard(kind, seed=1, step=1), x.device)
        for kind in ("random", "fixed", "3rht")
    }
    found = [Pass(name="Tensor.copy_", run=lambda: like.copy_(x), moved_bytes=2 * BF16 * numel)]

    def arguments(options: OperandOptions) -> dict[str, Any]:
        return {
            "key": key if options.rounding == "sr" else None,
            "transform": transforms[options.hadamard] if options.hadamard != "none" else None,
        }

    def qdq(name: str, aim: float | None = None, **options: Any) -> None:
        chosen = OperandOptions(**options)
        own = arguments(chosen)
        found.append(
            Pass(
                name=f"QDQ {name}",
                run=lambda: kernels.qdq(x, chosen, counter=counter, **own),
                moved_bytes=2 * BF16 * numel,
                aim=aim,
            )
        )

    def quantise(name: str, aim: float | None = None, **options: Any) -> None:
        chosen = OperandOptions(**options)
        own = arguments(chosen)
        packed = kernels.quantise(x, chosen, **own)
        per_value = FP4 + packed.scales.numel() / numel
        moved = (BF16 + per_value) * numel
        found.append(
            Pass(name=f"quantise {name}", run=lambda: kernels.quantise(x, chosen, **own), moved_bytes=moved, aim=aim)
        )

    def dequantise(name: str, aim: float | None = None, **options: Any) -> None:
        packed = kernels.quantise(x, OperandOptions(**options))
        moved = (BF16 + FP4) * numel + packed.scales.numel()
        found.append(
            Pass(
                name=f"dequantise {name}",
                run=lambda: kernels.dequantise(packed, torch.bfloat16),
                moved_bytes=moved,
                aim=aim,
            )
        )

    def two(name: str, rows: OperandOptions, columns: OperandOptions, aim: float | None = None) -> None:
        own = {f"rows_{k}": v for k, v in arguments(rows).items()}
        own |= {f"columns_{k}": v for k, v in arguments(columns).items()}
        found.append(
            Pass(
                name=f"two orientations, {name}",
                run=lambda: kernels.qdq_two(x, rows, columns, counter=counter, **own),
                moved_bytes=3 * BF16 * numel,
                aim=aim,
            )
        )

    qdq("rows", 0.97)
    qdq("rows, SR", 0.88, rounding="sr")
    qdq("columns", 0.92, axis=-2)
    qdq("columns, SR", axis=-2, rounding="sr")
    qdq("32x32 tiles", 0.92, block="2d")
    qdq("rows, Hadamard", 0.88, hadamard="random")
    qdq("rows, Hadamard, SR", 0.75, hadamard="random", rounding="sr")
    qdq("rows, fixed Hadamard", hadamard="fixed")
    qdq("columns, Hadamard", 0.88, axis=-2, hadamard="random")
    qdq("columns, Hadamard, SR", 0.75, axis=-2, hadamard="random", rounding="sr")
    qdq("columns, fixed Hadamard", axis=-2, hadamard="fixed")
    qdq("columns, triple Hadamard", axis=-2, hadamard="3rht")
    qdq("columns, static clip", axis=-2, clip="static")
    rows, columns = OperandOptions(), OperandOptions(axis=-2)
    sr = OperandOptions(rounding="sr")
    hadamard = OperandOptions(axis=-2, hadamard="random")
    hadamard_sr = OperandOptions(axis=-2, hadamard="random", rounding="sr")
    two("plain", rows, columns, 0.90)
    two("columns with Hadamard", rows, hadamard)
    two("columns with Hadamard and SR", rows, hadamard_sr, 0.75)
    two("rows with SR, columns with Hadamard and SR", sr, hadamard_sr)
    quantise("rows", 0.88)
    quantise("columns", axis=-2)
    quantise("32x32 tiles", block="2d")
    quantise("rows, SR", rounding="sr")
    quantise("columns, Hadamard", axis=-2, hadamard="random")
    dequantise("rows", 0.92)
    dequantise("columns", axis=-2)
    dequantise("32x32 tiles", block="2d")
    return found + mxfp8_passes(x)


def mxfp8_passes(x: Tensor) -> list[Pass]:
    """Return the MXFP8 passes."""
    numel = x.numel()
    rows, columns = MXFP8Options(), MXFP8Options(axis=-2)
    packed = mxfp8.quantise(x, rows)
    eight = (BF16 + FP8 + SCALES) * numel
    return [
        Pass(name="QDQ rows, E4M3", run=lambda: mxfp8.qdq(x, rows), moved_bytes=2 * BF16 * numel),
        Pass(name="QDQ columns, E4M3", run=lambda: mxfp8.qdq(x, columns), moved_bytes=2 * BF16 * numel),
        Pass(name="two orientations, E4M3", run=lambda: mxfp8.qdq_two(x, rows, columns), moved_bytes=3 * BF16 * numel),
        Pass(name="quantise rows, E4M3", run=lambda: mxfp8.quantise(x, rows), moved_bytes=eight),
        Pass(
            name="quantise rows, E5M2", run=lambda: mxfp8.quantise(x, MXFP8Options(element="e5m2")), moved_bytes=eight
        ),
        Pass(name="quantise columns, E4M3", run=lambda: mxfp8.quantise(x, columns), moved_bytes=eight),
        Pass(name="dequantise rows, E4M3", run=lambda: mxfp8.dequantise(packed, torch.bfloat16), moved_bytes=eight),
    ]


def peers(x: Tensor) -> list[Pass]:
    """Return torchao's compiled packed quantisation, or nothing where torchao is missing."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError as error:
        print(f"peers skipped: torchao is not installed ({error})")
        return []
    moved = (BF16 + FP4 + SCALES) * x.numel()
    found = []
    for mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):
        compiled = torch.compile(lambda t, mode=mode: to_mx(t, torch.float4_e2m1fn_x2, 32, mode), dynamic=False)

        def run(compiled: Callable[[Tensor], Any] = compiled) -> Any:
            return compiled(x)

        found.append(Pass(name=f"torchao compiled to_mx, {mode.name.lower()}", run=run, moved_bytes=moved))
    for mode_name in ("floor", "rceil"):
        options = OperandOptions(scale_mode=mode_name)

        def ours(options: OperandOptions = options) -> Any:
            return kernels.quantise(x, options)

        found.append(Pass(name=f"quantise rows, {mode_name}", run=ours, moved_bytes=moved))
    return found


def measure(chosen: list[Pass], rounds: int) -> list[Result]:
    """Time the passes in turn; the first is the copy."""
    replays = {each.name: captured(each.run) for each in chosen}
    times = medians_ms(replays, rounds=rounds)
    copy = chosen[0].moved_bytes / times[chosen[0].name]
    return [
        Result(
            name=each.name,
            time_ms=times[each.name] / CALLS,
            moved_bytes=each.moved_bytes,
            fraction=each.moved_bytes / times[each.name] / copy,
            aim=each.aim,
        )
        for each in chosen
    ]


def gemm_tflops(rounds: int) -> float:
    """Return the rate of a large bf16 GEMM on random values."""
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * GEMM**3 / (medians_ms({"gemm": lambda: a @ b}, rounds=rounds)["gemm"] * 1e9)


def table(results: list[Result]) -> list[str]:
    """Return the results as Markdown."""
    lines = [
        "| pass | bytes moved | median | TB/s | of the copy | asked |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in results:
        asked = "" if r.aim is None else f"{r.aim:.2f}"
        rate = r.moved_bytes / r.time_ms / 1e9
        fraction = f"{r.fraction:.3f}" if r.aim is None or r.fraction >= r.aim else f"**{r.fraction:.3f}**"
        moved, median = f"{r.moved_bytes / 1e6:,.0f} MB", f"{r.time_ms * 1e3:.1f} µs"
        lines.append(f"| {r.name} | {moved} | {median} | {rate:.2f} | {fraction} | {asked} |")
    return lines


def cases() -> Iterator[OperandOptions]:
    """Yield every combination of options."""
    for mode, rounding, clip in itertools.product(SCALE_MODES, ("rtn", "sr"), ("none", "static")):
        common: dict[str, Any] = {"scale_mode": mode, "rounding": rounding, "clip": clip}
        for axis, hadamard in itertools.product((-1, -2), ("none", "random", "fixed", "3rht")):
            yield OperandOptions(axis=axis, hadamard=hadamard, **common)
        for axis in (-1, -2):
            yield OperandOptions(axis=axis, block="2d", **common)


def differing(limit: int = 5) -> list[str]:
    """Return combinations of options whose bits differ from the reference's on this GPU, at most ``limit``."""
    wrong = []
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-140, 120, (256, 1), generator=generator)
    x = (torch.randn(256, 288, generator=generator, dtype=torch.float64) * 2.0**exponents).float()
    x[3, 5], x[70, 200] = float("nan"), float("inf")
    for options, dtype in itertools.product(cases(), (torch.float32, torch.bfloat16)):
        kind = options.hadamard
        own = {
            "key": 0xFEDCBA9876543210 if options.rounding == "sr" else None,
            "transform": make_hadamard(kind, seed=1, step=2) if kind != "none" else None,
        }
        values, count = formats.qdq(x.to(dtype), options, **own)
        packed = formats.quantise(x.to(dtype), options, **own)
        ours, counted = kernels.qdq(x.to(dtype).cuda(), options, **own)
        ours_packed = kernels.quantise(x.to(dtype).cuda(), options, **own)
        words = torch.int32 if dtype is torch.float32 else torch.int16
        nan = values.isnan()
        expanded = kernels.dequantise(ours_packed, dtype).cpu()
        same = (
            count.item() == counted.item()
            and torch.equal(ours_packed.codes.cpu(), packed.codes)
            and torch.equal(ours_packed.scales.cpu(), packed.scales)
            and all(
                torch.equal(nan, got.isnan()) and torch.equal(values.view(words)[~nan], got.view(words)[~nan])
                for got in (ours.cpu(), expanded)
            )
        )
        if not same:
            wrong.append(f"{options} {dtype}")
            if len(wrong) == limit:
                break
    return wrong


TRIED = {
    "rows": [(32, 1), (64, 1), (16, 1), (32, 4), (64, 2), (64, 4), (128, 4), (256, 4), (128, 8), (256, 8)],
    "columns": [(32, 1), (64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 4), (256, 8)],
}
KERNELS = {
    "QDQ rows": "rows",
    "QDQ columns": "columns",
    "QDQ 32x32": "tiles",
    "two orientations": "twoway",
    "quantise rows": "rows",
    "quantise columns": "columns",
    "quantise 32x32": "tiles",
    "dequantise rows": "expand_rows",
    "dequantise columns": "expand_columns",
    "dequantise 32x32": "expand_columns",
}


def try_tiles(x: Tensor, only: str, rounds: int) -> None:
    """Print the fraction of the copy bandwidth of every pass for every tile."""
    table_before = dict(launch.TILES)
    chosen = [each for each in passes(x)[1:] if only in each.name]
    copy = passes(x)[0]
    for each in chosen:
        kernel = next(name for prefix, name in KERNELS.items() if each.name.startswith(prefix))
        fractions = []
        for size, num_warps in TRIED["rows" if kernel.endswith("rows") else "columns"]:
            if size < 32 and not kernel.endswith("rows"):
                continue
            launch.TILES.clear()
            launch.TILES.update(dict.fromkeys(table_before, launch.Tile(size=size, num_warps=num_warps)))
            try:
                result = measure([copy, each], rounds)[1]
            except triton.runtime.errors.OutOfResources as error:
                fractions.append(f"{size}/{num_warps}: {error}")
                continue
            fractions.append(f"{size}/{num_warps}: {result.fraction:.3f}")
        print(f"{each.name}: " + "  ".join(fractions), flush=True)
    launch.TILES.clear()
    launch.TILES.update(table_before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    parser.add_argument("--peers", action="store_true", help="measure torchao as well")
    parser.add_argument("--tiles", action="store_true", help="measure other tiles; writes no page")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, fewer rounds; writes no page")
    parser.add_argument("--only", default="", metavar="WORD", help="passes whose name has the word; writes no page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA or ROCm device")
    path = kernel_path("cuda")
    print(f"{path.path}: {path.why}")
    if not path.uses_kernels:
        return 1
    if options.check:
        wrong = differing()
        print("\n".join(f"differs: {each}" for each in wrong) or "every combination of options equals the reference")
        if wrong:
            return 1
    rounds = 10 if options.quick else 30
    rows = SHAPE[0] // 4 if options.quick else SHAPE[0]
    x = torch.randn(rows, SHAPE[1], device="cuda", dtype=torch.bfloat16)
    if options.tiles:
        try_tiles(x, options.only, rounds)
        return 0
    everything = passes(x)
    chosen = everything[:1] + [each for each in everything[1:] if options.only in each.name]
    results = measure(chosen + (peers(x) if options.peers else []), rounds)
    device = torch.cuda.get_device_name()
    lines = [
        f"# Quantise kernels on one {device}",
        "",
        f"bf16 {rows}x{SHAPE[1]}, torch {torch.__version__}, triton {triton.__version__}; medians of {rounds} "
        f"interleaved replays of {CALLS} calls. Bytes moved are operands, outputs and scales, each once. bf16 GEMM "
        f"{GEMM}^3 in the same run: {gemm_tflops(rounds):.0f} TFLOP/s. Bold: below what the project asks for.",
        "",
        *table(results),
    ]
    kind = "gpu-quantise-peers" if options.peers else "gpu-quantise"
    page = ROOT / "docs/benchmarks" / f"{kind}-{device.lower().replace(' ', '-')}.md"
    if options.quick or (options.only and not options.peers):
        print("\n".join(lines))
    else:
        command = "make bench-gpu-peers" if options.peers else "make bench-gpu"
        write_page(page, [*lines, "", f"Written by `{command}`."])
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
