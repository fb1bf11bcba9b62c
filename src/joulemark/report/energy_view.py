"""A calibration, and workloads split by it, as text for a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from joulemark.energy.units import GROUPS, UNITS
from joulemark.metrics import format_value
from joulemark.records import Json, Table
from joulemark.report.formats import percent, table_of
from joulemark.report.names import first_of
from joulemark.report.share_table import Share, share_text

if TYPE_CHECKING:
    from joulemark.energy.calibration import Calibration


@dataclass(frozen=True)
class EnergyView:
    """What ``joulemark energy`` shows of its document (:class:`joulemark.cli.console.View`).

    Args:
        shown: tables of the document and of the calibration that it rests on.
    """

    shown: tuple[Table, ...]

    def tables(self, document: Mapping[str, Json]) -> tuple[Table, ...]:
        """All of them."""
        del document
        return self.shown


def calibration_tables(calibration: Calibration) -> list[Table]:
    """Coefficients, how good they are, and the energies with everything on the way."""
    return [_coefficients(calibration), _goodness(calibration), _lines(calibration), _paths(calibration)]


def _coefficients(calibration: Calibration) -> Table:
    rows = [
        (
            UNITS[one.unit].title,
            one.part,
            _energy(one.value, one.energy_unit),
            f"{_energy(one.interval[0], one.energy_unit)} to {_energy(one.interval[1], one.energy_unit)}",
            str(one.windows),
        )
        for one in calibration.coefficients
    ]
    notes = [f"{UNITS[one.unit].title}, {one.part}: {one.reason}" for one in calibration.coefficients if one.reason]
    notes += [
        f"hardly told apart: {' and '.join(row['pair'])} (correlation {row['correlation']:.2f})"
        for row in calibration.goodness["inseparable"]
    ]
    notes += [f"the sensors' gain error of ±{calibration.gain:.0%} comes on top", *calibration.notes[1:]]
    title = f"energies of {calibration.gpu.get('gpu', 'the GPU')} ({calibration.mode})"
    return table_of(title, ("unit", "part", "energy", "95 % interval", "windows"), rows, notes, {2, 3, 4})


def _goodness(calibration: Calibration) -> Table:
    good, law = calibration.goodness, calibration.frequency_law
    rows = [
        ("windows in the fit", str(good["windows"])),
        ("R² of dynamic power", _number(good["r2_dynamic"], 5)),
        ("mean error of dynamic power", _percent(good["dynamic_error_mean"])),
        ("worst error of dynamic power", _percent(good["dynamic_error_worst"])),
        ("condition number", _number(good["condition_number"], 3)),
        ("voltage over clock: β", _number(law["beta"], 3)),
        ("voltage over clock: γ", _number(law.get("curvature"), 3)),
        ("supply loss that follows bursts", _percent(calibration.bursts["share"])),
    ]
    notes = [f"β: {law['reason']}"] if law["reason"] else []
    notes += [f"does not hold: {row['statement']}" for row in good["orderings"] if not row["holds"]]
    astray: dict[str, list[str]] = {}
    for row in good["counted"]:
        if abs(row["ratio"] - 1) > _COUNTS_AGREE:
            told = f"{row['counter']} counts {row['ratio']:.3f} of what was worked out"
            astray.setdefault(told, []).append(row["benchmark"])
    notes += [f"{told}: {first_of(names)}" for told, names in astray.items()]
    for row in good["checks"]:
        error = row["relative_error"]
        if error is not None and row["operands"] == "random":
            notes.append(f"{row['benchmark']}, not in the fit: predicted {error:+.1%} of its dynamic power")
    return table_of("fit", ("figure", "value"), rows, notes)


def _lines(calibration: Calibration) -> Table:
    rows = [
        (row["benchmark"], row["operands"], str(row["n"]), str(row["levels"]), _number(row["r2"], 5))
        for row in calibration.goodness["lines"]
        if row["r2"] is not None
    ]
    left_out = len(calibration.goodness["lines"]) - len(rows)
    notes = [f"{left_out} more have too few windows or rates for a line"] if left_out else []
    columns = ("benchmark", "operands", "windows", "rates", "R² of dynamic energy")
    return table_of("dynamic energy against count at one window length", columns, rows, notes, {2, 3, 4})


def _paths(calibration: Calibration) -> Table:
    rows = [
        (row["benchmark"], row["operands"], _energy(row["measured_j"], f"J/{row['per']}"), str(row["n"]))
        for row in calibration.paths
    ]
    title = "energies with everything on the way (issue, levels above, use of what was loaded)"
    return table_of(title, ("benchmark", "operands", "energy", "windows"), rows, numeric={2, 3})


def workload_tables(document: Mapping[str, Json]) -> list[Table]:
    """Predictions and splits of measured workloads."""
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    tables = [split_table(rows), _predictions(rows, document)]
    if document["series"]:
        tables.append(_series(document["series"]))
    if document.get("what_if"):
        tables.append(_what_if(document["what_if"]))
    return tables


def _predictions(rows: Sequence[Mapping[str, Any]], document: Mapping[str, Json]) -> Table:
    shown = [
        (
            row["workload"],
            "capped" if row["capped"] else "",
            format_value(row["measured_j"], "J"),
            format_value(row["predicted_j"], "J"),
            _signed(row["error"]),
            _signed(row["dynamic_error"]),
            "n/a" if row["interval"] is None else " to ".join(format_value(one, "J") for one in row["interval"]),
        )
        for row in rows
    ]
    columns = ("workload", "", "measured", "predicted", "error", "dynamic", "95 % interval")
    notes = [f"{row['workload']}: {row['notes']['prediction']}" for row in rows if row["notes"]]
    return table_of("energy, measured and predicted", columns, shown, [*notes, *_summary(document)], {2, 3, 4, 5, 6})


def _summary(document: Mapping[str, Json]) -> list[str]:
    found = []
    for name, title in (
        ("uncapped", "uncapped"),
        ("uncapped_dynamic", "uncapped, dynamic energy"),
        ("networks", "networks"),
        ("capped", "capped, energy per item"),
    ):
        one = document["summary"][name]
        if one["n"]:
            found.append(
                f"{title}: mean absolute error {one['mean_absolute']:.1%}, bias {one['bias']:+.1%}, worst "
                f"{one['worst']:.1%} (n = {one['n']})"
            )
    for name, one in document["summary"]["baselines"].items():
        if one["n"]:
            found.append(f"simple model, {name}: mean absolute error {one['mean_absolute']:.1%} (n = {one['n']})")
    power = document["summary"]["power"]
    if power["below_70_percent_of_limit"] is not None:
        found.append(
            f"{power['n']} workloads of {power['lowest_w']:.0f} to {power['highest_w']:.0f} W, "
            f"{power['below_70_percent_of_limit']} below 70 % of the power limit"
        )
    return [*found, *document["notes"]]


_COUNTS_AGREE = 0.02
_RESIDUAL_LARGE = 0.1
_MOVEMENT = (
    "shares of measured energy; movement is of dynamic energy: shared memory, L1, L2 and HBM alone, or each level with "
    "its whole path"
)
_PUBLISHED_MOVEMENT = (
    "published: up to 84 % of dynamic energy in a training iteration of ResNet-50 (Delestrac et al., ASAP 2024)"
)


def split_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Shares of measured energy by part of the chip, of rows that have a split."""
    shown = []
    for row in rows:
        parts = row["split"]
        if parts is None:
            continue
        shares = [sum(parts["parts"].get(group, {}).values()) / parts["measured_j"] for group in GROUPS]
        shown.append(
            (
                row["workload"],
                *_largest(dict(zip(GROUPS, shares, strict=True))),
                _signed(parts["residual_share"]),
                share_text(_share(parts, "movement")),
                share_text(_share(parts, "path")),
                *(_percent(share) for share in shares),
            )
        )
    columns = ("workload", "largest", "second", "residual", "movement", "with path", *GROUPS)
    notes = [_MOVEMENT, _PUBLISHED_MOVEMENT, *_residuals(rows)]
    return table_of("where the joules went", columns, shown, notes, range(3, len(columns)))


