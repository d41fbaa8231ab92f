"""Every path of a sweep and of a run. Nobody else joins these names. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Files of one run below ``runs/<sweep>/<run_id>/``."""

    root: Path

    @property
    def run_json(self) -> Path:
        """The frozen configuration."""
        return self.root / "run.json"

    @property
    def events(self) -> Path:
        """Append-only life of the run."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """Append-only StepRecords."""
        return self.root / "metrics.jsonl"

    @property
    def env_json(self) -> Path:
        """Software and machine of the newest attempt."""
        return self.root / "env.json"

    @property
    def git_json(self) -> Path:
        """Revision the sweep was launched from."""
        return self.root / "git.json"

    @property
    def lock(self) -> Path:
        """Held (flock) by the engine while an attempt lives."""
        return self.root / "lock"

    @property
    def stop(self) -> Path:
        """Its presence asks the engine to checkpoint and leave with exit code 75 after the current step."""
        return self.root / "stop"

    @property
    def checkpoints(self) -> Path:
        """Rotating checkpoints."""
        return self.root / "checkpoints"

    def log(self, attempt: int, node: int = 0) -> Path:
        """Combined stdout and stderr of one node of one attempt."""
        return self.root / "logs" / f"attempt-{attempt}" / f"node-{node}.log"

    def tb(self, attempt: int) -> Path:
        """TensorBoard folder of one attempt (one folder each, so that a resume never zigzags)."""
        return self.root / "tb" / f"attempt-{attempt}"


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """Files of one sweep below ``runs/<sweep>/``."""

    root: Path

    @property
    def sweep_yaml(self) -> Path:
        """Copy of the sweep file of the newest launch."""
        return self.root / "sweep.yaml"

    @property
    def plan_json(self) -> Path:
        """The expanded plan of the newest launch."""
        return self.root / "plan.json"

    @property
    def code(self) -> Path:
        """Snapshot of the engine that every run of the sweep executes."""
        return self.root / "code"

    @property
    def data(self) -> Path:
        """Prepared corpora of the sweep, one folder per data configuration."""
        return self.root / "data"

    @property
    def lock(self) -> Path:
        """Held (flock) by the launcher."""
        return self.root / "launch.lock"

    @property
    def cancel(self) -> Path:
        """Its presence tells a live launcher to start nothing more."""
        return self.root / "cancel"

    def run(self, run_id: str) -> RunPaths:
        """Paths of one run."""
        return RunPaths(self.root / run_id)
