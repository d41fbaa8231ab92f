"""Names of runs: the readable part of a run id, and labels in messages."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from engine.config import RecipeConfig, RunConfig
from engine.recipes.table import RECIPES
from lptctl.settings import Point, config_value

SLUG_CHARS = 71
"""Longest readable part of a run id; with the dash and the hash it makes 80."""


def point_label(settings: Point, swept_keys: list[str]) -> str:
    """Name a run that has no id yet."""
    return _slug_text(_parts(lambda key: settings[key].value if key in settings else None, swept_keys))


def slug(config: RunConfig, swept: dict[str, Any]) -> str:
    """Return the readable part of a run id: recipe, seed, then the other swept keys."""
    return _slug_text(_parts(lambda key: swept[key] if key in swept else config_value(config, key), list(swept)))


def _parts(value_of: Any, swept_keys: list[str]) -> Iterator[str]:
    leaves = [key.rpartition(".")[2] for key in swept_keys]
    yield str(value_of("recipe.name"))
    yield f"s{value_of('seed')}"
    for key, leaf in zip(swept_keys, leaves, strict=True):
        value = value_of(key)
        if key in ("recipe.name", "seed") or value is None:
            continue
        name = leaf if leaves.count(leaf) == 1 else key
        text = "_".join(map(str, value)) if isinstance(value, list) else str(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        yield f"{name}{text}" if is_number else f"{name}_{text}"


def _slug_text(parts: Iterable[str]) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", "-".join(parts))[:SLUG_CHARS].strip("-._") or "run"


def variant_label(recipe: RecipeConfig) -> str:
    """Name a recipe for people: its name, and what was overridden."""
    preset = RECIPES[recipe.name].switches
    changed = [
        f"{f.name} {getattr(recipe.switches, f.name)}"
        for f in dataclasses.fields(preset)
        if getattr(recipe.switches, f.name) != getattr(preset, f.name)
    ]
    default = RecipeConfig(name=recipe.name, switches=recipe.switches)
    changed += [name for name in ("targets", "ignore") if getattr(recipe, name) != getattr(default, name)]
    return f"{recipe.name} with {', '.join(changed)}" if changed else recipe.name
