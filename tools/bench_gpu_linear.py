"""A Linear layer under ``lpt`` against torch's bf16 Linear on a GPU: time forward + backward, memory of saved inputs.

Interleaved, medians. Writes docs/benchmarks/gpu-linear-<device>.md; ``--json FILE`` also writes the numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config import RecipeConfig
from engine.kernels import kernel_path
from engine.lowp.convert import convert
from engine.lowp.linear import LowpOptions
from engine.recipes.table import RECIPES
from tools.gpu_timing import medians_ms
from tools.machine import write_page

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((16384, 4096, 14336, 1.20), (16384, 2048, 8192, 1.30))
"""Tokens T, in_features K, out_features N, and the largest ratio aimed at."""
_SAVED = {"bf16": (None, False), "lpt": ("lpt", False), "lpt, save_packed": ("lpt", True)}
RECIPE_NAMES = ("baseline", "lpt", "lpt_nosr", "forward_only")


def make_layer(recipe: str | None, k: int, n: int, *, save_packed: bool = False) -> nn.Module:
    """Return a bf16 Linear without bias, under a recipe or plain."""
    layer = nn.Sequential(nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16))
    if recipe is not None:
        config = RecipeConfig(name=recipe, switches=RECIPES[recipe].switches)
        convert(layer, config, options=LowpOptions(save_packed=save_packed)).state.set_step(1, 1, 0)
    return layer


def step_of(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], Any]:
    """Return one forward + backward with gradients for input and weight."""

    def step() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x).backward(dy)

    return step


def time_shape(t: int, k: int, n: int, rounds: int) -> dict[str, float]:
    """Return recipe -> milliseconds of a step; ``bf16`` is torch's Linear."""
    x = torch.randn(t, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(t, n, device="cuda", dtype=torch.bfloat16)
    passes = {"bf16": step_of(make_layer(None, k, n), x, dy)}
    passes |= {name: step_of(make_layer(name, k, n), x, dy) for name in RECIPE_NAMES}
    passes["lpt, save_packed"] = step_of(make_layer("lpt", k, n, save_packed=True), x, dy)
    return medians_ms(passes, rounds=rounds)


def saved_bytes(recipe: str | None, t: int, k: int, *, save_packed: bool = False, layers: int = 4) -> tuple[int, int]:
    """Return the bytes that forward keeps for backward in a stack of K x K layers: of inputs, and of quantised weights.

    Inputs are told from weights by their rows: T, T / 2 (packed along T) or T / 32 (scales). The parameters themselves,
    which are there anyway, do not count.
    """
    parts = [make_layer(recipe, k, k, save_packed=save_packed) for _ in range(layers)]
    parameters = {p.data_ptr() for part in parts for p in part.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda and tensor.numel() > 64 * 96 and tensor.data_ptr() not in parameters:
            found[tensor.data_ptr()] = tensor
        return tensor

    y = torch.randn(t, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for part in parts:
            y = part(y)
    sizes = [(tensor.shape[0] in (t, t // 2, t // 32), tensor.nbytes) for tensor in found.values()]
    return sum(size for is_input, size in sizes if is_input), sum(size for is_input, size in sizes if not is_input)


def main() -> None:
    """Measure, print, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    lines = [
        f"# A Linear layer on one {device}",
        "",
        f"`python -m tools.bench_gpu_linear`; torch {torch.__version__}, forward + backward in bf16 with gradients for "
        f"input and weight, medians of {args.rounds} interleaved rounds. {kernel_path('cuda').why}",
        "",
        "| T x K x N | recipe | ms | ratio to bf16 | aim |",
        "|---|---|---:|---:|---:|",
    ]
    numbers: dict[str, Any] = {"device": device}
    for t, k, n, aim in SHAPES:
        times = time_shape(t, k, n, args.rounds)
        numbers[f"{t}x{k}x{n}"] = times
        for name, ms in times.items():
            shown = f"{aim:.2f}" if name == "lpt" else ""
            lines.append(f"| {t} x {k} x {n} | {name} | {ms:.3f} | {ms / times['bf16']:.3f} | {shown} |")
    t, k = 16384, 4096
    saved = {name: saved_bytes(*case[:1], t, k, save_packed=case[1]) for name, case in _SAVED.items()}
    numbers["saved_bytes"] = saved
    lines += ["", f"Kept between forward and backward by four layers of {t} x {k} x {k}:", ""]
    lines += ["| recipe | inputs MiB | ratio to bf16 | quantised weights MiB |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {inputs / 2**20:.1f} | {inputs / saved['bf16'][0]:.3f} | {weights / 2**20:.1f} |"
        for name, (inputs, weights) in saved.items()
    ]
    lines += ["", "Aim: 0.30 with save_packed (4.25 of 16 bits are 0.266)."]
    name = device.lower().replace(" ", "-")
    write_page(args.out or ROOT / "docs" / "benchmarks" / f"gpu-linear-{name}.md", lines)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
