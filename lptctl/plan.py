"""What a launch would do: each run of the sweep with its state, and runs that are no longer in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config import SweepPaths
from lptctl.expand import Expansion, PlannedRun
from lptctl.state import RunStatus, State, read_status

ACTIONS = {
    State.NEW: "start",
    State.RUNNING: "wait",
    State.INTERRUPTED: "continue",
    State.FAILED: "run again",
    State.FINISHED: "skip",
    State.NONFINITE: "skip",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One run and what a launch would do with it."""

    run: PlannedRun
    """The run."""
    status: RunStatus
    """Where it stands now."""

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


def make_plan(expansion: Expansion, sweep: SweepPaths) -> list[PlanRow]:
    """Return the plan in sweep order."""
    return [PlanRow(run=run, status=read_status(sweep.run(run.config.run_id))) for run in expansion.runs]


def dropped_runs(expansion: Expansion, sweep: SweepPaths) -> list[str]:
    """Return the run ids in the sweep's directory that the sweep file no longer names."""
    if not sweep.root.is_dir():
        return []
    named = {run.config.run_id for run in expansion.runs}
    return sorted(p.parent.name for p in sweep.root.glob("*/run.json") if p.parent.name not in named)
