"""Prepare under faults: kills, interrupts, I/O errors, full and read-only disks, two at once, awkward names."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, DataConfig
from engine.data.folder import lock_beside
from engine.data.meta import load_meta, verify_files
from engine.data.prepare import prepare
from tests.helpers import fault_points
from tests.helpers.mounts import remount, tmpfs

NO_SPACE = "No space left on device"
ROOT = Path(__file__).resolve().parents[4]
Program = Callable[..., subprocess.CompletedProcess[str]]


def digest_of(out: Path) -> str:
    """Digest of a folder that is checked to be whole."""
    meta = load_meta(out)
    verify_files(out, meta)
    return meta.digest


def start(env: dict[str, str], *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine.data", "prepare", *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def options(texts: Path, out: Path, *, fraction: float = 0.3) -> list[str]:
    return ["--source", f"{texts}/*.txt", "--val-fraction", str(fraction), "--out", str(out), "--json"]


def config_of(texts: Path, *, fraction: float = 0.3) -> DataConfig:
    return DataConfig(source=(f"{texts}/*.txt",), val_fraction=fraction)


@pytest.fixture
def rows(tmp_path: Path, program_env: dict[str, str]) -> Callable[[str], list[dict[str, Any]]]:
    """Run one kind of fault at every file operation of a replacement; see ``fault_points``."""

    def run(kind: str) -> list[dict[str, Any]]:
        source = tmp_path / "lines.jsonl"
        source.write_text("".join(f'{{"text": "some line {i}"}}\n' for i in range(40)))
        command = [sys.executable, fault_points.__file__, kind, str(source), str(tmp_path / "folder")]
        done = subprocess.run(command, env=program_env, capture_output=True, text=True, timeout=120, check=True)
        assert "Traceback" not in done.stderr
        found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("fault ")]
        assert len(found) > 25
        assert not found[-1]["event"]
        assert {"os.rename", "fcntl.flock", "os.mkdir", "os.rmdir", "open"} <= {row["event"] for row in found}
        for row in found:
            assert row["before"] != found[-1]["after"]
            assert row["found"] in (row["before"], row["after"], None), row
            assert row["again"] == 0, row
            assert row["after"] == found[-1]["after"], row
            assert row["left_after"] == ["out"], row
        return found[:-1]

    return run


def test_killed_at_any_file_operation_the_folder_is_old_or_new(rows: Callable[[str], list[dict[str, Any]]]) -> None:
    found = rows("kill")
    assert {row["code"] for row in found} == {-signal.SIGKILL}
    missing = [row for row in found if row["found"] is None]
    assert len(missing) == 1  # between the two renames, which no portable call makes one
    assert ".out.old" in missing[0]["left"]


def test_io_error_at_any_file_operation_leaves_the_old_or_the_new(
    rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    found = rows("error")
    assert {row["code"] for row in found} == {0, 1, 64}  # 0: it did not matter; 64: a source cannot be read
    for row in found:
        assert row["found"] == row["after" if row["code"] == 0 else "found"] is not None
        assert ".out.partial" not in row["left"]


def test_interrupted_at_any_file_operation_leaves_the_old_or_the_new(
    rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    found = rows("interrupt")
    assert {row["code"] for row in found} == {130}
    for row in found:
        assert row["found"] is not None
        assert ".out.partial" not in row["left"]


def test_killed_while_it_replaced_the_old_corpus_is_back(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = prepare(config_of(texts), out)[0]
    out.rename(tmp_path / ".out.old")
    with pytest.raises(ConfigError, match=f"holds another corpus .{old.digest}"):
        prepare(config_of(texts, fraction=0.5), out)
    assert digest_of(out) == old.digest
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


def kill_at_random(home: Path, env: dict[str, str], kills: int) -> None:
    """Kill prepares at random moments; whatever the moment, the folder is whole or not there."""
    shutil.copytree(ROOT / "engine", home / "texts")  # a copy: nobody edits it meanwhile
    folder = home / "folder"
    out = folder / "out"
    arguments = ["--source", f"{home}/texts/**/*.py", "--val-fraction", "0.2", "--tokenizer", "bpe:500"]
    arguments += ["--out", str(out), "--json"]

    def finish() -> str:
        stdout, stderr = start(env, *arguments).communicate(timeout=60)
        assert stdout, stderr
        assert digest_of(out) == json.loads(stdout)["digest"]
        assert os.listdir(folder) == ["out"]
        return digest_of(out)

    began = time.monotonic()
    want = finish()
    takes_s = time.monotonic() - began
    rng = random.Random(1)
    killed = 0
    for _ in range(kills):
        if out.exists():
            shutil.rmtree(out)
        process = start(env, *arguments)
        time.sleep(rng.uniform(0.2, 1.0) * takes_s)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        killed += process.returncode == -signal.SIGKILL
        assert not out.exists() or digest_of(out) == want
    assert killed > 0
    assert finish() == want


def test_killed_at_random_moments_then_again(tmp_path: Path, program_env: dict[str, str]) -> None:
    kill_at_random(tmp_path, program_env, 5)


@pytest.mark.soak
def test_killed_at_many_random_moments_then_again(tmp_path: Path, program_env: dict[str, str]) -> None:
    kill_at_random(tmp_path, program_env, 200)


def test_several_at_once_make_one_folder(texts: Path, tmp_path: Path, program_env: dict[str, str]) -> None:
    out = tmp_path / "new" / "out"
    arguments = [*options(texts, out), "--tokenizer", "bpe:300"]
    processes = [start(program_env, *arguments) for _ in range(3)]
    finished = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, finished
    assert {json.loads(stdout)["digest"] for stdout, _ in finished} == {digest_of(out)}
    assert os.listdir(out.parent) == ["out"]


def test_second_writer_waits_says_for_whom_and_finds_the_folder(
    texts: Path, tmp_path: Path, program_env: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with lock_beside(out, pytest.fail):
        process = start(program_env, *options(texts, out))
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"prepare: waiting for pid {os.getpid()} on ")
        assert line.endswith(f", which prepares {out}\n")
        assert not out.exists()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["digest"] == digest_of(out)
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


def test_waiter_on_a_removed_lock_file_holds_the_new_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    waiting, holding, leave = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with lock_beside(out, lambda _: waiting.set()):
            holding.set()
            leave.wait(60)

    def third(holder: str) -> None:
        raise BlockingIOError(holder)

    thread = threading.Thread(target=second)
    try:
        with lock_beside(out, pytest.fail):
            thread.start()
            assert waiting.wait(60)
        assert holding.wait(60)  # the file it waited on is gone by now
        with pytest.raises(BlockingIOError, match="pid"), lock_beside(out, third):
            pass
    finally:
        leave.set()
        thread.join()
    assert os.listdir(tmp_path) == []


def test_other_corpus_made_meanwhile_is_not_replaced(texts: Path, tmp_path: Path, program_env: dict[str, str]) -> None:
    out = tmp_path / "out"
    with lock_beside(out, pytest.fail):
        process = start(program_env, *options(texts, out, fraction=0.5))
        assert process.stderr is not None
        process.stderr.readline()
        made, _ = prepare(config_of(texts), tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(out)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 64
    assert f"--out: {out} holds another corpus ({made.digest}): val_fraction 0.3 there, 0.5 here" in stderr
    assert digest_of(out) == made.digest


def test_corpus_that_cannot_be_read_is_not_taken_for_damaged(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(config_of(texts), out)
    shards = {path: path.read_bytes() for path in out.glob("*.bin")}
    (out / "meta.json").unlink()
    (out / "meta.json").symlink_to("/proc/self/mem")  # a regular file whose first byte is an I/O error
    with pytest.raises(OSError, match="Input/output error"):
        prepare(config_of(texts), out)
    assert {path: path.read_bytes() for path in out.glob("*.bin")} == shards


LIMITS = ["size=4k", "size=8k", "size=64k", *(f"nr_inodes={n}" for n in (2, 3, 4, 5))]


@pytest.mark.parametrize("limit", LIMITS)
def test_full_disk_leaves_nothing_and_space_mends_it(texts: Path, tmp_path: Path, limit: str) -> None:
    disk = tmp_path / "disk"
    with tmpfs(disk, limit):
        with pytest.raises(OSError, match=NO_SPACE):
            prepare(config_of(texts), disk / "out")
        assert os.listdir(disk) == []
        remount(disk, "size=4m,nr_inodes=100")
        meta, _ = prepare(config_of(texts), disk / "out")
        assert digest_of(disk / "out") == meta.digest
        remount(disk, f"size={sum(f.stat().st_blocks for f in (disk / 'out').iterdir()) * 512 + 8192}")
        with pytest.raises(OSError, match=NO_SPACE):
            prepare(config_of(texts, fraction=0.5), disk / "out", force=True)
        assert digest_of(disk / "out") == meta.digest
        assert os.listdir(disk) == ["out"]


def test_read_only_disk_serves_what_is_there_and_refuses_the_rest(
    texts: Path, tmp_path: Path, program: Program
) -> None:
    disk = tmp_path / "disk"
    with tmpfs(disk, "size=4m"):
        meta, _ = prepare(config_of(texts), disk / "out")
        remount(disk, "ro")
        assert prepare(config_of(texts), disk / "out") == (meta, True)
        assert prepare(DataConfig(source=(str(disk / "out"),)), disk / "out") == (meta, True)
        assert prepare(DataConfig(source=(str(disk / "out"),)), tmp_path / "copy") == (meta, False)
        done = program(*options(texts, disk / "new" / "folder"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"engine.data: Read-only file system: {disk}/new; nothing half-made was left; give an --out on a file system "
        "that can be written and run the same command again\n"
    )


NAMES = ['it\'s "quoted" #1 100% $HOME `x`; rm', "-Übergröße ß 🦉[a]*?", os.fsdecode(b"a\nb caf\xe9")]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_folder_with_an_awkward_name(texts: Path, tmp_path: Path, program: Program, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    texts.rename(home / "texts")
    source = sorted((home / "texts").iterdir())
    arguments = [f"--source={path.relative_to(home)}" for path in source]
    done = program(*arguments, "--val-fraction=0.3", f"--out={name}", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["path"] == str(home / name)
    assert digest_of(home / name) == summary["digest"]
    held = [path for path in source if int(hashlib.sha256(path.read_bytes()).hexdigest()[:16], 16) < 0.3 * 2**64]
    assert load_meta(home / name).n_documents.val == len(held)
