"""The energies of one GPU as a versioned document: coefficients with intervals, how good their fit is, and its windows.

Described by ``docs/schema/calibration.schema.json``. ``windows`` holds what the fit saw of each window, so the document
refits itself; the raw readings stand in the file of windows beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np

from joulemark import whole_files
from joulemark.energy import goodness
from joulemark.energy.fit import Fit, bound_reason, design_of, fit, reason_unknown
from joulemark.energy.microbench.suite import SUITE
from joulemark.energy.units import STATIC, UNITS, Part
from joulemark.energy.units import columns as columns_of
from joulemark.energy.windows import WindowFile, read_windows
from joulemark.errors import ConfigurationError, UnreadableInput, in_words
from joulemark.records import Amount, Finite, Positive, converted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from joulemark.energy.windows import CalibrationWindow, Counted
    from joulemark.records import Json

SCHEMA = "joulemark/calibration/1"
GAIN = 0.05
"""Relative gain error of a board's sensors that no averaging removes; 1.96 standard deviations are meant."""
_STORED_DRAWS = 200
_NO_BURSTS: Mapping[str, Json] = {"share": None, "interval": None, "n": 0, "reason": "no load was measured in bursts"}
_NOT_OF_THE_GPU = frozenset({"kind", "schema", "caches", "chase", "mode"})
_DIGITS = 6
_NAMED = 10
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Coefficient:
    """The energy of one part of one unit.

    Args:
        unit, part: see :mod:`joulemark.energy.units`.
        value: in ``energy_unit``.
        interval: 95 %, of repeatability: the sensors' gain is not inside.
        energy_unit: ``W``, ``W/SM`` or ``J/`` and what is counted.
        at_bound: whether the fit stopped at 0, with ``reason``.
        windows: windows of the fit in which it plays a part.
        reason: why it lies at its bound; else None.
    """

    unit: str
    part: Part
    value: Amount
    interval: tuple[Finite, Finite]
    energy_unit: str
    at_bound: bool
    windows: int
    reason: str | None = None


class _PathRow(TypedDict):
    benchmark: str
    operands: str
    measured_j: Finite


class _ActivityRow(TypedDict):
    benchmark: str
    operands: str
    activity: Finite


class _WindowRow(TypedDict):
    key: str
    power_w: Amount | None
    rates: dict[str, Amount]
    left_out: str | None


class _Law(TypedDict):
    beta: Finite | None
    interval: tuple[Finite, Finite] | None
    reason: str | None
    curvature: NotRequired[Amount | None]
    clock_range: NotRequired[tuple[Finite, Finite] | None]
    covariance: NotRequired[tuple[tuple[Amount, Finite], tuple[Finite, Amount]] | None]


class _Bursts(TypedDict):
    share: Finite | None
    interval: tuple[Finite, Finite] | None


class _Goodness(TypedDict):
    static_offsets_w: list[Finite]


class _Gpu(TypedDict):
    architecture: str
    sms: Positive


class _Document(TypedDict):
    """What a prediction reads of a document, with its types; the rest is carried along as it is."""

    coefficients: Annotated[list[Coefficient], msgspec.Meta(min_length=1)]
    draws: Annotated[list[list[Amount]], msgspec.Meta(min_length=1)]
    gain: Amount
    gpu: _Gpu
    mode: str
    goodness: _Goodness
    frequency_law: _Law
    paths: list[_PathRow]
    activities: list[_ActivityRow]
    factors: dict[str, dict[str, Amount]]
    caches: dict[str, Any] | None
    windows: list[_WindowRow]
    source: dict[str, Any]
    notes: list[str]
    bursts: NotRequired[_Bursts]


