"""The command line without torch: plan, explain, schema, new, recipes, start-up imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.recipes.table import RECIPES
from lptctl.cli import run
from lptctl.template import TEMPLATE
from tests.helpers.runs import ROOT


def lptctl(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lptctl", *args], capture_output=True, text=True, cwd=cwd or ROOT, timeout=60
    )


def test_help_and_plan_import_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from lptctl.cli import run; code = run(sys.argv[1:]); "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & set(sys.argv[0:0] or "
        "['torch', 'pandas', 'matplotlib', 'scipy', 'numpy', 'plotting', 'ruamel'])), file=sys.stderr); sys.exit(code)"
    )
    help_ = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert help_.returncode == 0
    assert help_.stderr.strip().endswith("[]")
    plan = subprocess.run(
        [sys.executable, "-c", code, "sweep", "plan", "sweeps/demo.yaml", "--runs", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    assert plan.stderr.strip().endswith("['ruamel']")


def test_plan_works_without_torch_and_numpy(tmp_path: Path) -> None:
    for name in ("torch", "numpy", "pandas"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed here')\n")
    argv = [sys.executable, "-m", "lptctl", "sweep", "plan", "sweeps/demo.yaml", "--json"]
    done = subprocess.run(
        [*argv, "--runs", str(tmp_path / "runs")], capture_output=True, text=True, cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 15


def test_plan_shows_runs_states_and_counts(tmp_path: Path) -> None:
    done = lptctl("sweep", "plan", "sweeps/demo.yaml", "--runs", str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.count(" new ") == 15
    assert "15 runs: 15 to start" in done.stdout
    assert not list(tmp_path.iterdir())


def test_plan_of_many_runs_is_cut_and_says_so(tmp_path: Path) -> None:
    seeds = ",".join(map(str, range(40)))
    args = ("sweep", "plan", "sweeps/demo.yaml", "--runs", str(tmp_path))
    text = (ROOT / "sweeps" / "demo.yaml").read_text().replace("seed: [1, 2, 3]", f"seed: [{seeds}]")
    file = tmp_path / "many.yaml"
    file.write_text(text)
    done = lptctl(*args[:2], str(file), *args[3:])
    assert "... and 150 more; --all shows them" in done.stdout
    assert lptctl(*args[:2], str(file), *args[3:], "--all").stdout.count(" new ") == 200


def test_explain_names_who_set_each_key(tmp_path: Path) -> None:
    done = lptctl("sweep", "plan", "sweeps/demo.yaml", "--explain", "lpt-s2", "--set", "optimizer.lr=1e-3")
    assert "optimizer.lr = 0.001  (--set)" in done.stdout
    assert "recipe.name = lpt  (sweeps/demo.yaml:" in done.stdout
    assert lptctl("sweep", "plan", "sweeps/demo.yaml", "--explain", "lpt").returncode == 2


def test_bad_file_is_exit_2_without_traceback(tmp_path: Path) -> None:
    file = tmp_path / "ü #%.yaml"
    file.write_text("version: 1\nname: x\nsweep: {grid: {recipe: [lptt], seed: [1]}}\n")
    for verb in ("plan", "launch"):
        done = lptctl("sweep", verb, str(file), cwd=tmp_path)
        assert done.returncode == 2
        assert f'{file}:3:25: recipe.name: unknown recipe "lptt"' in done.stderr
        assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["ü #%.yaml"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["sweep", "plan", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["sweep", "status", "nowhere"], "nowhere: no launched sweep"),
        (["recipes", "show", "lptt"], 'did you mean "lpt"'),
    ],
)
def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], args: list[str], expected: str) -> None:
    assert run(args) == 2
    assert expected in capsys.readouterr().err


def test_new_writes_a_file_that_plans_and_never_overwrites(tmp_path: Path) -> None:
    assert lptctl("sweep", "new", "mine.yaml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine.yaml").read_text() == TEMPLATE
    assert "9 runs: 9 to start" in lptctl("sweep", "plan", "mine.yaml", cwd=tmp_path).stdout
    again = lptctl("sweep", "new", "mine.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_schema_accepts_our_files_and_names_every_recipe() -> None:
    schema = json.loads(lptctl("sweep", "schema").stdout)
    settings = schema["properties"]["base"]["properties"]
    assert set(settings["recipe"]["anyOf"][0]["enum"]) == set(RECIPES)
    assert {"optimizer.lr", "training.steps", "recipe.scale_mode", "seed"} <= set(settings)
    assert "data.digest" not in settings
    assert not {"path", "digest"} & set(settings["data"]["properties"])


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipes_show_marks_what_differs_from_the_reference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "show", name]) == 0
    text = capsys.readouterr().out
    row = RECIPES[name]
    assert text.count("<- differs") == (0 if row.reference is None else sum(
        getattr(row.switches, f) != getattr(RECIPES[row.reference].switches, f) for f in row.switches.__slots__
    ))  # fmt: skip


def test_recipes_list_json() -> None:
    rows = json.loads(lptctl("recipes", "list", "--json").stdout)
    assert [r["name"] for r in rows] == list(RECIPES)


def test_version_and_unknown_command() -> None:
    from lptctl import __version__
    from lptctl.cli import app

    assert __version__ in CliRunner().invoke(app, ["--version"]).output
    assert lptctl("swep").returncode == 2


def test_alias_bombs_and_deep_nesting_are_refused_at_once(tmp_path: Path) -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9)]
    bomb = tmp_path / "bomb.yaml"
    bomb.write_text("\n".join(["l0: &l0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", *levels]))
    done = lptctl("sweep", "plan", str(bomb))
    assert done.returncode == 2
    assert "use fewer aliases" in done.stderr
    deep = tmp_path / "deep.yaml"
    deep.write_text("a: " + "[" * 3000 + "]" * 3000)
    done = lptctl("sweep", "plan", str(deep))
    assert done.returncode == 2
    assert "nested too deeply" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_that_is_not_utf8_gets_escapes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lptctl", "recipes", "list"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\\u2013" in done.stdout


def test_too_many_steps_are_a_slip(tmp_path: Path) -> None:
    done = lptctl("sweep", "plan", "sweeps/demo.yaml", "--set", f"training.steps={10**20}", "--runs", str(tmp_path))
    assert done.returncode == 2
    assert "is too many" in done.stderr
