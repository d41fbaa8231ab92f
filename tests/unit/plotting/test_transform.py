"""Smoothing, differences, averages over seeds and thinning, against sums written out and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plotting.schema import PlotError
from plotting.transform import Smoothing, default_window, difference, ema, ensemble, logged_points, thin


def weighted_mean(values: np.ndarray, weight: float, k: int) -> float:
    """Closed form: the debiased EMA is the mean of the finite values so far with weights s^0, s^1, ... backwards."""
    past = [x for x in values[: k + 1] if math.isfinite(x)]
    weights = [weight**age for age in reversed(range(len(past)))]
    return math.fsum(w * x for w, x in zip(weights, past, strict=True)) / math.fsum(weights)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.9, 0.99])
def test_ema_equals_the_weighted_mean_of_the_finite_past(weight: float) -> None:
    values = np.random.default_rng(0).normal(2.0, 1.0, 200)
    values[[0, 7, 50]] = math.nan
    values[51] = math.inf
    smoothed = ema(values, weight)
    for k, x in enumerate(values):
        if math.isfinite(x):
            assert smoothed[k] == pytest.approx(weighted_mean(values, weight, k), rel=1e-12)
        else:
            assert math.isnan(smoothed[k])


def test_ema_starts_at_the_first_value_and_keeps_a_constant_exactly() -> None:
    assert ema(np.array([5.5, 3.0]), 0.9)[0] == 5.5
    constant = np.full(1000, 0.1)
    assert (ema(constant, 0.97) == constant).all()


def test_ema_continues_behind_a_gap_as_if_the_gap_were_not_there() -> None:
    values = np.arange(20.0)
    with_gap = np.insert(values, 10, [math.nan, -math.inf])
    smoothed = ema(with_gap, 0.8)
    assert np.allclose(smoothed[np.isfinite(with_gap)], ema(values, 0.8), rtol=1e-15)


@pytest.mark.parametrize("weight", [-0.1, 1.0, 1.5, math.nan])
def test_ema_refuses_weights_that_have_no_debiasing(weight: float) -> None:
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        ema(np.ones(3), weight)


@pytest.mark.parametrize(("text", "weight"), [("ema:0.9", 0.9), ("ema:0", 0.0), ("ema:9e-1", 0.9), ("none", None)])
def test_smoothing_reads_what_the_help_names(text: str, weight: float | None) -> None:
    assert Smoothing.parse(text).weight == weight


@pytest.mark.parametrize("text", ["", "ema", "ema:", "ema:1", "ema:-0.1", "ema:nan", "ema:0.9.9", "mean:5", "0.9"])
def test_smoothing_refuses_anything_else(text: str) -> None:
    with pytest.raises(PlotError, match=r"expected none, or ema:S with 0 <= S < 1") as caught:
        Smoothing.parse(text)
    assert f'--smooth "{text}"' in caught.value.problems[0]


def test_no_smoothing_hides_infinities_and_changes_nothing_else() -> None:
    values = np.array([1.0, math.inf, 2.0, math.nan])
    out = Smoothing(weight=None)(values)
    assert out[[0, 2]].tolist() == [1.0, 2.0]
    assert np.isnan(out[[1, 3]]).all()


def test_difference_uses_common_steps_only() -> None:
    run = (np.array([1, 2, 4, 5, 6]), np.array([1.0, 2.0, 4.0, math.nan, math.inf]))
    reference = (np.array([2, 3, 4, 5, 6]), np.array([0.5, 9.0, 1.0, 1.0, math.inf]))
    steps, values = difference(run, reference)
    assert steps.tolist() == [2, 4, 5, 6]
    assert values[:2].tolist() == [1.5, 3.0]
    assert np.isnan(values[2:]).all()  # inf - inf is no difference


def test_ensemble_averages_only_where_every_seed_has_a_value() -> None:
    stacked = ensemble(
        [
            (np.array([1, 2, 3, 4]), np.array([1.0, 2.0, math.nan, 4.0])),
            (np.array([1, 2, 3]), np.array([3.0, 6.0, 1.0])),
        ]
    )
    assert stacked.steps.tolist() == [1, 2, 3, 4]
    assert stacked.complete.tolist() == [True, True, False, False]
    assert stacked.mean[:2].tolist() == [2.0, 4.0]
    assert np.isnan(stacked.mean[2:]).all()
    assert stacked.sd is not None
    assert stacked.sd[:2] == pytest.approx([math.sqrt(2), math.sqrt(8)])


def test_one_series_has_no_spread() -> None:
    stacked = ensemble([(np.array([1, 2]), np.array([1.0, 2.0]))])
    assert stacked.sd is None
    assert stacked.mean.tolist() == [1.0, 2.0]
    assert len(ensemble([]).steps) == 0


def test_thinning_keeps_the_extremes_of_every_pixel_column() -> None:
    n, columns = 200_000, 500
    steps = np.arange(1, n + 1)
    values = np.random.default_rng(1).normal(size=n)
    values[123_456] = 99.0
    values[77_777] = math.nan
    x, y = thin(steps, values, columns)
    assert len(x) <= 2 * columns + 3
    assert 99.0 in y
    assert np.isnan(y).sum() == 1
    assert (np.diff(x) > 0).all()
    assert (x[0], x[-1]) == (1, n)
    column = (steps - 1) * columns // (n - 1)
    kept = (x - 1) * columns // (n - 1)
    for c in range(columns):
        inside = values[column == c]
        assert np.nanmin(y[kept == c]) == np.nanmin(inside)
        assert np.nanmax(y[kept == c]) == np.nanmax(inside)


def test_thinning_leaves_short_series_alone() -> None:
    steps, values = np.arange(1000), np.random.default_rng(2).normal(size=1000)
    x, y = thin(steps, values, 500)
    assert (x == steps).all()
    assert (y == values).all()


def test_smoothing_comes_before_thinning() -> None:
    steps, values = np.arange(5000), np.random.default_rng(3).normal(size=5000)
    full = dict(zip(steps.tolist(), ema(values, 0.95).tolist(), strict=True))
    x, y = thin(steps, ema(values, 0.95), 100)
    assert all(full[step] == value for step, value in zip(x.tolist(), y.tolist(), strict=True))


@pytest.mark.parametrize(
    ("logged", "window"), [(1, 1), (9, 1), (20, 2), (120, 12), (400, 40), (2000, 200), (4000, 200), (10_000, 500)]
)
def test_default_window_is_a_tenth_of_short_runs_and_a_twentieth_of_long_ones(logged: int, window: int) -> None:
    assert default_window(logged) == window


def test_logged_points_counts_the_cadence_of_the_engine() -> None:
    for steps in range(1, 40):
        for every in range(1, 45):
            logged = {s for s in range(1, steps + 1) if s in (1, steps) or s % every == 0}
            assert logged_points(steps, every) == len(logged), (steps, every)
