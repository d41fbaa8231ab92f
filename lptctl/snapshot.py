"""What a sweep was launched from: the engine's code (copied), the git revision (noted), both by digest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import engine

SOURCE_SUFFIXES = (".py", ".c")
"""What the engine consists of."""


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def engine_files(root: Path) -> dict[str, bytes]:
    """Return the source files below an ``engine`` package folder by relative name."""
    files = sorted(p for p in root.rglob("*") if p.suffix in SOURCE_SUFFIXES)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def code_digest(files: dict[str, bytes]) -> str:
    """Return the SHA-256 (first 16 hex digits) over names and contents."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def current_engine() -> dict[str, bytes]:
    """Return the files of the engine this command was installed with."""
    return engine_files(Path(str(engine.__file__)).parent)


def snapshot_files(code: Path) -> dict[str, bytes] | None:
    """Return the files of a sweep's snapshot, or None if there is none yet."""
    return engine_files(code / "engine") if (code / "engine").is_dir() else None


def changed_files(old: dict[str, bytes], new: dict[str, bytes]) -> list[str]:
    """Return the names that were added, removed or edited."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def write_snapshot(code: Path, files: dict[str, bytes]) -> None:
    """Publish ``files`` as ``code/engine``; an older snapshot is kept beside it under its digest."""
    temporary = code.with_name(f".{code.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, data in files.items():
        path = temporary / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    old = snapshot_files(code)
    if old is not None:
        archive = code.with_name(f"{code.name}-{code_digest(old)}")
        shutil.rmtree(archive, ignore_errors=True)
        code.rename(archive)
    elif code.exists():
        shutil.rmtree(code)
    temporary.rename(code)


def git_state() -> dict[str, Any]:
    """Return revision, branch and the uncommitted diff of the source tree; says why when there is none."""
    root = Path(str(engine.__file__)).parent.parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        return {
            "revision": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
            "diff": git("diff", "HEAD"),
        }
    except (OSError, subprocess.SubprocessError) as error:
        return {"revision": None, "reason": f"no git revision: {type(error).__name__}"}


def dump_json(value: Any) -> str:
    """Return indented JSON with a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
