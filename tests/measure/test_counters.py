"""The counters pass in the loop, over counters whose figures are given."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from joulemark.collect.pm_sampling import SWEEP_PACE
from joulemark.collect.timing import HostTimer
from joulemark.errors import CountersUnreadable
from joulemark.measure.counters import (
    Counting,
    Readings,
    Reference,
    measurement_of,
    read_step,
    unit_work,
    worth_counting,
)
from joulemark.measure.plan import ALONE, COUNT, INSTRUMENTS, Pass, plan_for
from joulemark.measure.runner import Runner
from joulemark.metrics import AMOUNTS, COUNTERS, LEVELS
from joulemark.testing import FakeCounters
from joulemark.utilization.levels import Counted
from joulemark.workloads.base import PhaseMarks, Step

RATES = {"sm_active": 0.9, "pipe_tensor": 0.5, "pipe_tensor_cycles": 1e9, "instructions": 1e9, "dram_throughput": 0.4}
PASSES = {
    "pass1": ("sm_active", "pipe_tensor", "pipe_tensor_cycles", "instructions"),
    "pass2": ("sm_active", "instructions", "dram_throughput"),
}
ONE = Pass("counters", 0.2, min_samples=2)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


class Memory:
    tier = "none"

    def reset(self):
        return None

    def read_bytes(self):
        return None


def source(**changes):
    return FakeCounters(**{"rates": RATES, "passes": PASSES, **changes})


def counting(counters=None, reasons=None, **changes):
    return Counting(counters, reasons or {}, "cpu", **changes)


def test_it_is_in_no_plan_but_its_own():
    both = plan_for(("timing", "power"), on_gpu=True, has_power=True)
    assert plan_for(("timing", "power", "counters"), on_gpu=True, has_power=True) == both
    assert ALONE["counters"] is COUNT
    assert set(ALONE) < set(INSTRUMENTS)


class StoodClock:
    """A clock that moves only when the step moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


def test_every_group_is_counted_between_two_windows_without(monkeypatch):
    clock = StoodClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    counters = source(clock=clock)
    runner = Runner(HostTimer(), Memory(), counting=counting(counters))
    (seen,) = runner.measure(Step(lambda: clock.pass_by(0.004)), COUNT)
    assert counters.recorded == ["pass1", "pass2"]
    assert seen.values["tensor_active_fraction"].value == pytest.approx(0.5)
    assert seen.values["tensor_active_fraction"].tier == "pm_sampling"
    assert seen.values["sm_active_fraction"].n == 2
    assert seen.values["dram_fraction"].n == 1
    assert seen.values["counted_step_s"].value == pytest.approx(0.004)
    assert seen.values["counters_overhead"].value == pytest.approx(0, abs=1e-9)
    assert (len(seen.samples["uncounted_step_s"]), len(seen.samples["counted_step_s"])) == (2, 2)
    assert seen.values["counters_overhead"].n == 2
    assert len(seen.windows_utc) == 2
    assert all(0 < end - start < 5 for start, end in seen.windows_utc)
    assert {row["tier"] for row in seen.tables["levels"]} == {"pm_sampling"}
    assert set(seen.values) | set(seen.missing) == set(COUNTERS)
    assert seen.missing["l2_fraction"] == "pm_sampling does not count it"


def test_a_drift_over_the_windows_is_no_cost(monkeypatch):
    clock = StoodClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    took = iter(0.1 + 0.001 * number for number in range(100))
    one = Pass("counters", 0.1, min_samples=1)
    passes = {**PASSES, "pass3": ("pipe_tensor_dfma",)}
    three = source(clock=clock, rates={**RATES, "pipe_tensor_dfma": 0.1}, passes=passes)
    seen = read_step(counting(three), HostTimer(), None, one, Step(lambda: clock.pass_by(next(took))), 0.1)
    assert (len(seen.off_s), len(seen.on_s)) == (2, 3)
    cost = measurement_of("counters", seen, counting(three)).values["counters_overhead"]
    assert cost.value == pytest.approx(0, abs=1e-9)


