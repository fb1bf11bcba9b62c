"""From records to effects."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulemark.records import Case, Record, Value
from joulemark.regression.effects import changes, spread_between_processes
from joulemark.regression.verdicts import Rule, judge

RULE = Rule()
figures = st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=6)
sides = st.lists(st.tuples(figures, figures), min_size=1, max_size=5)


def record(values, metric="device_time_s", batch=1, **clocks):
    processes = tuple({metric: value} for value in values)
    if "clocks" in clocks:
        processes = tuple({**one, "sm_clock_hz": clock} for one, clock in zip(processes, clocks["clocks"], strict=True))
    middle = sorted(values)[len(values) // 2]
    return Record(
        Case("x", batch_size=batch), "r", "ok", "e", metrics={metric: Value(middle, "s", n=3)}, processes=processes
    )


def pairs_of(rows, metric="device_time_s"):
    return [(record(base, metric, i), record(new, metric, i)) for i, (base, new) in enumerate(rows)]


@given(sides)
def test_swapping_the_sides_inverts_every_change_and_its_verdict(rows):
    there = changes(pairs_of(rows), "device_time_s", RULE)
    back = changes(pairs_of([(new, base) for base, new in rows]), "device_time_s", RULE)
    for one, other in zip(there, back, strict=True):
        assert one.ratio * other.ratio == pytest.approx(1)
        assert one.effects[0].log_ratio == pytest.approx(-other.effects[0].log_ratio, abs=1e-9)
        assert one.effects[0].below == pytest.approx(other.effects[0].below)
    opposite = {"regressed": "improved", "improved": "regressed"}
    verdicts = [judge([one.effects for one in found], RULE) for found in (there, back)]
    for one, other in zip(*verdicts, strict=True):
        if one.verdict in opposite:
            assert other.verdict == opposite[one.verdict]


@given(sides)
def test_higher_is_better_turns_the_sign(rows):
    time = changes(pairs_of(rows), "device_time_s", RULE)
    rate = changes(pairs_of(rows, "throughput_per_s"), "throughput_per_s", RULE)
    for one, other in zip(time, rate, strict=True):
        assert one.effects[0].log_ratio == -other.effects[0].log_ratio


@given(figures, st.floats(1e-3, 1e3))
def test_a_run_against_itself_has_no_effect_in_any_unit(values, scale):
    (one,) = changes([(record(values), record(values))], "device_time_s", RULE)
    (scaled,) = changes([(record([v * scale for v in values]),) * 2], "device_time_s", RULE)
    assert one.effects[0].log_ratio == 0
    assert scaled.effects[0].below == pytest.approx(one.effects[0].below, rel=1e-6)


def test_two_processes_are_too_few_to_measure_a_spread():
    (change,) = changes([(record([1.0, 1.1]), record([1.0, 1.1, 1.2]))], "device_time_s", RULE)
    assert (change.assumed, change.processes) == (True, (2, 3))
    assert math.isinf(change.effects[0].df)


def test_other_records_lend_their_spread():
    pair = [(record([1.0, 1.01, 0.99]), record([1.0, 1.01, 0.99]))]
    alone, lent = (
        changes(pair, "device_time_s", RULE, others)[0].effects[0]
        for others in ((), [record([1.0, 1.009 + 0.0003 * i, 0.991], batch=i) for i in range(1, 9)])
    )
    assert alone.df == 4
    assert lent.df > 6
    assert spread_between_processes([pair[0][0]], "device_time_s") == pytest.approx(0.01, rel=0.01)
    assert spread_between_processes([record([1.0])], "device_time_s") is None


@pytest.mark.parametrize(("metric", "slower"), [("device_time_s", 1.03), ("throughput_per_s", 1 / 1.03)])
def test_a_process_at_a_speed_of_its_own_is_left_out_and_named(metric, slower):
    sides = ([1.0, 1.001, 0.999], [slower, slower * 1.001, slower * 0.93])
    (change,) = changes([(record(sides[0], metric), record(sides[1], metric))], metric, RULE)
    assert change.processes == (3, 3)
    assert change.left_out.side == 1
    assert change.left_out.ratio == pytest.approx(0.93, abs=0.001)
    assert change.ratio == pytest.approx(slower, abs=0.001)
    assert change.effects[0].log_ratio == pytest.approx(math.log(1.03), abs=0.001)
    assert judge([change.effects], RULE)[0].verdict == "regressed"
    (alike,) = changes([(record(sides[0], metric), record([slower] * 3, metric))], metric, RULE)
    assert alike.left_out is None


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_figure_that_has_no_logarithm_has_no_change(value):
    assert changes([(record([value] * 3), record([1.0] * 3))], "device_time_s", RULE) == [None]
    assert changes([(record([1.0] * 3), record([1.0] * 3, "host_time_s"))], "device_time_s", RULE) == [None]


def test_cycles_need_the_clock_of_every_process():
    known = record([1.0, 1.0, 1.0], clocks=[1.9e9] * 3)
    moved = record([1.1, 1.1, 1.1], clocks=[1.7e9] * 3)
    (change,) = changes([(known, moved)], "device_time_s", RULE)
    assert change.clocks == (1.9e9, 1.7e9)
    assert [round(math.exp(one.log_ratio), 4) for one in change.effects] == [1.1, round(1.1 * 1.7 / 1.9, 4)]
    (change,) = changes([(known, record([1.1] * 3))], "device_time_s", RULE)
    assert (change.clocks, len(change.effects)) == (None, 1)
    both = changes([(known, moved), (record([1.0] * 3), record([1.0] * 3))], "device_time_s", RULE)
    assert [len(one.effects) for one in both] == [2, 1]
    timed = [replace(one, processes=tuple({**p, "steady_sm_clock_hz": 1.8e9} for p in one.processes)) for one in
             (known, moved)]  # fmt: skip
    (change,) = changes([tuple(timed)], "device_time_s", RULE)
    assert change.clocks is None  # the timed steps ran at one clock, whatever that of the energy windows was
    (change,) = changes([(known, timed[1])], "device_time_s", RULE)
    assert change.clocks == (1.9e9, 1.7e9)  # the kind of clock that both sides know
    (host,) = changes(
        [(record([1.0] * 3, "host_time_s", clocks=[1.9e9] * 3), record([1.0] * 3, "host_time_s", clocks=[1.7e9] * 3))],
        "host_time_s",
        RULE,
    )
    assert len(host.effects) == 1


def test_a_figure_next_to_nothing_is_no_figure():
    def of(value):
        metrics = {"host_time_s": Value(value, "s", n=1)}
        return Record(Case("x"), "r", "ok", "e", metrics=metrics, processes=({"host_time_s": value},))

    assert changes([(of(1.0), of(5e-324))], "host_time_s", Rule()) == [None]
    assert changes([(of(5e-324), of(1.0))], "host_time_s", Rule()) == [None]


@pytest.mark.parametrize("clock", [None, 0.0, -1.98e9])
def test_a_clock_that_cannot_be_is_not_known(clock):
    base, new = record([1.0, 1.01, 0.99], clocks=[1.98e9] * 3), record([1.1, 1.11, 1.09], clocks=[clock] * 3)
    if clock is None:
        new = replace(new, processes=tuple({"device_time_s": one["device_time_s"]} for one in new.processes))
    (one,) = changes([(base, new)], "device_time_s", RULE)
    assert one.clocks is None
    assert len(one.effects) == 1
    assert judge([one.effects], RULE)[0].verdict == "regressed"


def test_an_interval_that_does_not_hold_its_figure_overflows_nothing():
    base, new = (
        Record(Case("x"), "r", "ok", "e", metrics={"device_time_s": Value(1e-90, "s", (low, 1.0), n=9)})
        for low in (1e-90, 1.0)
    )
    (one,) = changes([(base, new)], "device_time_s", RULE)
    (judged,) = judge([one.effects], RULE)
    assert math.isfinite(judged.detectable)
    assert judged.verdict == "inconclusive"
