"""Docs that cannot drift: examples expand, tables are what the code says, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lptctl.expand import expand_file
from lptctl.spec import load_sweep_file
from tests.helpers.runs import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def yaml_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            if re.match(r"(#.*\n)*version:", block):
                found.append((f"{page.name} {number}", block))
    return found


@pytest.mark.parametrize(("where", "text"), yaml_blocks())
def test_sweep_files_in_the_docs_expand(where: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    assert len(expand_file(load_sweep_file(file)).runs) > 1, where


def test_there_is_a_sweep_file_in_the_manual_and_the_readme() -> None:
    assert {"sweep-file.md", "README.md"} <= {where.split()[0] for where, _ in yaml_blocks()}


def test_generated_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.docs_tables", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if not t.startswith(("http://", "https://")) and not (page.parent / t).exists()]
    assert missing == []
