"""Finding run directories and reading them: whole, torn, damaged, foreign."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from plotting.schema import METRICS, PlotError
from plotting.sources.rundir import discover, flatten, read_run, read_runs
from tests.helpers.run_logs import add_event, add_steps, bare_run
from tests.helpers.synthetic_runs import config, write_sweep

ODD = "ä ß #1 100% 'q' \"d\" [x] $HOME"
"""Everything a path may hold that something might trip over."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root with two sweeps below a folder with an awkward name."""
    runs = tmp_path_factory.mktemp("root") / ODD / "runs"
    write_sweep(runs, recipes=("bf16", "lpt"), seeds=(1, 2), sweep="one", steps=10)
    write_sweep(runs, recipes=("bf16",), seeds=(1,), sweep="two", steps=10)
    (runs / "one" / "code" / "engine").mkdir(parents=True)
    (runs / "one" / "plots").mkdir()
    (runs / "one" / "sweep.yaml").write_text("name: one\n")
    return runs


def problems(*arguments: str | Path) -> list[str]:
    with pytest.raises(PlotError) as caught:
        read_runs(discover(arguments))
    return caught.value.problems


def test_run_sweep_and_root_are_found_by_their_path(root: Path) -> None:
    runs = discover([root / "one"])
    assert [run.name.split("-")[0] for run in runs] == ["bf16", "bf16", "lpt", "lpt"]
    assert discover([runs[2]]) == [runs[2]]
    assert discover([runs[2] / "run.json"]) == [runs[2]]
    assert len(discover([root])) == 5
    assert [r.info.sweep for r in read_runs(discover([root]))] == ["one"] * 4 + ["two"]


def test_a_run_named_twice_is_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "one")
    assert len(discover([root / "one", ".", "../one", root])) == 5


def test_globs_match_runs_and_sweeps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert len(discover(["one/lpt-*"])) == 2
    assert len(discover(["t*"])) == 1
    assert len(discover(["*/*-s1-*"])) == 3
    assert problems("three*") == ["three*: the pattern matches nothing (quote it so that the shell leaves it alone)"]


def test_brackets_in_a_path_that_exists_are_no_pattern(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "a[1]*?", recipes=("bf16",), seeds=(1,), steps=5)
    assert len(discover([folder])) == 1


def test_a_link_to_a_run_is_the_run(root: Path, tmp_path: Path) -> None:
    run = discover([root / "two"])[0]
    os.symlink(run, tmp_path / "link")
    assert len(discover([tmp_path / "link", run])) == 1


def test_every_argument_without_runs_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    found = problems(root, tmp_path / "nowhere", tmp_path / "empty", tmp_path / "file.txt")
    assert found[0].startswith(f"{tmp_path / 'nowhere'}: no such file or directory")
    assert found[1].startswith(f"{tmp_path / 'empty'}: no run found; expected run.json in it")
    assert found[2].startswith(f"{tmp_path / 'file.txt'}: no run found")
    assert len(found) == 3
    assert "no RUNS given" in problems()[0]


def test_a_run_folder_that_lost_its_run_json_is_not_passed_over(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, recipes=("bf16",), seeds=(1, 2), steps=5)
    lost = sorted(folder.iterdir())[1]
    (lost / "run.json").unlink()
    assert problems(folder) == [
        f"{lost}: metrics.jsonl without run.json; restore run.json or move the folder out of the sweep"
    ]
    shutil.move(lost, tmp_path / "elsewhere")
    assert len(discover([folder])) == 1


def test_configuration_becomes_what_plots_need(root: Path) -> None:
    run = read_runs(discover([root / "one"]))[2]
    assert (run.info.recipe, run.info.seed, run.info.sweep, run.info.steps) == ("lpt", 1, "one", 10)
    assert run.info.tokens_per_step == 128 * 8
    assert run.info.recipe_config["switches.scale_mode"] == "even"
    assert run.info.config["optimizer.lr"] > 0
    assert not {k for k in run.info.config if k.startswith(("recipe", "runtime", "checkpoint", "seed"))}
    assert run.info.revision == "0123456789abcdef" * 2


def test_revision_says_if_the_tree_was_dirty_and_is_none_without_git(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    assert read_run(folder).info.revision is None
    for text, expected in (('{"revision": "abc", "dirty": true}', "abc+dirty"), ('{"revision": null}', None)):
        (folder / "git.json").write_text(text)
        assert read_run(folder).info.revision == expected
    (folder / "git.json").write_text("{")
    assert "git.json:1: no JSON" in problems(folder)[0]


def test_a_run_that_has_not_begun_has_no_records(tmp_path: Path) -> None:
    run = read_run(bare_run(tmp_path / "r"))
    assert (len(run.records), run.events, run.report.lines, run.report.torn_bytes) == (0, (), 0, 0)


def test_numbers_are_read_in_full_and_null_is_not_nan(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 0.1 + 0.2), (2, 1, math.nan), (3, 1, -math.inf)], val_loss=None, lr=1e-300)
    run = read_run(folder)
    loss, present = run.records.values["loss"], run.records.present
    assert loss[0] == 0.1 + 0.2
    assert math.isnan(loss[1])
    assert loss[2] == -math.inf
    assert present["loss"].all()
    assert not present["val_loss"].any()
    assert run.records.values["lr"].tolist() == [1e-300] * 3
    assert run.report.nonfinite == 2
    assert set(present) == set(METRICS)


