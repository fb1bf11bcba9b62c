"""When the phases of a step run on the device, by events between them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Protocol


class PhaseClock(Protocol):
    """Notes where phases begin while steps run."""

    def begin(self) -> None:
        """Forget everything; the work begins now, on an idle device."""
        ...

    def mark(self, phase: str) -> None:
        """A phase begins."""
        ...

    def read(self) -> list[tuple[str, float, float]]:
        """(phase, start, end) in s since the work began; call it when the device is done."""
        ...


class HostPhases:
    """Phases of work that is done when the call returns."""

    def __init__(self) -> None:
        self._start = 0.0
        self._marks: list[tuple[str, float]] = []

    def begin(self) -> None:
        self._start, self._marks = time.perf_counter(), []

    def mark(self, phase: str) -> None:
        self._marks.append((phase, time.perf_counter() - self._start))

    def read(self) -> list[tuple[str, float, float]]:
        return _stretches(self._marks, time.perf_counter() - self._start)


class CudaPhases:
    """Phases by CUDA events on the current stream."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._start: Any = None
        self._marks: list[tuple[str, Any]] = []

    def _event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self._marks, self._start = [], self._event()

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._event()))

    def read(self) -> list[tuple[str, float, float]]:
        end = self._event()
        end.synchronize()
        marks = [(phase, self._since(event)) for phase, event in self._marks]
        return _stretches(marks, self._since(end))

    def _since(self, event: Any) -> float:
        return float(self._start.elapsed_time(event)) * 1e-3


def phase_clock(device: str) -> PhaseClock:
    """The phase clock of a device, by torch's name of it."""
    return CudaPhases() if device.startswith("cuda") else HostPhases()


def _stretches(marks: list[tuple[str, float]], end: float) -> list[tuple[str, float, float]]:
    """Each phase ends where the next begins."""
    return [(phase, start, stop) for (phase, start), (_, stop) in pairwise([*marks, ("", end)])]
