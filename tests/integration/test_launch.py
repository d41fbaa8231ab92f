"""A sweep on the local executor: the real command line, the real engine, real kills."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import RunPaths, SweepPaths, read_lines
from lptctl.state import State, is_live, read_status
from tests.helpers.runs import ROOT, engine_env, prepare_corpus, stitched

SWEEP = """\
version: 1
name: {name}
executor: local
base:
  model: {{name: llama3_nano, dim: 32, n_layers: 1, n_heads: 2, n_kv_heads: 2, ffn_dim: 64}}
  data: {{source: ["{source}"]}}
  training: {{steps: {steps}, seq_len: 32, global_batch_size: 4, local_batch_size: 4, compute_dtype: float32}}
  optimizer.lr: 1e-2
  validation: {{every: 4, batches: 2}}
  checkpoint: {{every: 5, keep: 2}}
  runtime: {{tensorboard: false}}
sweep:
  grid: {{recipe: [{recipes}], seed: [1]}}
local: {{workers: 2, threads: 1}}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def write_sweep(folder: Path, corpus: Path, *, name: str = "s", steps: int = 8, recipes: str = "bf16, lpt") -> Path:
    file = folder / f"{name}.yaml"
    text = SWEEP.format(name=name, source=str(corpus).replace("\\", "\\\\"), steps=steps, recipes=recipes)
    file.write_text(text, encoding="utf-8")
    return file


def argv(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "lptctl", *map(str, args)]


def lptctl(*args: str | Path, cwd: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(*args), capture_output=True, text=True, cwd=cwd, timeout=timeout_s, env=engine_env())


