"""The SM clocks of a row's processes: which metrics follow them, and whether two sides ran at different ones (pure)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

from joulemark.regression.scatter import MIN_PROCESSES, Array

CLOCKS = ("steady_sm_clock_hz", "sm_clock_hz")
"""Where a record may hold the SM clock: of its timed steps, and of its energy windows."""

PER_CYCLE = {"device_time_s": 1, "device_time_graph_s": 1, "device_time_cold_s": 1, "throughput_per_s": -1}
"""Metrics that follow the SM clock: with +1 a time that becomes cycles, with -1 a rate that becomes work per cycle."""

CLOCK_MOVED = 0.005
"""Relative difference between the sides' SM clocks from which on a row's cycles are looked at too."""

SAME_CLOCK = 0.05
"""Chance at which two sides that ran at the same clock are taken for sides at different ones."""


def sides_differ(base: Array, new: Array) -> NDArray[np.bool_]:
    """Whether the clocks of a row's sides differ by more than :data:`CLOCK_MOVED` and than processes of one side do.

    A clock that moves from process to process alike on both sides is a part of the processes' deviation: their times
    already scatter by what it does to them. Only a clock that differs between the sides can pass for a change. A
    reading is also less than the clock of the steps that were timed: NVML tells a moment of a power regulation that
    has not come to rest, and scatters by percents where the times scatter by tenths.

    Student's test of two samples with one variance (Student, *The probable error of a mean*, Biometrika 6, 1908). With
    fewer than :data:`MIN_PROCESSES` on a side their scatter is not known, and the difference alone decides.

    Args:
        base, new: (…, processes), logarithms of the SM clocks.
    """
    difference = np.abs(new.mean(axis=-1) - base.mean(axis=-1))
    moved = np.asarray(difference > np.log1p(CLOCK_MOVED))
    counts = np.array([base.shape[-1], new.shape[-1]])
    if counts.min() < MIN_PROCESSES:
        return moved
    df = int(counts.sum()) - 2
    squares = sum(((one - one.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1) for one in (base, new))
    error = np.sqrt(squares / df * (1 / counts).sum())
    # Compared without dividing: clocks that are all alike have no scatter.
    return np.asarray(moved & (difference > special.stdtrit(df, 1 - SAME_CLOCK / 2) * error))
