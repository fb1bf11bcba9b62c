"""What each sample counted, dealt out to the kernels that ran in it (pure).

Rates say what a sample should hold of each kernel: overlap × rate. What it does hold differs, since a kernel counts
less where it begins and ends than in between. The difference is shared out so that the kernels' amounts change by the
least in proportion, ``min Σ ((aₖ − eₖ) / eₖ)²`` under ``Σ aₖ = y``, which is ``aₖ = eₖ + (y − Σ e) eₖ² / Σ e²``: the
reconciliation of measurements whose errors are proportional to them (Kuehn and Davidson, *Computer Control II:
Mathematics of Control*, Chemical Engineering Progress 57 (6), 1961). So the end of a matrix product without tensor
activity is the product's, not the next kernel's, and amounts add up to what was counted.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from joulemark.attribution.clock import Floats
from joulemark.attribution.timeline import Codes


def deal(counts: Floats, overlap: sparse.csr_array, rates: Floats) -> sparse.coo_array:
    """Of one counter, what each kernel gets of each sample, shape [samples, kernels].

    Nothing is negative, and a sample's amounts add up to its count where any of its kernels has a rate.

    Args:
        counts: of each sample, shape [samples].
        overlap: time in s that each kernel ran in each sample, shape [samples, kernels].
        rates: of each kernel in counts per s, shape [kernels].
    """
    held = overlap.tocoo()
    row, n = held.row, len(counts)
    expected = held.data * rates[held.col]

    def total(of_each: Floats) -> Floats:
        """Of each sample, where that is more than nothing."""
        sums = np.bincount(row, of_each, n)
        return np.where(sums > 0, sums, 1.0)

    left = counts - np.bincount(row, expected, n)
    largest = np.zeros(n)
    np.maximum.at(largest, row, expected)
    relative = expected / np.where(largest > 0, largest, 1.0)[row]  # squares of small counts would underflow
    amounts = np.maximum(expected + left[row] * relative**2 / total(relative**2)[row], 0.0)
    amounts *= (counts / total(amounts))[row]
    return sparse.coo_array((amounts, (row, held.col)), held.shape)


def per_step(
    parts: list[tuple[sparse.csr_array, Floats, Codes]], rates: Floats, steps: Codes
) -> Floats:
    """Amounts of kernels in each step, shape [kernels, counters, steps].

    Args:
        parts: per window the overlaps with kernels, the counts, shape [samples, counters], and each sample's step.
        rates: shape [kernels, counters].
        steps: their numbers, ascending.
    """
    out = np.zeros((*rates.shape, len(steps)))
    for overlap, counts, step in parts:
        number = np.searchsorted(steps, step)
        for counter in range(rates.shape[1]):
            dealt = deal(counts[:, counter], overlap, rates[:, counter])
            np.add.at(out[:, counter], (dealt.col, number[dealt.row]), dealt.data)
    return out
