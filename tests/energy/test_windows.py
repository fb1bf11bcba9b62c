"""Windows keep what the sensors showed, and a file of them survives being cut off."""

from __future__ import annotations

import dataclasses
import json

import pytest

from joulemark.collect.energy import PowerReading
from joulemark.energy.caches import Caches
from joulemark.energy.calibrate import BenchmarkFailed, count, measure, measure_caches, measure_point
from joulemark.energy.calibration import _factors
from joulemark.energy.goodness import counted_checks
from joulemark.energy.microbench.suite import SUITE, benchmarks_for
from joulemark.energy.plan import plan
from joulemark.energy.windows import CalibrationWindow, Point, WindowWriter, _changes, read_windows
from joulemark.errors import ConfigurationError, UnreadableInput
from joulemark.synthetic_gpu import SyntheticGpu

HEADER = {"gpu": "Synthetic GPU", "gpu_uuid": "GPU-1", "architecture": "sm_90a", "mode": "quick"}


@pytest.fixture
def gpu():
    return SyntheticGpu()


@pytest.fixture
def caches(gpu):
    return measure_caches(gpu)


def test_a_window_survives_json(gpu, caches):
    window = measure_point(gpu, gpu.meter, Point("fp32", "random", "half", 0), caches, 2.3)
    again = CalibrationWindow.from_json(json.loads(json.dumps(window.to_json())))
    assert again.power_w == pytest.approx(window.power_w, rel=1e-5)
    assert again.counts == dict(window.counts)
    assert again.rates["fp32"] == pytest.approx(window.rates["fp32"], rel=1e-9)
    assert (again.clock_hz, again.capped, again.clock_held) == (1.98e9, False, True)
    assert again.reading.updates == window.reading.updates >= 20
    assert again.to_json()["edges"] == window.to_json()["edges"]


def test_counts_are_launches_times_the_suites_counts(gpu, caches):
    window = measure_point(gpu, gpu.meter, Point("fp32", "random", "half", 0), caches, 2.3)
    assert window.blocks == 66
    assert window.counts["fp32"] == 66 * 1024 * 128 * window.iterations * window.launches
    assert window.counts["sm_active"] == pytest.approx(66 * window.duration_s)
    assert window.duration_s == pytest.approx(2.3, rel=0.01)


def test_what_does_no_work_counts_no_work(gpu, caches):
    idle = measure_point(gpu, gpu.meter, Point("idle", "zero", "full", 0), caches, 2.3)
    empty = measure_point(gpu, gpu.meter, Point("empty", "zero", "full", 0), caches, 2.3)
    asleep = measure_point(gpu, gpu.meter, Point("sleep", "zero", "single", 0), caches, 2.3)
    assert (idle.counts, empty.counts) == ({}, {})
    assert asleep.counts == {"sm_active": pytest.approx(2.3, rel=0.01)}


def test_a_pause_lowers_the_rate_and_keeps_the_sms(gpu, caches):
    full = measure_point(gpu, gpu.meter, Point("fp64", "random", "full", 0), caches, 2.3)
    paused = measure_point(gpu, gpu.meter, Point("fp64", "random", "paused", 0), caches, 2.3)
    assert paused.sleep_ns > 0
    assert 0.4 < paused.rates["fp64"] / full.rates["fp64"] < 0.6
    assert paused.rates["sm_active"] == pytest.approx(full.rates["sm_active"])


def test_capped_needs_more_than_a_name_that_lingers(caches):
    free = SyntheticGpu()
    window = measure_point(free, free.meter, Point("wgmma_bf16", "random", "full", 0), caches, 2.3)
    first = window.power.states[0]
    window.power.states[0] = (first[0], dataclasses.replace(first[1], reasons=frozenset({"power_cap"})))
    assert not CalibrationWindow.from_json(window.to_json()).capped
    states, slow = window.power.states, {"reasons": frozenset({"power_cap"}), "sm_clock_hz": 1.7e9}
    for share, capped in ((0.1, False), (0.4, True)):  # neither moves the median of the clocks
        window.power.states = [
            (t, dataclasses.replace(state, **slow) if place < share * len(states) else state)
            for place, (t, state) in enumerate(states)
        ]
        again = CalibrationWindow.from_json(window.to_json())
        assert (again.capped, again.clock_held) == (capped, True)
    held = SyntheticGpu(limit_w=250.0)
    window = measure_point(held, held.meter, Point("wgmma_bf16", "random", "full", 0), caches, 2.3)
    assert window.capped
    assert window.clock_held is False
    assert window.power_w == pytest.approx(250, rel=0.02)


def test_only_changes_of_power_are_stored():
    readings = [PowerReading(float(t), watts) for t, watts in enumerate((5.0, 5.0, 5.0, 7.0, 7.0, 9.0))]
    assert [(one.t, one.power_w) for one in _changes(readings)] == [(0, 5), (2, 5), (3, 7), (4, 7), (5, 9)]


