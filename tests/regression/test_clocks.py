"""Whether a row's sides ran at different SM clocks."""

from __future__ import annotations

import numpy as np
import pytest

from joulemark.regression.clocks import sides_differ

BOOST, STEP = 1.98e9, 15e6
"""An H200's highest SM clock and the distance to the next lower one, in Hz."""


def differ(base, new):
    there, back = (bool(sides_differ(np.log(one), np.log(other))) for one, other in ((base, new), (new, base)))
    assert there == back
    return there


def test_sides_at_one_clock_each_differ_from_half_a_percent_on():
    assert differ([BOOST] * 3, [BOOST - STEP] * 3)
    assert not differ([BOOST] * 3, [0.996 * BOOST] * 3)
    assert not differ([BOOST] * 3, [BOOST] * 3)
    assert differ([BOOST], [1e-300])  # without a warning of an overflow


def test_a_clock_that_moves_on_both_sides_alike_is_none_of_their_difference():
    assert not differ([1.545e9, 1.98e9, 1.53e9], [1.53e9, 1.545e9, 1.98e9])
    assert not differ([BOOST] * 3, [BOOST, BOOST, BOOST - 3 * STEP])
    assert differ([1.70e9, 1.72e9, 1.71e9], [1.60e9, 1.62e9, 1.61e9])


@pytest.mark.parametrize("scatter", [0.01, 0.05])
@pytest.mark.parametrize("processes", [(3, 3), (3, 8)])
def test_sides_at_the_same_clock_are_seldom_taken_for_different_ones(scatter, processes):
    rng = np.random.default_rng(0)
    base, new = (21 + scatter * rng.standard_normal((20_000, size)) for size in processes)
    share = sides_differ(base, new).mean()
    assert 0.02 < share < 0.055
    assert sides_differ(base, new - 5 * scatter).mean() > 0.95


def test_the_difference_alone_decides_where_a_side_has_too_few_processes():
    assert differ([1.98e9, 1.53e9], [1.6e9, 1.9e9, 1.8e9])
    assert not differ([BOOST], [0.996 * BOOST] * 3)
    assert differ([BOOST], [BOOST - STEP])
