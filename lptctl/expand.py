"""From a sweep file to frozen runs: base < sweep < ``--set``, product, union, pairing. docs/sweep-file.md is the manual."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Problem,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    TrainingConfig,
    ValidationConfig,
    canonical_json,
    did_you_mean,
    from_dict,
    resolve_model,
    resolve_recipe,
    to_dict,
)
from engine.recipes.table import ALIASES, RECIPES
from lptctl.errors import UsageError
from lptctl.spec import SweepBlock, SweepFile
from lptctl.yamlfile import Located, SweepFileError, parse_scalar

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
NOT_FOR_USERS = ("data.path", "data.digest")

YamlPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was set."""

    value: Any
    origin: YamlPath | None
    """YAML path; None for ``--set``."""


Point = dict[str, Setting]
"""Flat key (``training.steps``) -> setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a sweep."""

    config: RunConfig
    """The frozen configuration (data not prepared yet)."""
    swept: dict[str, Any]
    """The swept keys and their values, for the table."""
    settings: Point
    """Every key that was set, with its origin (``plan --explain``)."""
    context: str
    """Canonical identity without recipe and seed; runs with equal context and seed are paired."""


@dataclass(kw_only=True, slots=True)
class Expansion:
    """All runs of a sweep, and what the user should know about them."""

    runs: list[PlannedRun]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unpaired: list[str] = field(default_factory=list)
    """Why recipes cannot be compared pair by pair; non-empty only with ``allow_unpaired``."""


