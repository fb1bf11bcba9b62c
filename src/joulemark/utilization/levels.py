"""Utilization at every level of the chip, of a step and of its phases, from series of hardware counters (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from joulemark.counter_series import CounterSeries
from joulemark.metrics import AMOUNTS, LEVELS
from joulemark.records import Finding, Row

SECTOR_BYTES = 32
"""Of a sector of the L1 and L2, on every NVIDIA GPU since Maxwell."""
SAME_WORK = 0.03
"""Relative spread of a count over passes of the same steps, beyond which they did not see the same work."""
PHASE_TIME = "phase_time_s"
"""Level of a row that holds how long a phase takes, by the device's clock."""
SAMPLES_OF_A_PHASE = 3.5
"""A phase of fewer samples is not told from its neighbours."""
SAME_CLOCK = 0.05
"""How far the sampler's span of the work may be from the device's own before the two clocks are not matched."""

_WORK = ("instructions", "pipe_tensor_cycles", "pipe_fma_instructions")
"""Counts that steps of the same work have in common, however long they take."""

SHARES: Mapping[str, str] = {
    "sm_active_fraction": "sm_active",
    "warps_active_fraction": "warps_active",
    "issue_slot_fraction": "issue_active",
    "tensor_active_fraction": "pipe_tensor",
    "tensor_half_fraction": "pipe_tensor_hmma",
    "tensor_integer_fraction": "pipe_tensor_imma",
    "tensor_fp64_fraction": "pipe_tensor_dfma",
    "fp64_active_fraction": "pipe_fp64",
    "fp32_active_fraction": "pipe_fp32",
    "fp16_active_fraction": "pipe_fp16",
    "integer_active_fraction": "pipe_integer",
    "alu_fraction": "pipe_alu",
    "fma_fraction": "pipe_fma",
    "xu_fraction": "pipe_xu",
    "l2_fraction": "l2_throughput",
    "dram_fraction": "dram_throughput",
    "dram_write_fraction": "dram_write_throughput",
}
"""Level → the counter that is its share of peak."""

COUNTS: Mapping[str, tuple[str, float]] = {
    "instructions_per_step": ("instructions", 1),
    "l1_bytes": ("l1_sectors", SECTOR_BYTES),
    "shared_wavefronts": ("shared_wavefronts", 1),
    "l2_bytes": ("l2_bytes", 1),
    "dram_read_bytes": ("dram_read_bytes", 1),
    "dram_write_bytes": ("dram_write_bytes", 1),
    "pcie_rx_bytes": ("pcie_rx_bytes", 1),
    "pcie_tx_bytes": ("pcie_tx_bytes", 1),
}
"""Amount of a step → the counter of it, and what one of it is in the amount's unit."""

READ: frozenset[str] = frozenset(
    {*SHARES.values(), *(counter for counter, _ in COUNTS.values()), *_WORK, "l1_sector_hits"}
)
"""Counters that anything here is made of."""


@dataclass(frozen=True)
class Stretch:
    """A time in which a phase of a step ran on the device.

    Args:
        phase: ``forward``, ``backward``, ``optimizer`` …
        start_s, end_s: since the work began, on the device's clock.
    """

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Counted:
    """One pass of the counters over some steps, cut to them.

    Args:
        series: of the steps alone.
        steps: how many.
        stretches: their phases in order of time; empty where nothing marks them.
    """

    series: CounterSeries
    steps: int
    stretches: tuple[Stretch, ...] = ()


def share(series: CounterSeries, level: str) -> float | None:
    """A level over a series: mean share of peak, 0 to 1; None where the series does not tell."""
    if level == "dram_read_fraction":
        whole, written = share(series, "dram_fraction"), share(series, "dram_write_fraction")
        return None if whole is None or written is None else max(0.0, whole - written)
    if level == "l1_hit_fraction":
        held, all_ = total(series, "l1_sector_hits"), total(series, "l1_sectors")
        return None if held is None or not all_ else held / all_
    counter = SHARES[level]
    return series.mean(counter) if counter in series.values else None


def total(series: CounterSeries, counter: str) -> float | None:
    """Sum of a count over a series; None where it was not collected."""
    return series.total(counter) if counter in series.values else None


def amount(series: CounterSeries, name: str) -> float | None:
    """An amount over a whole series, in its own unit; None where the series does not tell."""
    counter, each = COUNTS[name]
    found = total(series, counter)
    return None if found is None else found * each


def levels_of(passes: Sequence[Counted]) -> dict[str, list[float]]:
    """Every level and amount that the passes tell: one value per pass that holds it, amounts per step."""
    out: dict[str, list[float]] = {}
    for one in passes:
        for level in LEVELS:
            value = share(one.series, level)
            if value is not None:
                out.setdefault(level, []).append(value)
        for name in AMOUNTS:
            value = amount(one.series, name)
            if value is not None:
                out.setdefault(name, []).append(value * _coverage(one.series) / one.steps)
    return out


