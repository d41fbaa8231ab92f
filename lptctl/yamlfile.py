"""Sweep files as text: YAML 1.2 with positions, so that each error can point at its line.

ruamel.yaml parses the text into nodes with positions; the scalars are read here, by the core schema of YAML 1.2
(spec §10.3.2): ``1e-4`` is a number, ``4:00:00``, ``1_000``, ``no`` and ``2026-01-31`` are text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Problem
from lptctl.errors import UsageError

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

YamlPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL, _HEX = re.compile(r"0o[0-7]+"), re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{f"{sign}.{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "Inf", "INF")},
    **{f".{word}": float("nan") for word in ("nan", "NaN", "NAN")},
}
_TAG = "tag:yaml.org,2002:"
MAX_SHOWN = 100
"""Columns of a source line shown under an error; a longer line is cut around the caret."""


MAX_NODES = 1_000_000
"""Values in a file, each alias counted as often as it is used."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where something stands in the file, 0-based."""

    line: int
    column: int
    length: int = 1
    """Characters to underline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A problem with its place in a file; ``position`` is None for a value that came from the command line."""

    problem: Problem
    position: Position | None


class SweepFileError(UsageError):
    """All problems of a sweep file, with the source line and a caret under each."""

    def __init__(self, source: YamlFile, located: Iterable[Located]) -> None:
        everywhere = Position(-1, 0)
        self.located = sorted(located, key=lambda item: ((p := item.position or everywhere).line, p.column))
        blocks = [source.render(item) for item in self.located]
        count = f"{len(blocks)} problem{'s' if len(blocks) > 1 else ''}"
        super().__init__("\n".join([*blocks, f"{source.path}: {count}; nothing was started"]))


def core_scalar(text: str) -> Any:
    """Read a plain (unquoted) scalar by the core schema of YAML 1.2."""
    if text in _SPECIAL:
        return _SPECIAL[text]
    if _INT.fullmatch(text) and len(text) < 400:  # Python refuses to convert thousands of digits
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    return float(text) if _FLOAT.fullmatch(text) else text


@dataclass(slots=True)
class _Reader:
    """Turns a document's nodes into plain values and remembers where each of them stands."""

    lines: list[str]
    values: dict[YamlPath, Position] = field(default_factory=dict)
    keys: dict[YamlPath, Position] = field(default_factory=dict)
    tokens: dict[YamlPath, str] = field(default_factory=dict)
    problems: list[Located] = field(default_factory=list)
    open_nodes: list[Node] = field(default_factory=list)

    def place(self, node: Node) -> Position:
        """Return a node's position; of one over several lines, the first line's part."""
        start, end = node.start_mark, node.end_mark
        stop = end.column if end.line == start.line else len(self.lines[start.line]) if self.lines else 0
        return Position(start.line, start.column, max(1, stop - start.column))

    def fail(self, node: Node, path: YamlPath, message: str, hint: str = "") -> None:
        """Remember a problem at a node."""
        self.problems.append(Located(problem=Problem(path=path, message=message, hint=hint), position=self.place(node)))

    def read(self, node: Node, path: YamlPath) -> Any:
        """Return the plain value of a node."""
        from ruamel.yaml.nodes import MappingNode, ScalarNode

        self.values[path] = self.place(node)
        if len(self.values) > MAX_NODES:
            raise _TooLargeError
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if any(node is parent for parent in self.open_nodes):
            self.fail(node, path, "an alias that contains itself")
            return None
        tag = str(node.tag or "")
        if tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self.fail(node, path, f'the tag "{tag.replace(_TAG, "!!")}" has no meaning here', "drop it")
        self.open_nodes.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self.open_nodes.pop()

    def _mapping(self, node: Node, path: YamlPath) -> dict[str, Any]:
        from ruamel.yaml.nodes import ScalarNode

        out: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node.value, str):
                self.fail(key_node, path, "a list or mapping as a key", "keys are names such as optimizer.lr")
                continue
            key = key_node.value
            if key == "<<" and isinstance(key_node, ScalarNode) and key_node.style is None:
                value = self.read(value_node, path)
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, dict):
                        merged = {**item, **merged}
                    else:
                        self.fail(value_node, (*path, "<<"), "a merge key needs a mapping", "for example <<: *defaults")
                continue
            here = (*path, key)
            if key in out:
                self.fail(
                    key_node, here, f'duplicate key "{key}"', f"first on line {self.keys[here].line + 1}; keep one"
                )
                continue
            out[key] = self.read(value_node, here)
            self.keys[here] = self.place(key_node)
        self.values[path] = self.place(node)
        return {**merged, **out}

    def _scalar(self, node: Node, path: YamlPath) -> Any:
        text, tag, style = str(node.value), str(node.tag or ""), getattr(node, "style", None)
        self.tokens[path] = text
        written = self.lines[node.start_mark.line][node.start_mark.column :] if self.lines else ""
        if written.startswith("!"):
            wanted = {f"{_TAG}str": str, f"{_TAG}int": int, f"{_TAG}float": float}.get(tag)
            if wanted is None:
                self.fail(node, path, f'the tag "{written.split()[0]}" has no meaning here', "drop it")
                return text
            try:
                return wanted(text)
            except ValueError:
                self.fail(node, path, f'"{text}" is not what its tag {written.split()[0]} says')
                return text
        return text if style is not None else core_scalar(text)


