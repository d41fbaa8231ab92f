"""Run a prepared sweep and say how it ended."""

from __future__ import annotations

import shlex
import sys

from engine.config import SweepPaths
from lptctl.console import out, say
from lptctl.errors import FAILED, INTERRUPTED, OK
from lptctl.executor.local import LocalPool, PlainDisplay
from lptctl.expand import Expansion
from lptctl.launch import Prepared
from lptctl.plan import make_plan
from lptctl.state import State


def run_prepared(expansion: Expansion, sweep: SweepPaths, prepared: Prepared) -> int:
    """Run what is to be run; print the outcome; return the exit code."""
    skipped = len(expansion.runs) - len(prepared.todo) - len(prepared.live)
    count = len(prepared.todo)
    waiting = f", {len(prepared.live)} still running from an earlier launch" if prepared.live else ""
    threads = f"{prepared.threads} CPU thread{'s' if prepared.threads != 1 else ''} each"
    say(
        f"{count} run{'s' if count != 1 else ''} to run{waiting}, {skipped} done before, {prepared.workers} at a time, "
        f"{threads}; state and logs in {sweep.root}"
    )
    plot = shlex.join(["lptctl", "plot", str(sweep.root)])
    again = f"the same command continues: {shlex.join(['lptctl', *sys.argv[1:]])}"
    code = _pool(sweep, prepared)
    rows = make_plan(expansion, sweep, launching=True)
    bad = [r for r in rows if r.status.state in (State.FAILED, State.NONFINITE)]
    finished = sum(r.status.state is State.FINISHED for r in rows)
    for row in bad:
        paths = sweep.run(row.run.config.run_id)
        say(f"{row.status.state}: {row.run.config.run_id}: {row.status.reason}\n  log: {paths.log(row.status.attempt)}")
    if code == INTERRUPTED:
        say(f"stopped: {finished} of {len(rows)} runs finished; {again}")
        return INTERRUPTED
    if finished == len(rows):
        say(f"all {len(rows)} runs finished; next: {plot}")
        return OK
    say(f"{len(rows) - finished} of {len(rows)} runs did not finish ({len(bad)} failed or diverged); compare the rest "
        f"with: {plot}; {again}")  # fmt: skip
    return FAILED


def _pool(sweep: SweepPaths, prepared: Prepared) -> int:
    if sys.stdout.isatty():
        from lptctl.executor.live import RichDisplay

        with RichDisplay(out()) as display:
            pool = LocalPool(sweep, workers=prepared.workers, code_digest=prepared.code_digest, display=display)
            return pool.run(prepared.todo, prepared.live)
    plain = PlainDisplay(lambda line: print(line, flush=True))
    pool = LocalPool(sweep, workers=prepared.workers, code_digest=prepared.code_digest, display=plain)
    return pool.run(prepared.todo, prepared.live)
