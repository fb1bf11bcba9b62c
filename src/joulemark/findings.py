"""Rules that look at a record and say what its reader must know about the figures (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from joulemark.metrics import Metric, find, format_value
from joulemark.records import Conditions, Finding, Record, Value
from joulemark.stats import Summary, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STRETCH_GAP = 0.03
"""Difference between stretches of steady steps, over their median, from which on they were two states."""
UNSTABLE_IQR = 0.05
"""Interquartile range over the median beyond which a time is unstable."""
REASON_SHARE = 0.05
"""Share of the samples in which a clock-event reason must be active to count."""
COLD_CLOCK = 0.9
"""Share of the highest SM clock below which a median clock is cold."""
WAITING = 0.5
"""Device time without launches over device time with them, below which the step waits for its launches."""
COUNTERS_DISTURB = 0.05
"""Change of a step's time beside the counters from which on a reader must know of it."""
COUNTERS_COST_TOLD = 0.04
"""Width of the interval of that change up to which it is told: ±2 %, what counting is held to (docs/counters.md)."""
PROCESS_SPREAD = 0.02
"""What two processes are assumed to differ by, relative to the figure, where it was not measured."""

_STRETCHES = ("stretch_time_s", "stretch_steps", "device_time_s")
_THROTTLING = ("thermal", "hw_slowdown", "power_brake")
_HARMLESS = ("idle",)


def findings_of(record: Record) -> tuple[Finding, ...]:
    """Everything that the rules say about a record that was measured."""
    return (
        *unstable(record.metrics, record.samples),
        *bistable(record),
        *throttled(record.conditions),
        *cold_clocks(record.conditions),
        *host_bound(record.metrics),
        *sampler_disturbs(record.metrics),
        *counters_cost(record.metrics),
        *busy_beyond_step(record.metrics),
    )


def unstable(metrics: Mapping[str, Value], samples: Mapping[str, Sequence[float]]) -> list[Finding]:
    """Flag a time whose interquartile range is more than 5 % of its median, of at least five samples.

    Args:
        metrics: figures by metric name.
        samples: raw samples by metric name, in s.
    """
    found = instability_of(metrics, samples)
    if found is None:
        return []
    metric, summary = found
    message = (
        f"{metric.title} varies: interquartile range {summary.iqr / summary.median:.1%} of the median "
        f"{format_value(summary.median, metric.unit)} over {summary.n} samples"
    )
    remedy = (
        "stop what else runs on this machine, or measure longer (without --bench-quick, or with more --bench-budget)"
    )
    return [Finding("unstable", message, remedy, flags=True)]


def instability_of(
    metrics: Mapping[str, Value], samples: Mapping[str, Sequence[float]]
) -> tuple[Metric, Summary] | None:
    """The time that is unstable, and its samples in short; None where it is steady; see :func:`unstable`."""
    device = metrics.get("device_time_s")
    name = "host_time_s" if device is None or device.value is None else "device_time_s"
    series = samples.get(name, ())
    if len(series) < 5:
        return None
    summary = summarize(series)
    if summary.median <= 0 or summary.iqr / summary.median <= UNSTABLE_IQR:
        return None
    return find(name), summary


def bistable(record: Record) -> list[Finding]:
    """Flag a process whose stretches of steady steps took times that differ by more than 3 % and do not overlap.

    The machine was in two states while the case ran: the figure, the median of the stretches, is that of one of them.
    Stretches overlap where the middle halves of their samples do. Of several processes the worst is named.
    """
    worst: tuple[float, str] | None = None
    by_process = [record.samples_by_process(name) or [] for name in _STRETCHES]
    for medians, steps, times in zip(*by_process, strict=False):
        if len(medians) < 2 or min(medians) <= 0 or sum(steps) != len(times):
            continue
        gap = (max(medians) - min(medians)) / sorted(medians)[len(medians) // 2]
        if gap > STRETCH_GAP and _apart(times, steps) and (worst is None or gap > worst[0]):
            worst = gap, ", ".join(format_value(one, "s") for one in medians)
    if worst is None:
        return []
    message = f"steady steps took {worst[1]} in stretches of one process ({worst[0]:.1%} apart)"
    remedy = "a state of the machine changed while the case ran: measure several processes (--bench-processes)"
    return [Finding("bistable", message, remedy, flags=True)]


def _apart(times: Sequence[float], steps: Sequence[float]) -> bool:
    """Whether the middle halves of the slowest and the fastest stretch do not meet."""
    ends = np.cumsum(steps).astype(int)
    halves = [np.quantile(part, (0.25, 0.75)) for part in np.split(np.asarray(times), ends[:-1]) if part.size]
    return float(max(low for low, _ in halves)) > float(min(high for _, high in halves))


def throttled(conditions: Conditions | None) -> list[Finding]:
    """Flag a window in which heat, a power brake, a hardware slowdown or the power limit held the clocks down."""
    if conditions is None:
        return []
    found = []
    active = {name: conditions.reasons.get(name, 0.0) for name in _THROTTLING}
    worst = {name: share for name, share in active.items() if share > REASON_SHARE}
    if worst:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in worst.items())
        message = f"the GPU was throttled ({shares} of {conditions.n} samples{_clock_and_heat(conditions)})"
        found.append(
            Finding("throttled", message, "let it cool down, and check its cooling and power supply", flags=True)
        )
    capped = conditions.reasons.get("power_cap", 0.0)
    if capped > REASON_SHARE:
        share = f"{capped:.0%} of {conditions.n} samples"
        message = f"the power limit held the clocks down in {share}{_clock_and_heat(conditions)}"
        remedy = "compare it only with runs under the same power limit, or lock a lower clock"
        found.append(Finding("power_capped", message, remedy, flags=True))
    return found


