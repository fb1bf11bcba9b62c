"""Where the iterations of a trace begin and end: from marks, or from the period of what was launched."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulemark.trace.events import ANNOTATION, OPERATOR, Codes, Ints, Trace
from joulemark.trace.launch import Matching

OWN_MARK = "joulemark.iteration"
"""Name of the range that marks an iteration; ``joulemark.iteration#3`` names it."""

_MARKS = ((re.compile(r"joulemark\.iteration\b"), "marks"), (re.compile(r"ProfilerStep\s*#?\s*\d+"), "ProfilerStep"))

_SHORTEST_PERIOD = 4
_LONGEST_SEQUENCE = 1 << 18
_SEED = 0


@dataclass(frozen=True)
class Iterations:
    """Windows of the iterations; one row per iteration, in order of time (ps).

    The window of an iteration begins when the host has begun it *and* the device has finished all work that was
    launched before, and ends when the host has ended it *and* the device has finished its work. Where the device
    keeps up with the host these are the marks; where the host runs ahead, the windows follow the device.

    Args:
        names: of the marks.
        mark_start, mark_end: on the host.
        start, end: of the window.
        source: ``marks``, ``ProfilerStep`` or ``period``; empty for none.
        note: what a reader must know about them.
        of_event: per device event the number of the iteration that launched it, -1 for none.
    """

    names: list[str]
    mark_start: Ints
    mark_end: Ints
    start: Ints
    end: Ints
    source: str
    note: str
    of_event: Codes

    def __len__(self) -> int:
        return int(self.start.size)


@dataclass(frozen=True)
class _Marks:
    names: list[str]
    start: Ints
    end: Ints
    source: str
    note: str = ""


def _marks(trace: Trace) -> _Marks | None:
    """The ranges that mark iterations, our own before torch.profiler's."""
    ranges = trace.ranges
    for pattern, source in _MARKS:
        codes = [code for code, name in enumerate(trace.names) if pattern.match(name)]
        rows = np.flatnonzero(np.isin(ranges.name, codes) & np.isin(ranges.kind, (ANNOTATION, OPERATOR)))
        if not rows.size:
            continue
        lanes, counts = np.unique(ranges.lane[rows], return_counts=True)
        rows = rows[ranges.lane[rows] == lanes[np.argmax(counts)]]
        start, end = ranges.start[rows], ranges.end[rows]
        apart = np.concatenate([[True], start[1:] >= np.maximum.accumulate(end)[:-1]])
        rows, start, end = rows[apart], start[apart], end[apart]
        names = [trace.name(code) for code in ranges.name[rows]]
        return _recorded(trace, _Marks(names, start, end, source))
    return None


def _recorded(trace: Trace, marks: _Marks) -> _Marks:
    """Marks cut to what the profiler recorded: a step may begin before or end behind the recording."""
    if not trace.spans:
        return marks
    first, last = min(lo for lo, _ in trace.spans), max(hi for _, hi in trace.spans)
    start, end = np.maximum(marks.start, first), np.minimum(marks.end, last)
    keep = end > start
    cut = int(((start > marks.start) | (end < marks.end)).sum())
    note = f"{cut} of {len(marks.names)} marks reach beyond the recording and are cut to it" if cut else ""
    names = [name for name, kept in zip(marks.names, keep, strict=True) if kept]
    return _Marks(names, start[keep], end[keep], marks.source, note)


