"""``lptctl plot``: from run directories to a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Sweep folders, run folders, or a folder of sweeps.", metavar="RUNS...")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the figures and tables.")] = None,
    smooth: Annotated[str, typer.Option(help="ema:WEIGHT (debiased) or none.")] = "ema:0.9",
    baseline: Annotated[str, typer.Option(help="Recipe the gap is measured against.")] = "bf16",
    last: Annotated[str, typer.Option(help="Logged steps averaged for the final loss, or auto.")] = "auto",
    preset: Annotated[str, typer.Option(help="page, column or slides.")] = "page",
    formats: Annotated[str, typer.Option("--format", help="Figure formats, comma separated.")] = "png,svg",
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 4 if a run is unfinished, diverged or unpaired.")] = False,
) -> None:
    """Draw loss, gap to the reference, grad norm and validation of each recipe, and print the final table."""
    from engine.recipes.table import RECIPES
    from lptctl.console import out as console
    from lptctl.console import print_json, say, warn
    from lptctl.errors import WARNINGS, UsageError
    from plotting.api import PlotError, PlotOptions, compare

    try:
        options = PlotOptions.parse(
            smooth=smooth, baseline=baseline, last=last, preset=preset, formats=formats, out=out,
            references={name: row.reference for name, row in RECIPES.items() if row.reference},
            notes={name: row.note for name, row in RECIPES.items() if row.note},
        )  # fmt: skip
        result = compare(runs, options)
    except PlotError as error:
        raise UsageError(str(error)) from None
    if as_json:
        print_json(result.to_json())
    else:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for index, column in enumerate(result.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in result.rows:
            table.add_row(*row)
        console().print(table)
        for sentence in result.sentences:
            say(sentence)
        for path in result.files:
            say(f"wrote {path}")
    for text in result.warnings:
        warn(f"warning: {text}")
    if strict and result.warnings:
        raise typer.Exit(WARNINGS)