def test_a_pass_that_tells_nothing_more_than_the_instrument_beside_is_left_out(monkeypatch):
    clock = StoodClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    rates = {**RATES, "pipe_tensor_dfma": 0.2}
    passes = {**PASSES, "pass3": ("sm_active", "pipe_tensor_dfma")}
    best = source(rates=rates, passes=passes, clock=clock)
    beside = FakeCounters({"sm_active": 0.9, "pipe_tensor_dfma": 0.21}, tier="gpm", clock=clock)
    assert worth_counting(best, None) == ("pass1", "pass2", "pass3")
    assert worth_counting(best, beside) == ("pass1", "pass2")
    both = counting(best, beside=beside)
    seen = read_step(both, HostTimer(), None, ONE, Step(lambda: clock.pass_by(0.004)), 0.004)
    value = measurement_of("counters", seen, both).values["tensor_fp64_fraction"]
    assert (value.value, value.tier) == (pytest.approx(0.21), "gpm")


@pytest.mark.parametrize(("step_s", "windows"), [(0.004, "in"), (0.3, "before")])
def test_the_last_window_without_opens_the_run_of_an_instrument_that_lags(monkeypatch, step_s, windows):
    """GPM takes no sample before the window is over; of a long step it would, so that has its window before."""
    monkeypatch.setitem(sys.modules, "torch", None)  # no step of the flop counter
    clock = StoodClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    steps = []
    beside = FakeCounters({"sm_active": 0.9}, tier="gpm", clock=clock)
    both = counting(source(clock=clock), beside=beside)

    def run():
        clock.pass_by(step_s)
        steps.append(len(beside.recorded))

    seen = read_step(both, HostTimer(), None, Pass("counters", 0.2, 1), Step(run), step_s)
    each = math.ceil(0.05 / step_s)
    alone, in_run = steps.count(0), steps.count(1)
    assert seen.beside.steps == in_run
    assert (alone, in_run) == ((3 * each, 105) if windows == "in" else (4, 2))
    assert len(seen.off_s) == 2
    assert sum(seen.off_s) == pytest.approx(2 * step_s)


@dataclass
class Costly(FakeCounters):
    """Takes what an H200 takes: a sampler to make and to give back, and a quarter of a millisecond for a sample."""

    spend: Callable[[float], None] = lambda seconds: None

    def record(self, group, run, expected_s=None):
        self.spend(0.05)
        series = super().record(group, run, expected_s)
        covered = float(series.end_s[-1] - series.start_s[0])
        self.spend(0.05 + 0.25e-3 * min(SWEEP_PACE.most_samples, covered / 1e-4))
        return series


@pytest.mark.parametrize(("step_s", "at_most_s"), [(0.004, 1.1), (0.02, 1.2), (0.2, 2.4)])
def test_what_a_case_costs_with_the_times_of_an_h200(monkeypatch, step_s, at_most_s):
    """Without building and warming up, the flop counter's step among it."""
    pytest.importorskip("torch")
    clock = StoodClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    passes = {**PASSES, "pass3": ("sm_active", "pipe_tensor_dfma")}
    best = Costly({**RATES, "pipe_tensor_dfma": 0.0}, passes, clock=clock, spend=clock.pass_by)
    beside = FakeCounters({"sm_active": 0.9, "pipe_tensor_dfma": 0.0}, tier="gpm", clock=clock)
    both = counting(best, beside=beside)
    begin = clock()
    seen = read_step(both, HostTimer(), None, COUNT.passes[0], Step(lambda: clock.pass_by(step_s)), step_s)
    assert clock() - begin < at_most_s
    assert clock() - begin == pytest.approx(sum(row["time_s"] for row in seen.stages.rows()))
    assert not seen.lost


def test_the_record_says_what_each_stage_of_it_took():
    counters, beside = source(), FakeCounters({"sm_active": 0.9}, tier="gpm")
    both = counting(counters, beside=beside, opening_s=2.5)
    runner = Runner(HostTimer(), Memory(), counting=both)
    seen, again = (runner.measure(Step(lambda: time.sleep(0.004)), COUNT, build_s=0.7)[0] for _ in range(2))
    stages = {row["stage"]: row for row in seen.tables["stages"]}
    assert stages["opening"] == {"stage": "opening", "time_s": 2.5, "times": 1}
    assert "opening" not in {row["stage"] for row in again.tables["stages"]}
    assert stages["build and warm-up"]["time_s"] > 0.7 + 3 * 0.004
    counted = sum(end - start for start, end in seen.windows_utc)
    assert stages["counted windows"]["time_s"] == pytest.approx(counted, rel=1e-3)
    times = {name: row["times"] for name, row in stages.items()}
    assert (times["counted windows"], times["uncounted windows"], times["after counting"]) == (2, 2, 2)
    last = stages["uncounted windows"]["time_s"] / 2
    assert stages["other instrument"]["time_s"] + last > 0.3
    assert {"before counting", "flop counter", "reference"} <= set(stages)


