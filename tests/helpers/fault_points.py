"""Prepare a corpus many times with one fault at each file operation in turn; print what was left, a JSON line a time.

``python fault_points.py kill|error|interrupt SOURCE FOLDER``: in FOLDER, ``out`` holds one corpus and ``--force``
replaces it by another. A child of its own dies by SIGKILL just before operation k, or that operation fails with EIO, or
SIGINT arrives there. Then the parent runs the same command without a fault.

An audit hook sees each operation before it happens, so no part of the program is replaced for this.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from engine.config import ConfigError
from engine.data.__main__ import main
from engine.data.meta import load_meta, verify_files

WATCHED = {
    "open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate", "fcntl.flock",
}  # fmt: skip


def fault_at(k: int, kind: str, report: int) -> None:
    """From now on, let the k-th watched operation (0-based) go wrong; write its name to ``report``."""
    count = 0

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal count
        if event not in WATCHED:
            return
        count += 1
        if count - 1 != k:
            return
        os.write(report, event.encode())
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    sys.addaudithook(hook)


def digest_of(out: Path) -> str | None:
    """Digest of a whole prepared folder, None if there is no folder, ``damaged`` if there is anything else."""
    if not out.exists():
        return None
    try:
        meta = load_meta(out)
        verify_files(out, meta)
    except ConfigError:
        return "damaged"
    return meta.digest


def run(source: str, out: Path, fraction: str) -> int:
    return main(["prepare", f"--source={source}", f"--out={out}", f"--val-fraction={fraction}", "--force", "--json"])


def once(k: int, kind: str, source: str, folder: Path) -> bool:
    """Run with a fault at operation k and report; return False if the run had no such operation."""
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "out"
    shutil.copytree(folder.with_name("template"), out)
    before = digest_of(out)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99  # for an exception that nobody caught
        try:
            fault_at(k, kind, write_end)
            code = run(source, out, "0.6")
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        event = stream.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found, left = digest_of(out), sorted(os.listdir(folder))
    again = run(source, out, "0.6")
    row = {"k": k, "event": event, "code": code, "before": before, "found": found, "left": left, "again": again}
    row |= {"after": digest_of(out), "left_after": sorted(os.listdir(folder))}
    print(f"fault {json.dumps(row)}")
    return bool(event)


if __name__ == "__main__":
    kind, source, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve()
    run(source, folder.with_name("template"), "0.3")
    k = 0
    while once(k, kind, source, folder):
        k += 1
