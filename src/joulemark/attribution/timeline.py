"""Which kernel ran when, in which window, step and place of the step, from the traces of a recording.

Steps are told apart by marks on the device: a short kernel that spins before each of them and behind the last, as
beacons are long ones. So the profiler need not record the host's operators, which costs a step that the host can
hardly keep up with more than all else. In which operator and module a kernel was launched, another trace tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from joulemark.attribution.clock import Beacons, Floats
from joulemark.attribution.recording import RecordedWindow, Recording
from joulemark.errors import UnreadableInput
from joulemark.records import Finding
from joulemark.trace.chrome import MODULE_PREFIX, read_trace
from joulemark.trace.completeness import findings
from joulemark.trace.events import ANNOTATION, PS_PER_S, Trace
from joulemark.trace.iterations import find_iterations
from joulemark.trace.launch import OWNER_NAMES, Matching, match

WINDOW = "joulemark.window"
"""Name of the range around each window, with its number behind a ``#``."""
BEACON = "spin_kernel"
"""In the name of the kernel that spins (``torch.cuda._sleep``)."""
LONGEST_MARK_S = 20e-6
"""A kernel that spins longer is a beacon; a shorter one marks a step."""

_WINDOW = re.compile(rf"{re.escape(WINDOW)}#(\d+)$")
_BEHIND_BEACON_S = 1e-6
_OUTSIDE_MODULES = "outside any module's forward"
Codes = npt.NDArray[np.int64]
Labels = npt.NDArray[np.object_]


@dataclass(frozen=True)
class Launches:
    """Kernels, copies and sets of the marked steps; arrays of one length, by start.

    Args:
        start_s, end_s: on the trace's clock.
        name: index into the timeline's ``names``.
        step: number of the step, over all windows.
        place: index into the timeline's ``places``.
    """

    start_s: Floats
    end_s: Floats
    name: Codes
    step: Codes
    place: Codes

    def __len__(self) -> int:
        return int(self.start_s.size)

    @property
    def length_s(self) -> Floats:
        """Shape [n]."""
        return self.end_s - self.start_s

    def working(self, ends_s: tuple[float, float]) -> Launches:
        """When they worked: without times in s at begin and end, each at the most a quarter of the launch."""
        head, tail = (np.minimum(end, self.length_s / 4) for end in ends_s)
        return replace(self, start_s=self.start_s + head, end_s=self.end_s - tail)

    def take(self, rows: npt.NDArray[np.bool_]) -> Launches:
        """The rows of a mask."""
        return Launches(self.start_s[rows], self.end_s[rows], self.name[rows], self.step[rows], self.place[rows])


@dataclass(frozen=True)
class Timeline:
    """What a recording's trace tells.

    Args:
        names: of kernels, copies and sets.
        places: (index of the name, which of that name in the step) of every place of a step.
        launches: of all windows.
        window_of_step: number of the window of each step.
        beacons: window → its beacons; a window without any is missing.
        references: name of a reference → (begin, end) of its kernels, in s, on the trace's clock.
        operator: per place the operator that launched it most often; empty where no trace tells.
        module: per place the module in whose forward it was launched; empty where no trace tells.
        findings: what is wrong with the traces.
        refused: number of a window → why its trace cannot be used.
    """

    names: list[str]
    places: list[tuple[int, int]]
    launches: Launches
    window_of_step: Codes
    beacons: Mapping[int, Beacons]
    operator: list[str]
    module: list[str]
    findings: tuple[Finding, ...]
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many are marked."""
        return len(self.window_of_step)

    def of_window(self, number: int) -> Launches:
        """The launches of one window's steps."""
        return self.launches.take(self.window_of_step[self.launches.step] == number)

    def place_name(self, place: int) -> str:
        """Name of the kernel at a place."""
        return self.names[self.places[place][0]]


def read_timeline(folder: Path, recording: Recording) -> Timeline:
    """The timeline of a recording, without windows whose trace cannot be used.

    Args:
        folder: of its files.
        recording: what was recorded.

    Raises:
        UnreadableInput: no trace can be read, or none holds a marked step with kernels.
    """
    parts, refused = [], {}
    errors: list[UnreadableInput] = []
    for name, windows in _windows_by_trace(recording).items():
        try:
            parts.append(_read(folder / name, windows))
        except UnreadableInput as error:
            errors.append(error)
            refused.update({one.number: error.what for one in windows})
    if not parts:
        raise errors[0] if errors else UnreadableInput(f"{folder} holds no window of steps", "record again")
    return replace(_joined(parts), refused=refused)


def _windows_by_trace(recording: Recording) -> dict[str, list[RecordedWindow]]:
    """Name of a trace → the windows of steps that it holds."""
    found: dict[str, list[RecordedWindow]] = {}
    for one in recording.of_role("steps"):
        found.setdefault(one.trace, []).append(one)
    return found


@dataclass(frozen=True)
class _Part:
    """What one trace tells: names and steps are numbered as in that trace, places are not known yet.

    Args:
        operator: of each launch; None where the trace holds no operators.
    """

    names: list[str]
    launches: Launches
    window_of_step: Codes
    beacons: Mapping[int, Beacons]
    operator: Labels | None
    findings: list[Finding]


