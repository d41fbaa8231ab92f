"""Grouping by seed, names of groups, references, and whether equal seeds are pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lptctl.commands.plot import recipe_infos
from plotting.clean import clean
from plotting.group import Group, check_pairing, code_digests, group_runs, own_reference, pick_reference
from plotting.schema import PlotError
from plotting.sources.rundir import read_run
from tests.helpers.synthetic_runs import Life, config, write_run

INFOS = recipe_infos()


def groups_of(folder: Path, *specs: tuple[Any, int] | tuple[Any, int, dict[str, Any]], **lives: Life) -> list[Group]:
    """Write short runs given as (recipe, seed[, sections]) and group them; a life is named by recipe and seed."""
    runs = []
    for recipe, seed, *rest in specs:
        sections = {"steps": 6, **(rest[0] if rest else {})}
        name = recipe if isinstance(recipe, str) else recipe["name"]
        path = write_run(folder, config(recipe, seed, **sections), lives.get(f"{name}{seed}", Life()))
        runs.append(clean(read_run(path)))
    return group_runs(runs, INFOS)


def test_seeds_make_one_group_in_the_order_of_the_recipe_table(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ("uos", 2), ("lpt", 1), ("uos", 1), ("bf16", 1), ("baseline", 1))
    assert [g.label for g in groups] == ["bf16", "baseline", "lpt", "uos"]
    assert [run.info.seed for run in groups[3].runs] == [1, 2]
    assert list(groups[3].by_seed()) == [1, 2]


def test_an_overridden_switch_is_a_group_of_its_own_and_is_named(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ("lpt", 1), ({"name": "lpt", "scale_mode": "uos", "sr": False}, 1), ("bf16", 1))
    assert [g.label for g in groups] == ["bf16", "lpt", "lpt (scale_mode uos, sr false)"]
    assert own_reference(groups, groups[2], INFOS) is groups[1]
    assert pick_reference(groups, "lpt", groups[0]) is groups[1]


def test_the_only_variant_of_a_recipe_stands_for_it(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ({"name": "lpt", "scale_mode": "uos"}, 1), ("midmax", 1))
    assert pick_reference(groups, "lpt", groups[1]) is groups[0]
    assert own_reference(groups, groups[1], INFOS) is groups[0]
    assert own_reference(groups, groups[0], INFOS) is None


def test_swept_keys_split_groups_and_only_equal_keys_are_compared(tmp_path: Path) -> None:
    lrs = [{"optimizer": {"lr": lr}} for lr in (1e-3, 2e-3)]
    groups = groups_of(tmp_path, *((recipe, 1, lr) for recipe in ("bf16", "lpt") for lr in lrs))
    assert [g.label for g in groups] == ["bf16 · lr 0.001", "bf16 · lr 0.002", "lpt · lr 0.001", "lpt · lr 0.002"]
    assert pick_reference(groups, "bf16", groups[3]) is groups[1]


def test_keys_with_one_last_part_keep_their_whole_name(tmp_path: Path) -> None:
    groups = groups_of(
        tmp_path, ("bf16", 1), ("bf16", 1, {"validation": {"every": 2}, "training": {"steps": 8, "seq_len": 64}})
    )
    assert [g.label for g in groups] == [
        "bf16 · seq_len 64 · steps 8 · every 2",
        "bf16 · seq_len 128 · steps 6 · every 1",
    ]


def test_two_sweeps_with_equal_runs_are_told_apart_by_their_name(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, *((r, 1, {"sweep": s}) for r in ("bf16", "lpt") for s in ("a", "b")))
    assert [g.label for g in groups] == ["bf16 · sweep a", "bf16 · sweep b", "lpt · sweep a", "lpt · sweep b"]
    assert pick_reference(groups, "bf16", groups[3]) is groups[1]


def test_indistinguishable_runs_are_refused_by_name(tmp_path: Path) -> None:
    path = write_run(tmp_path, config("bf16", 1, steps=6))
    run = clean(read_run(path))
    twin = replace(run, info=replace(run.info, path=path.parent / "twin"))
    with pytest.raises(PlotError, match=r"same recipe, settings and seed \(1\)") as caught:
        group_runs([run, twin], INFOS)
    assert str(path) in caught.value.problems[0]
    assert "twin" in caught.value.problems[0]


def test_without_a_recipe_table_overrides_are_what_differs_within_the_recipe(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path, config(recipe, 1, steps=6))
        for recipe in ("lpt", {"name": "lpt", "scale_mode": "uos"}, "bf16")
    ]
    groups = group_runs([clean(read_run(p)) for p in paths], {})
    assert [g.label for g in groups] == ["bf16", "lpt (scale_mode even)", "lpt (scale_mode uos)"]


def test_equal_digests_make_pairs(tmp_path: Path) -> None:
    pairing = check_pairing(groups_of(tmp_path, ("bf16", 1), ("lpt", 1), ("bf16", 2)))
    assert (pairing.verdict, pairing.problems) == ("paired", ())


def test_other_initial_weights_are_no_pair_and_the_finding_names_them(tmp_path: Path) -> None:
    pairing = check_pairing(groups_of(tmp_path, ("bf16", 1), ("lpt", 1), lpt1=Life(init_digest="beef" * 4)))
    assert pairing.verdict == "unpaired"
    assert pairing.problems == ("seed 1: initial weights differ (bf16: 00000000; lpt: beefbeef)",)


def test_weights_that_change_between_attempts_of_one_run_are_no_pair(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ("bf16", 1), ("lpt", 1))
    run = groups[1].runs[0]
    changed = replace(run, started=replace(run.started, init_digests=run.started.init_digests | {"feed" * 4}))
    assert check_pairing([groups[0], replace(groups[1], runs=(changed,))]).verdict == "unpaired"


def test_a_run_that_has_not_told_its_digests_leaves_the_pairing_open(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ("bf16", 1), ("lpt", 1))
    run = groups[1].runs[0]
    silent = replace(run, started=replace(run.started, batch_digests=frozenset()))
    pairing = check_pairing([groups[0], replace(groups[1], runs=(silent,))])
    assert pairing.verdict == "unknown"
    assert pairing.problems == ("seed 1: no digest of the first batch yet from lpt",)


def test_without_two_recipes_of_a_seed_there_is_nothing_to_pair(tmp_path: Path) -> None:
    pairing = check_pairing(groups_of(tmp_path, ("bf16", 1), ("lpt", 2)))
    assert (pairing.verdict, pairing.problems) == ("unknown", ("no seed was run with two recipes",))


def test_runs_with_other_keys_are_not_expected_to_be_pairs(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ("bf16", 1), ("lpt", 1, {"optimizer": {"lr": 0.5}}), lpt1=Life(init_digest="beef" * 4))
    assert check_pairing(groups).verdict == "unknown"


def test_code_digests_say_who_ran_what(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ("bf16", 1), ("lpt", 1), ("uos", 1), lpt1=Life(code_digest="0ld" * 8))
    assert code_digests(groups) == {"0ld" * 8: ["lpt"], "c0de" * 16: ["bf16", "uos"]}
