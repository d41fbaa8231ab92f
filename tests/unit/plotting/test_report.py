"""The table and the sentences: what is averaged, what is compared, and what may be said of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lptctl.commands.plot import recipe_infos
from plotting.api import Options, Report, analyse
from plotting.schema import PlotError
from tests.helpers.run_logs import add_event, add_steps, bare_run
from tests.helpers.synthetic_runs import ADVENTURES, Life, config, losses, write_run, write_sweep

INFOS = recipe_infos()


def report_on(folder: Path, **options: Any) -> Report:
    return analyse([folder], options=Options(**options), recipes=INFOS)


def texts(report: Report, start: str = "") -> list[str]:
    return [n.text for n in report.notes if n.text.startswith(start)]


def by_label(report: Report) -> Mapping[str, Any]:
    return {row.group.label: row for row in report.rows}


def tail(recipe: str, seed: int, steps: int = 120, window: int = 12) -> float:
    return float(losses(recipe, seed, steps)[-window:].mean())


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Five recipes with three finished seeds each."""
    return report_on(write_sweep(tmp_path_factory.mktemp("three")))


@pytest.fixture(scope="module")
def adventures(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """One run resumed, one NaN, one still running."""
    return report_on(write_sweep(tmp_path_factory.mktemp("adventures"), lives=ADVENTURES))


def test_rows_are_means_over_seeds_of_the_last_logged_steps(three: Report) -> None:
    row = by_label(three)["lpt"]
    values = [tail("lpt", seed) for seed in (1, 2, 3)]
    assert (row.window, row.at_step, row.is_final, row.seeds_used) == (12, 120, True, (1, 2, 3))
    assert row.loss.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert row.loss.sd == pytest.approx(statistics.stdev(values), rel=1e-9)
    assert row.val_step == 120
    assert row.loss.n == 3


def test_gaps_are_paired_by_seed(three: Report) -> None:
    row = by_label(three)["lpt"]
    for reference, found in (("bf16", row.against_baseline), ("baseline", row.against_reference)):
        differences = [tail("lpt", s) - tail(reference, s) for s in (1, 2, 3)]
        assert found.reference == reference
        assert found.loss.mean == pytest.approx(statistics.fmean(differences), abs=1e-12)
        half = 4.30265 * statistics.stdev(differences) / math.sqrt(3)
        assert found.loss.high - found.loss.mean == pytest.approx(half, rel=1e-4)
    # The seeds' common noise cancels in pairs: the spread of the gap is far below that of the losses.
    assert row.against_baseline.loss.sd < 0.3 * row.loss.sd


def test_the_baseline_has_no_gap_and_a_relative_step_time_of_one(three: Report) -> None:
    rows = by_label(three)
    assert rows["bf16"].against_baseline is None
    assert rows["bf16"].against_reference is None
    assert rows["bf16"].time_ratio == 1.0
    assert rows["lpt"].time_ratio == pytest.approx(3.0, rel=0.03)


def test_another_baseline_is_measured_from(three: Report, tmp_path: Path) -> None:
    report = report_on(write_sweep(tmp_path), baseline="lpt")
    rows = by_label(report)
    assert rows["lpt"].against_baseline is None
    forth, back = rows["bf16"].against_baseline.loss, by_label(three)["lpt"].against_baseline.loss
    assert forth.mean == pytest.approx(-back.mean, abs=1e-12)
    assert report.table()[0][4] == "Δ to lpt [95 %]"


def test_a_finished_comparison_has_no_warning(three: Report) -> None:
    assert texts(three, "Paired: per seed, all recipes share initial weights, first batch and corpus.")
    assert not [n for n in three.notes if n.level == "warning"]
    assert not three.is_flawed
    assert three.num_runs == 15


def test_resolved_and_unresolved_differences_are_told_apart(three: Report) -> None:
    resolved, unresolved = "".join(texts(three, "Resolved")), "".join(texts(three, "Not resolved"))
    for row in three.rows:
        for c in (row.against_baseline, row.against_reference):
            if c is not None:
                name = f"{row.group.label} - {c.reference} = "
                assert (name in resolved) == c.loss.is_resolved
                assert (name in unresolved) == (not c.loss.is_resolved)
    assert "baseline - bf16 = +0.05" in resolved
    assert texts(three, "Intervals are per comparison: of 7 without any true difference about 0.35 would exclude 0")


def test_too_short_a_run_says_that_it_separates_nothing(tmp_path: Path) -> None:
    for recipe, gaps in (("bf16", (0.0, 0.0)), ("lpt", (0.01, -0.004)), ("uos", (-0.02, 0.05))):
        for seed, gap in enumerate(gaps, start=1):
            folder = bare_run(tmp_path / "s" / f"{recipe}{seed}", config(recipe, seed, steps=8))
            add_steps(folder, [(s, 1, 5.0 + gap) for s in range(1, 9)])
            add_event(folder, "exit", 1, code=0, cause="finished", step=8, message="")
    report = report_on(tmp_path / "s")
    (text,) = texts(report, "Not resolved")
    assert text.startswith("Not resolved: too short, or too few seeds (2), to separate lpt - bf16 = +0.0030 (")
    assert "uos - bf16 = +0.0150 (" in text
    assert "uos - lpt = +0.0120 (" in text
    for row in report.rows[1:]:
        assert row.against_baseline is not None
        assert f"({row.against_baseline.loss.detectable:.2g})" in text
    assert not texts(report, "Resolved")


def test_one_seed_has_no_interval_anywhere(tmp_path: Path) -> None:
    report = report_on(write_sweep(tmp_path, recipes=("bf16", "baseline", "lpt"), seeds=(1,)))
    header, cells = report.table()
    assert "±" not in str(cells)
    assert "[+" not in str(cells)
    assert "(1 seed, no interval)" in cells[1][header.index("Δ to bf16 [95 %]")]
    (text,) = texts(report, "One seed pair only")
    assert text.startswith("One seed pair only: baseline - bf16, lpt - bf16, lpt - baseline. Without a spread")
    assert not texts(report, "Resolved")
    assert not texts(report, "Not resolved")


def test_a_nan_run_stays_in_the_table_and_its_group_says_so(adventures: Report) -> None:
    row = by_label(adventures)["baseline"]
    assert row.seeds_used == (1, 3)
    assert row.status == "2 finished; seed 2: nonfinite@88"
    assert row.loss.mean == pytest.approx((tail("baseline", 1) + tail("baseline", 3)) / 2)
    assert row.against_baseline.left_out == (2,)
    header, cells = adventures.table()
    cell = dict(zip(header, cells[1], strict=True))
    assert (cell["seeds"], cell["status"], cell["non-finite blocks"]) == ("2 of 3", row.status, "3")
    assert texts(adventures, "NON-FINITE") == [
        "NON-FINITE: baseline: 1 of 3 seeds (seed 2 at step 88). Its numbers are those of the other 2 seeds and "
        "flatter it."
    ]
    assert adventures.is_flawed


def test_a_group_of_nan_runs_only_has_no_numbers_but_a_row(tmp_path: Path) -> None:
    lives = {("lpt", s): Life(nonfinite_at=9) for s in (1, 2)}
    report = report_on(write_sweep(tmp_path, recipes=("bf16", "lpt"), seeds=(1, 2), steps=20, lives=lives))
    row = by_label(report)["lpt"]
    assert (row.loss, row.val_loss, row.against_baseline, row.seeds_used) == (None, None, None, ())
    assert row.status == "nonfinite@9"
    assert texts(report, "NON-FINITE") == ["NON-FINITE: lpt: 2 of 2 seeds (seed 1 at step 9, seed 2 at step 9)."]
    assert report.table()[1][1][:5] == ["lpt", "2", "–", "–", "–"]


def test_an_unfinished_seed_is_left_out_and_named(adventures: Report) -> None:
    row = by_label(adventures)["uos"]
    assert row.seeds_used == (1, 2)
    assert row.status == "2 finished; seed 3: at step 70 of 120"
    assert any("UNFINISHED: 1 of 15 runs (uos seed 3: at step 70 of 120)" in t for t in texts(adventures))
    assert texts(adventures, "A last line was not (yet) written whole and is left out: uos seed 3 (31 bytes).")


def test_while_nothing_has_finished_the_common_part_is_compared(tmp_path: Path) -> None:
    lives = {("bf16", 1): Life(stop_at=50), ("lpt", 1): Life(stop_at=30), ("uos", 1): Life(stop_at=1)}
    report = report_on(write_sweep(tmp_path, recipes=("bf16", "lpt", "uos"), seeds=(1,), lives=lives))
    row = by_label(report)["lpt"]
    expected = (losses("lpt", 1, 120) - losses("bf16", 1, 120))[18:30].mean()
    assert (row.is_final, row.at_step, row.against_baseline.at_step) == (False, 30, 30)
    assert row.against_baseline.loss.mean == pytest.approx(expected, abs=1e-12)
    assert texts(report, "PROVISIONAL")[0].startswith("PROVISIONAL: no finished pair yet for lpt - bf16 at step 30")
    header, cells = report.table()
    cell = dict(zip(header, cells[1], strict=True))
    assert cell["train loss"].endswith("*")
    assert cell["Δ to bf16 [95 %]"].endswith("at step 30")


def test_resumes_are_judged_by_their_overlap(adventures: Report, tmp_path: Path) -> None:
    assert texts(adventures, "Resumed bit for bit: 1 run repeated 13 steps with the same loss (largest |Δloss| 0).")
    assert by_label(adventures)["lpt"].attempts == 2
    life = {("lpt", 1): Life(stop_at=73, resume_from=60, resume_error=0.125)}
    report = report_on(write_sweep(tmp_path, recipes=("bf16", "lpt"), seeds=(1,), lives=life))
    (text,) = texts(report, "RESUME DIFFERS")
    assert text.startswith("RESUME DIFFERS: lpt seed 1 repeated 13 steps with losses up to 0.125 nats/token apart")
    assert report.is_flawed


def test_unpaired_runs_are_a_warning(tmp_path: Path) -> None:
    life = {("lpt", 1): Life(init_digest="beef" * 4)}
    report = report_on(write_sweep(tmp_path, recipes=("bf16", "lpt"), seeds=(1, 2), steps=10, lives=life))
    assert report.pairing.verdict == "unpaired"
    assert texts(report, "UNPAIRED: seed 1: initial weights differ (bf16: 00000000; lpt: beefbeef). Differences")
    assert report.is_flawed


def test_runs_of_two_code_versions_are_a_warning(tmp_path: Path) -> None:
    life = {("lpt", 1): Life(code_digest="0ld0" * 16)}
    report = report_on(write_sweep(tmp_path, recipes=("bf16", "lpt"), seeds=(1, 2), steps=10, lives=life))
    (text,) = texts(report, "MIXED CODE")
    assert "2 versions of the engine (0ld00ld0: lpt; c0dec0de: bf16, lpt)" in text
    assert report.is_flawed


def test_without_the_baseline_the_recipes_there_are_are_named(tmp_path: Path) -> None:
    report = report_on(write_sweep(tmp_path, recipes=("lpt", "uos"), seeds=(1, 2), steps=10))
    (text,) = texts(report, "NO BASELINE")
    assert text.endswith("Choose another with --baseline (recipes here: lpt, uos).")
    assert by_label(report)["uos"].against_reference.reference == "lpt"


def test_a_recipe_without_a_partner_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, config("bf16", 1, steps=10))
    folder = write_run(tmp_path, config("lpt", 2, steps=10)).parent
    report = report_on(folder)
    assert texts(report, "NO PARTNER: lpt: no usable bf16 run with the same settings and seed.")