def _read(path: Path, windows: Sequence[RecordedWindow]) -> _Part:
    trace = read_trace(path)
    matching = match(trace)
    part = _with_marks(trace, windows[0]) if windows[0].own_trace else _with_host_marks(trace, matching)
    if not len(part.launches):
        raise UnreadableInput(
            f"{path} holds no kernel of a marked step", "record with joulemark.measure.attribution.record"
        )
    return replace(part, findings=findings(trace, matching))


def _with_host_marks(trace: Trace, matching: Matching) -> _Part:
    """Of a trace in which the host has marked windows and steps."""
    iterations = find_iterations(trace, matching)
    rows = np.flatnonzero(iterations.of_event >= 0)
    launches, windows = _launches(trace, rows, iterations.of_event[rows]), _windows(trace)
    window_of_step = _window_at(windows, iterations.mark_start / PS_PER_S)
    beacons = _beacons(trace, windows, launches)
    return _Part(trace.names, launches, window_of_step, beacons, _operators(trace, matching)[rows], [])


def _with_marks(trace: Trace, window: RecordedWindow) -> _Part:
    """Of one window, in which short kernels that spin mark the steps.

    Where its samples did not fit, the window ran again, and its trace holds both runs: the last one counts.

    Raises:
        UnreadableInput: a mark is missing, or all beacons of an end.
    """
    device = trace.device
    start, end = device.start / PS_PER_S, device.end / PS_PER_S
    spins = np.isin(device.name, [code for code, name in enumerate(trace.names) if BEACON in name])
    lasts_s, longest_s = end - start, window.hold_s / 2 or math.inf  # what spins longer holds the device
    marks = np.flatnonzero(spins & (lasts_s <= LONGEST_MARK_S))[-window.steps - 1 :]
    beacons = np.flatnonzero(spins & (lasts_s > LONGEST_MARK_S) & (lasts_s < longest_s))
    behind = beacons[start[beacons] > start[marks[-1]]] if marks.size else beacons[:0]
    before = beacons[start[beacons] < start[marks[0]]][-len(behind) :] if len(behind) else beacons[:0]
    if marks.size != window.steps + 1 or not len(before) or not len(behind):
        raise UnreadableInput(
            f"{trace.path} shows {marks.size} marks of {window.steps} steps, {len(before)} beacons before and "
            f"{len(behind)} behind them",
            "the profiler has lost records: record again, in a fresh process",
        )
    step = np.searchsorted(start[marks], start, "right") - 1
    rows = np.flatnonzero(~spins & (step >= 0) & (step < window.steps))
    both = np.concatenate([before, behind])
    return _Part(
        names=trace.names,
        launches=_launches(trace, rows, step[rows]),
        window_of_step=np.full(window.steps, window.number, np.int64),
        beacons={window.number: Beacons(start[both], end[both], len(before))},
        operator=None,
        findings=[],
    )


def _launches(trace: Trace, rows: npt.NDArray[np.intp], step: npt.NDArray[np.integer]) -> Launches:
    """Device events of a trace, all of them at place 0."""
    device = trace.device
    return Launches(
        device.start[rows] / PS_PER_S,
        device.end[rows] / PS_PER_S,
        device.name[rows].astype(np.int64),
        step.astype(np.int64),
        np.zeros(len(rows), np.int64),
    )


def _joined(parts: Sequence[_Part]) -> Timeline:
    """One timeline of several traces."""
    codes: dict[str, int] = {}
    launches, first = [], 0
    for part in parts:
        own = np.array([codes.setdefault(name, len(codes)) for name in part.names], np.int64)
        launches.append(replace(part.launches, name=own[part.launches.name], step=part.launches.step + first))
        first += len(part.window_of_step)
    start_s, end_s, name, step = (
        np.concatenate([getattr(one, key) for one in launches]) for key in ("start_s", "end_s", "name", "step")
    )
    places, place = _places(name, step)
    told = [part.operator for part in parts if part.operator is not None]
    whole = len(told) == len(parts)
    return Timeline(
        names=list(codes),
        places=places,
        launches=Launches(start_s, end_s, name, step, place),
        window_of_step=np.concatenate([part.window_of_step for part in parts]),
        beacons={number: one for part in parts for number, one in part.beacons.items()},
        operator=_most_common(place, np.concatenate(told), len(places)) if whole else [],
        module=[],
        findings=(*_first_of_each(one for part in parts for one in part.findings), *_uneven(place, first)),
    )


def _first_of_each(found: Iterable[Finding]) -> list[Finding]:
    """Of findings that say the same of several traces, the first."""
    return list({one.code: one for one in reversed(list(found))}.values())[::-1]


def _uneven(place: Codes, steps: int) -> list[Finding]:
    """Whether some steps lack a kernel that others have."""
    missing = int((np.bincount(place) != steps).sum())
    if not missing:
        return []
    message = f"{missing} kernels do not run in each of the {steps} steps"
    return [Finding("attribution_steps_differ", message, "amounts are means; records may be lost, or steps differ")]