def flatten(value: Any, origin: YamlPath | None, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Yield flat keys of a nested or dotted mapping; ``recipe: lpt`` becomes ``recipe.name``."""
    if isinstance(value, dict) and (value or not prefix):
        for key, item in value.items():
            path = None if origin is None else (*origin, key)
            yield from flatten(item, path, f"{prefix}.{key}" if prefix else str(key))
        return
    if prefix in SHORTHAND and isinstance(value, str):
        prefix = f"{prefix}.name"
    if prefix == "recipe.name" and isinstance(value, str):
        value = ALIASES.get(value, value)
    if prefix == "data.source" and isinstance(value, str):
        value = [value]
    yield prefix, Setting(value, origin)


class Expander:
    """Expands one sweep file; collects every problem before it raises."""

    def __init__(self, file: SweepFile, overrides: Iterable[str] = ()) -> None:
        self.file = file
        self.found: list[Located] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._broken: set[str] = set()  # top keys whose axis has been reported; "missing" would be a second report
        self._sections: dict[tuple[Any, ...], Any] = {}
        self._section_json: dict[int, str] = {}
        self.overrides = self._parse_overrides(overrides)
        self.base: Point = {}
        for key, setting in flatten(file.spec.base, ("base",)):
            if key in self.base:
                self.problem(key, "set twice in base (nested and dotted)", setting.origin)
            self.base[key] = setting
        for key, setting in self.base.items():
            self._check_key(key, setting.origin)

    def problem(self, key: str, message: str, origin: YamlPath | None, *, hint: str = "", on_key: bool = False) -> None:
        """Remember a problem once."""
        mark = (key, message, origin)
        if mark not in self._seen:
            self._seen.add(mark)
            path = tuple(key.split(".")) if key else ()
            position = None if origin is None else self.file.source.position(origin, on_key=on_key)
            self.found.append(
                Located(problem=Problem(path=path, message=message, hint=hint, on_key=on_key), position=position)
            )

    def _parse_overrides(self, overrides: Iterable[str]) -> Point:
        point: Point = {}
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise UsageError(f"--set {text!r}: expected KEY=VALUE, for example --set training.steps=20")
            for flat, setting in flatten({key.strip(): parse_scalar(value)}, None):
                self._check_key(flat, None)
                point[flat] = setting
        return point

    def _check_key(self, key: str, origin: YamlPath | None) -> None:
        top, _, rest = key.partition(".")
        if top not in TOP_KEYS:
            hint = did_you_mean(top, TOP_KEYS) or "known: " + ", ".join(TOP_KEYS)
            self.problem(key, "unknown key", origin, hint=hint, on_key=True)
        elif key in NOT_FOR_USERS:
            self.problem(key, "is filled in at launch", origin, hint="name the corpus with data.source", on_key=True)
        elif top != "seed" and not rest:
            self.problem(key, f"{top} is a mapping of settings", origin, hint="write it nested or dotted")

    def expand(self) -> Expansion:
        """Return every run.

        Raises:
            UsageError: with all problems of the file.
        """
        result = Expansion(runs=[])
        points: list[tuple[Point, set[str]]] = []
        for index, block in enumerate(self.file.spec.sweep):
            points += self._block(block, self.file.block_path(index), result)
        swept_keys = list(dict.fromkeys(key for _, swept in points for key in swept))
        by_id: dict[str, PlannedRun] = {}
        merged = 0
        for point, _ in points:
            run = self._run({**self.base, **point, **self.overrides}, swept_keys)
            if run is None:
                continue
            if run.config.run_id in by_id:
                merged += 1
            else:
                by_id[run.config.run_id] = run
        result.runs = list(by_id.values())
        if merged:
            result.notes.append(f"{merged} duplicate point{'s' if merged > 1 else ''} merged")
        self._check_sources(result.runs)
        if not self.found and not result.runs:
            self.problem("sweep", "expands to no run", ("sweep",), hint="exclude removes every point")
        if not self.found:
            result.unpaired = self._pairing(result)
            if result.unpaired and not self.file.spec.allow_unpaired:
                for reason in result.unpaired:
                    self.problem("sweep", reason, ("sweep",), hint="or set allow_unpaired: true", on_key=True)
        if self.found:
            raise SweepFileError(self.file.source, self.found)
        return result

    def _axis(self, key: str, values: Any, origin: YamlPath) -> list[Point]:
        """Return the points of one axis of a grid or zip entry."""
        if isinstance(values, str):
            self.problem(key, f'"{values}" where a list is expected', origin, hint=f"write [{values}]")
            return []
        if not isinstance(values, list):
            return [dict(flatten({key: values}, None)) | dict(self._flat(key, values, origin))]
        if not values:
            self.problem(key, "empty list; the product would have no run", origin, hint="give a value or drop the key")
        return [dict(self._flat(key, value, (*origin, i))) for i, value in enumerate(values)]

    def _flat(self, key: str, value: Any, origin: YamlPath) -> Iterator[tuple[str, Setting]]:
        for flat, setting in flatten({key: value}, None):
            self._check_key(flat, origin)
            yield flat, Setting(setting.value, origin)

    def _block(self, block: SweepBlock, where: YamlPath, result: Expansion) -> list[tuple[Point, set[str]]]:
        axes: list[list[Point]] = []
        owner: dict[str, YamlPath] = {}

        def claim(key: str, origin: YamlPath) -> None:
            if key in owner:
                self.problem(key, "is swept twice in this block", origin, hint="merge the two axes", on_key=True)
            owner[key] = origin
            if key in self.base or (key in SHORTHAND and f"{key}.name" in self.base):
                result.notes.append(f"{key} is set in base and swept; the sweep's values win")

        for key, values in block.grid.items():
            origin = (*where, "grid", key)
            claim(key, origin)
            axis = self._axis(key, values, origin)
            if axis:
                axes.append(axis)
            else:  # reported; dropping it lets the rest be checked too
                self._broken.add(key.partition(".")[0])
        for number, entry in enumerate(block.zip):
            origin = (*where, "zip", number)
            columns = {}
            for key, values in entry.items():
                claim(key, (*origin, key))
                columns[key] = self._axis(key, values, (*origin, key))
            lengths = {key: len(column) for key, column in columns.items()}
            if len(set(lengths.values())) > 1:
                counts = ", ".join(f"{key} has {n}" for key, n in lengths.items())
                self.problem("sweep.zip", f"values that move together differ in number: {counts}", origin)
                continue
            axes.append([dict(kv for p in row for kv in p.items()) for row in zip(*columns.values(), strict=True)])
        points = [dict(kv for p in combo for kv in p.items()) for combo in itertools.product(*axes)] if axes else []
        points = self._exclude(block, where, points, result)
        for number, entry in enumerate(block.include):
            origin = (*where, "include", number)
            point = {}
            for key, value in entry.items():
                point.update(self._flat(key, value, (*origin, key)))
            points.append(point)
        if not block.grid and not block.zip and not block.include:
            self.problem("sweep", "has no grid, zip or include", where, hint="at least: grid: {recipe: [bf16, lpt], seed: [1]}")
        return [(point, set(point)) for point in points]

    def _exclude(self, block: SweepBlock, where: YamlPath, points: list[Point], result: Expansion) -> list[Point]:
        for number, entry in enumerate(block.exclude):
            wanted = {key: s.value for key, s in flatten(entry, None)}
            merged = ((p, {**self.base, **p}) for p in points)
            kept = [p for p, full in merged if any(k not in full or full[k].value != v for k, v in wanted.items())]
            if len(kept) == len(points):
                position = self.file.source.position((*where, "exclude", number))
                line = f":{position.line + 1}" if position else ""
                result.warnings.append(f"{self.file.path}{line}: exclude {entry} matches no point; a typo?")
            points = kept
        return points

    def _section(self, name: str, items: tuple[tuple[str, Any], ...]) -> Any:
        """Load one section of a run; cached, because most runs of a sweep share most sections."""
        key = (name, repr(items))
        if key not in self._sections:
            tree: dict[str, Any] = {}
            for flat, value in items:
                node = tree
                *parents, leaf = flat.split(".")[1:]
                for part in parents:
                    node = node.setdefault(part, {})
                node[leaf] = value
            try:
                if name == "recipe":
                    tree = resolve_recipe(tree)
                elif name == "model":
                    tree = resolve_model(tree)
                self._sections[key] = from_dict(SECTIONS[name], tree)
            except ConfigError as error:
                self._sections[key] = error
        return self._sections[key]

    def _report(self, prefix: tuple[str, ...], error: ConfigError, settings: Point, label: str) -> None:
        for problem in error.problems:
            path = tuple(str(p) for p in (*prefix, *problem.path) if p != "switches")
            origin: YamlPath | None = ("base",)
            matched = [p for n in range(len(path), 0, -1) if (p := ".".join(path[:n])) in settings]
            matched += [k for k in settings if k.startswith(".".join(path[:1]) + ".")]
            if matched:
                origin = settings[matched[0]].origin
                index = problem.path[-1] if problem.path and isinstance(problem.path[-1], int) else None
                if origin is not None and index is not None and matched[0] != ".".join(path):
                    origin = (*origin, index)
            message = problem.message
            if matched and isinstance(settings[matched[0]].value, str) and re.fullmatch(r"\d+:\d\d(:\d\d)?", settings[matched[0]].value):
                message += "; a clock time is text in YAML 1.2, not a number of seconds"
            example = f" [first in run {label}]" if origin is not None and origin[0] == "sweep" else ""
            hint = problem.hint
            self.problem(".".join(path), message + example, origin, hint=hint, on_key=problem.on_key and bool(matched))

    def _run(self, settings: Point, swept_keys: list[str]) -> PlannedRun | None:
        label = "-".join(str(settings[k].value) for k in swept_keys if k in settings) or "?"
        if "seed" not in settings and "seed" not in self._broken:
            self.problem("seed", "missing: every run needs one", ("sweep",), hint="add seed: [1, 2, 3] to grid", on_key=True)
        grouped: dict[str, list[tuple[str, Any]]] = {name: [] for name in SECTIONS}
        for key, setting in settings.items():
            top = key.partition(".")[0]
            if top in grouped:
                grouped[top].append((key, setting.value))
        sections: dict[str, Any] = {}
        for name, items in grouped.items():
            if not items and name in ("recipe", "model", "training"):
                if name not in self._broken:
                    self.problem(name, "missing", ("base",), hint=f"every run needs {name}", on_key=True)
                continue
            loaded = self._section(name, tuple(sorted(items, key=lambda kv: kv[0])))
            if isinstance(loaded, ConfigError):
                self._report((name,), loaded, settings, label)
            else:
                sections[name] = loaded
        seed = settings["seed"].value if "seed" in settings else None
        if not isinstance(seed, int) or isinstance(seed, bool):
            if "seed" in settings:
                self.problem("seed", f'"{seed}" is not an integer', settings["seed"].origin)
            return None
        if len(sections) < len(SECTIONS):
            return None
        try:
            config = RunConfig(sweep=self.file.spec.name, run_id="", seed=seed, **sections)
        except ConfigError as error:
            self._report((), error, settings, label)
            return None
        swept = {k: settings[k].value for k in swept_keys if k in settings}
        run_id = f"{slug(config, swept)}-{config.identity_hash()}"
        context = ",".join(self._json(getattr(config, n)) for n in ("model", "training", "data", "optimizer", "validation"))
        return PlannedRun(
            config=dataclasses.replace(config, run_id=run_id), swept=swept, settings=settings, context=context
        )

    def _json(self, section: Any) -> str:
        # Sections come from the cache above and live as long as it does, so their ids are stable.
        if id(section) not in self._section_json:
            self._section_json[id(section)] = canonical_json(to_dict(section))
        return self._section_json[id(section)]

    def _check_sources(self, runs: list[PlannedRun]) -> None:
        for run in {id(r.config.data): r for r in runs}.values():
            for index, source in enumerate(run.config.data.source):
                if source == "stdlib":
                    continue
                path = resolve_source(source, self.file.path.parent)
                if not Path(path).exists() and not glob.has_magic(path):
                    message, hint = f'"{source}" does not exist', f"looked for {path}"
                elif not Path(path).exists() and not glob.glob(path, recursive=True):
                    message, hint = f'"{source}" matches no file', f"looked for {path}"
                else:
                    continue
                setting = run.settings.get("data.source")
                origin = setting.origin if setting else ("base",)
                if setting and isinstance(setting.value, list) and origin is not None:
                    origin = (*origin, index)
                self.problem("data.source", message, origin, hint=hint)

    def _pairing(self, result: Expansion) -> list[str]:
        """Return why recipes cannot be compared; empty when every recipe shares a (seed, settings) with its partner."""
        covered: dict[str, set[tuple[int, str]]] = {}
        for run in result.runs:
            covered.setdefault(run.config.recipe.name, set()).add((run.config.seed, run.context))
        reasons = []
        anchor = "bf16" if "bf16" in covered else next(iter(covered))
        for name, points in covered.items():
            reference = RECIPES[name].reference
            partners = [p for p in dict.fromkeys((anchor, reference)) if p in covered and p != name]
            lonely = [p for p in partners if not points & covered[str(p)]]
            if partners and len(lonely) == len(partners):
                reasons.append(
                    f"recipe {name} shares no seed and settings with {' or '.join(map(str, partners))}: the same seed must "
                    "come with the same model, data, training, optimizer and validation"
                )
            alone = len(points - set().union(*(covered[str(p)] for p in partners))) if partners else 0
            if alone and len(lonely) < len(partners):
                result.notes.append(f"{alone} run(s) of {name} have no partner and are left out of paired differences")
        return reasons


def resolve_source(source: str, folder: Path) -> str:
    """Return a corpus path as an absolute path; relative ones are relative to the sweep file."""
    return source if Path(source).is_absolute() else str(folder.resolve() / source)


def slug(config: RunConfig, swept: dict[str, Any]) -> str:
    """Return the readable part of a run id: recipe, seed, then the other swept keys."""
    parts = [config.recipe.name, f"s{config.seed}"]
    for key, value in swept.items():
        if key not in ("recipe.name", "seed"):
            text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
            parts.append(f"{key.rpartition('.')[2]}{text}")
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", "-".join(parts))[:80].rstrip("-._")


def expand_file(file: SweepFile, overrides: Iterable[str] = ()) -> Expansion:
    """Expand a sweep file. See :meth:`Expander.expand`."""
    return Expander(file, overrides).expand()
