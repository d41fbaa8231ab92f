"""Stitching attempts into one history, and naming the state a run is in."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plotting.clean import Run, clean, stitch
from plotting.schema import METRICS, Records
from plotting.sources.rundir import read_run
from tests.helpers.run_logs import add_event, add_steps, bare_run
from tests.helpers.synthetic_runs import Life, config, losses, write_run


def load(folder: Path) -> Run:
    return clean(read_run(folder))


def records_of(rows: list[tuple[int, int]]) -> Records:
    """Records from (attempt, step) in the order of the file."""
    attempt, step = (np.array([r[i] for r in rows], dtype=np.int64) for i in (0, 1))
    n = len(rows)
    return Records(
        step=step, attempt=attempt, tokens=step * 1024, time=np.arange(n, dtype=np.float64),
        values={m: np.arange(n, dtype=np.float64) for m in METRICS},
        present={m: np.ones(n, dtype=np.bool_) for m in METRICS},
    )  # fmt: skip


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Records of a run killed and resumed several times, each time from a step it had reached."""
    rows: list[tuple[int, int]] = []
    reached = 0
    for attempt in range(1, draw(st.integers(1, 5)) + 1):
        start = draw(st.integers(0, reached))
        end = draw(st.integers(start, start + 12))
        every = draw(st.integers(1, 4))
        rows += [(attempt, s) for s in range(start + 1, end + 1) if s % every == 0 or s == 1]
        reached = max(start, end)
    return rows


@given(lives())
@settings(deadline=None, max_examples=300)
def test_stitching_equals_replaying_the_log(rows: list[tuple[int, int]]) -> None:
    history: dict[int, int] = {}
    for line, (attempt, step) in enumerate(rows):
        later = {s for s, at in history.items() if s >= step and rows[at][0] < attempt}
        history = {s: at for s, at in history.items() if s not in later} | {step: line}
    assert np.flatnonzero(~stitch(records_of(rows))).tolist() == sorted(history.values())


def test_within_an_attempt_the_later_line_wins() -> None:
    assert stitch(records_of([(1, 1), (1, 2), (1, 2), (1, 3)])).tolist() == [False, True, False, False]


def test_what_lies_beyond_the_resume_point_is_no_history(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(s, 1, 5.0) for s in range(1, 9)] + [(5, 2, 4.0), (6, 2, 3.0)])
    run = load(folder)
    steps, values = run.series("loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert values.tolist() == [5.0] * 4 + [4.0, 3.0]
    assert run.last_step == 6
    assert run.boundaries == (5,)
    replaced = list(run.replaced("loss"))
    assert [part[0].tolist() for part in replaced] == [[5, 6, 7, 8]]


def test_attempts_out_of_order_in_the_file_are_put_in_order(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(3, 2, 1.0), (4, 2, 1.0), (1, 1, 2.0), (2, 1, 2.0), (3, 1, 2.0)])
    steps, values = load(folder).series("loss")
    assert steps.tolist() == [1, 2, 3, 4]
    assert values.tolist() == [2.0, 2.0, 1.0, 1.0]


def test_an_exact_resume_has_an_overlap_of_zero_and_the_curve_of_an_uninterrupted_run(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, config("lpt", 1), Life(stop_at=73, resume_from=60)))
    steps, values = run.series("loss")
    assert steps.tolist() == list(range(1, 121))
    assert values.tolist() == losses("lpt", 1, 120).tolist()
    assert run.overlap is not None
    assert (run.overlap.steps, run.overlap.max_abs_dloss) == (13, 0.0)
    assert (run.attempts, run.boundaries, run.status.text) == (2, (61,), "finished")


def test_a_resume_that_differs_reports_the_largest_difference_and_its_step(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0), (2, 1, 4.0), (3, 1, 3.0), (2, 2, 4.25), (3, 2, 3.5)])
    overlap = load(folder).overlap
    assert overlap is not None
    assert (overlap.steps, overlap.max_abs_dloss, overlap.step) == (2, 0.5, 3)


