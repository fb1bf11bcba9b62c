"""How often the gate errs where the truth is known: at least 10,000 rows for each claim."""

from __future__ import annotations

import math

import numpy as np
import pytest

from joulemark.regression.simulate import Components, rate, regressions, simulate
from joulemark.regression.variance import moderate
from joulemark.regression.verdicts import Effect, Rule, judge

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


def test_many_runs_at_once_are_judged_as_one_run_is():
    rng = np.random.default_rng(7)
    base, new = (rng.standard_normal((60, 9, 3)) * 0.006 for _ in range(2))
    new = new + 0.02
    at_once = regressions(base, new, RULE)
    for run in range(60):
        spread = moderate((base[run].var(axis=-1, ddof=1) + new[run].var(axis=-1, ddof=1)) / 2, 4)
        error = np.sqrt(spread.variance * 2 / 3)
        effects = [
            [Effect(float(new[run, i].mean() - base[run, i].mean()), float(error[i]), float(error[i]), spread.df[i])]
            for i in range(9)
        ]
        assert [one.verdict == "regressed" for one in judge(effects, RULE)] == at_once[run].tolist()


def test_wilson_s_interval():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263.
    assert rate(81, 263).interval == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert rate(0, 20).interval[0] == 0
    assert math.isclose(rate(3, 4).value, 0.75)
    with pytest.raises(ValueError, match="at least one trial"):
        rate(0, 0)
