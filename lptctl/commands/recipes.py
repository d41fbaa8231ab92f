"""``lptctl recipes``: what each recipe is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(help="What each recipe does and what it is compared with.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _row(name: str) -> dict[str, Any]:
    from engine.config import to_dict
    from engine.recipes.table import RECIPES

    row: dict[str, Any] = to_dict(RECIPES[name])
    return row


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List every recipe with its reference and the change against it."""
    from engine.recipes.table import RECIPES
    from lptctl.console import out, print_json

    if as_json:
        print_json([_row(name) for name in RECIPES])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "compared with", "change"):
        table.add_column(column, no_wrap=column != "change")
    for row in RECIPES.values():
        table.add_row(row.name, row.reference or "–", row.change or "none: no quantisation")
    out().print(table)


@app.command()
def show(name: str, as_json: JsonOption = False) -> None:
    """Show one recipe: switches, reference, upstream names, notes."""
    from engine.config import ConfigError
    from engine.recipes.table import resolve
    from lptctl.console import print_json, say
    from lptctl.errors import UsageError

    try:
        row = resolve(name)
    except ConfigError as error:
        raise UsageError("; ".join(f"{p.message} ({p.hint})" for p in error.problems)) from None
    if as_json:
        print_json(_row(row.name))
        return
    tree = _row(row.name)
    reference = _row(row.reference)["switches"] if row.reference else {}
    say(f"{row.name}: {row.summary}")
    if row.aliases:
        say(f"also known as {', '.join(row.aliases)}")
    if row.reference:
        say(f"compared with {row.reference}; change: {row.change}")
    for key, value in tree["switches"].items():
        mark = "  <- differs" if row.reference and reference[key] != value else ""
        say(f"  {key}: {'null' if value is None else str(value).lower() if isinstance(value, bool) else value}{mark}")
    if row.note:
        say(row.note)