def _largest(shares: Mapping[str, float]) -> tuple[str, str]:
    """``hbm 22 %`` and ``static 22 %``: the answer where a terminal has no room for all shares."""
    first, second = sorted(shares, key=lambda one: -shares[one])[:2]
    return f"{first} {percent(shares[first], 0)}", f"{second} {percent(shares[second], 0)}"


def _share(split: Mapping[str, Any], name: str) -> Share:
    interval = split[f"{name}_interval"]
    return Share("", name, split[f"{name}_share"], None if interval is None else tuple(interval))


def _residuals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How large residuals are, and whose is too large to trust the split."""
    known = {row["workload"]: row["split"]["residual_share"] for row in rows if row["split"] is not None}
    if not known:
        return []
    worst = max(known, key=lambda name: abs(known[name]))
    found = [f"largest residual: {known[worst]:+.1%} of measured energy, {worst}"]
    large = sorted(name for name, share in known.items() if abs(share) >= _RESIDUAL_LARGE)
    return found + ([f"residual of {_RESIDUAL_LARGE:.0%} and more: {', '.join(large)}"] if large else [])


def _series(series: Sequence[Mapping[str, Any]]) -> Table:
    """Energy per item over batch sizes, and from which batch on it and throughput stop gaining."""
    rows = [
        (
            one["series"],
            str(cell["batch_size"]),
            f"{cell['items_per_s']:.4g}",
            format_value(cell["energy_per_item_j"], "J"),
            format_value(cell["dynamic_per_item_j"], "J"),
            format_value(cell["power_w"], "W"),
        )
        for one in series
        for cell in one["cells"]
    ]
    columns = ("workload", "batch", "items/s", "energy per item", "dynamic", "power")
    return table_of("energy per item over batch sizes", columns, rows, _plateaus(series))


def _plateaus(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """From which batch on a level stops gaining; series of too few batches for that share a line."""
    notes: list[str] = []
    too_short: dict[str, None] = {}
    for one in series:
        for level in ("throughput", "energy"):
            plateau = one[f"{level}_plateau"]
            if plateau["verdict"] == "too_few_points":
                too_short[one["series"]] = None
            else:
                notes.append(f"{one['series']}, {level}: {plateau['text']}")
    return [*notes, f"too few batch sizes for a plateau: {', '.join(too_short)}"] if too_short else notes


def _what_if(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = [
        (
            row["workload"],
            row["change"],
            format_value(row["energy_j"], "J"),
            format_value(row["new_energy_j"], "J"),
            row["largest"] or "n/a",
            row["new_largest"] or "n/a",
            "n/a" if row["slowdown"] is None else f"{row['slowdown']:.2f}×",
        )
        for row in rows
    ]
    columns = ("workload", "change", "energy", "then", "largest part", "then", "time")
    notes = [f"{row['workload']}, {row['change']}: {row['reason']}" for row in rows if row["reason"]]
    return table_of("what if", columns, shown, notes, {2, 3, 6})


def trend_table(rows: Sequence[Mapping[str, Any]], gpu: str) -> Table:
    """Published energies beside this GPU's."""
    names = list(dict.fromkeys(f"{one['gpu']} ({one['process']})" for row in rows for one in row["published"]))
    shown = []
    for row in rows:
        published = {f"{one['gpu']} ({one['process']})": one["value_j"] for one in row["published"]}
        per = f"J/{row['per']}" if row["per"] else "J"
        own = (_energy(row["this_random_j"], per), _energy(row["this_zero_j"], per))
        shown.append((row["quantity"], *own, *(_energy(published.get(name), per) for name in names)))
    columns = ("quantity", f"{gpu}, random", f"{gpu}, zeros", *names)
    citations = sorted({one["citation"] for row in rows for one in row["published"]})
    notes = ["scopes differ between publications: compare order and trend rather than values", *citations]
    return table_of("beside published energies", columns, shown, notes)


def _energy(value: float | None, unit: str) -> str:
    return _number(value, 3) + " / W" if unit == "1/W" else format_value(value, unit, 3)


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}g}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1%}"
