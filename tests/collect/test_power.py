"""The power sampler over simulated GPUs: aligned windows, missing sensors, lost GPUs, prompt ends."""

from __future__ import annotations

import json
import math
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulemark.collect.energy import (
    MIN_UPDATES,
    ConditionReading,
    EnergyEdge,
    PowerReading,
    PowerWindow,
    aligned_windows,
    conditions_of,
    energy_of,
    integrate_power,
)
from joulemark.collect.power import NullPowerSource, NvmlPowerSource, PowerSampler, idle_power, open_power
from joulemark.errors import DeviceError, GpuLost, NotSupported, NvmlUnavailable
from joulemark.testing import FakeClock, FakeGpu, FakeNvml, backend_of, simulate_window

DATA = Path(__file__).parents[1] / "data" / "nvml"


def gpus_of(name: str) -> list[FakeGpu]:
    return backend_of(json.loads((DATA / name).read_text(encoding="utf-8"))).gpus


def codes(window: PowerWindow) -> list[str]:
    return [finding.code for finding in window.findings]


# What the sensors of a GPU allow


def test_a_gpu_without_a_counter_is_integrated_and_says_so() -> None:
    window = simulate_window(gpus_of("missing_sensors.json")[0], 2.0)
    assert window.energy_j == pytest.approx(240, rel=0.02)
    assert (window.tier, window.reading.aligned, window.reading.updates) == ("nvml_power_integral", False, 0)
    assert codes(window) == ["energy_window_short"]
    assert "energy counter" in window.findings[0].message


def test_a_sensor_that_reads_no_watt_gives_no_energy_and_says_so() -> None:
    readings = [PowerReading(0.1 * number, 0.0) for number in range(60)]
    missing = {"energy": NotSupported("no counter")}
    window = PowerWindow("nvml_energy_counter", "nvml_power_integral", readings=readings, missing=missing)
    reading = energy_of(window, 0.0, 5.5)
    assert reading.power_w.value is None
    assert reading.reason is not None
    assert reading.reason.endswith("the power sensor reads 0 W throughout, which no board draws")


def test_a_gpu_without_sensors_has_no_energy_and_says_why() -> None:
    window = simulate_window(gpus_of("missing_sensors.json")[1], 2.0)
    assert (window.energy_j, window.power_w, window.tier, window.measured_s) == (None, None, None, None)
    assert window.reading.energy_j == []
    assert window.reason is not None
    assert "energy counter" in window.reason
    assert "power of" in window.reason
    assert window.reason.count("Not Supported") == 2
    assert window.problem is None
    assert all(isinstance(lack, NotSupported) for lack in window.missing.values())
    assert window.conditions is not None


def test_a_gpu_with_both_is_read_by_its_counter() -> None:
    window = simulate_window(gpus_of("missing_sensors.json")[2], 2.3)
    assert window.power_w == pytest.approx(300, rel=0.01)
    assert (window.tier, window.reading.aligned) == ("nvml_energy_counter", True)
    assert codes(window) == []


def test_an_instant_sensor_checks_the_counter() -> None:
    agreeing = simulate_window(FakeGpu(), 3.0)
    assert agreeing.reading.cross_check_ratio == pytest.approx(1, abs=0.01)
    assert codes(agreeing) == []
    biased = simulate_window(FakeGpu(power_w=300.0, instant_power_w=330.0), 3.0)
    assert biased.reading.cross_check_ratio == pytest.approx(300 / 330, abs=0.01)
    erring = simulate_window(FakeGpu(gain=1.08), 3.0)
    assert erring.reading.cross_check_ratio == pytest.approx(1.08, abs=0.01)
    assert codes(erring) == ["power_sensors_disagree"]
    assert erring.findings[0].flags


def test_an_average_sensor_checks_long_windows_only() -> None:
    assert simulate_window(FakeGpu(has_instant_power=False), 3.0).reading.cross_check_ratio is None
    assert simulate_window(FakeGpu(has_instant_power=False), 6.0).reading.cross_check_ratio == pytest.approx(
        1, abs=0.01
    )


def test_a_counter_that_stands_still_is_not_believed() -> None:
    window = simulate_window(FakeGpu(gain=0.0), 6.0)
    assert window.energy_j == pytest.approx(1800, rel=0.01)
    assert window.tier == "nvml_power_integral"
    silent = simulate_window(FakeGpu(gain=0.0, has_instant_power=False, errors={"power": 3}), 6.0)
    assert silent.energy_j is None
    assert silent.reason is not None
    assert "does not move" in silent.reason