def _places(name: Codes, step: Codes) -> tuple[list[tuple[int, int]], Codes]:
    """Every place of a step (name, which of that name in the step), and the place of each launch."""
    pairs, place = np.unique(np.stack([name, _occurrence(name, step)], axis=1), axis=0, return_inverse=True)
    return [(int(one), int(two)) for one, two in pairs], place.reshape(-1).astype(np.int64)


def _occurrence(name: Codes, step: Codes) -> Codes:
    """Which launch of its name in its step each one is, from 0; rows are in order of time."""
    order = np.lexsort((np.arange(name.size), name, step))
    same = np.concatenate([[False], (np.diff(name[order]) == 0) & (np.diff(step[order]) == 0)])
    position = np.arange(name.size)
    first = np.maximum.accumulate(np.where(same, 0, position))
    nth = np.empty(name.size, np.int64)
    nth[order] = position - first
    return nth


def _windows(trace: Trace) -> dict[int, tuple[float, float]]:
    """Number of a window → its begin and end in s."""
    numbers = {code: found for code, name in enumerate(trace.names) if (found := _WINDOW.match(name))}
    ranges = trace.ranges
    rows = np.flatnonzero(np.isin(ranges.name, list(numbers)) & (ranges.kind == ANNOTATION))
    return {
        int(numbers[int(ranges.name[row])][1]): (ranges.start[row] / PS_PER_S, ranges.end[row] / PS_PER_S)
        for row in rows
    }


def _window_at(windows: Mapping[int, tuple[float, float]], times: Floats) -> Codes:
    """Number of the window that each time lies in, -1 for none."""
    found = np.full(len(times), -1, np.int64)
    for number, (begin, end) in windows.items():
        found[(times >= begin) & (times <= end)] = number
    return found


def _beacons(trace: Trace, windows: Mapping[int, tuple[float, float]], launches: Launches) -> dict[int, Beacons]:
    """The beacons of each window: spinning kernels inside it, before and behind its steps."""
    codes = [code for code, name in enumerate(trace.names) if BEACON in name]
    rows = np.isin(trace.device.name, codes)
    start, end = trace.device.start[rows] / PS_PER_S, trace.device.end[rows] / PS_PER_S
    out = {}
    for number, (begin, until) in windows.items():
        here = (start >= begin - _BEHIND_BEACON_S) & (end <= until + _BEHIND_BEACON_S)
        inside = (launches.start_s >= begin) & (launches.end_s <= until)
        if here.any() and inside.any():
            first = float(launches.start_s[inside].min())
            out[number] = Beacons(start[here], end[here], int((start[here] < first).sum()))
    return out


def _operators(trace: Trace, matching: Matching) -> Labels:
    """Label of the operator that launched each device event."""
    labels = [
        OWNER_NAMES.get(int(owner), "") if owner < 0 else trace.name(int(trace.ranges.name[owner]))
        for owner in matching.owner
    ]
    return np.array(labels, object)


def _modules(trace: Trace, matching: Matching) -> Labels:
    """Label of the module in whose forward call each device event was launched."""
    labels = [
        _OUTSIDE_MODULES if row < 0 else trace.name(int(trace.ranges.name[row])).removeprefix(MODULE_PREFIX)
        for row in matching.module
    ]
    return np.array(labels, object)


def _most_common(place: Codes, labels: Labels, n: int) -> list[str]:
    """Per place the label that its launches bear most often."""
    texts, codes = np.unique(labels.astype(str), return_inverse=True)
    counts = np.zeros((n, len(texts)), np.int64)
    np.add.at(counts, (place, codes.reshape(-1)), 1)
    return [str(texts[row]) for row in counts.argmax(axis=1)]


def with_host(timeline: Timeline, path: Path) -> Timeline:
    """The timeline with the operator and the module in whose forward call each place's kernel was launched.

    Args:
        timeline: of the recording.
        path: trace of some of the same steps, with the host's marks and operators. Without any module's forward call,
            modules stay unknown.

    Raises:
        UnreadableInput: the trace cannot be read, or its steps are not these.
    """
    trace = read_trace(path)
    matching = match(trace)
    of_event = find_iterations(trace, matching).of_event
    rows = np.flatnonzero(of_event >= 0)
    seen = _launches(trace, rows, of_event[rows])
    places, place = _places(seen.name, seen.step)
    number = {(trace.name(name), nth): at for at, (name, nth) in enumerate(places)}
    wanted = [(timeline.names[name], nth) for name, nth in timeline.places]
    if missing := sum(one not in number for one in wanted):
        raise UnreadableInput(f"{missing} of {len(wanted)} kernels of the step are not in {path.name}", "record again")

    def told(labels: Labels) -> list[str]:
        most = _most_common(place, labels[rows], len(places))
        return [most[number[one]] for one in wanted]

    known = bool((matching.module[rows] >= 0).any())
    module = told(_modules(trace, matching)) if known else []
    return replace(timeline, operator=told(_operators(trace, matching)), module=module)
