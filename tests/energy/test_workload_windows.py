"""A workload measured for the model: steps, energy and counters per window."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from joulemark.energy.counting import Counting
from joulemark.energy.workload_windows import Facts, Idle, Stepper, measure_energy, with_counters
from joulemark.errors import MeasurementError
from joulemark.testing import FakeClock, FakeGpu, simulate_window

SCHEMA = Path(__file__).parents[2] / "docs" / "schema" / "energy-measurements.schema.json"


class Work:
    """A step of 2 ms on a clock of its own."""

    def __init__(self) -> None:
        self.clock = FakeClock(0.0)
        self.steps = 0
        self._queued = 0

    def step(self) -> None:
        self._queued += 1

    def synchronize(self) -> None:
        self.steps += self._queued
        self.clock.sleep(2e-3 * self._queued)
        self._queued = 0


class Recorder:
    groups = ("a", "b")

    def __init__(self, work: Work) -> None:
        self._work = work
        self.seen: list[tuple[str, int]] = []

    def record(self, group, run, expected_s=None):
        before, self._began = self._work.steps, self._work.clock.now
        run()
        steps = self._work.steps - before
        assert expected_s == pytest.approx(self._work.clock.now - self._began, abs=0.01)
        self.seen.append((group, steps))

        class Series:
            def __init__(self) -> None:
                self.units = {"instructions": "inst", "sm_active": "1", f"only_{group}": "B"}

            def total(self, name):
                return {"instructions": 10.0 * steps}.get(name, 7.0 * steps)

        return Series()


def meter_of(work: Work, gpu: FakeGpu):
    def meter(run):
        ran = run()
        gpu.clock = FakeClock(ran.start - 0.05)
        gpu.born = ran.start - 10.0
        window = simulate_window(gpu, ran.end - ran.start, lead_s=0.05)
        return ran, window

    return meter


@pytest.fixture
def work():
    return Work()


def test_a_row_holds_energy_and_counters_of_one_window(work):
    stepper = Stepper(work.step, work.synchronize, work.clock)
    assert stepper.step_s == pytest.approx(2e-3)
    recorder = Recorder(work)
    energy = measure_energy(
        Facts("gemm", "gemm", "bf16", items_per_step=4.0), stepper, meter_of(work, FakeGpu(power_w=300.0))
    )
    assert (energy["counters"], energy["passes_differ"], recorder.seen) == ({}, None, [])
    row = with_counters(energy, stepper, Counting(recorder))
    assert {name: row[name] for name in energy if name not in ("counters", "passes_differ")} == {
        name: value for name, value in energy.items() if name not in ("counters", "passes_differ")
    }
    assert row["measured_j"] == pytest.approx(300 * row["window_s"], rel=0.01)
    assert row["steps"] == pytest.approx(row["window_s"] / 2e-3)
    assert row["items"] == 4 * row["steps"]
    assert row["counters"]["instructions"] == pytest.approx(10 * row["steps"])
    assert set(row["counters"]) == {"instructions", "only_a", "only_b"}
    assert {steps for _, steps in recorder.seen} == {30}
    assert row["passes_differ"] == 0.0
    assert row["capped"] is False
    assert row["idle_w"] == pytest.approx(300, rel=0.01)
    document = {"schema": "joulemark/energy-measurements/1", "gpu_uuid": "GPU-1", "rows": [row]}
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)


def test_passes_that_saw_different_work_show_it(work):
    class Uneven(Recorder):
        def record(self, group, run, expected_s=None):
            series = super().record(group, run, expected_s)
            given = series.total
            series.total = lambda name: given(name) * (1.1 if group == "b" else 1.0)
            return series

    totals = Counting(Uneven(work)).of(lambda: [work.step(), work.synchronize()], 1, 2e-3)
    assert totals.spread == pytest.approx(0.1 / 1.1)
    assert totals.differs == "instructions"


def test_time_that_passes_differ_in_is_no_difference_of_work(work):
    class Jittery(Recorder):
        def record(self, group, run, expected_s=None):
            series = super().record(group, run, expected_s)
            series.units["sm_cycles"] = "cycle"
            given = series.total
            series.total = lambda name: 1e9 * (2 if group == "b" else 1) if name == "sm_cycles" else given(name)
            return series

    assert Counting(Jittery(work)).of(lambda: [work.step(), work.synchronize()], 1, 2e-3).spread == 0.0


def test_time_in_which_any_sm_works_is_counted(work):
    class Sampled(Recorder):
        def record(self, group, run, expected_s=None):
            series = super().record(group, run, expected_s)
            series.values = {"sm_active_cycles": np.array([0.0, 5.0, np.nan, 0.0, 9.0, 0.0])}
            series.start_s = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
            series.end_s = series.start_s + (1.0 if group == "a" else 0.9)
            return series

    totals = Counting(Sampled(work)).of(lambda: [work.step(), work.synchronize()], 4, 8e-3)
    assert totals.each["gpu_busy_s"] == pytest.approx(2.0 / 4)
    assert totals.spread == 0.0


def test_groups_that_give_nothing_new_are_recorded_once(work):
    recorder = Recorder(work)
    recorder.groups = ("a", "a", "b")
    counting = Counting(recorder)
    for _ in range(2):
        totals = counting.of(lambda: [work.step(), work.synchronize()], 1, 2e-3)
        assert totals.each == {"instructions": 10.0, "only_a": 7.0, "only_b": 7.0}
    assert [group for group, _ in recorder.seen] == ["a", "a", "b", "a", "b"]


def test_a_capped_window_says_so(work):
    gpu = FakeGpu(power_w=700.0, sm_clock_hz=1.5e9, reasons=frozenset({"power_cap"}))
    stepper = Stepper(work.step, work.synchronize, work.clock)
    before = work.clock.now
    row = measure_energy(Facts("gemm", "gemm", "bf16"), stepper, meter_of(work, gpu), 700.0, 2.3, Idle(120.0, 40.0))
    assert work.clock.now - before == pytest.approx(2 * (2.3 + 0.4), rel=0.1)  # again, once clocks have settled
    assert (row["idle_w"], row["idle_temperature_c"]) == (120.0, 40.0)
    assert row["capped"] is True
    assert (row["power_limit_w"], row["counters"], row["items"]) == (700.0, {}, None)


def test_without_energy_there_is_no_row(work):
    gpu = FakeGpu(errors={"energy": 3, "power": 3, "power_instant": 3})
    stepper = Stepper(work.step, work.synchronize, work.clock)
    with pytest.raises(MeasurementError, match="gemm: no energy"):
        measure_energy(Facts("gemm", "gemm", "bf16"), stepper, meter_of(work, gpu))


def test_long_steps_are_run_one_by_one(work):
    def slow():
        work.clock.sleep(1.0)
        work.step()

    stepper = Stepper(slow, work.synchronize, work.clock)
    assert stepper.steps_in(0.3) == 1
    ran = stepper.steady(0.5, 2.3)
    assert ran.launches == 3
    assert ran.end - ran.start == pytest.approx(3.006)
