"""Means and Student intervals over seeds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Mean(NamedTuple):
    """A mean over seeds, and half the width of its interval."""

    mean: float
    half_width: float
    """Of the 95 % Student interval; infinite for one value."""
    seeds: int

    @property
    def covers_zero(self) -> bool:
        """Whether the interval does."""
        return abs(self.mean) <= self.half_width


def mean(values: Sequence[float]) -> Mean:
    """The mean with its 95 % Student interval, `t_{n-1} s / sqrt(n)`; infinite if a value is not finite."""
    count = len(values)
    if count < 2:
        return Mean(float(np.mean(values)), math.inf, count)
    if not np.all(np.isfinite(values)):
        return Mean(math.inf, math.nan, count)
    half_width = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return Mean(float(np.mean(values)), float(half_width), count)
