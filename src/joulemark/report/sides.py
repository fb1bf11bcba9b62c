"""Two or more runs, drivers, GPUs or modes side by side: throughput, plateaus, idle time and energy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from joulemark.errors import ConfigurationError
from joulemark.history.runs import sorted_drivers
from joulemark.metrics import batch_text, format_ratio
from joulemark.records import NOT_REAL, Json, Record, Run, Table, Value
from joulemark.report import share_table
from joulemark.report.answers import GROUP_TITLES, group_shares, idle_share, share_interval, whole_percent
from joulemark.report.evidence import Curve, Document, Evidence, Workload, driver_of_record, gather
from joulemark.report.names import without_common_parts
from joulemark.report.plateau_table import knee_text
from joulemark.report.share_table import Share
from joulemark.report.tables import format_figure
from joulemark.utilization.plateau import Plateau

Axis = Literal["run", "driver", "gpu", "mode", "dtype"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True)
class Side:
    """What stands in one column of a comparison.

    Args:
        name: of the run, driver, GPU … that it holds.
        evidence: of it alone.
    """

    name: str
    evidence: Evidence


@dataclass(frozen=True)
class Match:
    """A configuration of a workload on the sides that measured it.

    Args:
        title: what all of them have in common.
        key: of its figure.
        curves: side → its curve, in the order of the sides.
    """

    title: str
    key: str
    curves: Mapping[str, Curve]

    def batch(self, metric: str) -> int | None:
        """The largest batch at which all sides that have a metric have it; None where fewer than two do."""
        known = [{batch for batch, _ in one.line(metric)} for one in self.curves.values()]
        known = [batches for batches in known if batches]
        return max(set.intersection(*known), default=None) if len(known) > 1 else None


def sides_of(given: Sequence[tuple[Path, Sequence[Run], Sequence[Document]]], axis: Axis) -> list[Side]:
    """Divide runs and documents.

    Args:
        given: what each argument of the command line holds.
        axis: what differs from side to side; of ``run``, each argument is a side, or each file of a lone folder.

    Raises:
        ConfigurationError: there are not two sides.
    """
    runs = [run for _, found, _ in given for run in found]
    documents = [document for _, _, found in given for document in found]
    if axis == "run":
        many = len([one for one in given if one[1]]) > 1
        parts = [(path, found, own) for path, found, own in given if found] if many else [
            (Path(run.path), [run], documents) for run in runs
        ]  # fmt: skip
        names = _distinct([path for path, _, _ in parts])
        loose = [document for _, found, own in given if not found for document in own] if many else []
        sides = [Side(name, gather(found, [*own, *loose]))
                 for name, (_, found, own) in zip(names, parts, strict=True)]  # fmt: skip
    else:
        read: Callable[[Run, Record], str] = _READ[axis]
        values = dict.fromkeys(read(run, record) for run in runs for record in run.records)
        order = sorted_drivers(values) if axis == "driver" else list(values)
        sides = [Side(value, gather(_only(runs, read, value), documents)) for value in order]
    sides = [side for side in sides if side.evidence.workloads]
    if len(sides) < 2:
        raise ConfigurationError(
            f"--side-by-side {axis} found no two sides that swept the batch size",
            f"give results of two, or choose another of {', '.join(AXES)}",
        )
    return sides


_READ: Mapping[str, Callable[[Run, Record], str]] = {
    "driver": driver_of_record,
    "gpu": lambda _, record: record.case.gpu_model,
    "mode": lambda _, record: record.case.mode or "none",
    "dtype": lambda _, record: record.case.dtype or "none",
}


def _only(runs: Sequence[Run], read: Callable[[Run, Record], str], value: str) -> list[Run]:
    chosen = [replace(run, records=tuple(one for one in run.records if read(run, one) == value)) for run in runs]
    return [run for run in chosen if run.records]


def _distinct(paths: Sequence[Path]) -> list[str]:
    """File names without what all of them share, or whole paths where two are alike."""
    names = [path.stem or str(path) for path in paths]
    if len(set(names)) < len(names):
        return [str(path) for path in paths]
    short, _ = without_common_parts(names)
    return [short[name] for name in names]


def matches_of(sides: Sequence[Side], axis: Axis) -> list[Match]:
    """Configurations that two sides or more have, in the order of the first side's workloads."""
    found: dict[str, tuple[str, Workload, dict[str, Curve]]] = {}
    for side in sides:
        for workload in side.evidence.workloads:
            for curve in workload.curves:
                common = _without(curve, axis)
                _, _, curves = found.setdefault(common.case.case_id, (_title(common), workload, {}))
                curves[side.name] = curve
    several = [(title, workload, curves) for title, workload, curves in found.values() if len(curves) > 1]
    return [
        Match(title, f"{workload.key}-{number}", curves) for number, (title, workload, curves) in enumerate(several)
    ]


def _without(curve: Curve, axis: Axis) -> Curve:
    changed: dict[Axis, Mapping[str, Json]] = {
        "gpu": {"gpu_model": ""},
        "mode": {"mode": None},
        "dtype": {"dtype": None},
    }
    return replace(curve, case=replace(curve.case, **changed.get(axis, {})))


