"""The host's clock, and which exceptions mean that memory ran out or a CUDA context broke."""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from joulemark.collect import timing
from joulemark.collect.timing import CudaTimer, HostTimer, first_line, is_out_of_memory, is_poisoned, timer_for
from joulemark.errors import Unsupported
from joulemark.measure.stopping import Exactly
from joulemark.testing import FakeClock


def test_lone_rounds_leave_the_setup_out_of_the_time():
    log = []

    def setup():
        log.append("setup")
        time.sleep(0.01)

    lone = HostTimer().lone(lambda: log.append("run") or time.sleep(0.001), setup, Exactly(4))
    assert log == ["setup", "run"] * 4
    assert len(lone.host_s) == 4
    assert all(0.001 <= one < 0.01 for one in lone.host_s)
    assert lone.device_s == []
    assert lone.end - lone.start > 0.04


def test_a_round_of_several_calls_gives_the_time_of_one():
    calls = []
    lone = HostTimer().lone(lambda: calls.append(time.sleep(0.001)), None, Exactly(3), iterations=5)
    assert len(calls) == 15
    assert all(0.001 <= one < 0.004 for one in lone.host_s)


def test_steady_steps_on_a_host_are_lone_ones():
    steady = HostTimer().steady(lambda: time.sleep(0.001), Exactly(3), 0.001)
    assert len(steady.step_s) == 3
    assert min(steady.step_s) >= 0.001
    assert steady.end - steady.start >= sum(steady.step_s)


class Done:
    """An event of a device that has always done its work."""

    def record(self):
        pass

    def query(self):
        return True


class Queue:
    """A device and a host on a simulated clock: a launch waits while 1,024 of the device's are not done.

    Args:
        launches: of a step.
        issue_s, work_s: what one takes the host, and the device.
    """

    def __init__(self, launches, issue_s, work_s):
        self.launches, self.issue_s, self.work_s = launches, issue_s, work_s
        self.clock, self.done_at, self.steps = FakeClock(), [], 0

    def run(self):
        self.steps += 1
        for _ in range(self.launches):
            room_at = self.done_at[-1024] if len(self.done_at) >= 1024 else self.clock()
            self.clock.sleep(room_at - self.clock())
            self.clock.sleep(self.issue_s)
            self.done_at.append(max([self.clock(), *self.done_at[-1:]]) + self.work_s)

    def synchronize(self):
        self.clock.sleep(max([0.0, *self.done_at[-1:]]) - self.clock())

    def event(self):
        queue = self

        class Event:
            def record(self):
                self.at = queue.done_at[-1]

            def query(self):
                queue.clock.sleep(1e-6)
                return self.at <= queue.clock()

        return Event()

    def burst(self, monkeypatch, **options):
        timer = CudaTimer.__new__(CudaTimer)
        timer.synchronize = self.synchronize
        timer._torch = SimpleNamespace(cuda=SimpleNamespace(Event=self.event))
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=self.clock))
        return timer.burst(self.run, **options)


@pytest.mark.parametrize(
    ("launches", "issue_s", "work_s", "steps"),
    [
        (282, 14e-6, 90e-6, 1),  # ResNet-50 at a large batch: four steps would be 1,128 launches
        (282, 14e-6, 3e-6, 3),  # the device keeps up: nothing waits
        (18, 17e-6, 900e-6, 3),  # few launches: three steps are far from a full queue
        (500, 4.2e-6, 50e-6, 1),  # a host that is three times as fast
        (893, 16e-6, 15e-6, 3),  # a step with most of a queue's launches, on a device that keeps up
    ],
)
@pytest.mark.parametrize("warm_s", [0.0, 2e-3])
def test_a_burst_never_fills_the_queue_of_launches(monkeypatch, launches, issue_s, work_s, steps, warm_s):
    queue = Queue(launches, issue_s, work_s)
    for _ in range(3):
        samples = queue.burst(monkeypatch, warm_s=warm_s)
        assert samples == pytest.approx([launches * issue_s] * len(samples)), "the host was held up"
        assert len(samples) == steps


