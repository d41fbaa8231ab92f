"""Strict loading of frozen dataclasses from plain JSON-like values.

One validator serves the engine (which reads ``run.json``) and ``lptctl`` (which maps each problem's path back to a line
of the sweep file). It collects every problem instead of stopping at the first, and never coerces silently: an int is
accepted where a float is expected, nothing else is converted.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing wrong with a configuration."""

    path: tuple[str | int, ...]
    """Keys from the root to the offending value, e.g. ``("optimizer", "lr")``."""
    message: str
    """What is wrong, including the value and what was expected."""
    hint: str = ""
    """The next step for the user, empty when the message already says it."""
    on_key: bool = False
    """True when the key itself is wrong (unknown key), so an editor should point at the key."""

    @property
    def dotted(self) -> str:
        """The path as users write it: ``optimizer.lr``."""
        return ".".join(str(part) for part in self.path)

    def __str__(self) -> str:
        where = f"{self.dotted}: " if self.path else ""
        return f"{where}{self.message}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(ValueError):
    """A configuration is invalid; ``problems`` holds every finding."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean "x"?`` for the closest known word, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'did you mean "{match[0]}"?' if match else ""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def describe(expected: Any) -> str:
    """Name a type annotation in words a user of the sweep file understands."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if expected is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(f'"{a}"' for a in args)
    if origin is tuple:
        plural = {int: "integers", float: "numbers", str: "texts"}[args[0]]
        return f"a list of {plural}" if args[-1] is Ellipsis else f"a list of {len(args)} {plural}"
    if dataclasses.is_dataclass(expected):
        return "a mapping"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(expected, str(expected))


def _mismatch(value: Any, expected: Any, path: tuple[str | int, ...]) -> Problem:
    shown = f'"{value}"' if isinstance(value, str) else ("null" if value is None else str(value))
    hint = ""
    if typing.get_origin(expected) is typing.Literal and isinstance(value, str):
        hint = did_you_mean(value, [str(a) for a in typing.get_args(expected)])
    return Problem(path=path, message=f"{shown} is not {describe(expected)}", hint=hint)


def _load(expected: Any, value: Any, path: tuple[str | int, ...], problems: list[Problem]) -> Any:
    """Check ``value`` against the annotation ``expected``; append problems and return the typed value."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        for option in options:
            trial: list[Problem] = []
            loaded = _load(option, value, path, trial)
            if not trial:
                return loaded
        if len(options) == 1:
            _load(options[0], value, path, problems)
        else:
            problems.append(_mismatch(value, expected, path))
        return None
    if origin is typing.Literal:
        if value not in args or (isinstance(value, bool) != any(isinstance(a, bool) for a in args if a == value)):
            problems.append(_mismatch(value, expected, path))
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            problems.append(_mismatch(value, expected, path))
            return ()
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_load(args[0], v, (*path, i), problems) for i, v in enumerate(value))
        if len(value) != len(args):
            problems.append(Problem(path=path, message=f"{list(value)} has {len(value)} values, expected {len(args)}"))
            return tuple(value)
        return tuple(_load(a, v, (*path, i), problems) for i, (a, v) in enumerate(zip(args, value, strict=True)))
    if dataclasses.is_dataclass(expected):
        return _load_dataclass(typing.cast(type, expected), value, path, problems)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (isinstance(value, bool) and expected is not bool) or not isinstance(value, expected):
        problems.append(_mismatch(value, expected, path))
    return value


def _load_dataclass(cls: type, value: Any, path: tuple[str | int, ...], problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(_mismatch(value, cls, path))
        return None
    hints = _hints(cls)
    before = len(problems)
    for key in value:
        if key not in hints:
            hint = did_you_mean(str(key), hints) or "known keys: " + ", ".join(sorted(hints))
            problems.append(Problem(path=(*path, str(key)), message="unknown key", hint=hint, on_key=True))
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in value:
            kwargs[field.name] = _load(hints[field.name], value[field.name], (*path, field.name), problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(
                Problem(path=(*path, field.name), message=f"missing; expected {describe(hints[field.name])}")
            )
    if len(problems) > before:
        return None
    try:
        return cls(**kwargs)
    except ConfigError as error:  # raised by __post_init__ with paths relative to this object
        problems.extend(dataclasses.replace(p, path=(*path, *p.path)) for p in error.problems)
        return None


def from_dict(cls: type[T], value: Any) -> T:
    """Build the frozen dataclass ``cls`` from a mapping.

    Raises:
        ConfigError: with every unknown key, missing key, wrong type and failed cross-field check.
    """
    problems: list[Problem] = []
    loaded = _load_dataclass(cls, value, (), problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, loaded)


def to_dict(obj: Any) -> Any:
    """Turn a dataclass tree into plain dicts, lists and scalars, the inverse of :func:`from_dict`."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {f.name: to_dict(getattr(obj, f.name)) for f in dataclasses.fields(obj)}
    if isinstance(obj, (tuple, list)):
        return [to_dict(v) for v in obj]
    return obj
