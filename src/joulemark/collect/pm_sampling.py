"""PM sampling: hardware counters over time while the whole model runs, through CUPTI.

The GPU's performance monitors write a record per interval; nothing is replayed or serialized, and a run costs about
nothing. What one pass can count is limited, so the counters are packed into groups by CUPTI's own word
(:func:`plan`), and each group is *proved by decoding* once on the device (:func:`prove`): CUPTI accepts groups that
it then cannot decode.

Source: CUPTI documentation, "CUPTI PM Sampling API"; metric names as CUPTI lists them for each chip.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from joulemark.collect.cupti_device import Samples, SamplingSettings
from joulemark.counter_series import COUNTERS, CounterSeries, Tier
from joulemark.errors import CountersUnreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

SHARE = ".avg.pct_of_peak_sustained_elapsed"
SUM = ".sum"
_ELAPSED = ".sum.peak_sustained_elapsed"
_PER_CENT = 100.0
_NS = 1e-9
_NO_TIME_INTERVAL = ("GA100", "TU1")
_SYSTEM_CLOCK_HZ = 1.6e9
"""Only to turn an interval into clock cycles on chips that know no other; what a sample lasted is read, not assumed."""

INTERVAL_S = 100e-6
_PROOF_INTERVAL_S = 100e-6
_PROOF_S = 0.02
_MIN_SAMPLES_OF_WORK = 20


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

    def on(self, known: frozenset[str]) -> str | None:
        """Its name among those that a chip knows."""
        return next((name for name in self.names if all(part in known for part in name.split("+"))), None)


def _sm(name: str, gives: Mapping[str, str], *older: str) -> Metric:
    return Metric((f"TPC.TriageCompute.{name}", *older), gives, anchor=True)


def _sum_of(name: str, *parts: str) -> str:
    return "+".join(name.format(part) for part in parts)


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
        "tpc__warps_active_realtime",
        {"warps_active": SHARE, "warp_cycles": SUM},
        "TPC.TriageCompute.tpc__warps_active_shader_cs_realtime",
        "sm__warps_active",
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


class Sampling(Protocol):
    """One sampling of a device (:class:`joulemark.collect.cupti_device.Sampler`)."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def read(self) -> Samples: ...
    def close(self) -> None: ...


class PmDevice(Protocol):
    """What this module needs of a device (:class:`joulemark.collect.cupti_device.CuptiDevice`, or a fake)."""

    library: str
    chip: str

    def metric_sets(self) -> tuple[str | None, ...]: ...
    def base_metrics(self, metric_set: str | None) -> frozenset[str]: ...
    def fits(self, metrics: Sequence[str], metric_set: str | None) -> bool: ...
    def sampler(self, metrics: Sequence[str], metric_set: str | None, settings: SamplingSettings) -> Sampling: ...


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


def plan(device: PmDevice, metrics: Sequence[Metric] = METRICS) -> Plan:
    """Packs the metrics that a chip knows into as few passes as CUPTI says it can count them in.

    A pass takes, in order of worth, every metric that still fits, and then the anchors that earlier passes have.
    """
    groups: list[Group] = []
    waiting = list(metrics)
    missing: dict[str, str] = {}
    for metric_set in device.metric_sets():
        known = device.base_metrics(metric_set)
        there = [(metric, name) for metric in waiting if (name := metric.on(known)) is not None]
        anchors = [(metric, name) for metric in metrics if metric.anchor and (name := metric.on(known)) is not None]
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


def _packed(
    device: PmDevice, group: Group, there: Sequence[tuple[Metric, str]], anchors: Sequence[tuple[Metric, str]]
) -> Group:
    """A pass of the metrics that wait, with at least one anchor to know the work by, and with all that fit."""
    wanted = [*anchors[:1], *(pair for pair in there if pair not in anchors[:1]), *anchors]
    for pair in wanted:
        if pair not in group.metrics:
            more = group.only([*group.metrics, pair])
            if device.fits(more.full_names(), more.metric_set):
                group = more
    return group


def settings_for(chip: str, interval_s: float) -> SamplingSettings:
    """How to sample a chip (``GH100``) at an interval in s."""
    by_time = not chip.startswith(_NO_TIME_INTERVAL)
    interval = interval_s * 1e9 if by_time else interval_s * _SYSTEM_CLOCK_HZ
    return SamplingSettings(interval=max(1, round(interval)), by_time=by_time)


def record_samples(
    device: PmDevice, group: Group, settings: SamplingSettings, run: Callable[[], object]
) -> tuple[Samples, float]:
    """Samples a group while ``run`` runs, with a sampler of its own.

    Returns:
        What was decoded, and the time of ``run``, in s.

    Raises:
        DeviceError: the device refuses, or what it sampled cannot be decoded.
    """
    sampler = device.sampler(group.full_names(), group.metric_set, settings)
    try:
        sampler.start()
        began = time.perf_counter()
        try:
            run()
        finally:
            run_s = time.perf_counter() - began
            sampler.stop()
        return sampler.read(), run_s
    finally:
        sampler.close()


