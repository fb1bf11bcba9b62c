"""Verdicts on rows, and how many of them may be wrong together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from joulemark.regression.verdicts import Effect, Rule, critical_values, detectable, established, judge

RULE = Rule()


def effect(percent, error=0.2, df=12.0, assumed=False):
    return Effect(math.log1p(percent / 100), error / 100, error / 100, df, assumed)


def verdict(*effects, rule=RULE):
    return judge([effects], rule)[0].verdict


@pytest.mark.parametrize(
    ("percent", "error", "expected"),
    [
        (3.0, 0.3, "regressed"),
        (0.9, 0.1, "same"),  # certain, and smaller than what matters
        (-3.0, 0.3, "improved"),
        (-0.9, 0.1, "same"),
        (1.0, 0.8, "same"),  # a worsening beyond 5 % is excluded
        (3.0, 1.5, "inconclusive"),  # it is not
        (-4.0, 5.0, "inconclusive"),
        (0.0, 0.0, "same"),
        (2.0, 0.0, "regressed"),
    ],
)
def test_a_measured_spread_is_judged_against_no_change(percent, error, expected):
    assert verdict(effect(percent, error)) == expected


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(2.5, "same"), (4.5, "inconclusive"), (6.0, "inconclusive"), (8.5, "regressed"), (-8.5, "improved")],
)
def test_an_assumed_spread_is_judged_against_the_threshold(percent, expected):
    assert verdict(effect(percent, 1.01, math.inf, assumed=True)) == expected


def test_a_verdict_holds_for_all_effects_between_which_the_truth_lies():
    assert verdict(effect(4.0), effect(3.0)) == "regressed"
    assert verdict(effect(4.0), effect(0.0)) == "same"
    assert verdict(effect(4.0), effect(3.0, 3.0)) == "inconclusive"
    assert verdict(effect(3.0, 3.0), effect(4.0)) == "inconclusive"
    assert verdict(effect(8.0), effect(0.0)) == "inconclusive"
    assert verdict(effect(-4.0), effect(0.0)) == "same"
    low, high = judge([[effect(4.0), effect(0.0)]], RULE)[0].interval
    assert (low < 0, high > math.log1p(0.04)) == (True, True)


def test_rows_that_do_not_count_cost_no_power():
    p = stats.t.isf(0.004, 12) * 0.5
    rows = [[effect(100 * math.expm1(p / 100), 0.5)]] + [[effect(0.0, 0.5)]] * 40
    alone = [True] + [False] * 40
    assert judge(rows, RULE)[0].verdict == "same"
    assert judge(rows, RULE, alone)[0].verdict == "regressed"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_procedure_is_that_of_benjamini_and_hochberg_below_the_cap(p):
    wide = Rule(fdr=0.1, alpha=1.0)
    textbook = stats.false_discovery_control(p) <= 0.1 * (1 + 1e-12)
    assert established(p, wide).tolist() == textbook.tolist()
    capped = established(p, Rule(fdr=0.1, alpha=0.01))
    assert (np.asarray(p)[capped] <= 0.01).all()
    assert (capped <= textbook).all()


def test_rows_judged_one_by_one_share_the_rate():
    assert critical_values(1, Rule(family=40)) == pytest.approx([0.05 / 40])
    assert critical_values(1, Rule(family=2)) == pytest.approx([0.005])
    assert established(np.array([0.002, 0.001]), Rule(family=40)).tolist() == [False, True]


def test_runs_are_judged_apart():
    p = np.array([[0.004, 0.5], [0.5, 0.5]])
    assert established(p, RULE).tolist() == [[True, False], [False, False]]
    assert established(np.zeros((3, 0)), RULE).shape == (3, 0)


@pytest.mark.parametrize("df", [8.0, math.inf])
@pytest.mark.parametrize("assumed", [False, True])
def test_the_detectable_effect_is_detected_with_its_power(df, assumed):
    rows, error = 10, 0.006
    one = Effect(0.0, error, error, df, assumed)
    size = math.log1p(detectable(one, RULE, rows))
    rng = np.random.default_rng(1)
    errors = error * (np.ones(40_000) if math.isinf(df) else np.sqrt(rng.chisquare(df, 40_000) / df))
    estimates = size + rng.standard_normal(40_000) * error
    excess = (estimates - one.null(RULE)) / errors
    p = stats.norm.sf(excess) if math.isinf(df) else stats.t.sf(excess, df)
    found = established(p[:, None], Rule(family=rows))[:, 0] & (estimates >= math.log1p(RULE.min_effect))
    assert found.mean() == pytest.approx(0.95, abs=0.015)
