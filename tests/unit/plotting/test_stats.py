"""Means, t-intervals and detectable differences, against tables, scipy's own test and simulation."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from plotting.stats import detectable_difference, estimate, paired_difference

T_975 = {1: 12.7062, 2: 4.30265, 4: 2.77645, 9: 2.26216}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom, from a printed table."""


def test_estimate_is_mean_and_sample_sd() -> None:
    values = [2.5, 2.75, 2.0, 2.25]
    found = estimate(values)
    assert found.n == 4
    assert found.mean == statistics.fmean(values)
    assert found.sd == pytest.approx(statistics.stdev(values), rel=1e-14)


def test_one_value_has_neither_spread_nor_interval() -> None:
    assert estimate([2.5]).sd is None
    one = paired_difference([0.5])
    assert (one.n, one.mean) == (1, 0.5)
    assert (one.sd, one.low, one.high, one.detectable) == (None, None, None, None)
    assert not one.is_resolved


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_interval_uses_the_t_quantile_of_the_table(n: int) -> None:
    differences = [0.01 * i * (-1) ** i + 0.02 for i in range(n)]
    found = paired_difference(differences)
    half = T_975[n - 1] * statistics.stdev(differences) / math.sqrt(n)
    assert found.low == pytest.approx(found.mean - half, rel=1e-4)
    assert found.high == pytest.approx(found.mean + half, rel=1e-4)


def test_interval_by_hand() -> None:
    found = paired_difference([1.0, 2.0, 3.0])
    assert (found.mean, found.sd) == (2.0, 1.0)
    assert found.low == pytest.approx(-0.48414, abs=1e-5)
    assert found.high == pytest.approx(4.48414, abs=1e-5)
    assert not found.is_resolved


def test_resolved_means_that_the_t_test_rejects_at_5_percent() -> None:
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(60):
        x = rng.normal(0.8, 1.0, rng.integers(2, 9))
        found, test = paired_difference(x.tolist()), stats.ttest_1samp(x, 0.0)
        interval = test.confidence_interval(0.95)
        assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
        assert found.is_resolved == (test.pvalue < 0.05)
        seen.add(found.is_resolved)
    assert seen == {True, False}


def test_pairs_without_spread_are_resolved_unless_their_difference_is_zero() -> None:
    assert not paired_difference([0.0, 0.0]).is_resolved
    assert paired_difference([0.5, 0.5]).is_resolved


@pytest.mark.parametrize("n", [2, 3, 10])
def test_detectable_difference_is_found_in_80_percent_of_simulated_experiments(n: int) -> None:
    sd, trials = 0.5, 40_000
    true = detectable_difference(sd, n)
    x = np.random.default_rng(n).normal(true, sd, (trials, n))
    found = (stats.ttest_1samp(x, 0.0, axis=1).pvalue < 0.05).mean()
    assert found == pytest.approx(0.80, abs=4 * math.sqrt(0.8 * 0.2 / trials))


def test_detectable_difference_of_many_pairs_is_the_normal_one() -> None:
    normal = (1.959964 + 0.841621) * 2.0 / math.sqrt(2000)
    assert detectable_difference(2.0, 2000) == pytest.approx(normal, rel=2e-3)
    assert detectable_difference(1.0, 2) > 5 * (1.959964 + 0.841621) / math.sqrt(2)


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_non_finite_values_are_refused(values: list[float]) -> None:
    for function in (estimate, paired_difference):
        with pytest.raises(ValueError, match="at least one finite value"):
            function(values)


def test_a_single_pair_has_no_detectable_difference() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        detectable_difference(1.0, 1)
