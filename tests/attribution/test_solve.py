"""Rates from samples that hold several kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from joulemark.attribution import check, solve
from joulemark.attribution.clock import ClockMap, fit_clock
from joulemark.attribution.solve import Window
from joulemark.attribution.timeline import Launches
from joulemark.attribution.units import group
from joulemark.counter_series import CounterSeries

from .conftest import STEP

SAME = ClockMap(0.0, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0), 12)


def window(starts, ends, rates, edges, steps=None):
    """A window whose clocks are one, with the counts that launches of given rates give."""
    starts, ends, rates, edges = (np.asarray(one, float) for one in (starts, ends, rates, edges))
    steps = np.zeros(len(starts), np.int64) if steps is None else np.asarray(steps)
    overlap = np.clip(np.minimum(edges[1:, None], ends) - np.maximum(edges[:-1, None], starts), 0, None)
    series = CounterSeries(
        "pm_sampling", "pass1", edges[:-1], edges[1:], {"dram_read_bytes": overlap @ rates}, {"dram_read_bytes": "B"}
    )
    places = np.arange(len(starts))
    return Window(series, Launches(starts, ends, places, steps, places), SAME)


def solved(one, unit_of_place=None):
    unit_of_place = np.arange(len(one.launches)) if unit_of_place is None else np.asarray(unit_of_place)
    units = int(unit_of_place.max()) + 1
    found = solve.overlaps(one, unit_of_place, units)
    system = solve.normal([(found, solve.counts_of(one, ["dram_read_bytes"])[found.rows])])
    return system, solve.rates(system), found


def test_two_kernels_in_one_sample_are_told_apart_by_their_other_samples():
    one = window([0.0, 2.5, 4.25], [2.5, 4.0, 7.0], [10.0, 0.0, 3.0], np.arange(0.0, 9.0))
    _, rates, found = solved(one)
    assert rates[:, 0] == pytest.approx([10.0, 0.0, 3.0], abs=1e-6)
    assert found.matrix.sum() == pytest.approx(2.5 + 1.5 + 2.75)


def test_rates_are_never_negative_and_give_back_what_was_counted():
    rng = np.random.default_rng(0)
    starts = np.arange(0.0, 60.0, 1.5)
    one = window(starts, starts + 1.5, rng.uniform(0, 5, len(starts)), np.arange(0.0, 61.0, 2.0))
    noisy = one.series.values["dram_read_bytes"] * rng.normal(1, 0.3, len(one.series))
    one = replace(one, series=replace(one.series, values={"dram_read_bytes": np.maximum(noisy, 0)}))
    kinds = np.arange(len(starts)) % 5
    _, rates, found = solved(one, kinds)
    assert (rates >= 0).all()
    given = (found.matrix @ rates).sum()
    assert (rates > 0).all()
    assert given == pytest.approx(noisy[found.rows].sum(), rel=1e-6)


def test_a_rate_that_varies_inside_a_kernel_leaves_its_total():
    ramp = window([0.0, 1.0, 2.0, 3.0, 5.0], [1.0, 2.0, 3.0, 4.0, 6.0], [1.0, 5.0, 5.0, 1.0, 2.0], np.arange(-0.3, 8.0))
    whole = replace(ramp, launches=Launches(*(np.array(x) for x in ([0.0, 5.0], [4.0, 6.0], [0, 1], [0, 0], [0, 1]))))
    _, rates, found = solved(whole)
    assert (found.matrix @ rates).sum() == pytest.approx(14.0, rel=1e-6)
    assert rates[0, 0] * 4 == pytest.approx(12.0, rel=0.05)


def test_rates_are_those_of_samples_that_one_kernel_fills():
    """A kernel counts nothing in its last 0.7 s: the next one's rate is right where such samples hardly weigh."""
    parts = window([0.0, 6.3, 7.0], [6.3, 7.0, 12.0], [10.0, 0.0, 0.5], np.arange(-0.5, 13.0))
    launches = Launches(*(np.array(x) for x in ([0.0, 7.0], [7.0, 12.0], [0, 1], [0, 0], [0, 1])))
    whole = replace(parts, launches=launches)
    system, even, found = solved(whole)
    assert even[1, 0] < 0.1
    assert found.filled.sum() == 6 + 4
    own = solve.rates(solve.normal([(found.by_filled(), system.parts[0][1])]))
    assert own[:, 0] == pytest.approx([10.0, 0.5], rel=0.06)


def test_kernels_that_always_run_together_share_what_was_counted():
    one = window([0.0, 0.0, 3.0], [2.0, 2.0, 5.0], [4.0, 2.0, 1.0], np.arange(0.0, 7.0))
    _, rates, _ = solved(one)
    assert rates[:2, 0].sum() == pytest.approx(6.0, rel=1e-4)
    assert rates[2, 0] == pytest.approx(1.0, rel=1e-4)


def test_an_interval_is_as_wide_as_steps_differ():
    rng = np.random.default_rng(1)
    n, starts = 30, np.arange(30) * 4.0
    rates = 5 + rng.normal(0, 0.5, n)
    one = window(starts, starts + 3.0, rates, np.arange(0.0, 121.0), steps=np.arange(n))
    one = replace(one, launches=replace(one.launches, place=np.zeros(n, np.int64)))
    system, found, _ = solved(one, [0])
    half = solve.half_widths(solve.influences(system, found, np.array([[3.0]])))[0, 0]
    expected = 3.0 * rates.std(ddof=1) / np.sqrt(n) * 2.045  # Student's t for 29 degrees of freedom
    assert half == pytest.approx(expected, rel=0.15)
    assert found[0, 0] == pytest.approx(rates.mean(), rel=1e-3)


def test_a_single_step_has_no_interval():
    system, found, _ = solved(window([0.0], [2.0], [4.0], np.arange(0.0, 4.0)))
    assert np.isnan(solve.half_widths(solve.influences(system, found, np.array([[1.0]])))).all()


def whole(one):
    """A window and its units."""
    series, launches, beacons = one.window(0)
    units = group(one.timeline([launches], [beacons]), one.interval_s)
    return Window(series, launches, fit_clock(series, beacons)), units


@pytest.mark.parametrize("wrong_s", [-50e-6, -12e-6, 12e-6, 50e-6])
def test_a_wrong_clock_is_seen_and_by_how_much(run, wrong_s):
    right, units = whole(run())
    assert check.profile(right, units).fits
    found = check.profile(replace(right, clock=right.clock.shifted(wrong_s)), units)
    assert not found.fits
    assert found.best_s == pytest.approx(-wrong_s, abs=1e-6)


def test_samples_of_100_us_show_50_us_too(run):
    slow = [replace(one, length_s=5 * one.length_s) for one in STEP]
    right, units = whole(run(slow, interval_s=100e-6, steps=30))
    assert check.profile(right, units).fits
    assert not check.profile(replace(right, clock=right.clock.shifted(50e-6)), units).fits


def test_counts_that_never_change_tell_nothing_about_the_clock(run):
    window, units = whole(run())
    even = {"instructions": np.ones(len(window.series))}
    series = replace(window.series, values=even, units={"instructions": "inst"})
    found = check.profile(replace(window, series=series), units)
    assert not found.telling
    assert found.fits
