"""Fixtures of the corpus tests: small real corpora and the program itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def program_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def program(program_env: dict[str, str]) -> Program:
    """Run ``python -m engine.data prepare ...`` to its end."""

    def run(*arguments: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine.data", "prepare", *map(str, arguments)]
        return subprocess.run(
            command, env={**program_env, **env}, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """60 text files: some long, with umlauts, emoji, CRLF, tabs and trailing blanks."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        words = [f"word{(number * 7 + i * i) % 97}" for i in range(20 + number * 5)]
        text = f"Überschrift {number} 🦉\r\n\tfirst line\n" + " ".join(words) + "  \n\n\nlast line 'tis\n"
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8", newline="")
    return folder
