"""How often the gate errs where the truth is known: at least 10,000 rows for each claim."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from joulemark.records import Case, Record, Value
from joulemark.regression.effects import changes
from joulemark.regression.simulate import Components, _side, rate, regressions, simulate
from joulemark.regression.verdicts import Rule, judge

RULE = Rule()
ROWS = 20_000
EQUAL = [Components(0.007)] * 10
UNEQUAL = [Components(sd) for sd in (0.001, 0.002, 0.003, 0.004, 0.005, 0.005, 0.006, 0.007, 0.008, 0.009)]
SPLIT = [Components(0.004, 0.003)] * 8


@pytest.mark.parametrize("components", [EQUAL, UNEQUAL, SPLIT, EQUAL[:2]])
def test_false_alarms_stay_below_one_percent_of_rows_and_five_percent_of_runs(components):
    found = simulate(components, 0.0, ROWS, RULE, seed=1)
    assert found.size >= 10_000
    assert rate(int(found.sum()), found.size).interval[1] <= 0.01
    assert found.any(axis=1).mean() <= 0.055


@pytest.mark.parametrize("components", [EQUAL, UNEQUAL, SPLIT])
def test_rows_beside_slow_ones_raise_no_more_alarms(components):
    slow = np.where(np.arange(len(components)) % 2, 0.0, 0.05)
    found = simulate(components, slow, ROWS, RULE, seed=2)[:, 1::2]
    assert rate(int(found.sum()), found.size).interval[1] <= 0.01


@pytest.mark.parametrize("components", [EQUAL, UNEQUAL, SPLIT])
@pytest.mark.parametrize(("slowdown", "power"), [(0.03, 0.90), (0.05, 0.99)])
def test_slowdowns_are_found(components, slowdown, power):
    found = simulate(components, slowdown, ROWS, RULE, seed=3)
    assert rate(int(found.sum()), found.size).interval[0] >= power


def test_one_slow_row_among_many_is_found():
    found = simulate(EQUAL * 4, [0.05] + [0.0] * 39, ROWS * 4, RULE, seed=4)
    assert found[:, 0].mean() >= 0.99


def test_both_components_add_up():
    assert Components(0.003, 0.004).total == pytest.approx(0.005)
    apart = simulate([Components(0.003, 0.004)] * 10, 0.02, ROWS, RULE, seed=5).mean()
    assert apart == pytest.approx(simulate([Components(0.005)] * 10, 0.02, ROWS, RULE, seed=6).mean(), abs=0.02)


FAST = [*UNEQUAL[:7], Components(0.0005, apart=(-0.066,), share=0.05)]


@pytest.mark.parametrize(("slowdown", "least"), [(0.03, 0.98), (0.05, 0.99)])
def test_slowdowns_are_found_where_a_cell_now_and_then_runs_at_another_speed(slowdown, least):
    found = simulate(FAST, slowdown, ROWS, RULE, seed=8)
    assert rate(int(found.sum()), found.size).interval[0] >= least


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
def test_a_cell_of_two_speeds_seldom_raises_alarms_however_often_it_takes_each(share):
    cells = [*UNEQUAL[:7], Components(0.002, apart=(-0.06,), share=share)]
    found = simulate(cells, 0.0, 2 * ROWS, RULE, seed=9)
    assert found.mean() <= 0.01
    assert found[:, -1].mean() <= 0.035  # three slow against three fast: 1/64, and what looks like it


def test_what_stands_apart_is_drawn_for_its_share_of_processes():
    apart = [Components(0.001, apart=(-0.5, 0.7), share=0.3)] * 4
    drawn = _side(apart, (5000, 3), np.random.default_rng(10))
    assert (drawn < -0.4).mean() == pytest.approx(0.15, abs=0.01)
    assert (drawn > 0.6).mean() == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize("tails", [3.0, 5.0])
def test_heavy_tails_raise_no_more_alarms(tails):
    for cells in (UNEQUAL, FAST):
        found = simulate([replace(one, tails=tails) for one in cells], 0.0, ROWS, RULE, seed=11)
        assert rate(int(found.sum()), found.size).interval[1] <= 0.01
    drawn = _side([Components(0.003, 0.004, tails=5.0)], (200_000, 1), np.random.default_rng(12))
    assert drawn.std() == pytest.approx(0.005, rel=0.02)
    assert (np.abs(drawn) > 4 * 0.005).mean() > 20 * 6.3e-5  # of a normal distribution


def test_clocks_that_scatter_on_both_sides_alike_cost_little():
    restless = [replace(one, clocks=(21.0, 21.01, 21.02, 21.2)) for one in UNEQUAL]
    plain, found = (simulate(cells, 0.03, ROWS, RULE, seed=13) for cells in (UNEQUAL, restless))
    assert 0 < plain.mean() - found.mean() < 0.05
    assert (simulate(restless, 0.0, ROWS, RULE, seed=14).mean()) <= 0.01


@pytest.mark.parametrize("clocks", [None, 0.0005, 0.01])
def test_many_runs_at_once_are_judged_as_two_records_are(clocks):
    rng = np.random.default_rng(7)
    base, new = (rng.standard_normal((40, 9, 3)) * 0.006 for _ in range(2))
    new = new + 0.02
    base[:, 3, 0] -= 0.1
    hertz = None if clocks is None else tuple(rng.normal(21 - down, clocks, base.shape) for down in (0.0, clocks))
    at_once = regressions(base, new, RULE, hertz)
    for run in range(40):
        sides = [
            [record(side[run, i], None if hertz is None else hertz[s][run, i], i) for i in range(9)]
            for s, side in enumerate((base, new))
        ]
        found = changes(list(zip(*sides, strict=True)), "device_time_s", RULE)
        verdicts = [one.verdict == "regressed" for one in judge([change.effects for change in found], RULE)]
        assert verdicts == at_once[run].tolist()
    assert 0.1 < at_once.mean() < 1


def record(logs, clocks, batch):
    times = np.exp(logs).tolist()
    hertz = [{}] * len(times) if clocks is None else [{"steady_sm_clock_hz": float(np.exp(one))} for one in clocks]
    processes = [{"device_time_s": one, **clock} for one, clock in zip(times, hertz, strict=True)]
    metrics = {"device_time_s": Value(float(np.median(times)), "s", n=3)}
    return Record(Case("x", batch_size=batch), "r", "ok", "e", metrics=metrics, processes=tuple(processes))


def test_wilson_s_interval():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263.
    assert rate(81, 263).interval == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert rate(0, 20).interval[0] == 0
    assert math.isclose(rate(3, 4).value, 0.75)
    with pytest.raises(ValueError, match="at least one trial"):
        rate(0, 0)
