"""Operator error of every recipe, without training: SNR and bias of the three GEMMs of one Linear layer.

``python -m engine.recipes.score [--out docs/operator-table.md] [--json]``. Inputs x, w, dy are N(0, 1) with 0.5 % of
the values multiplied by 100 (the distribution of recipes.md §1.7). For a result R and its fp64 product P:

* SNR = 10·log10(Σ P² / Σ (R − P)²), dB;
* shrinkage = Σ (R − P)·P / Σ P², the relative bias along the true product (negative: products come out too small);
* offset = mean(R − P) / rms(P), with its standard error, the signed bias.

With ``--dy output`` the gradient is the layer's own output, as of the loss ½‖y‖²: the layer passes back what it
computed, so dgrad and wgrad carry fprop's error too, and P is the exact chain. ``--out`` writes both tables.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.config import RecipeConfig
from engine.lowp.convert import convert
from engine.recipes.table import RECIPES

GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Error of one GEMM under one recipe, over all draws."""

    recipe: str
    """Row of the recipe table."""
    gemm: str
    """fprop, dgrad or wgrad."""
    snr_db: float
    """Signal to noise, dB; infinite for an exact product."""
    shrinkage: float
    """Relative bias along the true product."""
    offset: float
    """Mean signed error over the rms of the true product."""
    offset_se: float
    """Standard error of ``offset``, taken over elements."""


def outlier_normal(shape: tuple[int, int], *, generator: torch.Generator, share: float, gain: float) -> Tensor:
    """Return fp32 N(0, 1) with a random ``share`` of the values multiplied by ``gain``."""
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < share, x * gain, x)


def three_gemms(recipe: RecipeConfig, x_MK: Tensor, w_NK: Tensor, dy_MN: Tensor, *, seed: int) -> dict[str, Tensor]:
    """Run fprop, dgrad and wgrad of one Linear layer under a recipe, in the dtype of ``x_MK``."""
    model = nn.Sequential(nn.Linear(w_NK.shape[1], w_NK.shape[0], bias=False))
    model[0].weight = nn.Parameter(w_NK.clone())
    if recipe.switches.elem_format != "none":
        convert(model, recipe).state.set_step(seed, 1, 0)
    x_MK = x_MK.clone().requires_grad_()
    y_MN = model(x_MK)
    y_MN.backward(dy_MN)
    dx, dw = x_MK.grad, model[0].weight.grad
    if dx is None or dw is None:
        raise RuntimeError(f"recipe {recipe.name} left a gradient unset")
    return {"fprop": y_MN.detach(), "dgrad": dx, "wgrad": dw}


def score_recipe(
    recipe: RecipeConfig, *, tokens: int, k: int, n: int, draws: int, share: float, gain: float, dy_is_output: bool
) -> list[Score]:
    """Return the error of each GEMM, summed over ``draws`` independent inputs; ``dy_is_output`` as the module says."""
    sums = {g: dict.fromkeys(("pp", "ee", "ep", "e", "count"), 0.0) for g in GEMMS}
    for draw in range(draws):
        generator = torch.Generator().manual_seed(1000 + draw)
        x, w, dy = (
            outlier_normal(shape, generator=generator, share=share, gain=gain)
            for shape in ((tokens, k), (n, k), (tokens, n))
        )
        xd, wd, dyd = x.double(), w.double(), dy.double()
        if dy_is_output:
            dy, dyd = three_gemms(recipe, x, w, dy, seed=draw)["fprop"], xd @ wd.t()
        results = three_gemms(recipe, x, w, dy, seed=draw)
        for gemm, product in (("fprop", xd @ wd.t()), ("dgrad", dyd @ wd), ("wgrad", dyd.t() @ xd)):
            error = results[gemm].double() - product
            acc = sums[gemm]
            acc["pp"] += product.square().sum().item()
            acc["ee"] += error.square().sum().item()
            acc["ep"] += (error * product).sum().item()
            acc["e"] += error.sum().item()
            acc["count"] += error.numel()
    out = []
    for gemm, acc in sums.items():
        rms = math.sqrt(acc["pp"] / acc["count"])
        out.append(
            Score(
                recipe=recipe.name,
                gemm=gemm,
                snr_db=10 * math.log10(acc["pp"] / acc["ee"]) if acc["ee"] else math.inf,
                shrinkage=acc["ep"] / acc["pp"],
                offset=acc["e"] / acc["count"] / rms,
                offset_se=math.sqrt(acc["ee"] / acc["count"]) / math.sqrt(acc["count"]) / rms,
            )
        )
    return out