@pytest.mark.parametrize(("second", "expected"), [(math.nan, 0.0), (2.0, math.inf), (math.inf, math.inf)])
def test_overlap_of_a_nan_step(tmp_path: Path, second: float, expected: float) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0), (2, 1, math.nan), (2, 2, second)])
    overlap = load(folder).overlap
    assert overlap is not None
    assert overlap.max_abs_dloss == expected


def test_without_a_step_run_twice_there_is_no_overlap(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0), (2, 2, 4.0)])
    run = load(folder)
    assert run.overlap is None
    assert run.boundaries == (2,)


@pytest.mark.parametrize(
    ("life", "kind", "step", "text"),
    [
        (Life(), "finished", 20, "finished"),
        (Life(nonfinite_at=7), "nonfinite", 7, "nonfinite@7"),
        (Life(nonfinite_at=7, nonfinite_what="grad_norm"), "nonfinite", 7, "nonfinite@7"),
        (Life(stop_at=9), "unfinished", 9, "at step 9 of 20"),
        (Life(stop_at=9, cause="crash"), "unfinished", 9, "crash at step 9 of 20"),
        (Life(stop_at=9, cause="killed"), "unfinished", 9, "killed at step 9 of 20"),
    ],
    ids=str,
)
def test_states_of_a_run(tmp_path: Path, life: Life, kind: str, step: int, text: str) -> None:
    status = load(write_run(tmp_path, config("lpt", 1, steps=20), life)).status
    assert (status.kind, status.step, status.text) == (kind, step, text)


def test_states_of_a_run_without_records(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    assert load(folder).status.text == "not started"
    add_event(folder, "started", 1)
    add_event(folder, "exit", 1, code=1, cause="crash", step=0, message="")
    status = load(folder).status
    assert (status.kind, status.text) == ("not started", "crash before step 1")


def test_a_crash_of_an_earlier_attempt_is_not_the_state_of_the_next(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0)])
    add_event(folder, "exit", 1, code=1, cause="crash", step=1, message="")
    add_event(folder, "started", 2)
    add_steps(folder, [(2, 2, 4.0)])
    assert load(folder).status.text == "at step 2 of 120"


def test_a_nan_whose_record_was_lost_is_still_known_from_the_event(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0), (2, 1, 4.0)])
    add_event(folder, "nonfinite", 1, step=3, what="loss", value="nan")
    add_event(folder, "exit", 1, code=70, cause="nonfinite", step=3, message="")
    assert load(folder).status.text == "nonfinite@3"


def test_a_nan_that_a_later_attempt_replaced_is_no_longer_the_state(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0), (2, 1, math.nan), (2, 2, 4.0)])
    add_event(folder, "exit", 2, code=0, cause="finished", step=2, message="")
    run = load(folder)
    assert run.status.kind == "finished"
    assert run.nonfinite == ()


def test_every_non_finite_number_is_kept_with_its_place(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    add_steps(folder, [(1, 1, 5.0)])
    add_steps(folder, [(2, 1, 5.0)], grad_norm=math.inf)
    add_steps(folder, [(3, 1, math.nan)], grad_norm=math.nan, val_loss=math.nan)
    run = load(folder)
    assert [(p.metric, p.step) for p in run.nonfinite] == [
        ("grad_norm", 2),
        ("loss", 3),
        ("val_loss", 3),
        ("grad_norm", 3),
    ]
    assert run.status.text == "nonfinite@2"
    steps, values = run.series("loss")
    assert steps.tolist() == [1, 2, 3]
    assert math.isnan(values[2])


def test_what_started_says_is_collected_over_attempts(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "r")
    for attempt, digest in ((1, "aa"), (2, "bb")):
        add_event(folder, "submitted", attempt, code_digest=digest)
        add_event(
            folder, "started", attempt, init_digest="i", batch_digest=None, device="cpu", threads=2,
            unigram_entropy="nan" if attempt == 2 else 3.2,
        )  # fmt: skip
    add_steps(folder, [(1, 2, 5.0)])
    started = load(folder).started
    assert started.init_digests == {"i"}
    assert started.batch_digests == frozenset()
    assert started.code_digests == {"bb"}  # attempt 1 left no record that counts
    assert (started.devices, started.threads, started.unigram_entropy) == ({"cpu"}, {2}, 3.2)
