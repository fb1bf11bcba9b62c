"""Which kernel ran when, in which window, step and place of the step, from the trace of a recording."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from joulemark.attribution.clock import Beacons, Floats
from joulemark.errors import UnreadableInput
from joulemark.records import Finding
from joulemark.trace.analyse import Analysis, analyse
from joulemark.trace.chrome import MODULE_PREFIX
from joulemark.trace.completeness import findings
from joulemark.trace.events import ANNOTATION, PS_PER_S, Trace
from joulemark.trace.launch import OWNER_NAMES

WINDOW = "joulemark.window"
"""Name of the range around each window, with its number behind a ``#``."""
BEACON = "spin_kernel"
"""In the name of the kernel that spins (``torch.cuda._sleep``)."""

_WINDOW = re.compile(rf"{re.escape(WINDOW)}#(\d+)$")
_BEHIND_BEACON_S = 1e-6
_OUTSIDE_MODULES = "outside any module's forward"
Codes = npt.NDArray[np.int64]


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
        operator: per place the operator that launched it most often.
        module: per place the module in whose forward it was launched; empty where no trace tells.
        findings: what is wrong with the trace.
    """

    names: list[str]
    places: list[tuple[int, int]]
    launches: Launches
    window_of_step: Codes
    beacons: Mapping[int, Beacons]
    operator: list[str]
    module: list[str]
    findings: tuple[Finding, ...]

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


def read_timeline(trace: Path) -> Timeline:
    """The timeline of a recording.

    Args:
        trace: of all windows, with steps and windows marked.

    Raises:
        UnreadableInput: the file cannot be read, or holds no marked step with kernels.
    """
    analysis = analyse(trace)
    found = analysis.trace
    launches, places = _launches(analysis)
    if not len(launches):
        raise UnreadableInput(
            f"{trace} holds no kernel of a marked step", "record with joulemark.measure.attribution.record"
        )
    windows = _windows(found)
    marks = analysis.iterations.mark_start / PS_PER_S
    operator = _most_common(launches.place, _operators(analysis)[_rows(analysis)], len(places))
    return Timeline(
        names=list(found.names),
        places=places,
        launches=launches,
        window_of_step=_window_at(windows, marks),
        beacons=_beacons(found, windows, launches),
        operator=operator,
        module=[],
        findings=tuple(findings(found, analysis.matching)),
    )


def _rows(analysis: Analysis) -> npt.NDArray[np.intp]:
    """Device events of marked steps, without beacons, by start."""
    return np.flatnonzero(analysis.iterations.of_event >= 0)


def _launches(analysis: Analysis) -> tuple[Launches, list[tuple[int, int]]]:
    device, rows = analysis.trace.device, _rows(analysis)
    name, step = device.name[rows].astype(np.int64), analysis.iterations.of_event[rows].astype(np.int64)
    nth = _occurrence(name, step)
    pairs, place = np.unique(np.stack([name, nth], axis=1), axis=0, return_inverse=True)
    launches = Launches(device.start[rows] / PS_PER_S, device.end[rows] / PS_PER_S, name, step, place.reshape(-1))
    return launches, [(int(one), int(two)) for one, two in pairs]


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


def _operators(analysis: Analysis) -> npt.NDArray[np.object_]:
    """Label of the operator that launched each device event."""
    trace = analysis.trace
    labels = [
        OWNER_NAMES.get(int(owner), "") if owner < 0 else trace.name(int(trace.ranges.name[owner]))
        for owner in analysis.matching.owner
    ]
    return np.array(labels, object)


def _most_common(place: Codes, labels: npt.NDArray[np.object_], n: int) -> list[str]:
    """Per place the label that its launches bear most often."""
    texts, codes = np.unique(labels.astype(str), return_inverse=True)
    counts = np.zeros((n, len(texts)), np.int64)
    np.add.at(counts, (place, codes.reshape(-1)), 1)
    return [str(texts[row]) for row in counts.argmax(axis=1)]


def with_modules(timeline: Timeline, trace: Path) -> Timeline:
    """The timeline with the module in whose forward call each place's kernel was launched.

    Args:
        timeline: of the recording.
        trace: of some of the same steps, with the modules' forward calls.

    Raises:
        UnreadableInput: the trace cannot be read, holds no such calls, or its steps are not these.
    """
    analysis = analyse(trace)
    found, module = analysis.trace, analysis.matching.module[_rows(analysis)]
    if not (module >= 0).any():
        raise UnreadableInput(f"{trace.name} holds no module's forward call", "")
    labels = [
        _OUTSIDE_MODULES if row < 0 else found.name(int(found.ranges.name[row])).removeprefix(MODULE_PREFIX)
        for row in module
    ]
    launches, places = _launches(analysis)
    named = [(found.name(name), nth) for name, nth in places]
    told = dict(zip(named, _most_common(launches.place, np.array(labels, object), len(places)), strict=True))
    wanted = [(timeline.names[name], nth) for name, nth in timeline.places]
    if missing := [name for name, nth in wanted if (name, nth) not in told]:
        raise UnreadableInput(f"{len(missing)} of {len(wanted)} kernels of the step are not in {trace.name}", "")
    return replace(timeline, module=[told[place] for place in wanted])
