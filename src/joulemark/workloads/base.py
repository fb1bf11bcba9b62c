"""What the harness needs of a workload: a name, and a way to build the step of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from joulemark.records import Case


@dataclass
class PhaseMarks:
    """Where a step says which of its phases begins; nobody listens unless a pass asks.

    Args:
        listener: is told the phase, in the step's own thread, as its host code begins.
    """

    listener: Callable[[str], object] | None = None

    def __call__(self, phase: str) -> None:
        """Say that a phase begins."""
        if self.listener is not None:
            self.listener(phase)


@dataclass(frozen=True)
class Step:
    """One unit of repeated work, built and ready to run.

    Args:
        run: performs one step; on a GPU it may return before the device is done.
        items: items that one step processes.
        unit: what an item is: ``images``, ``tokens``, ``calls`` …
        setup: runs before each round, outside the measured window; its result is ignored.
        capturable: whether ``run`` may be captured into a CUDA graph (static addresses, no host reads).
        close: releases what the step holds besides memory (data-loader workers, hooks).
        phases: says which phase begins (``input``, ``forward``, ``backward``, ``optimizer``); None where it has none.
    """

    run: Callable[[], object]
    items: int = 1
    unit: str = "calls"
    setup: Callable[[], object] | None = None
    capturable: bool = False
    close: Callable[[], object] | None = None
    phases: PhaseMarks | None = None


@runtime_checkable
class Workload(Protocol):
    """A thing that can be measured in several cases.

    ``build`` may raise :class:`joulemark.errors.Unsupported` for a case that makes no sense for it
    (a CNN has no ``decode``), and whatever out-of-memory error its framework has.
    """

    @property
    def name(self) -> str:
        """What tables and ids call it."""
        ...

    @property
    def phases(self) -> tuple[str, ...]:
        """Of ``inference``, ``train``, ``prefill``, ``decode``."""
        ...

    def build(self, case: Case, device: str) -> Step:
        """The step of a case on ``device`` (``cuda:0``, ``cpu``). Heavy: called in the measuring process only."""
        ...
