"""docs/data.md against the program: its commands run, its options and fields are the real ones."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

from engine.config import DataConfig
from engine.data.meta import DATA_FILES, Meta
from lptctl.cli import run
from lptctl.commands.data import prepare

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text()
SWEEP = "version: 1\nname: mine\n{base}sweep: {{grid: {{recipe: [bf16, lpt], seed: [1]}}}}\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def first_column(header: str) -> set[str]:
    """Words in backticks of the first column of the table with this header line."""
    rows = PAGE.split(header)[1].split("\n\n")[0].splitlines()
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1] if "|" in row else "")}


def test_commands_and_sweep_snippets_of_the_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes" / "2024").mkdir(parents=True)
    for number in range(120):
        folder = tmp_path / "notes" / "2024" if number % 2 else tmp_path / "notes"
        (folder / f"{number}.txt").write_text(f"note {number}")
    records = (json.dumps({"text": f"text {i}", "body": f"body {i}"}) for i in range(120))
    (tmp_path / "reports.jsonl").write_text("\n".join(records))
    (shell,) = blocks("sh")
    commands = [shlex.split(line) for line in shell.splitlines()]
    assert len(commands) == 4
    for command in commands:
        assert command[0] == "lptctl"
        assert run(command[1:]) == 0, capfd.readouterr().err
    documents = {
        folder.name: sum(json.loads((folder / "meta.json").read_text())["n_documents"].values())
        for folder in (tmp_path / "corpora").iterdir()
    }
    assert documents.pop("stdlib") > 500
    assert documents == {"notes": 120, "mixed": 240, "reports": 120}
    snippets = blocks("yaml")
    assert len(snippets) == 2
    for number, base in enumerate(snippets):
        file = tmp_path / f"{number}.yaml"
        file.write_text(SWEEP.format(base=base))
        assert run(["sweep", "plan", str(file)]) == 0, capfd.readouterr().err


def test_page_lists_every_option_and_field() -> None:
    options = {name.replace("_", "-") for name in inspect.signature(prepare).parameters} - {"source", "as-json"}
    assert first_column("| option | meaning |") == {f"--{name}" for name in options | {"json"}}
    assert first_column("| in `meta.json` | |") == {field.name for field in dataclasses.fields(Meta)}
    layout = PAGE.split("## The prepared folder")[1].split("```")[1]
    assert {line.split()[0] for line in layout.strip().splitlines()} == set(DATA_FILES)


def test_page_names_the_defaults() -> None:
    default = DataConfig()
    assert f"`{default.tokenizer}` (default)" in PAGE
    assert f"(default `{default.text_key}`)" in PAGE
    assert f"hold out (default {default.val_fraction:g})" in PAGE
    yaml = blocks("yaml")[1]
    for value in (default.tokenizer, default.text_key, f"{default.val_fraction:g}"):
        assert f"# default: {value}\n" in yaml
