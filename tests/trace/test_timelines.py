"""Random timelines against a brute force that looks at every microsecond on its own."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulemark.trace.analyse import analyse, file_document

CALLS = {
    "cudaLaunchKernel": "launch_call",
    "cuLaunchKernelEx": "launch_call",
    "cudaGraphLaunch": "launch_call",
    "cudaMemcpyAsync": "copy",
    "cudaStreamSynchronize": "synchronize",
    "cudaMalloc": "runtime_call",
}
BUSIEST_FIRST = ("launch_call", "copy", "runtime_call", "framework", "input", "synchronize", "outside_operators")
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
DELAYED = ("framework", "outside_operators", "input", "runtime_call")


@dataclass(frozen=True)
class Host:
    state: str
    start: int
    end: int
    thread: int
    name: str
    correlation: int = -1


@dataclass(frozen=True)
class Work:
    start: int
    end: int
    device: int
    stream: int
    kernel: bool
    correlation: int


@dataclass
class Timeline:
    host: list[Host] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    overhead: list[tuple[int, int]] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)

    def events(self) -> list[dict[str, Any]]:
        """The timeline as a trace, its events in any order."""
        rows = []
        for one in self.host:
            cat = {"framework": "cpu_op", "input": "user_annotation"}.get(one.state, "cuda_runtime")
            args = {"correlation": one.correlation} if one.correlation >= 0 else {}
            rows.append(("X", cat, one.name, 1, one.thread, one.start, one.end - one.start, args))
        for work in self.work:
            cat, name = ("kernel", "k") if work.kernel else ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)")
            args = {"device": work.device, "correlation": work.correlation}
            rows.append(("X", cat, name, work.device, work.stream, work.start, work.end - work.start, args))
        rows += [("X", "overhead", "Buffer Flush", -1, 0, lo, hi - lo, {}) for lo, hi in self.overhead]
        rows += [
            ("X", "user_annotation", f"ProfilerStep#{i}", 1, 1, lo, hi - lo, {})
            for i, (lo, hi) in enumerate(self.marks)
        ]
        keys = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
        return [dict(zip(keys, row, strict=True)) for row in rows]


def fill(rng: random.Random, line: Timeline, thread: int, start: int, end: int, depth: int) -> None:
    """Host ranges of one thread between two times, properly nested, with calls and the work that they issue."""
    at = start
    while at < end and rng.random() < 0.9:
        at += rng.randint(0, 6)
        stop = min(end, at + rng.randint(0, 25))
        if stop <= at:
            break
        kind = rng.choice(("operator", "operator", "call", "call", "loader"))
        if kind == "call" or depth >= 3:
            issue(rng, line, thread, at, min(stop, at + 8))
            at = min(stop, at + 8)
            continue
        state, name = ("input", LOADER) if kind == "loader" else ("framework", f"aten::op{depth}")
        line.host.append(Host(state, at, stop, thread, name))
        fill(rng, line, thread, at, stop, depth + 1)
        at = stop


def issue(rng: random.Random, line: Timeline, thread: int, start: int, end: int) -> None:
    name = rng.choice(list(CALLS))
    correlation = len(line.host) + 1000 * thread
    line.host.append(Host(CALLS[name], start, end, thread, name, correlation))
    count = {"launch_call": 3 if "Graph" in name else 1, "copy": 1}.get(CALLS[name], 0)
    begin = start + rng.randint(-2, 30)
    device, stream = rng.randint(0, 1), rng.randint(7, 8)
    for _ in range(count if rng.random() < 0.95 else 0):
        begin = max(1, begin)
        length = rng.randint(0, 20)
        line.work.append(Work(begin, begin + length, device, stream, CALLS[name] != "copy", correlation))
        begin += length + rng.randint(0, 3)


def timeline(seed: int, with_marks: bool) -> Timeline:
    rng = random.Random(seed)
    line = Timeline()
    for thread in range(1, rng.randint(2, 3)):
        fill(rng, line, thread, rng.randint(1, 20), rng.randint(60, 160), 0)
    for number in range(rng.randint(0, 2)):
        start = rng.randint(1, 150)
        line.work.append(Work(start, start + rng.randint(1, 10), 0, 9, True, 9000 + number))
    at = rng.randint(1, 100)
    line.overhead += [(at, at + rng.randint(1, 20))] if rng.random() < 0.3 else []
    at = rng.randint(1, 30)
    while with_marks and at < 150:
        stop = at + rng.randint(5, 60)
        line.marks.append((at, stop))
        at = stop + rng.choice((0, 0, 3))
    return line


class BruteForce:
    """Every figure from its definition, one microsecond at a time."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.calls = {one.correlation: one for one in line.host if one.correlation >= 0}
        self.threads = sorted({one.thread for one in line.host})

    def call(self, work: Work) -> Host | None:
        return self.calls.get(work.correlation)

    def busy(self, device: int, at: int) -> bool:
        return any(work.device == device and work.start <= at < work.end for work in self.line.work)

    def state(self, thread: int, at: int) -> str:
        around = [one for one in self.line.host if one.thread == thread and one.start <= at < one.end]
        working = [one for one in around if one.state != "input"]
        inner = max(working, key=lambda one: (one.start, -one.end, one.state != "framework"), default=None)
        state = inner.state if inner else "outside_operators"
        loading = any(one.state == "input" for one in around)
        return "input" if loading and state in ("framework", "outside_operators") else state

    def host(self, thread: int | None, at: int) -> str:
        if not self.threads:
            return "unknown"
        state = self.state(thread, at) if thread is not None else "outside_operators"
        if state == "outside_operators":
            states = [self.state(one, at) for one in self.threads]
            state = min(states, key=BUSIEST_FIRST.index)
        profiling = any(lo <= at < hi for lo, hi in self.line.overhead)
        return "profiler" if profiling and state in DELAYED else state

    def cause(self, device: int, at: int) -> str:
        later = [work for work in self.line.work if work.device == device and work.start > at and work.end > work.start]
        ending = min(later, key=lambda work: (work.start, -work.end), default=None)
        call = self.call(ending) if ending else None
        if ending is None or call is None or call.start >= ending.start or at < call.start:
            return self.host(call.thread if call else None, at)
        return call.state if at < call.end else "queued"

    def idle(self, device: int, start: int, end: int) -> Counter[str]:
        return Counter(self.cause(device, at) for at in range(start, end) if not self.busy(device, at))

    def windows(self) -> list[tuple[int, int]]:
        result = []
        for start, end in self.line.marks:
            known = [(self.calls[w.correlation].start, w.end) for w in self.line.work if self.call(w)]
            begin = max([start, *(done for issued, done in known if issued < start)])
            own = [done for issued, done in known if start <= issued < end]
            result.append((begin, max([begin, end, *own])))
        return result

    def operators(self) -> Counter[int]:
        """Outermost operators that issue work, by the mark in which they first do."""
        ranges = {(one.thread, one.start, one.end) for one in self.line.host if one.state == "framework"}
        found: Counter[int] = Counter()
        for thread, start, end in ranges:
            if any(t == thread and lo <= start and end <= hi and (lo, hi) != (start, end) for t, lo, hi in ranges):
                continue
            issued = [
                number
                for one in sorted(self.line.host, key=lambda one: one.start)
                for number, (lo, hi) in enumerate(self.line.marks)
                if one.thread == thread and start <= one.start < end and lo <= one.start < hi
                if one.state in ("launch_call", "copy")
            ]
            found.update(issued[:1])
        return found

    def idle_of_window(self, device: int, start: int, end: int) -> Counter[str]:
        working = [at for at in range(start, end) if self.busy(device, at)]
        total: Counter[str] = Counter()
        for at in range(start, end):
            if not self.busy(device, at):
                cause = self.cause(device, at)
                behind = bool(working) and at > working[-1] and cause != "input"
                total["tail" if behind else cause] += 1
        return total

    def depth(self, at: int) -> int:
        return sum(
            call.start <= at < work.start
            for work in self.line.work
            if work.kernel and (call := self.call(work)) is not None
        )


