"""Compile mxfp4.c with the machine's C compiler, once, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("mxfp4.c")
# -fno-trapping-math lets ceilf be one vector instruction; neither flag changes a result.
FLAGS = (
    "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-march=native", "-std=c11", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC",
)  # fmt: skip
OFF = "LPTCTL_NO_COMPILE"
"""Environment variable; set to anything but 0 it keeps the CPU path uncompiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """The compiled library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str
    """One sentence for the log: what runs, or why the reference runs instead."""


def _cpu_flags() -> str:
    """Return what -march=native depends on, because a home folder is shared between machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except FileNotFoundError:  # not Linux
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), platform.processor())


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "lptctl"


def _openmp() -> list[str]:
    """Return how to link with torch's own OpenMP, so that both share one pool of threads and its size."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled else []


@functools.cache
def load() -> Build:
    """Compile if no earlier process has, and load; never raises for what a machine may lack."""
    if os.environ.get(OFF, "0") not in ("", "0"):
        return Build(library=None, reason=f"{OFF} is set: the PyTorch reference runs")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Build(library=None, reason="no C compiler (cc, gcc, clang) on the PATH: the PyTorch reference runs")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        key = "\0".join([SOURCE.read_text(encoding="utf-8"), version, _cpu_flags(), *FLAGS, *_openmp()])
        path = _cache() / f"mxfp4-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        if not path.exists():
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        return Build(
            library=None, reason=f"{compiler} cannot compile {SOURCE.name} ({said[-1] if said else error}): reference"
        )
    except OSError as error:
        return Build(library=None, reason=f"the compiled CPU path cannot be loaded ({error}): the reference runs")
    library.lptctl_qdq.restype = ctypes.c_int64
    return Build(library=library, reason=f"compiled by {version.splitlines()[0]}, {path}")


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        argv = [compiler, *FLAGS, str(SOURCE), "-o", str(built), *_openmp(), "-lm"]
        subprocess.run(argv, capture_output=True, text=True, check=True)
        built.replace(path)  # a concurrent process finds the old state or the whole file
