"""What a launch would do: each run of the sweep with its state, and runs that are no longer in it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from engine.config import ConfigError, RunConfig, SweepPaths, canonical_json, load_run
from lptctl.errors import UsageError
from lptctl.expand import Expansion, PlannedRun
from lptctl.state import RunStatus, State, is_launching, read_status

ACTIONS = {
    State.NEW: "start",
    State.QUEUED: "wait",
    State.RUNNING: "wait",
    State.INTERRUPTED: "continue",
    State.FAILED: "run again",
    State.FINISHED: "skip",
    State.NONFINITE: "skip",
}
TO_RUN = ("start", "continue", "run again")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One run and what a launch would do with it."""

    run: PlannedRun
    """The run."""
    status: RunStatus
    """Where it stands now."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.run.config.run_id

    @property
    def action(self) -> str:
        """start, wait, continue, run again or skip."""
        return ACTIONS[self.status.state]

    def to_json(self) -> dict[str, Any]:
        """Return the row for ``--json`` and plan.json."""
        config = self.run.config
        return {
            "run_id": config.run_id,
            "recipe": config.recipe.name,
            "seed": config.seed,
            "swept": self.run.swept,
            "steps": config.training.steps,
            "state": self.status.state.value,
            "action": self.action,
            "reason": self.status.reason,
            "attempt": self.status.attempt,
            "step": self.status.step,
        }


def keep_ids(expansion: Expansion, sweep: SweepPaths) -> None:
    """Give runs that are in the directory under another name that name, so that a new axis reruns nothing.

    The readable part of a run id comes from the swept keys, which change when the sweep file does; the hash does not.
    """
    if not sweep.root.is_dir():
        return
    by_hash: dict[str, list[str]] = {}
    for folder in sweep.root.iterdir():
        by_hash.setdefault(folder.name[-8:], []).append(folder.name)
    kept = 0
    for index, run in enumerate(expansion.runs):
        names = by_hash.get(run.config.run_id[-8:], [])
        if not names or run.config.run_id in names:
            continue
        same = [name for name in names if _is_same_run(sweep, name, run.config)]
        if same:
            config = dataclasses.replace(run.config, run_id=same[0])
            expansion.runs[index] = dataclasses.replace(run, config=config)
            kept += 1
    if kept:
        expansion.notes.append(
            f"{kept} run{'s keep the ids' if kept > 1 else ' keeps the id'} of an earlier sweep file"
        )


def _is_same_run(sweep: SweepPaths, name: str, config: RunConfig) -> bool:
    try:
        found = load_run(sweep.run(name).run_json.read_text(encoding="utf-8"))
    except (OSError, ConfigError, UnicodeDecodeError):
        return False
    return found.run_id == name and canonical_json(found.identity()) == canonical_json(config.identity())


def read_plan(sweep: SweepPaths) -> dict[str, Any]:
    """Return the plan of the newest launch.

    Raises:
        UsageError: if plan.json is damaged.
    """
    try:
        plan: dict[str, Any] = json.loads(sweep.plan_json.read_text(encoding="utf-8"))
        for row in plan["runs"]:
            row["run_id"], row["action"], row["attempt"], row["steps"], row["recipe"], row["seed"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{sweep.plan_json} is damaged ({type(error).__name__}: {error}); launching the sweep file writes it again"
        ) from None
    return plan


def queued_runs(sweep: SweepPaths) -> dict[str, int]:
    """Return run id -> newest attempt at launch, of the runs that a live launcher was to start."""
    if not sweep.plan_json.is_file() or not is_launching(sweep):
        return {}
    return {row["run_id"]: row["attempt"] for row in read_plan(sweep)["runs"] if row["action"] in TO_RUN}


def status_of(sweep: SweepPaths, run_id: str, queued: dict[str, int]) -> RunStatus:
    """Return a run's state; ``queued`` as :func:`queued_runs` gives it."""
    status = read_status(sweep.run(run_id))
    if queued.get(run_id) == status.attempt and status.state is not State.RUNNING:
        return read_status(sweep.run(run_id), queued=True)
    return status


def make_plan(expansion: Expansion, sweep: SweepPaths, *, launching: bool = False) -> list[PlanRow]:
    """Return the plan in sweep order; ``launching`` says that the caller is the launcher and nothing else is queued."""
    queued = {} if launching else queued_runs(sweep)
    return [PlanRow(run=run, status=status_of(sweep, run.config.run_id, queued)) for run in expansion.runs]


def dropped_runs(expansion: Expansion, sweep: SweepPaths) -> list[str]:
    """Return the run ids in the sweep's directory that the sweep file no longer names."""
    if not sweep.root.is_dir():
        return []
    named = {run.config.run_id for run in expansion.runs}
    return sorted(p.parent.name for p in sweep.root.glob("*/run.json") if p.parent.name not in named)