class _TooLargeError(Exception):
    """Aliases of aliases have multiplied."""


class YamlFile:
    """A parsed YAML file that remembers where each key and value stands.

    Raises:
        UsageError: if the file cannot be read or is no YAML; duplicate keys and unknown tags are all reported at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise UsageError(
                f"{path}: byte 0x{byte:02x} at offset {error.start} is not UTF-8; save the file as UTF-8"
            ) from None
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be read: {error.strerror}; expected a sweep file, `lptctl sweep new` writes one"
            ) from None
        self.lines = self.text.splitlines()
        self._reader = _Reader(lines=self.lines)
        try:
            node = self._compose()
            self.data: Any = None if node is None else self._reader.read(node, ())
        except RecursionError:
            raise UsageError(f"{path}: nested too deeply for a sweep file; drop some of the brackets") from None
        except _TooLargeError:
            raise UsageError(
                f"{path}: more than {MAX_NODES:,} values once its aliases are written out; use fewer aliases"
            ) from None
        if self._reader.problems:
            raise SweepFileError(self, self._reader.problems)

    def _compose(self) -> Node | None:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
        from ruamel.yaml.reader import ReaderError

        try:
            node: Node | None = YAML(typ="safe", pure=True).compose(self.text)
        except MarkedYAMLError as error:
            message = "; ".join(part for part in (error.context, error.problem) if part)
            hint = "check the indentation, brackets and quotes from here on"
            if error.problem and "single document" in error.problem:
                message, hint = "a second document starts here", "a sweep file is one document; drop the ---"
            self._fail(f"no valid YAML: {message}", error.problem_mark or error.context_mark, hint)
        except ReaderError as error:
            line = self.text.count("\n", 0, error.position)
            column = error.position - (self.text.rfind("\n", 0, error.position) + 1)
            code = error.character if isinstance(error.character, int) else ord(error.character)
            problem = Problem(path=(), message=f"the character U+{code:04X} is not allowed in YAML", hint="delete it")
            raise SweepFileError(self, [Located(problem=problem, position=Position(line, column))]) from None
        except YAMLError as error:
            raise UsageError(f"{self.path}: no valid YAML: {error}") from None
        return node

    def _fail(self, message: str, mark: Any, hint: str) -> None:
        position = Position(mark.line, mark.column) if mark is not None else None
        located = Located(problem=Problem(path=(), message=message, hint=hint), position=position)
        raise SweepFileError(self, [located]) from None

    def position(self, path: YamlPath, *, on_key: bool = False) -> Position | None:
        """Return where ``path`` stands: its key, or its value if that is a scalar or a list item.

        Of a path that is not in the file, its nearest ancestor's place; None for the whole document.
        """
        for length in range(len(path), 0, -1):
            here = path[:length]
            is_scalar = here in self._reader.tokens
            if here in self._reader.keys and (on_key or not is_scalar or length < len(path)):
                return self._reader.keys[here]
            if here in self._reader.values:
                return self._reader.values[here]
        return None

    def token(self, path: YamlPath) -> str | None:
        """Return a scalar as it is written (without quotes), None for anything else."""
        return self._reader.tokens.get(path)

    def render(self, item: Located) -> str:
        """Return ``file:line:col: key.path: message (hint)``, the source line and a caret."""
        if item.position is None:
            return f"{self.path}: {item.problem}"
        line, column = item.position.line, item.position.column
        head = f"{self.path}:{line + 1}:{column + 1}: {item.problem}"
        if line >= len(self.lines):
            return f"{head}\n  | (end of file)"
        text = self.lines[line].replace("\t", " ")
        length = max(1, min(item.position.length, len(text) - column))
        start = 0 if len(text) <= MAX_SHOWN else max(0, min(column - MAX_SHOWN // 2, len(text) - MAX_SHOWN))
        shown = text[start : start + MAX_SHOWN]
        before, under = shown[: column - start], shown[column - start :][:length]
        return f"{head}\n  | {shown}\n  | {' ' * _cells(before)}{'^' * max(1, _cells(under))}"


def _cells(text: str) -> int:
    """Return the terminal columns of a text: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def parse_scalar(text: str) -> Any:
    """Parse a command-line value (``--set key=value``) as YAML 1.2.

    Raises:
        UsageError: if it is no YAML value.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"--set: {text!r} is no YAML value: {what}; quote it for the shell and for YAML") from None
    if node is None:
        return None
    reader = _Reader(lines=text.splitlines())
    value = reader.read(node, ())
    if reader.problems:
        raise UsageError(f"--set: {text!r}: " + "; ".join(str(item.problem) for item in reader.problems))
    return value


def walk(value: Any, path: YamlPath = ()) -> Iterator[tuple[YamlPath, Any]]:
    """Yield every scalar of a plain tree with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))
    else:
        yield path, value