# Short windows


@pytest.mark.parametrize("phase", [0.0, 0.02, 0.05, 0.0985])
@pytest.mark.parametrize("seconds", [0.003, 0.05, 0.1, 0.25, 0.4])
def test_a_window_shorter_than_the_counter_resolves_has_no_energy(seconds: float, phase: float) -> None:
    gpu = gpus_of("steady_300w.json")[0]
    window = simulate_window(gpu, seconds, lead_s=phase)
    assert window.energy_j is None
    assert window.reading.energy_j == []
    assert window.reason is not None
    assert "window shorter than counter resolution" in window.reason


@pytest.mark.parametrize("phase", [0.0, 0.02, 0.05, 0.07, 0.0985])
def test_a_second_is_read_on_the_counters_own_updates(phase: float) -> None:
    gpu = gpus_of("steady_300w.json")[0]
    window = simulate_window(gpu, 1.05, lead_s=phase)
    assert window.energy_j == pytest.approx(315, rel=0.02)
    assert window.window_s == pytest.approx(1.05)
    assert window.measured_s == pytest.approx(0.95, abs=0.06)
    assert codes(window) == ["energy_window_short"]


def test_a_power_window_of_three_milliseconds_has_no_energy() -> None:
    window = simulate_window(FakeGpu(energy_period_s=None), 0.003)
    assert window.energy_j is None
    assert window.reason is not None
    assert "0.5 s" in window.reason


@pytest.mark.parametrize("read_s", [0.0, 0.0046])
def test_slow_reads_cost_no_accuracy(read_s: float) -> None:
    clock = FakeClock()
    window = simulate_window(FakeGpu(read_s=read_s, clock=clock, energy_period_s=0.1003), 3.0)
    assert window.power_w == pytest.approx(300, rel=0.01)
    assert codes(window) == []
    assert all(edge.uncertainty_s < 0.012 for edge in window.edges)
    steps = [b.energy_j - a.energy_j for a, b in pairwise(window.edges)]
    assert steps == pytest.approx([30.09] * len(steps))


def test_the_counter_is_not_polled_without_need() -> None:
    clock = FakeClock()
    gpu = FakeGpu(read_s=0.0046, clock=clock)
    backend = FakeNvml([gpu])
    source = NvmlPowerSource(gpu.uuid, backend)
    gpu._source = source  # so that the log is at hand
    source.open()
    simulate_window(gpu, 5.0)
    reads = sum(call == "energy" for call, _ in backend.log)
    assert 50 < reads < 300


def test_power_is_read_at_varied_phase() -> None:
    window = simulate_window(FakeGpu(), 3.0)
    gaps = [b.t - a.t for a, b in pairwise(window.readings)]
    assert len(window.readings) > 400
    assert max(gaps) - min(gaps) > 0.004
    assert len({round(reading.t % 0.1, 2) for reading in window.readings}) >= 10


def test_steps_of_power_are_seen_by_both_sensors() -> None:
    gpu = FakeGpu(power_w=lambda age: 200.0 if age < 2.0 else 600.0)
    window = simulate_window(gpu, 4.0)
    assert window.power_w == pytest.approx(400, rel=0.06)
    assert window.reading.cross_check_ratio == pytest.approx(1, abs=0.02)
    late = energy_of(window, window.start + 2.2, window.start + 4.0)
    assert late.power_w.value == pytest.approx(600, rel=0.01)


# Trouble


def test_a_gpu_lost_in_the_window_gives_no_energy() -> None:
    window = simulate_window(FakeGpu(lost_after_s=1.5), 3.0)
    assert isinstance(window.problem, GpuLost)
    assert window.energy_j is None
    assert window.reason is not None
    assert "GPU is lost" in window.reason
    assert energy_of(window, window.start, window.start + 1.4).power_w.value == pytest.approx(300, rel=0.02)


