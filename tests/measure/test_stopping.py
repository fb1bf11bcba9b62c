"""When enough is enough."""

from __future__ import annotations

import itertools

import pytest

from joulemark.measure.stopping import BUDGET, COUNT, PRECISION, Exactly, Precision


class Clock:
    """Moves with the samples that were taken."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def drive(stop, clock, times):
    """Samples up to the stop, and its reason."""
    samples = []
    for one in times:
        clock.now += one
        samples.append(one)
        reason = stop(samples)
        if reason is not None:
            return len(samples), reason
    return len(samples), None


def test_exactly_counts():
    assert drive(Exactly(3), Clock(), [1.0] * 10) == (3, COUNT)


def test_steady_samples_stop_at_a_quarter_of_the_budget():
    clock = Clock()
    assert drive(Precision(1.0, clock=clock), clock, [0.01] * 1000) == (25, PRECISION)


def test_noisy_samples_use_the_whole_budget():
    clock = Clock()
    n, reason = drive(Precision(1.0, target=0.005, clock=clock), clock, [0.01, 0.02] * 500)
    assert reason == BUDGET
    assert n == pytest.approx(67, abs=1)


def test_slow_steps_are_never_fewer_than_the_minimum():
    clock = Clock()
    assert drive(Precision(0.1, min_samples=5, clock=clock), clock, [3.0] * 50) == (5, BUDGET)


def test_the_first_sample_counts_for_the_budget():
    clock = Clock()
    assert drive(Precision(10.0, min_samples=1, clock=clock), clock, [11.0] * 3) == (1, BUDGET)


def test_short_steps_end_at_the_largest_number():
    clock = Clock()
    stop = Precision(1e9, max_samples=100, clock=clock)
    assert drive(stop, clock, [1e-6] * 1000) == (100, COUNT)


def test_the_interval_is_computed_at_growing_distances(monkeypatch):
    import joulemark.measure.stopping as stopping

    looks = []
    real = stopping.summarize
    monkeypatch.setattr(stopping, "summarize", lambda samples: looks.append(len(samples)) or real(samples))
    clock = Clock()
    drive(Precision(10.0, target=0.0, clock=clock), clock, [0.001, 0.002] * 5000)
    assert len(looks) < 20
    assert all(later >= 1.2 * earlier for earlier, later in itertools.pairwise(looks))
