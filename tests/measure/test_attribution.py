"""Recording both instruments at once: windows, beacons, references and modules, on a known run."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager

import pytest

from joulemark.attribution import attribute
from joulemark.attribution.recording import read_recording
from joulemark.collect.pm_sampling import Pace
from joulemark.errors import CountersBusy, CountersUnreadable, Unsupported
from joulemark.measure import attribution
from joulemark.measure.attribution import BEACONS, PACE, Plan, TorchBench, record
from joulemark.synthetic_run import SyntheticBench, SyntheticKernel, SyntheticRun
from joulemark.workloads.base import Step

KERNELS = (
    SyntheticKernel("gemm_bf16", 90e-6, {"pipe_tensor": 0.5, "dram_read_bytes": 1e12}, module="Linear_0"),
    SyntheticKernel("elementwise_kernel", 50e-6, {"pipe_tensor": 0.0, "dram_read_bytes": 2e12}),
)
SHORT = Pace(interval_s=20e-6, most_samples=1500)


class Known(SyntheticBench):
    """Remembers what it was asked to do."""

    def __init__(self, run):
        super().__init__(run)
        self.spun, self.products = [], 0

    def spin(self, seconds):
        super().spin(seconds)
        self.spun.append(seconds)

    @property
    def beacons(self):
        return [one for one in self.spun if one]

    def references(self, dtype):
        def product():
            self.products += 1

        return {"product": (product, 1e9)}


@pytest.fixture
def known():
    return Known(SyntheticRun(KERNELS, steps=20))


def recorded(known, folder, run=lambda: time.sleep(1e-3), pace=SHORT, **plan):
    return record(known, Step(run), folder, "two kernels", Plan(**{"windows": 2} | plan), pace)


def test_a_recording_can_be_attributed(known, tmp_path):
    known.between = lambda first, last: 20e-3  # a loaded machine slows some stretches, which is a finding
    done = recorded(known, tmp_path, references=False)
    assert read_recording(tmp_path) == done
    assert [one.role for one in done.windows] == ["steps", "steps"]
    assert done.facts["library"] == "simulated"
    found = attribute(tmp_path)
    assert found["steps"]["recorded"] == 2 * done.windows[0].steps
    assert found["label"] == "two kernels"
    assert found["findings"] == []


def test_modules_come_from_a_session_of_their_own(known, tmp_path):
    recorded(known, tmp_path, references=False)
    found = {one["module"]: one for one in attribute(tmp_path)["modules"]}
    assert set(found) == {"Linear_0", "outside any module's forward"}
    assert found["Linear_0"]["counters"]["dram_read_bytes"]["value"] == pytest.approx(90e6, rel=0.03)
    SyntheticRun([*KERNELS, SyntheticKernel("another", 50e-6, {})], steps=20).write(tmp_path / "other")
    shutil.copy(tmp_path / "host.json.gz", tmp_path / "other")
    other = attribute(tmp_path / "other")
    assert (other["operators"], other["modules"]) == (None, None)
    assert other["notes"]["modules"] == "1 of 3 kernels of the step are not in host.json.gz"


def test_windows_and_steps_are_marked_and_fit_the_samples(known, tmp_path):
    done = recorded(known, tmp_path, references=False, host=False)
    steps = done.windows[0].steps
    assert 2 <= steps < 1500 * 20e-6 / 1e-3
    bare = len(done.bare_step_s)
    assert bare == 3
    assert len(known.beacons) == len(BEACONS) * (bare + 3 + 2 * 2)  # before each plain stretch, twice a window
    assert known.beacons[0] == pytest.approx(BEACONS[0] * 20e-6)
    last_window = known.spun[-len(BEACONS) - (steps + 1) - 2 * len(BEACONS) - (steps + 1) :]
    assert last_window[len(BEACONS) : -2 * len(BEACONS) - (steps + 1)] == [0.0] * (steps + 1)  # a mark around each step
    assert known.marks == []  # the host is not recorded


class HostAndDevice(Known):
    """A host that launches every 20 µs, every 40 beside the profiler, a device of 30 µs a kernel, and its queue.

    Time is simulated: each look at the clock takes 2 µs. A stretch is what runs between two fences.

    Args:
        launches: of a step.
        slower: by stretch, by how much the host is.
    """

    DEPTH, LAUNCH_S, KERNEL_S = 1000, 20e-6, 30e-6

    def __init__(self, launches, slower=lambda stretch: 1.0):
        super().__init__(SyntheticRun(KERNELS, steps=20, hold_s=0.1, interval_s=PACE.interval_s))
        self.launches, self.slower = launches, slower
        self.now, self.free, self.profiling, self.begins = 0.0, 0.0, False, []
        self.holds, self.waits, self.stretch, self.stamped = [], [], -1, False

    def perf_counter(self):
        self.now += 2e-6
        return self.now

    monotonic = perf_counter

    def synchronize(self):
        super().synchronize()
        self.now = max(self.now, self.free)
        self.begins.clear()
        self.stamped = False

    def stamp(self):
        self.stamped = True
        return max(self.now, self.free)

    def between(self, first, last):
        return last - first

    def spin(self, seconds):
        super().spin(seconds)
        if self.stamped and seconds:  # no beacon and no mark
            self.stretch += 1
            self.holds.append(seconds)
            self.waits.append(0.0)
        self.stamped = False
        self.free = max(self.now, self.free) + seconds

    def run_step(self):
        """What the host does for a step; what the device waited for it counts for the stretch."""
        for _ in range(self.launches):
            self.now += self.LAUNCH_S * (1 + self.profiling) * self.slower(self.stretch)
            if len(self.begins) >= self.DEPTH:
                self.now = max(self.now, self.begins[-self.DEPTH])
            if self.waits:
                self.waits[-1] += max(0.0, self.now - self.free)
            self.begins.append(max(self.now, self.free))
            self.free = self.begins[-1] + self.KERNEL_S

    @contextmanager
    def profiled(self, path, warm, *, host):
        self.profiling = True
        with super().profiled(path, warm, host=host):
            yield
        self.profiling = False


@pytest.fixture
def held(monkeypatch, tmp_path):
    def recorded_with(launches, slower=lambda stretch: 1.0, windows=4):
        device = HostAndDevice(launches, slower)
        monkeypatch.setattr(attribution, "time", device)
        plan = {"references": False, "host": False, "ahead": True, "windows": windows}
        return device, recorded(device, tmp_path, device.run_step, PACE, **plan)

    return recorded_with


def test_the_device_is_held_until_the_host_is_ahead(held, tmp_path):
    device, done = held(launches=100)
    steps = done.windows[0].steps
    assert 1 < steps < 10
    assert all(one.held and one.steps == steps for one in done.windows)
    assert len(device.waits) == 3 + 3 + 5 + 2 * 4  # to choose, each plain stretch, twice a window with its warm-up
    assert sum(device.waits) == 0.0
    assert min(one.hold_s for one in done.windows) >= (2 * 40e-6 - 15e-6) * steps * 100  # for a host twice as slow
    assert [*done.bare_step_s, *done.plain_step_s, *done.recorded_step_s] == pytest.approx([3e-3] * 12, rel=2e-3)
    assert "hold" not in done.notes
    assert len(attribute(tmp_path)["clock"]["windows"]) == 4


def test_a_host_that_becomes_twice_as_slow_keeps_ahead(held):
    device, done = held(launches=500, slower=lambda stretch: 1.0 + (stretch >= 10))
    assert sum(device.waits) == 0.0
    assert len(device.waits) == 3 + 3 + 5 + 2 * 4  # nothing was repeated
    assert [*done.plain_step_s, *done.recorded_step_s] == pytest.approx([15e-3] * 9, rel=2e-3)


def test_the_hold_follows_the_host(held):
    _, done = held(launches=500, slower=lambda stretch: 1.5 if 10 <= stretch < 13 else 1.0, windows=6)
    first, grown, *_, last = (one.hold_s for one in done.windows)
    assert grown == pytest.approx(2 * 500 * 60e-6 - 7.5e-3, rel=0.01)
    assert first == pytest.approx(last)
    assert last < 0.7 * grown


def test_a_window_whose_device_waited_is_repeated_with_a_longer_hold(held):
    """In the third window the host becomes four times as slow as before."""
    device, done = held(launches=300, slower=lambda stretch: 4.0 if stretch >= 14 else 1.0)
    assert len(device.waits) == 3 + 3 + 5 + 2 * 4 + 2  # that window again, with its warm-up
    assert device.waits[14] > 1e-3
    assert [stretch for stretch, waited in enumerate(device.waits) if waited] == [14, 15]  # and in its warm-up
    assert all(one.held for one in done.windows)
    assert [one.number for one in done.windows] == [0, 1, 2, 3]
    steps = done.windows[0].steps * 9e-3
    assert [one.seconds for one in done.windows] == pytest.approx([steps] * 4, rel=2e-3)
    assert "hold" not in done.notes


def test_a_first_stretch_whose_device_waited_does_not_coarsen_the_samples(held):
    device, done = held(launches=500, slower=lambda stretch: 1.0 if stretch else 60.0)
    assert device.waits[0] > 0.1
    assert device.beacons[-2] == pytest.approx(BEACONS[-1] * PACE.interval_s)
    assert [one.hold_s for one in done.windows] == pytest.approx([2 * 500 * 40e-6 - 7.5e-3] * 4, rel=0.01)


def test_a_host_that_cannot_keep_ahead_is_said_so(held):
    """At 60 times the time of a kernel for a launch, a hold would have to be far longer than it may be."""
    device, done = held(launches=300, slower=lambda stretch: 60.0, windows=2)
    assert [one.held for one in done.windows] == [False, False]
    assert max(device.holds) == 0.1
    assert len(device.waits) == 3 + 3 + 3 + 2 * 2 + 6
    assert done.notes["hold"].startswith("in 8 stretches and windows the device may have waited")


@pytest.mark.parametrize("launches", [1001, 1200])
def test_a_full_queue_does_not_lengthen_the_hold(held, launches):
    """The host issues what the queue holds, and the rest as the device goes on: not at its own speed."""
    device, done = held(launches)
    assert sum(device.waits) == 0.0
    assert all(one.held and one.steps == 1 for one in done.windows)
    assert len(set(device.holds[-8:])) == 1


def test_a_long_step_is_sampled_at_longer_intervals(known, tmp_path):
    done = recorded(known, tmp_path, run=lambda: time.sleep(0.03), references=False, host=False, windows=1)
    assert done.windows[0].steps == 2
    assert known.beacons[0] > BEACONS[0] * 40e-6


def test_beacons_follow_an_interval_that_had_to_be_longer(known, tmp_path):
    known.run = SyntheticRun(KERNELS, steps=20, interval_s=30e-6)
    recorded(known, tmp_path, references=False, host=False)
    first, second = known.beacons[0], known.beacons[7 * len(BEACONS)]
    assert (first, second) == pytest.approx((BEACONS[0] * 20e-6, BEACONS[0] * 30e-6))


def test_references_are_windows_of_known_work(known, tmp_path):
    done = recorded(known, tmp_path, windows=1, host=False)
    reference = done.windows[-1]
    assert reference.role == "product"
    assert reference.flop == 1e9 * reference.steps
    assert known.products >= reference.steps
    assert reference.seconds > 0


def test_time_that_is_over_leaves_a_recording_with_a_note(known, tmp_path):
    done = recorded(known, tmp_path, windows=50, limit_s=0.0, references=False)
    assert len(done.windows) == 1
    assert done.notes["windows"] == "1 were recorded when the time was over"
    assert not (tmp_path / "modules.json.gz").exists()


def test_what_cannot_be_recorded_says_why(known, tmp_path):
    with pytest.raises(Unsupported, match="a setup runs between the steps"):
        record(known, Step(lambda: None, setup=lambda: None), tmp_path, "x")
    known.fails = CountersBusy("cuptiPmSamplingEnable answered busy", "stop the other profiler")
    with pytest.raises(CountersBusy):
        recorded(known, tmp_path)
    assert not (tmp_path / "recording.json").exists()


def test_a_window_that_cannot_be_read_costs_itself_alone(known, tmp_path):
    real, calls = known.record, []

    def record_or_fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise CountersUnreadable("the samples cover half of the run", "run for less time")
        return real(*args, **kwargs)

    known.record = record_or_fail
    done = recorded(known, tmp_path, windows=3, references=False, host=False)
    assert len(done.windows) == 2
    assert done.notes["lost_windows"].startswith("1 could not be read: the samples cover half")


def test_a_recording_that_is_cut_short_holds_the_windows_before(known, tmp_path):
    known.between = lambda first, last: 20e-3
    real, calls = known.record, []

    def record_or_die(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    known.record = record_or_die
    with pytest.raises(KeyboardInterrupt):
        recorded(known, tmp_path, windows=3)
    found = attribute(tmp_path)
    assert [one["window"] for one in found["clock"]["windows"]] == [0, 1]
    assert found["steps"]["slowdown_interval"] == [0.0, 0.0]
    assert found["findings"] == []


def test_a_machine_without_cuda_is_unsupported():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Unsupported, match="no CUDA device"):
        TorchBench()
