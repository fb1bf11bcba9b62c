"""The samples' clock over the timeline's, by beacons at both ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from joulemark.attribution.clock import Beacons, fit_clock
from joulemark.errors import UnreadableInput

from .conftest import QUIET


@pytest.mark.parametrize(("offset", "drift"), [(3.0, 2e-5), (-7.5, -3e-4), (0.0, 0.0)])
def test_drift_is_recovered_and_both_ends_fit(run, offset, drift):
    one = run(offset_s=offset, drift=drift)
    series, _, beacons = one.window(0)
    clock = fit_clock(series, beacons)
    assert clock.drift == pytest.approx(drift, abs=3e-5)
    assert clock.beacons == 12
    assert max(map(abs, clock.ends_s)) < 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_mapped_times_are_right_within_their_standard_error(run, seed):
    exact, noisy = (run(seed=seed, **options) for options in (QUIET, {}))
    series, _, beacons = exact.window(0)
    truth = fit_clock(series, beacons)
    assert truth.uncertainty_s < 5e-9
    rng = np.random.default_rng(seed)
    jitter = rng.normal(0, noisy.stamp_noise_s, (2, 12))
    blurred = Beacons(beacons.start_s + jitter[0], beacons.end_s + jitter[1], beacons.before)
    found = fit_clock(series, blurred)
    middle = np.linspace(beacons.end_s[5], beacons.start_s[6], 20)
    off = np.abs(found.to_samples(middle) - truth.to_samples(middle)).max()
    assert 0 < off < 4 * found.uncertainty_s
    assert found.uncertainty_s < 0.5e-6


def test_launch_work_at_both_ends_of_a_beacon_cancels_and_is_measured(run):
    series, _, beacons = run(**QUIET).window(0)
    wider = Beacons(beacons.start_s - 2e-6, beacons.end_s + 2e-6, beacons.before)
    narrow, wide, at = fit_clock(series, beacons), fit_clock(series, wider), np.array([1.01])
    assert wide.to_samples(at) == pytest.approx(narrow.to_samples(at), abs=1e-8)
    assert narrow.launch_s == pytest.approx(0.3e-6, abs=2e-8)  # the simulator's lead and tail
    assert wide.launch_s == pytest.approx(4.3e-6, abs=2e-8)


def test_other_work_before_the_beacons_is_passed_over(run):
    series, _, beacons = run().window(0)
    counts = series.values["sm_active_cycles"].copy()
    counts[4:14] = counts.max()
    stray = replace(series, values={**series.values, "sm_active_cycles": counts})
    assert fit_clock(stray, beacons).offset_s == pytest.approx(fit_clock(series, beacons).offset_s, abs=1e-9)


def test_any_counter_of_activity_shows_beacons(run):
    series, _, beacons = run().window(0)
    share = series.values["sm_active_cycles"] / series.duration_s / (132 * 1.98e9)
    other = replace(series, values={"sm_active": share}, units={"sm_active": "1"})
    assert fit_clock(other, beacons).offset_s == pytest.approx(fit_clock(series, beacons).offset_s, abs=1e-8)
    with pytest.raises(UnreadableInput, match="counts nothing that shows a beacon"):
        fit_clock(replace(series, values={}, units={}), beacons)


def test_beacons_that_the_samples_do_not_show_are_refused(run):
    series, _, beacons = run().window(0)
    with pytest.raises(UnreadableInput, match=r"no 6 beacons before the steps of 1[56]\d, 1[12]\d"):
        fit_clock(series.between(float(series.start_s[100]), 1e9), beacons)
    with pytest.raises(UnreadableInput, match="1 beacons before"):
        fit_clock(series, Beacons(beacons.start_s, beacons.end_s, 1))


def test_a_beacon_that_is_elsewhere_is_no_small_error(run):
    series, _, beacons = run().window(0)
    moved = beacons.start_s.copy()
    moved[:3] += 15e-6
    with pytest.raises(UnreadableInput, match="off one straight line"):
        fit_clock(series, Beacons(moved, beacons.end_s + (moved - beacons.start_s), beacons.before))