def period(sequence: npt.NDArray[np.int64]) -> int | None:
    """The number of entries after which a sequence repeats, None when it does not.

    Candidates are the peaks of the autocorrelation of random signs, one per symbol and averaged over several
    draws; each is then checked symbol by symbol. At least 90 % of the symbols must agree, and of periods that
    agree about equally well (within 1 %) the shortest counts. Fewer than four entries are no iteration.
    """
    n = sequence.size
    if n < 2 * _SHORTEST_PERIOD:
        return None
    _, symbols = np.unique(sequence, return_inverse=True)
    rng = np.random.default_rng(_SEED)
    size = 1 << (2 * n - 1).bit_length()
    correlation = np.zeros(n)
    for _ in range(8):
        signs = rng.choice((-1.0, 1.0), symbols.max() + 1)[symbols]
        spectrum = np.fft.rfft(signs, size)
        correlation += np.fft.irfft(spectrum * spectrum.conj(), size)[:n]
    lags = np.arange(1, n // 2 + 1)
    score = correlation[lags] / (n - lags)
    candidates = lags[np.argsort(score)[::-1][:64]]
    agreement = {int(lag): float(np.mean(symbols[lag:] == symbols[:-lag])) for lag in candidates}
    best = max(agreement.values())
    shortest = min(lag for lag, share in agreement.items() if share >= best - 0.01)
    return shortest if best >= 0.9 and shortest >= _SHORTEST_PERIOD else None


def _phase(starts: Ints, allowed: npt.NDArray[np.bool_], length: int) -> int:
    """Offset of the first iteration: where the pause before an iteration is longest.

    Counting back from the end of the trace is right when nothing runs after the last iteration; it is
    overruled only by a pause twice as long.
    """
    n = starts.size
    pause = np.concatenate([[0], np.diff(starts)])
    typical = np.zeros(length)
    for phase in range(length):
        here = np.arange(phase, n, length)
        typical[phase] = np.median(pause[here[here > 0]]) if allowed[here].all() and (here > 0).any() else -1.0
    from_end = n % length
    best = int(np.argmax(typical))
    return from_end if typical[from_end] >= 0 and typical[best] <= 2 * typical[from_end] else best


def _from_period(trace: Trace, matching: Matching) -> _Marks | None:
    """Iterations from the period of the launched work."""
    device = trace.device
    known = matching.call >= 0
    rows = np.flatnonzero(known) if known.any() else np.arange(len(device))
    if not rows.size:
        return None
    issued = trace.calls.start[matching.call[rows]] if known.any() else device.start[rows]
    rows = rows[np.lexsort((device.start[rows], issued))][-_LONGEST_SEQUENCE:]
    issued = np.sort(issued)[-_LONGEST_SEQUENCE:]
    length = period(device.name[rows].astype(np.int64))
    if length is None:
        return None
    call = matching.call[rows]
    begins_call = np.concatenate([[True], (call[1:] != call[:-1]) | (call[1:] < 0)])
    first = np.arange(_phase(issued, begins_call, length), rows.size - length + 1, length)
    start = _outermost_start(trace, matching, rows[first], issued[first])
    last = rows[first[-1] : first[-1] + length]
    ends = [int(device.end[last].max())]
    if known.any():
        ends.append(int(trace.calls.end[matching.call[last]].max()))
    end = np.append(start[1:], max(ends))
    names = [f"period {number}" for number in range(first.size)]
    left_out = rows.size - first.size * length
    note = f"no marks; the launched work repeats every {length} device events" + (
        f", {left_out} device events stand outside whole periods" if left_out else ""
    )
    return _Marks(names, start, end, "period", note)


def _outermost_start(trace: Trace, matching: Matching, events: npt.NDArray[np.intp], issued: Ints) -> Ints:
    """Where the outermost operator around the launch of each event begins; the launch itself outside operators."""
    ranges, start = trace.ranges, issued.copy()
    if matching.call[events[0]] < 0:
        return start
    for lane in np.unique(trace.calls.lane[matching.call[events]]):
        rows = np.flatnonzero((ranges.kind == OPERATOR) & (ranges.lane == lane))
        if not rows.size:
            continue
        outer = rows[np.concatenate([[True], ranges.start[rows][1:] >= np.maximum.accumulate(ranges.end[rows])[:-1]])]
        here = trace.calls.lane[matching.call[events]] == lane
        index = np.searchsorted(ranges.start[outer], issued, "right") - 1
        around = outer[np.maximum(index, 0)]
        inside = here & (index >= 0) & (ranges.end[around] > issued)
        start[inside] = ranges.start[around[inside]]
    return np.maximum.accumulate(start)


def find_iterations(trace: Trace, matching: Matching) -> Iterations:
    """Iterations of a trace, see :class:`Iterations`; none is no error, the note says so."""
    marks = _marks(trace) or _from_period(trace, matching)
    device = trace.device
    if marks is None or not marks.start.size:
        empty = np.empty(0, np.int64)
        note = "no ProfilerStep or joulemark.iteration marks, and the launched work does not repeat"
        return Iterations([], empty, empty, empty, empty, "", note, np.full(len(device), -1, np.int32))
    known = matching.call >= 0
    issued = device.start.copy()
    issued[known] = trace.calls.start[matching.call[known]]
    number = np.searchsorted(marks.start, issued, "right") - 1
    inside = (number >= 0) & (issued < marks.end[np.maximum(number, 0)])
    never = np.iinfo(np.int64).min
    earlier = np.full(marks.start.size + 1, never)
    np.maximum.at(earlier, number[known] + 1, device.end[known])
    earlier = np.maximum.accumulate(earlier)[:-1]
    own = np.full(marks.start.size, never)
    np.maximum.at(own, number[known & inside], device.end[known & inside])
    start = np.maximum(marks.start, earlier)
    end = np.maximum.reduce([start, marks.end, own])
    of_event = np.where(inside, number, -1).astype(np.int32)
    return Iterations(marks.names, marks.start, marks.end, start, end, marks.source, marks.note, of_event)
