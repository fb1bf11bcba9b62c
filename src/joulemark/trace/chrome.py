"""Parser of Kineto Chrome traces: from decoded events to columns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from joulemark.trace.decode import Args, Event, EventStream
from joulemark.trace.events import (
    ANNOTATION,
    COPY,
    KERNEL,
    MODULE,
    OPERATOR,
    OVERHEAD,
    SET,
    Calls,
    Columns,
    Damage,
    DeviceEvents,
    Floats,
    Flows,
    Ints,
    Mask,
    Ranges,
    Trace,
)
from joulemark.trace.source import BLOCK_BYTES, TraceBytes

_RANGE_KINDS = {"cpu_op": OPERATOR, "operator": OPERATOR, "user_annotation": ANNOTATION, "overhead": OVERHEAD}
_DEVICE_KINDS = {"kernel": KERNEL, "gpu_memcpy": COPY, "memcpy": COPY, "gpu_memset": SET, "memset": SET}
_CALL = re.compile(r"(cuda|hip|xpu|mtia|musa|privateuse1|.*_)?_?(runtime|driver)$")
_LEGACY_DEVICE = "CUDA functions"
_LEGACY_HOST = "CPU functions"
MODULE_PREFIX = "nn.Module: "

_LATEST_US = 1e12
"""Times further than this from the trace's first events (eleven days) are no times."""

_EXACT_US = 2.0**53
_NO_ARGS = Args()
_T = TypeVar("_T", bound=Columns)


class _Codes(dict[Hashable, int]):
    """Numbers its keys in the order of their first look-up."""

    def __missing__(self, key: Hashable) -> int:
        self[key] = code = len(self)
        return code


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _floats(values: Sequence[Any]) -> Floats:
    """float64 of whatever was written, nan for what is no number."""
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_number(value) for value in values], np.float64)


def _integer(value: Any, missing: int) -> int:
    number = _number(value)
    return missing if not math.isfinite(number) or abs(number) >= 2**63 else int(value)


def _ints(values: Sequence[Any], missing: int) -> Ints:
    """int64 of whatever was written, ``missing`` for what is no integer."""
    try:
        return np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_integer(value, missing) for value in values], np.int64)


