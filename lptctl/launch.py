"""Launch a sweep on this machine: check everything, freeze it on disk, then hand the runs to the local executor."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError, DataConfig, RunConfig, SweepPaths, canonical_json, dump_run, load_run, to_dict
from lptctl import snapshot
from lptctl.console import warn
from lptctl.enginecall import engine_environment
from lptctl.errors import LptError, UsageError
from lptctl.expand import Expansion
from lptctl.plan import PlanRow, keep_ids, make_plan
from lptctl.sources import resolve_source
from lptctl.spec import SweepFile
from lptctl.state import State

ENGINE_CONFIG_ERROR = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """What the command line says about one launch."""

    workers: int | None = None
    """Runs at a time; overrides the sweep file."""
    new_code: bool = False
    """Continue a sweep although the engine's code has changed."""
    retry_nonfinite: bool = False
    """Run diverged runs again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A sweep that is ready to run."""

    todo: list[PlanRow]
    """Runs to start or continue."""
    live: list[PlanRow]
    """Runs that another launcher left running; they are waited for."""
    workers: int
    """Runs at a time."""
    threads: int
    """CPU threads of a run that does not set its own."""
    code_digest: str
    """Digest of the engine snapshot."""


@contextmanager
def launch_lock(sweep: SweepPaths) -> Iterator[None]:
    """Hold the sweep's launch lock.

    Raises:
        UsageError: if another launcher of this sweep is alive; nothing was changed.
    """
    sweep.root.mkdir(parents=True, exist_ok=True)
    with sweep.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UsageError(
                f"{sweep.root} is being launched already by {holder}; nothing was changed. Watch it with "
                f"`lptctl sweep status {sweep.root} --watch` or stop it with `lptctl sweep cancel {sweep.root}`"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def pool_size(file: SweepFile, options: LaunchOptions) -> tuple[int, int]:
    """Return (workers, threads of a run) for this machine."""
    cores = len(os.sched_getaffinity(0))
    local = file.spec.local
    workers = options.workers or local.workers
    if workers is None:
        workers = max(1, cores // (local.threads or 1))
    return workers, local.threads or max(1, cores // workers)


def freeze(file: SweepFile, expansion: Expansion, sweep: SweepPaths, options: LaunchOptions) -> Prepared:
    """Check everything, then write the sweep's files. Nothing is written before every check has passed.

    Raises:
        UsageError: if a run directory belongs to something else, the code changed, or a corpus is unusable.
    """
    keep_ids(expansion, sweep)
    rows = make_plan(expansion, sweep, launching=True)
    wanted = {State.NEW, State.INTERRUPTED, State.FAILED} | ({State.NONFINITE} if options.retry_nonfinite else set())
    todo = [row for row in rows if row.status.state in wanted]
    old = {row.run_id: found for row in rows if (found := _existing(sweep, row.run.config)) is not None}
    files = snapshot.current_engine()
    digest = snapshot.code_digest(files)
    previous = snapshot.snapshot_files(sweep.code)
    changed = previous is not None and snapshot.code_digest(previous) != digest
    if changed and todo and old and not options.new_code:
        names = ", ".join(f"engine/{name}" for name in snapshot.changed_files(previous or {}, files)[:6])
        raise UsageError(
            f"{sweep.root}: the engine's code has changed since this sweep was launched ({names}); mixing the two "
            "would spoil the comparison. Use --new-code to continue all the same (the plots then flag it), or a new "
            "sweep name"
        )
    workers, threads = pool_size(file, options)
    if not todo:
        return Prepared(todo=[], live=_live(rows), workers=workers, threads=threads, code_digest=digest)
    corpora = _prepare_corpora(file, rows, sweep)
    configs = {}
    for row in todo:
        config = row.run.config
        data = corpora[config.data]
        if data["vocab_size"] > config.model.vocab_size:
            raise UsageError(
                f"{file.path}: model.vocab_size: {config.model.vocab_size} is smaller than the corpus's vocabulary of "
                f"{data['vocab_size']}; set model.vocab_size to at least that"
            )
        known = old.get(config.run_id)
        if known is not None and known.data.digest != data["digest"]:
            raise UsageError(
                f"{sweep.run(config.run_id).root}: the corpus has changed since this run was made "
                f"(digest {known.data.digest}, now {data['digest']}); use a new sweep name"
            )
        run_threads = known.runtime.threads if known is not None else config.runtime.threads or threads
        configs[config.run_id] = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, path=data["path"], digest=data["digest"]),
            runtime=dataclasses.replace(config.runtime, threads=run_threads),
        )
    _write(file, expansion, sweep, rows, configs, files if previous is None or changed else None)
    return Prepared(todo=todo, live=_live(rows), workers=workers, threads=threads, code_digest=digest)


def _live(rows: list[PlanRow]) -> list[PlanRow]:
    return [row for row in rows if row.status.state is State.RUNNING]


def _existing(sweep: SweepPaths, config: RunConfig) -> RunConfig | None:
    """Return the frozen configuration of a run directory, which must be this very run's; None if there is none."""
    paths = sweep.run(config.run_id)
    path = paths.run_json
    if not path.exists():
        records = [p.name for p in (paths.events, paths.metrics, paths.checkpoints) if p.exists()]
        if records:
            raise UsageError(
                f"{paths.root}: holds {', '.join(records)} but no run.json, so nothing says which run they belong to; "
                "move the folder away"
            )
        return None
    try:
        found = load_run(path.read_text(encoding="utf-8"))
    except (OSError, ConfigError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read as this run's configuration: {error}; move the folder away"
        ) from error
    if canonical_json(found.identity()) != canonical_json(config.identity()):
        theirs, ours = _flat(found.identity()), _flat(config.identity())
        differing = [
            f"{k}: {theirs.get(k)} there, {ours.get(k)} here" for k in sorted(ours) if theirs.get(k) != ours[k]
        ]
        raise UsageError(
            f"{path} belongs to another specification ({'; '.join(differing[:4])}); move the folder away or use "
            "another sweep name"
        )
    return found


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()}


