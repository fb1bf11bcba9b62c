"""Variances of few processes, drawn towards their common level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from joulemark.regression.variance import RESOLUTION, inverse_trigamma, moderate


@given(st.floats(1e-6, 1e4))
def test_the_inverse_of_trigamma_is_one(value):
    assert special.polygamma(1, float(inverse_trigamma(value))) == pytest.approx(value, rel=1e-6)


def test_a_single_row_keeps_its_own_variance_and_its_few_degrees_of_freedom():
    one = moderate([4e-4], 4)
    assert (one.variance[0], one.df[0], one.prior_df[0]) == (4e-4, 4, 0)


def test_many_rows_of_one_variance_pool_and_recover_it():
    rng = np.random.default_rng(3)
    true = 1e-4
    s2 = true * rng.chisquare(4, 400) / 4
    pooled = moderate(s2, 4)
    assert pooled.prior_variance[0] == pytest.approx(true, rel=0.1)
    assert pooled.prior_df[0] > 20
    assert np.var(np.log(pooled.variance)) < 0.1 * np.var(np.log(s2))


def test_the_scatter_of_true_variances_is_recovered():
    rng = np.random.default_rng(4)
    d0, s0 = 6.0, 2e-4
    true = d0 * s0 / rng.chisquare(d0, 5000)
    found = moderate(true * rng.chisquare(4, 5000) / 4, 4)
    assert found.prior_df[0] == pytest.approx(d0, rel=0.15)
    assert found.prior_variance[0] == pytest.approx(s0, rel=0.1)


def test_rows_that_differ_a_lot_speak_for_themselves():
    s2 = np.array([1e-8, 2e-8, 3e-6, 1e-4, 4e-4, 2e-3])
    found = moderate(s2, 4)
    assert found.prior_df[0] < 1
    assert found.variance[2:] == pytest.approx(s2[2:], rel=0.6)


def test_the_statistic_follows_its_student_distribution():
    rng = np.random.default_rng(5)
    runs, rows, n = 2000, 12, 3
    sd = np.sqrt(8 * 1e-4 / rng.chisquare(8, (runs, rows)))
    a, b = (rng.standard_normal((runs, rows, n)) * sd[..., None] for _ in range(2))
    found = moderate((a.var(axis=-1, ddof=1) + b.var(axis=-1, ddof=1)) / 2, 4)
    t = (b.mean(axis=-1) - a.mean(axis=-1)) / np.sqrt(found.variance * 2 / n)
    for level in (0.05, 0.005):
        share = (stats.t.sf(t, found.df) <= level).mean()
        assert share == pytest.approx(level, rel=0.35)


@given(st.lists(st.floats(0, 1e-2), min_size=2, max_size=12), st.integers(1, 10))
def test_a_moderated_variance_lies_between_its_own_and_the_common_one(s2, df):
    found = moderate(s2, df)
    own = np.maximum(s2, RESOLUTION**2)
    low, high = np.minimum(own, found.prior_variance), np.maximum(own, found.prior_variance)
    assert (found.variance >= low * (1 - 1e-9)).all()
    assert (found.variance <= high * (1 + 1e-9)).all()
    assert (found.df > df).all()


def test_no_spread_at_all_is_not_believed():
    assert (moderate([0.0, 0.0, 0.0], 4).variance >= RESOLUTION**2 * 0.5).all()


@pytest.mark.parametrize(("variance", "df"), [([], 4), ([1e-4], 0)])
def test_nothing_to_estimate_from_is_refused(variance, df):
    with pytest.raises(ValueError, match="at least one row"):
        moderate(variance, df)
