"""Measured workloads as a calibration predicts them, beside simple models of the same calibration (pure).

A file of measured workloads (``docs/schema/energy-measurements.schema.json``) holds per row what was counted and what
the sensors showed, so that every prediction is recomputed from it, offline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from joulemark.energy.baselines import baselines
from joulemark.energy.counters import Counts, Mix, counts_of
from joulemark.energy.model import Model, Prediction
from joulemark.energy.outcome import Measured, Outcome
from joulemark.energy.series import series_of
from joulemark.energy.split import split
from joulemark.energy.units import STATIC
from joulemark.energy.windows import CLOCK_HELD
from joulemark.errors import MeasurementError, UnreadableInput, in_words
from joulemark.records import NOT_REAL, Json, converted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from joulemark.energy.baselines import Baseline
    from joulemark.energy.calibration import Calibration

MEASUREMENTS_SCHEMA = "joulemark/energy-measurements/1"
_GPU_DIFFERS = "the calibration is of {one}, the measurement of {other}: boards differ by 3 to 5 %"


def read_measurements(path: Path) -> tuple[Mapping[str, Json], list[Measured]]:
    """Read a file of measured workloads (or a validation, which holds the same).

    Returns:
        The document and its rows.

    Raises:
        UnreadableInput: it is no such file, or a row lacks what it needs.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] not in (MEASUREMENTS_SCHEMA, SCHEMA):
            raise ValueError(f"schema {document['schema']!r}")
        converted(document, _Source)
        return document, [_measured(row) for row in document["rows"]]
    except (OSError, UnicodeDecodeError) as error:
        what = f"measured workloads: {path} cannot be read ({in_words(error)})"
        raise UnreadableInput(what, "check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableInput(
            f"{path} holds no measured workloads ({in_words(error)})",
            f"give what bench_energy/measure_workloads.py wrote ({MEASUREMENTS_SCHEMA}), or what joulemark energy did",
        ) from error


SCHEMA = "joulemark/energy/1"
"""Of what ``joulemark energy`` prints and of ``validation.json``."""


_SHORTEST_WINDOW_S = 1e-9


class _Source(TypedDict, total=False):
    """Where and when workloads were measured, with its types."""

    gpu: str | None
    gpu_uuid: str | None
    driver: str | None
    measured_utc: str | None
    simulated: bool


def _measured(row: Mapping[str, Json]) -> Measured:
    seen = converted({name: value for name, value in row.items() if value is not None}, Measured)
    if seen.window_s < _SHORTEST_WINDOW_S or not seen.measured_j:
        raise ValueError(f"{seen.workload!r} has a window of {seen.window_s} s with {seen.measured_j} J")
    return seen


def evaluate(calibration: Calibration, rows: Sequence[Measured]) -> list[Outcome]:
    """Each workload as the calibration predicts it."""
    simple = baselines(calibration)
    return [_outcome(calibration, row, simple) for row in rows]


def _outcome(calibration: Calibration, row: Measured, simple: Sequence[Baseline]) -> Outcome:
    if not row.counters:
        return Outcome(row, None, None, None, reason="its counters were not measured")
    architecture = str(calibration.gpu.get("architecture"))
    try:
        mix = Mix.from_json(row.mix, Mix.for_dtype(row.dtype, architecture))
    except UnreadableInput as error:
        raise UnreadableInput(f"{row.workload}: {error.what}", error.remedy) from error
    counts = counts_of(row.counters, row.window_s, row.sm_clock_hz, calibration, mix)
    offset_w = static_offset_w(calibration, row.idle_w)
    model = model_of(calibration, row, offset_w)
    try:
        prediction = predict(model, counts, row)
        at_clock = prediction if not row.capped else model.predict(counts, row.window_s, row.clock)
    except MeasurementError as lack:
        return Outcome(row, None, None, counts, reason=str(lack))
    counts = replace(counts, notes=(*counts.notes, *_beyond_law(calibration, prediction.clock)))
    rates = {unit: one.value / row.window_s for unit, one in counts.values.items()}
    others = {one.name: (one.power_w(rates, calibration) + offset_w) * row.window_s for one in simple}
    return Outcome(row, prediction, split(calibration, at_clock, counts, row.measured_j), counts, others)


def _beyond_law(calibration: Calibration, clock: float) -> Iterator[str]:
    """That a clock is below those that the law of energy over clock was seen at."""
    low, high = calibration.frequency_law.get("clock_range") or (0.0, 1.0)
    if clock < low:
        yield (
            f"at {clock:.2f} of the highest clock, the law of energy over clock is prolonged: it was seen at "
            f"{low:.2f} to {high:.2f}"
        )


