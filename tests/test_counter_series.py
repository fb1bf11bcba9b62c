"""A series of counters keeps shares and counts apart, weighs by time and is cut to the work."""

import numpy as np
import pytest

from joulemark.counter_series import COUNTERS, CounterSeries


def series(**values: list[float]) -> CounterSeries:
    n = len(next(iter(values.values())))
    start = np.cumsum([0.0] + [0.1 * (i + 1) for i in range(n - 1)])
    return CounterSeries(
        tier="pm_sampling",
        group="T",
        start_s=start,
        end_s=start + [0.1 * (i + 1) for i in range(n)],
        values={name: np.array(samples, float) for name, samples in values.items()},
        units={name: COUNTERS[name].unit for name in values},
    )


def test_mean_of_a_share_weighs_by_time():
    assert series(sm_active=[1.0, 0.0, 0.0]).mean("sm_active") == pytest.approx(0.1 / 0.6)


def test_total_of_a_count_leaves_out_what_is_missing():
    assert series(dram_read_bytes=[1.0, np.nan, 3.0]).total("dram_read_bytes") == 4.0


def test_nothing_measured_is_none_not_zero():
    empty = series(sm_active=[0.0, 0.0], dram_read_bytes=[np.nan, np.nan])
    assert empty.total("dram_read_bytes") is None
    assert empty.at_work().mean("sm_active") is None


def test_shares_have_no_total_and_counts_no_mean():
    both = series(sm_active=[1.0], dram_read_bytes=[1.0])
    with pytest.raises(ValueError, match="share of peak"):
        both.total("sm_active")
    with pytest.raises(ValueError, match="counts B"):
        both.mean("dram_read_bytes")


def test_work_is_cut_at_its_ends_and_keeps_its_idle_time():
    assert list(series(sm_active=[0.0, 1.0, 0.0, 1.0, 0.0]).at_work().values["sm_active"]) == [1.0, 0.0, 1.0]


def test_between_keeps_whole_samples_only():
    assert len(series(sm_active=[1.0, 1.0, 1.0]).between(0.05, 0.65)) == 2


def test_samples_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="sm_active has 2"):
        CounterSeries("gpm", "all", np.zeros(3), np.ones(3), {"sm_active": np.ones(2)}, {"sm_active": "1"})
