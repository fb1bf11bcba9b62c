"""The one loop, over a scripted timer and a simulated GPU."""

from __future__ import annotations

import gc
import math
import time
import warnings
from dataclasses import dataclass, field

import pytest

from joulemark.collect.power import PowerSampler
from joulemark.collect.timing import HostTimer, IssueSamples, LoneSamples, SteadySamples
from joulemark.errors import Unsupported
from joulemark.measure.pace import InStep
from joulemark.measure.plan import Pass, Plan, plan_for
from joulemark.measure.runner import Runner, missing_metrics, warnings_as_findings
from joulemark.measure.value import value_of
from joulemark.testing import FakeGpu
from joulemark.workloads.base import Step


@dataclass
class Memory:
    peak: int | None = 5_000_000
    tier: str = "torch_allocator"

    def reset(self):
        return None

    def read_bytes(self):
        return self.peak


@dataclass
class ScriptedTimer(HostTimer):
    """A device clock whose figures are known: host 3 ms, device 2 ms lone and 1 ms steady, 0.5 ms in a graph."""

    side_streams: bool = False
    l2: bool = True
    graph_error: Exception | None = None
    log: list[str] = field(default_factory=list)
    tier = "cuda_events"
    device = "cuda:0"

    def lone(self, run, setup, stop, iterations=1):
        self.log.append("lone")
        if setup is not None:
            setup()
        run()
        now = time.perf_counter()
        return LoneSamples(
            [0.003] * 9, [0.002] * 9, self.side_streams, now - 0.027, now, "precision reached", [0.0006] * 9
        )

    def steady(self, run, stop, step_s):
        self.log.append("steady")
        each = 0.0005 if run() == "replay" else 0.001
        now = time.perf_counter()
        return SteadySamples([each] * 20, now - 0.02, now, "precision reached")

    def issue(self, run, stop):
        self.log.append("issue")
        run()
        return IssueSamples([0.0004] * 9, [0.0002] * 9)

    def flush_l2(self):
        return (lambda: self.log.append("flush")) if self.l2 else None

    def capture(self, run):
        self.log.append("capture")
        if self.graph_error is not None:
            raise self.graph_error
        return lambda: "replay"


ALL = plan_for(("timing", "power"), on_gpu=True, has_power=False)


def merged(measurements):
    values, missing, samples = {}, {}, {}
    for one in measurements:
        values.update(one.values)
        missing.update(one.missing)
        samples.update(one.samples)
    return values, missing, samples


class Issuing(ScriptedTimer):
    """Its bursts end when the pace says so."""

    def issue(self, run, stop):
        samples = []
        while True:
            samples += [0.0004] * 4
            if stop(samples):
                return IssueSamples(samples, [0.0002] * len(samples))


def test_ranks_issue_as_many_steps_as_rank_zeros_clock_allows():
    pace = InStep(lambda value: 0.01 if isinstance(value, float) else value)
    measured = Runner(Issuing(), Memory(), pace=pace).measure(
        Step(lambda: None), ALL.only(("latency", "steady", "issue"))
    )
    budget_s = ALL.find("issue").budget_s
    assert len(merged(measured)[2]["host_issue_unprofiled_s"]) == 4 * math.ceil(budget_s / 0.01 / 4)


def test_every_pass_gives_its_figures():
    timer = ScriptedTimer()
    measured = Runner(timer, Memory()).measure(Step(lambda: None, items=8, capturable=True), ALL, build_s=0.5)
    values, missing, samples = merged(measured)
    assert [one.name for one in measured] == ["latency", "steady", "issue", "cold", "graph"]
    assert missing == {}
    assert values["host_time_s"].value == 0.003
    assert values["device_time_s"].value == 0.001
    assert values["device_time_s"].tier == "cuda_events"
    assert values["device_time_cold_s"].value == 0.002
    assert values["device_time_graph_s"].value == 0.0005
    assert values["throughput_per_s"].value == 8000
    assert values["peak_memory_bytes"].value == 5_000_000
    assert values["warmup_s"].value > 0.5
    assert samples["host_time_s"] == [0.003] * 9
    assert samples["lone_issue_s"] == [0.0006] * 9
    assert samples["host_issue_unprofiled_s"] == [0.0004] * 9
    assert values["host_issue_unprofiled_s"].value == 0.0004
    assert samples["host_reference_s"] == [0.0002] * 9
    assert values["host_reference_s"].value == 0.0002
    assert "flush" in timer.log
    assert {one.name: len(one.windows_utc) for one in measured} == {
        "latency": 1, "steady": 3, "issue": 0, "cold": 1, "graph": 1,
    }  # fmt: skip
    for start, end in (window for one in measured for window in one.windows_utc):
        assert start < end <= time.time()


