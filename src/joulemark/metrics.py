"""The registry of metrics: per metric its unit, its better direction and how a person reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher", "neither"]


@dataclass(frozen=True)
class Metric:
    """What a figure of a record is.

    Args:
        name: key in a record's ``metrics``.
        unit: SI base unit (``s``, ``J``, ``W``, ``B``, ``Hz``, ``K`` …, ``1`` for a fraction, ``1/s`` for a rate).
        better: the direction in which a change is an improvement.
        title: column heading in tables.
        about: one line for ``--help`` and the docs.
    """

    name: str
    unit: str
    better: Better
    title: str
    about: str


_REGISTRY: dict[str, Metric] = {}


def register(metric: Metric) -> Metric:
    """Add a metric; the same name twice is a mistake of the programmer.

    Raises:
        ValueError: the name is taken.
    """
    if metric.name in _REGISTRY:
        raise ValueError(f"metric {metric.name!r} is registered twice")
    _REGISTRY[metric.name] = metric
    return metric


def find(name: str) -> Metric:
    """The metric of this name; an unknown one is shown as it is, without a direction."""
    return _REGISTRY.get(name) or Metric(name, "", "neither", name, "not known to this version")


def all_metrics() -> list[Metric]:
    """Every registered metric, in order of registration."""
    return list(_REGISTRY.values())


for _metric in (
    Metric(
        "device_time_s",
        "s",
        "lower",
        "device time",
        "time per step on the device's clock, steps issued back to back (CUDA events between them)",
    ),
    Metric(
        "host_time_s",
        "s",
        "lower",
        "host time",
        "latency of one lone step: from the call to a synchronized device (host clock)",
    ),
    Metric(
        "device_time_cold_s", "s", "lower", "cold L2", "device time of one lone step after the L2 cache was flushed"
    ),
    Metric(
        "device_time_graph_s",
        "s",
        "lower",
        "in graph",
        "device time of the step replayed as a CUDA graph: launches cost next to nothing",
    ),
    Metric(
        "throughput_per_s",
        "1/s",
        "higher",
        "items/s",
        "items (images, tokens) per second with steps issued back to back",
    ),
    Metric("energy_per_item_j", "J", "lower", "energy/item", "energy of the whole board per item over aligned windows"),
    Metric("power_w", "W", "neither", "power", "mean power of the board over the energy windows"),
    Metric(
        "dynamic_energy_per_item_j",
        "J",
        "lower",
        "dyn. energy/item",
        "energy per item above the board's static power with clocks up",
    ),
    Metric(
        "peak_memory_bytes",
        "B",
        "lower",
        "peak memory",
        "peak of memory allocated on the device; on a CPU, of the process's resident set",
    ),
    Metric("sm_clock_hz", "Hz", "neither", "SM clock", "median SM clock over the windows"),
    Metric("steady_sm_clock_hz", "Hz", "neither", "steady SM clock", "median SM clock while the steady steps ran"),
    Metric("memory_clock_hz", "Hz", "neither", "memory clock", "median memory clock over the windows"),
    Metric("temperature_c", "degC", "neither", "temp.", "highest GPU temperature over the windows"),
    Metric("warmup_s", "s", "lower", "warm-up", "build, compile and warm-up before the first sample"),
    Metric(
        "sampler_slowdown",
        "1",
        "neither",
        "sampler cost",
        "step time beside the power sampler over step time without it, minus 1",
    ),
    Metric("gpu_busy_fraction", "1", "higher", "GPU busy", "share of a profiled step in which anything ran on the GPU"),
    Metric("gpu_busy_s", "s", "lower", "busy", "time of a profiled step in which anything ran on the GPU"),
    Metric("copy_only_s", "s", "lower", "copy only", "part of it in which data moved and no kernel ran"),
    Metric("exposed_overhead_s", "s", "lower", "exposed", "time of a profiled step in which nothing ran on the GPU"),
    Metric(
        "exposed_overhead_unprofiled_s",
        "s",
        "lower",
        "exposed unpr.",
        "unprofiled step time minus the busy time of a profiled step",
    ),
    Metric(
        "host_issue_s",
        "s",
        "lower",
        "host issue",
        "time that the host needs to issue a profiled step, waiting for the device left out",
    ),
    Metric(
        "host_issue_unprofiled_s",
        "s",
        "lower",
        "issue unpr.",
        "time in which the host issues an unprofiled step: from the call until it returns, the queue not full",
    ),
    Metric(
        "host_reference_s",
        "s",
        "lower",
        "host reference",
        "time in which the host issues 32 additions of one element, beside the steps whose issue is timed",
    ),
    Metric("operators_per_step", "1", "neither", "operators", "outermost operators that issue work in a profiled step"),
    Metric(
        "host_issue_per_operator_s",
        "s",
        "lower",
        "issue/operator",
        "median over the operators of a profiled step of the time in which the host is in one of them",
    ),
    Metric("hidden_ratio", "1", "higher", "hidden", "1 minus exposed overhead over host issue time; may be negative"),
    Metric("kernels_per_step", "1", "neither", "kernels", "kernels in a profiled step"),
    Metric("launches_per_step", "1", "neither", "launches", "calls that launched kernels in a profiled step"),
    Metric(
        "profiler_distortion",
        "1",
        "neither",
        "profiler cost",
        "profiled step over the unprofiled step of the same process, minus 1",
    ),
    Metric(
        "scaling_efficiency",
        "1",
        "higher",
        "scaling",
        "throughput of N ranks over N times the throughput of one rank, with the same batch per rank",
    ),
    Metric(
        "communication_s",
        "s",
        "lower",
        "comm.",
        "time of a profiled step in which a collective ran, mean over the ranks",
    ),
    Metric(
        "exposed_communication_s",
        "s",
        "lower",
        "exposed comm.",
        "time of a profiled step in which a collective ran and no computation did, mean over the ranks",
    ),
    Metric(
        "overlap_fraction", "1", "higher", "overlap", "share of the communication time in which computation ran as well"
    ),
    Metric(
        "straggler_rank", "1", "neither", "straggler", "rank that reaches the collectives last, where one clearly does"
    ),
    Metric(
        "straggler_wait_s",
        "s",
        "lower",
        "waits",
        "time per step for which the rank that waits longest is longer in collectives than the one that comes last",
    ),
    Metric("sm_active_fraction", "1", "higher", "SM active", "SM cycles with at least one warp resident, of all"),
    Metric("warps_active_fraction", "1", "higher", "warps active", "resident warps, of those that all SMs can hold"),
    Metric(
        "issue_slot_fraction",
        "1",
        "higher",
        "issue slots",
        "warp instructions over what four sub-partitions per SM could issue in the elapsed cycles",
    ),
    Metric("tensor_active_fraction", "1", "higher", "tensor pipe", "elapsed cycles with the tensor pipe active"),
    Metric("tensor_half_fraction", "1", "neither", "tensor FP16", "tensor pipe active on FP16, BF16 or TF32"),
    Metric("tensor_integer_fraction", "1", "neither", "tensor INT", "tensor pipe active on integers"),
    Metric("tensor_fp64_fraction", "1", "neither", "tensor FP64", "tensor pipe active on FP64"),
    Metric("fp64_active_fraction", "1", "neither", "FP64 pipe", "elapsed cycles with the FP64 pipe active"),
    Metric("fp32_active_fraction", "1", "neither", "FP32 pipes", "elapsed cycles with the FP32 pipes active"),
    Metric("fp16_active_fraction", "1", "neither", "FP16 pipes", "FP16 pipes active, the tensor pipe left out"),
    Metric("integer_active_fraction", "1", "neither", "integer pipes", "elapsed cycles with the integer pipes active"),
    Metric("alu_fraction", "1", "neither", "ALU pipe", "warp instructions of the ALU pipe, of its peak"),
    Metric("fma_fraction", "1", "neither", "FMA pipes", "warp instructions of the FMA pipes, of their peak"),
    Metric("xu_fraction", "1", "neither", "XU pipe", "warp instructions of the special-function pipe, of its peak"),
    Metric("l1_hit_fraction", "1", "neither", "L1 hits", "sectors that the L1 held, of those that it looked up"),
    Metric("l2_fraction", "1", "neither", "L2", "L2 sector accesses, of their peak"),
    Metric("dram_fraction", "1", "neither", "DRAM", "DRAM reads and writes, of their peak"),
    Metric("dram_read_fraction", "1", "neither", "DRAM read", "DRAM reads, of the peak of reads and writes"),
    Metric("dram_write_fraction", "1", "neither", "DRAM write", "DRAM writes, of the peak of reads and writes"),
    Metric("instructions_per_step", "1", "neither", "instructions", "warp instructions of a step"),
    Metric("l1_bytes", "B", "neither", "L1 bytes", "bytes that the L1 looked up in a step (sectors of 32 B)"),
    Metric("shared_wavefronts", "1", "neither", "shared", "wavefronts of shared memory in a step"),
    Metric("l2_bytes", "B", "neither", "L2 bytes", "bytes of the L2's sector accesses in a step"),
    Metric("dram_read_bytes", "B", "neither", "DRAM bytes read", "bytes read from DRAM in a step"),
    Metric("dram_write_bytes", "B", "neither", "DRAM bytes written", "bytes written to DRAM in a step"),
    Metric("pcie_rx_bytes", "B", "neither", "PCIe in", "bytes that the GPU received over PCIe in a step"),
    Metric("pcie_tx_bytes", "B", "neither", "PCIe out", "bytes that the GPU sent over PCIe in a step"),
    Metric(
        "step_flops",
        "FLOP",
        "neither",
        "FLOP/step",
        "FLOP of the products, convolutions and attention of a step (by torch)",
    ),
    Metric(
        "counted_flops",
        "FLOP",
        "neither",
        "counted FLOP",
        "the same by hardware: work of the unit in a step times its FLOP per unit of work in a big product",
    ),
    Metric("achieved_flop_per_s", "FLOP/s", "higher", "FLOP/s", "step_flops over the step of the counters process"),
    Metric("peak_flop_per_s", "FLOP/s", "neither", "measured peak", "a big product of the same number format, here"),
    Metric("peak_fraction", "1", "higher", "of peak", "achieved_flop_per_s over peak_flop_per_s"),
    Metric("counted_step_s", "s", "lower", "counted step", "step beside the counters, issued back to back"),
    Metric(
        "counters_overhead",
        "1",
        "neither",
        "counters cost",
        "step beside the counters over the step without them in the same process, minus 1",
    ),
    Metric(
        "attribution_overhead",
        "1",
        "neither",
        "attribution cost",
        "step beside PM sampling and torch.profiler over the steps without them next to it, minus 1",
    ),
    Metric(
        "attributed_fraction",
        "1",
        "neither",
        "attributed",
        "share of a step's kernel time whose kernels have counters of their place, name or class; the rest is pooled",
    ),
):
    register(_metric)


CORE = (
    "device_time_s",
    "host_time_s",
    "throughput_per_s",
    "energy_per_item_j",
    "power_w",
    "peak_memory_bytes",
    "sm_clock_hz",
    "temperature_c",
)
"""Every record names these, measured or not; the most important first."""

PROFILER = (
    "gpu_busy_fraction",
    "gpu_busy_s",
    "copy_only_s",
    "exposed_overhead_s",
    "host_issue_s",
    "operators_per_step",
    "host_issue_per_operator_s",
    "hidden_ratio",
    "kernels_per_step",
    "launches_per_step",
    "profiler_distortion",
)
"""What the profiler pass gives, or says why not."""

ATTRIBUTION = ("attribution_overhead", "attributed_fraction")
"""What the attribution pass gives beside its document, or says why not."""

COMMUNICATION = (
    "communication_s",
    "exposed_communication_s",
    "overlap_fraction",
    "straggler_rank",
    "straggler_wait_s",
)
"""What the traces of all ranks give together, or why not."""

LEVELS = (
    "sm_active_fraction",
    "warps_active_fraction",
    "issue_slot_fraction",
    "tensor_active_fraction",
    "tensor_half_fraction",
    "tensor_integer_fraction",
    "tensor_fp64_fraction",
    "fp64_active_fraction",
    "fp32_active_fraction",
    "fp16_active_fraction",
    "integer_active_fraction",
    "alu_fraction",
    "fma_fraction",
    "xu_fraction",
    "l1_hit_fraction",
    "l2_fraction",
    "dram_fraction",
    "dram_read_fraction",
    "dram_write_fraction",
)
"""Shares of peak over a step, from the whole SM down to the pipes, then the memories."""

AMOUNTS = (
    "instructions_per_step",
    "l1_bytes",
    "shared_wavefronts",
    "l2_bytes",
    "dram_read_bytes",
    "dram_write_bytes",
    "pcie_rx_bytes",
    "pcie_tx_bytes",
)
"""What a step does, in base units."""

COUNTERS = (
    *LEVELS,
    *AMOUNTS,
    "step_flops",
    "counted_flops",
    "achieved_flop_per_s",
    "peak_flop_per_s",
    "peak_fraction",
    "counted_step_s",
    "counters_overhead",
)
"""What the counters pass gives, or says why not."""

_PREFIXES: tuple[tuple[float, str], ...] = (
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)
_PREFIXES += ((1e-12, "p"), (1e-15, "f"))
_BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"), (1.0, ""))
_SMALLEST, _BIGGEST = 1e-3, 1e6
"""Of a figure before the smallest and behind the largest prefix."""


def format_value(value: float | None, unit: str, digits: int = 3) -> str:
    """A value in its base unit as a person reads it: ``0.00123, "s"`` gives ``1.23 ms``.

    A missing value is ``n/a``: never 0 and never blank. A rate below one has no prefix: ``711 m`` would be read as
    millions. What no prefix brings near has an exponent: ``1e-300 s``.
    """
    if value is None or not math.isfinite(value):
        return "n/a"
    if unit == "1/s" and abs(value) < 1:
        return f"{value:.{digits}g}"
    if unit in ("1", "degC", ""):
        suffix = {"degC": " °C"}.get(unit, "")
        return f"{value:.{digits}g}{suffix}"
    scales = _BINARY if unit == "B" else _PREFIXES
    shown = "" if unit == "1/s" else unit
    magnitude = abs(value)
    factor, prefix = next(((f, p) for f, p in scales if magnitude >= f), scales[-1] if magnitude else (1.0, ""))
    scaled = value / factor
    if scaled and not _SMALLEST <= abs(scaled) < _BIGGEST:
        return f"{value:.{digits}g} {shown}".rstrip()
    text = f"{scaled:.{digits}g}" if abs(scaled) < 10**digits else f"{scaled:.0f}"
    return f"{text} {prefix}{shown}".rstrip()


def format_ratio(ratio: float, digits: int = 3) -> str:
    """``1.098``; with as many digits in all where a ratio is no matter of per cents: ``5.21e+04``."""
    return f"{ratio:.{digits}f}" if 0.01 <= abs(ratio) < 1000 or ratio == 0 else f"{ratio:.{digits}g}"


def batch_text(value: float | None) -> str:
    """A batch size, whole from a thousand on."""
    return "n/a" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