@dataclass(frozen=True)
class Calibration:
    """The energies of one GPU.

    Args:
        gpu: name, uuid, architecture, sms and what else the header of the windows says.
        mode: ``quick`` or ``reference``.
        coefficients: in the units' order.
        draws: of the bootstrap, one row per draw, in the order of ``coefficients``.
        gain: relative error of the sensors, stated apart.
        goodness: tables of the fit.
        frequency_law: see :func:`joulemark.energy.goodness.frequency_law`.
        paths: energies with everything on the way, see :func:`joulemark.energy.goodness.path_energies`.
        activities: of operands that the fit did not use.
        factors: unit → counter → counts of the counter per count of the unit, as measured; empty where not.
        caches: ends of the caches.
        windows: what the fit saw.
        source: file of raw windows and its digest.
        notes: what a reader must know.
        bursts: see :func:`joulemark.energy.goodness.bursts`.
    """

    gpu: Mapping[str, Json]
    mode: str
    coefficients: tuple[Coefficient, ...]
    draws: tuple[tuple[float, ...], ...]
    gain: float
    goodness: Mapping[str, Json]
    frequency_law: Mapping[str, Json]
    paths: tuple[Mapping[str, Json], ...]
    activities: tuple[Mapping[str, Json], ...]
    factors: Mapping[str, Mapping[str, float]]
    caches: Mapping[str, Json] | None
    windows: tuple[Mapping[str, Json], ...]
    source: Mapping[str, Json]
    notes: tuple[str, ...] = field(default_factory=tuple)
    bursts: Mapping[str, Json] = field(default_factory=lambda: dict(_NO_BURSTS))

    @cached_property
    def columns(self) -> tuple[tuple[str, Part], ...]:
        """(unit, part) of each coefficient."""
        return tuple((one.unit, one.part) for one in self.coefficients)

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Coefficients, shape [p]."""
        return np.array([one.value for one in self.coefficients])

    @cached_property
    def draw_matrix(self) -> NDArray[np.float64]:
        """Draws, shape [d, p]."""
        return np.array(self.draws, dtype=float).reshape(len(self.draws), len(self.coefficients))

    def value(self, unit: str) -> float:
        """Coefficient of a unit of one part, such as static power; 0 where there is none."""
        return sum(one.value for one in self.coefficients if one.unit == unit)

    @cached_property
    def units(self) -> frozenset[str]:
        """Units that have a coefficient."""
        return frozenset(one.unit for one in self.coefficients)

    def to_json(self) -> dict[str, Json]:
        data = {"schema": SCHEMA, **asdict(self)}
        data["coefficients"] = [{**asdict(one), "interval": list(one.interval)} for one in self.coefficients]
        data["draws"] = [list(row) for row in self.draws]
        return json.loads(json.dumps(data, allow_nan=False))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Calibration:
        """The calibration of a document.

        Raises:
            ValueError: it is none of this version; says which entry is wrong.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            seen = data.get("schema") if isinstance(data, dict) else data
            raise ValueError(f"schema {str(seen)[:40]!r}, this version reads {SCHEMA!r}")
        known = converted(data, _Document)
        coefficients = tuple(known["coefficients"])
        unknown = {one.unit for one in coefficients} - set(UNITS)
        if unknown:
            raise ValueError(f"no unit of this version: {', '.join(sorted(unknown))}")
        _check_columns([(one.unit, one.part) for one in coefficients])
        draws = tuple(map(tuple, known["draws"]))
        if {len(row) for row in draws} != {len(coefficients)}:
            raise ValueError(f"a draw does not have the {len(coefficients)} coefficients")
        _check_law(known["frequency_law"])
        if (bursts := known.get("bursts")) is not None and bursts["share"] is not None:
            _check_interval(bursts["interval"], "the share of the loss that follows bursts")
        return cls(
            data["gpu"], known["mode"], coefficients, draws, known["gain"], data["goodness"], data["frequency_law"],
            tuple(data["paths"]), tuple(data["activities"]), known["factors"], data["caches"], tuple(data["windows"]),
            data["source"], tuple(known["notes"]), data.get("bursts", _NO_BURSTS),
        )  # fmt: skip