def _title(common: Curve) -> str:
    case = common.case
    own = [f"{key}={value}" for key, value in sorted(case.params.items())]
    name = common.name if common.name != case.workload else ""
    return " ".join(part for part in (case.workload, case.phase, name, *own) if part)


def tables_of(sides: Sequence[Side], axis: Axis) -> list[Table]:
    """Throughput, plateau, idle time and energy side by side; the energy split beside where a document has one."""
    figures = _figures(matches_of(sides, axis), [side.name for side in sides])
    fakes = [side.name for side in sides if any(run.simulated for run in side.evidence.runs)]
    marks = [f"simulated GPUs in {', '.join(fakes)}: {NOT_REAL}"] if fakes else []
    return [replace(figures, notes=(*marks, *figures.notes)), *_splits(sides)]


def _figures(matches: Sequence[Match], names: Sequence[str]) -> Table:
    """A column per side, five rows per configuration."""
    rows = []
    for match in matches:
        title = match.title
        for what, cells in _rows(match):
            rows.append((title, what, *(cells.get(name, "-") for name in names)))
            title = ""
    notes = (
        "ratios are over the first side that has the figure, at the largest batch that all have; both intervals hold",
        "whether a difference is more than noise between processes: joulemark compare BASE NEW",
    )
    columns = ("workload", "figure", *names)
    figures = frozenset(range(2, len(columns)))
    return Table(columns, tuple(rows), figures, notes if rows else (_NOTHING,), "side by side")


_NOTHING = "no configuration was measured on two sides"


def _rows(match: Match) -> Iterator[tuple[str, Mapping[str, str]]]:
    """What is compared, and side → its cell."""
    yield "plateau from", {name: _plateau_text(curve.plateau) for name, curve in match.curves.items()}
    for title, metric in (("items/s", "throughput_per_s"), ("energy/item", "energy_per_item_j")):
        batch = match.batch(metric)
        if batch is None:
            continue
        values = {name: curve.value(batch, metric) for name, curve in match.curves.items()}
        yield f"{title}, b{batch}", {name: "n/a" if one is None else format_figure(one) for name, one in values.items()}
        first, *others = [name for name, value in values.items() if value is not None]
        yield "  ratio", {name: ratio_text(values[first], values[name]) for name in others}
    batch = match.batch("throughput_per_s")
    idle = {name: idle_share(curve, batch) for name, curve in match.curves.items() if batch is not None}
    if any(one is not None for one in idle.values()):
        known = {name: "n/a" if one is None else whole_percent(max(0.0, one.share)) for name, one in idle.items()}
        yield f"GPU idle, b{batch}", known


def _plateau_text(plateau: Plateau) -> str:
    if plateau.verdict == "not_reached":
        return f"not reached by {batch_text(plateau.largest_batch)}"
    return "too few batches" if plateau.verdict == "too_few_points" else knee_text(plateau)


def ratio_text(base: Value | None, new: Value | None) -> str:
    """``1.032x [1.010, 1.054]``: new over base."""
    if base is None or new is None or not base.value or new.value is None:
        return "n/a"
    text = f"{format_ratio(new.value / base.value)}x"
    if base.interval is None or new.interval is None or base.interval[0] <= 0:
        return text
    lo, hi = new.interval[0] / base.interval[1], new.interval[1] / base.interval[0]
    return f"{text} [{format_ratio(lo)}, {format_ratio(hi)}]"


def _splits(sides: Sequence[Side]) -> Iterator[Table]:
    shares = [
        Share(
            name,
            GROUP_TITLES[group],
            share,
            share_interval(row["split"], group),
            str(row.get("gpu") or ""),
            "",
            side.name,
        )
        for side in sides
        for name, row in side.evidence.energy_rows.items()
        if row["split"] is not None
        for group, share in group_shares(row["split"]).items()
    ]
    if shares:
        table = share_table.table_of(shares, "energy splits side by side")
        kept = [at for at, title in enumerate(table.columns) if title != "driver"]
        moved = frozenset(kept.index(at) for at in table.numeric)
        rows = tuple(tuple(row[at] for at in kept) for row in table.rows)
        yield replace(
            table,
            columns=tuple(table.columns[at] for at in kept),
            rows=rows,
            numeric=moved,
            notes=(*table.notes, _BY_MODEL),
        )


_BY_MODEL = "shares of measured energy by the energy model; what it does not explain is in joulemark energy's table"


def together(sides: Sequence[Side], documents: Sequence[Document]) -> Evidence:
    """The evidence of all sides for one report: the workloads of each keep their side's name."""
    found: list[Workload] = []
    longest = max(len(side.evidence.workloads) for side in sides)
    for place in range(longest):
        for number, side in enumerate(sides):
            if place < len(side.evidence.workloads):
                one = side.evidence.workloads[place]
                found.append(replace(one, key=f"{one.key}-{number}", title=f"{one.title}, {side.name}"))
    runs = {run.run_id + run.path: run for side in sides for run in side.evidence.runs}
    return Evidence(tuple(runs.values()), tuple(found), tuple(documents))
