"""What PM sampling counts on each chip, packed into passes.

What one pass can count is limited and no list of it is published. CUPTI is asked which metrics a chip has and which
fit together; earlier metrics go into earlier passes.

Source: CUPTI documentation, "CUPTI Profiler Host API"; metric names as CUPTI lists them for each chip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

SHARE = ".avg.pct_of_peak_sustained_elapsed"
SUM = ".sum"
_ELAPSED = ".sum.peak_sustained_elapsed"


@dataclass(frozen=True, eq=False)
class Metric:
    """A hardware counter, and the canonical counters that it gives.

    Args:
        names: what chips call it, the best first; names joined by ``+`` are added.
        gives: canonical counter → submetric.
        anchor: whether it belongs into every pass that has room, so that passes can be checked against each other.
    """

    names: tuple[str, ...]
    gives: Mapping[str, str]
    anchor: bool = False

    def full_names(self, name: str) -> tuple[str, ...]:
        """CUPTI's full names of what it gives, under one of its names."""
        return tuple(part + ending for ending in self.gives.values() for part in name.split("+"))


def _sm(name: str, gives: Mapping[str, str], *older: str) -> Metric:
    return Metric((f"TPC.TriageCompute.{name}", *older), gives, anchor=True)


def _sum_of(name: str, *parts: str) -> str:
    return "+".join(name.format(part) for part in parts)


WITHHELD: Mapping[str, str] = dict.fromkeys(
    ("warps_active", "warp_cycles"),
    "tpc__warps_active_realtime does not count resident warps: it read 2 for one [GH100, CUPTI 13.0]",
)
"""Canonical counters that CUPTI offers under a name and that are not believed, with the reason."""

