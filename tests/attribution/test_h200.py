"""A recording of an H200: three windows of products, streams and small kernels whose amounts are known beforehand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from joulemark.attribution import attribute, check
from joulemark.attribution.clock import fit_clock, line_through, sightings
from joulemark.attribution.recording import read_recording, read_series
from joulemark.attribution.timeline import read_timeline
from joulemark.attribution.windows import map_windows

FOLDER = Path(__file__).parents[1] / "data" / "attribution" / "h200"
SMS, CLOCK_HZ, DRAM_PEAK = 132, 1.98e9, 4.8e12
FLOP_PER_TENSOR_CYCLE = 1024
KNOWN = (
    ("nvjet_sm90_tst_192x192", "pipe_tensor_cycles", 2 * 6144**3 / FLOP_PER_TENSOR_CYCLE),
    ("nvjet_sm90_tst_128x64", "pipe_tensor_cycles", 5 * 2 * 1024**3 / FLOP_PER_TENSOR_CYCLE),
    ("AUnaryFunctor", "dram_read_bytes", 2 * 2**27),
    ("reduce_kernel", "dram_read_bytes", 2 * 2**27),
    ("SoftMax", "dram_read_bytes", 2 * 6144**2),
)
"""Part of a kernel's name, counter, amount per step: products of bf16, arrays that do not fit into the L2."""


@pytest.fixture(scope="module")
def document():
    return attribute(FOLDER)


@pytest.fixture(scope="module")
def seen():
    """Timeline and samples of each window."""
    timeline = read_timeline(FOLDER, read_recording(FOLDER))
    return timeline, {number: read_series(FOLDER / f"window-{number}.npz") for number in timeline.beacons}


def on_one_clock(series, seconds):
    """Times of a window on the ticks that all windows share, in s of 2.1 GHz."""
    return (seconds * series.source["ticks_per_s"] + series.source["first_tick"]) / 2.1e9


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_window_is_mapped_as_the_others_would_map_it(seen, number):
    """The clocks are the same in all windows of a process: a line through the others is an independent mapping."""
    timeline, series = seen
    middles = {one: on_one_clock(series[one], sightings(series[one], timeline.beacons[one])[0]) for one in series}
    others = [one for one in series if one != number]
    line = line_through(
        np.concatenate([timeline.beacons[one].middle_s for one in others]),
        np.concatenate([middles[one] for one in others]),
        12,
    )
    own = fit_clock(series[number], timeline.beacons[number])
    launches = timeline.of_window(number)
    off = on_one_clock(series[number], own.to_samples(launches.start_s)) - line.to_samples(launches.start_s)
    assert own.uncertainty_s < 50e-9
    assert 0 < np.abs(off).max() < 3 * own.uncertainty_s
    assert own.drift == pytest.approx(0, abs=1e-5)
    assert 0.25e-6 < own.launch_s < 0.4e-6


def test_all_that_was_counted_is_given_to_kernels(document):
    assert document["findings"] == []
    assert [one["window"] for one in document["clock"]["windows"]] == [0, 1, 2]
    for name, one in document["counters"].items():
        assert one["ratio"] == pytest.approx(1, abs=0.005), name
        assert one["outside_kernels"] < 1e-6


@pytest.mark.parametrize(("kernel", "counter", "amount"), KNOWN)
def test_intervals_hold_the_amounts_that_are_known(document, kernel, counter, amount):
    row = next(one for one in document["kernels"] if kernel in one["name"])
    low, high = row["counters"][counter]["interval"]
    assert low <= amount <= high
    within = 0.015 if row["by_level"] == {"place": 1} else 0.04
    assert row["counters"][counter]["value"] == pytest.approx(amount, rel=within)


def test_nothing_is_more_than_the_hardware_can(document):
    for one in document["kernels"]:
        if "pool" in one["by_level"]:
            continue  # two sets of 1 µs each: their interval says that they are not resolved
        counted = {name: cell["value"] / one["time_s"] for name, cell in one["counters"].items()}
        assert counted["dram_read_bytes"] + counted["dram_write_bytes"] < DRAM_PEAK
        assert counted["sm_active_cycles"] <= SMS * CLOCK_HZ
        assert counted["pipe_tensor_cycles"] <= 4 * counted["sm_active_cycles"]


def test_a_rate_of_zero_is_not_certain(document):
    product = next(one for one in document["kernels"] if "128x64" in one["name"])
    assert product["counters"]["dram_read_bytes"]["value"] == 0  # it fits into the L2
    assert product["counters"]["dram_read_bytes"]["interval"][1] > 1e5


def test_a_mapping_that_is_50_us_wrong_does_not_fit_the_counts(seen):
    timeline, series = seen
    mapped = map_windows(read_recording(FOLDER), timeline, series)
    for one in mapped.windows:
        assert check.profile(one, mapped.units).fits
        for wrong_s in (-50e-6, 50e-6):
            moved = type(one)(one.series, one.launches, one.clock.shifted(wrong_s))
            assert not check.profile(moved, mapped.units).fits
