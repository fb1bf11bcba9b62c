"""Two clocks for a step: the host's, fenced by the device, and the device's own (CUDA events)."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from joulemark.errors import Unsupported

Run = Callable[[], object]
Stop = Callable[[Sequence[float]], str | None]
"""Sees the samples so far; says why to stop, or None to go on."""

_SIDE_STREAM_TAIL_S = 50e-6
"""A device that is still busy this long after the current stream ended works on another stream."""

_BURST = 3
"""Steps of a burst that are timed, at most."""
_QUEUE = 1000
"""Launches that wait on a stream before the next one makes the host wait: some 1,024."""
_FASTEST_LAUNCH_S = 4e-6
"""No step was issued faster than this per launch: 4.3 µs for the one of LeNet-5's graph, 13.6 µs on average for the 282
of ResNet-50 [H200, ``results/nvidia-h200/sweep-20261129T190033Z-c4e7f3.jsonl``: ``host_issue_unprofiled_s`` over
``launches_per_step``]. How many launches a step has is not known where it is timed: by this, at most so many."""
_MOMENT_S = 100e-6
"""In which a device that keeps up with its host ends the last kernels of a step; caches stay warm meanwhile."""
REFERENCE_LAUNCHES = 32
"""Launches by which the host's speed is known: some 0.2 ms of Python, torch and driver."""


@dataclass(frozen=True)
class LoneSamples:
    """Samples of lone steps: each begins and ends on a synchronized device.

    Args:
        host_s: from the call to the synchronized device, per iteration.
        device_s: between CUDA events around the step, per iteration; empty without a device clock.
        side_streams: work outside the current stream was seen; ``device_s`` then ends at the device-wide fence.
        start, end: first and last edge on ``time.perf_counter``.
        stopped: why the loop ended.
        issue_s: from the call until it returns, per iteration; empty where a call that returns has done its work.
    """

    host_s: list[float]
    device_s: list[float]
    side_streams: bool
    start: float
    end: float
    stopped: str
    issue_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SteadySamples:
    """Step times of an unbroken run of steps.

    Args:
        step_s: per step, on the clock of the timer's tier.
        start, end: on ``time.perf_counter``.
        stopped: why the loop ended.
    """

    step_s: list[float]
    start: float
    end: float
    stopped: str


@dataclass(frozen=True)
class IssueSamples:
    """What the host needs to issue steps, and how fast the host was just then.

    Args:
        step_s: from the call of a step until it returns; empty where a call that returns has done its work.
        reference_s: per step, the time in which the host issued :data:`REFERENCE_LAUNCHES` additions of one element,
            mean of before and after the burst that the step was in.
    """

    step_s: list[float]
    reference_s: list[float]


class Timer(Protocol):
    """How one kind of device is fenced and timed."""

    tier: str
    device: str
    side_streams: bool
    """Whether :meth:`lone` has last seen work outside the current stream."""

    def synchronize(self) -> None:
        """Wait for all work on all streams of the device."""
        ...

    def lone(self, run: Run, setup: Run | None, stop: Stop, iterations: int = 1) -> LoneSamples: ...

    def steady(self, run: Run, stop: Stop, step_s: float) -> SteadySamples: ...

    def issue(self, run: Run, stop: Stop) -> IssueSamples: ...

    def burst(self, run: Run, warm_s: float = 0.0) -> list[float]: ...

    def sustain(self, run: Run, seconds: float, step_s: float, steps: int | None = None) -> list[tuple[float, int]]: ...

    def flush_l2(self) -> Run | None: ...

    def capture(self, run: Run) -> Run: ...


