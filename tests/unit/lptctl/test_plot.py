"""``lptctl plot``: exit codes, what is printed where, and every message for what cannot be plotted."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from engine.recipes.table import ALIASES, RECIPES
from lptctl.cli import run
from lptctl.commands.plot import recipe_infos
from tests.helpers.runs import ROOT
from tests.helpers.synthetic_runs import Life, write_sweep

ODD = "ä ß #1 100% 'q' \"d\" [x]"
LIVES = {("lpt", 1): Life(stop_at=14, resume_from=8), ("baseline", 2): Life(nonfinite_at=12)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("finished") / ODD
    return write_sweep(runs, recipes=("bf16", "baseline", "lpt"), seeds=(1, 2), steps=20)


@pytest.fixture(scope="module")
def flawed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("flawed")
    return write_sweep(runs, recipes=("bf16", "baseline", "lpt"), seeds=(1, 2), steps=20, lives=LIVES)


def plot(*args: str | Path) -> int:
    return run(["plot", *map(str, args)])


def test_table_notes_and_paths_are_printed(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(finished) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["recipe", "seeds", "train"]
    assert [line.split()[0] for line in lines[1:4]] == ["bf16", "baseline", "lpt"]
    assert "Paired: per seed, all recipes share initial weights, first batch and corpus." in out
    assert "separate" in out
    assert lines[-1] == f"wrote {finished}/plots/curves.csv"
    for name in ("comparison.png", "comparison.svg", "table.md", "table.csv", "curves.csv"):
        assert f"wrote {finished}/plots/{name}" in lines
        assert (finished / "plots" / name).stat().st_size > 500
    assert err == ""


def test_plots_folder_is_not_taken_for_a_run(finished: Path, tmp_path: Path) -> None:
    assert plot(finished, "-o", tmp_path / "a", "--format", "csv") == 0
    (finished / "plots").mkdir(exist_ok=True)
    assert plot(finished, "-o", tmp_path / "b", "--format", "csv") == 0
    assert (tmp_path / "a" / "curves.csv").read_bytes() == (tmp_path / "b" / "curves.csv").read_bytes()


def test_warnings_go_to_stderr_and_strict_makes_them_exit_4(
    flawed: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("-o", tmp_path, "--format", "csv")
    assert plot(flawed, *args) == 0
    assert plot(flawed, *args, "--strict") == 4
    out, err = capsys.readouterr()
    assert err.count("warning: NON-FINITE: baseline: 1 of 2 seeds (seed 2 at step 12).") == 2
    assert "NON-FINITE" not in out
    assert "nonfinite@12" in out
    assert plot(finished, *args, "--strict") == 0


def test_json_is_the_only_thing_on_stdout(flawed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(flawed, "-o", tmp_path, "--format", "csv", "--json") == 0
    out, err = capsys.readouterr()
    tree = json.loads(out)
    assert [row["group"] for row in tree["rows"]] == ["bf16", "baseline", "lpt"]
    assert tree["rows"][1]["nonfinite"] == {"2": 12}
    assert any(note["level"] == "warning" for note in tree["notes"])
    assert tree["files"] == [str(tmp_path / n) for n in ("table.md", "table.csv", "curves.csv")]
    assert err == ""
    assert plot(flawed, "-o", tmp_path, "--format", "csv", "--json", "--strict") == 4


def test_every_bad_option_is_named_at_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = plot(
        finished, "--baseline", "bf61", "--smooth", "ema:2", "--last", "0", "--preset", "poster", "--format", "gif"
    )
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith('--baseline: unknown recipe "bf61"')
    assert [line.split(" ")[0] for line in lines[1:]] == ["--smooth", "--last", "--preset", "--format"]


def test_nothing_to_plot_says_what_was_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert plot(tmp_path / "empty", tmp_path / "nowhere", f"{tmp_path}/none-*") == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith(f"{tmp_path}/empty: no run found; expected run.json in it, or in a folder one level")
    assert err[1].startswith(f"{tmp_path}/nowhere: no such file or directory")
    assert err[2].startswith(f"{tmp_path}/none-*: the pattern matches nothing")
    assert plot() == 2


def test_a_folder_that_lost_its_run_json_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path, recipes=("bf16",), seeds=(1, 2), steps=5)
    lost = sorted(sweep.iterdir())[0]
    (lost / "run.json").unlink()
    assert plot(sweep) == 2
    assert capsys.readouterr().err.startswith(f"{lost}: metrics.jsonl without run.json")
    assert plot(lost) == 2
    assert f"{lost}: no run found; expected run.json in it" in capsys.readouterr().err


def test_unreadable_metrics_are_named_with_every_other_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_sweep(tmp_path, recipes=("bf16",), seeds=(1, 2), steps=5)
    first, second = sorted(sweep.iterdir())
    (first / "metrics.jsonl").unlink()
    (first / "metrics.jsonl").mkdir()
    with (second / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    assert plot(sweep) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0] == f"{first}/metrics.jsonl: cannot be read: Is a directory"
    assert err[1].startswith(f"{second}/metrics.jsonl:7: no JSON")
    assert not (sweep / "plots").exists()


def test_a_folder_that_cannot_be_written_is_named(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(finished, "-o", "/proc/nowhere", "--format", "csv") == 2
    assert "cannot be written: " in capsys.readouterr().err


def test_baseline_takes_an_alias(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ALIASES["mxfp4_base"] == "baseline"
    assert plot(finished, "-o", tmp_path, "--format", "csv", "--baseline", "mxfp4_base") == 0
    assert "Δ to baseline [95 %]" in capsys.readouterr().out


def test_a_narrow_terminal_folds_the_table_and_loses_nothing(finished: Path, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lptctl", "plot", str(finished), "-o", str(tmp_path), "--format", "csv"],
        stdout=follower, stderr=follower, cwd=ROOT, env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
    )  # fmt: skip
    os.close(follower)
    chunks = []
    with contextlib.suppress(OSError):  # Linux's end of file: the follower's last holder has closed it
        while chunk := os.read(leader, 65536):
            chunks.append(chunk)
    os.close(leader)
    assert process.wait(timeout=60) == 0
    table = b"".join(chunks).decode().split("Paired:")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert "…" not in "".join(table)
    first = next(line for line in table if line.startswith("bf16"))
    assert first.rstrip().endswith("×1.00")
    assert [line.split()[0] for line in table if line[:1].strip()] == ["recipe", "bf16", "baseline", "lpt"]


def test_plot_works_without_torch(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not installed here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "lptctl", "plot", str(finished), "-o", str(tmp_path / "out"), "--format", "csv"],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stdout.splitlines()[:4])) > 80  # piped output is not folded


def test_recipes_come_with_their_reference_preset_and_note() -> None:
    infos = recipe_infos()
    assert list(infos) == list(RECIPES)
    assert infos["midmax"].is_control
    assert infos["uos6"].note.startswith("Not idempotent")
    assert infos["lpt"].preset["switches.hadamard"] == "random"
    assert {name: info.reference for name, info in infos.items()} == {n: r.reference for n, r in RECIPES.items()}
