"""Busy times of cases that were timed in turns, of a device whose clock rises while the profiler keeps it waiting."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from joulemark.collect.torch_profiler import Recording
from joulemark.errors import Unsupported
from joulemark.measure.busy_turns import LIMIT_S, STEPS, BusyTurns
from joulemark.records import Case, KnownTables, converted
from joulemark.tandem import turns
from joulemark.tandem.turns import BUSY_TABLE, Busy
from joulemark.workloads.base import Step

from .test_profile import event

ISSUE_S, PROFILED_ISSUE_S, GAP_S = 3e-3, 9e-3, 1e-5


class Gpu:
    """Timer and profiler of a device that works 55 µs a sample, up to 5 % less while it waits for the host.

    Args:
        lost: recordings whose kernels are lost, by number from 0.
        fails: number of a recording → what it raises.
        replay_kernels: of a step that is replayed.
    """

    def __init__(self, batches=(1, 64, 128, 256), lost=(), fails=None, replay_kernels=2, no_capture=None):
        self.cases = [(Case("m", batch_size=batch), Step(self.runs(batch), capturable=True)) for batch in batches]
        self.lost, self.fails, self.replay_kernels, self.no_capture = lost, fails or {}, replay_kernels, no_capture
        self.recorded, self.fences, self.now = [], 0, None

    def runs(self, batch, replayed=False):
        def run():
            self.now = (batch, replayed)

        run.replay = lambda: self.runs(batch, replayed=True)
        return run

    def step_s(self, case):
        return max(ISSUE_S, self.busy_s(case.batch_size)) + GAP_S

    @staticmethod
    def busy_s(batch):
        return 55e-6 * batch

    def synchronize(self):
        self.fences += 1

    def capture(self, run):
        if self.no_capture:
            raise self.no_capture
        return run.replay()

    def record(self, run, setup, steps, synchronize, path):
        number = len(self.recorded)
        for _ in range(steps):
            run()
        synchronize()
        batch, replayed = self.now
        self.recorded.append(self.now)
        if number in self.fails:
            raise self.fails[number]
        kernels = self.replay_kernels if replayed else 2
        busy = [self.busy_s(batch)] * steps
        wall_s = busy[0] + GAP_S
        if not replayed and wall_s < PROFILED_ISSUE_S:
            wall_s, busy = PROFILED_ISSUE_S, [busy[0] * (1 - 0.05 * min(1, n / 5)) for n in range(steps)]
        self.write(path, busy, wall_s, kernels, replayed, number in self.lost)
        return Recording([wall_s] * 3, wall_s, steps, 0.0, wall_s * steps)

    def write(self, path, busy, wall_s, kernels, replayed, lost):
        events = []
        for number, seconds in enumerate(busy):
            begin, length = 1000 + 1e6 * wall_s * number, 1e6 * seconds / kernels
            events.append(event(f"joulemark.iteration#{number}", "user_annotation", begin, 1e6 * wall_s, 1))
            calls = 1 if replayed else kernels
            for call in range(calls):
                correlation = 100 * number + call + 1
                name = "cudaGraphLaunch" if replayed else "cudaLaunchKernel"
                events.append(event(name, "cuda_runtime", begin + 1 + call, 1, 1, correlation=correlation))
                where = {"device": 0, "stream": 7, "correlation": correlation}
                for one in range(call, call + kernels // calls - (lost and call == 0)):
                    events.append(event("gemm", "kernel", begin + 4 + one * length, length, 7, **where))
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))


def recorded(gpu, **more):
    """All rows of its cases."""
    timed = SimpleNamespace(steps=gpu.cases, step_s=gpu.step_s)
    busy = BusyTurns(gpu, [timed], gpu, **more)
    for _ in range(busy.count + 1):
        busy.next()
    assert busy.count == 0
    converted({BUSY_TABLE: busy.rows}, KnownTables)
    return busy.rows


def test_a_step_that_hides_its_host_is_replayed_where_the_profiler_makes_it_wait():
    gpu = Gpu()
    rows = recorded(gpu)
    assert gpu.recorded[0] == (256, False)  # opens the profiler
    assert gpu.recorded[1:] == [(256, False), (128, False), (128, True), (64, False), (64, True), (1, False)]
    assert [(row["batch_size"], row["replayed"]) for row in rows] == gpu.recorded[1:]
    assert {row["reason"] for row in rows} == {None}
    assert rows[1]["busy_s"] == pytest.approx(0.95 * gpu.busy_s(128))  # the clock had risen
    assert turns.busy(rows) == {
        1: Busy(pytest.approx(0.95 * gpu.busy_s(1)), "profiled"),
        64: Busy(pytest.approx(gpu.busy_s(64)), "replayed"),
        128: Busy(pytest.approx(gpu.busy_s(128)), "replayed"),
        256: Busy(pytest.approx(gpu.busy_s(256)), "profiled"),
    }


def test_what_comes_before_the_clock_has_settled_is_left_out():
    """Of ten steps in the pace of the host the first has the clock of before, those from the sixth on what is kept."""
    gpu = Gpu(batches=(1,))
    (row,) = recorded(gpu)
    assert row["busy_s"] == pytest.approx(0.95 * gpu.busy_s(1), rel=1e-9)
    assert (row["kernels"], row["plain_step_s"], row["profiled_step_s"]) == (2, PROFILED_ISSUE_S, PROFILED_ISSUE_S)


def test_the_clock_is_read_while_the_device_works():
    gpu, read = Gpu(batches=(256,)), []

    def clock():
        read.append(gpu.fences)
        return 1.5e9 + len(read)

    (row,) = recorded(gpu, clock=clock)
    assert read == [0, 1]  # before each fence
    assert row["sm_clock_hz"] == 1.5e9 + 2
    assert turns.busy([row])[256].sm_clock_hz == 1.5e9 + 2


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ({"replay_kernels": 3}, "a replay has 3.0 kernels, the step 2.0"),
        ({"no_capture": Unsupported("no graph")}, "no graph"),
        ({"no_capture": RuntimeError("CUDA error: oops\nmore")}, "RuntimeError: CUDA error: oops"),
    ],
)
def test_without_a_replay_the_profiled_step_tells(gpu, reason):
    gpu = Gpu(batches=(128,), **gpu)
    profiled, replayed = recorded(gpu)
    assert (replayed["replayed"], replayed["busy_s"], replayed["reason"]) == (True, None, reason)
    assert turns.busy([profiled, replayed])[128].source == "profiled"


def test_lost_records_are_recorded_once_more():
    gpu = Gpu(batches=(256, 1), lost=(1, 3, 4))
    first, second = recorded(gpu)
    assert gpu.recorded == [(256, False)] * 3 + [(1, False)] * 2
    assert first["busy_s"] == pytest.approx(gpu.busy_s(256))
    assert second["busy_s"] is None
    assert second["reason"].startswith("10 of 20 kernel launch calls without a kernel")
    assert set(turns.busy([first, second])) == {256}


@pytest.mark.parametrize("error", [RuntimeError("CUPTI is busy"), KeyError("ph"), MemoryError(), UserWarning("odd")])
def test_a_profiler_that_fails_costs_its_case_alone(error):
    gpu = Gpu(batches=(256, 1), fails={0: error, 1: error})
    failed, other = recorded(gpu)
    assert failed["busy_s"] is None
    assert failed["reason"].startswith(type(error).__name__)
    assert other["busy_s"] is not None


def test_time_that_is_over_leaves_the_smallest_batches_with_their_reason():
    gpu = Gpu()
    rows = recorded(gpu, limit_s=-1.0)
    assert gpu.recorded == [(256, False)]
    assert [row["busy_s"] for row in rows] == [None] * 4
    assert all("were over" in row["reason"] for row in rows)
    assert LIMIT_S > 0


def test_without_turns_there_is_nothing_to_profile():
    with pytest.raises(Unsupported, match="timed in turns in this process"):
        BusyTurns(Gpu(), [])


def test_torch_records_a_step_of_a_host_and_says_that_no_device_worked():
    torch = pytest.importorskip("torch")
    ones = torch.ones(4)
    timed = SimpleNamespace(steps=[(Case("m", batch_size=1), Step(lambda: ones + 1))], step_s=lambda case: 1e-3)
    busy = BusyTurns(SimpleNamespace(synchronize=lambda: None), [timed])
    busy.next()
    busy.next()
    (row,) = busy.rows
    assert row["busy_s"] is None
    assert row["reason"] == "no GPU events"
    assert row["profiled_step_s"] > 0
    assert STEPS > 1
