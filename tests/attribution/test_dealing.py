"""What samples counted is dealt out to the kernels that ran in them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from joulemark.attribution.dealing import Part, deal, doubt, per_step

LONG, SHORT = np.array([True, True]), np.array([True, False])


def dealt(counts, overlap, rates, long):
    return deal(np.array(counts, float), sparse.csr_array(np.array(overlap)), np.array(rates), long).toarray()


def test_the_end_of_a_kernel_that_counts_nothing_is_its_own():
    """A product of 0.8 before a kernel of 0.01: of the first sample, 2 of the product's 6 µs counted nothing."""
    found = dealt([3.24, 0.1], [[6.0, 4.0], [0.0, 10.0]], [0.8, 0.01], LONG)
    assert found.sum(axis=1) == pytest.approx([3.24, 0.1])
    assert found[0, 0] == pytest.approx(3.2, rel=1e-3)
    assert found[:, 1].sum() == pytest.approx(0.14, rel=0.02)


def test_amounts_change_by_the_least_in_proportion():
    rates, seconds, count = np.array([2.0, 1.0]), np.array([[3.0, 4.0]]), 13.0
    found = dealt([count], seconds, rates, LONG)[0]
    expected = (seconds * rates)[0]

    def changed(amounts):
        return ((amounts / expected - 1) ** 2).sum()

    others = [changed(found + np.array([more, -more])) for more in (-0.1, 0.1)]
    assert found.sum() == pytest.approx(count)
    assert changed(found) < min(others)


def test_a_short_kernel_keeps_what_its_rate_says():
    found = dealt([9.0], [[5.0, 1.0]], [1.0, 2.0], SHORT)[0]
    assert found[1] == 2.0
    assert 5.0 < found[0] < 7.0  # of the 2 that are over the short one's part is left


def test_nothing_is_negative_and_nothing_is_given_where_no_kernel_counts():
    found = dealt([0.0, 7.0, 1.0], [[3.0, 2.0], [0.0, 0.0], [0.0, 4.0]], [5.0, 0.0], LONG)
    assert (found >= 0).all()
    assert found[1:].sum() == 0


def test_amounts_are_those_of_each_step():
    overlap = sparse.csr_array(np.array([[10.0, 0.0], [4.0, 6.0], [0.0, 10.0]]))
    part = Part(overlap, np.array([[10.0], [16.0], [20.0]]), np.array([3, 3, 7]))
    found = per_step([part], np.array([[1.0], [2.0]]), LONG, np.array([3, 7]))
    assert found[:, 0] == pytest.approx(np.array([[14.0, 0.0], [12.0, 20.0]]))


def test_sharing_is_as_doubtful_as_samples_are_off_their_rates():
    overlap = sparse.csr_array(np.array([[10.0, 0.0], [5.0, 5.0], [5.0, 5.0]]))
    part = Part(overlap, np.array([[10.0], [11.0], [9.0]]), np.array([0, 0, 1]))
    rates = np.ones((2, 1))
    found = doubt([part], rates, LONG, np.array([[1.0, 0.0], [1.0, 1.0]]))
    sigma = np.sqrt(2 * 1.0**2 / (4 * 5.0**2))  # off by 1 in both mixed samples
    assert found[0, 0] == pytest.approx(sigma * np.sqrt(2 * 25.0 * (1 - 25.0 / 50.0)))
    assert found[1, 0] == pytest.approx(0.0, abs=1e-9)  # together they are what was counted
    assert doubt([part], rates, SHORT, np.eye(2)).max() == 0.0
