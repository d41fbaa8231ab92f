"""From ``--source`` arguments to documents: the standard library, text files, globs, JSONL. Standard library only.

A document is one text file, or one record of a JSONL file. Everything that is wrong is collected, not only the first.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import Problem
from engine.data.meta import META_FILE, SourceMeta

STDLIB = "stdlib"
PROBLEMS_PER_FILE = 10
"""Bad JSONL lines reported one by one; the rest of the file's are counted."""

_FOREIGN_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_BROKEN_ON_PURPOSE = ("badsyntax", "bad_coding")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of the corpus."""

    origin: str
    """File, or ``file:line`` for a JSONL record."""
    data: bytes
    """Its text in UTF-8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One ``--source`` argument, resolved to files in a fixed order."""

    given: str
    """As the user wrote it."""
    is_stdlib: bool
    """Whether files that are no text are skipped and counted (standard library) or are errors (everything else)."""
    files: tuple[Path, ...]
    """Files to read, in order."""

    def describe(self, *, documents: int, skipped: int) -> SourceMeta:
        """Return this source's entry of ``meta.json``."""
        return SourceMeta(
            source=self.given,
            kind="stdlib" if self.is_stdlib else "files",
            files=len(self.files) - skipped,
            documents=documents,
            skipped=skipped,
            python=platform.python_version() if self.is_stdlib else None,
        )

    def total_bytes(self) -> int:
        """Sum the sizes of the files, bytes (for progress; a file that vanished counts as 0)."""
        return sum(path.stat().st_size for path in self.files if path.exists())

    def read(self, *, text_key: str, problems: list[Problem]) -> Iterator[Document]:
        """Yield the documents in order; append what is wrong to ``problems`` and go on with the next one."""
        for path in self.files:
            try:
                if path.suffix.lower() == ".jsonl" and not self.is_stdlib:
                    yield from _read_jsonl(path, text_key, problems)
                    continue
                data = path.read_bytes()
            except OSError as error:
                problems.append(_problem(f"{path} cannot be read: {error.strerror or error}"))
                continue
            if self.is_stdlib:
                if is_text(data):
                    yield Document(origin=str(path), data=data)
                continue
            try:
                data.decode()
            except UnicodeDecodeError as error:
                problems.append(
                    _problem(
                        f"{path} is no UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}, {error.reason}",
                        "convert it, e.g. iconv -f ISO-8859-1 -t UTF-8, or leave it out",
                    )
                )
                continue
            yield Document(origin=str(path), data=data)


def is_text(data: bytes) -> bool:
    """Say whether bytes are UTF-8 without NUL."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _problem(message: str, hint: str = "") -> Problem:
    return Problem(path=("source",), message=message, hint=hint)


def _read_jsonl(path: Path, text_key: str, problems: list[Problem]) -> Iterator[Document]:
    bad = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            text = _text_of(line, text_key)
            if isinstance(text, bytes):
                yield Document(origin=f"{path}:{number}", data=text)
                continue
            bad += 1
            if bad <= PROBLEMS_PER_FILE:
                problems.append(_problem(f"{path}:{number}: {text}"))
    if bad > PROBLEMS_PER_FILE:
        problems.append(_problem(f"{path}: {bad - PROBLEMS_PER_FILE} more bad lines"))


def _text_of(line: bytes, text_key: str) -> bytes | str:
    """Return the text of one JSONL record as UTF-8, or a sentence that says what is wrong with the line."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"no UTF-8: byte 0x{line[error.start]:02x} at offset {error.start} of the line"
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    if not isinstance(record, dict):
        return f'{type(record).__name__} instead of an object with the key "{text_key}"'
    if text_key not in record:
        keys = ", ".join(f'"{key}"' for key in list(record)[:8]) or "none"
        return f'no key "{text_key}"; this record has: {keys} (name the key that holds the text with --text-key)'
    text = record[text_key]
    if not isinstance(text, str):
        return f'"{text_key}" holds {json.dumps(text)[:40]} ({type(text).__name__}), expected text'
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        return f'"{text_key}" is no valid text: lone surrogate {code} at character {error.start}'


def stdlib_files(root: Path) -> tuple[Path, ...]:
    """List the ``.py`` files of a standard library in order of their relative POSIX names.

    Left out: installed packages, byte code, and sources that are wrong on purpose (the test data of lib2to3 and the
    ``badsyntax*`` and ``bad_coding*`` files of the test package). Links to folders are not followed.
    """
    found = []
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        folders[:] = [
            f for f in folders if f not in _FOREIGN_DIRS and (relative / f).as_posix() != "lib2to3/tests/data"
        ]
        found += [relative / n for n in names if n.endswith(".py") and not n.startswith(_BROKEN_ON_PURPOSE)]
    return tuple(root / path for path in sorted(found, key=lambda path: path.as_posix()))


def is_prepared(path: Path) -> bool:
    """Say whether a path is a folder that ``prepare`` made."""
    return os.path.isdir(path) and os.path.isfile(path / META_FILE)


def resolve_source(given: str, problems: list[Problem]) -> Source | None:
    """Find the files of one source; append what is wrong to ``problems``.

    A path that exists is taken as it is, even with ``*`` or ``[`` in its name; only otherwise is it a glob.
    """
    if given == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = stdlib_files(root)
        if not files:
            problems.append(
                _problem(
                    f"stdlib: no .py files in {root}", "this Python carries no library sources; give text files instead"
                )
            )
            return None
        return Source(given=given, is_stdlib=True, files=files)
    path = Path(given)
    if not given.strip():
        problems.append(
            _problem(f'"{given}" is empty', "expected stdlib, text files, globs, .jsonl files or a prepared folder")
        )
        return None
    try:
        return _resolve_path(given, path, problems)
    except OSError as error:  # a name too long, a folder that may not be entered
        problems.append(_problem(f"{given} cannot be read: {error.strerror or error}"))
        return None


def _resolve_path(given: str, path: Path, problems: list[Problem]) -> Source | None:
    if path.is_dir():
        problems.append(
            _problem(
                f"{given} is a folder, but none that `lptctl data prepare` made",
                f"for its files give a glob: {given.rstrip('/')}/**/*.txt",
            )
        )
    elif path.is_file():
        return Source(given=given, is_stdlib=False, files=(path,))
    elif path.exists():
        problems.append(_problem(f"{given} is no regular file"))
    elif glob.has_magic(given):
        matches = sorted(m for m in glob.glob(given, recursive=True) if os.path.isfile(m))
        if matches:
            return Source(given=given, is_stdlib=False, files=tuple(Path(m) for m in matches))
        problems.append(
            _problem(
                f"{given} matches no file", f"looked from {Path.cwd()}; ** crosses folders, hidden files do not match"
            )
        )
    else:
        hint = (
            "~ is not expanded here; write the home folder out"
            if given.startswith("~")
            else f"looked from {Path.cwd()}"
        )
        problems.append(_problem(f"{given} does not exist", hint))
    return None