class _Clock:
    """Turns the file's microseconds into ps since an origin near its first events.

    float64 holds microseconds since boot or epoch with a granularity between 0.1 ns and 0.25 µs. Where it is
    coarser than 0.1 ns, times are rounded to whole nanoseconds: up to the granularity of 1 ns that gives back
    exactly what was written.
    """

    def __init__(self) -> None:
        self.base: int | None = None
        self._fine = True

    def set_origin(self, ts: Floats) -> None:
        """Takes the median of the first times of a file for origin: a single wrong one must not move it."""
        usable = ts[(ts > 0) & (ts < _EXACT_US)]
        if usable.size:
            middle = float(np.sort(usable)[usable.size // 2])
            self.base = math.floor(middle)
            self._fine = bool(np.spacing(middle) < 1e-4)

    def convert(self, ts: Floats, dur: Floats) -> tuple[Ints, Ints, Mask]:
        """Starts and ends in ps, and which events have usable times."""
        base = self.base or 0
        with np.errstate(invalid="ignore"):
            valid = np.isfinite(ts) & (dur >= 0) & (dur < _LATEST_US) & (np.abs(ts - base) < _LATEST_US)
            valid &= (ts > 0) | ((ts == 0) & (dur > 0) & (base < 1e9))
        if self.base is None and valid.any():
            self.base = base  # times once given out keep their origin
        ts, dur = np.where(valid, ts, base), np.where(valid, dur, 0.0)
        whole = np.floor(ts)
        fraction = np.rint((ts - whole) * 1e6) if self._fine else np.rint((ts - whole) * 1e3) * 1e3
        start = (whole.astype(np.int64) - base) * 1_000_000 + fraction.astype(np.int64)
        return start, start + np.rint(dur * 1e6).astype(np.int64), valid


class _Collector:
    """Gathers the columns of a trace, list of events by list of events."""

    def __init__(self) -> None:
        self.clock = _Clock()
        self.names, self.lanes = _Codes(), _Codes()
        self.events = self.counter_ranges = self.unpaired = 0
        self.invalid_device = self.invalid_kernels = self.invalid_host = 0
        self.invalid_correlations: list[Ints] = []
        self.spans: list[tuple[int, int]] = []
        self._ranges: list[tuple[Any, ...]] = []
        self._calls: list[tuple[Any, ...]] = []
        self._device: list[tuple[Any, ...]] = []
        self._flows: list[tuple[Any, ...]] = []
        self._by_category: dict[Any, tuple[list[Event], Callable[[list[Event]], None]]] = {}

    def add(self, events: list[Event]) -> None:
        """Sorts events by what they are, and appends each kind's columns."""
        self.events += len(events)
        by_category, flows = self._by_category, []
        for event in events:
            phase = event.ph
            if phase == "X":
                found = by_category.get(event.cat)
                if found is None:
                    found = by_category[event.cat] = ([], self._reader_of(event.cat))
                found[0].append(event)
            elif phase in ("s", "f"):
                if event.cat != "fwdbwd":
                    flows.append(event)
            elif phase in ("B", "E"):
                self.unpaired += 1
        if self.clock.base is None:
            self.clock.set_origin(_floats([event.ts for event in events if event.ph in ("X", "s", "f")]))
        for waiting, read in by_category.values():
            if waiting:
                read(waiting)
                waiting.clear()
        if flows:
            self._add_flows(flows)

    def _reader_of(self, category: Any) -> Callable[[list[Event]], None]:
        """What to do with complete events of a category; categories of no interest are dropped."""
        name = str(category).lower()
        if name in _RANGE_KINDS:
            return lambda events: self._add_ranges(events, _RANGE_KINDS[name])
        if name in _DEVICE_KINDS:
            return lambda events: self._add_device(events, _DEVICE_KINDS[name])
        if _CALL.match(name):
            return self._add_calls
        special: dict[str, Callable[[list[Event]], None]] = {
            "python_function": self._add_modules,
            "trace": self._add_spans,
            "cuda_profiler_range": self._count_counter_ranges,
            "none": self._add_legacy,
        }
        return special.get(name, lambda _: None)

    def _columns(self, events: list[Event]) -> tuple[tuple[Any, ...], Mask]:
        start, end, valid = self.clock.convert(_floats([e.ts for e in events]), _floats([e.dur for e in events]))
        names, lanes = self.names, self.lanes
        name = np.array([names[e.name] for e in events], np.int32)
        lane = np.array([lanes[e.pid, e.tid] for e in events], np.int32)
        return (start, end, name, lane), valid

    @staticmethod
    def _kept(columns: tuple[Any, ...], valid: Mask) -> tuple[Any, ...]:
        return columns if valid.all() else tuple(column[valid] for column in columns)

    @staticmethod
    def _external(args: list[Args]) -> Ints:
        old = [a.external_old if a.external is None else a.external for a in args]
        return _ints([0 if value is None else value for value in old], 0)

    @staticmethod
    def _correlation(args: list[Args]) -> Ints:
        return _ints([-1 if a.correlation is None else a.correlation for a in args], -1)

    def _add_ranges(self, events: list[Event], kind: int) -> None:
        columns, valid = self._columns(events)
        self.invalid_host += int((~valid).sum())
        external = self._external([e.args or _NO_ARGS for e in events])
        self._ranges.append(self._kept((*columns, np.full(len(events), kind, np.int8), external), valid))

    def _add_modules(self, events: list[Event]) -> None:
        """Of the Python frames only modules' forward calls: the frames of a trace with stacks outnumber all else."""
        modules = [e for e in events if isinstance(e.name, str) and e.name.startswith(MODULE_PREFIX)]
        if modules:
            self._add_ranges(modules, MODULE)

    def _add_calls(self, events: list[Event]) -> None:
        columns, valid = self._columns(events)
        self.invalid_host += int((~valid).sum())
        args = [e.args or _NO_ARGS for e in events]
        self._calls.append(self._kept((*columns, self._correlation(args), self._external(args)), valid))

    def _add_device(self, events: list[Event], kind: int, legacy: bool = False) -> None:
        columns, valid = self._columns(events)
        args = [e.args or _NO_ARGS for e in events]
        number = [
            (e.tid if legacy else e.pid) if a.device is None else a.device for e, a in zip(events, args, strict=True)
        ]
        device = _ints([_digits(value) for value in number], 0).astype(np.int32)
        correlation = self._correlation(args)
        size = _ints([-1 if a.bytes is None else a.bytes for a in args], -1)
        if not valid.all():
            bad = int((~valid).sum())
            self.invalid_device += bad
            self.invalid_kernels += bad if kind == KERNEL else 0
            self.invalid_correlations.append(correlation[~valid])
        kinds = np.full(len(events), kind, np.int8)
        rows = (*columns, kinds, device, correlation, self._external(args), size)
        self._device.append(self._kept(rows, valid))

    def _add_legacy(self, events: list[Event]) -> None:
        """Events without a category, as ``torch.autograd.profiler`` of torch 1.x wrote them: a row tells their kind."""
        host = [e for e in events if e.pid == _LEGACY_HOST]
        on_device = [e for e in events if e.pid == _LEGACY_DEVICE]
        copies = [e for e in on_device if str(e.name).startswith("Memcpy")]
        sets = [e for e in on_device if str(e.name).startswith("Memset")]
        kernels = [e for e in on_device if not str(e.name).startswith(("Memcpy", "Memset"))]
        if host:
            self._add_ranges(host, OPERATOR)
        for kind, chosen in ((KERNEL, kernels), (COPY, copies), (SET, sets)):
            if chosen:
                self._add_device(chosen, kind, legacy=True)

    def _add_spans(self, events: list[Event]) -> None:
        """The profiler's own recording windows."""
        chosen = [e for e in events if str(e.name).startswith("PyTorch Profiler")]
        if chosen:
            start, end, valid = self.clock.convert(_floats([e.ts for e in chosen]), _floats([e.dur for e in chosen]))
            self.spans += [(int(lo), int(hi)) for lo, hi, ok in zip(start, end, valid, strict=True) if ok]

    def _count_counter_ranges(self, events: list[Event]) -> None:
        self.counter_ranges += len(events)

    def _add_flows(self, events: list[Event]) -> None:
        ts = _floats([e.ts for e in events])
        at, _, valid = self.clock.convert(ts, np.ones_like(ts))
        lanes = self.lanes
        lane = np.array([lanes[e.pid, e.tid] for e in events], np.int32)
        arrives = np.array([e.ph == "f" for e in events], np.bool_)
        self._flows.append(self._kept((_ints([e.id for e in events], -1), at, lane, arrives), valid))

    def _all_ranges(self) -> Ranges:
        """Host ranges; step marks are annotations, though the first profilers wrote them as operators."""
        ranges = _sorted(Ranges, self._ranges, (np.int64, np.int64, np.int32, np.int32, np.int8, np.int64))
        marks = [code for name, code in self.names.items() if str(name).startswith("ProfilerStep")]
        ranges.kind[np.isin(ranges.name, marks) & (ranges.kind == OPERATOR)] = ANNOTATION
        return ranges

    def finish(self, stream: EventStream) -> Trace:
        """The trace, its columns sorted by start."""
        damage = Damage(
            cut=stream.cut,
            trailer_cut=stream.trailer_cut,
            skipped_events=stream.skipped,
            repaired_events=stream.repaired,
            invalid_device_events=self.invalid_device,
            invalid_kernels=self.invalid_kernels,
            invalid_host_events=self.invalid_host,
            invalid_correlations=np.concatenate([np.empty(0, np.int64), *self.invalid_correlations]),
            unpaired_events=self.unpaired,
        )
        flows = _joined(self._flows, (np.int64, np.int64, np.int32, np.bool_))
        return Trace(
            path=str(stream.source.path),
            bytes_read=stream.source.position,
            events=self.events,
            ranges=self._all_ranges(),
            calls=_sorted(Calls, self._calls, (np.int64, np.int64, np.int32, np.int32, np.int64, np.int64)),
            device=_sorted(
                DeviceEvents,
                self._device,
                (np.int64, np.int64, np.int32, np.int32, np.int8, np.int32, np.int64, np.int64, np.int64),
            ),
            flows=Flows(*flows),
            names=["" if name is None else str(name) for name in self.names],
            lanes=list(self.lanes),  # type: ignore[arg-type]
            spans=self.spans,
            counter_ranges=self.counter_ranges,
            header=stream.header,
            damage=damage,
        )


def _digits(value: Any) -> Any:
    """``GPU 1`` → 1; numbers as they are."""
    if isinstance(value, str):
        found = re.search(r"\d+", value)
        return int(found.group()) if found else 0
    return value


def _joined(pieces: list[tuple[Any, ...]], types: tuple[Any, ...]) -> list[Any]:
    """Columns from pieces of columns; the pieces are let go, for they are as large as the result."""
    columns = []
    for index, kind in enumerate(types):
        columns.append(np.concatenate([np.empty(0, kind), *(piece[index] for piece in pieces)]))
    pieces.clear()
    return columns


def _sorted(kind: type[_T], pieces: list[tuple[Any, ...]], types: tuple[Any, ...]) -> _T:
    """A table of columns, by start; an outer range before an inner one that begins with it."""
    columns = _joined(pieces, types)
    order = np.lexsort((-columns[1], columns[0]))
    for index in range(len(columns)):
        columns[index] = columns[index][order]
    return kind(*columns)


def read_trace(path: Path, block_bytes: int = BLOCK_BYTES) -> Trace:
    """Reads a Kineto Chrome trace in memory bounded by one block plus about 50 bytes per kept event.

    Accepts plain and gzip files, an object with ``traceEvents`` or a bare list of events, microseconds as integers
    or floats, and what older profilers wrote. Files that are cut are read as far as they go.

    Raises:
        UnreadableInput: the file cannot be read, is empty or is no trace.
    """
    stream = EventStream(TraceBytes(path, block_bytes))
    collector = _Collector()
    for events in stream:
        collector.add(events)
    return collector.finish(stream)
