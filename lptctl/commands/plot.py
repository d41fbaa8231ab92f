"""``lptctl plot``: from run directories to a comparison. The plotting library is imported inside the functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from plotting.api import RecipeInfo, Report

_SHORT = 12  # characters


def plot(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Sweep folders, run folders, a folder of sweeps, or globs of them in quotes.",
            metavar="RUNS...",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder for figures and tables.", show_default="SWEEP/plots, else plots"
        ),
    ] = None,
    smooth: Annotated[
        str, typer.Option(metavar="ema:S|none", help="Smoothing of the curves; the table never smooths.")
    ] = "ema:0.9",
    baseline: Annotated[str, typer.Option(metavar="RECIPE", help="Recipe that gaps are measured from.")] = "bf16",
    last: Annotated[
        str, typer.Option(metavar="N|auto", help="Logged steps that the final training loss averages.")
    ] = "auto",
    preset: Annotated[str, typer.Option(metavar="page|column|slides", help="Size of the figure.")] = "page",
    formats: Annotated[
        str, typer.Option("--format", metavar="LIST", help="Of png, svg, pdf, csv; with commas.")
    ] = "png,svg,csv",
    as_json: Annotated[bool, typer.Option("--json", help="Print table and notes as JSON.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 4 if there is any warning, e.g. a non-finite or unfinished run.")
    ] = False,
) -> None:
    """Draw loss, gap to the baseline, grad norm and validation of each recipe, and print the final table.

    Differences are paired by seed, with 95 % intervals where there are two seeds or more. docs/plot.md says what each
    number and band means.
    """
    import shlex
    import sys

    from engine.config import ConfigError
    from engine.recipes.table import resolve
    from lptctl.console import print_json
    from lptctl.errors import WARNINGS, UsageError
    from plotting.api import Options, PlotError, make_report

    problems: list[str] = []
    try:
        baseline = resolve(baseline).name
    except ConfigError as error:
        problems.append("--baseline: " + str(error).removeprefix("name: "))
    try:
        options = Options.parse(smooth=smooth, baseline=baseline, last=last, preset=preset, formats=formats)
    except PlotError as error:
        problems += error.problems
    if problems:
        raise UsageError("\n".join(problems))
    try:
        command = shlex.join(["lptctl", *sys.argv[1:]])
        report = make_report(runs, options=options, recipes=recipe_infos(), out=out, command=command)
    except PlotError as error:
        raise UsageError("\n".join(error.problems)) from None
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if strict and report.is_flawed:
        raise typer.Exit(WARNINGS)


def recipe_infos() -> dict[str, RecipeInfo]:
    """Return what the recipe table knows and run directories do not: references, presets, notes, in its order."""
    from engine.config import RecipeConfig, from_dict, resolve_recipe, to_dict
    from engine.recipes.table import RECIPES
    from plotting.api import RecipeInfo
    from plotting.sources.rundir import flatten

    infos = {}
    for name, row in RECIPES.items():
        preset = flatten(to_dict(from_dict(RecipeConfig, resolve_recipe(name))))
        del preset["name"]
        # The control's note says what it is; the sentence about its result is plotting's.
        is_control = row.note.startswith("A/A control")
        infos[name] = RecipeInfo(
            reference=row.reference, preset=preset, note="" if is_control else row.note, is_control=is_control
        )
    return infos


def _print(report: Report) -> None:
    from rich.table import Table

    from lptctl.console import out, say, warn

    header, cells = report.table()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(header):
        justify: Literal["left", "right"] = "left" if index == 0 or name == "status" else "right"
        # Short columns keep their lines whole; in a narrow terminal the others are folded instead.
        is_short = max(len(text) for text in (name, *(row[index] for row in cells))) <= _SHORT
        table.add_column(name, justify=justify, overflow="fold", no_wrap=is_short)
    for row in cells:
        table.add_row(*row)
    out().print(table, markup=False)
    for note in report.notes:
        if note.level == "warning":
            warn(f"warning: {note.text}")
    for note in report.notes:
        if note.level == "info":
            say(note.text)
    for path in report.files:
        say(f"wrote {path}")
