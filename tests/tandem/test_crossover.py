"""The crossover batch: its estimate where it is known, its verdicts, and how often its interval holds the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulemark.tandem.crossover import Point, _medians, find_crossover

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
DRAWS = 500


def exact(device, host=4e-3, batches=BATCHES, n=9):
    """Points without noise: device time as a function of the batch."""
    return [Point(one, (device(one),) * n, (host,) * n) for one in batches]


def test_a_power_law_is_met_exactly():
    found = find_crossover(exact(lambda batch: 1e-4 * batch**0.9))
    assert found.verdict == "crossover"
    assert found.batch == pytest.approx(40 ** (1 / 0.9))
    assert found.support == 1
    assert found.interval[0] <= found.batch <= found.interval[1]
    assert (found.smallest_batch, found.largest_batch) == (1, 256)
    assert found.findings == ()


def test_a_constant_and_a_share_per_sample_is_in_the_interval():
    """Log over log is not straight then: 50 is the truth, and the interval reaches to it without any noise."""
    found = find_crossover(exact(lambda batch: 1e-3 + 6e-5 * batch))
    assert 40 < found.batch < 50
    assert found.interval[1] == pytest.approx(50)


def test_the_order_of_the_points_does_not_matter():
    points = exact(lambda batch: 1e-4 * batch)
    assert find_crossover(points[::-1]) == find_crossover(points)


@pytest.mark.parametrize(
    ("device", "verdict", "words"),
    [
        (lambda batch: 5e-3 * batch, "below", "at or below 1"),
        (lambda batch: 4e-3 * batch, "below", "at or below 1"),
        (lambda batch: 1e-6 * batch, "above", "not reached (above 256)"),
        (lambda batch: 1e-4 * batch, "crossover", "40 [40, 40]"),
    ],
)
def test_verdicts_on_both_sides(device, verdict, words):
    found = find_crossover(exact(device))
    assert found.verdict == verdict
    assert found.describe() == words
    assert (found.batch is None) == (found.interval is None) == (verdict != "crossover")


def test_the_interval_may_end_where_the_batches_do():
    rng = np.random.default_rng(0)
    points = [Point(one, 4e-3 * one / 240 * rng.normal(1, 0.3, 9), 4e-3 * rng.normal(1, 0.05, 9)) for one in BATCHES]
    found = find_crossover(points)
    assert found.open_above
    assert not found.open_below
    assert found.interval[1] == 256
    assert 0.4 < found.support < 1
    assert "≥ 256" in found.describe()


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_batches(count):
    found = find_crossover(exact(lambda batch: 1e-3 * batch)[:count])
    assert found.verdict == "too_few_batches"
    assert (found.batch, found.interval, found.support) == (None, None, None)
    assert found.describe() == "not known (fewer than two batch sizes)"


def test_a_host_that_is_slower_again_is_said():
    points = exact(lambda batch: 1e-4 * batch)
    points[6] = Point(128, points[6].device_s, (20e-3,) * 9)
    found = find_crossover(points)
    assert found.batch == pytest.approx(40)
    assert [one.code for one in found.findings] == ["crosses_again"]
    assert "at batch 128" in found.findings[0].message


@pytest.mark.parametrize(
    "points",
    [
        [Point(1, (1.0,), (1.0,)), Point(1, (1.0,), (1.0,))],
        [Point(0, (1.0,), (1.0,))],
        [Point(1, (), (1.0,))],
        [Point(1, (1.0,), (0.0,))],
        [Point(1, (math.nan,), (1.0,))],
        [Point(1, (1.0,), (math.inf,))],
    ],
)
def test_points_that_cannot_be(points):
    with pytest.raises(ValueError, match="batch"):
        find_crossover(points)


def test_one_step_of_each_has_the_assumed_spread():
    found = find_crossover(exact(lambda batch: 1e-4 * batch, n=1))
    lo, hi = found.interval
    assert 0.02 < (hi - lo) / found.batch < 0.3


def coverage(device, host_noise, cell_noise, device_noise, steps):
    """How many of many noisy sweeps have the true crossover in their interval.

    Args:
        device: draws a function of the batch and its true crossover.
        cell_noise: relative spread of the host's level from batch to batch.
        steps: of the device, of the host.
    """
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(DRAWS):
        time, truth = device(rng)
        points = [
            Point(
                batch,
                time(batch) * np.exp(device_noise * rng.standard_normal(steps[0])),
                4e-3 * np.exp(cell_noise * rng.standard_normal() + host_noise * rng.standard_normal(steps[1])),
            )
            for batch in BATCHES
        ]
        found = find_crossover(points, draws=300)
        inside += found.interval is not None and found.interval[0] <= truth <= found.interval[1]
    return inside / DRAWS


def affine(rng):
    constant, each = rng.uniform(0.2e-3, 1.5e-3), rng.uniform(4e-5, 1.5e-4)
    return lambda batch: constant + each * batch, (4e-3 - constant) / each


def power(rng):
    truth, exponent = rng.uniform(8, 110), rng.uniform(0.6, 1.0)
    return lambda batch: 4e-3 * (batch / truth) ** exponent, truth


@pytest.mark.parametrize("device", [affine, power])
@pytest.mark.parametrize(
    ("host_noise", "cell_noise", "device_noise", "steps"),
    [(0.03, 0.0, 0.005, (10, 80)), (0.05, 0.0, 0.05, (5, 5)), (0.03, 0.04, 0.01, (10, 80))],
)
def test_the_interval_covers_the_truth_at_the_stated_rate(device, host_noise, cell_noise, device_noise, steps):
    """At least 95 % of 500, two standard errors of a count allowed; an interval that is always right has no width."""
    assert coverage(device, host_noise, cell_noise, device_noise, steps) >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / DRAWS)


def test_noise_that_is_left_out_would_be_missed():
    """The scatter from cell to cell is what the interval is made of: steps alone cover the truth far more rarely."""
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(200):
        levels = 4e-3 * np.exp(0.04 * rng.standard_normal(len(BATCHES)))
        points = [Point(batch, (1e-4 * batch,) * 9, (level,) * 9) for batch, level in zip(BATCHES, levels, strict=True)]
        near = [one for one in points if one.batch in (32, 64)]
        lo, hi = find_crossover(near, draws=200).interval
        inside += lo <= 40 <= hi
    assert inside < 100
    assert coverage(lambda _: (lambda batch: 1e-4 * batch, 40.0), 0.0, 0.04, 0.0, (9, 9)) > 0.9


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 4096), min_size=2, max_size=9, unique=True),
    st.floats(1e-6, 1e-1),
    st.floats(0.1, 1.5),
    st.floats(1e-5, 1e-1),
    st.integers(0, 5),
)
def test_whatever_the_points_the_answer_is_whole(batches, scale, exponent, host, seed):
    rng = np.random.default_rng(seed)
    points = [
        Point(one, scale * one**exponent * rng.uniform(0.8, 1.25, 4), host * rng.uniform(0.8, 1.25, 4))
        for one in batches
    ]
    found = find_crossover(points, draws=100)
    assert 0 <= found.support <= 1
    if found.verdict == "crossover":
        lo, hi = found.interval
        assert min(batches) <= lo <= found.batch <= hi <= max(batches)
    document = found.to_json()
    assert all(not isinstance(one, float) or math.isfinite(one) for one in document.values())
    assert document["text"] == found.describe()


@pytest.mark.parametrize("n", [2, 3, 9, 10, 80])
def test_medians_are_drawn_as_resampling_draws_them(n):
    rng = np.random.default_rng(n)
    samples = np.exp(rng.standard_normal(n))
    drawn = _medians(samples, 20_000, rng)
    plain = np.median(rng.choice(np.log(samples), size=(20_000, n)), axis=1)
    middle = np.median(np.log(samples))
    expected = middle + (plain - middle) * math.sqrt(n / (n - 1))
    for share in (0.025, 0.25, 0.5, 0.75, 0.975):
        at = np.quantile(expected, share)
        assert abs(np.mean(drawn <= at) - np.mean(expected <= at)) < 0.02


def test_a_host_that_scatters_over_decades_overflows_nothing():
    """The warning of an overflow is an error here; Student's tails of two degrees of freedom reach it."""
    host = (1e-3, 1e9, 1e-6, 1e12)
    points = [Point(batch, [1e-4 * batch], [seconds]) for batch, seconds in zip((1, 2, 4, 8), host, strict=True)]
    for seed in range(3):
        found = find_crossover(points, seed=seed)
        assert found.verdict == "crossover"
        assert found.interval is not None
        assert all(map(math.isfinite, found.interval))
