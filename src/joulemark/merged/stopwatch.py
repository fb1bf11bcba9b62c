"""Times of candidates on the device: calls in turns, so that clocks and neighbours act on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Call = Callable[[], object]

_ROUNDS = 7
_ROUND_S = 2e-3
"""Each turn of a candidate lasts about this long, several calls where one is shorter."""
_LONG_S = 1e-3
"""A call that takes longer hides its launches by itself."""
_MOST_CALLS = 64


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
