"""The local executor: a pool of engine processes on this machine, each in its own session."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from engine.config import RunPaths, SweepPaths, append_event, load_run, read_lines
from lptctl.enginecall import engine_environment
from lptctl.errors import FAILED, INTERRUPTED, OK
from lptctl.plan import PlanRow
from lptctl.state import RunStatus, State, is_live, read_status

NEARLY_FULL_BYTES = 1 << 16
"""Free space below which a silent death is put down to the disk: even an event would hardly fit."""
POLL_S = 0.2
REFRESH_S = 1.0


class Display(Protocol):
    """What the pool tells the user."""

    def state(self, run_id: str, text: str) -> None:
        """A run changed its state."""

    def progress(self, running: dict[str, tuple[RunStatus, int]], done: int, total: int) -> None:
        """Show running runs (status and steps) about once a second."""


@dataclass(kw_only=True, slots=True)
class _Child:
    row: PlanRow
    paths: RunPaths
    attempt: int
    process: subprocess.Popen[bytes] | None
    """None for a run that an earlier launcher started: it is watched through its lock."""


class LocalPool:
    """Runs the rows of a plan, ``workers`` at a time, until done or told to stop."""

    def __init__(self, sweep: SweepPaths, *, workers: int, code_digest: str, display: Display) -> None:
        self.sweep, self.workers, self.code_digest, self.display = sweep, workers, code_digest, display
        self.children: dict[str, _Child] = {}
        self.results: dict[str, RunStatus] = {}
        self.stop_level = 0
        """0 run, 1 stop cleanly (children checkpoint), 2 kill."""

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.stop_level += 1

    def run(self, todo: list[PlanRow], live: list[PlanRow]) -> int:
        """Run everything; return 0, 1 (some failed) or 130 (interrupted)."""
        queue = deque(todo)
        total = len(todo) + len(live)
        for row in live:
            run_id = row.run.config.run_id
            self.children[run_id] = _Child(
                row=row, paths=self.sweep.run(run_id), attempt=row.status.attempt, process=None
            )
            self.display.state(run_id, "already running, started by an earlier launch; waiting for it")
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        signalled, refreshed = 0, 0.0
        cancelled = False
        try:
            while self.children or (queue and not self.stop_level and not cancelled):
                cancelled = cancelled or self.sweep.cancel.exists()
                while queue and len(self.children) < self.workers and not self.stop_level and not cancelled:
                    self._start(queue.popleft())
                if self.stop_level > signalled:
                    signalled = self.stop_level
                    self._signal_children(signal.SIGTERM if signalled == 1 else signal.SIGKILL)
                for run_id in [r for r, child in self.children.items() if self._ended(child)]:
                    self._finish(self.children.pop(run_id))
                if time.monotonic() - refreshed >= REFRESH_S:
                    refreshed = time.monotonic()
                    running = {
                        run_id: (read_status(child.paths), child.row.run.config.training.steps)
                        for run_id, child in self.children.items()
                    }
                    self.display.progress(running, len(self.results), total)
                time.sleep(POLL_S)
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
        if self.stop_level or cancelled:
            return INTERRUPTED
        return FAILED if any(r.state is not State.FINISHED for r in self.results.values()) else OK

    def _start(self, row: PlanRow) -> None:
        run_id = row.run.config.run_id
        paths = self.sweep.run(run_id)
        if paths.stop.exists():
            self.results[run_id] = RunStatus(state=State.INTERRUPTED, reason="cancelled before it was started")
            self.display.state(run_id, "cancelled before it was started")
            return
        try:
            attempt = 1 + max((event["attempt"] for event in read_lines(paths.events)), default=0)
            threads = load_run(paths.run_json.read_text()).runtime.threads
            argv = [sys.executable, "-m", "engine.train", "--run", str(paths.run_json), "--attempt", str(attempt)]
            log = paths.log(attempt)
            log.parent.mkdir(parents=True, exist_ok=True)
            append_event(
                paths.events, "submitted", attempt=attempt, executor="local", code_digest=self.code_digest, command=argv
            )
            with log.open("ab") as file:
                process = subprocess.Popen(
                    argv,
                    cwd=paths.root,
                    env=_child_environment(self.sweep, threads),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # the terminal's Ctrl-C is ours to pass on
                )
        except OSError as error:
            self.results[run_id] = RunStatus(state=State.FAILED, reason=_explain(error))
            self.display.state(run_id, f"could not be started: {_explain(error)}")
            return
        self.children[run_id] = _Child(row=row, paths=paths, attempt=attempt, process=process)
        verb = "continues" if row.status.state is State.INTERRUPTED else "started"
        self.display.state(run_id, f"{verb} (attempt {attempt})")

    def _ended(self, child: _Child) -> bool:
        return not is_live(child.paths) if child.process is None else child.process.poll() is not None

    def _signal_children(self, signum: signal.Signals) -> None:
        for run_id, child in self.children.items():
            self.display.state(run_id, "asked to stop" if signum == signal.SIGTERM else "killed")
            if child.process is not None:
                child.process.send_signal(signum)
            else:
                pid = int(child.paths.lock.read_text().split()[0])
                if is_live(child.paths):
                    os.kill(pid, signum)

    def _finish(self, child: _Child) -> None:
        run_id = child.row.run.config.run_id
        code = child.process.returncode if child.process else None
        try:
            if code is not None:
                self._record_silent_death(child, code)
            status = read_status(child.paths)
        except OSError as error:
            status = RunStatus(state=State.FAILED, reason=_explain(error))
        self.results[run_id] = status
        last = f" at loss {status.loss:.4f}" if status.loss is not None else ""
        text = {State.FINISHED: f"finished{last}", State.INTERRUPTED: "interrupted"}.get(
            status.state, status.state.value
        )
        self.display.state(run_id, f"{text}: {status.reason}" if status.reason else text)

    def _record_silent_death(self, child: _Child, code: int) -> None:
        """Write the exit event of a child that could not: killed, or dead before the engine's first line."""
        ended = any(e["kind"] == "exit" and e["attempt"] == child.attempt for e in read_lines(child.paths.events))
        if ended:
            return
        if code < 0:
            name = signal.Signals(-code).name
            message = f"killed by {name}" + (", often for lack of memory" if -code == signal.SIGKILL else "")
            cause = "killed"
        else:
            message, cause = f"exit code {code} without a word; see {child.paths.log(child.attempt)}", "crash"
            if shutil.disk_usage(child.paths.root).free < NEARLY_FULL_BYTES:
                message = f"{os.strerror(errno.ENOSPC)}: {child.paths.root}; free space, then launch again ({message})"
        append_event(
            child.paths.events, "exit", attempt=child.attempt, code=code, cause=cause, step=None, message=message
        )