def _clock_and_heat(conditions: Conditions) -> str:
    parts = []
    if conditions.sm_clock_hz is not None:
        highest = "" if conditions.max_sm_clock_hz is None else f" of {format_value(conditions.max_sm_clock_hz, 'Hz')}"
        parts.append(f"SM clock {format_value(conditions.sm_clock_hz, 'Hz')}{highest}")
    if conditions.temperature_c is not None:
        parts.append(format_value(conditions.temperature_c, "degC"))
    return "".join(f", {part}" for part in parts)


def cold_clocks(conditions: Conditions | None) -> list[Finding]:
    """Flag a median SM clock under 90 % of the highest for which the driver names no reason."""
    if conditions is None or not conditions.sm_clock_hz or not conditions.max_sm_clock_hz:
        return []
    if any(share > REASON_SHARE for name, share in conditions.reasons.items() if name not in _HARMLESS):
        return []
    if conditions.sm_clock_hz >= COLD_CLOCK * conditions.max_sm_clock_hz:
        return []
    clock, highest = (format_value(hz, "Hz") for hz in (conditions.sm_clock_hz, conditions.max_sm_clock_hz))
    message = f"the SM clock was {clock} of {highest}, and the driver names no reason for it"
    return [Finding("cold_clocks", message, "warm up longer: the GPU had not reached its clocks", flags=True)]


def host_bound(metrics: Mapping[str, Value]) -> list[Finding]:
    """Say that the device waits for launches: replayed as one graph, the step takes less than half its time."""
    plain, graph = metrics.get("device_time_s"), metrics.get("device_time_graph_s")
    if plain is None or graph is None or not plain.value or graph.value is None:
        return []
    if graph.value >= WAITING * plain.value:
        return []
    message = (
        f"the device waits for launches in {1 - graph.value / plain.value:.0%} of the step: "
        f"{format_value(plain.value, 's')}, {format_value(graph.value, 's')} as a CUDA graph"
    )
    return [Finding("host_bound", message, "use the graph or compile mode, or a bigger batch")]


def sampler_disturbs(metrics: Mapping[str, Value]) -> list[Finding]:
    """Steps beside the power sampler that took another time than without it, by more than a tenth."""
    found = metrics.get("sampler_slowdown")
    if found is None or found.value is None or abs(found.value) <= 0.1:
        return []
    longer = "longer" if found.value > 0 else "shorter"
    return [
        Finding(
            "power_step_time",
            f"steps in the energy window took {abs(found.value):.0%} {longer} than in the timing pass",
            "energy per item is of those steps; a step that waits for the host varies with the host's load",
        )
    ]


def counters_cost(metrics: Mapping[str, Value]) -> list[Finding]:
    """Steps beside the counters that took another time by more than 5 %; or say that a sweep cannot tell their cost.

    It cannot where the step waits for its launches (see :func:`host_bound`), or where the interval is wider than ±2 %:
    a few windows of such steps differ by more than counting costs.
    """
    cost = metrics.get("counters_overhead")
    if cost is None or cost.value is None:
        return []
    lo, hi = cost.interval or (cost.value, cost.value)
    waits = bool(host_bound(metrics))
    if waits or hi - lo > COUNTERS_COST_TOLD:
        why = "the step waits for its launches" if waits else "its windows differ by more"
        message = f"what counting costs is not told by {cost.value:+.1%} [{lo:+.1%}, {hi:+.1%}]: {why}"
        remedy = "levels are of the counted steps; hundreds of windows in turns tell their cost (docs/counters.md)"
        return [Finding("counters_cost_untold", message, remedy)]
    if abs(cost.value) <= COUNTERS_DISTURB:
        return []
    longer = "longer" if cost.value > 0 else "shorter"
    message = f"steps beside the counters took {abs(cost.value):.0%} {longer} than without them"
    return [Finding("counters_step_time", message, "their levels are of those steps")]


def busy_beyond_step(metrics: Mapping[str, Value]) -> list[Finding]:
    """Flag a profiled step in which the device works longer than an unprofiled step lasts, beyond the interval.

    The two come from two processes, which are assumed to differ by 2 % on top of it.
    """
    exposed, step = metrics.get("exposed_overhead_unprofiled_s"), metrics.get("device_time_s")
    if exposed is None or step is None or not step.value or exposed.interval is None:
        return []
    if exposed.interval[1] >= 0 or exposed.value is None or exposed.value >= -PROCESS_SPREAD * step.value:
        return []
    message = (
        f"in a profiled step the device works {format_value(-exposed.value, 's')} longer than an unprofiled step of "
        f"{format_value(step.value, 's')} lasts"
    )
    return [Finding("busy_exceeds_step", message, "measure again: the clocks or the work differed", flags=True)]


def from_warning(category: str, message: str) -> Finding:
    """A Python warning that a benchmark gave, as a Finding.

    Args:
        category: name of its class, ``FutureWarning``.
        message: its text; blanks and line breaks are drawn together.
    """
    return Finding("warning", f"{category}: {' '.join(message.split())}")
