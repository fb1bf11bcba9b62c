"""Steady steps in stretches: what is left out, what is kept, what a change of state does to the figure."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from joulemark.collect.timing import HostTimer, SteadySamples
from joulemark.findings import bistable
from joulemark.measure import steady
from joulemark.measure.assemble import assemble
from joulemark.measure.pace import Alone, InStep
from joulemark.measure.plan import Pass, plan_for
from joulemark.measure.runner import Runner
from joulemark.records import Case, Measurement, Record
from joulemark.workloads.base import Step
from tests.measure.test_runner import Memory, ScriptedTimer

PASS = Pass("steady", 0.1, min_samples=5)


@dataclass
class Scripted(HostTimer):
    """Steps whose times are given; each stretch takes the next series, its last value for ever."""

    series: list[list[float]] = field(default_factory=list)
    device = "cuda:0"
    tier = "cuda_events"

    def steady(self, run, stop, step_s):
        given = self.series.pop(0)
        times, reason = [], None
        start = time.perf_counter()
        while reason is None:
            times.append(given[min(len(times), len(given) - 1)])
            reason = stop(times)
        return SteadySamples(times, start, start + sum(times), reason)


def take(times, one=PASS, step_s=0.01, pace=None, clock=steady.unknown_clock):
    return steady.take(Scripted([times]), lambda: None, one, step_s, pace or Alone(), clock)


def test_the_steps_before_the_device_has_settled_are_left_out():
    # Half of 0.1 s is the lead-in: five steps of 10 ms.
    found = take([0.009] * 5 + [0.01])
    assert set(found.step_s) == {0.01}
    assert len(found.step_s) >= 5
    assert found.end - found.start == pytest.approx(sum(found.step_s))


def test_ranks_leave_out_and_keep_the_same_number_of_steps():
    counts = {len(take(times, pace=InStep(lambda value: value)).step_s) for times in ([0.01], [0.5], [1e-6])}
    assert counts == {5}


def test_the_clock_is_read_while_the_device_works():
    readings = iter([1.98e9, None, *[1.7e9] * 99])

    def clock():
        time.sleep(steady._BETWEEN_READINGS_S)
        return next(readings)

    assert take([0.01], clock=clock).sm_clock_hz == 1.7e9
    assert take([0.01]).sm_clock_hz is None


@pytest.mark.parametrize(
    ("budget_s", "step_s", "expected"),
    [(0.4, 1e-3, 3), (0.4, 0.04, 2), (0.4, 1.0, 1), (0.1, 1e-3, 1), (2.0, 1e-3, 3), (0.2, 0.0, 2)],
)
def test_long_steps_and_short_passes_have_fewer_stretches(budget_s, step_s, expected):
    assert steady.stretches_of(Pass("steady", budget_s), step_s, Alone()) == expected
    assert steady.stretches_of(Pass("steady", budget_s), step_s, InStep(lambda value: value)) == 1


def stretches(*medians):
    return [steady.Stretch([one * 0.999, one, one * 1.001] * 3, 0.0, 1.0, "count reached") for one in medians]


def test_a_state_that_held_for_one_stretch_does_not_move_the_figure():
    value = steady.time_of(stretches(0.0947, 0.1, 0.1001), "cuda_events")
    assert value.value == 0.1
    assert value.interval[0] == 0.0947
    assert value.n == 27
    (alone,) = stretches(0.1)
    assert steady.time_of([alone], "cuda_events").interval == (0.1 * 0.999, 0.1 * 1.001)


def measured(found, process=0):
    return Measurement(
        "steady", {"device_time_s": steady.time_of(found, "x")}, steady.samples_of(found), process=process
    )


def record(*processes):
    measurements = [measured(found, number) for number, found in enumerate(processes)]
    return assemble(Case("w"), measurements, run_id="r", environment_id="e", outcome="ok")


def test_two_states_of_one_process_are_a_finding():
    (found,) = bistable(record(stretches(0.1, 0.1, 0.1), stretches(0.1, 0.0947, 0.0946)))
    assert found.flags
    assert "100 ms, 94.7 ms, 94.6 ms" in found.message
    assert "5.7%" in found.message
    assert not bistable(
        record(stretches(0.1, 0.1, 0.1), stretches(0.0947, 0.0946, 0.0947))
    )  # a process of its own speed
    assert not bistable(Record(Case("w"), "r", "ok", "e"))


def test_stretches_that_overlap_are_one_state():
    wide = [steady.Stretch([0.08, 0.1, 0.12, at] * 3, 0.0, 1.0, "x") for at in (0.09, 0.11)]
    assert not bistable(record(wide))


def test_stretches_are_spread_around_the_other_passes():
    def order(plan, stretches):
        return [one.name for one in plan.visits(stretches)]

    full = plan_for(("timing", "power"), True, True)
    assert order(full, 3) == ["latency", "steady", "issue", "power", "steady", "cold", "steady", "graph"]
    assert order(full, 1) == [one.name for one in full.passes]
    timing = plan_for(("timing",), True, False)
    assert order(timing, 3) == ["latency", "steady", "issue", "steady", "cold", "steady", "graph"]
    assert order(full.only(("steady", "graph")), 3) == ["steady", "steady", "steady", "graph"]
    assert order(plan_for(("timing",), False, False), 3) == ["latency"]


def test_a_case_has_the_median_of_its_stretches_and_their_clocks():
    class Changing(ScriptedTimer):
        """The second of three stretches runs 5 % faster."""

        calls = 0

        def steady(self, run, stop, step_s):
            self.calls += 1
            now = time.perf_counter()
            stop([0.001] * 200)
            return SteadySamples([0.00095 if self.calls == 2 else 0.001] * 200, now - 0.2, now, "precision reached")

    plan = plan_for(("timing",), True, False).only(("latency", "steady", "cold"))
    measured = Runner(Changing(), Memory(), clock=lambda: 1.9e9).measure(Step(lambda: None, items=2), plan)
    one = next(one for one in measured if one.name == "steady")
    assert one.values["device_time_s"].value == 0.001
    assert one.values["device_time_s"].interval[0] == 0.00095
    assert one.values["throughput_per_s"].value == pytest.approx(2000)
    assert one.samples["stretch_time_s"] == [0.001, 0.00095, 0.001]
    assert sum(one.samples["stretch_steps"]) == len(one.samples["device_time_s"])
    assert one.samples["stretch_sm_clock_hz"] == [1.9e9] * 3
    assert one.values["steady_sm_clock_hz"].value == 1.9e9
    made = assemble(Case("w"), measured, run_id="r", environment_id="e", outcome="ok")
    assert made.outcome == "flagged"
    assert "bistable" in [finding.code for finding in made.findings]


def test_steps_take_turns_in_the_given_order():
    ran = []

    class Turning(Scripted):
        def steady(self, run, stop, step_s):
            run()
            ran.append(named.pop())
            self.series.append([0.01 * (1 + len(ran))])
            return super().steady(run, stop, step_s)

    named = []
    steps = [Step(lambda name=name: named.append(name), items=items) for name, items in (("a", 1), ("b", 2))]
    one = Pass("steady", 0.05, min_samples=1, target=0.0)
    first, second = Runner(Turning(), Memory()).in_turns(steps, one, [(0, 1), (1, 0), (0, 1)])
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert first.samples["stretch_time_s"] == [0.02, 0.05, 0.06]
    assert second.samples["stretch_time_s"] == [0.03, 0.04, 0.07]
    assert second.values["throughput_per_s"].value == pytest.approx(2 / 0.04)
    assert [one.name for one in (first, second)] == ["steady"] * 2
