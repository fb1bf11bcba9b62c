"""What each sample counted, dealt out to the kernels that ran in it (pure).

Rates say what a sample should hold of each kernel: overlap × rate. What it does hold differs, since a kernel counts
less where it begins and ends than in between. The difference is shared out so that kernels change by the least in
proportion, ``min Σ ((aₖ − eₖ) / eₖ)²`` under ``Σ aₖ = y``, which is ``aₖ = eₖ + (y − Σ e) eₖ² / Σ e²``: the
reconciliation of measurements whose errors are proportional to them (Kuehn and Davidson, *Computer Control II:
Mathematics of Control*, Chemical Engineering Progress 57 (6), 1961). So a matrix product's end without tensor activity
is the product's, not the next kernel's.

A long kernel's rate is that of its middle, seen in samples that it fills. A short one's is a mean over all of it, so it
keeps what that says, and its part of the difference is left over: over all samples such parts cancel by themselves, as
far as the rates are right, which the run's totals show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

from joulemark.attribution.clock import Floats
from joulemark.attribution.timeline import Codes

Flags = npt.NDArray[np.bool_]


def deal(counts: Floats, overlap: sparse.csr_array, rates: Floats, long: Flags) -> sparse.coo_array:
    """Of one counter, what each kernel gets of each sample, shape [samples, kernels]; nothing is negative.

    Samples in which only long kernels ran, of which one has a rate, are given whole.

    Args:
        counts: of each sample, shape [samples].
        overlap: time in s that each kernel ran in each sample, shape [samples, kernels].
        rates: of each kernel in counts per s, shape [kernels].
        long: whether its rate is that of its middle, shape [kernels].
    """
    held = overlap.tocoo()
    row, n = held.row, len(counts)
    expected = held.data * rates[held.col]

    def total(some: Floats) -> Floats:
        return np.bincount(row, some, n).astype(np.float64)

    largest = np.zeros(n)
    np.maximum.at(largest, row, expected)
    relative = expected / _or_1(largest)[row]  # squares of small counts would underflow
    change = (counts - total(expected)) / _or_1(total(relative**2))
    amounts = np.where(long[held.col], np.maximum(expected + change[row] * relative**2, 0.0), expected)
    return sparse.coo_array((amounts, (row, held.col)), held.shape)


def _or_1(some: Floats) -> Floats:
    """For a division: nothing is divided where there is nothing."""
    return np.where(some > 0, some, 1.0)


@dataclass(frozen=True)
class Part:
    """A window as it is dealt out.

    Args:
        overlap: time in s that each kernel ran in each sample, shape [samples, kernels].
        counts: shape [samples, counters].
        step: of each sample.
    """

    overlap: sparse.csr_array
    counts: Floats
    step: Codes


def per_step(parts: Iterable[Part], rates: Floats, long: Flags, steps: Codes) -> Floats:
    """Amounts of kernels in each step, shape [kernels, counters, steps].

    Args:
        parts: all windows.
        rates: shape [kernels, counters].
        long: whether a kernel's rate is that of its middle, shape [kernels].
        steps: their numbers, ascending.
    """
    out = np.zeros((*rates.shape, len(steps)))
    for part in parts:
        number = np.searchsorted(steps, part.step)
        for counter in range(rates.shape[1]):
            dealt = deal(part.counts[:, counter], part.overlap, rates[:, counter], long)
            np.add.at(out[:, counter], (dealt.col, number[dealt.row]), dealt.data)
    return out


def doubt(parts: Sequence[Part], rates: Floats, long: Flags, members: Floats) -> Floats:
    """Standard errors of what sharing out adds to rows of kernels, over all steps, shape [rows, counters].

    By the same reconciliation: where a long kernel's amount in a sample is off ``e`` by ``σ e`` and the sum of all is
    known, a row with ``S`` = Σ e² of its kernels, of ``T`` of all, has the variance ``σ² S (1 − S / T)``. σ is how far
    samples are off what rates say. Steps repeat the same neighbours, so they do not make it smaller.

    Args:
        parts: all windows.
        rates: shape [kernels, counters].
        long: whether a kernel's rate is that of its middle, shape [kernels].
        members: which kernels each row holds, shape [rows, kernels].
    """
    of_row = sparse.csr_array(members[:, long].T)
    variance, off, squares = (np.zeros((n, rates.shape[1])) for n in (len(members), 1, 1))
    for part in parts:
        together = part.overlap[:, long]
        mixed = np.diff(together.indptr) > 1
        together, short = together[mixed], part.overlap[:, ~long][mixed]
        left = part.counts[mixed] - short @ rates[~long]
        off += ((left - together @ rates[long]) ** 2).sum(axis=0)
        for counter, rate in enumerate(rates[long].T):
            square = (together * rate[None, :]).power(2)
            whole, rows = square.sum(axis=1), square @ of_row
            squares[:, counter] += whole.sum()
            beside = rows.power(2).multiply(1 / _or_1(whole)[:, None])
            variance[:, counter] += rows.sum(axis=0) - beside.sum(axis=0)
    return np.sqrt(np.maximum(variance, 0.0) * off / _or_1(squares))
