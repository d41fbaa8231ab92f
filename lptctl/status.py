"""Status, logs and cancellation of a launched sweep, from its directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from engine.config import RunPaths, SweepPaths
from lptctl.console import out, print_json, say
from lptctl.errors import LptError, UsageError
from lptctl.executor.local import duration
from lptctl.plan import queued_runs, read_plan, status_of
from lptctl.state import RunStatus, State, finite_or_text, read_status

WATCH_S = 2.0
UNENDED = (State.RUNNING, State.QUEUED)


def find_sweep(given: Path, runs: Path) -> SweepPaths:
    """Return the sweep that a folder, a name below RUNS, or a sweep file names.

    Raises:
        UsageError: if nothing was launched under that name.
    """
    candidates = [given, runs / given]
    if given.is_file():
        from lptctl.spec import load_sweep_file

        candidates = [runs / load_sweep_file(given).spec.name]
    for folder in candidates:
        if (folder / "plan.json").is_file():
            return SweepPaths(folder.resolve())
    looked = " and ".join(str(c) for c in candidates)
    raise UsageError(
        f"{given}: no launched sweep (looked for plan.json in {looked}); --runs names the folder of all sweeps"
    )


def _rows(sweep: SweepPaths) -> list[tuple[dict[str, Any], RunStatus]]:
    queued = queued_runs(sweep)
    return [(row, status_of(sweep, row["run_id"], queued)) for row in read_plan(sweep)["runs"]]


def show_status(given: Path, runs: Path, *, as_json: bool, watch: bool) -> None:
    """Print the state of each run, once or until all have ended."""
    sweep = find_sweep(given, runs)
    if not watch:
        _print_status(sweep, as_json)
        return
    from rich.live import Live

    with Live(console=out(), auto_refresh=False) as live:
        while True:
            rows = _rows(sweep)
            live.update(_table(rows), refresh=True)
            if not any(status.state in UNENDED for _, status in rows):
                return
            time.sleep(WATCH_S)


def _print_status(sweep: SweepPaths, as_json: bool) -> None:
    rows = _rows(sweep)
    if as_json:
        print_json([
            {
                "run_id": row["run_id"], "recipe": row["recipe"], "seed": row["seed"], "state": status.state.value,
                "reason": status.reason, "attempt": status.attempt, "step": status.step, "steps": row["steps"],
                "loss": finite_or_text(status.loss), "val_loss": finite_or_text(status.val_loss),
                "eta_s": status.eta_s(row["steps"]) if status.state is State.RUNNING else None,
            }
            for row, status in rows
        ])  # fmt: skip
        return
    out().print(_table(rows))
    counts: dict[str, int] = {}
    for _, status in rows:
        counts[status.state.value] = counts.get(status.state.value, 0) + 1
    say(f"{len(rows)} runs: " + ", ".join(f"{n} {state}" for state, n in counts.items()))


def _table(rows: list[tuple[dict[str, Any], RunStatus]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "step", "loss", "val loss", "attempt", "ETA", "reason"):
        table.add_column(column, no_wrap=column in ("run", "state", "step"))
    for row, status in rows:
        eta = status.eta_s(row["steps"]) if status.state is State.RUNNING else None
        table.add_row(
            row["run_id"],
            status.state.value,
            f"{status.step}/{row['steps']}",
            "" if status.loss is None else f"{status.loss:.4f}",
            "" if status.val_loss is None else f"{status.val_loss:.4f}",
            str(status.attempt or ""),
            "" if eta is None else duration(eta),
            status.reason,
        )
    return table


def find_run(sweep: SweepPaths, wanted: str) -> RunPaths:
    """Return the one run whose id starts with ``wanted``.

    Raises:
        UsageError: if none or several do.
    """
    known = sorted(p.parent.name for p in sweep.root.glob("*/run.json"))
    found = [name for name in known if name == wanted] or [name for name in known if name.startswith(wanted)]
    if len(found) != 1:
        raise UsageError(
            f"{wanted}: names {len(found)} runs of {sweep.root}; known: {', '.join((found or known)[:10])}"
        )
    return sweep.run(found[0])


def show_log(given: Path, wanted: str, runs: Path, *, follow: bool, attempt: int | None) -> None:
    """Print the log of a run's attempt; with ``follow`` until the run has ended."""
    paths = find_run(find_sweep(given, runs), wanted)
    number = attempt or read_status(paths).attempt
    log = paths.log(number)
    try:
        file = log.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise LptError(f"{paths.root.name} has no log of attempt {number} ({log}); has it been launched?") from None
    with file:
        while True:
            ended = read_status(paths).state is not State.RUNNING
            for line in file:
                print(line, end="", flush=True)
            if ended or not follow:
                return
            time.sleep(0.5)


def cancel_runs(given: Path, wanted: list[str], runs: Path) -> None:
    """Ask live runs to stop; without names, ask the launcher to start nothing more as well."""
    sweep = find_sweep(given, runs)
    if wanted:
        targets = [find_run(sweep, w) for w in wanted]
    else:
        sweep.cancel.touch()
        targets = [RunPaths(p.parent) for p in sorted(sweep.root.glob("*/run.json"))]
    queued = queued_runs(sweep)
    states = {paths.root.name: status_of(sweep, paths.root.name, queued).state for paths in targets}
    for paths in targets:
        if states[paths.root.name] in UNENDED:
            paths.stop.touch()
    running = [name for name, state in states.items() if state is State.RUNNING]
    waiting = [name for name, state in states.items() if state is State.QUEUED]
    if running:
        say(f"asked to checkpoint and stop: {', '.join(running)}")
    if waiting:
        say(f"will not be started: {', '.join(waiting)}")
    if not running and not waiting:
        say("nothing to cancel: no run is running or waiting to start")