@pytest.mark.parametrize("already_j", [1e6, 20.0])
def test_a_counter_that_goes_backwards_gives_no_energy(already_j: float) -> None:
    """Also where it began so low that more was counted after its reset than before."""
    edges = [EnergyEdge(0.1 * i, 30.0 * (i - 3) if i >= 3 else already_j + 30.0 * i) for i in range(30)]
    reading = energy_of(PowerWindow("nvml_energy_counter", "nvml_power_integral", edges=edges), 0, 3)
    assert reading.power_w.value is None
    assert reading.reason is not None
    assert "backwards" in reading.reason


def test_what_goes_wrong_in_the_thread_reaches_the_caller_typed() -> None:
    def broken(age: float) -> float:
        if age > 0.05:
            raise ZeroDivisionError("a driver's whim")
        return 300.0

    source = FakeGpu(power_w=broken)
    finished = False
    with PowerSampler(source).window() as window:
        time.sleep(0.15)
        finished = True
    assert finished
    assert isinstance(window.problem, DeviceError)
    assert "a driver's whim" in str(window.problem)
    assert window.energy_j is None


@pytest.mark.parametrize("path", sorted(DATA.glob("init_*.json")), ids=lambda path: path.stem)
def test_without_nvml_windows_run_and_say_why(path: Path) -> None:
    sampler = open_power("GPU-1", backend_of(json.loads(path.read_text(encoding="utf-8"))))
    assert isinstance(sampler.source, NullPowerSource)
    with sampler.window() as window:
        ran = True
    assert ran
    assert isinstance(window.problem, NvmlUnavailable)
    assert window.problem.cause == path.stem.removeprefix("init_")
    assert (window.energy_j, window.reason) == (None, str(window.problem))
    assert window.conditions is None
    sampler.close()


def test_a_mig_instance_has_no_power_of_its_own() -> None:
    sampler = open_power("MIG-1111", FakeNvml([FakeGpu(mig=("MIG-1111",))]))
    assert isinstance(sampler.source, NullPowerSource)
    assert isinstance(sampler.source.problem, NotSupported)
    assert "shares the sensors of its board" in str(sampler.source.problem)


def test_an_exception_of_the_workload_ends_the_sampling_and_goes_on() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), PowerSampler(FakeGpu()).window():
        raise KeyError("workload")
    assert threading.active_count() == before


# In real time


def test_a_thread_samples_beside_the_workload_and_ends_at_once() -> None:
    gpu = gpus_of("steady_300w.json")[0]
    before = threading.active_count()
    with open_power(gpu.uuid, FakeNvml([gpu])) as power:
        with power.window() as window:
            assert window.reason == "the window is still open"
            assert window.energy_j is None
            time.sleep(1.05)
        begin = time.perf_counter()
        assert begin - (window.end or 0) < 0.2
        assert threading.active_count() == before
    assert window.energy_j == pytest.approx(315, rel=0.1)
    assert 0 < window.sampler_cpu_s < 0.5
    assert window.conditions is not None
    assert window.conditions.sm_clock_hz == 1.98e9


def test_windows_of_one_sampler_are_independent() -> None:
    gpu = FakeGpu()
    with PowerSampler(gpu) as power:
        with power.window() as first:
            time.sleep(0.02)
        with power.window() as second:
            time.sleep(0.02)
    assert first.end is not None
    assert first.end <= second.start
    assert all(reading.t > first.end for reading in second.readings)


def test_idle_power_is_a_value_with_its_tier_or_a_reason() -> None:
    value = idle_power(FakeGpu(power_w=75.0), 0.9)
    assert value.value == pytest.approx(75, rel=0.05)
    assert (value.unit, value.tier) == ("W", "nvml_energy_counter")
    with pytest.raises(DeviceError, match="shorter"):
        idle_power(FakeGpu(), 0.01)


# Analysis


def test_conditions_are_medians_and_shares() -> None:
    states = [
        (0.0, ConditionReading(1e9, 2e9, 3e9, 40.0, frozenset())),
        (0.1, ConditionReading(2e9, 2e9, 3e9, 55.0, frozenset({"power_cap"}))),
        (0.2, ConditionReading(4e9, None, 3e9, 50.0, frozenset({"power_cap", "thermal"}))),
        (0.3, ConditionReading(4e9, None, 3e9, None, None)),
        (9.0, ConditionReading(9e9, None, 3e9, 99.0, frozenset({"idle"}))),
    ]
    found = conditions_of(PowerWindow("a", "b", states=states), 0.0, 1.0)
    assert found is not None
    assert (found.sm_clock_hz, found.memory_clock_hz, found.max_sm_clock_hz, found.temperature_c) == (3e9, 2e9, 3e9, 55)
    assert found.reasons == pytest.approx({"power_cap": 2 / 3, "thermal": 1 / 3})
    assert found.n == 4