def entry_of(line: Timeline) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps({"traceEvents": line.events()}))
        return file_document(analyse(path))


def seconds(count: Counter[str]) -> dict[str, Any]:
    return {cause: pytest.approx(n * 1e-6, abs=1e-13) for cause, n in count.items()}


def without_zeros(idle: dict[str, float]) -> dict[str, float]:
    return {cause: value for cause, value in idle.items() if value}


seeds = st.integers(min_value=0, max_value=2**32)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_union_and_idle_causes_of_a_device(seed: int) -> None:
    line = timeline(seed, with_marks=False)
    brute, entry = BruteForce(line), entry_of(line)
    assert entry["kernels"] == sum(work.kernel for work in line.work)
    for row in entry["devices"]:
        mine = [work for work in line.work if work.device == row["device"]]
        first, last = min(work.start for work in mine), max(work.end for work in mine)
        busy = sum(brute.busy(row["device"], at) for at in range(first, last))
        assert row["busy_s"] == pytest.approx(busy * 1e-6)
        assert row["span_s"] == pytest.approx((last - first) * 1e-6)
        assert without_zeros(row["idle_s"]) == seconds(brute.idle(row["device"], first, last))
    if entry["devices"]:
        assert sum(entry["idle_s"].values()) == pytest.approx(entry["exposed_overhead_s"], abs=1e-13)
        assert entry["exposed_overhead_s"] == pytest.approx(entry["span_s"] - entry["busy_s"], abs=1e-13)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_iterations(seed: int) -> None:
    line = timeline(seed, with_marks=True)
    brute, entry = BruteForce(line), entry_of(line)
    devices = sorted({work.device for work in line.work})
    assert len(entry["iterations"]) == len(line.marks)
    operators = brute.operators()
    assert [row["operators"] for row in entry["iterations"]] == [operators[one] for one in range(len(line.marks))]
    for row, (start, end) in zip(entry["iterations"], brute.windows(), strict=True):
        assert row["wall_s"] == pytest.approx((end - start) * 1e-6, abs=1e-13)
        if not devices:
            assert row["idle_s"] is None
            continue
        busy = sum(brute.busy(device, at) for device in devices for at in range(start, end))
        idle = sum((brute.idle_of_window(device, start, end) for device in devices), Counter())
        assert row["busy_s"] == pytest.approx(busy * 1e-6, abs=1e-13)
        assert without_zeros(row["idle_s"]) == seconds(idle)
        assert sum(row["idle_s"].values()) == pytest.approx(row["exposed_overhead_s"], abs=1e-13)
        assert row["exposed_overhead_s"] == pytest.approx(len(devices) * row["wall_s"] - row["busy_s"], abs=1e-13)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_queue_depth(seed: int) -> None:
    line = timeline(seed, with_marks=False)
    brute, found = BruteForce(line), entry_of(line)["queue_depth"]
    if not any(work.kernel and brute.call(work) for work in line.work):
        assert found is None
        return
    first, last = min(work.start for work in line.work), max(work.end for work in line.work)
    if first == last:
        assert found is None
        return
    depths = [brute.depth(at) for at in range(first, last)]
    assert found["max"] == max(depths)
    assert found["mean"] == pytest.approx(sum(depths) / len(depths))
    assert found["empty_fraction"] == pytest.approx(depths.count(0) / len(depths))
    assert sum(found["series"]) / len(found["series"]) == pytest.approx(found["mean"], abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(min_value=200, max_value=4000))
def test_blocks_of_any_size_give_the_same_trace(seed: int, block: int) -> None:
    from joulemark.trace.chrome import read_trace

    line = timeline(seed, with_marks=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps({"traceEvents": line.events(), "deviceProperties": [{"id": 0}, {"id": 1}]}))
        whole, blocks = read_trace(path), read_trace(path, block)
    assert blocks.events == whole.events == len(line.events())
    for mine, theirs in ((blocks.device, whole.device), (blocks.ranges, whole.ranges), (blocks.calls, whole.calls)):
        shift = (mine.start[:1] - theirs.start[:1]).sum()  # the origin is near the first block's events
        assert (mine.start - shift).tolist() == theirs.start.tolist()
        assert (mine.end - shift).tolist() == theirs.end.tolist()
    assert blocks.header == whole.header
    assert blocks.damage.cut is None