def test_the_control_is_not_resolved_or_is_a_warning(three: Report, tmp_path: Path) -> None:
    (text,) = texts(three, "midmax is an A/A control of lpt")
    assert text.endswith("not resolved, as it should be.")
    for name, recipe, offset in (("lpt", "lpt", 0.0), ("midmax", "midmax", 0.25)):
        for seed in (1, 2):
            folder = bare_run(tmp_path / "sweep" / f"{name}{seed}", config(recipe, seed, steps=20))
            add_steps(folder, [(s, 1, 3.0 + offset + 0.001 * seed * s * (name == "lpt")) for s in range(1, 21)])
            add_event(folder, "exit", 1, code=0, cause="finished", step=20, message="")
    failing = report_on(tmp_path / "sweep", baseline="lpt")
    (text,) = texts(failing, "A/A CONTROL FAILS")
    assert "Treat differences of up to 0.22 as noise of this setup." in text
    assert failing.is_flawed


def test_bitwise_equal_runs_are_called_equal(tmp_path: Path) -> None:
    for recipe in ("lpt", "midmax"):
        for seed in (1, 2):
            folder = bare_run(tmp_path / "s" / f"{recipe}{seed}", config(recipe, seed, steps=5))
            add_steps(folder, [(s, 1, 5.0 - seed * s / 8) for s in range(1, 6)])
            add_event(folder, "exit", 1, code=0, cause="finished", step=5, message="")
    report = report_on(tmp_path / "s", baseline="lpt")
    assert texts(report, "midmax equals lpt bit for bit over the steps averaged.")
    assert not texts(report, "Not resolved")


