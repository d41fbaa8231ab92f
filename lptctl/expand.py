"""From a sweep file to frozen runs: base < sweep < ``--set``, product, union. docs/sweep-file.md is the manual."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.config import (
    ConfigError,
    Problem,
    RunConfig,
    canonical_json,
    from_dict,
    resolve_model,
    resolve_recipe,
    to_dict,
)
from lptctl.errors import UsageError
from lptctl.pairing import PairedRun, find_unpaired
from lptctl.runid import point_label, slug, variant_label
from lptctl.settings import (
    NOT_IDENTITY,
    SECTIONS,
    Point,
    Setting,
    Wrong,
    config_value,
    default_of,
    flatten,
    value_hint,
    wrong_key,
    wrong_value,
)
from lptctl.sources import source_problem
from lptctl.spec import SweepBlock, SweepFile
from lptctl.yamlfile import Located, SweepFileError, YamlPath, parse_scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a sweep."""

    config: RunConfig
    """The frozen configuration (data not prepared yet)."""
    swept: dict[str, Any]
    """The swept keys of the sweep and this run's values, for the table."""
    settings: Point
    """Every key that was set, with its origin (``plan --explain``)."""


@dataclass(kw_only=True, slots=True)
class Expansion:
    """All runs of a sweep, and what the user should know about them."""

    runs: list[PlannedRun]
    overrides: dict[str, Any]
    """Values of ``--set``."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unpaired: list[str] = field(default_factory=list)
    """Why recipes cannot be compared pair by pair; non-empty only with ``allow_unpaired``."""


@dataclass(slots=True)
class _Finding:
    """A problem, and the runs of the sweep it was found in."""

    located: Located
    runs: int = 0
    first: str = ""


class Expander:
    """Expands one sweep file; collects every problem before it raises."""

    def __init__(self, file: SweepFile, overrides: Iterable[str] = ()) -> None:
        self.file = file
        self._found: dict[tuple[Any, ...], _Finding] = {}
        for number, located in enumerate(file.problems):
            self._found["file", number] = _Finding(located)
        self._broken: set[str] = set()  # keys with a reported axis; "missing" would be a second report
        self._sections: dict[tuple[str, str], Any] = {}
        self._section_json: dict[int, str] = {}
        self.overrides = self._parse_overrides(overrides)
        self.base: Point = {}
        for key, setting in flatten(file.spec.base, ("base",)):
            if key in self.base:
                self.problem(key, Wrong("set twice in base", "keep one of the spellings", on_key=True), setting.origin)
            elif self._sound(key, setting):
                self.base[key] = setting

    def problem(self, key: str, wrong: Wrong, origin: YamlPath | None, *, run: str = "") -> None:
        """Remember a problem; one that several runs share is remembered once."""
        mark = (key, wrong, origin)
        if mark not in self._found:
            position = None if origin is None else self.file.source.position(origin, on_key=wrong.on_key)
            found = Problem(
                path=tuple(key.split(".")) if key else (), message=wrong.message, hint=wrong.hint, on_key=wrong.on_key
            )
            self._found[mark] = _Finding(Located(problem=found, position=position), first=run)
        self._found[mark].runs += 1

    def _raise(self, total: int) -> None:
        out = []
        for mark, finding in self._found.items():
            located, origin = finding.located, mark[-1]
            if finding.first and isinstance(origin, tuple) and origin[0] == "sweep":
                where = f" [{finding.runs} of {total} runs, first {finding.first}]"
                problem = dataclasses.replace(located.problem, message=located.problem.message + where)
                located = dataclasses.replace(located, problem=problem)
            out.append(located)
        if out:
            raise SweepFileError(self.file.source, out)

    def _parse_overrides(self, overrides: Iterable[str]) -> Point:
        point: Point = {}
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise UsageError(f"--set {text!r}: expected KEY=VALUE, for example --set training.steps=20")
            for flat, setting in flatten({key.strip(): parse_scalar(value)}, None):
                if self._sound(flat, setting):
                    point[flat] = setting
        return point

    def _sound(self, key: str, setting: Setting, *, swept: bool = False) -> bool:
        """Check a key and what can be said about its value alone; report what is wrong."""
        wrong = wrong_key(key) or wrong_value(key, setting.value)
        if wrong is None and swept and key.partition(".")[0] in NOT_IDENTITY:
            wrong = Wrong("does not change results, so it cannot tell runs apart", "set it in base", on_key=True)
        if wrong is not None:
            self.problem(key, wrong, setting.origin)
            self._broken |= {key, key.partition(".")[0]}
        return wrong is None

    def _all_sound(self, point: Point) -> bool:
        """Check all swept settings of a point, each of them even after one that is wrong."""
        return not [key for key, setting in point.items() if not self._sound(key, setting, swept=True)]

    def expand(self) -> Expansion:
        """Return every run.

        Raises:
            UsageError: with all problems of the file.
        """
        result = Expansion(runs=[], overrides={key: s.value for key, s in self.overrides.items()})
        points: list[Point] = []
        for index, block in enumerate(self.file.spec.sweep):
            points += self._block(block, self.file.block_path(index), result)
        swept = list(dict.fromkeys(key for point in points for key in point))
        for key in swept:
            if key in self.overrides:
                result.notes.append(f"--set {key} replaces its swept values")
            elif key in self.base:
                result.notes.append(f"{key} is set in base and swept; the sweep's values win")
        if not points and self.file.is_whole and not self._found:
            self.problem("sweep", Wrong("expands to no run", "exclude removes every point", on_key=True), ("sweep",))
        if not points:  # check base all the same
            self._run({**self.base, **self.overrides}, swept)
        by_identity: dict[Any, PlannedRun] = {}
        merged = 0
        for point in points:
            run = self._run({**self.base, **point, **self.overrides}, swept)
            if run is not None:
                merged += self._identity(run.config) in by_identity
                by_identity.setdefault(self._identity(run.config), run)
        result.runs = list(by_identity.values())
        if merged:
            result.notes.append(f"{merged} duplicate point{'s' if merged > 1 else ''} merged")
        self._check_ids(result.runs)
        self._check_sources(result.runs)
        if not self._found:
            self._check_pairs(result)
        self._raise(len(points))
        return result

    def _identity(self, config: RunConfig) -> tuple[Any, ...]:
        """Return what makes two runs the same run: equal to comparing :meth:`RunConfig.identity`, but cached."""
        return (config.seed, self._json(config.recipe), self._context(config))

    def _context(self, config: RunConfig) -> str:
        """Return the part of the identity that paired runs share beside the seed."""
        names = ("model", "training", "data", "optimizer", "validation")
        return ",".join(self._json(getattr(config, name)) for name in names)

    def _json(self, section: Any) -> str:
        # Sections come from the cache and live as long as it does, so their ids are stable.
        if id(section) not in self._section_json:
            self._section_json[id(section)] = canonical_json(to_dict(section))
        return self._section_json[id(section)]

    def _axis(self, key: str, values: Any, origin: YamlPath) -> list[tuple[str, list[Point]]]:
        """Return the axes of one grid or zip key as (key, points); a nested mapping gives several."""
        if isinstance(values, dict) and values:
            return [a for sub, v in values.items() for a in self._axis(f"{key}.{sub}", v, (*origin, sub))]
        if isinstance(values, str):
            self._bad_axis(key, Wrong(f'"{values}" where a list is expected', f"write [{values}]"), origin)
            return []
        if isinstance(values, list) and not values:
            wrong = Wrong("empty list; the product would have no run", "give a value or drop the key")
            self._bad_axis(key, wrong, origin)
            return []
        items = [(v, (*origin, i)) for i, v in enumerate(values)] if isinstance(values, list) else [(values, origin)]
        points = []
        for item, where in items:
            point = dict(flatten(item, where, key))
            if self._all_sound(point):
                points.append(point)
        return [(key, points)]

    def _bad_axis(self, key: str, wrong: Wrong, origin: YamlPath) -> None:
        self.problem(key, wrong, origin)
        self._broken |= {key, key.partition(".")[0]}

    def _block(self, block: SweepBlock, where: YamlPath, result: Expansion) -> list[Point]:
        axes: list[list[Point]] = []
        owner: set[str] = set()

        def claim(points: list[Point], origin: YamlPath) -> None:
            for flat in dict.fromkeys(k for point in points for k in point):
                if flat in owner:
                    self.problem(flat, Wrong("is swept twice in this block", "merge the two axes", on_key=True), origin)
            owner.update(k for point in points for k in point)

        for key, values in block.grid.items():
            origin = (*where, "grid", key)
            for _, points in self._axis(key, values, origin):
                claim(points, origin)
                axes += [points] if points else []
        for number, entry in enumerate(block.zip):
            origin = (*where, "zip", number)
            columns = [a for key, values in entry.items() for a in self._axis(key, values, (*origin, key))]
            for _, points in columns:
                claim(points, origin)
            lengths = {len(points) for _, points in columns}
            if not entry:
                self.problem(
                    "sweep.zip", Wrong("an empty entry", "drop it or name the keys that move together"), origin
                )
            elif len(lengths) == 1:
                rows = zip(*(points for _, points in columns), strict=True)
                axes.append([dict(kv for point in row for kv in point.items()) for row in rows])
            elif len(columns) == len(entry):
                counts = ", ".join(f"{key} has {len(points)}" for key, points in columns)
                wrong = Wrong(f"values that move together differ in number: {counts}", "give every key as many values")
                self.problem("sweep.zip", wrong, origin)
        points = [dict(kv for p in combo for kv in p.items()) for combo in itertools.product(*axes)] if axes else []
        points = self._exclude(block, where, points, result)
        for number, entry in enumerate(block.include):
            flat = dict(flatten(entry, (*where, "include", number)))
            if self._all_sound(flat) and flat:
                points.append(flat)
        if not block.grid and not block.zip and not block.include and self.file.is_whole:
            hint = "at least: grid: {recipe: [bf16, lpt], seed: [1]}"
            self.problem("sweep", Wrong("has no grid, zip or include", hint), where)
        return points

    def _exclude(self, block: SweepBlock, where: YamlPath, points: list[Point], result: Expansion) -> list[Point]:
        for number, entry in enumerate(block.exclude):
            origin = (*where, "exclude", number)
            wanted = dict(flatten(entry, origin))
            if not self._all_sound(wanted):
                continue
            if not wanted:
                self.problem("sweep.exclude", Wrong("an empty entry would exclude everything", "drop it"), origin)
                continue
            kept = [p for p in points if not self._matches(p, wanted)]
            if len(kept) == len(points) and not self._found:
                position = self.file.source.position(origin)
                line = f":{position.line + 1}" if position else ""
                result.warnings.append(f"{self.file.path}{line}: exclude {entry} matches no point; a typo?")
            points = kept
        return points

    def _matches(self, point: Point, wanted: Point) -> bool:
        for key, setting in wanted.items():
            own = point.get(key) or self.base.get(key)
            if (own.value if own is not None else default_of(key)) != setting.value:
                return False
        return True

    def _section(self, name: str, items: tuple[tuple[str, Any], ...]) -> Any:
        """Load one section of a run; cached, because most runs of a sweep share most sections."""
        key = (name, repr(items))
        if key not in self._sections:
            tree = {flat.partition(".")[2]: value for flat, value in items}
            try:
                if name == "recipe":
                    tree = resolve_recipe(tree)
                elif name == "model":
                    tree = resolve_model(tree)
                self._sections[key] = from_dict(SECTIONS[name], tree)
            except ConfigError as error:
                self._sections[key] = error
        return self._sections[key]

    def _origin(self, path: tuple[str, ...], message: str, settings: Point) -> tuple[YamlPath | None, str | None]:
        """Return where the value that a problem is about was set, and its key; what was swept goes first."""
        for length in range(len(path), 0, -1):
            key = ".".join(path[:length])
            if key in settings:
                origin = settings[key].origin
                return (None if origin is None else (*origin, *map(int, path[length:]))), key
        words = set(re.findall(r"[a-z_0-9]+", message))
        section = [key for key in settings if key.startswith(f"{path[0]}.")]
        named = [key for key in section if key.rpartition(".")[2] in words] or section
        named.sort(key=lambda key: (settings[key].origin or ("",))[0] != "sweep")
        return (settings[named[0]].origin, named[0]) if named else (("base",), None)

    def _report(self, prefix: tuple[str, ...], error: ConfigError, settings: Point, run: str) -> None:
        for problem in error.problems:
            path = tuple(str(p) for p in (*prefix, *problem.path) if p != "switches")
            origin, key = self._origin(path, problem.message, settings)
            hint = problem.hint
            if key is not None and ".".join(path[: key.count(".") + 1]) == key:
                value = settings[key].value
                extra = path[key.count(".") + 1 :]
                if extra and isinstance(value, list) and int(extra[0]) < len(value):
                    value = value[int(extra[0])]
                advice = value_hint(key, value) if " is not " in problem.message else ""
                hint = "; ".join(part for part in (hint, advice) if part)
            on_key = problem.on_key and key is not None
            self.problem(".".join(path), Wrong(problem.message, hint, on_key=on_key), origin, run=run)

    def _run(self, settings: Point, swept_keys: list[str]) -> PlannedRun | None:
        label = point_label(settings, swept_keys)
        if "seed" not in settings and "seed" not in self._broken and self.file.is_whole:
            wrong = Wrong("missing: every run needs one", "add seed: [1, 2, 3] to grid", on_key=True)
            self.problem("seed", wrong, ("sweep",))
        grouped: dict[str, list[tuple[str, Any]]] = {name: [] for name in SECTIONS}
        for key, setting in settings.items():
            top = key.partition(".")[0]
            if top in grouped:
                grouped[top].append((key, setting.value))
        sections: dict[str, Any] = {}
        for name, items in grouped.items():
            needed = {"recipe": "recipe.name", "model": "model.name", "training": "training.steps"}.get(name)
            if needed is not None and needed not in settings:
                if name not in self._broken and self.file.is_whole:
                    self.problem(needed, Wrong("missing: every run needs one", _NEEDED[name], on_key=True), ("base",))
                continue
            loaded = self._section(name, tuple(sorted(items, key=lambda kv: kv[0])))
            if isinstance(loaded, ConfigError):
                self._report((name,), loaded, settings, label)
            else:
                sections[name] = loaded
        seed = settings["seed"].value if "seed" in settings else None
        if not isinstance(seed, int) or isinstance(seed, bool):
            if "seed" in settings:
                shown = f'"{seed}"' if isinstance(seed, str) else str(seed)
                wrong = Wrong(f"{shown} is not an integer", value_hint("seed", seed))
                self.problem("seed", wrong, settings["seed"].origin, run=label)
            return None
        if len(sections) < len(SECTIONS):
            return None
        try:
            config = RunConfig(sweep=self.file.spec.name, run_id="", seed=seed, **sections)
        except ConfigError as error:
            self._report((), error, settings, label)
            return None
        swept = {key: config_value(config, key) for key in swept_keys}
        run_id = f"{slug(config, swept)}-{config.identity_hash()}"
        return PlannedRun(config=dataclasses.replace(config, run_id=run_id), swept=swept, settings=settings)

    def _check_ids(self, runs: list[PlannedRun]) -> None:
        """Refuse two runs under one id: a collision of hashes, or of names on a file system that folds case."""
        seen: dict[str, PlannedRun] = {}
        for run in runs:
            folded = run.config.run_id.lower()
            if folded in seen:
                wrong = Wrong(
                    f"two different runs share the id {run.config.run_id}", "drop one or change any key of it"
                )
                self.problem("sweep", wrong, ("sweep",))
            seen[folded] = run

    def _check_sources(self, runs: list[PlannedRun]) -> None:
        for run in {id(r.config.data): r for r in runs}.values():
            sources = run.config.data.source
            for index, source in enumerate(sources):
                wrong = source_problem(source, self.file.path.parent, alone=len(sources) == 1)
                if wrong is not None:
                    setting = run.settings.get("data.source")
                    origin: YamlPath | None = ("base",)
                    if setting is not None:
                        origin = None if setting.origin is None else (*setting.origin, index)
                    self.problem("data.source", wrong, origin, run=run.config.run_id)

    def _check_pairs(self, result: Expansion) -> None:
        paired = [
            PairedRun(
                recipe=run.config.recipe.name,
                label=variant_label(run.config.recipe),
                variant=self._json(run.config.recipe),
                group=(run.config.seed, self._context(run.config)),
                differing={k: v for k, v in run.swept.items() if not k.startswith("recipe.")},
            )
            for run in result.runs
        ]
        result.unpaired, notes = find_unpaired(paired)
        result.notes += notes
        if not self.file.spec.allow_unpaired:
            for reason in result.unpaired:
                hint = "give every recipe the same values, or set allow_unpaired: true"
                self.problem("sweep", Wrong(reason, hint, on_key=True), ("sweep",))


_NEEDED = {
    "recipe": "add recipe: [bf16, lpt] to grid; `lptctl recipes list` shows them all",
    "model": "add model: llama3_nano to base",
    "training": "add training: {steps: 200} to base",
}


def expand_file(file: SweepFile, overrides: Iterable[str] = ()) -> Expansion:
    """Expand a sweep file. See :meth:`Expander.expand`."""
    return Expander(file, overrides).expand()