def _child_environment(sweep: SweepPaths, threads: int | None) -> dict[str, str]:
    """Return the environment of an engine process: ours, the sweep's code snapshot first, and its thread count."""
    env = {**engine_environment(sweep.code), "PYTHONUNBUFFERED": "1"}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def _explain(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename else what


class PlainDisplay:
    """Lines for a pipe or a log file: each change of state, and each running run about every ten seconds."""

    EVERY_S = 10.0

    def __init__(self, write: Any) -> None:
        self._write = write
        self._last = time.monotonic()

    def state(self, run_id: str, text: str) -> None:
        """Print one line."""
        self._write(f"{run_id}  {text}")

    def progress(self, running: dict[str, tuple[RunStatus, int]], done: int, total: int) -> None:
        """Print a line a running run when ten seconds have passed."""
        if time.monotonic() - self._last < self.EVERY_S:
            return
        self._last = time.monotonic()
        for run_id, (status, steps) in running.items():
            self._write(f"{run_id}  {progress_text(status, steps)}  ({done} of {total} runs done)")


def progress_text(status: RunStatus, steps: int) -> str:
    """Return ``step 40/200  loss 3.4127  tps 7,412  ETA 0:01:20``."""
    parts = [f"step {status.step}/{steps}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tps is not None:
        parts.append(f"tps {status.tps:,.0f}")
    eta = status.eta_s(steps)
    if eta is not None:
        parts.append(f"ETA {duration(eta)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return h:mm:ss."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}"
