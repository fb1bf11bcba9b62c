"""Windows of a calibration as they were measured: what ran, its counts, and the raw readings of the sensors.

A file of windows is JSONL: a header line that says on which GPU and how, then one line per window. Everything later,
energy and counts included, is recomputed from it, so that what is learnt of a kernel later needs no new window (pure).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import msgspec

from joulemark.collect.energy import (
    ConditionReading,
    EnergyEdge,
    EnergyReading,
    PowerReading,
    PowerWindow,
    conditions_of,
    energy_of,
)
from joulemark.energy.caches import Caches
from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.units import INSTRUCTION
from joulemark.errors import ConfigurationError, DeviceError, UnreadableInput, in_words
from joulemark.records import Amount, Conditions, Count, Finite, Json, Positive, canonical_json, converted

SCHEMA = "joulemark/calibration-windows/1"

BURST = "burst"
"""Duty whose launches are each followed by an idle device for about as long: a check, which enters no fit."""
_HOLDING = ("power_cap", "thermal", "hw_slowdown")
"""Clock-event reasons for which clocks fall under load."""
_HINDERED_SHARE, _SLOWED_SHARE = 0.5, 0.2
CLOCK_HELD = 0.985
"""SM clock over its highest from which on it counts as the highest: clocks have steps."""
_MOST_W, _MOST_RATE = 1e5, 1e21
"""No board draws as much and no unit counts so fast: a line that says so is damaged."""


class _Line(TypedDict):
    """A line of a window, with its types."""

    benchmark: str
    operands: str
    duty: str
    repeat: Count
    blocks: Count
    iterations: Count
    sleep_ns: Count
    launches: Count
    window_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]
    counts: dict[str, Amount]
    tiers: tuple[str, str]
    instant: bool
    edges: list[tuple[Finite, Finite, Amount]]
    power: list[tuple[Finite, Amount]]
    states: list[tuple[Finite, tuple[Amount | None, Amount | None, Amount | None, Finite | None, list[str] | None]]]
    problem: NotRequired[str | None]
    utc: NotRequired[str]


class _CountedLine(TypedDict):
    """A line of hardware counters, with its types."""

    benchmark: str
    counts: dict[str, Amount]
    counters: dict[str, Amount]


class _HeaderLine(TypedDict, total=False):
    """What is read of a header, with its types."""

    gpu: str | None
    gpu_uuid: str | None
    driver: str | None
    architecture: str
    sms: Positive
    mode: str
    caches: Caches | None


@dataclass(frozen=True)
class Point:
    """One cell of the plan.

    Args:
        benchmark: name in the suite.
        operands: ``zero``, ``constant``, ``random`` or ``normal``.
        duty: name of the level, see :data:`joulemark.energy.plan.DUTIES`.
        repeat: number of the repeat, from 0.
    """

    benchmark: str
    operands: str
    duty: str
    repeat: int

    @property
    def key(self) -> str:
        """``fp32/random/half/0``."""
        return f"{self.benchmark}/{self.operands}/{self.duty}/{self.repeat}"


def clock_held(conditions: Conditions | None) -> bool | None:
    """Whether the SM clock stayed at its highest; None where the clocks were not read."""
    if conditions is None or conditions.sm_clock_hz is None or conditions.max_sm_clock_hz is None:
        return None
    return conditions.sm_clock_hz >= CLOCK_HELD * conditions.max_sm_clock_hz


def hindered(power: PowerWindow, start: float, end: float) -> bool:
    """Whether the power limit, or heat, held the clocks down in a stretch of a window, or in a part of it.

    NVML goes on naming the limit for a moment after work that met it, so a name alone counts only if it stands in most
    samples; beside a lower clock it counts from a fifth of them on, as a median of clocks hides that.
    """
    conditions = conditions_of(power, start, end)
    if conditions is None:
        return False
    share = max(conditions.reasons.get(name, 0.0) for name in _HOLDING)
    if share > _HINDERED_SHARE or (share > 0 and clock_held(conditions) is False):
        return True
    states = [state for t, state in power.states if start <= t <= end]
    return sum(map(_is_slowed, states)) > _SLOWED_SHARE * len(states)


def _is_slowed(state: ConditionReading) -> bool:
    if not state.reasons or state.sm_clock_hz is None or state.max_sm_clock_hz is None:
        return False
    return not state.reasons.isdisjoint(_HOLDING) and state.sm_clock_hz < CLOCK_HELD * state.max_sm_clock_hz


@dataclass(frozen=True)
class CalibrationWindow:
    """One window of steady work.

    Args:
        point: what was asked for.
        blocks, iterations, sleep_ns: of each launch.
        launches: completed between ``start`` and ``end``.
        start, end: of the counted launches, in s on the readings' clock.
        counts: unit of the model → count between ``start`` and ``end``.
        power: readings of the sensors.
        utc: when it began.
    """

    point: Point
    blocks: int
    iterations: int
    sleep_ns: int
    launches: int
    start: float
    end: float
    counts: Mapping[str, float]
    power: PowerWindow
    utc: str = ""

    def recounted(self, architecture: str) -> CalibrationWindow:
        """With what this version knows of the kernel, from the geometry and number of its launches.

        Instructions per iteration, read from the machine code when it ran, are kept.

        Raises:
            ValueError: they are not there.
        """
        benchmark = SUITE.get(self.point.benchmark)
        if benchmark is None or not benchmark.runs_on(architecture) or not benchmark.work(architecture):
            return self
        if not self.counts.get(INSTRUCTION):
            raise ValueError(f"{self.point.key} counts no instructions")
        each = benchmark.counts_per_launch(architecture, self.blocks, self.iterations, 0)
        counts = {unit: count * self.launches for unit, count in each.items()}
        over = benchmark.counts_over(self.blocks, self.duration_s * (0.5 if self.point.duty == BURST else 1.0))
        return replace(self, counts=counts | over | {INSTRUCTION: self.counts[INSTRUCTION]})

    @property
    def begun(self) -> datetime | None:
        """When it began; None where that is not known.

        Raises:
            ValueError: ``utc`` is no time.
        """
        if not self.utc:
            return None
        at = datetime.fromisoformat(self.utc)
        return at if at.tzinfo else at.replace(tzinfo=UTC)

    @property
    def duration_s(self) -> float:
        """Length of the counted stretch."""
        return self.end - self.start

    @property
    def rates(self) -> dict[str, float]:
        """Unit → count per second."""
        return {unit: count / self.duration_s for unit, count in self.counts.items()}

    @cached_property
    def reading(self) -> EnergyReading:
        """Energy and mean power between the counter's own updates inside the window."""
        return energy_of(self.power, self.start, self.end)

    @property
    def power_w(self) -> float | None:
        """Mean power; None with the reason in ``reading``."""
        return self.reading.power_w.value

    @cached_property
    def conditions(self) -> Conditions | None:
        """Clocks, temperature and clock-event reasons."""
        return conditions_of(self.power, self.start, self.end)

    @property
    def clock_hz(self) -> float | None:
        """Median SM clock."""
        return None if self.conditions is None else self.conditions.sm_clock_hz

    @property
    def clock_held(self) -> bool | None:
        """Whether the SM clock stayed at its highest; None where the clocks were not read."""
        return clock_held(self.conditions)

    @property
    def capped(self) -> bool:
        """Whether the power limit, or heat, held the clocks down."""
        return hindered(self.power, self.start, self.end)

    def to_json(self) -> dict[str, Json]:
        zero = self.start
        first = self.power.edges[0].energy_j if self.power.edges else 0.0
        return {
            "kind": "window",
            "benchmark": self.point.benchmark,
            "operands": self.point.operands,
            "duty": self.point.duty,
            "repeat": self.point.repeat,
            "blocks": self.blocks,
            "iterations": self.iterations,
            "sleep_ns": self.sleep_ns,
            "launches": self.launches,
            "utc": self.utc,
            "window_s": self.duration_s,
            "counts": dict(self.counts),
            "tiers": [self.power.energy_tier, self.power.power_tier],
            "instant": self.power.power_is_instant,
            "edges": [
                [round(edge.t - zero, 6), round(edge.energy_j - first, 6), round(edge.uncertainty_s, 6)]
                for edge in self.power.edges
            ],
            "power": [[round(one.t - zero, 5), round(one.power_w, 3)] for one in _changes(self.power.readings)],
            "states": [[round(t - zero, 4), _state_json(state)] for t, state in self.power.states],
            "problem": self.reading.reason if self.power.problem is not None else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> CalibrationWindow:
        """The window of a line; times begin at its start.

        Raises:
            ValueError: the line is not one of a window; says which entry is wrong.
        """
        line = converted(data, _Line)
        counter, integral = line["tiers"]
        power = PowerWindow(counter, integral, line["instant"], end=line["window_s"])
        power.edges = [EnergyEdge(*edge) for edge in line["edges"]]
        power.readings = [PowerReading(*reading) for reading in line["power"]]
        power.states = [(t, _state_of(*state)) for t, state in line["states"]]
        if problem := line.get("problem"):
            power.problem = DeviceError(problem)
        return cls(
            Point(line["benchmark"], line["operands"], line["duty"], line["repeat"]),
            line["blocks"], line["iterations"], line["sleep_ns"], line["launches"],
            0.0, line["window_s"], line["counts"], power, line.get("utc", ""),
        )  # fmt: skip

    def checked(self) -> CalibrationWindow:
        """Itself, if it can be of a GPU.

        Raises:
            ValueError: its readings are not in order of time, or its power or a rate is beyond any GPU's.
        """
        edges, readings = ([one.t for one in of] for of in (self.power.edges, self.power.readings))
        if any(a >= b for a, b in pairwise(edges)) or any(a > b for a, b in pairwise(readings)):
            raise ValueError(f"readings of {self.point.key} are not in order of time")
        if (self.power_w or 0.0) > _MOST_W or max(self.rates.values(), default=0.0) > _MOST_RATE:
            raise ValueError(f"{self.point.key} is beyond any GPU")
        _ = self.begun
        return self


def _changes(readings: Iterable[PowerReading]) -> Iterator[PowerReading]:
    """The first and last reading of each value: the sensor updates every 100 ms and is read far more often."""
    held: PowerReading | None = None
    shown: PowerReading | None = None
    for one in readings:
        if shown is None or one.power_w != shown.power_w:
            if held is not None and held is not shown:
                yield held
            shown = one
            yield one
        held = one
    if held is not None and held is not shown:
        yield held


def _state_json(state: ConditionReading) -> list[Json]:
    reasons = None if state.reasons is None else sorted(state.reasons)
    return [state.sm_clock_hz, state.memory_clock_hz, state.max_sm_clock_hz, state.temperature_c, reasons]


def _state_of(
    sm_clock: float | None,
    memory_clock: float | None,
    top: float | None,
    temperature: float | None,
    reasons: list[str] | None,
) -> ConditionReading:
    return ConditionReading(sm_clock, memory_clock, top, temperature, None if reasons is None else frozenset(reasons))


@dataclass(frozen=True)
class Counted:
    """A benchmark under hardware counters, to learn how much they count per unit.

    Args:
        benchmark: name in the suite.
        counts: unit of the model → count per launch.
        counters: canonical name → total per launch.
    """

    benchmark: str
    counts: Mapping[str, float]
    counters: Mapping[str, float]

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": "counted",
            "benchmark": self.benchmark,
            "counts": dict(self.counts),
            "counters": dict(self.counters),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Counted:
        """The counters of a line.

        Raises:
            ValueError: the line is none of counters; says which entry is wrong.
        """
        line = converted(data, _CountedLine)
        return cls(line["benchmark"], line["counts"], line["counters"])


@dataclass(frozen=True)
class WindowFile:
    """A file of windows as read.

    Args:
        header: its first line.
        windows: in order of measurement.
        counted: benchmarks under hardware counters, the last of each.
        failed: benchmark → why it did not run on this GPU.
        damaged: numbers of lines that could not be read (a run that was killed leaves one).
    """

    header: Mapping[str, Json]
    windows: tuple[CalibrationWindow, ...]
    counted: tuple[Counted, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    damaged: tuple[int, ...] = ()

    @property
    def done(self) -> frozenset[str]:
        """Keys of the points that have a window."""
        return frozenset(window.point.key for window in self.windows)


def read_windows(path: Path) -> WindowFile:
    """Read a file of windows; a line that was cut off is left out and named.

    Raises:
        UnreadableInput: the file cannot be read, or its first line is no header of windows.
    """
    try:
        # Bytes: a text's own lines may hold separators of Unicode, and one that was cut within a letter is no text.
        lines = path.read_bytes().splitlines()
    except OSError as error:
        what = f"windows of a calibration: {path} cannot be read ({in_words(error)})"
        raise UnreadableInput(what, "give the .jsonl that joulemark calibrate wrote") from error
    header = _header(lines[0] if lines else b"", path)
    ours = "joulemark" in header and "architecture" in header
    windows: list[CalibrationWindow] = []
    counted: dict[str, Counted] = {}
    failed: dict[str, str] = {}
    damaged: list[int] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            data = json.loads(line)
            if data["kind"] == "counted":
                one = Counted.from_json(data)
                counted[one.benchmark] = one
            elif data["kind"] == "failed":
                failed[str(data["benchmark"])] = str(data["reason"])
            else:
                window = CalibrationWindow.from_json(data)
                windows.append((window.recounted(header["architecture"]) if ours else window).checked())
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            damaged.append(number)
    return WindowFile(header, tuple(windows), tuple(counted.values()), failed, tuple(damaged))


def _header(line: bytes, path: Path) -> Mapping[str, Json]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        seen = header.get("schema") if isinstance(header, dict) else line[:40].decode(errors="replace")
        raise UnreadableInput(
            f"{path} holds no windows of a calibration (its first line says {str(seen)[:40]!r}, not {SCHEMA!r})",
            "give the .jsonl that joulemark calibrate wrote",
        )
    try:
        converted(header, _HeaderLine)
        canonical_json(header)
    except ValueError as error:
        raise UnreadableInput(
            f"the header of {path} is damaged ({error})", "give the .jsonl that joulemark calibrate wrote"
        ) from error
    return header


class WindowWriter:
    """Appends windows to a file, each on disk before the next is measured.

    Args:
        path: new, or a file of windows that is gone on with.
        header: facts of the run; compared with a file that is there.

    Raises:
        ConfigurationError: the file is there and of another GPU, or cannot be written.
    """

    def __init__(self, path: Path, header: Mapping[str, Json]) -> None:
        self.path = path
        self.done: frozenset[str] = frozenset()
        self.counted: frozenset[str] = frozenset()
        self.failed: frozenset[str] = frozenset()
        if path.exists():
            self._go_on(header)
        else:
            self._write({"kind": "header", "schema": SCHEMA, **header})

    def _go_on(self, header: Mapping[str, Json]) -> None:
        there = read_windows(self.path)
        for fact in ("gpu_uuid", "architecture"):
            if there.header.get(fact) != header.get(fact):
                raise ConfigurationError(
                    f"{self.path} is of another GPU ({fact} {there.header.get(fact)!r}, here {header.get(fact)!r})",
                    "calibrate into another file with --out",
                )
        self.done = there.done
        self.counted = frozenset(one.benchmark for one in there.counted)
        self.failed = frozenset(there.failed)
        if not self.path.read_bytes().endswith(b"\n"):
            self._append("\n")

    def add(self, line: CalibrationWindow | Counted) -> None:
        """Append a window, or what was counted of a benchmark."""
        self._write(line.to_json())

    def fail(self, benchmark: str, reason: str) -> None:
        """Note that a benchmark did not run: it is left out by whoever goes on with the file."""
        self._write({"kind": "failed", "benchmark": benchmark, "reason": reason[:500]})

    def _write(self, line: Mapping[str, Json]) -> None:
        self._append(canonical_json(line) + "\n")

    def _append(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigurationError(
                f"windows cannot be written to {self.path} ({error.strerror or error})",
                "make room or choose another place with --out; what was measured is kept, go on with --resume",
            ) from error