def test_steps_that_warm_a_burst_do_not_fill_its_queue(monkeypatch):
    queue = Queue(100, 5e-6, 1e-3)
    samples = queue.burst(monkeypatch, warm_s=1.0)
    assert samples == pytest.approx([5e-4])
    assert queue.steps == 8, "of 4 ms in all, in which no host issues more than 1,000 launches"


def test_issued_steps_are_timed_one_by_one_behind_a_first_one():
    timer = CudaTimer.__new__(CudaTimer)
    log = []
    timer.synchronize = lambda: log.append("fence")
    timer._torch, timer.device = SimpleNamespace(zeros=torch.zeros, cuda=SimpleNamespace(Event=Done)), "cpu"
    samples = timer.issue(
        lambda: (log.append("run"), time.sleep(2e-3)), lambda seen: "enough" if len(seen) > 3 else None
    )
    assert log == ["fence"] * 2 + ["fence", "run", "run", "run", "run", "fence", "fence"] * 2
    assert len(samples.step_s) == len(samples.reference_s) == 6
    assert all(2e-3 <= one < 1 for one in samples.step_s)
    assert all(0 < one < 1 for one in samples.reference_s)
    assert len(set(samples.reference_s[:3])) == 1, "the steps of a burst share what was timed around it"
    assert HostTimer().issue(lambda: log.append("run"), lambda _: None).step_s == []
    assert HostTimer().burst(lambda: log.append("run")) == []
    assert log[-1] == "fence"


def test_a_burst_is_timed_behind_steps_that_warm_the_caches():
    timer = CudaTimer.__new__(CudaTimer)
    log = []
    timer.synchronize = lambda: log.append("fence")
    timer._torch = SimpleNamespace(cuda=SimpleNamespace(Event=Done))
    samples = timer.burst(lambda: (log.append("run"), time.sleep(1e-3)), warm_s=5e-3)
    assert log[0] == "fence"
    assert len(samples) == 3
    assert 1 + 3 <= log.count("run") <= 5 + 3
    assert len(timer.burst(lambda: log.append("run"))) == 3


def test_sustained_work_counts_its_steps():
    calls = []
    progress = HostTimer().sustain(lambda: calls.append(time.sleep(0.002)), 0.05, 0.002)
    assert progress[0][1] == 0
    assert progress[-1][1] == len(calls)
    assert progress[-1][0] - progress[0][0] >= 0.05
    assert all(earlier <= later for (earlier, _), (later, _) in itertools.pairwise(progress))


def test_a_host_has_no_l2_to_flush_and_no_graph():
    timer = timer_for("cpu")
    assert timer.flush_l2() is None
    assert (timer.tier, timer.device) == ("host_clock", "cpu")
    with pytest.raises(Unsupported, match="CUDA"):
        timer.capture(lambda: None)


class OutOfMemoryError(RuntimeError):
    """Named as torch's and cupy's are."""


def chained(inner, outer):
    try:
        try:
            raise inner
        except BaseException as error:
            raise outer from error
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried"),
        chained(MemoryError(), ValueError("in the model")),
    ],
)
def test_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), RuntimeError("shape mismatch"), KeyError("memory"), OSError(28, "no space")]
)
def test_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_a_ring_of_causes_ends():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_sticky_errors_poison(text):
    assert is_poisoned(RuntimeError(text))


def test_other_errors_do_not_poison_and_load_no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not is_poisoned(RuntimeError("CUDA out of memory"))
    assert "torch" not in sys.modules


def test_a_context_that_cannot_be_synchronized_is_poisoned(monkeypatch):
    class Cuda:
        is_available = is_initialized = staticmethod(lambda: True)

        @staticmethod
        def synchronize():
            raise RuntimeError("CUDA error")

    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"cuda": Cuda}))
    assert is_poisoned(ValueError("looks harmless"))


def test_the_first_line_of_an_error():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(MemoryError()) == "MemoryError"
