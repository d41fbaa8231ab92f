"""Real file systems with faults: full, without inodes, read-only. Mounting needs root, whom permissions do not stop."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(path: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs at ``path`` (made if missing); skip the test where mounting is not allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root and the mount program")
    path.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "lptctl-test", str(path)], capture_output=True, text=True, timeout=30
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not allowed here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=30)


def remount(path: Path, options: str) -> None:
    """Change the options of a mount of :func:`tmpfs`, for example ``ro`` or ``size=1m``."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True, timeout=30)