def start(*args: str | Path, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv(*args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=engine_env(),
        start_new_session=True,
    )  # fmt: skip


def runs_of(sweep: SweepPaths) -> dict[str, RunPaths]:
    """Recipe -> its run (one seed)."""
    return {p.parent.name.partition("-s1-")[0]: RunPaths(p.parent) for p in sorted(sweep.root.glob("*/run.json"))}


def wait_for(condition: Any, *, what: str, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(0.05)


def fill(file: Path) -> None:
    """Write until the file system is full."""
    with file.open("ab", buffering=0) as out:
        try:
            while True:
                out.write(b"x" * (1 << 16))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017


def steps_done(sweep: SweepPaths, recipe: str) -> int:
    paths = runs_of(sweep).get(recipe)
    return max(stitched(paths), default=0) if paths is not None else 0


def test_launch_relaunch_and_extension_in_a_hostile_path(tmp_path: Path, corpus: Path) -> None:
    home = tmp_path / "a b 'q' \"d\" # 100% %s ä ü"
    home.mkdir()
    texts = home / "texts ö #1"
    texts.mkdir()
    for file in (ROOT / "engine").rglob("*.py"):
        shutil.copy(file, texts / f"{file.parent.name} {file.stem}.txt")
    file = write_sweep(home, Path("texts ö #1/*.txt"))
    done = lptctl("sweep", "launch", file.name, cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 2 runs finished" in done.stdout
    sweep = SweepPaths(home / "runs" / "s")
    assert {read_status(p).state for p in runs_of(sweep).values()} == {State.FINISHED}

    before = {p: p.stat().st_mtime_ns for p in sweep.root.rglob("*.jsonl")}
    again = lptctl("sweep", "launch", file.name, cwd=home)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 runs to run, 2 done before" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in sweep.root.rglob("*.jsonl")} == before

    # One recipe more: only the new run is made.
    write_sweep(home, Path("texts ö #1/*.txt"), recipes="bf16, lpt, uos")
    more = lptctl("sweep", "launch", file.name, cwd=home)
    assert "1 run to run, 2 done before" in more.stdout, more.stdout + more.stderr
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert set(runs_of(sweep)) == {"bf16", "lpt", "uos"}
    status = json.loads(lptctl("sweep", "status", "s", "--json", cwd=home).stdout)
    assert [(r["state"], r["step"], r["attempt"]) for r in status] == [("finished", 8, 1)] * 3
    assert "step:   8" in lptctl("sweep", "logs", "s", "lpt", cwd=home).stdout.replace("step: 8", "step:   8")

    drawn = lptctl("plot", "runs/s", cwd=home)
    assert drawn.returncode == 0, drawn.stdout + drawn.stderr
    assert (sweep.root / "plots" / "comparison.png").stat().st_size > 20_000


def test_interrupt_stops_checkpointed_and_the_same_command_continues(tmp_path: Path, corpus: Path) -> None:
    file = write_sweep(tmp_path, corpus, steps=60)
    other = write_sweep(tmp_path, corpus, name="unbroken", steps=60)
    launcher = start("sweep", "launch", file, cwd=tmp_path)
    sweep = SweepPaths(tmp_path / "runs" / "s")
    wait_for(lambda: all(steps_done(sweep, r) >= 6 for r in ("bf16", "lpt")), what="steps")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, output
    assert "the same command continues" in output
    for paths in runs_of(sweep).values():
        status = read_status(paths)
        assert status.state is State.INTERRUPTED
        assert not is_live(paths)
        newest = [e for e in read_lines(paths.events) if e["kind"] == "checkpoint"][-1]
        assert newest["step"] == max(stitched(paths))  # nothing of the work done is lost
    done = lptctl("sweep", "launch", file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lptctl("sweep", "launch", other, cwd=tmp_path).returncode == 0
    whole = runs_of(SweepPaths(tmp_path / "runs" / "unbroken"))
    for recipe, paths in runs_of(sweep).items():
        got, want = stitched(paths), stitched(whole[recipe])
        assert [got[s]["loss"] for s in sorted(got)] == [want[s]["loss"] for s in sorted(want)]
        assert read_status(paths).attempt == 2


def test_killed_launcher_leaves_runs_that_the_next_one_adopts(tmp_path: Path, corpus: Path) -> None:
    file = write_sweep(tmp_path, corpus, steps=240, recipes="bf16, lpt, uos")
    launcher = start("sweep", "launch", file, cwd=tmp_path)
    sweep = SweepPaths(tmp_path / "runs" / "s")
    wait_for(lambda: all(steps_done(sweep, r) >= 2 for r in ("bf16", "lpt")), what="two running runs")
    second = lptctl("sweep", "launch", file, cwd=tmp_path)
    assert second.returncode == 2
    assert f"is being launched already by pid {launcher.pid}" in second.stderr
    waiting = json.loads(lptctl("sweep", "status", "s", "--json", cwd=tmp_path).stdout)
    assert {r["recipe"]: r["state"] for r in waiting}["uos"] == "queued"
    launcher.kill()
    launcher.communicate(timeout=30)
    lpt = runs_of(sweep)["lpt"]
    was_live = is_live(lpt)
    done = lptctl("sweep", "launch", file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert was_live, "lpt ended before its launcher was killed; make the run longer"
    assert "already running, started by an earlier launch" in done.stdout
    assert {e["attempt"] for e in read_lines(lpt.events)} == {1}
    assert {read_status(p).state for p in runs_of(sweep).values()} == {State.FINISHED}


def test_cancel_stops_running_runs_and_holds_back_the_rest(tmp_path: Path, corpus: Path) -> None:
    file = write_sweep(tmp_path, corpus, steps=200, recipes="bf16, lpt, uos")
    launcher = start("sweep", "launch", file, cwd=tmp_path)
    sweep = SweepPaths(tmp_path / "runs" / "s")
    wait_for(lambda: all(steps_done(sweep, r) >= 2 for r in ("bf16", "lpt")), what="two running runs")
    said = lptctl("sweep", "cancel", "s", cwd=tmp_path)
    assert said.returncode == 0
    assert "asked to checkpoint and stop: bf16-" in said.stdout
    assert "will not be started: uos-" in said.stdout
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, output
    assert {r: read_status(p).state for r, p in runs_of(sweep).items()} == {
        "bf16": State.INTERRUPTED, "lpt": State.INTERRUPTED, "uos": State.NEW,
    }  # fmt: skip
    assert "nothing to cancel" in lptctl("sweep", "cancel", "s", cwd=tmp_path).stdout


def test_changed_code_is_refused_until_asked_for(tmp_path: Path, corpus: Path) -> None:
    file = write_sweep(tmp_path, corpus, recipes="bf16")
    assert lptctl("sweep", "launch", file, cwd=tmp_path).returncode == 0
    sweep = SweepPaths(tmp_path / "runs" / "s")
    changed = next(sweep.code.rglob("optim.py"))
    changed.write_text(changed.read_text() + "# an older engine\n")
    write_sweep(tmp_path, corpus, recipes="bf16, lpt")
    refused = lptctl("sweep", "launch", file, cwd=tmp_path)
    assert refused.returncode == 2
    assert "the engine's code has changed" in refused.stderr
    assert "engine/optim.py" in refused.stderr, refused.stderr
    assert set(runs_of(sweep)) == {"bf16"}
    allowed = lptctl("sweep", "launch", file, "--new-code", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    assert set(runs_of(sweep)) == {"bf16", "lpt"}
    assert "an older engine" not in changed.read_text()
    (archived,) = sweep.root.glob("code-*")  # what the earlier runs were made with is kept
    assert "an older engine" in (archived / changed.relative_to(sweep.code)).read_text()


def test_directory_of_another_specification_is_refused(tmp_path: Path, corpus: Path) -> None:
    file = write_sweep(tmp_path, corpus)
    sweep = SweepPaths(tmp_path / "runs" / "s")
    planned = json.loads(lptctl("sweep", "plan", file, "--json", cwd=tmp_path).stdout)["runs"]
    assert lptctl("sweep", "launch", file, "--set", "training.steps=4", cwd=tmp_path).returncode == 0
    (runs_of(sweep)["lpt"].root).rename(sweep.root / planned[1]["run_id"])
    before = sorted(p.name for p in sweep.root.iterdir())
    refused = lptctl("sweep", "launch", file, cwd=tmp_path)
    assert refused.returncode == 2
    assert "belongs to another specification (training.steps: 4 there, 8 here)" in refused.stderr
    (sweep.root / planned[1]["run_id"] / "run.json").unlink()
    nameless = lptctl("sweep", "launch", file, cwd=tmp_path)
    assert nameless.returncode == 2
    assert "but no run.json" in nameless.stderr
    assert sorted(p.name for p in sweep.root.iterdir()) == before


def test_unusable_corpus_launches_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    file = write_sweep(tmp_path, empty)
    done = lptctl("sweep", "launch", file, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the corpus could not be prepared" in done.stderr
    assert "empty.txt" in done.stderr
    assert not list((tmp_path / "runs").rglob("run.json"))
    missing = lptctl("sweep", "launch", write_sweep(tmp_path, tmp_path / "nowhere.txt"), cwd=tmp_path)
    assert missing.returncode == 2
    assert "s.yaml:6" in missing.stderr
    assert "nowhere.txt" in missing.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("fault", ["full disk", "read-only"])
def test_disk_fault_in_the_middle_of_a_run(tmp_path: Path, corpus: Path, fault: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True)
    try:
        file = write_sweep(tmp_path, corpus, steps=60, recipes="lpt")
        launcher = start("sweep", "launch", file, "--runs", disk, cwd=tmp_path)
        sweep = SweepPaths(disk / "s")
        wait_for(lambda: steps_done(sweep, "lpt") >= 6, what="steps")
        if fault == "full disk":
            filler = disk / "filler"
            while launcher.poll() is None:  # the rotation of checkpoints frees space again
                fill(filler)
                time.sleep(0.02)
        else:
            # A mount with files open for writing cannot become read-only, so the logs stay writable.
            checkpoints = runs_of(sweep)["lpt"].checkpoints
            subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
            remount = ["mount", "-o", "remount,bind,ro", checkpoints]
            wait_for(lambda: subprocess.run(remount, capture_output=True).returncode == 0, what="read-only")
        output, _ = launcher.communicate(timeout=60)
        assert launcher.returncode == 1, output
        assert ("No space left on device" if fault == "full disk" else "Read-only file system") in output
        assert "Traceback" not in output
        if fault == "full disk":
            filler.unlink()
        else:
            subprocess.run(["umount", "-l", checkpoints], check=True)
        done = lptctl("sweep", "launch", file, "--runs", disk, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        run = runs_of(sweep)["lpt"]
        assert sorted(stitched(run)) == list(range(61))
        assert read_status(run).attempt == 2
        losses: dict[int, float] = {}
        for record in read_lines(run.metrics):
            assert losses.setdefault(record["step"], record["loss"]) == record["loss"]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
