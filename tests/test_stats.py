"""Medians with honest intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulemark.stats import (
    bootstrap_interval,
    outliers,
    ratio_interval_of_means,
    summarize,
    union_length,
)

FINITE = st.floats(-1e6, 1e6)


@pytest.mark.parametrize("n", [6, 9, 20, 63, 400, 1500])
@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_the_interval_covers_the_median_as_often_as_it_says(n, draw):
    rng = np.random.default_rng(7)
    true = {"normal": 0.0, "exponential": math.log(2)}[draw]
    trials, hits = 600, 0
    for _ in range(trials):
        lo, hi = summarize(getattr(rng, draw)(size=n)).interval
        hits += lo <= true <= hi
    # Three standard errors of a proportion of 95 % over 600 draws are 2.7 %.
    assert hits / trials >= 0.95 - 0.027


@pytest.mark.parametrize("n", [20, 63, 400])
def test_the_interval_is_not_wider_than_it_needs_to_be(n):
    rng = np.random.default_rng(11)
    hits = sum(lo <= 0 <= hi for lo, hi in (summarize(rng.normal(size=n)).interval for _ in range(600)))
    assert hits / 600 <= 0.99


@pytest.mark.parametrize(("n", "confidence"), [(2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375)])
def test_few_samples_give_their_range_and_its_true_coverage(n, confidence):
    summary = summarize(list(range(n)))
    assert summary.interval == (0, n - 1)
    assert summary.confidence == pytest.approx(confidence)


def test_six_samples_reach_95_percent():
    assert summarize(list(range(6))).confidence == 0.95


def test_one_sample_has_no_interval():
    summary = summarize([4.0])
    assert (summary.median, summary.iqr, summary.interval, summary.n) == (4.0, 0.0, None, 1)
    assert summary.relative_half_width == math.inf


def test_equal_samples_have_an_interval_of_no_width():
    summary = summarize([2.0] * 10)
    assert summary.interval == (2.0, 2.0)
    assert summary.relative_half_width == 0
    assert summarize([0.0] * 10).relative_half_width == math.inf


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_samples_that_are_not_finite_are_refused(samples):
    with pytest.raises(ValueError, match="finite"):
        summarize(samples)


@given(st.lists(FINITE, min_size=2, max_size=60))
def test_the_interval_holds_the_median(samples):
    summary = summarize(samples)
    lo, hi = summary.interval
    assert lo <= summary.median <= hi
    assert min(samples) <= lo
    assert hi <= max(samples)
    assert summary.iqr >= 0


@given(st.lists(st.floats(0.001, 1e3), min_size=2, max_size=40), st.floats(1e-3, 1e3))
def test_units_do_not_matter(samples, factor):
    one, other = summarize(samples), summarize([factor * sample for sample in samples])
    assert other.median == pytest.approx(factor * one.median)
    assert other.interval == pytest.approx([factor * edge for edge in one.interval])


def test_the_bootstrap_agrees_with_the_order_statistics():
    samples = np.random.default_rng(3).normal(10, 1, 200)
    by_rank, by_draw = summarize(samples).interval, bootstrap_interval(samples)
    assert by_draw == pytest.approx(by_rank, abs=0.1)
    assert bootstrap_interval(samples) == by_draw
    assert bootstrap_interval([1.0]) is None


def test_the_ratio_of_sums_covers_the_true_ratio():
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(500):
        seconds = rng.uniform(0.9, 1.1, 12)
        joules = 300 * seconds + rng.normal(0, 5, 12)
        ratio, (lo, hi) = ratio_interval_of_means(joules, seconds)
        assert ratio == pytest.approx(joules.sum() / seconds.sum())
        hits += lo <= 300 <= hi
    assert 0.91 <= hits / 500 <= 0.99


def test_the_ratio_of_few_pairs_has_no_interval():
    assert ratio_interval_of_means([2.0, 4.0], [1.0, 1.0]) == (3.0, None)


def test_outliers_are_far_outside_the_quartiles():
    assert outliers([1.0, 1.1, 0.9, 1.05, 0.95, 9.0]) == [5]
    assert outliers([1.0, 1.1, 0.9, 1.05]) == []
    assert outliers([1.0, 99.0]) == []


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 2), (1, 3)], 3),
        ([(0, 10), (2, 3), (4, 5)], 10),
        ([(5, 6), (0, 1)], 2),
        ([(0, 1), (1, 2)], 2),
        ([(3, 3)], 0),
    ],
)
def test_overlaps_count_once(intervals, length):
    assert union_length(intervals) == length


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_the_union_is_what_a_raster_says(parts):
    intervals = [(lo, lo + length) for lo, length in parts]
    cells = {cell for lo, hi in intervals for cell in range(lo, hi)}
    assert union_length(intervals) == len(cells)