def prove(device: PmDevice, group: Group, exercise: Callable[[], object]) -> tuple[list[Group], dict[str, str]]:
    """Samples and decodes a group once; what does not decode is halved until it does.

    Args:
        device: to sample.
        group: to prove.
        exercise: work that keeps the SMs busy for a while, and returns when it is done.

    Returns:
        The groups that decode, and per counter of those that do not the reason.

    Raises:
        DeviceError: the device refuses for a reason that a smaller group does not change.
    """
    try:
        samples, run_s = record_samples(device, group, settings_for(device.chip, _PROOF_INTERVAL_S), exercise)
        _check(series_of(device, group, samples, run_s, _PROOF_INTERVAL_S))
    except CountersUnreadable as error:
        anchor, rest = group.metrics[:1], group.metrics[1:]
        if len(rest) <= 1:
            return [], dict.fromkeys(group.counters, error.what)
        half = (len(rest) + 1) // 2
        first, reasons = prove(device, group.only([*anchor, *rest[:half]]), exercise)
        second, more = prove(device, group.only([*anchor, *rest[half:]]), exercise)
        return first + second, reasons | more
    return [group], {}


def series_of(device: PmDevice, group: Group, samples: Samples, run_s: float, interval_s: float) -> CounterSeries:
    """The samples under their canonical names, shares as shares, times in s from the first sample on.

    Raises:
        CountersUnreadable: there is no sample, or time does not go forward.
    """
    if not len(samples.start):
        raise CountersUnreadable(
            f"PM sampling decoded no sample in {run_s:.3g} s of group {group.name}", "try again in a fresh process"
        )
    if (samples.end <= samples.start).any() or (np.diff(samples.start) <= 0).any():
        raise CountersUnreadable(f"the time stamps of group {group.name} do not go forward", "try a longer interval")
    column = {name: samples.values[:, index] for index, name in enumerate(group.full_names())}
    values: dict[str, NDArray[np.float64]] = {}
    for name, raw in group.raw().items():
        total = np.sum([column[part] for part in raw.split("+")], axis=0)
        values[name] = total / _PER_CENT if COUNTERS[name].unit == "1" else total
    first = int(samples.start[0])
    return CounterSeries(
        tier="pm_sampling",
        group=group.name,
        start_s=_seconds(samples.start, first),
        end_s=_seconds(samples.end, first),
        values=values,
        units={name: COUNTERS[name].unit for name in values},
        clock="pm_timestamp",
        raw=group.raw(),
        source={
            "library": f"CUPTI {device.library}",
            "chip": device.chip,
            "metric_set": group.metric_set or "none named",
            "interval_s": interval_s,
            "run_s": run_s,
            "first_tick": first,
            "overflow": float(samples.overflow),
        },
    )


def _seconds(ticks: NDArray[np.int64], first: int) -> NDArray[np.float64]:
    return np.asarray(ticks - first, np.float64) * _NS


def _check(series: CounterSeries) -> None:
    """A series over work in which no counter moved is no measurement.

    Raises:
        CountersUnreadable: everything reads 0, or a value is no number.
    """
    broken = [name for name, samples in series.values.items() if not np.isfinite(samples).all()]
    if broken:
        raise CountersUnreadable(f"PM sampling gave no number for {', '.join(broken)}")
    if len(series) >= _MIN_SAMPLES_OF_WORK and not any(samples.any() for samples in series.values.values()):
        raise CountersUnreadable(f"all counters of group {series.group} read 0 while the GPU worked")


class PmSamplingSource:
    """Counters by PM sampling on one device; every group has been proved.

    Args:
        device: to sample.
        exercise: work that keeps the SMs busy for some 20 ms, and returns when it is done.
        interval_s: between samples, in s.

    Raises:
        DeviceError: no group can be sampled; its type says why.
    """

    tier: Tier = "pm_sampling"

    def __init__(self, device: PmDevice, exercise: Callable[[], object], interval_s: float = INTERVAL_S) -> None:
        self._device, self._interval_s = device, interval_s
        planned = plan(device)
        if not planned.groups:
            raise CountersUnreadable(f"CUPTI {device.library} plans no pass for {device.chip}", "use a newer CUPTI")
        proved: list[Group] = []
        spoiled: dict[str, str] = {}
        for group in planned.groups:
            decoded, reasons = prove(device, group, exercise)
            proved += decoded
            spoiled |= reasons
        if not proved:
            said = next(iter(spoiled.values()))
            raise CountersUnreadable(
                f"no group of counters decodes: {said}", "try again in a fresh process, or a newer CUPTI"
            )
        named = [replace(group, name=f"pass{number}") for number, group in enumerate(proved, 1)]
        self._groups = {group.name: group for group in named}
        given = {name for group in named for name in group.counters}
        missing = dict(planned.missing) | {name: f"does not decode: {why}" for name, why in spoiled.items()}
        self.missing = {name: reason for name, reason in missing.items() if name not in given}

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the passes."""
        return tuple(self._groups)

    def counters(self, group: str) -> tuple[str, ...]:
        """Canonical names that a pass gives."""
        return self._groups[group].counters

    def record(self, group: str, run: Callable[[], object]) -> CounterSeries:
        """See :meth:`joulemark.counter_series.CounterSource.record`.

        Raises:
            CountersUnreadable: nothing was decoded, or every counter reads 0.
            DeviceError: the device refuses.
        """
        wanted = self._groups[group]
        settings = settings_for(self._device.chip, self._interval_s)
        samples, run_s = record_samples(self._device, wanted, settings, run)
        series = series_of(self._device, wanted, samples, run_s, self._interval_s)
        _check(series)
        return replace(series, missing=self.missing)

    def close(self) -> None:
        """Nothing is held between two records."""
