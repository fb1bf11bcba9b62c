import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, rankdata

from joulemark.history.changes import Change, average_ranks, find_changes, runs_needed
from tests.history.simulated import levels


def places(times, **options):
    return [one.at for one in find_changes(times, **options)]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.05])
def test_shifts_of_all_rows_and_of_few_are_found_within_one_run(share):
    times = levels(np.random.default_rng(3), 40, 200, ((70, 1.05, share), (140, 0.96, share)))
    found = places(times)
    assert len(found) == 2
    assert max(abs(found[0] - 70), abs(found[1] - 140)) <= 1


def test_a_shift_too_small_for_one_row_is_found_in_many():
    times = levels(np.random.default_rng(5), 60, 60, ((30, 1.01, 1.0),), common=0.001)
    assert sum(bool(places(times[row : row + 1])) for row in range(20)) <= 4
    assert [abs(at - 30) <= 1 for at in places(times)] == [True]


def test_a_history_without_a_change_gets_one_no_more_often_than_stated():
    """Noise that all rows of a run share is what fools a test of rows; here it is most of the noise."""
    rate, histories = 0.05, 300
    rng = np.random.default_rng(11)
    alarms = sum(bool(places(levels(rng, 12, 40, common=0.03), rate=rate, seed=seed)) for seed in range(histories))
    assert alarms <= binom.ppf(0.999, histories, rate)


def test_the_place_of_a_change_lies_in_its_interval_as_often_as_stated():
    rng = np.random.default_rng(13)
    found = [find_changes(levels(rng, 6, 60, ((30, 1.04, 1.0),), common=0.02), seed=seed) for seed in range(100)]
    single = [one[0] for one in found if len(one) == 1]
    assert len(single) > 80
    covered = sum(one.earliest <= 30 <= one.latest for one in single)
    assert covered >= binom.ppf(0.001, len(single), 0.95)
    assert any(one.at != 30 for one in single)


@pytest.mark.parametrize("bad", [[20], [20, 21], [0], [39]])
def test_one_or_two_bad_runs_are_no_change(bad):
    rng = np.random.default_rng(17)
    alarms = 0
    for seed in range(40):
        times = levels(rng, 10, 40)
        times[:, bad] *= 2.0
        alarms += bool(places(times, seed=seed))
    assert alarms <= binom.ppf(0.999, 40, 0.01)


def test_three_new_runs_of_many_rows_are_a_change():
    times = levels(np.random.default_rng(19), 30, 60, ((57, 1.1, 1.0),))
    assert places(times) == [57]


def test_a_level_that_comes_back_is_two_changes():
    times = levels(np.random.default_rng(23), 20, 120, ((50, 1.05, 1.0), (70, 1 / 1.05, 1.0)))
    assert places(times) == [50, 70]


def test_figures_that_are_missing_are_not_figures():
    rng = np.random.default_rng(29)
    times = levels(rng, 20, 120, ((60, 1.06, 1.0),))
    times[rng.random(times.shape) < 0.3] = np.nan
    times[:5, :80] = np.nan  # rows that began late
    times[5] = np.nan
    assert places(times) == [60]


def test_rows_that_come_and_go_are_no_change():
    times = levels(np.random.default_rng(31), 20, 120)
    times[:10, :60] = np.nan
    times[10:, 60:] = np.nan
    assert places(times) == []


def test_figures_without_noise():
    times = np.full((3, 40), 2.0**30)
    assert places(times) == []
    times[1, 25:] *= 2
    assert find_changes(times) == [Change(25, 25, 25)]


def test_the_same_history_gives_the_same_answer():
    times = levels(np.random.default_rng(37), 10, 80, ((40, 1.01, 1.0),))
    assert find_changes(times) == find_changes(times.copy())


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 50), (4, 5)])
def test_too_little_to_judge_has_no_change(shape):
    assert find_changes(np.ones(shape)) == []


@pytest.mark.parametrize("rate", [0.1, 0.05, 0.01])
def test_so_many_runs_are_needed_and_suffice(rate):
    runs = runs_needed(rate)
    times = np.ones((1, runs)) + np.linspace(0, 1e-3, runs)
    times[:, runs // 2 :] += 1.0
    assert 2 / math.comb(runs, runs // 2) <= rate / 2 < 2 / math.comb(runs - 1, (runs - 1) // 2)
    found = [bool(places(times, rate=rate, seed=seed)) for seed in range(40)]
    assert sum(found) > 10
    assert not any(places(times[:, 1 : runs // 2 * 2 - 3], rate=rate, seed=seed) for seed in range(10))


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, math.nan])
def test_a_rate_is_a_chance(rate):
    with pytest.raises(ValueError, match="between 0 and 1"):
        find_changes(np.ones((2, 20)), rate)


@given(st.lists(st.integers(-3, 3) | st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_ranks_are_scipys(values):
    values = np.asarray(values, dtype=float)
    np.testing.assert_array_equal(average_ranks(values), rankdata(values))
