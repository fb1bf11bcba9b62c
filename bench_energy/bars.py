"""What a calibration, its validation and its splits are held to, and whether they hold it (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joulemark.energy.calibration import Calibration
from joulemark.records import Table

R2 = 0.99
FEWEST_WORKLOADS, LOWEST_W, LOW_SHARE = 20, 150.0, 0.5
MEAN, WORST, DYNAMIC, NETWORKS, CAPPED = 0.05, 0.12, 0.09, 0.035, 0.08
ADVANTAGE = 2.0
RESIDUAL = 0.1

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One thing that is held to a bar.

    Args:
        what: it is.
        seen: its value, in words.
        wanted: the bar, in words.
        holds: whether it is reached; None where nothing was measured.
        why: what falls short.
    """

    what: str
    seen: str
    wanted: str
    holds: bool | None
    why: tuple[str, ...] = ()


def bars(
    calibration: Calibration, validation: Document, splits: Document, wanted: Sequence[str], source: Document
) -> list[Bar]:
    """All of them.

    Args:
        calibration: of the GPU.
        validation: document of the held-out workloads.
        splits: document of the cells whose energy is split.
        wanted: names of the held-out workloads.
        source: document of the measured workloads, which says what failed.
    """
    return [
        *_of_calibration(calibration),
        _of_list(validation, wanted, source.get("failed", {})),
        *_of_validation(validation),
        *_of_training([validation, splits]),
    ]


def table(found: Sequence[Bar]) -> Table:
    """For a reader."""
    words = {True: "yes", False: "NO", None: "not measured"}
    rows = tuple((bar.what, bar.seen, bar.wanted, words[bar.holds]) for bar in found)
    notes = [f"{bar.what}: {why}" for bar in found for why in bar.why]
    short = sum(bar.holds is not True for bar in found)
    title = f"what must hold: {len(found) - short} of {len(found)} do"
    return Table(("what", "seen", "wanted", "holds"), rows, frozenset({1, 2}), tuple(notes), title)


def _of_calibration(calibration: Calibration) -> Iterator[Bar]:
    good = calibration.goodness
    lines = good["lines"]
    short = [line for line in lines if line["r2"] is None or line["r2"] < R2]
    why = tuple(
        f"{line['benchmark']} {line['operands']}, {line['n']} windows at {line['levels']} rates"
        + ("" if line["r2"] is None else f", {line['r2']:.4f}")
        for line in short
    )
    held = f"{len(lines) - len(short)} of {len(lines)}"
    yield Bar("lines with R² of dynamic energy", held, f"≥ {R2}", not short, why)
    wrong = tuple(f"does not hold: {row['statement']}" for row in good["orderings"] if not row["holds"])
    count = len(good["orderings"])
    yield Bar("orderings (zeros, levels)", f"{count - len(wrong)} of {count}", "all", not wrong, wrong)
    bound = [one for one in calibration.coefficients if one.at_bound]
    told = tuple(f"{one.unit} {one.part}: {one.reason}" for one in bound)
    yield Bar("coefficients at their bound", str(len(bound)), "a reason each", all(one.reason for one in bound), told)
    condition = good["condition_number"]
    yield Bar("condition number", "n/a" if condition is None else f"{condition:.3g}", "stated", condition is not None)


def _of_list(document: Document, wanted: Sequence[str], failed: Mapping[str, str]) -> Bar:
    """Every workload of the list has its prediction, or a reason why it has none."""
    reasons = {row["workload"]: row["notes"].get("prediction", "") for row in document["rows"]}
    lacking = {
        name: failed.get(name) or reasons.get(name, "not measured") for name in wanted if reasons.get(name) != ""
    }
    known = len(wanted) - len(lacking)
    holds = known >= FEWEST_WORKLOADS and "not measured" not in lacking.values()
    why = tuple(f"{name}: {reason}" for name, reason in lacking.items())
    return Bar("held-out workloads", f"{known} of {len(wanted)}", "or a reason", holds, why)


def _of_validation(document: Document) -> Iterator[Bar]:
    total, power = document["summary"], document["summary"]["power"]
    lowest = power["lowest_w"]
    yield Bar("lowest power", _text(lowest, "{:.0f} W"), f"≤ {LOWEST_W:.0f} W", _least(lowest, LOWEST_W))
    low = None if power["below_70_percent_of_limit"] is None else power["below_70_percent_of_limit"] / power["n"]
    yield Bar("below 70 % of the power limit", _text(low, "{:.0%}"), f"≥ {LOW_SHARE:.0%}",
              None if low is None else low >= LOW_SHARE)  # fmt: skip
    for what, key, figure, bar in (
        ("mean error, uncapped", "uncapped", "mean_absolute", MEAN),
        ("worst error, uncapped", "uncapped", "worst", WORST),
        ("mean error, their dynamic energy", "uncapped_dynamic", "mean_absolute", DYNAMIC),
        ("mean error, networks", "networks", "mean_absolute", NETWORKS),
        ("mean error, capped, per item", "capped", "mean_absolute", CAPPED),
        ("worst error, capped, per item", "capped", "worst", CAPPED),
    ):
        value = total[key][figure]
        yield Bar(what, _text(value, "{:.1%}"), f"≤ {bar:.1%}", _least(value, bar), _worst(document, key, figure, bar))
    for name, one in total["baselines"].items():
        ours, theirs = total["uncapped"]["mean_absolute"], one["mean_absolute"]
        times = theirs / ours if ours and theirs is not None else None
        yield Bar(f"beaten: {name}", _text(times, "{:.1f}×"), f"≥ {ADVANTAGE:.0f}×",
                  None if times is None else times >= ADVANTAGE)  # fmt: skip


def _worst(document: Document, key: str, figure: str, bar: float) -> tuple[str, ...]:
    """Workloads beyond the bar of the worst, each with what it lacks or has too much."""
    if figure != "worst":
        return ()
    rows = [row for row in document["rows"] if row["capped"] == (key == "capped") and row["error"] is not None]
    beyond = [row for row in rows if abs(row["error"]) > bar]
    return tuple(f"{row['workload']} {row['error']:+.1%}" for row in sorted(beyond, key=lambda one: -abs(one["error"])))


def _of_training(documents: Sequence[Document]) -> Iterator[Bar]:
    """The signed residual of each training cell, whichever list it is on."""
    known = {
        row["workload"]: row["split"]["residual_share"]
        for document in documents
        for row in document["rows"]
        if "-train-" in row["workload"] and row["split"] is not None
    }
    for name, share in sorted(known.items()):
        yield Bar(f"residual: {name}", f"{share:+.1%}", f"< {RESIDUAL:.0%}", abs(share) < RESIDUAL)


def _text(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)


def _least(value: float | None, bar: float) -> bool | None:
    return None if value is None else value <= bar