def test_phases_of_a_step_that_marks_them():
    marks = PhaseMarks()

    def run():
        marks("forward")
        time.sleep(0.01)
        marks("backward")
        time.sleep(0.02)

    seen = read_step(counting(source()), HostTimer(), None, ONE, Step(run, phases=marks), 0.03)
    found = measurement_of("counters", seen, counting(source()))
    spent = {row["phase"]: row["value"] for row in found.tables["levels"] if row["level"] == "phase_time_s"}
    assert spent["backward"] > 1.5 * spent["forward"] > 0.01
    assert marks.listener is None


def test_nobody_listens_when_a_step_fails():
    marks = PhaseMarks()

    def run():
        marks("forward")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        read_step(counting(source()), HostTimer(), None, ONE, Step(run, phases=marks), 0.01)
    assert marks.listener is None


def test_a_setup_between_the_steps_is_refused_with_its_reason():
    runner = Runner(HostTimer(), Memory(), counting=counting(source()))
    (seen,) = runner.measure(Step(lambda: None, setup=lambda: None), COUNT)
    assert "a setup runs between the steps" in seen.missing["sm_active_fraction"]


def test_a_group_that_fails_costs_its_own_figures():
    broken = source(fails={"pass2": CountersUnreadable("CUPTI answered 999", "try again")})
    seen = read_step(counting(broken), HostTimer(), None, ONE, Step(lambda: time.sleep(0.004)), 0.004)
    found = measurement_of("counters", seen, counting(broken))
    assert found.values["tensor_active_fraction"].value == pytest.approx(0.5)
    assert found.missing["dram_fraction"] == "pass2: CUPTI answered 999: try again"
    assert (len(seen.off_s), len(seen.on_s)) == (2, 1)
    assert "counter_group_lost" in {one.code for one in found.findings}


@dataclass
class Truncated(FakeCounters):
    """Loses what it sampled in the second half of a run."""

    def record(self, group, run, expected_s=None):
        series = super().record(group, run, expected_s)
        return series.between(0.0, float(series.end_s[-1]) / 2)


def test_samples_of_a_part_of_the_steps_are_no_figure_of_them():
    half = Truncated(RATES, PASSES)
    seen = read_step(counting(half), HostTimer(), None, ONE, Step(lambda: time.sleep(0.01)), 0.01)
    found = measurement_of("counters", seen, counting(half))
    assert "tensor_active_fraction" not in found.values
    assert "cover" in found.missing["tensor_active_fraction"]
    assert len(seen.off_s) == 1


def test_without_any_instrument_each_level_says_what_would_give_it():
    none = counting(None, {"pm_sampling": "no permission: ask the administrator", "gpm": "this GPU has none"})
    seen = read_step(none, HostTimer(), None, ONE, Step(lambda: time.sleep(0.002)), 0.002)
    found = measurement_of("counters", seen, none)
    assert not set(found.values) & {*LEVELS, *AMOUNTS, "counted_step_s", "counters_overhead"}
    why = "pm_sampling: no permission: ask the administrator; gpm: this GPU has none"
    assert {found.missing[name] for name in (*LEVELS, *AMOUNTS)} == {why}


def test_one_step_down_the_ladder_says_why_it_is_not_the_better_one():
    down = counting(source(tier="gpm"), {"pm_sampling": "no permission: ask the administrator"})
    seen = read_step(down, HostTimer(), None, ONE, Step(lambda: time.sleep(0.004)), 0.004)
    found = measurement_of("counters", seen, down)
    assert found.values["sm_active_fraction"].tier == "gpm"
    said = "gpm does not count it (pm_sampling: no permission: ask the administrator)"
    assert found.missing["issue_slot_fraction"] == said


def test_two_instruments_that_disagree_are_told():
    beside = FakeCounters({"sm_active": 0.9, "pipe_tensor": 0.45, "dram_throughput": 0.41}, tier="gpm")
    both = counting(source(), beside=beside)
    seen = read_step(both, HostTimer(), None, ONE, Step(lambda: time.sleep(0.004)), 0.004)
    found = measurement_of("counters", seen, both)
    (told,) = [one for one in found.findings if one.code == "counter_tiers_disagree"]
    assert told.message == "tensor pipe: 50.0% by pm_sampling, 45.0% by gpm in the same minute"
    assert {row["tier"] for row in found.tables["levels"]} == {"pm_sampling", "gpm"}


