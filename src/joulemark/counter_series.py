"""Hardware counters as a time series: what every collector of counters gives and every analysis of them reads.

Names are canonical: one per quantity, whatever instrument read it (:data:`COUNTERS`). Two kinds stand side by side:

- a **share** (unit ``"1"``): mean over the sample, of the peak that the unit sustains over all *elapsed* cycles of all
  its instances, 0 … 1. ``sm_active``, ``pipe_tensor``, ``dram_throughput`` are shares.
- a **count** (any other unit): what happened inside the sample, summed over the whole GPU. Its name says what is
  counted: ``…_cycles``, ``…_instructions``, ``…_bytes``, ``…_sectors``.

An instrument seldom gives all of them, and a pass gives the counters of its group alone; ``missing`` says why a
counter that was asked for is not there. Means over time weigh each sample by its length (:meth:`CounterSeries.mean`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

Tier = Literal["pm_sampling", "gpm", "ncu"]

TIERS: tuple[Tier, ...] = ("pm_sampling", "gpm", "ncu")
"""``pm_sampling``: CUPTI's hardware time series; ``gpm``: NVML's metrics between two samples; ``ncu``: per kernel."""


@dataclass(frozen=True)
class Counter:
    """A quantity that hardware counts.

    Args:
        unit: ``"1"`` for a share of peak, else the base unit of a count.
        meaning: in one clause.
    """

    unit: str
    meaning: str


COUNTERS: Mapping[str, Counter] = {
    "sm_active": Counter("1", "cycles with at least one warp resident, of all SM cycles"),
    "warps_active": Counter("1", "resident warps, of the warps that all SMs can hold"),
    "issue_active": Counter("1", "issue slots used: warp instructions per sub-partition (4 per SM) and elapsed cycle"),
    "pipe_tensor": Counter("1", "tensor pipe active, any type"),
    "pipe_tensor_hmma": Counter("1", "tensor pipe on half-precision work (FP16, BF16, TF32)"),
    "pipe_tensor_imma": Counter("1", "tensor pipe on integer work"),
    "pipe_tensor_dfma": Counter("1", "tensor pipe on FP64 work"),
    "pipe_fp64": Counter("1", "FP64 pipe active"),
    "pipe_fp32": Counter("1", "FP32 pipes active"),
    "pipe_fp16": Counter("1", "FP16 pipes active, without the tensor pipe"),
    "pipe_integer": Counter("1", "integer pipes active"),
    "pipe_alu": Counter("1", "ALU pipe: warp instructions of its peak (logic, comparison, integer addition)"),
    "pipe_fma": Counter("1", "FMA pipes: warp instructions of their peak (FP32, FP16x2, integer multiply-add)"),
    "pipe_fmaheavy": Counter("1", "the FMA pipe that also multiplies integers: warp instructions of its peak"),
    "pipe_xu": Counter("1", "special-function pipe: warp instructions of its peak"),
    "l2_throughput": Counter("1", "L2 sector accesses, of their peak"),
    "dram_throughput": Counter("1", "DRAM reads and writes, of their peak"),
    "dram_write_throughput": Counter("1", "DRAM writes, of the peak of reads and writes"),
    "sm_cycles": Counter("cycle", "elapsed cycles, summed over SMs"),
    "sm_active_cycles": Counter("cycle", "cycles with at least one warp resident, summed over SMs"),
    "warp_cycles": Counter("warp", "resident warps per cycle, summed over cycles and SMs (warp-cycles)"),
    "instructions": Counter("inst", "warp instructions executed"),
    "thread_instructions": Counter("inst", "thread instructions executed whose predicate was true"),
    "pipe_tensor_cycles": Counter("cycle", "active cycles of all tensor pipes (four per SM on Hopper), any type"),
    "pipe_tensor_hmma_cycles": Counter("cycle", "cycles of the tensor pipes on half-precision work"),
    "pipe_tensor_imma_cycles": Counter("cycle", "cycles of the tensor pipes on integer work"),
    "pipe_fp64_cycles": Counter("cycle", "cycles of the FP64 pipes active"),
    "pipe_alu_instructions": Counter("inst", "warp instructions of the ALU pipe"),
    "pipe_fma_instructions": Counter("inst", "warp instructions of the FMA pipes"),
    "pipe_fmaheavy_instructions": Counter("inst", "warp instructions of the FMA pipe that also multiplies integers"),
    "pipe_xu_instructions": Counter("inst", "warp instructions of the special-function pipe"),
    "pipe_lsu_instructions": Counter("inst", "warp instructions of the load and store pipe (shared memory and L1)"),
    "shared_wavefronts": Counter("wavefront", "wavefronts of shared memory in the L1's data stage"),
    "l1_requests": Counter("request", "requests of the L1: warp instructions that look something up there"),
    "l1_sectors": Counter("sector", "32 B sectors that the L1 looked up"),
    "l1_sector_hits": Counter("sector", "32 B sectors that the L1 held"),
    "l2_bytes": Counter("B", "bytes of the L2's sector accesses"),
    "l2_requests": Counter("request", "requests of the L2, each of up to a line of 128 B"),
    "l2_write_sectors": Counter("sector", "32 B sectors that the L2 was asked to write"),
    "dram_read_bytes": Counter("B", "bytes read from DRAM"),
    "dram_write_bytes": Counter("B", "bytes written to DRAM"),
    "pcie_rx_bytes": Counter("B", "bytes received over PCIe"),
    "pcie_tx_bytes": Counter("B", "bytes sent over PCIe; with PM sampling its own records too"),
    "nvlink_rx_bytes": Counter("B", "bytes received over NVLink"),
    "nvlink_tx_bytes": Counter("B", "bytes sent over NVLink"),
}
"""Every canonical name with its unit and meaning."""

_ACTIVITY = ("sm_active_cycles", "sm_active", "instructions", "issue_active", "pipe_tensor", "dram_throughput")


@dataclass(frozen=True, eq=False)
class CounterSeries:
    """Counters of one pass over time; arrays share one length n.

    Args:
        tier: the instrument.
        group: name of the pass.
        start_s: begin of each sample, in s on ``clock``, shape [n], ascending.
        end_s: end of each sample, in s, shape [n].
        values: per canonical name the samples, shape [n]; NaN marks a sample that this counter lacks.
        units: per canonical name ``"1"`` or the base unit of a count.
        clock: which clock ``start_s`` is on: ``perf_counter`` (Python's, of this process), ``unix`` (the sampler's,
            seen to show Unix time: that is ``first_tick / ticks_per_s + start_s``, both of ``source``; the run lasted
            from ``source["run_begin_s"]`` to ``run_end_s`` on it), or ``pm_timestamp`` (the sampler's own, with an
            unknown origin; it must be matched to another clock by events before the two are compared).
        raw: per canonical name the instrument's own name of the metric.
        missing: per canonical name that was asked for and is not in ``values``, the reason.
        source: where the figures come from: version of the library, chip, sampling interval, lost samples,
            ``run_s`` (time of the run on the host, in s) …
    """

    tier: Tier
    group: str
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    values: Mapping[str, NDArray[np.float64]]
    units: Mapping[str, str]
    clock: str = "pm_timestamp"
    raw: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, str | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.start_s)
        lengths = {"end_s": len(self.end_s)} | {name: len(samples) for name, samples in self.values.items()}
        wrong = [name for name, length in lengths.items() if length != n]
        if wrong:
            raise ValueError(f"{n} samples begin, but {wrong[0]} has {lengths[wrong[0]]}")
        if lacking := set(self.values) - set(self.units):
            raise ValueError(f"no unit for {sorted(lacking)}")

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def duration_s(self) -> NDArray[np.float64]:
        """Length of each sample, in s, shape [n]."""
        return np.subtract(self.end_s, self.start_s)

    def mean(self, name: str) -> float | None:
        """Mean of a share, weighted by the length of its samples; None without a sample.

        Raises:
            KeyError: the series lacks the counter.
            ValueError: the counter is no share.
        """
        if self.units[name] != "1":
            raise ValueError(f"{name} counts {self.units[name]}: it has a total and a rate, no mean share")
        return self._weighted(name)

    def total(self, name: str) -> float | None:
        """Sum of a count over all samples, in its unit; None without a sample.

        Raises:
            KeyError: the series lacks the counter.
            ValueError: the counter is a share.
        """
        if self.units[name] == "1":
            raise ValueError(f"{name} is a share of peak: it has a mean, no total")
        samples = self.values[name]
        there = ~np.isnan(samples)
        return float(samples[there].sum()) if there.any() else None

    def _weighted(self, name: str) -> float | None:
        samples, weights = self.values[name], self.duration_s
        there = ~np.isnan(samples) & (weights > 0)
        return float(np.average(samples[there], weights=weights[there])) if there.any() else None

    def between(self, start_s: float, end_s: float) -> CounterSeries:
        """The samples that lie wholly inside a stretch of this series' clock."""
        return self.only(np.flatnonzero((self.start_s >= start_s) & (self.end_s <= end_s)))

    def at_work(self) -> CounterSeries:
        """Without the samples before the first and behind the last in which the SMs did anything.

        Sampling begins before the work and ends after it, and those samples read 0; idle time inside the work stays.
        """
        name = next((one for one in _ACTIVITY if one in self.values), None)
        if name is None:
            return self
        active = np.flatnonzero(self.values[name] > 0)
        if not len(active):
            return self.only(active)
        return self.only(np.arange(active[0], active[-1] + 1))

    def only(self, index: NDArray[Any]) -> CounterSeries:
        """The samples at these numbers, or where this mask is true."""
        kept = {name: samples[index] for name, samples in self.values.items()}
        return replace(self, start_s=self.start_s[index], end_s=self.end_s[index], values=kept)


class CounterSource(Protocol):
    """An instrument that was proved to work on one GPU."""

    @property
    def tier(self) -> Tier:
        """Which rung of the ladder it is."""
        ...

    @property
    def groups(self) -> tuple[str, ...]:
        """Passes that give all it can count; each needs a run of the same work."""
        ...

    def counters(self, group: str) -> tuple[str, ...]:
        """Canonical names of what a pass gives."""
        ...

    def record(self, group: str, run: Callable[[], object], expected_s: float | None = None) -> CounterSeries:
        """Counts while ``run`` runs.

        Args:
            group: one of :attr:`groups`.
            run: does the work and returns when the device has finished it; it is run again where more was sampled
                than the hardware can hold, so what it tells of itself must be of its last run.
            expected_s: about how long it takes, in s, if that is known: a longer run is sampled at longer intervals.

        Raises:
            DeviceError: nothing could be counted; its type says why. What ``run`` raises passes through.
        """
        ...

    def close(self) -> None:
        """Gives the counters back to the driver."""
        ...
