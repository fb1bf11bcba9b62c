"""What a calibration measures."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from joulemark.energy.calibrate import SETTLE_S, WINDOW_S
from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.plan import DUTIES, meets_limit, plan

COMMAND_S = 9 * 60.0
CAMPAIGN_WINDOW_S = 0.85
POINT_S = SETTLE_S + WINDOW_S + 0.4


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a", "sm_100"])
def test_a_quick_plan_fits_one_command(architecture):
    assert len(plan(architecture, quick=True)) * POINT_S < COMMAND_S


def test_a_repeat_of_the_reference_plan_takes_about_a_command():
    assert len(plan("sm_90a", repeats=1)) * POINT_S < 1.3 * COMMAND_S


@pytest.mark.parametrize("quick", [True, False])
def test_every_unit_is_measured_with_both_operands_at_two_duties(quick):
    for (benchmark, operands), duties in duties_of(plan("sm_90a", quick)).items():
        if operands in ("zero", "random") and SUITE[benchmark].role == "fit" and SUITE[benchmark].unit != "instruction":
            least = {"half", "quarter"} if SUITE[benchmark].unit == "l2_request" else {"full", "half"}
            assert ({"full", "eighth"} if SUITE[benchmark].level == "hbm" else least) <= duties


def test_every_line_has_three_windows_below_the_limit_before_anything_else():
    """A benchmark of a tensor pipe meets the limit at its full duty: without it three are left."""
    points = plan("sm_90a", repeats=1, last="lines")
    assert points == plan("sm_90a")[: len(points)]
    for (benchmark, operands), duties in duties_of(points).items():
        if operands in ("zero", "random") and SUITE[benchmark].role == "fit":
            free = {duty for duty in duties if not meets_limit(benchmark, operands, duty)}
            assert len(free) >= 3, benchmark


def test_lines_take_less_than_six_minutes():
    points = plan("sm_90a", repeats=1, last="lines")
    slow = sum(meets_limit(point.benchmark, point.operands, point.duty) for point in points)
    assert len(points) * (SETTLE_S + CAMPAIGN_WINDOW_S + 0.2) + 2.0 * slow < 360.0


def test_bursts_are_checks_of_loads_of_every_kind():
    found = {point.benchmark for point in plan("sm_90a", repeats=1, last="lines") if point.duty == "burst"}
    assert found == {"fp64", "fp16x2", "mma_int8", "l2_read", "hbm_read"}
    assert [name for name, duty in DUTIES.items() if duty.bursts] == ["burst"]


def test_sms_pause_among_the_lines_under_loads_of_every_kind():
    points = [point for point in plan("sm_90a", repeats=1, last="lines") if point.duty == "paused"]
    assert {point.operands for point in points} == {"random"}
    assert {SUITE[point.benchmark].family for point in points} == {"vector", "tensor", "wgmma", "memory"}
    assert len(points) == 7 <= len({point.benchmark for point in points})


def test_the_memory_is_seen_far_below_its_peak():
    """One SM reaches a few per cent of it: what a memory in use costs is then not the same as its bytes."""
    found = duties_of(plan("sm_90a", repeats=1, last="lines"))
    for name in ("hbm_read", "hbm_write"):
        assert all({"full", "quarter", "eighth", "single"} <= found[name, kind] for kind in ("zero", "random"))


def test_the_idle_board_is_weighed_all_along():
    points = plan("sm_90a")
    at = [i for i, point in enumerate(points) if point.benchmark == "idle"]
    assert at[0] == 0
    assert all(b - a <= 26 for a, b in pairwise(at))
    assert len(points) - at[-1] <= 26


def test_the_law_of_the_clock_has_a_load_of_its_own_at_several_duties():
    assert duties_of(plan("sm_90a"))["wgmma_fp16_l2", "random"] == {"full", "three_quarters", "half"}


def duties_of(points):
    found = {}
    for point in points:
        found.setdefault((point.benchmark, point.operands), set()).add(point.duty)
    return found


def test_points_are_unique_interleaved_and_reproducible():
    points = plan("sm_90a", repeats=2)
    assert max(Counter(point.key for point in points).values()) == 1
    assert points == plan("sm_90a", repeats=2)
    assert points != plan("sm_90a", repeats=2, seed=1)
    neighbours = sum(a.benchmark == b.benchmark for a, b in pairwise(points))
    assert neighbours < len(points) / 10


def test_the_quick_part_of_a_repeat_comes_first():
    short = plan("sm_90a", quick=True)
    quick = {(p.benchmark, p.operands, p.duty) for p in short}
    first = plan("sm_90a")[: len(short)]
    assert {(p.benchmark, p.operands, p.duty) for p in first} == quick


def test_duties():
    assert [DUTIES[name].blocks(132) for name in ("full", "three_quarters", "half", "quarter", "single")] == [
        132,
        99,
        66,
        33,
        1,
    ]
    assert [name for name, duty in DUTIES.items() if duty.paused] == ["paused"]


def test_checks_and_static_points_are_there():
    names = {point.benchmark for point in plan("sm_90a", quick=True)}
    assert names == {one.name for one in SUITE.values() if one.runs_on("sm_90a")}
