"""Means and scatter of a row's processes, without the one that stands apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulemark.regression.scatter import joined, pool, scatter_of
from joulemark.regression.variance import moderate

rng = np.random.default_rng(0)
QUIET = [rng.normal(0, 0.002, (2, 3)) for _ in range(7)]
"""Sides of rows whose processes are alike."""


def pooled(base, new):
    """The row in question, pooled with quiet ones."""
    rows = [(np.asarray(base), np.asarray(new)), *((one[0], one[1]) for one in QUIET)]
    return pool(joined([scatter_of(*sides) for sides in rows]))


def row(base, new):
    """Effect of the row, whether a process was left out, counts of both sides."""
    found = pooled(base, new)
    return float(found.effect[0]), bool(found.left_out[0]), found.counts[0].tolist()


def test_processes_that_are_alike_are_all_kept():
    base, new = (rng.normal(0, 0.002, (4000, 8, 3)) for _ in range(2))
    found = pool(scatter_of(base, new))
    assert found.left_out.mean() < 0.004
    kept = ~found.left_out.any(axis=-1)
    variance = moderate((base.var(axis=-1, ddof=1) + new.var(axis=-1, ddof=1)) / 2, 4)
    assert found.effect[kept] == pytest.approx((new.mean(axis=-1) - base.mean(axis=-1))[kept])
    assert found.error[kept] == pytest.approx(np.sqrt(variance.variance * 2 / 3)[kept])
    assert found.df[kept] == pytest.approx(variance.df[kept])


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("speed", [-0.06, 0.06])
@pytest.mark.parametrize("slowdown", [0.0, 0.03])
def test_one_process_at_a_speed_of_its_own_is_left_out_of_means_and_scatter(side, speed, slowdown):
    sides = [np.array([0.0, 0.001, -0.001]), np.array([0.001, 0.0, -0.001]) + slowdown]
    sides[side][0] += speed
    effect, left_out, counts = row(*sides)
    assert left_out
    assert counts == ([2, 3] if side == 0 else [3, 2])
    assert effect == pytest.approx(slowdown, abs=0.001)
    assert pooled(*sides).error[0] < 0.005


def test_a_row_that_two_speeds_explain_keeps_all_its_processes():
    # Fast, fast, slow against three slow: no change at two speeds, or a slowdown beside one slow process.
    for base, new in (([-0.06, -0.0602, 0.0], [0.0, 0.001, -0.001]), ([0.0, 0.001, -0.001], [0.06, 0.0602, 0.0005])):
        effect, left_out, counts = row(base, new)
        assert (left_out, counts) == (False, [3, 3])
        assert effect == pytest.approx(0.04, abs=0.001)
        assert pooled(base, new).error[0] > 0.01


def test_two_processes_that_stand_apart_are_what_the_row_is_like():
    _, left_out, _ = row([0.0, 0.001, -0.06], [0.03, 0.031, -0.029])
    assert not left_out


def test_sides_of_any_size_and_single_sides_are_pooled():
    rows = [scatter_of(np.array([0.0, 0.001, 0.06, -0.001]), np.array([0.0, 0.001, 0.0005]))]
    rows += [scatter_of(np.array([0.0, 0.001, -0.001, 0.0, 0.05])), *(scatter_of(*one) for one in QUIET)]
    found = pool(joined(rows))
    assert found.left_out[:2].all()
    assert found.counts[:2].tolist() == [[3, 3], [4, 0]]
    assert np.isfinite(found.error[0])
    assert np.isinf(found.error[1])
    assert np.isnan(found.effect[1])


@given(st.lists(st.lists(st.floats(-5, 5), min_size=6, max_size=6), min_size=1, max_size=5), st.floats(-3, 3))
def test_sides_may_be_swapped_and_shifted(rows, level):
    base, new = np.split(np.asarray(rows), 2, axis=-1)
    one, back = pool(scatter_of(base, new)), pool(scatter_of(new + level, base + level))
    if not (one.left_out == back.left_out).all():  # at the very edge of a chance
        return
    assert back.effect == pytest.approx(-one.effect, abs=1e-9)
    assert back.error == pytest.approx(one.error, rel=1e-5)


def test_a_row_alone_knows_its_own_scatter_only():
    found = pool(scatter_of(np.array([[0.0, 0.001, -0.001]]), np.array([[0.001, 0.0, 0.01]])))
    assert not found.left_out.any()  # the five others know little: ten times their scatter is not far enough
    far = pool(scatter_of(np.array([[0.0, 0.001, -0.001]]), np.array([[0.001, 0.0, 0.3]])))
    assert far.left_out.all()
    assert far.df[0] == 3
