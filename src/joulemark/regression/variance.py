"""How much processes of the same thing differ: few processes per row, so rows lend each other what they know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]

RESOLUTION = 1e-4
"""Smallest standard deviation that is believed, as a fraction: no clock or sensor here resolves better."""

_POOLED = 1e6
"""Degrees of freedom that stand for "all rows have one variance"."""


@dataclass(frozen=True)
class Moderated:
    """Variances between processes after each row was drawn towards the common one.

    Args:
        variance: (…, rows), of the logarithm of one process's figure.
        df: (…, rows), degrees of freedom of each.
        prior_variance, prior_df: (…, 1), what the rows have in common and how much it weighs.
    """

    variance: Array
    df: Array
    prior_variance: Array
    prior_df: Array


def moderate(variance: ArrayLike, df: ArrayLike) -> Moderated:
    """Shrink sample variances of many rows towards their common level.

    Each row's variance comes from few processes (three against three: four degrees of freedom) and is nearly
    worthless alone. The rows' true variances are taken to scatter as a scaled inverse chi-square distribution; its
    scale and degrees of freedom are estimated from the mean and the variance of the logarithms of the sample
    variances, and the posterior mean of each row replaces its own. The statistic then follows Student's
    distribution with ``prior_df + df`` degrees of freedom. Where rows differ a lot (a kernel that repeats to 0.1 %
    beside a step that waits for the host), the prior weighs little and each row speaks for itself.

    With few rows the scatter of the true variances is badly known, and taking it for zero would make the noisiest
    row cry wolf. It is therefore raised by its own standard error, so that few rows pool little.

    Source: Smyth, *Linear models and empirical Bayes methods for assessing differential expression in microarray
    experiments*, Statistical Applications in Genetics and Molecular Biology 3 (2004), sections 4 and 6.2.

    Args:
        variance: (…, rows), sample variances of logarithms; a single row stays as it is.
        df: degrees of freedom of each, broadcast against ``variance``; at least 1.

    Raises:
        ValueError: there is no row, or one without degrees of freedom.
    """
    s2 = np.maximum(np.asarray(variance, dtype=float), RESOLUTION**2)
    d = np.broadcast_to(np.asarray(df, dtype=float), s2.shape)
    rows = s2.shape[-1]
    if rows == 0 or not (d >= 1).all():
        raise ValueError("variances need at least one row and one degree of freedom each")
    if rows == 1:
        return Moderated(s2, d.copy(), s2, np.zeros_like(s2))
    half = d / 2
    centred = np.log(s2) - special.digamma(half) + np.log(half)
    level = centred.mean(axis=-1, keepdims=True)
    noise = special.polygamma(1, half).mean(axis=-1, keepdims=True)
    scatter = centred.var(axis=-1, ddof=1, keepdims=True) - noise
    scatter = np.maximum(scatter, 0.0) + np.sqrt(2.0 / (rows - 1)) * noise
    prior_df = np.minimum(2.0 * inverse_trigamma(scatter), _POOLED)
    prior = np.exp(level + special.digamma(prior_df / 2) - np.log(prior_df / 2))
    return Moderated((prior_df * prior + d * s2) / (prior_df + d), prior_df + d, prior, prior_df)


def inverse_trigamma(value: Any) -> Array:
    """The x with trigamma(x) = value, for positive values, by Newton's method (Smyth 2004, appendix)."""
    wanted = np.asarray(value, dtype=float)
    x = 0.5 + 1.0 / wanted
    for _ in range(60):
        now = special.polygamma(1, x)
        step = now * (1.0 - now / wanted) / special.polygamma(2, x)
        x = x + step
        if np.max(np.abs(step) / x) < 1e-10:
            break
    return x
