"""Where phases begin and end."""

from __future__ import annotations

import time

import pytest

from joulemark.collect.phases import HostPhases, phase_clock


def test_each_phase_ends_where_the_next_begins():
    clock = phase_clock("cpu")
    assert isinstance(clock, HostPhases)
    clock.mark("of an earlier run")
    clock.begin()
    clock.mark("forward")
    time.sleep(0.01)
    clock.mark("backward")
    time.sleep(0.02)
    (first, start, middle), (second, again, end) = clock.read()
    assert (first, second) == ("forward", "backward")
    assert 0 <= start < middle == again < end
    assert middle - start == pytest.approx(0.01, abs=0.009)
    assert end - middle >= 0.02


def test_without_marks_there_is_no_phase():
    clock = HostPhases()
    clock.begin()
    assert clock.read() == []