def test_where_the_best_instrument_comes_to_nothing_the_other_one_tells():
    broken = source(fails=dict.fromkeys(PASSES, CountersUnreadable("CUPTI answered 999")))
    beside = FakeCounters({"sm_active": 0.9, "pipe_tensor": 0.45}, tier="gpm")
    both = counting(broken, beside=beside)
    seen = read_step(both, HostTimer(), None, ONE, Step(lambda: time.sleep(0.004)), 0.004)
    found = measurement_of("counters", seen, both)
    assert found.values["tensor_active_fraction"].value == pytest.approx(0.45)
    assert found.values["tensor_active_fraction"].tier == "gpm"
    assert "CUPTI answered 999" in found.missing["issue_slot_fraction"]
    assert "counter_group_lost" in {one.code for one in found.findings}


def test_a_level_that_the_best_instrument_lacks_comes_from_the_other_one():
    beside = FakeCounters({"sm_active": 0.9, "pipe_tensor": 0.45, "warps_active": 0.3}, tier="gpm")
    both = counting(source(), beside=beside)
    seen = read_step(both, HostTimer(), None, ONE, Step(lambda: time.sleep(0.004)), 0.004)
    found = measurement_of("counters", seen, both)
    assert found.values["warps_active_fraction"].value == pytest.approx(0.3)
    assert found.values["warps_active_fraction"].tier == "gpm"
    assert found.values["tensor_active_fraction"].tier == "pm_sampling"


def test_a_series_that_reads_nothing_is_missing_and_not_0():
    silent = source(rates=dict.fromkeys(RATES, 0.0))
    seen = read_step(counting(silent), HostTimer(), None, ONE, Step(lambda: time.sleep(0.004)), 0.004)
    found = measurement_of("counters", seen, counting(silent))
    assert "sm_active_fraction" not in found.values
    assert "reads 0" in found.missing["sm_active_fraction"]


def work(**changes):
    series = source().record("pass1", lambda: time.sleep(0.02)).at_work()
    seen = Readings(off_s=[0.01, 0.01], on_s=[0.011], counted=[Counted(series, 2)], flops=10**9)
    return replace(seen, **changes)


def test_flops_of_the_step_stand_beside_what_the_hardware_counted():
    reference = Reference("bf16", 1e12, "pipe_tensor_cycles", 0.9, 100.0, 2e9)
    seen = work(reference=reference)
    found = measurement_of("counters", seen, counting(source()))
    values = {name: one.value for name, one in found.values.items()}
    assert values["step_flops"] == 1e9
    assert values["achieved_flop_per_s"] == pytest.approx(1e11)
    assert values["peak_flop_per_s"] == 1e12
    assert values["peak_fraction"] == pytest.approx(0.1)
    assert values["counted_flops"] == pytest.approx(100 * seen.counted[0].series.total("pipe_tensor_cycles") / 2)
    (row,) = found.tables["reference"]
    assert (row["share"], row["step_share"]) == (0.9, 0.5)
    assert row["step_peak_counts_per_s"] == pytest.approx(2e9)


def test_the_clock_of_a_unit_by_its_counts_and_its_share():
    series = source().record("pass1", lambda: time.sleep(0.02)).at_work()
    share, counts, peak = unit_work(series, "pipe_tensor_cycles")
    assert share == pytest.approx(0.5)
    assert counts == pytest.approx(1e9 * series.duration_s.sum())
    assert peak == pytest.approx(2e9)
    assert unit_work(source().record("pass2", lambda: time.sleep(0.01)), "pipe_tensor_cycles") == (None, None, None)


@needs_torch
def test_a_product_is_the_reference_of_its_number_format_once_per_process():
    counters = source()
    own = counting(counters)
    for _ in range(2):
        seen = read_step(own, HostTimer(), "bf16", ONE, Step(lambda: time.sleep(0.002)), 0.002)
    assert seen.reference is own.references["bf16"]
    assert seen.reference.flop_per_s > 0
    assert seen.reference.share == pytest.approx(0.5)
    assert seen.reference.flop_per_count > 0
    assert counters.recorded == ["pass1", "pass2", "pass1", "pass1", "pass2"]
    assert "product" in seen.missing["step_flops"] or "torch" in seen.missing["step_flops"]
