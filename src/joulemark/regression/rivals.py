"""The gates that others use, on the same data: a limit on the mean, pytest-benchmark's, and a rank test (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
Verdicts = NDArray[np.bool_]
Rival = Callable[[Sequence[Array], Sequence[Array], NDArray[np.intp], NDArray[np.intp]], Verdicts]
"""(base processes' samples, new processes' samples, base indices, new indices of (runs, processes)) → (runs,)."""

LIMIT = 0.05


def mean_limit(base: Sequence[Array], new: Sequence[Array], old: NDArray[np.intp], now: NDArray[np.intp]) -> Verdicts:
    """The mean of all samples of all processes is more than 5 % larger."""
    return np.asarray(_pooled_mean(new, now) > (1 + LIMIT) * _pooled_mean(base, old))


def pytest_benchmark(
    base: Sequence[Array], new: Sequence[Array], old: NDArray[np.intp], now: NDArray[np.intp]
) -> Verdicts:
    """``--benchmark-compare-fail=mean:5%``: one process against one (the first of each side), as its users run it.

    Source: ``PercentageRegressionCheck`` of pytest-benchmark 5: ``current / compared * 100 - 100 > 5``.
    """
    return np.asarray(_pooled_mean(new, now[:, :1]) / _pooled_mean(base, old[:, :1]) * 100 - 100 > 100 * LIMIT)


def mann_whitney(base: Sequence[Array], new: Sequence[Array], old: NDArray[np.intp], now: NDArray[np.intp]) -> Verdicts:
    """One-sided rank test of all samples of both sides at 5 %, which takes samples for independent.

    The statistic of pooled samples is the sum of those of all pairs of processes. Normal approximation with
    continuity correction. Source: Mann and Whitney, Annals of Mathematical Statistics 18 (1947).
    """
    pairwise = np.array([[_u_statistic(y, x) for x in base] for y in new])
    u = pairwise[now[:, :, None], old[:, None, :]].sum(axis=(1, 2))
    sizes = [np.array([len(one) for one in side]) for side in (base, new)]
    n, m = sizes[0][old].sum(axis=1), sizes[1][now].sum(axis=1)
    z = (u - n * m / 2 - 0.5) / np.sqrt(n * m * (n + m + 1) / 12)
    return np.asarray(special.ndtr(-z) < LIMIT)


RIVALS: Mapping[str, Rival] = {
    "mean + 5 %": mean_limit,
    "--benchmark-compare-fail=mean:5%": pytest_benchmark,
    "Mann-Whitney, 5 %": mann_whitney,
}


def _pooled_mean(processes: Sequence[Array], index: NDArray[np.intp]) -> Array:
    sums, counts = (np.array([function(one) for one in processes]) for function in (np.sum, len))
    return np.asarray(sums[index].sum(axis=1) / counts[index].sum(axis=1))


def _u_statistic(larger: Array, smaller: Array) -> float:
    """How many pairs have ``larger`` above ``smaller``; ties count half."""
    ordered = np.sort(smaller)
    below, up_to = (np.searchsorted(ordered, larger, side=side).sum() for side in ("left", "right"))
    return float(below + up_to) / 2
