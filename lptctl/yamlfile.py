"""Sweep files as text: YAML 1.2 with positions, so that each error can point at its line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import Problem
from lptctl.errors import UsageError

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Where something stands in the file, 0-based."""

    line: int
    column: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A problem with its place in a file; ``position`` is None for a value that came from the command line."""

    problem: Problem
    position: Position | None


class SweepFileError(UsageError):
    """All problems of a sweep file, with the source line and a caret under each."""

    def __init__(self, source: YamlFile, located: Iterable[Located]) -> None:
        self.located = list(located)
        blocks = [source.render(item) for item in self.located]
        count = f"{len(blocks)} problem{'s' if len(blocks) > 1 else ''}"
        super().__init__("\n".join([*blocks, f"{source.path}: {count}; nothing was started"]))


class YamlFile:
    """A parsed YAML file that remembers where each key and value stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read: {error}; expected a sweep file, see `lptctl sweep new`") from error
        self.lines = self.text.splitlines()
        self.data: Any = None
        self._load()

    def _load(self) -> None:
        from ruamel.yaml import YAML
        from ruamel.yaml.constructor import DuplicateKeyError
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        yaml = YAML(typ="rt")
        yaml.version = (1, 2)
        try:
            self._tree = yaml.load(self.text)
        except DuplicateKeyError as error:
            mark = error.problem_mark
            message = (error.problem or "duplicate key").split(" with value")[0]
            self._fail(message.replace("found ", ""), mark, "keep one of them")
        except MarkedYAMLError as error:
            message = "; ".join(part for part in (error.context, error.problem) if part)
            self._fail(f"no valid YAML: {message}", error.problem_mark, "check the indentation, brackets and quotes here")
        except YAMLError as error:
            raise UsageError(f"{self.path}: no valid YAML: {error}") from error
        self.data = _plain(self._tree)

    def _fail(self, message: str, mark: Any, hint: str) -> None:
        position = Position(mark.line, mark.column) if mark is not None else None
        raise SweepFileError(self, [Located(problem=Problem(path=(), message=message, hint=hint), position=position)])

    def position(self, path: Path_, *, on_key: bool = False) -> Position | None:
        """Return where ``path`` stands; of a path that is not in the file, its nearest ancestor's place."""
        from ruamel.yaml.comments import CommentedMap, CommentedSeq

        node, place = self._tree, None
        for depth, part in enumerate(path):
            last = depth == len(path) - 1
            if isinstance(node, CommentedMap) and part in node:
                mark = node.lc.key(part) if last and on_key else node.lc.value(part)
                if not isinstance(node[part], (CommentedMap, CommentedSeq)) or not last or on_key:
                    place = Position(*mark)
                else:
                    place = Position(*node.lc.key(part))
                node = node[part]
            elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
                place = Position(*node.lc.item(part))
                node = node[part]
            else:
                break
        return place

    def render(self, item: Located) -> str:
        """Return ``file:line:col: key.path: message (hint)``, the source line and a caret."""
        if item.position is None:
            return f"{self.path}: {item.problem}"
        line, column = item.position.line, item.position.column
        head = f"{self.path}:{line + 1}:{column + 1}: {item.problem}"
        if line >= len(self.lines):
            return f"{head}\n  | (end of file)"
        return f"{head}\n  | {self.lines[line]}\n  | {' ' * column}^"


def _plain(node: Any) -> Any:
    """Turn ruamel's round-trip nodes into dict, list, str, int, float, bool, None."""
    if isinstance(node, dict):
        return {(str(k) if not isinstance(k, (int, float, bool)) else k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return bool(node) if kind is bool else kind(node)
    if type(node).__name__ == "ScalarBoolean":
        return bool(node)
    return node


def parse_scalar(text: str) -> Any:
    """Parse a command-line value (``--set key=value``) as YAML 1.2."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    try:
        value = yaml.load(text)
    except YAMLError as error:
        raise UsageError(f"--set: {text!r} is no YAML value: {error}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--set: {text!r} is not a finite number")
    return value
