"""Cache ends from latency curves that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulemark.energy.caches import LINE_BYTES, Caches, chase_ring, chase_sizes, find_caches
from joulemark.errors import MeasurementError

KIB, MIB = 1 << 10, 1 << 20
L2 = 60 * MIB


def curve(l1=192 * KIB, l2=40 * MIB, levels=(35.0, 260.0, 750.0), ramp=0.0, noise=0.0, seed=0):
    """Sizes and latencies: past a level's end a share of the accesses misses, growing over ``ramp`` octaves."""
    rng = np.random.default_rng(seed)
    sizes = chase_sizes(L2)
    latencies = []
    for size in sizes:
        miss = [min(1.0, max(0.0, np.log2(size / end) / ramp if ramp else float(size > end))) for end in (l1, l2)]
        mean = levels[0] + miss[0] * (levels[1] - levels[0]) + miss[1] * (levels[2] - levels[1])
        latencies.append(mean * rng.normal(1, noise) if noise else mean)
    return sizes, latencies


def test_sharp_ends_are_found_between_neighbouring_sizes():
    found = find_caches(*curve())
    assert found.l1.fits_bytes <= 192 * KIB < found.l1.beyond_bytes
    assert found.l2.fits_bytes <= 40 * MIB < found.l2.beyond_bytes
    assert found.l1.beyond_bytes / found.l1.fits_bytes < 1.2
    assert (found.l1.latency_cycles, found.l2.latency_cycles, found.hbm_latency_cycles) == (35, 260, 750)


@settings(max_examples=15, deadline=None)
@given(
    l1=st.integers(32, 256),
    l2=st.integers(4, 100),
    noise=st.floats(0, 0.03),
    seed=st.integers(0, 99),
)
def test_noisy_ends_are_found(l1, l2, noise, seed):
    found = find_caches(*curve(l1 * KIB, l2 * MIB, noise=noise, seed=seed))
    assert 0.8 * l1 * KIB <= found.l1.fits_bytes <= l1 * KIB
    assert 0.8 * l2 * MIB <= found.l2.fits_bytes <= l2 * MIB


def test_a_gradual_end_is_a_range():
    found = find_caches(*curve(ramp=1.0))
    assert 0.8 * 192 * KIB <= found.l1.fits_bytes <= 1.2 * 192 * KIB
    assert found.l2.fits_bytes <= 1.2 * 40 * MIB
    assert found.l2.beyond_bytes > 1.2 * found.l2.fits_bytes


def test_a_far_part_of_the_l2_does_not_end_it():
    """Latency rises by a fifth where the near partition ends."""
    sizes, latencies = curve()
    latencies = [x * 1.2 if 20 * MIB < size <= 40 * MIB else x for size, x in zip(sizes, latencies, strict=True)]
    found = find_caches(sizes, latencies)
    assert found.l2.beyond_bytes > 40 * MIB
    assert found.l2.fits_bytes >= 16 * MIB


@pytest.mark.parametrize("levels", [(35.0, 35.0, 35.0), (35.0, 260.0, 270.0), (35.0, 40.0, 750.0)])
def test_a_curve_without_two_rises_is_refused(levels):
    with pytest.raises(MeasurementError, match="no end of the L"):
        find_caches(*curve(levels=levels))


@pytest.mark.parametrize(
    ("sizes", "latencies"),
    [
        ([1, 2, 3], [1, 2, 3]),
        (list(range(1, 10)), [0.0] * 9),
        (list(range(1, 10)), [float("nan")] * 9),
        ([5] * 9, [1] * 9),
    ],
)
def test_what_is_no_curve_is_refused(sizes, latencies):
    with pytest.raises(MeasurementError):
        find_caches(sizes, latencies)


def test_a_ring_visits_every_line_once():
    size = 64 * KIB
    words = chase_ring(size, seed=3)
    assert words.nbytes == size
    at, seen = 0, set()
    for _ in range(size // LINE_BYTES):
        seen.add(at)
        at = int(words[at // 4])
    assert at == 0
    assert seen == set(range(0, size, LINE_BYTES))


def test_sizes_reach_beyond_the_l2_and_are_lines():
    sizes = chase_sizes(L2)
    assert sizes[0] == 16 * KIB
    assert sizes[-1] > 2 * L2
    assert all(size % LINE_BYTES == 0 for size in sizes)
    assert sizes == sorted(set(sizes))
    assert chase_sizes(4 * MIB)[-1] >= 32 * MIB


def test_caches_survive_json():
    found = find_caches(*curve())
    assert Caches.from_json(found.to_json()) == found