def test_a_plan_is_gone_on_with(tmp_path, gpu, caches):
    path = tmp_path / "windows.jsonl"
    points = plan("sm_90a", quick=True)[:12]
    ticks = iter(range(0, 10**6, 100))
    begun = measure(gpu, gpu.meter, points, caches, WindowWriter(path, HEADER), limit_s=450, clock=lambda: next(ticks))
    assert (begun.measured, begun.left) == (4, 8)
    with path.open("a") as file:
        file.write('{"kind": "window", "benchmark": "fp32", "oper')  # killed while writing
    writer = WindowWriter(path, HEADER)
    assert len(writer.done) == 4
    done = measure(gpu, gpu.meter, points, caches, writer, clock=lambda: 0.0)
    assert (done.measured, done.left) == (8, 0)
    file = read_windows(path)
    assert file.done == {point.key for point in points}
    assert file.damaged == (6,)


def test_windows_of_another_gpu_are_not_mixed(tmp_path):
    path = tmp_path / "windows.jsonl"
    WindowWriter(path, HEADER)
    with pytest.raises(ConfigurationError, match="another GPU"):
        WindowWriter(path, {**HEADER, "gpu_uuid": "GPU-2"})
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("content", ["", "nonsense\n", '{"schema": "joulemark/sweep/1"}\n', "[1]\n"])
def test_what_holds_no_windows_is_refused(tmp_path, content):
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(UnreadableInput, match="holds no windows"):
        read_windows(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnreadableInput, match="cannot be read"):
        read_windows(tmp_path / "none.jsonl")


def test_caches_of_the_synthetic_gpu(caches):
    assert isinstance(caches, Caches)
    assert caches.l2.fits_bytes <= 40 << 20 < caches.l2.beyond_bytes


class FakeSeries:
    def __init__(self, launches: float) -> None:
        self.units = {"instructions": "inst", "sm_active": "1", "l2_bytes": "B"}
        self._launches = launches

    def total(self, name):
        return None if name == "l2_bytes" else 500.0 * self._launches


class FakeRecorder:
    """Counts 500 instructions per launch."""

    groups = ("pipes", "memory")

    def __init__(self, gpu) -> None:
        self._gpu = gpu
        self.recorded = []

    def record(self, group, run, expected_s=None):
        before = self._gpu.now
        run()
        assert expected_s == pytest.approx(self._gpu.now - before, abs=0.01)
        self.recorded.append((group, self._gpu.now - before))
        return FakeSeries(10)


def test_a_benchmark_that_fails_is_noted_and_left_out_by_the_next_command(tmp_path, gpu, caches, monkeypatch):
    path = tmp_path / "windows.jsonl"
    loaded = gpu.load

    def load(benchmark, operands, tiles):
        if benchmark.name == "fp32_tile":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        loaded(benchmark, operands, tiles)

    monkeypatch.setattr(gpu, "load", load)
    points = [Point(name, "random", "half", 0) for name in ("fp32", "fp32_tile", "fp64")]
    points.append(Point("fp32_tile", "zero", "half", 0))
    with pytest.raises(BenchmarkFailed, match="fp32_tile failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        measure(gpu, gpu.meter, points, caches, WindowWriter(path, HEADER), clock=lambda: 0.0)
    progress = measure(gpu, gpu.meter, points, caches, WindowWriter(path, HEADER), clock=lambda: 0.0)
    assert (progress.measured, progress.left) == (1, 0)
    file = read_windows(path)
    assert [window.point.benchmark for window in file.windows] == ["fp32", "fp64"]
    assert file.failed == {"fp32_tile": "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"}


def test_benchmarks_are_counted_once_under_every_group(tmp_path, gpu, caches):
    path = tmp_path / "windows.jsonl"
    recorder = FakeRecorder(gpu)
    ticks = iter(range(10**6))
    left = count(gpu, recorder, caches, WindowWriter(path, HEADER), limit_s=8, clock=lambda: next(ticks))
    assert left > 0
    assert count(gpu, recorder, caches, WindowWriter(path, HEADER), limit_s=900, clock=lambda: 0.0) == 0
    counted = {one.benchmark: one for one in read_windows(path).counted}
    assert [group for group, _ in recorder.recorded].count("pipes") == len(counted)
    assert counted["fp32"].counters == {"instructions": 500.0}
    assert counted["fp32"].counts["fp32"] > 0
    assert set(counted) == {one.name for one in benchmarks_for("sm_90a") if one.work("sm_90a")}
    roles = [SUITE[name].role for name in counted]
    assert roles == sorted(roles, key=lambda role: role == "check")
    checks = {row["benchmark"]: row for row in counted_checks(counted.values()) if row["unit"] == "instruction"}
    assert checks["fp32"]["ratio"] == 500 / counted["fp32"].counts["instruction"]
    factors = _factors(list(counted.values()))
    assert factors["fp32"]["instructions"] == 500 / counted["fp32"].counts["fp32"]
