"""Smoothing, alignment, averaging over seeds and thinning: arithmetic on series, no files and no figures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from plotting.schema import BoolArray, FloatArray, IntArray, PlotError

Series = tuple[IntArray, FloatArray]
"""Steps int64[M], strictly increasing, and values float64[M]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothing:
    """How curves are smoothed before they are drawn. Tables never smooth."""

    weight: float | None
    """Weight s of the debiased exponential moving average, 0 <= s < 1, per logged point; None draws the raw curve."""

    @staticmethod
    def parse(text: str) -> Smoothing:
        """Read ``ema:0.9`` or ``none``.

        Raises:
            PlotError: for anything else; s = 1 keeps the start for ever (the curve would be 0/0) and is refused.
        """
        if text == "none":
            return Smoothing(weight=None)
        match = re.fullmatch(r"ema:([0-9.eE+-]+)", text)
        try:
            weight = float(match[1]) if match else math.nan
        except ValueError:
            weight = math.nan
        if not 0.0 <= weight < 1.0:
            raise PlotError([f'--smooth "{text}": expected none, or ema:S with 0 <= S < 1, e.g. ema:0.9'])
        return Smoothing(weight=weight)

    def __call__(self, values: FloatArray) -> FloatArray:
        """Smooth float64[M]; non-finite values come back as NaN."""
        if self.weight is None:
            return np.where(np.isfinite(values), values, np.nan)
        return ema(values, self.weight)

    def __str__(self) -> str:
        return "no smoothing" if self.weight is None else f"debiased EMA {self.weight:g}"


def ema(values: FloatArray, weight: float) -> FloatArray:
    """Return the debiased exponential moving average of float64[M].

    ``a_k = s a_(k-1) + (1-s) x_k`` from ``a_0 = 0`` and ``a_k / (1 - s^k)``, over the finite values only: a non-finite
    value leaves the state alone and is NaN in the result. The first value is subtracted before and added after, so that
    a constant series comes back as it is.

    Raises:
        ValueError: if the weight is not in [0, 1).
    """
    if not 0.0 <= weight < 1.0:
        raise ValueError(f"EMA weight {weight} must be at least 0 and below 1")
    out = np.full(len(values), np.nan)
    finite = np.isfinite(values)
    x = values[finite]
    if len(x):
        filtered = np.asarray(lfilter([1.0 - weight], [1.0, -weight], x - x[0]), dtype=np.float64)
        out[finite] = x[0] + filtered / (1.0 - weight ** np.arange(1, len(x) + 1, dtype=np.float64))
    return out


def difference(run: Series, reference: Series) -> Series:
    """Return run minus reference on the steps that both have; never interpolated. Inf and NaN give NaN."""
    steps, left, right = np.intersect1d(run[0], reference[0], assume_unique=True, return_indices=True)
    a, b = run[1][left], reference[1][right]
    out = np.full(len(steps), np.nan)
    both = np.isfinite(a) & np.isfinite(b)
    out[both] = a[both] - b[both]
    return steps.astype(np.int64), out


@dataclass(frozen=True, kw_only=True, slots=True)
class Ensemble:
    """Several series of one recipe on the union of their steps, S series on M steps."""

    steps: IntArray
    """int64[M]."""
    values: FloatArray
    """float64[S, M]; NaN where a series has no finite value."""
    complete: BoolArray
    """bool[M]: every series has a finite value here, so that the mean is a mean of all of them."""

    @property
    def mean(self) -> FloatArray:
        """Mean over all series, float64[M]; NaN where one is missing, because a mean of the survivors would flatter."""
        out = np.full(len(self.steps), np.nan)
        out[self.complete] = self.values[:, self.complete].mean(axis=0)
        return out

    @property
    def sd(self) -> FloatArray | None:
        """Standard deviation over series (n - 1), float64[M]; None for a single series, which has no spread."""
        if len(self.values) < 2:
            return None
        out = np.full(len(self.steps), np.nan)
        out[self.complete] = self.values[:, self.complete].std(axis=0, ddof=1)
        return out


def ensemble(series: Sequence[Series]) -> Ensemble:
    """Stack series on the union of their steps."""
    steps = np.unique(np.concatenate([s for s, _ in series])) if series else np.zeros(0, np.int64)
    values = np.full((len(series), len(steps)), np.nan)
    for row, (own, y) in enumerate(series):
        values[row, np.searchsorted(steps, own)] = np.where(np.isfinite(y), y, np.nan)
    complete = np.isfinite(values).all(axis=0) if len(series) else np.zeros(len(steps), np.bool_)
    return Ensemble(steps=steps.astype(np.int64), values=values, complete=complete)


def thin(steps: IntArray, values: FloatArray, columns: int) -> Series:
    """Keep the minimum and the maximum of each pixel column, for drawing only, so that a one-step spike survives.

    Series of at most two points a column, and every non-finite value, are kept as they are.
    """
    if len(steps) <= 2 * columns:
        return steps, values
    column = ((steps - steps[0]) * columns // max(int(steps[-1] - steps[0]), 1)).clip(max=columns - 1)
    edges = np.flatnonzero(np.diff(column, prepend=column[0] - 1))
    keep = ~np.isfinite(values)
    for start, stop in zip(edges, [*edges[1:], len(steps)], strict=True):
        part = values[start:stop]
        if np.isfinite(part).any():
            keep[start + int(np.nanargmin(np.where(np.isfinite(part), part, np.nan)))] = True
            keep[start + int(np.nanargmax(np.where(np.isfinite(part), part, np.nan)))] = True
    keep[[0, -1]] = True
    return steps[keep], values[keep]


def default_window(logged: int) -> int:
    """Return how many of ``logged`` points the final number averages.

    5 % of the run, or up to 200 points if that is more, but then no more than a tenth of the run: a short run that
    averaged its last 200 points would average most of its descent.
    """
    return max(1, math.ceil(logged / 20), min(200, logged // 10))


def logged_points(steps: int, log_every: int) -> int:
    """Return how many training steps a run logs by its cadence: step 1, multiples of ``log_every``, and the last."""
    multiples = steps // log_every
    return multiples + int(log_every > 1) + int(steps % log_every != 0 and steps > 1)
