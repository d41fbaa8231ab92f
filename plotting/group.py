"""Who is compared with whom: groups of seeds, their names, their references, and whether the pairs are pairs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plotting.clean import Run
from plotting.schema import PlotError, RecipeInfo

Setting = tuple[str, Any]
"""A dotted key and its value."""
_MISSING = "unset"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs that differ in nothing but the seed."""

    label: str
    """Unique name for tables and figures: recipe, overridden switches, swept keys."""
    recipe: str
    """Recipe name."""
    overrides: tuple[Setting, ...]
    """What differs from the recipe's preset, e.g. ``("switches.scale_mode", "uos")``."""
    keys: tuple[Setting, ...]
    """Other swept keys; only groups with equal keys are compared."""
    runs: tuple[Run, ...]
    """One run a seed, by seed."""

    def by_seed(self) -> dict[int, Run]:
        """Return the runs by seed."""
        return {run.info.seed: run for run in self.runs}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Whether equal seeds started from equal weights and read equal batches."""

    verdict: Literal["paired", "unpaired", "unknown"]
    """``unknown`` if a run has not recorded its digests, or if there is nothing to pair."""
    problems: tuple[str, ...]
    """One sentence a finding."""


def group_runs(runs: Sequence[Run], recipes: Mapping[str, RecipeInfo]) -> list[Group]:
    """Group runs by recipe, overridden switches and the swept keys other than the seed, in the recipes' order.

    If that leaves two runs of one seed together (two sweeps that share recipes), the sweep becomes a key.

    Raises:
        PlotError: if runs are still indistinguishable.
    """
    overrides = {id(run): _overrides(run, runs, recipes) for run in runs}
    keys = {id(run): settings for run, settings in zip(runs, _swept(runs), strict=True)}

    def bucket(run: Run) -> tuple[Any, ...]:
        return (run.info.recipe, overrides[id(run)], keys[id(run)])

    if _clashes(runs, bucket_of=[bucket(r) for r in runs]):
        names = {r.info.path.parent.resolve(): r.info.sweep for r in runs}
        unique = len(set(names.values())) == len(names)
        for run in runs:
            folder = run.info.path.parent.resolve()
            keys[id(run)] = (*keys[id(run)], ("sweep", names[folder] if unique else str(folder)))
    clashes = _clashes(runs, bucket_of=[bucket(r) for r in runs])
    if clashes:
        raise PlotError(
            f"{a.info.path} and {b.info.path}: same recipe, settings and seed ({a.info.seed}), so they cannot be told "
            "apart; plot them separately"
            for a, b in clashes
        )
    buckets: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        buckets[bucket(run)].append(run)
    shown = _short_names({k for _, _, settings in buckets for k, _ in settings})
    groups = [
        Group(
            label=_label(recipe, own, settings, shown),
            recipe=recipe,
            overrides=own,
            keys=settings,
            runs=tuple(sorted(members, key=lambda r: r.info.seed)),
        )
        for (recipe, own, settings), members in buckets.items()
    ]
    order = {name: i for i, name in enumerate(recipes)}
    return sorted(
        groups,
        key=lambda g: (
            order.get(g.recipe, len(order)),
            g.recipe,
            len(g.overrides),
            _sortable(g.overrides),
            _sortable(g.keys),
        ),
    )


def pick_reference(groups: Sequence[Group], name: str, group: Group) -> Group | None:
    """Return the group of recipe ``name``, as its preset has it, with ``group``'s swept keys; None if there is none.

    If the recipe runs only with overridden switches, the one variant there is stands for it.
    """
    same = [g for g in groups if g.recipe == name and g.keys == group.keys]
    plain = [g for g in same if not g.overrides]
    if plain:
        return plain[0]
    return same[0] if len(same) == 1 else None


def own_reference(groups: Sequence[Group], group: Group, recipes: Mapping[str, RecipeInfo]) -> Group | None:
    """Return the group that ``group`` differs from in one named change.

    A recipe with overridden switches has its own preset as reference; a preset the recipe that the table names.
    """
    if group.overrides:
        plain = [g for g in groups if g.recipe == group.recipe and g.keys == group.keys and not g.overrides]
        return plain[0] if plain else None
    info = recipes.get(group.recipe)
    return pick_reference(groups, info.reference, group) if info is not None and info.reference is not None else None


def check_pairing(groups: Sequence[Group]) -> Pairing:
    """Compare the digests of initial weights, first batch and corpus, seed by seed, among groups with equal keys."""
    together: dict[tuple[Any, ...], list[tuple[Group, Run]]] = defaultdict(list)
    for group in groups:
        for run in group.runs:
            together[(group.keys, run.info.seed)].append((group, run))
    different: list[str] = []
    unknown: list[str] = []
    pairs = 0
    for (_, seed), members in together.items():
        pairs += len(members) > 1
        for what, digests in (
            ("initial weights", [run.started.init_digests for _, run in members]),
            ("first batch", [run.started.batch_digests for _, run in members]),
            ("corpus", [run.started.data_digests for _, run in members]),
        ):
            holders: dict[str, list[str]] = defaultdict(list)
            for (group, _), found in zip(members, digests, strict=True):
                for digest in found:
                    holders[digest].append(group.label)
            if len(holders) > 1:
                listed = "; ".join(f"{', '.join(names)}: {digest[:8]}" for digest, names in sorted(holders.items()))
                different.append(f"seed {seed}: {what} differ ({listed})")
            silent = [group.label for (group, _), found in zip(members, digests, strict=True) if not found]
            if silent and len(members) > 1:
                unknown.append(f"seed {seed}: no digest of the {what} yet from {', '.join(silent)}")
    if different:
        return Pairing(verdict="unpaired", problems=tuple(different))
    if unknown or not pairs:
        return Pairing(verdict="unknown", problems=tuple(unknown) or ("no seed was run with two recipes",))
    return Pairing(verdict="paired", problems=())


def code_digests(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return engine code digest to the labels of the groups that ran it."""
    out: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for digest in sorted({d for run in group.runs for d in run.started.code_digests}):
            out[digest].append(group.label)
    return dict(sorted(out.items()))


