"""``lptctl data prepare``: exit codes and messages, as a user's shell sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.data.folder import lock_beside
from lptctl.cli import run
from tests.helpers.mounts import tmpfs

ROOT = Path(__file__).resolve().parents[3]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"text": "some line {i}", "-k": "key {i}"}}\n' for i in range(40)))
    return path


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def start(*args: str | Path, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "lptctl", "data", *map(str, args)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run ``lptctl data`` in this process, the engine in its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
        argv = ["data", *map(str, args)]
        code = run(argv)
        return subprocess.CompletedProcess(argv, code, *capfd.readouterr())

    return command


def test_summary_says_what_was_made_and_that_it_is_there(data: Command, lines: Path, tmp_path: Path) -> None:
    for state in ("prepared", "there already"):
        done = data("prepare", lines, "--val-fraction", "0.3", "--out", "out")
        assert (done.returncode, done.stderr) == (0, "")
        first, *rest = done.stdout.splitlines()
        assert first.startswith(f"{tmp_path}/out: {state}, digest ")
        assert "  40 documents (" in rest[0]
        assert rest[0].endswith("dropped 0 duplicates, 0 empty), 0.0 MB of text")
        assert rest[1].endswith(", byte, vocabulary 256, uint16")
        assert "nats per token: a trained model must end below it" in rest[2]


def test_json_is_one_line_for_machines(data: Command, lines: Path, tmp_path: Path) -> None:
    done = data("prepare", "lines.jsonl", "--val-fraction=0.3", "--out=out", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert summary.pop("path") == str(tmp_path / "out")
    assert summary == {key: meta[key] for key in summary}
    assert set(summary) == {"digest", "vocab_size", "n_train_tokens", "n_val_tokens", "unigram_entropy"}


def test_several_sources_and_options_reach_the_engine(data: Command, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "-notes #1 100%.txt").write_text("a note")
    done = data(
        "prepare", "--text-key", "-k", "--tokenizer", "bpe:300", "--val-fraction", "0.4", "--out", "o ü",
        "--", "-notes*.txt", "lines.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "o ü" / "meta.json").read_text())
    assert [(s["source"], s["documents"]) for s in meta["source"]] == [("-notes*.txt", 1), ("lines.jsonl", 40)]
    assert (meta["tokenizer"], meta["val_fraction"]) == ("bpe:300", 0.4)
    assert "prepare: the BPE ends at " in done.stderr


def test_bad_sources_are_exit_2_with_every_problem(data: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"body": "x"}\nnonsense\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    done = data("prepare", "gone.txt", "no*match", "bad.jsonl", "latin.txt", "--out", "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"engine.data: --source: gone.txt does not exist (looked from {tmp_path})",
        f"engine.data: --source: no*match matches no file (looked from {tmp_path}; ** crosses folders, hidden files do "
        "not match)",
        'engine.data: --source: bad.jsonl:2: no key "text"; this record has: "body" (name the key that holds the text '
        "with --text-key)",
        "engine.data: --source: bad.jsonl:3: no JSON: Expecting value: line 1 column 1 (char 0)",
        "engine.data: --source: latin.txt is no UTF-8: byte 0xe9 at offset 3, unexpected end of data (convert it, e.g. "
        "iconv -f ISO-8859-1 -t UTF-8, or leave it out)",
    ]
    assert not (tmp_path / "out").exists()


def test_many_problems_are_cut_and_counted(data: Command, tmp_path: Path) -> None:
    done = data("prepare", *(f"gone-{i}" for i in range(60)), "--out", "out")
    assert done.returncode == 2
    assert done.stderr.count("does not exist") == 50
    assert done.stderr.endswith("engine.data: and 10 more problems\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tokenizer", "bpe:256"], "--tokenizer: a BPE of 256 entries; expected 257 to 1048576"),
        (["--val-fraction", "half"], "Invalid value for '--val-fraction'"),
        (["--val-fraction", "1e-9"], "--val-fraction: 1e-09 of 40 document(s) leaves none on the held-out side"),
        (["--out", "lines.jsonl"], "lines.jsonl exists and is no folder (give another --out)"),
        (["--out", "."], "holds other files (lines.jsonl) (give a new folder)"),
    ],
)
def test_bad_options_are_exit_2(data: Command, lines: Path, tmp_path: Path, options: list[str], expected: str) -> None:
    out = [] if "--out" in options else ["--out", "out"]
    done = data("prepare", "lines.jsonl", *out, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["lines.jsonl"]


def test_wrong_options_and_wrong_sources_come_together(data: Command, tmp_path: Path) -> None:
    done = data("prepare", "gone.txt", "--tokenizer", "words", "--val-fraction", "nan", "--out", "out")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "engine.data: --val-fraction: nan must lie between 0 and 1",
        'engine.data: --tokenizer: "words" is neither "byte" nor "bpe:N" (e.g. bpe:2048)',
        f"engine.data: --source: gone.txt does not exist (looked from {tmp_path})",
    ]


@pytest.mark.parametrize("missing", ["--out", "SOURCE"])
def test_missing_argument_is_named(data: Command, tmp_path: Path, missing: str) -> None:
    done = data("prepare", *(["x"] if missing == "--out" else ["--out", "out"]))
    assert done.returncode == 2
    assert "Missing" in done.stderr
    assert missing in done.stderr


def test_another_corpus_needs_force(data: Command, lines: Path, tmp_path: Path) -> None:
    arguments = ("prepare", "lines.jsonl", "--out", "out", "--val-fraction")
    assert data(*arguments, "0.3").returncode == 0
    done = data(*arguments, "0.5")
    assert done.returncode == 2
    assert "val_fraction 0.3 there, 0.5 here (give another --out, or --force to replace it; runs that" in done.stderr
    done = data(*arguments, "0.5", "--force")
    assert done.returncode == 0
    assert "is replaced: val_fraction 0.3 there, 0.5 here" in done.stderr


def test_full_disk_is_exit_1(data: Command, lines: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=4k"):
        done = data("prepare", lines, "--val-fraction", "0.3", "--out", "disk/out")
        assert os.listdir(tmp_path / "disk") == []
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "engine.data: No space left on device: disk/out; nothing half-made was left; free space and run the same "
        "command again\n"
    )


def test_python_without_numpy_says_what_to_install(lines: Path, tmp_path: Path) -> None:
    stubs = tmp_path / "without"
    stubs.mkdir()
    (stubs / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy', name='numpy')\n")
    path = f"{stubs}{os.pathsep}{ROOT}"
    command = [sys.executable, "-P", "-m", "engine.data", "prepare", f"--source={lines}", "--out=out"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 64
    assert done.stderr == (
        f"engine.data: {sys.executable} has no numpy, which preparing data needs; install it with: pip install "
        "'lptctl[engine]'\n"
    )


def test_folder_named_engine_in_the_current_folder_is_not_run(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "engine" / "data").mkdir(parents=True)
    for name in ("engine/__init__.py", "engine/data/__init__.py", "engine/data/__main__.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong program ran')\n")
    process = start("prepare", lines, "--val-fraction", "0.3", "--out", "out", cwd=tmp_path)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")


def test_ctrl_c_is_exit_130_and_leaves_nothing(lines: Path, tmp_path: Path) -> None:
    with lock_beside(tmp_path / "out", pytest.fail):
        process = start("prepare", lines, "--val-fraction", "0.3", "--out", "out", cwd=tmp_path)
        assert process.stderr is not None
        assert "waiting for pid" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "engine.data: interrupted; nothing half-made was left\n"
    assert os.listdir(tmp_path) == ["lines.jsonl"]


def test_killed_engine_is_exit_1_and_named(lines: Path, tmp_path: Path) -> None:
    with lock_beside(tmp_path / "out", pytest.fail):
        process = start("prepare", lines, "--val-fraction", "0.3", "--out", "out", cwd=tmp_path)
        assert process.stderr is not None
        assert "waiting for pid" in process.stderr.readline()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "data prepare: the engine was killed by SIGKILL" in stderr
    assert "run the same command again" in stderr
