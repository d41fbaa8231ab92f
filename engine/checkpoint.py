"""Atomic, rotating checkpoints: ``checkpoints/step-NNNNNNNN/{state.pt, meta.json}``.

A checkpoint is written to a temporary sibling, synced to disk and renamed, so a folder with the final name is whole.
``meta.json`` holds the SHA-256 of ``state.pt``; a folder that fails it is skipped with an event, and the one before is
used.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.config import ConfigError, Problem

_NAME = re.compile(r"step-(\d{8})")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every published checkpoint, newest first."""
    found = []
    if root.is_dir():
        for folder in root.iterdir():
            match = _NAME.fullmatch(folder.name)
            if match:
                found.append((int(match[1]), folder))
    return sorted(found, reverse=True)


def save_checkpoint(root: Path, *, step: int, identity: str, state: dict[str, Any], keep: int) -> None:
    """Publish a checkpoint and remove all but the ``keep`` newest.

    Raises:
        OSError: if it could not be written whole; older checkpoints are then untouched.
    """
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".tmp-*"):  # of an attempt that was killed while writing
        shutil.rmtree(leftover)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    meta = {"step": step, "identity": identity, "sha256": hashlib.sha256(data).hexdigest()}
    final = root / f"step-{step:08d}"
    temporary = root / f".tmp-{step:08d}"
    temporary.mkdir()
    _write_synced(temporary / "state.pt", data)
    _write_synced(temporary / "meta.json", json.dumps(meta, indent=2).encode())
    _sync_folder(temporary)
    if final.exists():  # a step run again after a fall-back to an older checkpoint
        shutil.rmtree(final)
    temporary.rename(final)
    _sync_folder(root)
    for _, folder in list_checkpoints(root)[keep:]:
        shutil.rmtree(folder)


def load_checkpoint(
    root: Path, *, identity: str, device: torch.device, on_unreadable: Callable[[int, str], None]
) -> tuple[int, dict[str, Any]] | None:
    """Return (step, state) of the newest whole checkpoint, or None if there is none.

    ``on_unreadable(step, error)`` is called for each newer one that had to be skipped.

    Raises:
        ConfigError: if a checkpoint belongs to another configuration.
    """
    for step, folder in list_checkpoints(root):
        try:
            meta = json.loads((folder / "meta.json").read_text())
            data = (folder / "state.pt").read_bytes()
            if hashlib.sha256(data).hexdigest() != meta["sha256"]:
                raise ValueError("state.pt does not match the SHA-256 in meta.json")
        except (OSError, ValueError, KeyError) as error:
            on_unreadable(step, f"{type(error).__name__}: {error}")
            continue
        if meta["identity"] != identity:
            raise ConfigError(
                [
                    Problem(
                        path=("checkpoint",),
                        message=f"{folder} belongs to the configuration {meta['identity']}, this run is {identity}",
                        hint="move the checkpoints folder away or use the run's own directory",
                    )
                ]
            )
        return step, torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    return None