def test_a_setup_between_steps_leaves_the_lone_device_time():
    calls = []
    step = Step(lambda: None, items=4, setup=lambda: calls.append(1))
    values, missing, _ = merged(Runner(ScriptedTimer(), Memory()).measure(step, ALL))
    assert values["device_time_s"].value == 0.002
    assert values["throughput_per_s"].value == pytest.approx(2000)
    assert "cannot be issued back to back" in missing["device_time_s"]
    assert "device_time_graph_s" in missing
    assert len(calls) > 3


def test_side_streams_are_said():
    measured = Runner(ScriptedTimer(side_streams=True), Memory()).measure(Step(lambda: None), ALL)
    assert "several streams" in measured[1].missing["device_time_s"]
    assert "side_streams" in [one.code for one in measured[0].findings]
    assert measured[0].values["device_time_s"].value == 0.002


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unsupported("the step cannot be captured"), "cannot be captured"),
        (RuntimeError("CUDA out of memory"), "out of memory in this pass"),
        (MemoryError(), "out of memory in this pass"),
    ],
)
def test_a_later_pass_is_lost_alone(error, said):
    timer = ScriptedTimer(graph_error=error, l2=False)
    values, missing, _ = merged(Runner(timer, Memory()).measure(Step(lambda: None, capturable=True), ALL))
    assert values["device_time_s"].value == 0.001
    assert said in missing["device_time_graph_s"]
    assert "L2 cache is not known" in missing["device_time_cold_s"]