METRICS: tuple[Metric, ...] = (
    _sm(
        "sm__cycles_active",
        {"sm_active": SHARE, "sm_active_cycles": SUM, "sm_cycles": _ELAPSED},
        "sm__cycles_active",
    ),
    _sm("sm__inst_executed_realtime", {"issue_active": SHARE, "instructions": SUM}, "sm__inst_executed"),
    _sm(
        "sm__pipe_tensor_cycles_active_realtime",
        {"pipe_tensor": SHARE, "pipe_tensor_cycles": SUM},
        "sm__pipe_tensor_cycles_active",
    ),
    _sm(
        "sm__pipe_tensor_op_hmma_cycles_active_realtime",
        {"pipe_tensor_hmma": SHARE, "pipe_tensor_hmma_cycles": SUM},
        "TPC.TriageCompute.sm__pipe_tensor_subpipe_hmma_cycles_active_realtime",
        "sm__pipe_tensor_op_hmma_cycles_active",
    ),
    _sm(
        "sm__pipe_tensor_op_imma_cycles_active_realtime",
        {"pipe_tensor_imma": SHARE, "pipe_tensor_imma_cycles": SUM},
        "TPC.TriageCompute.sm__pipe_tensor_subpipe_imma_cycles_active_realtime",
        "sm__pipe_tensor_op_imma_cycles_active",
    ),
    _sm(
        "sm__inst_executed_pipe_alu_realtime",
        {"pipe_alu": SHARE, "pipe_alu_instructions": SUM},
        "sm__inst_executed_pipe_alu",
    ),
    _sm(
        "sm__inst_executed_pipe_fma_realtime",
        {"pipe_fma": SHARE, "pipe_fma_instructions": SUM},
        "sm__inst_executed_pipe_fma",
    ),
    _sm(
        "sm__inst_executed_pipe_fmaheavy_realtime",
        {"pipe_fmaheavy": SHARE, "pipe_fmaheavy_instructions": SUM},
        "sm__inst_executed_pipe_fmaheavy",
    ),
    _sm(
        "sm__pipe_fp64_cycles_active_realtime",
        {"pipe_fp64": SHARE, "pipe_fp64_cycles": SUM},
        "sm__pipe_fp64_cycles_active",
    ),
    Metric(("FBSP.TriageCompute.dramc__throughput", "dram__throughput"), {"dram_throughput": SHARE}),
    Metric(("FBSP.TriageCompute.dramc__write_throughput", "dram__write_throughput"), {"dram_write_throughput": SHARE}),
    Metric(("LTS.TriageCompute.lts__t_sector_throughput", "lts__t_sectors"), {"l2_throughput": SHARE}),
    Metric(
        (
            "SM_A.TriageCompute.l1tex__data_pipe_lsu_wavefronts_mem_shared",
            "l1tex__data_pipe_lsu_wavefronts_mem_shared",
        ),
        {"shared_wavefronts": SUM},
    ),
    Metric(
        (
            "SM_A.TriageCompute.sm__thread_inst_executed_pred_on_realtime",
            "sm__thread_inst_executed_pred_on_realtime",
            "smsp__thread_inst_executed_pred_on",
        ),
        {"thread_instructions": SUM},
    ),
    Metric(
        ("SM_A.TriageCompute.sm__inst_executed_pipe_xu_realtime", "sm__inst_executed_pipe_xu"),
        {"pipe_xu": SHARE, "pipe_xu_instructions": SUM},
    ),
    Metric(("dram__bytes_read",), {"dram_read_bytes": SUM}),
    Metric(("dram__bytes_write",), {"dram_write_bytes": SUM}),
    Metric(("lts__t_bytes",), {"l2_bytes": SUM}),
    Metric(("PCI.TriageCompute.pcie__read_bytes", "pcie__read_bytes"), {"pcie_rx_bytes": SUM}),
    Metric(("PCI.TriageCompute.pcie__write_bytes", "pcie__write_bytes"), {"pcie_tx_bytes": SUM}),
    Metric(
        (
            _sum_of("NVLRX.TriageCompute.nvlrx__bytes_packet_{}_data_user", "request", "response"),
            "nvlrx__bytes_data_user",
        ),
        {"nvlink_rx_bytes": SUM},
    ),
    Metric(
        (
            _sum_of("NVLTX.TriageCompute.nvltx__bytes_packet_{}_data_user", "request", "response"),
            "nvltx__bytes_data_user",
        ),
        {"nvlink_tx_bytes": SUM},
    ),
    Metric(("SM_B.TriageCompute.l1tex__t_sectors", "l1tex__t_sectors"), {"l1_sectors": SUM}),
    Metric(("SM_B.TriageCompute.l1tex__t_sectors_lookup_hit", "l1tex__t_sectors_lookup_hit"), {"l1_sector_hits": SUM}),
    Metric(
        (
            "SM_C.TriageCompute.smsp__pipe_tensor_op_dmma_cycles_active",
            "SM_C.TriageCompute.smsp__pipe_tensor_subpipe_dmma_cycles_active",
            "smsp__pipe_tensor_op_dmma_cycles_active",
        ),
        {"pipe_tensor_dfma": SHARE},
    ),
)
"""What is asked of every chip, in order of worth: earlier ones go into earlier passes."""

MEMORY_REQUESTS: tuple[Metric, ...] = (
    Metric(
        ("TPC.TriageCompute.sm__inst_executed_pipe_lsu_realtime", "sm__inst_executed_pipe_lsu"),
        {"pipe_lsu_instructions": SUM},
    ),
    Metric(("LTS.TriageCompute.lts__t_requests", "lts__t_requests"), {"l2_requests": SUM}),
    Metric(("LTS.TriageCompute.lts__t_sectors_op_write", "lts__t_sectors_op_write"), {"l2_write_sectors": SUM}),
    Metric(("SM_B.TriageCompute.l1tex__t_requests", "l1tex__t_requests"), {"l1_requests": SUM}),
)
"""How memory is asked, beside how many bytes move: an energy model wants them, at the price of more passes."""


def metrics_of(wanted: Collection[str]) -> tuple[Metric, ...]:
    """:data:`METRICS` cut to some canonical counters: CUPTI evaluates each of them in every sample.

    Into every pass go the SMs' activity, which tells the work's begin and end, and what is counted: of shares alone
    nobody can say whether two passes saw the same work.
    """
    found = []
    for metric in METRICS:
        gives = {name: ending for name, ending in metric.gives.items() if name in wanted}
        if gives:
            common = metric is METRICS[0] or SUM in gives.values()
            found.append(replace(metric, gives=gives, anchor=metric.anchor and common))
    return tuple(found)