def _check_columns(columns: Sequence[tuple[str, Part]]) -> None:
    """Every part of a unit once, and static power among them: without it each prediction would lack it silently."""
    possible = set(columns_of(UNITS))
    for i, one in enumerate(columns):
        if one not in possible or one in columns[:i]:
            raise ValueError(f"{one[1]} of {one[0]} is no part of that unit, or stands there twice")
    if STATIC not in {unit for unit, _ in columns}:
        raise ValueError("it has no static power")


def _check_interval(interval: tuple[float, float] | None, what: str) -> None:
    if interval is None or interval[0] > interval[1]:
        raise ValueError(f"{what} has no interval that can be: {interval}")


def _check_law(law: _Law) -> None:
    if law["beta"] is None:
        return
    _check_interval(law["interval"], "the law of the clock")
    if covariance := law.get("covariance"):
        (first, one), (other, second) = covariance
        if not math.isclose(one, other, rel_tol=_ROUNDING) or one**2 > first * second * (1 + _ROUNDING):
            raise ValueError(f"the law of the clock has no covariance that can be: {covariance}")


def read_calibration(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        UnreadableInput: the file is no calibration that this version reads.
    """
    try:
        return Calibration.from_json(json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse))
    except (OSError, UnicodeDecodeError) as error:
        what = f"calibration {path} cannot be read ({in_words(error)})"
        raise UnreadableInput(what, "run joulemark calibrate") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            f"{path} is no calibration of joulemark ({error})",
            "give the .json that joulemark calibrate wrote",
        ) from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of a calibration")


def calibration_of(file: WindowFile, path: Path | None = None) -> Calibration:
    """Fit a file of windows.

    Args:
        file: with its windows.
        path: where it stands; named in the calibration with its digest.

    Raises:
        MeasurementError: there are too few usable windows.
    """
    fitted = fit(design_of(file.windows))
    left_out = fitted.design.left_out
    known = [window for window in file.windows if reason_unknown(window) is None]
    return Calibration(
        gpu={key: value for key, value in file.header.items() if key not in _NOT_OF_THE_GPU},
        mode=str(file.header.get("mode", "unknown")),
        coefficients=_coefficients(fitted),
        draws=tuple(tuple(_rounded(x) for x in row) for row in fitted.draws[:_STORED_DRAWS]),
        gain=GAIN,
        goodness=_goodness(fitted, known, file.counted),
        frequency_law=goodness.frequency_law(fitted, known),
        bursts=goodness.bursts(fitted, known),
        paths=tuple(goodness.path_energies(fitted, known)),
        activities=tuple(goodness.activities(fitted, known)),
        factors=_factors(file.counted),
        caches=file.header.get("caches"),
        windows=tuple(_summary(window, left_out.get(window.point.key)) for window in file.windows),
        source=_source(path),
        notes=_notes(fitted, file),
    )


def refit(path: Path) -> Calibration:
    """The calibration of a file of raw windows, offline.

    Raises:
        UnreadableInput: it is no such file.
        MeasurementError: it holds too few usable windows.
    """
    file = read_windows(path)
    if file.damaged and not file.windows:
        raise UnreadableInput(
            f"no line of {path} is a window of a calibration ({len(file.damaged)} damaged ones)",
            "give the .jsonl that joulemark calibrate wrote",
        )
    try:
        converted(file.header, _Gpu)
    except ValueError as error:
        raise UnreadableInput(
            f"the header of {path} does not say which GPU its windows are of ({error})",
            "give the .jsonl that joulemark calibrate wrote",
        ) from error
    return calibration_of(file, path)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as strict JSON, in one step: a reader sees the old file or the new one.

    Raises:
        ConfigurationError: the place cannot be written.
    """
    text = json.dumps(calibration.to_json(), indent=1, allow_nan=False) + "\n"
    try:
        whole_files.put(text.encode(), path)
    except OSError as error:
        raise ConfigurationError(f"the calibration cannot be written to {path} ({error})", "choose --out") from error


def _coefficients(fitted: Fit) -> tuple[Coefficient, ...]:
    played = (fitted.design.rates != 0).sum(axis=0)
    return tuple(
        Coefficient(
            unit, part, float(fitted.values[i]), fitted.interval(i), UNITS[unit].energy_unit,
            bool(fitted.values[i] <= 0), int(played[i]), bound_reason(fitted, i),
        )
        for i, (unit, part) in enumerate(fitted.design.columns)
    )  # fmt: skip


def _goodness(fitted: Fit, windows: Sequence[CalibrationWindow], counted: Sequence[Counted]) -> dict[str, Json]:
    names = [f"{unit} {part}" for unit, part in fitted.design.columns]
    return {
        **goodness.overall(fitted),
        "counted": goodness.counted_checks(counted),
        "lines": [asdict(line) for line in goodness.lines(fitted)],
        "checks": goodness.checks(fitted, windows),
        "orderings": goodness.orderings(fitted, windows),
        "inseparable": [
            {"pair": [names[i], names[j]], "correlation": rho} for i, j, rho in fitted.inseparable()
        ],
    }  # fmt: skip


def _factors(counted: Sequence[Counted]) -> dict[str, dict[str, float]]:
    """Counts of each hardware counter per count of the unit that the benchmark is about."""
    factors: dict[str, dict[str, float]] = {}
    for one in counted:
        benchmark = SUITE.get(one.benchmark)
        if benchmark is None or benchmark.role == "check" or not one.counts.get(benchmark.unit):
            continue
        found = {name: total / one.counts[benchmark.unit] for name, total in one.counters.items()}
        factors.setdefault(benchmark.unit, found)  # of a unit's benchmarks the plain one comes first
    return factors


def _summary(window: CalibrationWindow, left_out: str | None) -> dict[str, Json]:
    reading, state = window.reading, window.conditions
    return {
        "key": window.point.key,
        "power_w": reading.power_w.value,
        "power_interval_w": None if reading.power_w.interval is None else list(reading.power_w.interval),
        "cross_check_ratio": reading.cross_check_ratio,
        "updates": reading.updates,
        "rates": {unit: float(f"{rate:.9g}") for unit, rate in window.rates.items()},
        "sm_clock_hz": window.clock_hz,
        "temperature_c": None if state is None else state.temperature_c,
        "capped": window.capped,
        "left_out": left_out,
    }


def _source(path: Path | None) -> dict[str, Json]:
    if path is None:
        return {"file": None, "sha256": None}
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _notes(fitted: Fit, file: WindowFile) -> tuple[str, ...]:
    notes = [
        "intervals are of repeatability: the sensors' gain error of the board comes on top and scales all alike",
        "stores have no L1 level of their own (the L1 is write-through): l1 counts what passes, loads and stores",
        "wgmma units include the reads of their operands from shared memory",
    ]
    notes += [f"{benchmark} did not run and is left out ({reason})" for benchmark, reason in file.failed.items()]
    if file.damaged:
        lines = ", ".join(map(str, file.damaged[:_NAMED])) + (" …" if len(file.damaged) > _NAMED else "")
        notes.append(f"{len(file.damaged)} damaged lines of the windows were left out: {lines}")
    if fitted.design.merged:
        together = ", ".join(sorted(fitted.design.merged))
        notes.append(
            f"control and datapath not told apart for want of one kind of operands, both in control: {together}"
        )
    if not fitted.determined:
        notes.append("the windows fix some coefficients only together with others: a single one may stand for several")
    lacking = {unit for unit, _ in fitted.design.columns} ^ set(UNITS)
    if lacking:
        notes.append(f"units without a window of this GPU: {', '.join(sorted(lacking))}")
    return tuple(notes)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