def _coverage(series: CounterSeries) -> float:
    """The whole run over what its samples cover: GPM's last sample ends before the work does, a count is scaled up."""
    run, covered = series.source.get("run_s"), float(series.duration_s.sum())
    return float(run) / covered if series.tier == "gpm" and run and covered else 1.0


def rows_of(passes: Sequence[Counted]) -> list[Row]:
    """Levels and amounts per step, and of each phase, as rows of a record's table ``levels``."""
    tier = passes[0].series.tier if passes else None
    rows = _rows(levels_of(passes), tier, "step")
    by_phase: dict[str, list[Counted]] = {}
    for one in passes:
        for phase, series in phases_of(one).items():
            by_phase.setdefault(phase, []).append(Counted(series, one.steps))
    for phase, members in by_phase.items():
        times = [_spent(one, phase) for one in passes if one.stretches]
        rows += _rows({PHASE_TIME: times, **levels_of(members)}, tier, phase)
    return rows


def _spent(one: Counted, phase: str) -> float:
    """Time of a phase per step, on the device's clock, in s."""
    return sum(each.end_s - each.start_s for each in one.stretches if each.phase == phase) / one.steps


def _rows(found: Mapping[str, Sequence[float]], tier: str | None, phase: str) -> list[Row]:
    return [
        {"tier": tier, "phase": phase, "level": name, "value": median(values), "passes": len(values)}
        for name, values in found.items()
    ]


def phases_of(one: Counted) -> dict[str, CounterSeries]:
    """The samples of each phase: those whose middle lies in one of its stretches.

    The sampler's span of the work is laid over the device's own; where the two differ by more than 5 % (a tick of the
    sampler is then no nanosecond, or samples were lost) there is no phase. Nor is a phase that is not much longer than
    a sample: it would be made of its neighbours.
    """
    if not one.stretches or not len(one.series):
        return {}
    begin, end = float(one.series.start_s[0]), float(one.series.end_s[-1])
    span = one.stretches[-1].end_s - one.stretches[0].start_s
    if span <= 0 or abs((end - begin) / span - 1) > SAME_CLOCK:
        return {}
    middle = ((one.series.start_s + one.series.end_s) / 2 - begin) / (end - begin) * span + one.stretches[0].start_s
    starts = np.array([stretch.start_s for stretch in one.stretches])
    index = np.clip(np.searchsorted(starts, middle, "right") - 1, 0, None)
    names = np.array([stretch.phase for stretch in one.stretches])[index]
    return {
        phase: one.series.only(names == phase)
        for phase in dict.fromkeys(names.tolist())
        if _mean_length(one, phase) >= SAMPLES_OF_A_PHASE * float(np.median(one.series.duration_s))
    }


def _mean_length(one: Counted, phase: str) -> float:
    """Of the stretches of a phase, in s."""
    lengths = [each.end_s - each.start_s for each in one.stretches if each.phase == phase]
    return sum(lengths) / len(lengths)


def unlike(passes: Sequence[Counted]) -> Iterator[Finding]:
    """Say which count, common to several passes, does not show the same work in each."""
    for name in _WORK:
        values = [found / one.steps for one in passes if (found := total(one.series, name)) is not None]
        middle = median(values) if values else 0.0
        if len(values) < 2 or not middle or (max(values) - min(values)) / middle <= SAME_WORK:
            continue
        yield Finding(
            "counter_passes_differ",
            f"{name} per step is between {min(values):.4g} and {max(values):.4g} in passes over the same steps",
            "levels of different passes may not belong together: look for steps that differ, or measure longer",
            flags=True,
        )
        return


def combine(kernels: Iterable[tuple[float, float | None]], step_s: float) -> tuple[float, float] | None:
    """A level of a step from counters per kernel: U = Σ t·u / T_step.

    Times come from a timeline that is not serialized, shares from counters of each kernel. Source: Delestrac et al.,
    *Multi-Level Analysis of GPU Utilization in ML Training Workloads* (DATE 2024).

    Args:
        kernels: (time in the step in s, share of peak or None where no counter saw the kernel).
        step_s: time of the step, in s.

    Returns:
        The level, and the share of the kernels' time that counters saw; None without any. Kernels that they did not
        see count as 0, so the level is a lower bound where the second is under 1.
    """
    pairs = list(kernels)
    spent = sum(time for time, _ in pairs)
    seen = [(time, u) for time, u in pairs if u is not None]
    if not seen or not spent or step_s <= 0:
        return None
    return sum(time * u for time, u in seen) / step_s, sum(time for time, _ in seen) / spent
