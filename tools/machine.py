"""What every benchmark page says about where it was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except FileNotFoundError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.machine()


def describe_machine() -> str:
    """Return processor, cores this process may use, and the Python version."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {cpu_name()}, Python {platform.python_version()}"


def write_page(path: Path, lines: list[str]) -> None:
    """Write a page of the docs and print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines).rstrip("\n") + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {path}")