def test_any_other_error_is_the_cases():
    timer = ScriptedTimer(graph_error=RuntimeError("illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        Runner(timer, Memory()).measure(Step(lambda: None, capturable=True), ALL)


def test_a_step_that_does_not_fit_is_raised():
    def run():
        raise MemoryError

    with pytest.raises(MemoryError):
        Runner(HostTimer(), Memory()).measure(Step(run), ALL)


LATENCY = Plan((Pass("latency", 0.05),))


def test_on_a_host_short_calls_are_repeated_within_a_round(monkeypatch):
    """Calls and clock readings of 0.1 µs: a real clock may show the pilot a host that had just stalled."""
    clock, calls = [0.0], []

    def passes(result=None):
        clock[0] += 1e-7
        return result

    monkeypatch.setattr(time, "perf_counter", lambda: passes() or clock[0])
    step = Step(lambda: passes(calls.append(1)))
    (latency,) = Runner(HostTimer(), Memory(peak=None)).measure(step, LATENCY)
    assert len(calls) > 20 * len(latency.samples["host_time_s"])
    assert latency.values["host_time_s"].value < 5e-6
    assert latency.values["throughput_per_s"].value == pytest.approx(1 / latency.values["host_time_s"].value)
    assert "does not show the peak" in latency.missing["peak_memory_bytes"]
    assert "no CUDA device clock" in latency.missing["device_time_s"]


def test_fixed_rounds_iterations_and_warm_ups_are_kept():
    calls = []
    runner = Runner(HostTimer(), Memory())
    (latency,) = runner.measure(Step(lambda: calls.append(1)), LATENCY, rounds=4, iterations=3, warmup_rounds=2)
    assert len(latency.samples["host_time_s"]) == 4
    assert len(calls) == 2 + 4 * 3


def test_a_first_step_that_takes_all_the_time_of_the_warm_up_is_not_taken_for_a_warm_one(monkeypatch):
    """A compiled step: its first call is mostly the compiler."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    took = iter([40.0, 0.01, 0.01])

    def run():
        clock[0] += next(took)

    runner = Runner(HostTimer(), Memory())
    warm = runner._warm_up(Step(run), None)
    assert (warm.step_s, warm.steps) == (pytest.approx(0.01), 2)


def test_the_first_slow_call_is_warm_up():
    delays = iter([0.15])
    (latency,) = Runner(HostTimer(), Memory()).measure(Step(lambda: time.sleep(next(delays, 0.002))), LATENCY)
    assert max(latency.samples["host_time_s"]) < 0.1
    assert latency.values["warmup_s"].value > 0.15
    assert latency.values["warmup_s"].n >= 3


def test_the_garbage_collector_rests_and_comes_back():
    seen = []
    Runner(HostTimer(), Memory()).measure(Step(lambda: seen.append(gc.isenabled())), LATENCY, rounds=3, iterations=1)
    assert seen[-3:] == [False] * 3
    assert gc.isenabled()


def test_energy_per_item_is_power_times_the_time_of_an_item():
    power = PowerSampler(FakeGpu(power_w=200.0))
    plan = Plan((Pass("latency", 0.05), Pass("power", 1.3)))
    with power:
        measured = Runner(HostTimer(), Memory(), power).measure(Step(lambda: time.sleep(0.002), items=10), plan)
    values, missing, samples = merged(measured)
    assert values["power_w"].value == pytest.approx(200, rel=0.03)
    per_item = sum(samples["energy_window_s"]) / sum(samples["energy_steps"]) / 10
    assert values["energy_per_item_j"].value == pytest.approx(values["power_w"].value * per_item)
    assert per_item > 0.0002
    assert "sampler_slowdown" not in values  # nothing timed the same steps back to back without the sampler
    assert sum(samples["energy_window_s"]) > 0.8
    assert measured[1].conditions.sm_clock_hz == 1.98e9
    assert "energy_per_item_j" not in missing


def test_the_samplers_cost_is_the_step_beside_it_over_the_step_without():
    class Sleeping(HostTimer):
        def steady(self, run, stop, step_s):
            now = time.perf_counter()
            return SteadySamples([0.002] * 20, now - 0.04, now, "precision reached")

    power = PowerSampler(FakeGpu(power_w=200.0))
    plan = Plan((Pass("latency", 0.02), Pass("steady", 0.02), Pass("power", 1.0)))
    with power:
        values, _, _ = merged(Runner(Sleeping(), Memory(), power).measure(Step(lambda: time.sleep(0.004)), plan))
    assert values["sampler_slowdown"].value == pytest.approx(1.0, abs=0.4)


def test_energy_is_not_taken_where_a_setup_runs_between_the_steps():
    plan = Plan((Pass("latency", 0.02), Pass("power", 0.1)))
    with PowerSampler(FakeGpu()) as power:
        step = Step(lambda: None, setup=lambda: None)
        values, missing, _ = merged(Runner(HostTimer(), Memory(), power).measure(step, plan))
    assert "power_w" not in values
    assert "setup" in missing["power_w"]


def test_without_a_counter_or_power_the_reason_is_kept():
    power = PowerSampler(FakeGpu(errors={"energy": 3, "power": 3, "power_instant": 3}))
    plan = Plan((Pass("latency", 0.02), Pass("power", 0.1)))
    with power:
        values, missing, _ = merged(Runner(HostTimer(), Memory(), power).measure(Step(lambda: None), plan))
    assert "power_w" not in values
    assert "energy_per_item_j" not in values
    assert missing["power_w"]
    assert missing["energy_per_item_j"] == missing["power_w"]
    off = Runner(HostTimer(), Memory(), None, "nobody asked").measure(Step(lambda: None), plan)
    assert merged(off)[1]["power_w"] == "nobody asked"


def test_passes_that_are_not_planned_leave_a_reason():
    assert missing_metrics(Plan((Pass("latency", 1),)), {"power": "off", "latency": "-"}) == {
        "power_w": "off",
        "energy_per_item_j": "off",
    }


def test_the_median_of_samples_as_a_value():
    value = value_of([1.0, 2.0, 9.0], "host_time_s", "host_clock")
    assert (value.value, value.unit, value.n, value.tier) == (2.0, "s", 3, "host_clock")
    assert value.interval == (1.0, 9.0)
    assert value.confidence == pytest.approx(0.75)


def test_each_warning_becomes_one_finding_even_where_it_would_be_an_error():
    findings = []
    with warnings_as_findings(findings):
        for _ in range(3):
            warnings.warn("torch.jit is deprecated\nsee the docs", FutureWarning, stacklevel=1)
        warnings.warn("other", UserWarning, stacklevel=1)
    assert [(one.code, one.flags) for one in findings] == [("warning", False)] * 2
    assert findings[0].message == "FutureWarning: torch.jit is deprecated"