def model_of(
    calibration: Calibration, row: Measured, offset_w: float = 0.0, scale: Mapping[str, float] | None = None
) -> Model:
    """The model with what is known of a workload's operands and of static power before it."""
    bits = row.memory_bits
    return Model(calibration, row.activity, scale, dtype=row.dtype, static_offset_w=offset_w, memory_bits=bits)


def static_offset_w(calibration: Calibration, idle_w: float | None) -> float:
    """By how much static power before a workload, weighed on the idle board, is above the calibration's; 0 if unknown.

    An idle board with a context spends static power and nothing else, so the weighing takes the place of the fit's.
    """
    return 0.0 if idle_w is None else idle_w - calibration.value(STATIC)


def predict(model: Model, counts: Counts, row: Measured) -> Prediction:
    """A workload at the SM clock that it had; one that the power limit held down, at the clock that the limit allows.

    Raises:
        MeasurementError: the clock was below its highest and the calibration has no law, or the limit is not known.
    """
    if not row.capped:
        return model.predict(counts, row.window_s, 1.0 if row.clock >= CLOCK_HELD else row.clock)
    if row.power_limit_w is None:
        raise MeasurementError(f"{row.workload} was capped, but its power limit is not in the file")
    share = core_share(model.calibration, counts, row)
    return model.under_limit(counts, row.window_s, row.power_limit_w, row.clock, share)


def core_share(calibration: Calibration, counts: Counts, row: Measured) -> float:
    """Share of a workload's time that follows the SM clock: as told, or what HBM at its highest rate leaves."""
    if row.core_share is not None:
        return row.core_share
    rates = [one["rates"].get("hbm_read", 0.0) + one["rates"].get("hbm_write", 0.0) for one in calibration.windows]
    most = max(rates, default=0.0)
    moved = sum(counts.values[unit].value for unit in ("hbm_read", "hbm_write") if unit in counts.values)
    return 1.0 - min(moved / row.window_s / most, 1.0) if most else 1.0


def summary(outcomes: Sequence[Outcome]) -> dict[str, Json]:
    """Errors over workloads: uncapped, networks among them, capped ones apart, and the simple models beside."""
    known = [one for one in outcomes if one.error is not None]
    free = [one for one in known if not one.measured.capped]
    names = {name for one in free for name in one.baselines}
    return {
        "uncapped": _errors([one.error for one in free]),
        "uncapped_dynamic": _errors([one.dynamic_error for one in free]),
        "networks": _errors([one.error for one in free if one.measured.kind == "network"]),
        "capped": _errors([one.error for one in known if one.measured.capped]),
        "baselines": {
            name: _errors([one.baselines[name] / one.measured.measured_j - 1 for one in free if name in one.baselines])
            for name in sorted(names)
        },
        "power": _power([one.measured for one in outcomes]),
        "without_prediction": [one.measured.workload for one in outcomes if one.error is None],
    }


_LOW_SHARE = 0.7


def _power(rows: Sequence[Measured]) -> dict[str, Json]:
    """Which powers the workloads span, and how many lie well below the power limit."""
    watts = [row.measured_j / row.window_s for row in rows]
    limited = [(power, row.power_limit_w) for power, row in zip(watts, rows, strict=True) if row.power_limit_w]
    return {
        "lowest_w": min(watts, default=None),
        "highest_w": max(watts, default=None),
        "below_70_percent_of_limit": sum(power < _LOW_SHARE * limit for power, limit in limited) if limited else None,
        "n": len(watts),
    }


def _errors(values: Sequence[float | None]) -> dict[str, Json]:
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return {"n": 0, "mean_absolute": None, "bias": None, "worst": None}
    return {
        "n": int(known.size),
        "mean_absolute": float(np.abs(known).mean()),
        "bias": float(known.mean()),
        "worst": float(np.abs(known).max()),
    }


def document(
    calibration: Calibration, source: Mapping[str, Json], outcomes: Sequence[Outcome], extra: Mapping[str, Json]
) -> dict[str, Json]:
    """The document of some workloads, which :func:`read_measurements` reads again."""
    notes = [f"measured on simulated GPUs: {NOT_REAL}"] if source.get("simulated") else []
    one, other = calibration.gpu.get("gpu_uuid"), source.get("gpu_uuid")
    if one != other:
        notes.append(_GPU_DIFFERS.format(one=one, other=other))
    return {
        "schema": SCHEMA,
        "gpu": source.get("gpu"),
        "gpu_uuid": other,
        "driver": source.get("driver") or (calibration.gpu.get("driver") if one == other else None),
        "measured_utc": source.get("measured_utc"),
        **({"simulated": True} if source.get("simulated") else {}),
        "calibration": {"gpu_uuid": one, "mode": calibration.mode, "source": dict(calibration.source)},
        "gain": calibration.gain,
        "rows": [outcome.to_json() for outcome in outcomes],
        "series": series_of(outcomes),
        "summary": summary(outcomes),
        "notes": notes,
        **extra,
    }
