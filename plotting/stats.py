"""Means, paired differences and what a comparison could have seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import nct, t

LEVEL = 0.95
"""Confidence of intervals; a difference is resolved at the matching two-sided 5 % test."""
POWER = 0.80
"""Power of the smallest detectable difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds."""

    n: int
    """Seeds averaged."""
    mean: float
    """Mean over seeds, in the unit of the values."""
    sd: float | None
    """Standard deviation over seeds (n - 1); None for one seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Mean of differences of seed pairs with Student's t-interval. One pair has neither spread nor interval."""

    n: int
    """Pairs."""
    mean: float
    """Mean difference, run minus reference: positive is worse for a loss."""
    sd: float | None
    """Standard deviation of the pairs' differences (n - 1); None for one pair."""
    low: float | None
    """Lower end of the 95 % interval; None for one pair."""
    high: float | None
    """Upper end of the 95 % interval; None for one pair."""
    detectable: float | None
    """Smallest true difference that this many pairs with this spread find with 80 % power; None for one pair."""

    @property
    def is_resolved(self) -> bool:
        """True if there is an interval and it excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and standard deviation of finite values, one a seed.

    Raises:
        ValueError: for no value, or a non-finite one; leaving such seeds out is the caller's to decide and to say.
    """
    x = _checked(values)
    return Estimate(n=len(x), mean=float(x.mean()), sd=float(x.std(ddof=1)) if len(x) > 1 else None)


def paired_difference(differences: Sequence[float]) -> PairedDifference:
    """Return the mean of paired differences with ``mean ± t(0.975, n-1) sd / sqrt(n)``.

    Raises:
        ValueError: for no difference, or a non-finite one.
    """
    x = _checked(differences)
    n, mean = len(x), float(x.mean())
    if n == 1:
        return PairedDifference(n=1, mean=mean, sd=None, low=None, high=None, detectable=None)
    sd = float(x.std(ddof=1))
    half = float(t.ppf(0.5 + LEVEL / 2, n - 1)) * sd / math.sqrt(n)
    return PairedDifference(
        n=n, mean=mean, sd=sd, low=mean - half, high=mean + half, detectable=detectable_difference(sd, n)
    )


def detectable_difference(sd: float, n: int) -> float:
    """Return the true difference that a two-sided 5 % paired t-test of n pairs finds with 80 % power.

    Solved with the noncentral t distribution, because the normal approximation promises too much for a few pairs:
    for n = 2 it is out by a factor of nearly six.

    Raises:
        ValueError: for fewer than two pairs, whose spread is unknown.
    """
    if n < 2:
        raise ValueError(f"{n} pairs have no spread; at least 2 are needed")
    critical = float(t.ppf(0.5 + LEVEL / 2, n - 1))

    def missing(shift: float) -> float:
        # The other tail (finding the difference with the wrong sign) is below 1e-3 here and would only flatter.
        return float(nct.sf(critical, n - 1, shift)) - POWER

    return float(brentq(missing, 0.1, 20.0 * critical)) * sd / math.sqrt(n)


def _checked(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    x = np.asarray(values, dtype=np.float64)
    if not len(x) or not np.isfinite(x).all():
        raise ValueError(f"expected at least one finite value, got {list(values)}")
    return x
