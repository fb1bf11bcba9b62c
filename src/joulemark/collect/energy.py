"""From readings of a counter and of a power sensor to energy and mean power over stretches of time (pure)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from joulemark.records import Conditions, Finding, Value
from joulemark.stats import ratio_interval_of_means

if TYPE_CHECKING:
    from collections.abc import Sequence

    from joulemark.errors import DeviceError

MIN_UPDATES = 5
"""Counter updates per sub-window: the time of an edge is known to a few ms, 1 % of five updates on an H200."""

SHORT_ALIGNED_S = 2.0
SHORT_ALIGNED_UPDATES = 20
SHORT_UNALIGNED_S = 5.0
SENSORS_DISAGREE = 0.05
EDGES_VAGUE = 0.02
_EDGE_USABLE_S = 0.02
_POWER_CHUNK_S = 0.5
_POWER_MIN_READINGS = 20
_STUCK_S = 1.0


@dataclass(frozen=True)
class EnergyEdge:
    """An update of the energy counter.

    Args:
        t: best estimate of its time on ``time.perf_counter``, in s.
        energy_j: the counter after it, in J.
        uncertainty_s: half of the time in which it may have been.
    """

    t: float
    energy_j: float
    uncertainty_s: float = 0.0


@dataclass(frozen=True)
class PowerReading:
    """A reading of the power sensor: ``t`` on ``time.perf_counter`` in s, ``power_w`` in W."""

    t: float
    power_w: float


@dataclass(frozen=True)
class ConditionReading:
    """A reading of clocks, temperature and clock-event reasons; what could not be read is None."""

    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    temperature_c: float | None = None
    reasons: frozenset[str] | None = None


@dataclass(frozen=True)
class EnergyWindow:
    """Energy between two edges.

    Args:
        energy_j: in J.
        start, end: times of the edges, in s.
        window_s: the time between them.
        updates: of the counter in that time.
        uncertainty_s: of ``start`` and ``end`` together.
    """

    energy_j: float
    start: float
    end: float
    window_s: float
    updates: int = 0
    uncertainty_s: float = 0.0


@dataclass(frozen=True)
class EnergyReading:
    """What a stretch of time cost.

    Args:
        energy_j: per sub-window, in J; empty without an answer.
        window_s: lengths of the sub-windows, in s: together the effective window, without gaps.
        power_w: mean power over them; its interval is of the sub-windows' scatter (board gain of ±5 % not included).
        tier: the sensor: ``nvml_energy_counter``, ``nvml_power_integral`` or ``rapl``; None without an answer.
        aligned: whether the sub-windows open and close on updates of a counter.
        updates: updates of the counter inside.
        cross_check_ratio: energy by counter over energy by integrated power, None when one is missing.
        reason: why there is no answer, None when there is one.
        findings: what a reader must know of the figure.
        windows: (start, end) of the sub-windows, in s on the sampler's clock.
    """

    energy_j: list[float]
    window_s: list[float]
    power_w: Value
    tier: str | None = None
    aligned: bool = False
    updates: int = 0
    cross_check_ratio: float | None = None
    reason: str | None = None
    findings: tuple[Finding, ...] = ()
    windows: tuple[tuple[float, float], ...] = ()


@dataclass
class PowerWindow:
    """What was read over a stretch of time; complete once its ``with`` block has ended.

    Args:
        energy_tier, power_tier, power_is_instant: of the source.
        start, end: of the block on ``time.perf_counter``, in s; ``end`` is None while it runs.
        edges: updates of the energy counter.
        readings: of the power sensor.
        states: (time, conditions).
        missing: ``energy`` or ``power`` → why that sensor is not read.
        problem: what ended the sampling early, or kept it from beginning.
        problem_t: when it did; None for a source that did not open.
        sampler_cpu_s: CPU time of the sampling thread, in s.
    """

    energy_tier: str
    power_tier: str
    power_is_instant: bool = False
    start: float = 0.0
    end: float | None = None
    edges: list[EnergyEdge] = field(default_factory=list)
    readings: list[PowerReading] = field(default_factory=list)
    states: list[tuple[float, ConditionReading]] = field(default_factory=list)
    missing: dict[str, DeviceError] = field(default_factory=dict)
    problem: DeviceError | None = None
    problem_t: float | None = None
    sampler_cpu_s: float = 0.0
    _whole: EnergyReading | None = field(default=None, repr=False)

    @property
    def reading(self) -> EnergyReading:
        """The energy of the whole block (see :func:`energy_of`)."""
        if self.end is None:
            return _no_answer("the window is still open")
        if self._whole is None:
            self._whole = energy_of(self, self.start, self.end)
        return self._whole

    @property
    def window_s(self) -> float | None:
        """Length of the block, in s."""
        return None if self.end is None else self.end - self.start

    @property
    def measured_s(self) -> float | None:
        """The part of the block between the first and the last update that was used, in s; None without an answer."""
        return sum(self.reading.window_s) if self.reading.window_s else None

    @property
    def power_w(self) -> float | None:
        """Mean power, in W."""
        return self.reading.power_w.value

    @property
    def energy_j(self) -> float | None:
        """Energy of the whole block in J: mean power between updates times the block's length; None with a reason."""
        power, length = self.power_w, self.window_s
        return None if power is None or length is None else power * length

    @property
    def tier(self) -> str | None:
        """Which sensor answered."""
        return self.reading.tier

    @property
    def reason(self) -> str | None:
        """Why there is no answer; None when there is one."""
        return self.reading.reason

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What a reader must know of the figure."""
        return self.reading.findings

    @property
    def conditions(self) -> Conditions | None:
        """Clocks, temperature and clock-event reasons over the block; None where the source has no such sensors."""
        return conditions_of(self, self.start, float("inf") if self.end is None else self.end)


def aligned_windows(
    edges: Sequence[EnergyEdge], start: float, end: float, min_updates: int = MIN_UPDATES
) -> list[EnergyWindow]:
    """Consecutive windows from the first edge at or after ``start`` to the last at or before ``end``.

    Args:
        edges: in order of time.
        start, end: in s, on the edges' clock.
        min_updates: fewest updates of the counter in a window; the last window takes the remainder.

    Returns:
        Windows whose union has no gap; none with fewer than ``min_updates`` updates between the bounds. An edge
        whose time is known worse than 20 ms, and worse than most, opens and closes no window.
    """
    inside = [edge for edge in edges if start <= edge.t <= end]
    if not inside:
        return []
    worst = max(_EDGE_USABLE_S, median(edge.uncertainty_s for edge in inside))
    usable = [(i, edge) for i, edge in enumerate(inside) if edge.uncertainty_s <= worst]
    cuts = usable[:1]
    for number, edge in usable[1:]:
        if number - cuts[-1][0] >= min_updates:
            cuts.append((number, edge))
    if len(cuts) < 2:
        return []
    cuts[-1] = usable[-1]
    return [
        EnergyWindow(b.energy_j - a.energy_j, a.t, b.t, b.t - a.t, j - i, a.uncertainty_s + b.uncertainty_s)
        for (i, a), (j, b) in pairwise(cuts)
    ]


def integrate_power(readings: Sequence[PowerReading], start: float, end: float) -> float | None:
    """Energy in J from ``start`` to ``end`` by the trapezoid rule, the ends interpolated.

    Beyond the first and last reading their value is kept, for at most a twentieth of the stretch.

    Returns:
        None when the readings do not cover the stretch.
    """
    length = end - start
    times = [reading.t for reading in readings]
    if length <= 0 or not times or times[0] > start + length / 20 or times[-1] < end - length / 20:
        return None
    return _trapezoid(readings, times, start, end)


def _trapezoid(readings: Sequence[PowerReading], times: Sequence[float], start: float, end: float) -> float:
    inner = readings[bisect_right(times, start) : bisect_left(times, end)]
    points = [(start, _power_at(readings, times, start))]
    points += [(reading.t, reading.power_w) for reading in inner]
    points += [(end, _power_at(readings, times, end))]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))


def _power_at(readings: Sequence[PowerReading], times: Sequence[float], t: float) -> float:
    """Linear interpolation, constant beyond the ends."""
    after = bisect_left(times, t)
    if after == 0:
        return readings[0].power_w
    if after == len(readings):
        return readings[-1].power_w
    a, b = readings[after - 1], readings[after]
    return a.power_w + (b.power_w - a.power_w) * (t - a.t) / (b.t - a.t)


def energy_of(window: PowerWindow, start: float, end: float) -> EnergyReading:
    """Energy and mean power from ``start`` to ``end``, by the best sensor that answered.

    The counter is read between its own updates, at least :data:`MIN_UPDATES` per sub-window; without a counter,
    power is integrated. Nothing is an answer where the sensors do not resolve the stretch: then every figure is
    None with its reason, never 0 J. Figures of NVML carry the board's gain error of about ±5 % besides the interval.

    Args:
        window: as from :meth:`PowerSampler.window`.
        start, end: in s, on the sampler's clock, inside the window.
    """
    if window.problem is not None and (window.problem_t is None or window.problem_t <= end):
        return _no_answer(str(window.problem))
    inside = [edge.energy_j for edge in window.edges if start <= edge.t <= end]
    if any(b < a for a, b in pairwise(inside)):
        return _no_answer("the energy counter went backwards: was the driver reloaded?")
    parts = aligned_windows(window.edges, start, end)
    if parts:
        return _by_counter(window, parts)
    if "energy" in window.missing or _stuck(window, start, end):
        return _by_power(window, start, end)
    return _no_answer(
        f"window shorter than counter resolution: {end - start:.3g} s hold {len(inside)} updates, "
        f"{MIN_UPDATES + 1} are needed"
    )


def _stuck(window: PowerWindow, start: float, end: float) -> bool:
    """Whether a counter that can be read stands still although there was time for many updates."""
    return not window.edges and end - start > _STUCK_S


def _by_counter(window: PowerWindow, parts: Sequence[EnergyWindow]) -> EnergyReading:
    energies, lengths = [part.energy_j for part in parts], [part.window_s for part in parts]
    mean, interval = ratio_interval_of_means(energies, lengths)
    ratio = _cross_check(window, sum(energies), parts[0].start, parts[-1].end)
    return EnergyReading(
        energies,
        lengths,
        Value(mean, "W", interval, n=len(parts), tier=window.energy_tier),
        window.energy_tier,
        aligned=True,
        updates=sum(part.updates for part in parts),
        cross_check_ratio=ratio,
        findings=_counter_findings(parts, ratio),
        windows=tuple((part.start, part.end) for part in parts),
    )


def _counter_findings(parts: Sequence[EnergyWindow], ratio: float | None) -> tuple[Finding, ...]:
    length, updates = sum(part.window_s for part in parts), sum(part.updates for part in parts)
    vague = parts[0].uncertainty_s / 2 + parts[-1].uncertainty_s / 2
    findings = []
    if length < SHORT_ALIGNED_S or updates < SHORT_ALIGNED_UPDATES:
        findings.append(_short(f"{length:.2g} s with {updates} updates of the counter; 2 s and 20 updates are needed"))
    elif vague > EDGES_VAGUE * length:
        findings.append(_short(f"{length:.2g} s whose ends are known to {vague:.2g} s; the sampler came late"))
    if ratio is not None and abs(ratio - 1) > SENSORS_DISAGREE:
        findings.append(
            Finding(
                "power_sensors_disagree",
                f"the energy counter gives {ratio:.3f} times the integral of power",
                "repeat with a longer window; over steady work the two agree within 5 %",
                flags=True,
            )
        )
    return tuple(findings)


def _cross_check(window: PowerWindow, energy_j: float, start: float, end: float) -> float | None:
    """Counter over integral; an average over 1 s is compared over long windows only."""
    if not window.power_is_instant and end - start < SHORT_UNALIGNED_S:
        return None
    inside = sum(start <= reading.t <= end for reading in window.readings)
    integral = integrate_power(window.readings, start, end) if inside >= _POWER_MIN_READINGS else None
    return energy_j / integral if integral else None


def _by_power(window: PowerWindow, start: float, end: float) -> EnergyReading:
    """Integrated power in pieces of at least half a second; they are less independent than a counter's."""
    why = str(window.missing["energy"]) if "energy" in window.missing else "the energy counter does not move"
    if "power" in window.missing:
        return _no_answer(f"{why}; {window.missing['power']}")
    pieces = int((end - start) / _POWER_CHUNK_S)
    whole = integrate_power(window.readings, start, end) if pieces else None
    if whole == 0:
        return _no_answer(f"{why}; the power sensor reads 0 W throughout, which no board draws")
    if whole is None:
        seen = sum(start <= reading.t <= end for reading in window.readings)
        return _no_answer(
            f"{why}; window shorter than the power sensor's resolution: {end - start:.3g} s hold {seen} readings, "
            "0.5 s without gaps are needed"
        )
    times = [reading.t for reading in window.readings]
    bounds = [start + (end - start) * i / pieces for i in range(pieces + 1)]
    energies = [_trapezoid(window.readings, times, a, b) for a, b in pairwise(bounds)]
    lengths = [(end - start) / pieces] * pieces
    mean, interval = ratio_interval_of_means(energies, lengths)
    short = end - start < SHORT_UNALIGNED_S
    findings = (_short(f"{end - start:.2g} s of integrated power ({why}); 5 s are needed"),) if short else ()
    value = Value(mean, "W", interval, n=pieces, tier=window.power_tier)
    return EnergyReading(
        energies, lengths, value, window.power_tier, findings=findings, windows=tuple(pairwise(bounds))
    )


def _no_answer(reason: str) -> EnergyReading:
    return EnergyReading([], [], Value(None, "W"), reason=reason)


def _short(seen: str) -> Finding:
    return Finding(
        "energy_window_short",
        f"energy rests on {seen} for an error under 2 %",
        "give the case a larger budget or a larger batch",
        flags=True,
    )


def conditions_of(window: PowerWindow, start: float, end: float) -> Conditions | None:
    """Medians of clocks, highest temperature and share of samples per clock-event reason; None without samples."""
    states = [state for t, state in window.states if start <= t <= end]
    if not states:
        return None
    known = [state.reasons for state in states if state.reasons is not None]
    names = sorted(frozenset().union(*known)) if known else []
    return Conditions(
        sm_clock_hz=_median([state.sm_clock_hz for state in states]),
        memory_clock_hz=_median([state.memory_clock_hz for state in states]),
        max_sm_clock_hz=_median([state.max_sm_clock_hz for state in states]),
        temperature_c=max((state.temperature_c for state in states if state.temperature_c is not None), default=None),
        reasons={name: sum(name in reasons for reasons in known) / len(known) for name in names},
        n=len(states),
    )


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None
