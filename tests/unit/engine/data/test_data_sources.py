"""Sources: which files, which documents, and what is said about bad ones."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from engine.config import Problem
from engine.data.sources import PROBLEMS_PER_FILE, Document, Source, resolve_source, stdlib_files


def resolve(given: str) -> Source:
    problems: list[Problem] = []
    source = resolve_source(given, problems)
    assert source is not None, problems
    assert not problems
    return source


def refused(given: str) -> str:
    problems: list[Problem] = []
    assert resolve_source(given, problems) is None
    assert len(problems) == 1
    assert problems[0].path == ("source",)
    return str(problems[0])


def read(path: Path, text_key: str = "text") -> tuple[list[Document], list[str]]:
    problems: list[Problem] = []
    documents = list(resolve(str(path)).read(text_key=text_key, problems=problems))
    return documents, [p.message for p in problems]


def test_stdlib_is_this_pythons_sources_in_posix_order() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in resolve("stdlib").files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "ast.py"} <= set(names)
    assert not [n for n in names if "site-packages" in n or "dist-packages" in n or "__pycache__" in n]
    assert not [n for n in names if n.startswith("lib2to3/tests/data") or "badsyntax" in n]


def test_stdlib_leaves_foreign_and_broken_files_out(tmp_path: Path) -> None:
    keep = ["a.py", "pkg/b.py", "pkg-a/b.py", "tests/data/c.py"]
    drop = [
        "site-packages/x.py",
        "pkg/dist-packages/x.py",
        "__pycache__/x.py",
        "lib2to3/tests/data/x.py",
        "test/badsyntax_1.py",
        "test/bad_coding2.py",
        "notes.txt",
    ]
    for name in keep + drop:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert [p.relative_to(tmp_path).as_posix() for p in stdlib_files(tmp_path)] == sorted(keep)


def test_stdlib_skips_what_is_no_text_but_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "nul.py").write_bytes(b"a\0b\n")
    (tmp_path / "good.py").write_bytes(b"a = 1\n")
    files = tuple(sorted(tmp_path.glob("*.py")))
    problems: list[Problem] = []
    as_stdlib = Source(given="stdlib", is_stdlib=True, files=files)
    assert [d.data for d in as_stdlib.read(text_key="text", problems=problems)] == [b"a = 1\n"]
    assert not problems
    as_files = Source(given="x", is_stdlib=False, files=files)
    assert [d.data for d in as_files.read(text_key="text", problems=problems)] == [b"a = 1\n", b"a\0b\n"]
    (problem,) = problems
    assert f"{tmp_path}/bad.py is no UTF-8: byte 0xe9 at offset 5" in problem.message
    assert "iconv" in problem.hint


def test_glob_is_sorted_and_recursive_and_takes_files_only(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "folder.txt/x.md", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = [str(p.relative_to(tmp_path)) for p in resolve(f"{tmp_path}/**/*.txt").files]
    assert found == ["a.txt", "b.txt", "deep/er/c.txt"]


@pytest.mark.parametrize(
    "name", ['it\'s "quoted" #1 100%.txt', "Übergröße ß.txt", "draft[1]*?.txt", "-dash.txt", "a\nb.txt"]
)
def test_path_with_special_characters_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    (tmp_path / "draft1.txt").write_text("what the name would match as a glob")
    assert [d.data for d in read(tmp_path / name)[0]] == [b"text"]


def test_file_name_that_is_no_utf8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(raw, "wb") as file:
        file.write(b"text")
    assert [d.data for d in read(Path(os.fsdecode(raw)))[0]] == [b"text"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nowhere.txt", "nowhere.txt does not exist (looked from "),
        ("~/corpus.txt", "~ is not expanded"),
        ("nowhere/**/*.txt", "matches no file (looked from "),
        ("", "is empty (expected stdlib, text files, globs"),
        ("  ", "is empty"),
        (".", "is a folder, but none that `lptctl data prepare` made (for its files give a glob: ./**/*.txt)"),
        ("/dev/null", "/dev/null is no regular file"),
    ],
)
def test_bad_source_says_what_and_what_next(given: str, expected: str) -> None:
    assert expected in refused(given)


def test_pipe_is_refused_instead_of_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused(str(tmp_path / "pipe"))
    assert "matches no file" in refused(f"{tmp_path}/p*e")


def test_stdlib_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"no .py files in {tmp_path}" in refused("stdlib")


def test_jsonl_reads_each_record(tmp_path: Path) -> None:
    path = tmp_path / "a.JSONL"
    lines = ['﻿{"text": "first\\nline"}', "", '{"n": 1, "text": "zweite ü \\u00fc"}', "   ", '{"text": ""}']
    path.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    documents, problems = read(path)
    assert not problems
    assert [d.data.decode() for d in documents] == ["first\nline", "zweite ü ü", ""]
    assert [d.origin for d in documents] == [f"{path}:1", f"{path}:3", f"{path}:5"]


def test_jsonl_text_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": "y"}\n')
    assert [d.data for d in read(path, "body")[0]] == [b"x"]


BAD_LINES = [
    (b'{"text": "x"', "no JSON: Expecting"),
    (b'{"text": "\xff"}', "no UTF-8: byte 0xff at offset 10 of the line"),
    (b'["text"]', 'list instead of an object with the key "text"'),
    (
        b'{"body": 1, "id": 2}',
        'no key "text"; this record has: "body", "id" (name the key that holds the text with --text-key)',
    ),
    (b"{}", 'no key "text"; this record has: none'),
    (b'{"text": 17}', '"text" holds 17 (int), expected text'),
    (b'{"text": null}', '"text" holds null (NoneType), expected text'),
    (b'{"text": "a\\ud800"}', r'"text" is no valid text: lone surrogate \ud800 at character 1'),
    (b"[" * 100_000, "no JSON"),
    (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "no JSON"),
]


def test_jsonl_reports_every_bad_line_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + b"".join(line + b"\n" for line, _ in BAD_LINES) + b'{"text": "end"}')
    documents, problems = read(path)
    assert [d.data for d in documents] == [b"good", b"end"]
    assert len(problems) == len(BAD_LINES) == PROBLEMS_PER_FILE
    for number, ((_, expected), message) in enumerate(zip(BAD_LINES, problems, strict=True), 2):
        assert message.startswith(f"{path}:{number}: {expected}")


def test_jsonl_counts_bad_lines_beyond_the_first(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("nonsense\n" * (PROBLEMS_PER_FILE + 7))
    documents, problems = read(path)
    assert documents == []
    assert len(problems) == PROBLEMS_PER_FILE + 1
    assert problems[-1] == f"{path}: 7 more bad lines"


def test_unreadable_file_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    source = Source(given="x", is_stdlib=False, files=(tmp_path / "gone.txt", tmp_path / "gone.jsonl"))
    problems: list[Problem] = []
    assert list(source.read(text_key="text", problems=problems)) == []
    assert [p.message.rpartition("/")[2] for p in problems] == [
        "gone.txt cannot be read: No such file or directory",
        "gone.jsonl cannot be read: No such file or directory",
    ]


def test_description_names_the_python(tmp_path: Path) -> None:
    described = resolve("stdlib").describe(documents=5, skipped=0)
    assert described.python == ".".join(map(str, sys.version_info[:3]))
    path = tmp_path / "a.txt"
    path.write_text("x")
    assert json.dumps(resolve(str(path)).describe(documents=1, skipped=0).python) == "null"
