"""Which recipes of a sweep can be compared pair by pair (design: same seed, weights, data order and total steps)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.recipes.table import RECIPES


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRun:
    """What pairing needs to know of a run."""

    recipe: str
    """Name of the recipe."""
    label: str
    """The recipe for people: its name, and the switches that were overridden."""
    variant: str
    """Canonical JSON of the whole recipe, overridden switches included."""
    group: tuple[int, str]
    """Seed, and canonical JSON of all else that changes results; runs of one group differ in the recipe alone."""
    differing: dict[str, Any]
    """The swept keys that are not the recipe's, for the message."""


def find_unpaired(runs: Sequence[PairedRun]) -> tuple[list[str], list[str]]:
    """Return (reasons why recipes cannot be compared, notes about single runs without a partner).

    A recipe's partners are bf16 (the first recipe of the sweep if there is no bf16), its reference in the recipe table,
    and the same recipe with other switches, as far as the sweep has them; bf16's are all the others. A recipe that has
    partners but shares a group with none of them cannot be compared with anything: that is a reason. One that shares
    some groups can be compared there; its other runs are notes.
    """
    groups: dict[str, dict[tuple[int, str], PairedRun]] = {}
    for run in runs:
        groups.setdefault(run.variant, {})[run.group] = run
    names = {variant: next(iter(members.values())).recipe for variant, members in groups.items()}
    anchor = "bf16" if "bf16" in names.values() else next(iter(names.values()), "")
    reasons, notes = [], []
    for variant, members in groups.items():
        name = names[variant]
        wanted = {anchor, RECIPES[name].reference, name}
        partners = [v for v, its_name in names.items() if v != variant and (name == anchor or its_name in wanted)]
        if not partners:
            continue
        alone = members.keys() - {group for partner in partners for group in groups[partner]}
        if len(alone) == len(members):
            reasons.append(_reason(members, [groups[partner] for partner in partners]))
        elif alone:
            few = f"{len(alone)} run{'s' if len(alone) > 1 else ''}"
            label = next(iter(members.values())).label
            notes.append(f"{few} of {label} without a partner: in the curves, but not in paired differences")
    return reasons, notes


def _reason(members: dict[tuple[int, str], PairedRun], partners: list[dict[tuple[int, str], PairedRun]]) -> str:
    """Say which keys keep a recipe from its nearest partner."""
    one = next(iter(members.values()))
    others = [run for runs in partners for run in runs.values()]
    keys = min(([k for k, v in one.differing.items() if other.differing[k] != v] for other in others), key=len)
    labels = " or ".join(dict.fromkeys(other.label for other in others))
    return (
        f"recipe {one.label} shares no seed and settings with {labels}: their runs differ in {', '.join(keys)} as "
        "well, so a difference in loss could come from either"
    )
