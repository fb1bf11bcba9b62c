"""What a calibration measures."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from joulemark.energy.calibrate import SETTLE_S, WINDOW_S
from joulemark.energy.microbench.suite import SUITE, benchmarks_for
from joulemark.energy.plan import DUTIES, plan

COMMAND_S = 9 * 60.0
POINT_S = SETTLE_S + WINDOW_S + 0.4


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a", "sm_100"])
def test_a_quick_plan_fits_one_command(architecture):
    assert len(plan(architecture, quick=True)) * POINT_S < COMMAND_S


def test_a_reference_plan_takes_two_commands():
    assert COMMAND_S < len(plan("sm_90a")) * POINT_S < 2 * COMMAND_S


@pytest.mark.parametrize("quick", [True, False])
def test_every_unit_is_measured_with_both_operands_at_two_duties(quick):
    points = plan("sm_90a", quick)
    for benchmark in benchmarks_for("sm_90a"):
        if benchmark.role != "fit" or benchmark.unit == "instruction":
            continue
        for operands in ("zero", "random"):
            duties = {point.duty for point in points if (point.benchmark, point.operands) == (benchmark.name, operands)}
            assert {"full", "half"} <= duties
            assert quick or "paused" in duties


def test_points_are_unique_interleaved_and_reproducible():
    points = plan("sm_90a", repeats=2)
    assert max(Counter(point.key for point in points).values()) == 1
    assert points == plan("sm_90a", repeats=2)
    assert points != plan("sm_90a", repeats=2, seed=1)
    neighbours = sum(a.benchmark == b.benchmark for a, b in pairwise(points))
    assert neighbours < len(points) / 10


def test_the_quick_part_of_a_repeat_comes_first():
    quick = {(p.benchmark, p.operands, p.duty) for p in plan("sm_90a", quick=True)}
    first = plan("sm_90a")[: len(quick)]
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
