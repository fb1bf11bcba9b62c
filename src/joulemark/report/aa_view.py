"""How often gates cry wolf, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from joulemark.metrics import find, format_ratio, format_value
from joulemark.records import Json, Table


def tables(document: Json) -> list[Table]:
    """A document of :func:`joulemark.regression.trials.evaluate` as tables."""
    return [_rates(document), _cells(document)]


def _rates(document: Json) -> Table:
    rows = [
        (
            row["rule"],
            _arm(row["added_work"]),
            *_share(row["rate"], row["interval"]),
            *_share(row["failed_rate"], row["failed_interval"]),
        )
        for row in sorted(document["rates"], key=lambda row: row["added_work"])
    ]
    names = _simulated(document)
    rows += [
        (
            names[row["model"]],
            _arm(row["slowdown"]),
            *_share(row["rate"], row["interval"]),
            "-",
            "-",
        )
        for row in document["simulated"]["rates"]
    ]
    return Table(
        ("rule", "added work", "rows flagged", "of rows", "runs failed", "of runs"),
        tuple(rows),
        frozenset({2, 3, 4, 5}),
        tuple(_notes(document)),
        f"alarms | {find(document['metric']).title} | {', '.join(document['gpu_models'])}",
        lead=_verdict(document),
    )


def _verdict(document: Json) -> str:
    """What the gate did on the same binary, what it finds, and where it finds least."""
    gate = next(row for row in document["rates"] if row["rule"] == "joulemark" and row["added_work"] == 0)
    smallest = document["smallest_slowdown"]
    found, share = smallest["of_all_rows"], f"{smallest['share']:.0%} of trials"
    by_cell: Mapping[str, float | None] = smallest["by_cell"]
    worst, least = max(by_cell.items(), key=lambda one: math.inf if one[1] is None else one[1])
    parts = (
        f"the gate would have failed {gate['failed']} of {gate['comparisons']} comparisons of the same binary",
        f"no slowdown up to 40 % is found in {share}"
        if found is None
        else f"the smallest slowdown found in {share}: {found:.2%}",
        f"worst: {worst}, {'none up to 40 %' if least is None else f'{least:.2%}'}",
        "exit code 0: judged, whatever was found",
    )
    return "; ".join(parts)


def _simulated(document: Json) -> dict[str, str]:
    """What the table calls each model that was simulated: numbered where there are several."""
    models = list(dict.fromkeys(row["model"] for row in document["simulated"]["rates"]))
    return {
        model: f"joulemark, simulated{f' ({number})' if len(models) > 1 else ''}"
        for number, model in enumerate(models, 1)
    }


def _arm(added: float) -> str:
    return f"+{added:.1%}" if added else "none"


def _share(rate: float, interval: Iterable[float]) -> tuple[str, str]:
    lo, hi = interval
    return f"{rate:.2%}", f"{lo:.2%}..{hi:.2%}"


def _notes(document: Json) -> Iterable[str]:
    yield from (f"{name}: {model}" for model, name in _simulated(document).items())
    yield f"of rows, of runs: Wilson's 95 % intervals; {document['resampling']['statement']}"
    yield from document["notes"]


def _cells(document: Json) -> Table:
    smallest: Mapping[str, float | None] = document["smallest_slowdown"]["by_cell"]
    rows = tuple(
        (
            cell["key"],
            format_value(cell["median"], "s"),
            f"{cell['between_processes']:.3%}",
            f"{cell['within_process']:.3%}",
            ", ".join(f"{format_ratio(ratio)}x" for ratio in cell["standing_apart"]) or "-",
            "-" if smallest[cell["key"]] is None else f"{smallest[cell['key']]:.2%}",
            ", ".join(f"{format_ratio(arm['ratio'], 4)}x" for arm in cell["arms"] if arm["added_work"]) or "-",
        )
        for cell in document["cells"]
    )
    return Table(
        ("cell", "median", "between processes", "within", "standing apart", "smallest found", "with added work"),
        rows,
        frozenset({1, 2, 3, 5}),
        title="cells",
    )
