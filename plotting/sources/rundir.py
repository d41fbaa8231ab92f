"""Find run directories and read them, by the format of ``docs/run-directory.md``."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plotting.schema import METRICS, Event, PlotError, RawRun, ReadReport, Records, RunInfo

LAYOUT_VERSION = 1
"""Version of run.json that this reader knows."""
_NOT_IDENTITY = ("version", "sweep", "run_id", "seed", "recipe", "checkpoint", "runtime")
_PROBLEMS_PER_FILE = 5
_MOST = 2**63 - 1


def discover(arguments: Sequence[str | Path]) -> list[Path]:
    """Return the run directories that the arguments name, each once, sorted within an argument.

    An argument is a run directory (it holds run.json), a sweep directory (folders of it do), a runs root (folders of
    those do) or a glob of such.

    Raises:
        PlotError: with every argument that does not exist, matches nothing or holds no run.
    """
    found: dict[Path, Path] = {}
    problems: list[str] = []
    if not arguments:
        problems.append("no RUNS given: name a sweep directory, a run directory, a runs root or a glob")
    for argument in arguments:
        path = Path(argument)
        is_pattern = not path.exists() and glob.has_magic(str(argument))
        candidates = sorted(Path(p) for p in glob.glob(str(argument))) if is_pattern else [path]
        if not candidates:
            problems.append(f"{argument}: the pattern matches nothing (quote it so that the shell leaves it alone)")
        runs = [run for candidate in candidates for run in _runs_below(candidate)]
        if candidates and not runs:
            if not is_pattern and not path.exists():
                problems.append(
                    f"{argument}: no such file or directory; expected the folder of a sweep or a run, e.g. runs/demo"
                )
            else:
                problems.append(
                    f"{argument}: no run found; expected run.json in it, or in a folder one level (a sweep) "
                    "or two levels (a runs root) below. Start one with `lptctl sweep launch FILE`"
                )
        for run in runs:
            found.setdefault(run.resolve(), run)
        parents = dict.fromkeys(run.parent for run in runs if run not in candidates)
        problems += [
            f"{log.parent}: metrics.jsonl without run.json; restore run.json or move the folder out of the sweep"
            for parent in parents
            for log in sorted(parent.glob("*/metrics.jsonl"))
            if not (log.parent / "run.json").exists()
        ]
    if problems:
        raise PlotError(problems)
    return list(found.values())


def _runs_below(path: Path) -> list[Path]:
    if path.is_file() and path.name == "run.json":
        return [path.parent]
    for pattern in ("run.json", "*/run.json", "*/*/run.json"):
        runs = sorted(p.parent for p in path.glob(pattern))
        if runs:
            return runs
    return []


def read_runs(paths: Sequence[Path]) -> list[RawRun]:
    """Read run directories.

    Raises:
        PlotError: with every problem of every run: unreadable files, broken lines, wrong types.
    """
    runs: list[RawRun] = []
    problems: list[str] = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except PlotError as error:
            problems.extend(error.problems)
    if problems:
        raise PlotError(problems)
    return runs


def read_run(path: Path) -> RawRun:
    """Read one run directory. A missing metrics.jsonl or events.jsonl is a run that has not got that far.

    Raises:
        PlotError: with every problem found, each as ``file:line: what``.
    """
    problems: list[str] = []
    info = _read_info(path, problems)
    lines, torn = _read_lines(path / "metrics.jsonl", problems)
    records = _records(path / "metrics.jsonl", lines, problems)
    event_lines, torn_events = _read_lines(path / "events.jsonl", problems)
    events = _events(path / "events.jsonl", event_lines, problems)
    if problems or info is None:
        raise PlotError(problems)
    nonfinite = sum(int(np.count_nonzero(records.present[m] & ~np.isfinite(records.values[m]))) for m in METRICS)
    report = ReadReport(lines=len(lines), torn_bytes=torn + torn_events, nonfinite=nonfinite)
    return RawRun(info=info, records=records, events=events, report=report)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into dotted keys and lists into tuples, so that values compare and hash."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = _frozen(value)
    return out


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _read_text(path: Path, problems: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror or error}")
    except UnicodeDecodeError as error:
        problems.append(f"{path}: byte {error.start} is not UTF-8; the file is damaged or is no run file")
    return None


def _read_info(path: Path, problems: list[str]) -> RunInfo | None:
    file = path / "run.json"
    text = _read_text(file, problems)
    if text is None:
        return None
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        problems.append(f"{file}:{error.lineno}: no JSON: {error.msg}; expected the configuration of a run")
        return None
    if not isinstance(tree, dict):
        problems.append(f"{file}: holds {_shown(tree)}; expected a mapping, the configuration of a run")
        return None
    if tree.get("version") != LAYOUT_VERSION:
        problems.append(
            f"{file}: version {_shown(tree.get('version'))}; this lptctl reads version {LAYOUT_VERSION}. "
            "Plot the run with the lptctl that made it"
        )
        return None
    before = len(problems)
    flat = flatten(tree)
    for key in ("sweep", "run_id", "recipe.name"):
        if not isinstance(flat.get(key), str):
            problems.append(f"{file}: {key} is {_shown(flat.get(key))}; expected text")
    if type(flat.get("seed")) is not int:
        problems.append(f"{file}: seed is {_shown(flat.get('seed'))}; expected an integer")
    for key in ("training.steps", "training.seq_len", "training.global_batch_size", "runtime.log_every"):
        value = flat.get(key)
        if type(value) is not int or value < 1:
            problems.append(f"{file}: {key} is {_shown(value)}; expected an integer of at least 1")
    revision = _read_revision(path / "git.json", problems)
    if len(problems) > before:
        return None
    config = {
        key: value
        for key, value in flat.items()
        if key.split(".")[0] not in _NOT_IDENTITY and key not in ("data.path", "data.digest")
    }
    recipe = {k.removeprefix("recipe."): v for k, v in flat.items() if k.startswith("recipe.") and k != "recipe.name"}
    return RunInfo(
        path=path,
        sweep=flat["sweep"],
        run_id=flat["run_id"],
        seed=flat["seed"],
        recipe=flat["recipe.name"],
        recipe_config=recipe,
        config=config,
        steps=flat["training.steps"],
        log_every=flat["runtime.log_every"],
        tokens_per_step=flat["training.seq_len"] * flat["training.global_batch_size"],
        revision=revision,
    )


def _read_revision(file: Path, problems: list[str]) -> str | None:
    if not file.exists():
        return None
    text = _read_text(file, problems)
    if text is None:
        return None
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        problems.append(f"{file}:{error.lineno}: no JSON: {error.msg}")
        return None
    revision = tree.get("revision") if isinstance(tree, dict) else None
    if not isinstance(revision, str):
        return None
    return revision + ("+dirty" if tree.get("dirty") else "")


def _read_lines(file: Path, problems: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a log and the bytes of its torn tail (after the last newline)."""
    if not file.exists():
        return [], 0
    try:
        data = file.read_bytes()
    except OSError as error:
        problems.append(f"{file}: cannot be read: {error.strerror or error}")
        return [], 0
    end = data.rfind(b"\n") + 1
    out: list[dict[str, Any]] = []
    broken: list[str] = []
    for number, raw in enumerate(data[:end].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(raw)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            broken.append(f"{file}:{number}: no JSON ({error}): {_shown(raw[:60].decode(errors='replace'))}")
            continue
        if isinstance(record, dict):
            out.append(record)
        else:
            broken.append(f"{file}:{number}: {_shown(record)}; expected one mapping a line")
    problems.extend(_capped(file, broken))
    return out if not broken else [], len(data) - end


def _records(file: Path, lines: list[dict[str, Any]], problems: list[str]) -> Records:
    n = len(lines)
    keys = {"step": np.zeros(n, np.int64), "attempt": np.zeros(n, np.int64), "tokens": np.zeros(n, np.int64)}
    time = np.zeros(n)
    values = {m: np.full(n, np.nan) for m in METRICS}
    present = {m: np.zeros(n, np.bool_) for m in METRICS}
    broken: list[str] = []
    for index, record in enumerate(lines):
        where = f"{file}:{index + 1}"
        for key, column in keys.items():
            value = record.get(key)
            if type(value) is int and 0 <= value <= _MOST:
                column[index] = value
            else:
                broken.append(f"{where}: {key} is {_shown(value)}; expected an integer of at least 0")
        stamp = _number(record.get("time"))
        if stamp is None:
            broken.append(f"{where}: time is {_shown(record.get('time'))}; expected seconds since the epoch")
        else:
            time[index] = stamp
        for metric in METRICS:
            value = record.get(metric)
            if value is None:
                continue
            number = _number(value)
            if number is None:
                broken.append(f'{where}: {metric} is {_shown(value)}; expected a number, "nan", "inf", "-inf" or null')
            else:
                values[metric][index] = number
                present[metric][index] = True
    problems.extend(_capped(file, broken))
    return Records(
        step=keys["step"], attempt=keys["attempt"], tokens=keys["tokens"], time=time, values=values, present=present
    )


def _events(file: Path, lines: list[dict[str, Any]], problems: list[str]) -> tuple[Event, ...]:
    events: list[Event] = []
    broken: list[str] = []
    for number, record in enumerate(lines, start=1):
        kind, attempt, stamp = record.get("kind"), record.get("attempt"), _number(record.get("time"))
        if isinstance(kind, str) and type(attempt) is int and stamp is not None:
            payload = {k: v for k, v in record.items() if k not in ("kind", "attempt", "time")}
            events.append(Event(kind=kind, attempt=attempt, time=stamp, payload=payload))
        else:
            broken.append(
                f"{file}:{number}: kind {_shown(kind)}, attempt {_shown(attempt)}, time {_shown(record.get('time'))}; "
                "expected text, an integer and seconds since the epoch"
            )
    problems.extend(_capped(file, broken))
    return tuple(events)


def _number(value: Any) -> float | None:
    """Decode a number of a log; None if it is not one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) <= _MOST or isinstance(value, float) else None
    if value in ("nan", "inf", "-inf"):
        return math.nan if value == "nan" else math.copysign(math.inf, -1.0 if value == "-inf" else 1.0)
    return None


def _shown(value: Any) -> str:
    return "missing" if value is None else json.dumps(value)[:80]


def _capped(file: Path, broken: list[str]) -> Iterator[str]:
    yield from broken[:_PROBLEMS_PER_FILE]
    if len(broken) > _PROBLEMS_PER_FILE:
        yield f"{file}: and {len(broken) - _PROBLEMS_PER_FILE} more broken lines"
