"""Recording both instruments at once: windows, beacons, references and modules, on a known run."""

from __future__ import annotations

import shutil
import time

import pytest

from joulemark.attribution import attribute
from joulemark.attribution.recording import read_recording
from joulemark.collect.pm_sampling import Pace
from joulemark.errors import CountersBusy, CountersUnreadable, Unsupported
from joulemark.measure.attribution import BEACONS, Plan, TorchBench, record
from joulemark.synthetic_run import SyntheticBench, SyntheticKernel, SyntheticRun
from joulemark.workloads.base import Step

KERNELS = (
    SyntheticKernel("gemm_bf16", 90e-6, {"pipe_tensor": 0.5, "dram_read_bytes": 1e12}, module="Linear_0"),
    SyntheticKernel("elementwise_kernel", 50e-6, {"pipe_tensor": 0.0, "dram_read_bytes": 2e12}),
)
PACE = Pace(interval_s=20e-6, most_samples=1500)


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


def recorded(known, folder, run=lambda: time.sleep(1e-3), **plan):
    return record(known, Step(run), folder, "two kernels", Plan(**{"windows": 2} | plan), PACE)


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


def test_the_device_is_held_until_the_host_is_ahead(known, tmp_path):
    """The host issues a step in 3 ms or more, three of them take the device 6 ms."""
    known.run = SyntheticRun(KERNELS, steps=20, hold_s=6e-3)
    known.between = lambda first, last: 6e-3
    done = recorded(known, tmp_path, run=lambda: time.sleep(3e-3), references=False, host=False, ahead=True)
    window = done.windows[0]
    held = [one for one in known.spun if one > 2 * max(BEACONS) * 20e-6]
    assert len(held) == 1 + 3 + 3 + 2 * 2  # to time a step, each plain stretch, twice a window with its warm-up
    assert held[1:] == [window.hold_s] * (len(held) - 1)
    assert window.hold_s > 1.25 * 3e-3  # of a step's issue beside the profiler, and more
    found = attribute(tmp_path)
    assert found["steps"]["recorded"] == 2 * window.steps
    assert found["steps"]["bare_s"] == pytest.approx(6e-3 / window.steps)
    assert len(found["clock"]["windows"]) == 2


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