class Chip(Protocol):
    """What a plan needs to know of a chip (:class:`joulemark.collect.cupti_device.CuptiDevice`, or a fake)."""

    library: str
    chip: str

    def metric_sets(self) -> tuple[str | None, ...]: ...
    def base_metrics(self, metric_set: str | None) -> frozenset[str]: ...
    def fits(self, metrics: Sequence[str], metric_set: str | None) -> bool: ...


@dataclass(frozen=True)
class Group:
    """Counters of one pass.

    Args:
        name: as ``pass1``.
        metrics: metric with the name that this chip gives it.
        metric_set: that the names are of; None for the open set.
    """

    name: str
    metrics: tuple[tuple[Metric, str], ...]
    metric_set: str | None = None

    @property
    def counters(self) -> tuple[str, ...]:
        """Canonical names that it gives."""
        return tuple(name for metric, _ in self.metrics for name in metric.gives)

    def raw(self) -> dict[str, str]:
        """Canonical name → CUPTI's, with submetrics, ``+`` between those that are added."""
        return {
            name: "+".join(part + ending for part in found.split("+"))
            for metric, found in self.metrics
            for name, ending in metric.gives.items()
        }

    def full_names(self) -> tuple[str, ...]:
        """CUPTI's full names, each once, in order."""
        return tuple(dict.fromkeys(part for raw in self.raw().values() for part in raw.split("+")))

    def only(self, metrics: Sequence[tuple[Metric, str]]) -> Group:
        """The group with some of its metrics."""
        return replace(self, metrics=tuple(metrics))


@dataclass(frozen=True)
class Plan:
    """Passes for a chip.

    Args:
        groups: in order of worth.
        missing: canonical name → why no pass gives it.
    """

    groups: tuple[Group, ...]
    missing: Mapping[str, str]


def plan(device: Chip, metrics: Sequence[Metric] = METRICS) -> Plan:
    """Packs the metrics that a chip knows into as few passes as CUPTI says it can count them in.

    A pass takes, in order of worth, every metric that still fits, and then the anchors that earlier passes have.
    """
    groups: list[Group] = []
    waiting = list(metrics)
    missing: dict[str, str] = {}
    for metric_set in device.metric_sets():
        known = device.base_metrics(metric_set)
        named = [(metric, name) for metric in metrics if (name := _name(device, metric, known, metric_set))]
        there = [(metric, name) for metric, name in named if metric in waiting]
        anchors = [(metric, name) for metric, name in named if metric.anchor]
        while there:
            group = _packed(device, Group(f"pass{len(groups) + 1}", (), metric_set), there, anchors)
            taken = {metric for metric, _ in there} & {metric for metric, _ in group.metrics}
            if not taken:
                break
            groups.append(group)
            waiting = [metric for metric in waiting if metric not in taken]
            there = [pair for pair in there if pair[0] not in taken]
        missing |= {name: f"{device.chip} counts it in no single pass" for metric, _ in there for name in metric.gives}
    for metric in waiting:
        reason = f"CUPTI {device.library} knows no such metric on {device.chip}"
        missing |= {name: missing.get(name, reason) for name in metric.gives}
    given = {name for group in groups for name in group.counters}
    return Plan(tuple(groups), {name: reason for name, reason in missing.items() if name not in given})


def _name(device: Chip, metric: Metric, known: frozenset[str], metric_set: str | None) -> str | None:
    """The first of a metric's names that the chip knows and can count at all; else the first that it knows."""
    names = [name for name in metric.names if all(part in known for part in name.split("+"))]
    countable = (name for name in names if device.fits(metric.full_names(name), metric_set))
    return next(countable, next(iter(names), None))


def _packed(
    device: Chip, group: Group, there: Sequence[tuple[Metric, str]], anchors: Sequence[tuple[Metric, str]]
) -> Group:
    """A pass of the metrics that wait, with at least one anchor to know the work by, and with all that fit."""
    wanted = [*anchors[:1], *(pair for pair in there if pair not in anchors[:1]), *anchors]
    for pair in wanted:
        if pair not in group.metrics:
            more = group.only([*group.metrics, pair])
            if device.fits(more.full_names(), more.metric_set):
                group = more
    return group
