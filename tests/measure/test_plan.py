"""From instruments to passes."""

from __future__ import annotations

import pytest

from joulemark.errors import ConfigurationError
from joulemark.measure.plan import ALONE, INSTRUMENTS, Pass, Plan, plan_alone, plan_for


def names(plan):
    return [one.name for one in plan.passes]


def test_a_gpu_gets_every_pass_the_riskiest_last():
    assert names(plan_for(("timing", "power"), on_gpu=True, has_power=True)) == [
        "latency", "steady", "issue", "power", "cold", "graph",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("instruments", "on_gpu", "has_power", "expected"),
    [
        (("timing",), True, True, ["latency", "steady", "issue", "cold", "graph"]),
        (("power",), True, True, ["latency", "power"]),
        (("timing", "power"), True, False, ["latency", "steady", "issue", "cold", "graph"]),
        (("timing", "power"), False, True, ["latency", "power"]),
        (("timing",), False, False, ["latency"]),
        (("power",), False, False, ["latency"]),
    ],
)
def test_what_is_off_is_left_out(instruments, on_gpu, has_power, expected):
    assert names(plan_for(instruments, on_gpu, has_power)) == expected


@pytest.mark.parametrize("on_gpu", [True, False])
def test_instruments_with_processes_of_their_own_leave_the_plan_as_it_is(on_gpu):
    plain = plan_for(("timing", "power"), on_gpu, has_power=True)
    assert plan_for(INSTRUMENTS, on_gpu, has_power=True) == plain
    assert not set(names(plain)) & set(ALONE)


def test_a_process_for_one_instrument_has_its_pass_alone():
    assert plan_alone(None) is None
    for one in ALONE:
        assert names(plan_alone(one)) == names(plan_alone(one, quick=True)) == [one]
    assert plan_alone("attribution", quick=True).passes[0].min_samples < ALONE["attribution"].passes[0].min_samples
    assert plan_alone("counters", quick=True) is ALONE["counters"]


def test_an_unknown_instrument_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"no instrument 'heat'.*timing, power"):
        plan_for(("timing", "heat"), True, True)


def test_quick_passes_are_shorter_and_aim_lower():
    full = plan_for(("timing", "power"), True, True)
    quick = plan_for(("timing", "power"), True, True, quick=True)
    assert all(short.budget_s < long.budget_s for short, long in zip(quick.passes, full.passes, strict=True))
    assert all(one.target >= 0.01 for one in quick.passes)


def test_scaling_keeps_the_energy_window_as_long_as_the_others_can_give():
    plan = Plan((Pass("latency", 1.0), Pass("power", 3.0)))
    assert plan.nominal_s == 4.0
    assert plan.scaled(4.0) == plan
    shorter = plan.scaled(3.5)
    assert [one.budget_s for one in shorter.passes] == pytest.approx([0.5, 3.0])
    assert plan.scaled(2.0).nominal_s == pytest.approx(2.0)
    assert plan.scaled(0.01).nominal_s == pytest.approx(1.0)
    longer = plan.scaled(100.0)
    assert [one.budget_s for one in longer.passes] == pytest.approx([5.0, 3.0])
    assert Plan(()).scaled(1.0) == Plan(())
    assert plan.find("power") == Pass("power", 3.0)
    assert plan.find("cold") is None
