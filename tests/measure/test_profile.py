"""From a trace to the profiler pass's Measurement, and the pass in the loop, over a trace whose figures are known."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

import pytest

from joulemark.collect.timing import HostTimer
from joulemark.collect.torch_profiler import Recording
from joulemark.errors import Unsupported
from joulemark.measure.plan import PROFILE, plan_for
from joulemark.measure.profile import measurement_of
from joulemark.measure.runner import Runner
from joulemark.metrics import PROFILER
from joulemark.workloads.base import Step

RECORDING = Recording([100e-6, 100e-6, 100e-6], 120e-6, 2, 0.0, 240e-6)


def event(name, category, ts, dur, tid, **args):
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def trace(path, iterations=2, lost=(), kernels=2, call="cudaLaunchKernel", per_call=1):
    """Steps of 100 µs: kernels of 20 µs begin 30 µs and 60 µs after the mark, launched 10 µs before, for 5 µs.

    Each call is inside an operator of 12 µs, and launches ``per_call`` kernels of one after the other's 20 µs.
    """
    events = []
    for number in range(iterations):
        begin = 1000 + 100 * number
        events.append(event(f"joulemark.iteration#{number}", "user_annotation", begin, 100, 1))
        for index in range(kernels):
            correlation, at = 10 * number + index + 1, begin + 20 + 30 * index
            events.append(event("aten::linear", "cpu_op", at - 5, 12, 1))
            events.append(event(call, "cuda_runtime", at, 5, 1, correlation=correlation))
            where = {"device": 0, "stream": 7, "correlation": correlation}
            for one in range(per_call - (correlation in lost)):
                events.append(event("gemm", "kernel", at + 10 + 20 / per_call * one, 20 / per_call, 7, **where))
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@dataclass
class StubProfiler:
    """Runs the steps and leaves a trace that is known."""

    error: Exception | None = None
    path: object = None
    steps: int = 0

    def record(self, run, setup, steps, synchronize, path):
        if self.error is not None:
            raise self.error
        for _ in range(steps):
            run()
        self.path, self.steps = path, steps
        trace(path, iterations=steps)
        now = time.perf_counter()
        return Recording([1.0], 1.5, steps, now - 1, now)


@dataclass
class Memory:
    tier: str = "none"

    def reset(self):
        return None

    def read_bytes(self):
        return None


def test_figures_are_medians_over_the_iterations(tmp_path):
    seen = measurement_of(RECORDING, trace(tmp_path / "t.json"))
    values = {name: one.value for name, one in seen.values.items()}
    assert set(values) == set(PROFILER)
    assert not seen.missing
    assert not seen.findings
    assert values["gpu_busy_fraction"] == pytest.approx(0.4)
    assert values["gpu_busy_s"] == pytest.approx(40e-6)
    assert values["copy_only_s"] == 0
    assert values["exposed_overhead_s"] == pytest.approx(60e-6)
    assert (values["operators_per_step"], values["host_issue_per_operator_s"]) == (2, pytest.approx(12e-6))
    assert seen.samples["plain_step_s"] == RECORDING.plain_s
    assert seen.samples["profiled_step_s"] == [RECORDING.profiled_s]
    assert values["host_issue_s"] == pytest.approx(55e-6)
    assert values["hidden_ratio"] == pytest.approx(1 - 60 / 55)
    assert (values["kernels_per_step"], values["launches_per_step"]) == (2, 2)
    assert values["profiler_distortion"] == pytest.approx(0.2)
    idle = {name: one for name, one in seen.samples.items() if name.startswith("idle_")}
    assert [sum(per_step) for per_step in zip(*idle.values(), strict=True)] == pytest.approx([60e-6] * 2)
    assert {one.tier for name, one in seen.values.items() if name != "profiler_distortion"} == {"torch_profiler"}


def test_a_launch_without_its_kernel_flags(tmp_path):
    seen = measurement_of(RECORDING, trace(tmp_path / "t.json", lost=(2,)))
    flagged = {one.code: one.message for one in seen.findings if one.flags}
    assert flagged["kernels_and_launches_differ"] == "joulemark.iteration#0 has 1 kernels for 2 launches"
    assert len(flagged) > 1  # the analysis of the trace says so too


def test_a_graph_may_launch_many_kernels_but_every_iteration_as_many(tmp_path):
    replays = {"call": "cudaGraphLaunch", "kernels": 1, "per_call": 4}
    seen = measurement_of(replace(RECORDING, steps=4), trace(tmp_path / "t.json", iterations=4, **replays))
    assert (seen.values["kernels_per_step"].value, seen.values["launches_per_step"].value) == (4, 1)
    assert not [one for one in seen.findings if one.flags]
    seen = measurement_of(replace(RECORDING, steps=4), trace(tmp_path / "t.json", iterations=4, lost=(21,), **replays))
    assert {one.code: one.message for one in seen.findings if one.flags} == {
        "kernels_differ_between_iterations": "joulemark.iteration#2 has 3 kernels for 1 launches, "
        "most iterations have 4 for 1"
    }


def test_marks_that_were_lost_flag(tmp_path):
    seen = measurement_of(RECORDING, trace(tmp_path / "t.json", iterations=1))
    assert [one.code for one in seen.findings if one.flags] == ["profiler_steps_lost"]


def test_a_file_that_is_no_trace_leaves_the_distortion_alone(tmp_path):
    (tmp_path / "t.json").write_text("")
    seen = measurement_of(RECORDING, tmp_path / "t.json")
    assert set(seen.values) == {"profiler_distortion"}
    assert set(seen.missing) == set(PROFILER) - set(seen.values)
    assert all(seen.missing.values())


def test_the_profiler_is_in_no_plan_but_its_own():
    together = plan_for(("timing", "power", "profiler"), on_gpu=True, has_power=True)
    assert together == plan_for(("timing", "power"), on_gpu=True, has_power=True)
    assert [one.name for one in PROFILE.passes] == ["profiler"]


def test_the_pass_runs_a_few_steps_and_throws_the_trace_away(tmp_path):
    stub = StubProfiler()
    (seen,) = Runner(HostTimer(), Memory(), profiler=stub).measure(Step(lambda: None), PROFILE)
    assert stub.steps == 10
    assert seen.values["profiler_distortion"].value == pytest.approx(0.5)
    assert seen.values["kernels_per_step"].n == 10
    assert len(seen.windows_utc) == 1
    assert not stub.path.exists()


def test_long_steps_are_few_and_the_trace_stays_where_it_was_wanted(tmp_path):
    stub, kept = StubProfiler(), tmp_path / "traces" / "a.json"
    runner = Runner(HostTimer(), Memory(), profiler=stub, keep_trace=kept)
    runner.measure(Step(lambda: time.sleep(0.2)), PROFILE, warmup_rounds=1)
    assert stub.steps == 3
    assert kept.exists()


def test_a_profiler_that_cannot_record_leaves_its_reason():
    stub = StubProfiler(error=Unsupported("torch is not installed"))
    (seen,) = Runner(HostTimer(), Memory(), profiler=stub).measure(Step(lambda: None), PROFILE)
    assert seen.missing == dict.fromkeys(PROFILER, "torch is not installed")
