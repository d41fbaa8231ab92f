"""The keys a sweep file can set, and how nested, dotted and shorthand spellings become one flat key."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    TrainingConfig,
    ValidationConfig,
    did_you_mean,
)
from engine.recipes.table import ALIASES, Switches
from lptctl.yamlfile import YamlPath, core_scalar

SECTIONS: dict[str, Any] = {
    "recipe": RecipeConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "validation": ValidationConfig,
    "checkpoint": CheckpointConfig,
    "runtime": RuntimeConfig,
}
TOP_KEYS = ("seed", *SECTIONS)
SHORTHAND = ("recipe", "model")
"""Sections that may be given as the name of a preset."""
NOT_FOR_USERS = ("data.path", "data.digest", "recipe.switches")
"""Fields of run.json that a launch fills in."""
NOT_IDENTITY = ("checkpoint", "runtime")
"""Sections that do not change results and so cannot be swept."""


def _leaves() -> dict[str, Any]:
    leaves: dict[str, Any] = {"seed": int}
    for name, cls in SECTIONS.items():
        leaves |= {f"{name}.{key}": kind for key, kind in typing.get_type_hints(cls).items()}
    leaves |= {f"recipe.{key}": kind for key, kind in typing.get_type_hints(Switches).items()}
    return {key: kind for key, kind in leaves.items() if key not in NOT_FOR_USERS}


LEAVES: dict[str, Any] = _leaves()
"""Every key that can be set, with its type."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was set."""

    value: Any
    origin: YamlPath | None
    """YAML path; None for ``--set``."""


Point = dict[str, Setting]
"""Flat key (``training.steps``) -> setting."""


def flatten(value: Any, origin: YamlPath | None, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Yield flat keys of a nested or dotted mapping; ``recipe: lpt`` becomes ``recipe.name``."""
    if isinstance(value, dict) and (value or not prefix):
        for key, item in value.items():
            path = None if origin is None else (*origin, key)
            yield from flatten(item, path, f"{prefix}.{key}" if prefix else str(key))
        return
    if prefix in SHORTHAND and not isinstance(value, dict):
        prefix = f"{prefix}.name"
    if prefix == "recipe.name" and isinstance(value, str):
        value = ALIASES.get(value, value)
    if prefix == "data.source" and isinstance(value, str):
        value = [value]
    yield prefix, Setting(value, origin)


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with a key or its value."""

    message: str
    hint: str = ""
    on_key: bool = False


def wrong_key(key: str) -> Wrong | None:
    """Say what is wrong with a flat key, if anything."""
    if key in LEAVES:
        return None
    top, _, rest = key.partition(".")
    if key == "recipe.switches" or key.startswith("recipe.switches."):
        return Wrong("is filled in at launch", "write the switch itself, e.g. recipe.scale_mode", on_key=True)
    if key in NOT_FOR_USERS:
        return Wrong("is filled in at launch", "name the corpus with data.source", on_key=True)
    if key in SECTIONS:
        return Wrong(f"{key} is a mapping of settings", f"write it nested or dotted, e.g. {_first_key(key)}")
    if top in SECTIONS:
        known = [leaf.partition(".")[2] for leaf in LEAVES if leaf.startswith(f"{top}.")]
        hint = did_you_mean(rest, known) or f"known keys of {top}: " + ", ".join(known)
    else:
        same_name = [leaf for leaf in LEAVES if leaf.endswith(f".{key}")]
        hint = f'did you mean "{same_name[0]}"?' if same_name else did_you_mean(top, TOP_KEYS)
        hint = hint or "known: " + ", ".join(TOP_KEYS)
    return Wrong("unknown key", hint, on_key=True)


def _first_key(section: str) -> str:
    return next(leaf for leaf in LEAVES if leaf.startswith(f"{section}."))


def wrong_value(key: str, value: Any) -> Wrong | None:
    """Say what is wrong with a value that the engine's own checks would not put into plain words."""
    if key in ("recipe.name", "model.name") and not isinstance(value, str):
        section = key.partition(".")[0]
        if isinstance(value, list):
            return Wrong(f"{_show(value)} where one {section} is expected", "several go under sweep: grid:")
        return Wrong(
            f"{_show(value)} is not the name of a {section}",
            f"see `lptctl {section}s list`" if section == "recipe" else "",
        )
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and not math.isfinite(item):
            return Wrong(f"{item} where a finite number is expected")
    return None


def value_hint(key: str, value: Any) -> str:
    """Return advice for a value of the wrong type, or an empty string."""
    kind = LEAVES.get(key)
    wants_list = typing.get_origin(kind) is tuple
    if isinstance(value, str):
        text = value.strip()
        if wants_list:
            return f"write [{value}]"
        if re.fullmatch(r"\d+(:\d\d)+", text):
            return "a clock time is text in YAML 1.2, not a number of seconds; write the number itself"
        if not isinstance(core_scalar(text), str) and text:
            return "drop the quotes"
        if re.fullmatch(r"[-+]?[\d_.]+([eE][-+]?\d+)?", text) and "_" in text:
            return f"write {text.replace('_', '')}; YAML 1.2 has no _ in numbers"
        if text.lower() in ("yes", "no", "on", "off") and kind is bool:
            return f"YAML 1.2 reads {text} as text; write {str(text.lower() in ('yes', 'on')).lower()}"
        if key in ("recipe.name", "model.name") and "," in text:
            return f"a list needs brackets: [{text}]"
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, list) and not wants_list:
        return "base and include take one value; several go under sweep: grid:"
    if wants_list and not isinstance(value, list):
        return f"write [{_show(value)}]; as one of several values of a grid, with its own brackets"
    return ""


def _show(value: Any) -> str:
    return "null" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def config_value(config: RunConfig, key: str) -> Any:
    """Return the value of a flat key in a frozen configuration; tuples as lists, as in the sweep file."""
    section, _, leaf = key.partition(".")
    node = getattr(config, section)
    if leaf:
        owner = node.switches if section == "recipe" and leaf not in ("name", "targets", "ignore") else node
        node = getattr(owner, leaf)
    return list(node) if isinstance(node, tuple) else node


def default_of(key: str) -> Any:
    """Return a key's default, ``dataclasses.MISSING`` if it has none."""
    section, _, leaf = key.partition(".")
    cls = SECTIONS.get(section)
    for field in dataclasses.fields(cls) if cls is not None else ():
        if field.name == leaf:
            return field.default
    return dataclasses.MISSING
