"""Levels of a step and of its phases, from series whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from joulemark.counter_series import COUNTERS, CounterSeries
from joulemark.metrics import AMOUNTS, LEVELS
from joulemark.utilization.levels import (
    COUNTS,
    PHASE_TIME,
    SHARES,
    Counted,
    Stretch,
    combine,
    levels_of,
    phases_of,
    rows_of,
    share,
    unlike,
)


def series(sample_s=1e-3, tier="pm_sampling", start=5.0, source=None, **values):
    n = len(next(iter(values.values())))
    edges = start + sample_s * np.arange(n + 1)
    units = {name: COUNTERS[name].unit for name in values}
    arrays = {name: np.array(one, float) for name, one in values.items()}
    return CounterSeries(tier, "pass1", edges[:-1], edges[1:], arrays, units, source=source or {})


def test_every_level_and_amount_has_a_counter_that_exists():
    assert set(SHARES) | {"dram_read_fraction", "l1_hit_fraction"} == set(LEVELS)
    assert set(COUNTS) == set(AMOUNTS)
    assert {*SHARES.values(), *(counter for counter, _ in COUNTS.values())} <= set(COUNTERS)
    assert all(COUNTERS[counter].unit == "1" for counter in SHARES.values())


def test_shares_are_means_over_time_and_amounts_are_per_step():
    one = Counted(series(pipe_tensor=[1.0, 0.0], l1_sectors=[10, 30], l1_sector_hits=[5, 5], instructions=[7, 9]), 4)
    assert levels_of([one]) == {
        "tensor_active_fraction": [pytest.approx(0.5)],
        "l1_hit_fraction": [0.25],
        "instructions_per_step": [4.0],
        "l1_bytes": [40 * 32 / 4],
    }


def test_reads_are_what_writes_leave_and_never_less_than_nothing():
    assert share(series(dram_throughput=[0.5], dram_write_throughput=[0.2]), "dram_read_fraction") == pytest.approx(0.3)
    assert share(series(dram_throughput=[0.1], dram_write_throughput=[0.2]), "dram_read_fraction") == 0
    assert share(series(dram_throughput=[0.1]), "dram_read_fraction") is None


def test_what_no_pass_counted_is_not_there():
    assert levels_of([Counted(series(sm_active=[0.5]), 1)]) == {"sm_active_fraction": [0.5]}
    assert levels_of([]) == {}
    assert rows_of([]) == []


def test_gpm_ends_before_the_work_so_counts_are_scaled_to_the_run():
    one = Counted(series(0.1, "gpm", source={"run_s": 0.4}, pcie_rx_bytes=[30, 30]), 2)
    assert levels_of([one])["pcie_rx_bytes"] == [pytest.approx(60 * 0.4 / 0.2 / 2)]


PHASES = (
    Stretch("forward", 0.0, 0.004),
    Stretch("backward", 0.004, 0.010),
    Stretch("forward", 0.010, 0.014),
    Stretch("backward", 0.014, 0.020),
)
SAMPLES = [1] * 4 + [2] * 6 + [1] * 4 + [2] * 6


def test_samples_fall_to_the_phase_in_which_they_lie():
    one = Counted(series(instructions=SAMPLES, pipe_tensor=[0.1 * x for x in SAMPLES]), 2, PHASES)
    assert {phase: len(found) for phase, found in phases_of(one).items()} == {"forward": 8, "backward": 12}
    rows = {(row["phase"], row["level"]): row["value"] for row in rows_of([one])}
    assert rows["forward", "instructions_per_step"] == 4
    assert rows["backward", "instructions_per_step"] == 12
    assert rows["forward", "tensor_active_fraction"] == pytest.approx(0.1)
    assert rows["backward", PHASE_TIME] == pytest.approx(0.006)
    assert rows["step", "instructions_per_step"] == 16


def test_a_phase_that_is_hardly_longer_than_a_sample_is_not_told():
    short = (Stretch("forward", 0.0, 0.003), Stretch("backward", 0.003, 0.020))
    assert set(phases_of(Counted(series(instructions=SAMPLES), 1, short))) == {"backward"}


def test_a_sampler_on_another_clock_gives_no_phases():
    slow = Counted(series(2e-3, instructions=SAMPLES), 2, PHASES)
    assert phases_of(slow) == {}
    assert {row["phase"] for row in rows_of([slow])} == {"step"}


def test_passes_that_saw_other_work_are_told():
    same = [Counted(series(instructions=[100, 100]), 2), Counted(series(instructions=[101, 101, 101]), 3)]
    assert list(unlike(same)) == []
    (found,) = unlike([*same, Counted(series(instructions=[120]), 1)])
    assert found.code == "counter_passes_differ"
    assert found.flags
    assert "between 100 and 120" in found.message
    # How long steps take is no matter of their work.
    assert list(unlike([Counted(series(sm_cycles=[1]), 1), Counted(series(sm_cycles=[9]), 1)])) == []


def test_counters_per_kernel_weighted_by_a_timeline():
    assert combine([(2.0, 0.5), (1.0, 0.2), (1.0, None)], 10.0) == (pytest.approx(0.12), pytest.approx(0.75))
    assert combine([(1.0, None)], 10.0) is None
    assert combine([], 10.0) is None