@pytest.mark.parametrize("tail", [b'{"step": 3, "atte', b'{"step": 3}', b"\xff\xfe", b"\x00" * 100])
def test_a_torn_last_line_is_left_out_and_counted(tmp_path: Path, tail: bytes) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0), (2, 1, 4.0)])
    add_event(folder, "started", 1)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(tail)
    run = read_run(folder)
    assert run.records.step.tolist() == [1, 2]
    assert len(run.events) == 1
    assert run.report.torn_bytes == 2 * len(tail)


def test_broken_lines_are_named_by_file_and_line_all_at_once(tmp_path: Path) -> None:
    good, bad = bare_run(tmp_path / "good"), bare_run(tmp_path / "bad", config("lpt", 1))
    add_steps(good, [(1, 1, 5.0)])
    add_steps(bad, [(1, 1, 5.0)])
    with (bad / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "att\n[1, 2]\n')
    with (bad / "events.jsonl").open("a") as file:
        file.write('{"kind": 7, "attempt": 1, "time": 0}\n')
    found = problems(good, bad)
    assert found[0].startswith(f"{bad}/metrics.jsonl:2: no JSON (")
    assert found[1] == f"{bad}/metrics.jsonl:3: [1, 2]; expected one mapping a line"
    assert found[2].startswith(f"{bad}/events.jsonl:1: kind 7, attempt 1, time 0; expected text")
    assert len(found) == 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("loss", "high", 'loss is "high"; expected a number, "nan", "inf", "-inf" or null'),
        ("loss", True, "loss is true; expected a number"),
        ("step", 1.5, "step is 1.5; expected an integer of at least 0"),
        ("step", -1, "step is -1; expected an integer of at least 0"),
        ("step", 10**30, "expected an integer of at least 0"),
        ("tokens", None, "tokens is missing; expected an integer"),
        ("attempt", "1", 'attempt is "1"; expected an integer'),
        ("time", None, "time is missing; expected seconds since the epoch"),
        ("lr", 10**400, "expected a number"),
    ],
)
def test_wrong_types_in_a_record_are_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    folder = bare_run(tmp_path / "r")
    record = {"step": 1, "attempt": 1, "time": 0.0, "tokens": 0, "loss": 1.0, key: value}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    found = problems(folder)
    assert len(found) == 1
    assert found[0].startswith(f"{folder}/metrics.jsonl:1: {key} is ")
    assert message in found[0]


def test_a_thoroughly_broken_log_is_cut_short_in_the_message(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    (folder / "metrics.jsonl").write_text("no json\n" * 100)
    found = problems(folder)
    assert len(found) == 6
    assert found[-1].endswith("and 95 more broken lines")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    (folder / "metrics.jsonl").mkdir()
    (folder / "events.jsonl").mkdir()
    found = problems(folder)
    assert found == [
        f"{folder}/metrics.jsonl: cannot be read: Is a directory",
        f"{folder}/events.jsonl: cannot be read: Is a directory",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.json:1: no JSON"),
        ('{"version": 1,\n "seed": }', "run.json:2: no JSON"),
        ("[]", "holds []; expected a mapping"),
        ("{}", "version missing; this lptctl reads version 1"),
        ('{"version": 99}', "version 99; this lptctl reads version 1. Plot the run with the lptctl that made it"),
    ],
)
def test_a_foreign_run_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    folder = bare_run(tmp_path / "r")
    (folder / "run.json").write_text(text)
    found = problems(folder)
    assert len(found) == 1
    assert message in found[0]


def test_every_wrong_setting_of_run_json_is_named(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    tree = json.loads((folder / "run.json").read_text())
    tree["seed"], tree["recipe"], tree["training"]["steps"], tree["runtime"]["log_every"] = "1", "bf16", 0, True
    (folder / "run.json").write_text(json.dumps(tree))
    found = problems(folder)
    assert [p.removeprefix(f"{folder}/run.json: ") for p in found] == [
        "recipe.name is missing; expected text",
        'seed is "1"; expected an integer',
        "training.steps is 0; expected an integer of at least 1",
        "runtime.log_every is true; expected an integer of at least 1",
    ]
    (folder / "run.json").write_bytes(b"\xff\xfe{}")
    assert "byte 0 is not UTF-8" in problems(folder)[0]


def test_flatten_gives_dotted_keys_and_hashable_values() -> None:
    flat = flatten({"a": {"b": [1, [2]], "c": None}, "d": {}, "e": "x"})
    assert flat == {"a.b": (1, (2,)), "a.c": None, "e": "x"}
    assert hash(tuple(flat.values())) == hash(((1, (2,)), None, "x"))