def edges(period: float, count: int, watts: float = 300.0) -> list[EnergyEdge]:
    return [EnergyEdge(i * period, i * period * watts) for i in range(count)]


@given(
    st.floats(0.02, 0.5), st.integers(0, 80), st.floats(0, 3), st.floats(0, 10), st.integers(1, 9), st.floats(1, 900)
)
def test_aligned_windows_have_no_gap_and_enough_updates(
    period: float, count: int, start: float, length: float, least: int, watts: float
) -> None:
    known = edges(period, count, watts)
    windows = aligned_windows(known, start, start + length, least)
    inside = [edge for edge in known if start <= edge.t <= start + length]
    assert bool(windows) == (len(inside) > least)
    for a, b in pairwise(windows):
        assert a.end == b.start
    for window in windows:
        assert window.updates >= least
        assert window.window_s == window.end - window.start
        assert window.energy_j == pytest.approx(watts * window.window_s, rel=1e-6, abs=1e-6)
    if windows:
        assert (windows[0].start, windows[-1].end) == (inside[0].t, inside[-1].t)
        assert sum(window.updates for window in windows) == len(inside) - 1


def test_an_edge_of_vague_time_bounds_no_window() -> None:
    known = edges(0.1, 21)
    known[0] = EnergyEdge(0.05, known[0].energy_j, 0.05)
    known[5] = EnergyEdge(0.55, known[5].energy_j, 0.05)
    windows = aligned_windows(known, 0, 3)
    assert windows[0].start == known[1].t
    assert 0.55 not in [window.end for window in windows]
    assert [window.energy_j / window.window_s for window in windows] == pytest.approx([300] * len(windows))


def test_ends_that_are_vague_throughout_are_flagged() -> None:
    known = [EnergyEdge(0.1 * i, 30.0 * i, 0.05) for i in range(25)]
    reading = energy_of(PowerWindow("nvml_energy_counter", "nvml_power_integral", edges=known), 0, 3)
    assert reading.power_w.value == pytest.approx(300)
    assert [finding.code for finding in reading.findings] == ["energy_window_short"]
    assert "came late" in reading.findings[0].message


def test_jitter_of_edges_cancels_in_the_mean_and_shows_in_the_interval() -> None:
    known = [EnergyEdge(0.1 * i + 0.004 * math.sin(7.0 * i), 30.0 * i, 0.004) for i in range(51)]
    reading = energy_of(PowerWindow("nvml_energy_counter", "nvml_power_integral", edges=known), 0, 6)
    assert reading.power_w.value == pytest.approx(300, rel=0.002)
    assert reading.power_w.interval is not None
    lo, hi = reading.power_w.interval
    assert lo < 300 < hi
    assert 0.1 < hi - lo < 15
    assert (reading.power_w.n, len(reading.windows)) == (50 // MIN_UPDATES, 50 // MIN_UPDATES)
    assert reading.windows[0][0] == known[0].t


@given(st.lists(st.floats(0.001, 0.2), min_size=3, max_size=50), st.floats(0, 100), st.floats(-5, 5))
def test_the_integral_of_a_ramp_is_exact(gaps: list[float], level: float, slope: float) -> None:
    times = [sum(gaps[:i]) for i in range(len(gaps) + 1)]
    readings = [PowerReading(t, level + slope * t) for t in times]
    start, end = times[-1] * 0.1, times[-1] * 0.9
    expected = level * (end - start) + slope * (end**2 - start**2) / 2
    assert integrate_power(readings, start, end) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_an_integral_needs_readings_over_the_whole_stretch() -> None:
    readings = [PowerReading(0.01 * i, 100.0) for i in range(101)]
    assert integrate_power(readings, 0.0, 1.0) == pytest.approx(100)
    assert integrate_power(readings, 0.0, 1.02) == pytest.approx(102)
    assert integrate_power(readings, 0.0, 2.0) is None
    assert integrate_power(readings, -1.0, 1.0) is None
    assert integrate_power(readings, 1.0, 1.0) is None
    assert integrate_power([], 0.0, 1.0) is None