def test_the_window_can_be_chosen_and_must_fit(three: Report, tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, recipes=("bf16", "lpt"), seeds=(1, 2))
    row = by_label(report_on(folder, last=1))["lpt"]
    assert row.loss.mean == pytest.approx(np.mean([losses("lpt", s, 120)[-1] for s in (1, 2)]))
    with pytest.raises(PlotError) as caught:
        report_on(folder, last=121)
    assert caught.value.problems == [
        f"--last 121: the runs of {label} log 120 points; expected 1 to 120, or auto" for label in ("bf16", "lpt")
    ]


def test_a_run_that_logs_every_tenth_step_averages_points_not_steps(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, recipes=("bf16", "lpt"), seeds=(1,), steps=200, log_every=10)
    row = by_label(report_on(folder, last=3))["lpt"]
    curve = losses("lpt", 1, 200)
    logged = [s for s in range(1, 201) if s == 1 or s % 10 == 0 or s % 33 == 0]
    assert row.loss.mean == pytest.approx(np.mean([curve[s - 1] for s in logged[-3:]]))


def test_columns_without_news_are_left_out_of_the_short_table_only(three: Report, adventures: Report) -> None:
    short, full = three.table()[0], three.table(is_full=True)[0]
    assert set(full) - set(short) == {"steps", "attempts", "non-finite blocks", "status"}
    assert set(adventures.table()[0]) == set(full) - {"steps"}


def test_a_sweep_that_has_not_begun_is_a_table_without_numbers(tmp_path: Path) -> None:
    bare_run(tmp_path / "s" / "a", config("bf16", 1))
    bare_run(tmp_path / "s" / "b", config("lpt", 1))
    report = report_on(tmp_path / "s")
    assert [row.status for row in report.rows] == ["not started", "not started"]
    assert report.table()[1][1][:6] == ["lpt", "1", "–", "–", "–", "–"]
    assert report.is_flawed
