"""What the analysis keeps of a trace: columns of host and device events, in integer picoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
Small = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PS_PER_S = 1e12

KERNEL, COPY, SET = 0, 1, 2
"""Kinds of device events."""

OPERATOR, ANNOTATION, MODULE, OVERHEAD = 0, 1, 2, 3
"""Kinds of host ranges: a framework operator, a user's annotation, a module's forward call, the profiler's own work."""


@dataclass(frozen=True)
class Columns:
    """Arrays of one length, one row per event, sorted by start."""

    start: Ints
    end: Ints
    name: Codes
    lane: Codes

    def __len__(self) -> int:
        return int(self.start.size)

    def take(self, rows: npt.NDArray[Any]) -> Self:
        """The rows of a mask or of an index array."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True)
class Ranges(Columns):
    """Host ranges that are no call into the driver.

    Args:
        start, end: ps since an origin of the trace.
        name: index into the trace's ``names``.
        lane: index into the trace's ``lanes``, a host thread.
        kind: OPERATOR, ANNOTATION, MODULE or OVERHEAD.
        external: the profiler's external id, 0 for none.
    """

    kind: Small
    external: Ints


@dataclass(frozen=True)
class Calls(Columns):
    """Calls into the CUDA or HIP runtime or driver.

    Args:
        correlation: id shared with the device work that the call issued, -1 for none.
        external: external id of the operator around it, 0 for none.
    """

    correlation: Ints
    external: Ints


@dataclass(frozen=True)
class DeviceEvents(Columns):
    """Kernels, copies and sets.

    Args:
        kind: KERNEL, COPY or SET.
        device: number of the device.
        correlation, external: as of the call that issued it.
        size: bytes copied or set, -1 when not recorded.
    """

    kind: Small
    device: Codes
    correlation: Ints
    external: Ints
    size: Ints


@dataclass(frozen=True)
class Flows:
    """Arrows from a host event to a device event.

    Args:
        id: joins the two ends.
        at: ps, as of the events' starts.
        lane: of the event at this end.
        arrives: True at the device's end.
    """

    id: Ints
    at: Ints
    lane: Codes
    arrives: Mask


@dataclass(frozen=True)
class Damage:
    """What was wrong with the file itself.

    Args:
        cut: where and how the file ends early, None when it is whole.
        trailer_cut: all events are there, only what stands behind them is not.
        skipped_events: events that could not be decoded.
        repaired_events: events with numbers or characters that JSON forbids, read all the same.
        invalid_device_events, invalid_kernels: zero, negative or absurd times.
        invalid_host_events: the same, on the host.
        invalid_correlations: correlation ids of the invalid device events (they are not lost, only unusable).
        unpaired_events: begin/end events, which this reader does not pair.
    """

    cut: str | None = None
    trailer_cut: bool = False
    skipped_events: int = 0
    repaired_events: int = 0
    invalid_device_events: int = 0
    invalid_kernels: int = 0
    invalid_host_events: int = 0
    invalid_correlations: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    unpaired_events: int = 0


@dataclass(frozen=True)
class Trace:
    """One trace file, read.

    Args:
        path: the file.
        bytes_read: decompressed.
        events: events of any kind in the file.
        names, lanes: what the codes of the columns mean; a lane is a (pid, tid).
        spans: (start, end) of the profiler's recording windows, ps.
        counter_ranges: kernels recorded by a counter profiler in place of kernel events.
        header: top-level entries of the file beside its events.
    """

    path: str
    bytes_read: int
    events: int
    ranges: Ranges
    calls: Calls
    device: DeviceEvents
    flows: Flows
    names: list[str]
    lanes: list[tuple[Any, Any]]
    spans: list[tuple[int, int]]
    counter_ranges: int
    header: Mapping[str, Any]
    damage: Damage

    def name(self, code: int) -> str:
        """The text behind a name code."""
        return self.names[code]