def _prepare_corpora(file: SweepFile, rows: list[PlanRow], sweep: SweepPaths) -> dict[DataConfig, dict[str, Any]]:
    """Prepare each distinct corpus once; return path (relative to a run directory), digest and vocabulary."""
    corpora: dict[DataConfig, dict[str, Any]] = {}
    for data in dict.fromkeys(row.run.config.data for row in rows):
        folder = hashlib.sha256(canonical_json(to_dict(data)).encode()).hexdigest()[:8]
        out = sweep.data / folder
        argv = [sys.executable, "-m", "engine.data", "prepare", "--out", str(out), "--json"]
        argv += ["--tokenizer", data.tokenizer, "--text-key", data.text_key]
        argv += ["--val-fraction", repr(data.val_fraction)]
        for source in data.source:
            argv += ["--source", source if source == "stdlib" else resolve_source(source, file.path.parent)]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=engine_environment()
        )
        talk = []
        for line in process.stderr or ():
            talk.append(line.rstrip())
            if process.poll() in (None, 0):
                warn(f"corpus: {talk[-1]}")
        stdout = (process.stdout.read() if process.stdout else "").strip()
        if process.wait() != 0:
            message = f"{file.path}: data.source {list(data.source)}: the corpus could not be prepared"
            kind = UsageError if process.returncode == ENGINE_CONFIG_ERROR else LptError
            raise kind("\n".join([f"{message} (exit {process.returncode}); nothing was started", *talk[-12:]]))
        result = json.loads(stdout.splitlines()[-1])
        corpora[data] = {**result, "path": f"../data/{folder}"}
    return corpora


def _write(
    file: SweepFile,
    expansion: Expansion,
    sweep: SweepPaths,
    rows: list[PlanRow],
    configs: dict[str, RunConfig],
    code: dict[str, bytes] | None,
) -> None:
    """Put the sweep on disk: code first, run.json last, so that a run directory is never without its code."""
    for marker in (sweep.cancel, *(sweep.run(run_id).stop for run_id in configs)):
        marker.unlink(missing_ok=True)
    if code is not None:
        snapshot.write_snapshot(sweep.code, code)
    snapshot.write_atomic(sweep.sweep_yaml, file.source.text)
    plan = {"name": file.spec.name, "unpaired": expansion.unpaired, "runs": [row.to_json() for row in rows]}
    snapshot.write_atomic(sweep.plan_json, snapshot.dump_json(plan))
    git = snapshot.dump_json(snapshot.git_state())
    for run_id, config in configs.items():
        paths = sweep.run(run_id)
        paths.root.mkdir(parents=True, exist_ok=True)
        snapshot.write_atomic(paths.git_json, git)
        if not paths.run_json.exists():
            snapshot.write_atomic(paths.run_json, dump_run(config))


def sweep_paths(runs: Path, name: str) -> SweepPaths:
    """Return the paths of a sweep below the runs folder, absolute."""
    return SweepPaths(runs.resolve() / name)