def shown_value(value: Any) -> str:
    """Write a setting's value as a sweep file has it, numbers short."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(shown_value(v) for v in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def _overrides(run: Run, runs: Sequence[Run], recipes: Mapping[str, RecipeInfo]) -> tuple[Setting, ...]:
    own = run.info.recipe_config
    info = recipes.get(run.info.recipe)
    if info is not None and info.preset:
        keys = sorted(k for k in {*own, *info.preset} if own.get(k, _MISSING) != info.preset.get(k, _MISSING))
    else:
        keys = _differing([r.info.recipe_config for r in runs if r.info.recipe == run.info.recipe])
    return tuple((k, own.get(k, _MISSING)) for k in keys)


def _swept(runs: Sequence[Run]) -> list[tuple[Setting, ...]]:
    configs = [run.info.config for run in runs]
    keys = _differing(configs)
    if "model.name" in keys:
        shapes: dict[Any, set[tuple[Any, ...]]] = defaultdict(set)
        for config in configs:
            shapes[config.get("model.name")].add(tuple(config.get(k) for k in keys if k.startswith("model.")))
        if all(len(s) == 1 for s in shapes.values()):  # the name says it all
            keys = [k for k in keys if k == "model.name" or not k.startswith("model.")]
    return [tuple((k, config.get(k, _MISSING)) for k in keys) for config in configs]


def _differing(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    seen: dict[str, set[Any]] = defaultdict(set)
    listed = list(configs)
    for key in {k for config in listed for k in config}:
        seen[key] = {config.get(key, _MISSING) for config in listed}
    return sorted(key for key, values in seen.items() if len(values) > 1)


def _clashes(runs: Sequence[Run], *, bucket_of: Sequence[tuple[Any, ...]]) -> list[tuple[Run, Run]]:
    first: dict[tuple[Any, ...], Run] = {}
    out = []
    for run, bucket in zip(runs, bucket_of, strict=True):
        other = first.setdefault((bucket, run.info.seed), run)
        if other is not run:
            out.append((other, run))
    return out


def _short_names(keys: set[str]) -> dict[str, str]:
    """Shorten dotted keys to their last part where that is unambiguous; ``model.name`` is the model."""
    last: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        last["model" if key == "model.name" else key.rsplit(".", 1)[-1]].append(key)
    return {key: short if len(full) == 1 else key for short, full in last.items() for key in full}


def _label(recipe: str, own: tuple[Setting, ...], settings: tuple[Setting, ...], shown: Mapping[str, str]) -> str:
    changed = ", ".join(f"{k.removeprefix('switches.')} {shown_value(v)}" for k, v in own)
    name = f"{recipe} ({changed})" if changed else recipe
    return " · ".join([name, *(f"{shown[k]} {shown_value(v)}" for k, v in settings)])


def _sortable(settings: tuple[Setting, ...]) -> tuple[tuple[Any, ...], ...]:
    return tuple(
        (k, 0, float(v), "") if isinstance(v, (int, float)) else (k, 1, 0.0, shown_value(v)) for k, v in settings
    )