def markdown(scores: list[Score], title: str) -> str:
    """Return a table with a row a recipe."""
    rows = {name: {s.gemm: s for s in scores if s.recipe == name} for name in dict.fromkeys(s.recipe for s in scores)}
    columns = [f"{gemm} SNR dB" for gemm in GEMMS] + [f"{gemm} shrinkage" for gemm in GEMMS] + ["wgrad offset"]
    head = f"| recipe | {' | '.join(columns)} |"
    lines = [title, "", head, "|---|" + "---:|" * 7]
    for name, row in rows.items():
        snr = " | ".join("exact" if row[g].snr_db > 100 else f"{row[g].snr_db:.2f}" for g in GEMMS)
        shrink = " | ".join(f"{1e3 * row[g].shrinkage:+.2f}e-3" for g in GEMMS)
        offset = f"{1e6 * row['wgrad'].offset:+.1f}e-6 ± {1e6 * row['wgrad'].offset_se:.1f}e-6"
        lines.append(f"| {name} | {snr} | {shrink} | {offset} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Print or write the operator table."""
    parser = argparse.ArgumentParser(prog="python -m engine.recipes.score", description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), help="recipes to score (default: all)")
    parser.add_argument("--tokens", type=int, default=1024, help="M, rows of x and dy")
    parser.add_argument("--k", type=int, default=1024, help="K, in_features")
    parser.add_argument("--n", type=int, default=1024, help="N, out_features")
    parser.add_argument("--draws", type=int, default=3, help="independent inputs")
    parser.add_argument("--share", type=float, default=0.005, help="share of outlier values")
    parser.add_argument("--gain", type=float, default=100.0, help="factor of outlier values")
    parser.add_argument("--dy", choices=("independent", "output"), default="independent", help="see above")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--out", type=Path, help="replace the generated part of this Markdown page")
    args = parser.parse_args(argv)
    unknown = [name for name in args.recipes if name not in RECIPES]
    if unknown:
        print(f"unknown recipes {unknown}; known: {', '.join(RECIPES)}", file=sys.stderr)
        return 64

    def scored(dy: str) -> list[Score]:
        sizes = {name: getattr(args, name) for name in ("tokens", "k", "n", "draws", "share", "gain")}
        recipes = [RecipeConfig(name=name, switches=RECIPES[name].switches) for name in args.recipes]
        return [s for recipe in recipes for s in score_recipe(recipe, **sizes, dy_is_output=dy == "output")]

    def table(dy: str) -> str:
        inputs = f"dy [{args.tokens}, {args.n}]" if dy == "independent" else "dy = the layer's own output"
        title = (
            f"x [{args.tokens}, {args.k}], w [{args.n}, {args.k}], {inputs}, fp32, N(0, 1) with {100 * args.share:g} % "
            f"of the values ×{args.gain:g}, {args.draws} draws; torch {torch.__version__}."
        )
        return markdown(scored(dy), title)

    if args.json:
        # JSON has no infinity; an exact product's SNR is null.
        rows = [{k: None if v == math.inf else v for k, v in asdict(s).items()} for s in scored(args.dy)]
        print(json.dumps(rows, indent=2))
        return 0
    if args.out is None:
        print(table(args.dy), end="")
        return 0
    begin, end = "<!-- generated: begin -->", "<!-- generated: end -->"
    page = args.out.read_text(encoding="utf-8") if args.out.exists() else f"{begin}\n{end}\n"
    if begin not in page or end not in page:
        print(f"{args.out} lacks the markers {begin} and {end}; add them where the tables belong", file=sys.stderr)
        return 64
    before, after = page.split(begin)[0], page.split(end)[1]
    tables = "\n".join(table(dy) for dy in ("independent", "output"))
    args.out.write_text(f"{before}{begin}\n{tables}{end}{after}", encoding="utf-8")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
