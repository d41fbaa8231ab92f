"""The command line: groups, global options, exit codes. Command modules import heavy libraries inside functions."""

from __future__ import annotations

from typing import Annotated

import typer

from lptctl import __version__
from lptctl.commands import data, recipes, sweep
from lptctl.commands.plot import plot
from lptctl.errors import INTERRUPTED, LptError

app = typer.Typer(
    name="lptctl",
    help="Which low-precision training recipe works for your model? One sweep YAML in, a verdict out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(sweep.app, name="sweep")
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
app.command("plot")(plot)

_debug = False


def _version(value: bool) -> None:
    if value:
        typer.echo(f"lptctl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Global options."""
    global _debug
    _debug = debug


def run(argv: list[str]) -> int:
    """Run one command and return its exit code (README, "Exit codes")."""
    try:
        app(argv, standalone_mode=True)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    except KeyboardInterrupt:
        return INTERRUPTED
    except LptError as error:
        if _debug:
            raise
        typer.echo(str(error), err=True)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except OSError as error:
        if _debug:
            raise
        where = f": {error.filename}" if error.filename else ""
        typer.echo(f"{error.strerror or error}{where}; mend it and run the same command again", err=True)
        return LptError.exit_code
    return 0
