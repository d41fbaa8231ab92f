"""GEMMs on a GPU: grouped layers under ``lpt`` against torch's bf16 grouped GEMM, and the packed x packed GEMM.

Interleaved, medians. ``python -m tools.bench_gpu_gemm`` writes docs/benchmarks/gpu-gemm-<device>.md; ``--json FILE``
also writes the numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.formats import make_hadamard
from engine.kernels import DeviceHadamard, kernel_path, qdq, qdq_two, quantise
from engine.kernels.gemm import GemmTile, packed_matmul, transpose
from engine.kernels.grouped import grouped_matmul, grouped_wgrad, pad_groups
from engine.kernels.mx_units import has_mx_units
from engine.lowp.scheme import LinearScheme
from engine.recipes.table import RECIPES
from tools.gpu_timing import medians_ms
from tools.machine import write_page

ROOT = Path(__file__).resolve().parent.parent
EXPERTS, WIDTH, TOKENS, TOP_K = 32, 2880, 8192, 4
"""gpt-oss: experts, width in and out, tokens of a micro-batch, experts a token."""
AIM = 1.35
GEMM_SHAPES = ((8192, 8192, 8192), (16384, 14336, 4096))
"""M, N, K of dense packed GEMMs."""


def uneven_sizes(seed: int) -> Tensor:
    """Return the rows of each expert under a skewed random routing, two of them empty."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(EXPERTS, generator=generator).square() + 0.05
    weights[[5, 17]] = 0
    drawn = torch.multinomial(weights, TOKENS * TOP_K, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=EXPERTS).cuda()


def grouped_passes(seed: int) -> dict[str, Callable[[], Any]]:
    """Return name -> forward + backward of one expert projection, all on the same padded groups."""
    groups = pad_groups(uneven_sizes(seed), num_tokens=TOKENS * TOP_K)
    ends = groups.ends
    x, dy = (groups.pad(torch.randn(TOKENS * TOP_K, WIDTH, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
    w = torch.randn(EXPERTS, WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    s = LinearScheme.from_switches(RECIPES["lpt"].switches)
    transform = DeviceHadamard.from_transform(make_hadamard("random", seed=1, step=1), "cuda")
    keys = torch.tensor([11, 12], device="cuda")

    def bf16() -> tuple[Tensor, ...]:
        y = F.grouped_mm(x, w.transpose(1, 2), offs=ends)
        return y, F.grouped_mm(dy, w, offs=ends), F.grouped_mm(dy.t(), x, offs=ends)

    def lpt(impl: Any) -> Callable[[], tuple[Tensor, ...]]:
        def step() -> tuple[Tensor, ...]:
            xq, x_cols, _ = qdq_two(x, s.fprop_x, s.wgrad_x, columns_transform=transform)
            wq, _ = qdq(w, s.fprop_w)
            y = grouped_matmul(xq, wq.transpose(1, 2), ends, impl=impl)
            dyq, dy_cols, _ = qdq_two(
                dy,
                s.dgrad_dy,
                s.wgrad_dy,
                rows_key=keys[0:1],
                columns_key=keys[1:2],
                columns_transform=transform,
            )
            dx = grouped_matmul(dyq, wq, ends, impl=impl)
            return y, dx, grouped_wgrad(dy_cols.t(), x_cols, ends, impl=impl)

        return step

    def triton_bf16() -> tuple[Tensor, ...]:
        y = grouped_matmul(x, w.transpose(1, 2), ends, impl="triton")
        return y, grouped_matmul(dy, w, ends, impl="triton"), grouped_wgrad(dy.t(), x, ends, impl="triton")

    return {
        "bf16, torch grouped_mm": bf16,
        "lpt, torch grouped_mm": lpt("torch"),
        "bf16, Triton grouped GEMM": triton_bf16,
        "lpt, Triton grouped GEMM": lpt("triton"),
    }


def dense_passes(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    """Return name -> one product y[m, n]; packed operands are quantised beforehand."""
    s = LinearScheme.from_switches(RECIPES["lpt"].switches)
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    xq, wq = quantise(x, s.fprop_x), transpose(quantise(w, s.fprop_w))
    passes: dict[str, Callable[[], Any]] = {
        "bf16, torch": lambda: x @ w.t(),
        "packed, own decode" if not has_mx_units(x.device) else "packed, native": lambda: packed_matmul(xq, wq),
    }
    if not has_mx_units(x.device):
        tile = GemmTile(bk=64)
        passes["packed, tl.dot_scaled upcast"] = lambda: packed_matmul(xq, wq, native=True, tile=tile)
    return passes


def main() -> None:
    """Measure, print, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    numbers: dict[str, Any] = {"device": device}
    lines = [
        f"# GEMMs on one {device}",
        "",
        f"`python -m tools.bench_gpu_gemm`; torch {torch.__version__}, Triton {triton.__version__}, medians of "
        f"{args.rounds} interleaved rounds. {kernel_path('cuda').why}",
        "",
        f"## Grouped: {EXPERTS} experts of {WIDTH} x {WIDTH}, {TOKENS} tokens, top {TOP_K}, uneven groups, two empty",
        "",
        "Forward and backward of one projection on groups padded to 32 rows, quantisation included.",
        "",
        "| | ms | ratio to bf16 | aim |",
        "|---|---:|---:|---:|",
    ]
    times = medians_ms(grouped_passes(1), rounds=args.rounds)
    numbers["grouped"] = times
    base = times["bf16, torch grouped_mm"]
    lines += [
        f"| {name} | {ms:.3f} | {ms / base:.3f} | {AIM if name.startswith('lpt, torch') else ''} |"
        for name, ms in times.items()
    ]
    lines += ["", "## Packed x packed, dense, bf16 result", "", "| M x N x K | | ms | TFLOP/s |", "|---|---|---:|---:|"]
    for m, n, k in GEMM_SHAPES:
        times = medians_ms(dense_passes(m, n, k), rounds=args.rounds)
        numbers[f"{m}x{n}x{k}"] = times
        lines += [
            f"| {m} x {n} x {k} | {name} | {ms:.3f} | {2e-9 * m * n * k / ms:.0f} |" for name, ms in times.items()
        ]
    name = device.lower().replace(" ", "-")
    write_page(args.out or ROOT / "docs" / "benchmarks" / f"gpu-gemm-{name}.md", lines)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