class HostTimer:
    """Timer of work that is done when the call returns."""

    tier = "host_clock"
    device = "cpu"
    side_streams = False

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def lone(self, run: Run, setup: Run | None, stop: Stop, iterations: int = 1) -> LoneSamples:
        """Time rounds of ``iterations`` calls until ``stop`` says why to end."""
        clock = time.perf_counter
        samples: list[float] = []
        reason, start = None, clock()
        while reason is None:
            if setup is not None:
                setup()
            begin = clock()
            for _ in range(iterations):
                run()
            samples.append((clock() - begin) / iterations)
            reason = stop(samples)
        return LoneSamples(samples, [], False, start, clock(), reason)

    def steady(self, run: Run, stop: Stop, step_s: float) -> SteadySamples:
        """On a host, steps back to back are lone steps."""
        lone = self.lone(run, None, stop)
        return SteadySamples(lone.host_s, lone.start, lone.end, lone.stopped)

    def issue(self, run: Run, stop: Stop) -> IssueSamples:
        """Nothing is issued on a host: a call that returns has done its work."""
        return IssueSamples([], [])

    def burst(self, run: Run, warm_s: float = 0.0) -> list[float]:
        """The same of a single burst."""
        return []

    def sustain(self, run: Run, seconds: float, step_s: float, steps: int | None = None) -> list[tuple[float, int]]:
        """Repeat the step for ``seconds``, or exactly ``steps`` times; (time, steps done) after each of them."""
        del step_s
        clock = time.perf_counter
        begin = clock()
        progress = [(begin, 0)]
        while progress[-1][0] - begin < seconds if steps is None else progress[-1][1] < steps:
            run()
            progress.append((clock(), progress[-1][1] + 1))
        return progress

    def flush_l2(self) -> Run | None:
        """A host's caches are not flushed."""
        return None

    def capture(self, run: Run) -> Run:
        """A host has no CUDA graphs.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("a CUDA graph needs a CUDA device", "choose another mode")


class CudaTimer:
    """Timer of asynchronous work on one CUDA device, by torch.

    Args:
        device: torch's name of the device.
    """

    tier = "cuda_events"
    _chunk_s = 0.025

    def __init__(self, device: str = "cuda:0") -> None:
        import torch

        self._torch: Any = torch
        self.device = device
        self.side_streams = False
        self.pool: Any = None
        """Of memory that graphs captured from now on share; None gives each its own."""
        torch.cuda.set_device(device)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self._torch.cuda.synchronize()

    def _events(self, count: int) -> list[Any]:
        """CUDA events that exist on the device already: torch creates them when they are first recorded."""
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in events:
            event.record()
        return events

    def _fence_s(self) -> float:
        """What a fence of the idle device costs, in s."""
        costs = []
        for _ in range(5):
            begin = time.perf_counter()
            self.synchronize()
            costs.append(time.perf_counter() - begin)
        return median(costs)

    def lone(self, run: Run, setup: Run | None, stop: Stop, iterations: int = 1) -> LoneSamples:
        """Time lone rounds, each between two device-wide fences."""
        clock, fence = time.perf_counter, self.synchronize
        opened, closed, fenced = self._events(3)
        host: list[float] = []
        issue: list[float] = []
        near: list[float] = []
        far: list[float] = []
        tails: list[float] = []
        fence()
        idle_fence = self._fence_s()
        reason, first = None, clock()
        while reason is None:
            if setup is not None:
                setup()
            fence()
            begin = clock()
            opened.record()
            called = clock()
            for _ in range(iterations):
                run()
            issue.append((clock() - called) / iterations)
            closed.record()
            closed.synchronize()
            stream_end = clock()
            fence()
            end = clock()
            fenced.record()
            fenced.synchronize()
            host.append((end - begin) / iterations)
            near.append(opened.elapsed_time(closed) * 1e-3 / iterations)
            far.append(opened.elapsed_time(fenced) * 1e-3 / iterations)
            tails.append(end - stream_end)
            reason = stop(host)
        self.side_streams = median(tails) > max(_SIDE_STREAM_TAIL_S, 4 * idle_fence, 0.05 * median(host) * iterations)
        device = far if self.side_streams else near
        return LoneSamples(host, device, self.side_streams, first, clock(), reason, issue)

    def steady(self, run: Run, stop: Stop, step_s: float) -> SteadySamples:
        """Time steps issued back to back: CUDA events between them, the queue never drained on purpose.

        The host may run ahead by two chunks of about 25 ms, as it does in a real loop.

        Args:
            run: the step.
            stop: sees the samples of the chunks that are complete.
            step_s: about the time of a step, in s.
        """
        chunk = max(1, min(256, round(self._chunk_s / max(step_s, 1e-6))))
        ring = self._events(3 * chunk + 1)
        size = len(ring)
        self.synchronize()
        run()
        ring[0].record()
        issued = 0
        samples: list[float] = []
        reason, start = None, time.perf_counter()
        while reason is None:
            for _ in range(chunk):
                run()
                issued += 1
                ring[issued % size].record()
            # The chunk before this one: the device still has work while its times are read.
            ready = issued - chunk
            ring[ready % size].synchronize()
            samples += _times_between(ring, len(samples), ready)
            reason = stop(samples) if samples else None
        self.synchronize()
        samples += _times_between(ring, len(samples), issued)
        return SteadySamples(samples, start, time.perf_counter(), reason)

    def issue(self, run: Run, stop: Stop) -> IssueSamples:
        """Host time of steps issued back to back into a queue that is not full, in s.

        Bursts (:meth:`burst`) follow each other. A host may change its speed from one second to the next (by 1.6 times
        on a virtual machine), so the issue of fixed work is timed beside each of them.
        """
        samples: list[float] = []
        references: list[float] = []
        reason, before = None, self._host_reference()
        while reason is None:
            burst = self.burst(run)
            after = self._host_reference()
            samples += burst
            references += [(before + after) / 2] * len(burst)
            reason, before = stop(samples), after
        return IssueSamples(samples, references)

    def burst(self, run: Run, warm_s: float = 0.0) -> list[float]:
        """Host time of a few steps that are issued back to back into a queue that was empty, in s.

        Of those that come first, after a wait, nothing is kept: caches are cold behind it. A launch waits once about a
        thousand are queued, and a burst that fills the queue measures the device. So no step is issued that could:
        where the device lags behind, the steps that it has not done and one more must be issued in less time than it
        takes to issue so many launches (:data:`_FASTEST_LAUNCH_S`). One step is timed in any case: one with more than
        half of the queue's launches, behind the first one, is partly waited for where the device is much slower.

        Args:
            run: the step.
            warm_s: time for which steps are issued before one is timed, as far as the queue allows; one step at least.

        Returns:
            the times of one to :data:`_BURST` steps.
        """
        clock = time.perf_counter
        queue = _Ahead(run, self._torch.cuda.Event)
        self.synchronize()
        begin = clock()
        took = queue.issue()
        while clock() - begin < warm_s and queue.has_room(2 * took):  # it and the first that is timed
            took = queue.issue()
        samples = [queue.issue()]
        while len(samples) < _BURST and queue.has_room(samples[-1]):
            samples.append(queue.issue())
        return samples

    def _host_reference(self) -> float:
        """Host time of issuing :data:`REFERENCE_LAUNCHES` additions into an empty queue, in s; fenced on both sides.

        As many come first untimed: the fence before them may have waited for long steps, and caches are cold behind it.
        """
        clock = time.perf_counter
        element = self._torch.zeros(1, device=self.device)
        self.synchronize()
        for _ in range(REFERENCE_LAUNCHES):
            element.add_(1.0)
        begin = clock()
        for _ in range(REFERENCE_LAUNCHES):
            element.add_(1.0)
        took = clock() - begin
        self.synchronize()
        return took

    def sustain(self, run: Run, seconds: float, step_s: float, steps: int | None = None) -> list[tuple[float, int]]:
        """Keep the device busy for ``seconds``; (host time, steps done) as chunks complete.

        Where ranks must do the same number of steps, ``steps`` of them are issued instead, rounded up to whole chunks.

        Where :meth:`lone` has seen work on other streams, each chunk ends at a device-wide fence: an event of the
        current stream would not hold the host back.
        """
        clock = time.perf_counter
        chunk = max(1, round(self._chunk_s / max(step_s, 1e-6)))
        ring = self._events(3)
        self.synchronize()
        begin = clock()
        progress = [(begin, 0)]
        pending: list[int] = []
        issued = 0
        while clock() - begin < seconds if steps is None else issued < steps:
            for _ in range(chunk):
                run()
            issued += chunk
            ring[issued // chunk % 3].record()
            pending.append(issued)
            if self.side_streams:
                self.synchronize()
            if len(pending) > 2 or self.side_streams:
                count = pending.pop(0)
                ring[count // chunk % 3].synchronize()
                progress.append((clock(), count))
        for count in pending:
            ring[count // chunk % 3].synchronize()
            progress.append((clock(), count))
        self.synchronize()
        return progress

    def flush_l2(self) -> Run | None:
        """A function that overwrites the L2 cache twice over, or None where its size is unknown."""
        size = int(getattr(self._torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 0)
        if size == 0:
            return None
        scratch = self._torch.empty(2 * size, dtype=self._torch.uint8, device=self.device)

        def flush() -> None:
            scratch.bitwise_not_()

        return flush

    def capture(self, run: Run) -> Run:
        """Capture one step into a CUDA graph and return its replay.

        Raises:
            Unsupported: the step cannot be captured; the reason is CUDA's own.
        """
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        self.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                run()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise Unsupported(f"the step cannot be captured into a CUDA graph ({first_line(error)})") from error
        replay: Run = graph.replay
        return replay


class _Ahead:
    """How far a host that issues steps is ahead of the device: what steps that are not done yet took to issue.

    Args:
        run: the step.
        event: makes a CUDA event.
    """

    def __init__(self, run: Run, event: Callable[[], Any]) -> None:
        self._run, self._event = run, event
        self._pending: deque[tuple[Any, float]] = deque()

    def issue(self) -> float:
        """Issue a step; the host time that it took, in s."""
        clock = time.perf_counter
        called = clock()
        self._run()
        took = clock() - called
        end = self._event()
        end.record()
        self._pending.append((end, took))
        return took

    def has_room(self, step_s: float) -> bool:
        """Whether steps that take so long to issue cannot fill the queue, whatever their launches, or it is empty.

        A device that keeps up ends a step a moment after the host has issued it: that is waited for, and no longer.
        """
        clock = time.perf_counter
        called = clock()
        while not (room := self._fits(step_s)) and clock() - called < _MOMENT_S:
            pass
        return room

    def _fits(self, step_s: float) -> bool:
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()
        ahead_s = sum(took for _, took in self._pending)
        return not self._pending or ahead_s + step_s <= _QUEUE * _FASTEST_LAUNCH_S


def _times_between(ring: Sequence[Any], done: int, ready: int) -> list[float]:
    """Times of steps ``done`` … ``ready`` in s, from the events that follow each of them."""
    size = len(ring)
    return [ring[one % size].elapsed_time(ring[(one + 1) % size]) * 1e-3 for one in range(done, ready)]


def timer_for(device: str) -> Timer:
    """The timer of a torch device name."""
    return CudaTimer(device) if device.startswith("cuda") else HostTimer()


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that device or host memory ran out.

    Known by type where torch is loaded, otherwise by class name: a framework that is not loaded cannot have raised it.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        name = type(current).__name__
        if isinstance(current, MemoryError) or "OutOfMemory" in name:
            return True
        text = str(current)
        if isinstance(current, RuntimeError) and (
            "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text or "can't allocate memory" in text
        ):
            return True
        current = current.__cause__ or current.__context__
    return False


_POISON = (
    "illegal memory access",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "an illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable ECC",
    "CUDA_ERROR_ILLEGAL",
    "cudaErrorAssert",
)


def is_poisoned(error: BaseException) -> bool:
    """Whether a CUDA error left the context of this process unusable (a sticky error of the CUDA runtime)."""
    text = str(error)
    if any(sign in text for sign in _POISON):
        return True
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
