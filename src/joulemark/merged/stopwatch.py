"""Times of candidates on the device and as called: in turns, so that clocks and neighbours act on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

Call = Callable[[], object]
Timed = Callable[[int], float]
"""A number of calls, back to back → the seconds that they take together."""

_ROUNDS = 7
_ROUND_S = 2e-3
"""Each turn of a candidate lasts about this long, several calls where one is shorter."""
_LONG_S = 1e-3
"""A call that takes longer hides its launches by itself."""
_MOST_CALLS = 64
_TURN_S = 3e-3
"""Of calls on the host's clock: its hiccups are short beside it."""
_MOST_OF_A_TURN = 256
_LOOKS = 3
"""At a short candidate in its first turn."""
_LONG_CALL_S = 0.05
"""What takes longer has no further look: a hiccup is little beside it."""
_HOPEFUL = 1.3
"""What takes longer than the fastest by this factor in its first turn has no further one."""
_TURNS = (3, 15)
"""Fewest and most after the first."""
_RACE_S = 0.4
"""Of a candidate in these, unless the fewest take longer."""
_SPIN_CYCLES = (1 << 16, 1 << 25)
"""Of the device while the host enqueues, at first and at most: 33 µs to 17 ms at 1.98 GHz."""


def race(calls: Mapping[str, Call], device: torch.device, rounds: int = _ROUNDS) -> dict[str, float]:
    """Median seconds per call of each candidate, warmed up and measured in turns.

    On a GPU each turn is a replay of a CUDA graph of several calls between two events, so the host's launches do not
    count; what cannot be captured is timed launch by launch.

    Args:
        calls: by name; they work on the current device and stream.
        device: where they do.
        rounds: turns of each.
    """
    if not calls:
        return {}
    turns = {name: _turn(call, device) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (turn, count) in turns.items():
            times[name].append(turn() / count)
    return {name: median(values) for name, values in times.items()}


def _turn(call: Call, device: torch.device) -> tuple[Callable[[], float], int]:
    """Something that runs a number of calls and returns the seconds that they took, and that number."""
    if device.type != "cuda":
        several, count = _several(call, _host_seconds(call))
        return lambda: _host_seconds(several), count
    with torch.cuda.device(device):
        call()
        seconds = device_seconds(call)
        several, count = _several(call, seconds)
        run = captured(several) if seconds < _LONG_S else several
        device_seconds(run)
    return lambda: device_seconds(run), count


def _several(call: Call, seconds: float) -> tuple[Call, int]:
    """Calls for a turn, and how many; no output outlives the next call."""
    count = max(1, min(_MOST_CALLS, round(_ROUND_S / max(seconds, 1e-7))))

    def run() -> None:
        for _ in range(count):
            call()

    return run, count


def _host_seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def device_seconds(call: Call) -> float:
    """Seconds between two events around a call on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def captured(call: Call) -> Call:
    """The replay of a call captured into a CUDA graph; the call itself where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # Not torch.cuda.graph: it empties the allocator's cache each time, which costs more than what is timed here.
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    replay: Call = graph.replay
    return replay


def race_calls(calls: Mapping[str, Call], device: torch.device) -> dict[str, float]:
    """Seconds per call of each candidate on the host's clock, called back to back as a user's loop calls it.

    Args:
        calls: by name; each was called once before.
        device: on which they work; it is idle before a turn and after it.
    """

    def seconds(call: Call, count: int) -> float:
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _synchronize(device)
        return time.perf_counter() - begin

    return in_turns({name: partial(seconds, call) for name, call in calls.items()}, _TURN_S)


def race_replays(replays: Mapping[str, Call], device: torch.device) -> dict[str, float]:
    """Seconds per replay of each candidate on the device, back to back.

    Args:
        replays: by name; each enqueues a CUDA graph on the current stream.
        device: on which they work.
    """
    clock = _DeviceClock(device)
    return in_turns({name: partial(clock.seconds, replay) for name, replay in replays.items()}, _ROUND_S)


def in_turns(timed: Mapping[str, Timed], turn_s: float) -> dict[str, float]:
    """Median seconds per call of each candidate that may be the fastest, of the others the least that was seen.

    What disturbs a turn makes it longer, never shorter: so a candidate leaves by the least of several looks in its
    first turn, and who stays is told by the median of further turns.

    Args:
        timed: by name.
        turn_s: a turn lasts about this long, several calls where one is shorter.
    """
    once = {name: min(seconds(1), seconds(1)) for name, seconds in timed.items()}
    first, looked = dict(once), [name for name in timed if once[name] < _LONG_CALL_S]
    for _ in range(_LOOKS):
        for name in looked:
            count = _count(once[name], turn_s)
            first[name] = min(first[name], timed[name](count) / count)
    limit = _HOPEFUL * min(first.values(), default=0.0)
    found: dict[str, float] = {}
    # Who has left comes back where the others were not as fast again as they seemed.
    while names := [name for name, seconds in first.items() if name not in found and seconds <= limit]:
        found |= _medians({name: timed[name] for name in names}, first, turn_s)
        limit = min(found.values())
    return first | found


def _medians(timed: Mapping[str, Timed], known: Mapping[str, float], turn_s: float) -> dict[str, float]:
    """Median seconds per call over turns, the fewer of them the longer a call."""
    fewest, most = _TURNS
    best = min(known[name] for name in timed)
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(max(fewest, min(most, round(_RACE_S / max(turn_s, best))))):
        for name, found in times.items():
            count = _count(known[name], turn_s)
            found.append(timed[name](count) / count)
    return {name: median(found) for name, found in times.items()}


def _count(seconds: float, turn_s: float) -> int:
    return max(1, min(_MOST_OF_A_TURN, round(turn_s / max(seconds, 1e-7))))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _DeviceClock:
    """Times replays that the host enqueues, all of them, while the device spins: it never waits for the host.

    A graph of a few kernels takes the device no longer than its launch takes the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cycles = device, _SPIN_CYCLES[0]

    def seconds(self, replay: Call, count: int) -> float:
        """Seconds on the device of replays back to back; it spins longer, and they are repeated, where it had begun."""
        with torch.cuda.device(self.device):
            while True:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(self.cycles)
                begin.record()
                for _ in range(count):
                    replay()
                end.record()
                ahead = not begin.query()
                end.synchronize()
                if ahead or self.cycles >= _SPIN_CYCLES[1]:
                    return float(begin.elapsed_time(end)) * 1e-3
                self.cycles *= 2
