"""What a calibration needs of a GPU: run a kernel steadily, and read the sensors meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from joulemark.collect.energy import PowerWindow
    from joulemark.energy.microbench.suite import Benchmark, Operands


@dataclass(frozen=True)
class GpuFacts:
    """The GPU that is calibrated.

    Args:
        name, uuid: as NVML says.
        architecture: as in ``sm_90a``.
        sms: streaming multiprocessors.
        l2_bytes: of the L2, as the driver says.
        memory_bytes: of the device's memory that is free.
    """

    name: str
    uuid: str
    architecture: str
    sms: int
    l2_bytes: int
    memory_bytes: int = 16 << 30


@dataclass(frozen=True)
class Launch:
    """Geometry of a launch; see :class:`joulemark.energy.microbench.suite.Benchmark`.

    Args:
        blocks, iterations, sleep_ns: of the kernel.
        rest_s: about how long the device does nothing after it.
    """

    blocks: int
    iterations: int
    sleep_ns: int = 0
    rest_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """A stretch of launches without gaps.

    Args:
        launches: completed between ``start`` and ``end``.
        start, end: in s on ``time.perf_counter``.
    """

    launches: int
    start: float
    end: float


class Engine(Protocol):
    """Runs microbenchmarks on one GPU."""

    @property
    def facts(self) -> GpuFacts: ...

    def chase(self, size: int) -> float:
        """Cycles per dependent load over a footprint of ``size`` bytes."""
        ...

    def load(self, benchmark: Benchmark, operands: Operands, tiles: int) -> None:
        """Get a kernel and its operands ready."""
        ...

    def instructions(self, benchmark: Benchmark, paused: bool) -> int:
        """Warp instructions per warp and iteration."""
        ...

    def time_launch(self, launch: Launch) -> float:
        """Time of one launch of the loaded kernel, in s."""
        ...

    def run(self, launch: Launch | None, settle_s: float, seconds: float) -> Run:
        """Launch the loaded kernel back to back, at first for ``settle_s`` uncounted; None waits idle instead."""
        ...

    def repeat(self, launch: Launch, times: int) -> None:
        """Exactly that many launches of the loaded kernel, from an idle device to an idle device."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


class CountedSeries(Protocol):
    """What a recording of hardware counters gives: canonical names with samples, their units and totals."""

    @property
    def units(self) -> Mapping[str, str]: ...

    def total(self, name: str) -> float | None:
        """Sum of a count over all samples."""
        ...


class CounterRecorder(Protocol):
    """Hardware counters over a run, one group of them per run."""

    @property
    def groups(self) -> tuple[str, ...]: ...

    def record(self, group: str, run: Callable[[], object], expected_s: float | None = None) -> CountedSeries:
        """Count while ``run`` runs, for about ``expected_s``."""
        ...


class Meter(Protocol):
    """Reads the sensors while something runs."""

    def __call__(self, run: Callable[[], Run]) -> tuple[Run, PowerWindow]:
        """What ran and what the sensors showed."""
        ...
