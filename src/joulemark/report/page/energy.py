"""Energy per item over the batch size, and which part of the chip spends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from joulemark.energy.split import RESIDUAL
from joulemark.energy.units import GROUPS
from joulemark.metrics import format_value
from joulemark.records import Json, Value
from joulemark.report import energy_view
from joulemark.report.answers import GROUP_TITLES, group_shares, share_interval, unanswered
from joulemark.report.evidence import Evidence, Workload, slug
from joulemark.report.page import axes as drawing
from joulemark.report.page.parts import Figure, Mark, Number, Section, row_of, tiers_of
from joulemark.report.page.throughput import Colours, Lines, curves_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ITEM, _DYNAMIC = "energy_per_item_j", "dynamic_energy_per_item_j"
_RESIDUAL = "not explained"
_BARS, _FEWEST_BARS = 8, 5
_OF_ITS_OWN = 3
"""Batches from which on a workload has a figure of its own."""
_COLOURS: Mapping[str, int] = {
    "static": 8, "issue": 5, "vector": 2, "integer": 7, "special": 9, "tensor": 1, "shared": 3, "l1": 10, "l2": 4,
    "hbm": 0, _RESIDUAL: 6,
}  # fmt: skip


def energy(evidence: Evidence) -> Section:
    """Measured energy per item; with a document of ``joulemark energy`` also its parts."""
    figures, missing = [], list(unanswered(evidence))
    for workload in evidence.shown:
        lines = curves_of(workload, _ITEM)
        if lines:
            figures.append(_per_item(workload, lines, evidence.colours))
        else:
            why = workload.main.records[workload.main.batches[-1]][-1].notes.get(_ITEM)
            missing.append(f"{workload.title}: {why or 'power was not asked for (--bench-collect power)'}")
    rows = [row for row in evidence.energy_rows.values() if row["split"] is not None]
    tables = [energy_view.split_table(rows)] if rows else []
    notes = [f"{row['workload']}: {note}" for row in rows for note in row["split"]["notes"]]
    gains = {document.content["gain"] for document in evidence.of_kind("energy")}
    notes += [f"the sensors' gain error of ±{gain:.0%} scales all parts alike" for gain in sorted(gains)]
    return Section(
        "energy",
        "Where the joules go",
        "Energy of the whole board per item, over windows aligned with the energy counter; dashed: without static "
        "power. Stacked bars split it by the energy model, calibrated on a board of this model.",
        (*_splits(evidence), *figures),
        tuple(tables),
        notes=tuple(notes),
        missing=tuple(missing),
        short="Energy",
    )


def _per_item(workload: Workload, lines: Lines, colours: Colours) -> Figure:
    main, whole = lines[0]
    dynamic = main.positive(_DYNAMIC)
    marks = [Mark(curve.name, colours[curve.name]) for curve, _ in lines]
    if dynamic:
        marks.append(Mark(f"{main.name}, dynamic", colours[main.name], "dash"))
    best = min(whole, key=lambda one: one[1].value or 0.0)
    return Figure(
        f"energy-{workload.key}",
        workload.title,
        "energy per item",
        f"{main.name}: least {format_value(best[1].value, 'J')} at batch {best[0]}. "
        f"By {tiers_of([value for _, line in lines for _, value in line])}; bands are 95 % intervals.",
        partial(_draw_per_item, lines=lines, dynamic=dynamic, colours=colours),
        [row_of(batch, f"{curve.name}: {_ITEM}", value) for curve, line in lines for batch, value in line]
        + [row_of(batch, f"{main.name}: {_DYNAMIC}", value) for batch, value in dynamic],
        tuple(marks),
        workload.key,
        left=0.15,
    )


def _draw_per_item(axes: Axes, lines: Lines, dynamic: list[tuple[int, Value]], colours: Colours) -> None:
    for curve, line in lines:
        drawing.line(axes, line, colours[curve.name])
    drawing.line(axes, dynamic, colours[lines[0][0].name], dashed=True)
    drawing.batch_axis(axes, sorted({batch for _, line in lines for batch, _ in line}))
    drawing.value_axis(axes, "J", log=True)


def _splits(evidence: Evidence) -> Iterator[Figure]:
    """Stacked bars, a row per batch of a workload that has several, and of the others a row per batch, per phase."""
    phases: dict[str, list[tuple[str, Mapping[str, Json]]]] = {}
    for workload in evidence.shown:
        case = workload.main.case
        rows = [(f"{case.workload}, {batch}", row) for batch, row in evidence.energy_of(workload)]
        if len(rows) >= _OF_ITS_OWN:
            yield _split_figure(workload.title, rows, workload.key)
        else:
            phases.setdefault(case.phase or "workloads", []).extend(rows)
    for phase, rows in phases.items():
        if not rows:
            continue
        each = -(-len(rows) // -(-len(rows) // _BARS))
        for part in range(0, len(rows), each):
            number = f" {part // each + 1}" if len(rows) > each else ""
            yield _split_figure(f"{phase}{number}", rows[part : part + each], slug(phase) + number.replace(" ", "-"))


def _split_figure(subject: str, rows: Sequence[tuple[str, Mapping[str, Json]]], key: str) -> Figure:
    shares = {name: {**group_shares(row["split"]), _RESIDUAL: row["split"]["residual_share"]} for name, row in rows}
    groups = [group for group in (*GROUPS, _RESIDUAL) if any(group in one for one in shares.values())]
    worst = max(abs(one[_RESIDUAL]) for one in shares.values())
    titles = {**GROUP_TITLES, _RESIDUAL: _RESIDUAL}
    return Figure(
        f"split-{key}",
        f"Energy by part of the chip: {subject}",
        "share of the measured energy (workload, batch)",
        f"Energy model calibrated on a board of this model. Uncertainty: at most {100 * worst:.1f} % of a workload's "
        "energy is not explained; a negative share stands left of zero.",
        partial(_draw_split, shares=shares, groups=groups),
        [_part_row(row, group, shares[name].get(group)) for name, row in rows for group in groups],
        tuple(Mark(titles[group], _COLOURS[group], "bar") for group in groups),
        left=0.27,
    )  # fmt: skip


def _part_row(row: Mapping[str, Json], group: str, share: float | None) -> dict[str, Number]:
    lo, hi = share_interval(row["split"], RESIDUAL if group == _RESIDUAL else group) or (None, None)
    return {"workload": row["workload"], "batch_size": row["batch_size"], "part": group, "share": share, "lo": lo,
            "hi": hi, "measured_j": row["measured_j"], "window_s": row["window_s"]}  # fmt: skip


def _draw_split(axes: Axes, shares: Mapping[str, Mapping[str, float]], groups: Sequence[str]) -> None:
    from joulemark.report.plot import plain

    right, left = [0.0] * len(shares), [0.0] * len(shares)
    for group in groups:
        widths = [one.get(group, 0.0) for one in shares.values()]
        starts = [right[at] if width >= 0 else left[at] for at, width in enumerate(widths)]
        axes.barh(range(len(shares)), widths, left=starts, color=drawing.colour(_COLOURS[group]), height=0.7)
        right = [end + max(0.0, width) for end, width in zip(right, widths, strict=True)]
        left = [end + min(0.0, width) for end, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shares)), [plain(name) for name in shares])
    axes.set_ylim(max(len(shares), _FEWEST_BARS) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f} %")
