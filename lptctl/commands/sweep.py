"""``lptctl sweep``: one YAML -> runs -> their state. Thin functions; the work is in the modules they call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Plan, launch and watch the runs of a sweep file.", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="The sweep file.", metavar="FILE")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of all sweeps.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE for every run, e.g. training.steps=20.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SweepArgument = Annotated[Path, typer.Argument(help="A sweep's folder, name, or sweep file.", metavar="SWEEP")]
RUNS = Path("runs")
ROWS_SHOWN = 50


def _expand(file: Path, overrides: list[str] | None) -> tuple[Any, Any]:
    from lptctl.console import warn
    from lptctl.expand import expand_file
    from lptctl.spec import load_sweep_file

    spec = load_sweep_file(file)
    expansion = expand_file(spec, overrides or ())
    for text in dict.fromkeys(expansion.warnings):
        warn(f"warning: {text}")
    for text in dict.fromkeys(expansion.notes):
        warn(f"note: {text}")
    for text in expansion.unpaired:
        warn(f"unpaired (allowed by allow_unpaired): {text}")
    return spec, expansion


@app.command()
def new(file: FileArgument = Path("sweep.yaml")) -> None:
    """Write a commented sweep file to start from."""
    from lptctl.console import say
    from lptctl.errors import UsageError
    from lptctl.template import TEMPLATE

    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(TEMPLATE)
    except FileExistsError:
        raise UsageError(f"{file} exists; choose another name or delete it") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    say(f"wrote {file}; next: lptctl sweep plan {file}")


@app.command()
def plan(
    file: FileArgument,
    runs: RunsOption = RUNS,
    set_: SetOption = None,
    as_json: JsonOption = False,
    explain: Annotated[str | None, typer.Option(help="Show who set each key of this run.", metavar="RUN")] = None,
    show_all: Annotated[bool, typer.Option("--all", help=f"Show every run, not the first {ROWS_SHOWN}.")] = False,
) -> None:
    """Show every run, its state, and what a launch would do. Starts nothing, needs no torch."""
    from lptctl.console import out, print_json, say
    from lptctl.launch import sweep_paths
    from lptctl.plan import dropped_runs, keep_ids, make_plan

    spec, expansion = _expand(file, set_)
    sweep = sweep_paths(runs, spec.spec.name)
    keep_ids(expansion, sweep)
    if explain is not None:
        _explain(expansion, spec, explain, as_json)
        return
    rows = make_plan(expansion, sweep)
    dropped = dropped_runs(expansion, sweep)
    if as_json:
        print_json({"name": spec.spec.name, "runs": [row.to_json() for row in rows], "dropped": dropped})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    keys = [k for k in rows[0].run.swept if k not in ("recipe.name", "seed")] if rows else []
    for column in ("#", "run", "recipe", "seed", *keys, "steps", "state", "action"):
        table.add_column(
            column, no_wrap=column == "run", justify="right" if column in ("#", "seed", "steps") else "left"
        )
    for index, row in enumerate(rows if show_all else rows[:ROWS_SHOWN], 1):
        config = row.run.config
        swept = [str(row.run.swept.get(key, "")) for key in keys]
        state = f"{row.status.state} ({row.status.reason})" if row.status.reason else row.status.state.value
        table.add_row(
            str(index), config.run_id, config.recipe.name, str(config.seed), *swept,
            str(config.training.steps), state, row.action,
        )  # fmt: skip
    out().print(table)
    if len(rows) > ROWS_SHOWN and not show_all:
        say(f"... and {len(rows) - ROWS_SHOWN} more; --all shows them")
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.action] = counts.get(row.action, 0) + 1
    say(f"{len(rows)} runs: " + ", ".join(f"{n} to {action}" for action, n in counts.items()))
    if dropped:
        say(f"{len(dropped)} in {sweep.root} that the file no longer names: {', '.join(dropped[:8])}")


def _explain(expansion: Any, spec: Any, wanted: str, as_json: bool) -> None:
    from engine.config import to_dict
    from lptctl.console import print_json, say
    from lptctl.errors import UsageError

    found = [r for r in expansion.runs if r.config.run_id.startswith(wanted)]
    if len(found) != 1:
        known = ", ".join(r.config.run_id for r in (found or expansion.runs)[:8])
        raise UsageError(f"{wanted}: names {len(found)} runs; expected one of {known}, ...")
    run = found[0]
    if as_json:
        print_json(to_dict(run.config))
        return
    say(run.config.run_id)
    for key, setting in sorted(run.settings.items()):
        position = spec.source.position(setting.origin) if setting.origin is not None else None
        where = (
            "--set" if setting.origin is None else f"{spec.path}:{position.line + 1}" if position else str(spec.path)
        )
        say(f"  {key} = {setting.value}  ({where})")
    say("every other key has its default; --json shows the whole configuration")


@app.command()
def launch(
    file: FileArgument,
    runs: RunsOption = RUNS,
    set_: SetOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time.")] = None,
    new_code: Annotated[bool, typer.Option("--new-code", help="Continue although the engine's code changed.")] = False,
    retry_nonfinite: Annotated[bool, typer.Option("--retry-nonfinite", help="Run diverged runs again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and leave.")] = False,
) -> None:
    """Run the sweep: start what is missing, continue what was interrupted, skip what is finished."""
    from lptctl.launch import LaunchOptions, freeze, launch_lock, sweep_paths
    from lptctl.run import run_prepared

    if dry_run:
        plan(file, runs, set_)
        return
    spec, expansion = _expand(file, set_)
    sweep = sweep_paths(runs, spec.spec.name)
    options = LaunchOptions(workers=workers, new_code=new_code, retry_nonfinite=retry_nonfinite)
    with launch_lock(sweep):
        prepared = freeze(spec, expansion, sweep, options)
        raise typer.Exit(run_prepared(expansion, sweep, prepared))


@app.command()
def status(
    sweep: SweepArgument,
    runs: RunsOption = RUNS,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every two seconds until all runs have ended.")
    ] = False,
) -> None:
    """Show where each run stands."""
    from lptctl.status import show_status

    show_status(sweep, runs, as_json=as_json, watch=watch)


@app.command()
def logs(
    sweep: SweepArgument,
    run: Annotated[str, typer.Argument(help="A run id or its beginning.")],
    runs: RunsOption = RUNS,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
    attempt: Annotated[int | None, typer.Option(help="Attempt; default: the newest.")] = None,
) -> None:
    """Print a run's log."""
    from lptctl.status import show_log

    show_log(sweep, run, runs, follow=follow, attempt=attempt)


@app.command()
def cancel(
    sweep: SweepArgument,
    run: Annotated[list[str] | None, typer.Argument(help="Run ids or their beginnings; default: all.")] = None,
    runs: RunsOption = RUNS,
) -> None:
    """Stop runs after their current step, checkpointed; the launch command continues them."""
    from lptctl.status import cancel_runs

    cancel_runs(sweep, run or [], runs)


@app.command()
def schema() -> None:
    """Print the JSON schema of the sweep file, for editors."""
    from lptctl.console import print_json
    from lptctl.schema import sweep_schema

    print_json(sweep_schema())
