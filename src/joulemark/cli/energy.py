"""``joulemark energy``: where the joules of measured workloads went, from stored counters and a calibration."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.cli.arguments import Commands, add_command, add_document_arguments
from joulemark.cli.console import check_places, deliver
from joulemark.errors import ConfigurationError, MeasurementError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from joulemark.energy.calibration import Calibration
    from joulemark.energy.outcome import Outcome
    from joulemark.energy.trends import WhatIf
    from joulemark.records import Json


def add_parser(commands: Commands) -> None:
    """Add ``energy``."""
    parser = add_command(
        commands,
        "energy",
        "measured energy split into units and memory levels, and predicted, without a GPU",
        "joulemark energy validation.json --calibration results/calibration/nvidia-h200.json --scale hbm=0.5",
        run,
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="measured workloads; without it, the calibration"
    )
    parser.add_argument(
        "--calibration", type=Path, required=True, metavar="F", help="of the GPU, by joulemark calibrate"
    )
    add_document_arguments(parser, "energy.schema.json")
    parser.add_argument(
        "--scale", action="append", default=[], metavar="NAME=FACTOR", help="what if a unit cost that much less or more"
    )
    parser.add_argument(
        "--power-cap", type=float, metavar="W", help="what if the power limit were W; the GPU's own is never changed"
    )
    parser.add_argument(
        "--published", type=Path, metavar="DIR", help="energies from the literature to stand beside the calibration's"
    )


def run(args: argparse.Namespace) -> int:
    """Predict, split and ask what if, or show the calibration."""
    from joulemark.energy import trends, validation
    from joulemark.energy.calibration import read_calibration
    from joulemark.report import energy_plot, energy_view

    if args.file is None and (args.scale or args.power_cap is not None):
        raise ConfigurationError("--scale and --power-cap ask about measured workloads: none are given", "give FILE")
    if args.published is not None and not args.published.is_dir():
        raise ConfigurationError(f"--published got {str(args.published)!r}, no folder", "see results/published")
    check_places(args, validation.SCHEMA, "energy document")
    calibration = read_calibration(args.calibration)
    published = None if args.published is None else trends.read_published(args.published.glob("*.json"))
    beside = None if published is None else trends.beside(calibration, published)
    if args.file is None:
        if args.plot is not None:
            raise ConfigurationError("--plot draws measured workloads, and none are given", "name a FILE of them")
        document = _without_workloads(calibration, beside)
        tables = energy_view.calibration_tables(calibration)
    else:
        source, rows = validation.read_measurements(args.file)
        outcomes = validation.evaluate(calibration, rows)
        extra = {"what_if": _what_if(calibration, outcomes, args.scale, args.power_cap), "trends": beside}
        document = validation.document(calibration, source, outcomes, extra)
        tables = energy_view.workload_tables(document)
    if beside is not None:
        tables.append(energy_view.trend_table(beside, str(calibration.gpu.get("gpu", "this GPU"))))
    deliver(document, args, energy_view.EnergyView(tuple(tables)), energy_plot)
    return 0


def _without_workloads(calibration: Calibration, beside: Sequence[Json] | None) -> dict[str, Json]:
    from joulemark.energy import validation

    source = {"gpu": calibration.gpu.get("gpu"), "gpu_uuid": calibration.gpu.get("gpu_uuid")}
    return validation.document(calibration, source, [], {"what_if": [], "trends": beside})


def _what_if(
    calibration: Calibration, outcomes: Sequence[Outcome], scale: Sequence[str], cap: float | None
) -> list[dict[str, Json]]:
    from joulemark.energy import trends

    if cap is not None and not 0 < cap < float("inf"):
        raise ConfigurationError(f"--power-cap {cap} is no power", "give watts, as in --power-cap 500")
    factors = trends.scale_of(scale)
    rows = []
    for outcome in outcomes:
        if outcome.counts is None:
            continue
        if factors:
            rows.append(_row(outcome, " ".join(scale), partial(_scaled, calibration, outcome, factors)))
        if cap is not None:
            rows.append(_row(outcome, f"{cap:g} W", partial(_limited, calibration, outcome, cap)))
    return rows


def _scaled(calibration: Calibration, outcome: Outcome, factors: Mapping[str, float]) -> WhatIf:
    """The same work on this GPU and on one whose units cost so many times as much, both under its power limit."""
    from joulemark.energy import trends
    from joulemark.energy.validation import model_of, predict, static_offset_w

    seen, counts = outcome.measured, outcome.counts
    assert counts is not None
    offset_w = static_offset_w(calibration, seen.idle_w)
    models = (model_of(calibration, seen, offset_w, scale) for scale in (None, factors))
    return trends.what_if(*(predict(model, counts, seen) for model in models))


def _limited(calibration: Calibration, outcome: Outcome, limit_w: float) -> WhatIf:
    """The same work as it was measured and under another power limit."""
    from joulemark.energy import trends
    from joulemark.energy.validation import core_share, model_of, static_offset_w

    seen, counts = outcome.measured, outcome.counts
    assert counts is not None
    model = model_of(calibration, seen, static_offset_w(calibration, seen.idle_w))
    return trends.limited(model, counts, seen.window_s, limit_w, seen.clock, core_share(calibration, counts, seen))


def _row(outcome: Outcome, change: str, question: Callable[[], WhatIf]) -> dict[str, Json]:
    """The answer to a question; without one, the reason."""
    one, reason = None, None
    try:
        one = question()
    except MeasurementError as lack:
        reason = str(lack)
    return {
        "workload": outcome.measured.workload,
        "change": change,
        "energy_j": None if one is None else one.energy_j,
        "new_energy_j": None if one is None else one.new_energy_j,
        "largest": None if one is None else one.largest,
        "new_largest": None if one is None else one.new_largest,
        "slowdown": None if one is None else one.new_time_s / one.time_s,
        "clock": None if one is None else one.clock,
        "reason": reason,
    }
