"""Medians with honest intervals, and the few other statistics that the harness rests on (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Summary:
    """Median of samples with its interval.

    Args:
        median, iqr: in the samples' unit.
        interval: (lo, hi) of the median, None for fewer than two samples.
        confidence: of the interval; below the wanted one when there are too few samples to reach it.
        n: number of samples.
    """

    median: float
    iqr: float
    interval: tuple[float, float] | None
    confidence: float
    n: int

    @property
    def relative_half_width(self) -> float:
        """Half the interval over the median; infinite without an interval."""
        if self.interval is None or self.median == 0:
            return math.inf
        return (self.interval[1] - self.interval[0]) / 2 / abs(self.median)


def _binomial_cdf_half(n: int) -> list[float]:
    """Cumulative distribution of Binomial(n, 1/2) at 0 … n."""
    total, out = 0.0, []
    for k in range(n + 1):
        log_p = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        total += math.exp(log_p)
        out.append(min(total, 1.0))
    return out


def _order_statistic_ranks(n: int, confidence: float) -> tuple[int, float]:
    """Rank r (from 0) so that [x_(r), x_(n-1-r)] covers the median with at least ``confidence``, and its true coverage.

    Distribution-free: the number of samples under the median is Binomial(n, 1/2) (Conover, *Practical
    Nonparametric Statistics*, section 3.2). With fewer than six samples 95 % cannot be reached: the whole
    range is taken and its true coverage, 1 - 2^(1-n), returned.
    """
    if n > 1000:
        z = 1.959963984540054 if confidence == 0.95 else float(_normal_quantile(0.5 + confidence / 2))
        return max(0, math.floor((n - z * math.sqrt(n)) / 2) - 1), confidence
    cdf = _binomial_cdf_half(n)
    rank = 0
    while rank + 1 < n / 2 and 1 - 2 * cdf[rank + 1] >= confidence:
        rank += 1
    return rank, max(0.0, 1 - 2 * cdf[rank])


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def summarize(samples: Sequence[float], confidence: float = 0.95) -> Summary:
    """Median, interquartile range and distribution-free interval of the median.

    Args:
        samples: at least one finite number.
        confidence: wanted coverage of the interval.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    data = np.sort(np.asarray(samples, dtype=float))
    if data.size == 0 or not np.isfinite(data).all():
        finite = int(np.isfinite(data).sum())
        raise ValueError(f"a summary needs finite samples, got {data.size} of which {finite} finite")
    q1, median, q3 = (float(q) for q in np.quantile(data, (0.25, 0.5, 0.75)))
    n = int(data.size)
    if n < 2:
        return Summary(median, 0.0, None, confidence, n)
    rank, coverage = _order_statistic_ranks(n, confidence)
    return Summary(median, q3 - q1, (float(data[rank]), float(data[n - 1 - rank])), min(coverage, confidence), n)


def bootstrap_interval(
    samples: Sequence[float], confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median (Efron, 1979); None for fewer than two samples."""
    data = np.asarray(samples, dtype=float)
    if data.size < 2:
        return None
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(data, size=(draws, data.size)), axis=1)
    lo, hi = np.quantile(medians, ((1 - confidence) / 2, (1 + confidence) / 2))
    return float(lo), float(hi)


def ratio_interval_of_means(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> tuple[float, tuple[float, float] | None]:
    """Ratio of sums Σa/Σb with a Student interval over the pairs (linearized, as for a ratio estimator).

    Used for power = energy over time of consecutive windows: the noise of an edge between two windows
    cancels in the sum. None as the interval for fewer than three pairs.

    Source: Cochran, *Sampling Techniques*, section 6.4.
    """
    a, b = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    ratio = float(a.sum() / b.sum())
    if a.size < 3:
        return ratio, None
    from scipy.stats import t as student

    residual = a - ratio * b
    error = float(np.sqrt((residual**2).sum() / (a.size * (a.size - 1))) / b.mean())
    half = float(student.ppf(0.5 + confidence / 2, a.size - 1)) * error
    return ratio, (ratio - half, ratio + half)


def outliers(samples: Sequence[float], k: float = 3.0) -> list[int]:
    """Indices of samples more than ``k`` interquartile ranges outside the quartiles.

    Source: Tukey, *Exploratory Data Analysis*, 1977.
    """
    data = np.asarray(samples, dtype=float)
    if data.size < 4:
        return []
    q1, q3 = np.quantile(data, (0.25, 0.75))
    reach = k * (q3 - q1)
    return [int(i) for i in np.flatnonzero((data < q1 - reach) | (data > q3 + reach))]


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals, in their unit."""
    total, end = 0.0, -math.inf
    for lo, hi in sorted(intervals):
        if hi > end:
            total += hi - max(lo, end)
            end = hi
    return total
