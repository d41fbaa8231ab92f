"""Publish a folder whole or not at all, one writer at a time. Standard library only."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def lock_beside(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file ``.<name>.lock`` next to ``path``; the kernel frees it however the process ends.

    ``on_wait`` is called once with the holder's pid and host if another process holds it. The file is removed at the
    end, under the lock; who waited on the removed file sees that and locks the new one.
    """
    name = _lock(path)
    told = False
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    on_wait(os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process")
                    told = True
                fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                current = os.stat(name).st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                current = False
            if not current:
                continue
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                yield
            finally:
                with suppress(FileNotFoundError):  # somebody tidied up; the lock was held all the same
                    os.unlink(name)
            return
        finally:
            os.close(fd)


def _lock(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _partial_and_old(path: Path) -> tuple[Path, Path]:
    return path.parent / f".{path.name}.partial", path.parent / f".{path.name}.old"


def is_tidy(path: Path) -> bool:
    """Say whether no writer works on ``path`` and none left anything beside it."""
    return not any(beside.exists() for beside in (_lock(path), *_partial_and_old(path)))


def tidy(path: Path) -> None:
    """Remove what a killed writer left beside ``path``; put back the folder that it was about to replace.

    Needs :func:`lock_beside`.
    """
    partial, old = _partial_and_old(path)
    if old.exists() and not path.exists():
        old.rename(path)
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Give an empty folder next to ``path`` to fill, and rename it to ``path`` if the block ends without an exception.

    Needs :func:`lock_beside`. A folder already at ``path`` is replaced; it stays if anything fails.
    """
    tidy(path)
    partial, old = _partial_and_old(path)
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        _sync(path.parent)
    finally:
        tidy(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
