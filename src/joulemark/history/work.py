"""What a sample of a record is of, as far as the record says: figures of other work are no part of one history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from joulemark.records import Row
from joulemark.tandem.turns import BUSY_TABLE, TABLE

PARAMETER = "work"
"""Under which it stands among a case's parameters, where a case did different work in different runs."""
_WHOLE = 1e-4
"""How far a product of two figures may be from the whole number that it stands for."""


def work_of(figures: Mapping[str, float], tables: Mapping[str, Sequence[Row]]) -> str:
    """``8 items``; for a function whose calls are turns, the times that it takes of which batches; empty if unknown.

    Items of a step are its time times the throughput, which is worked out from it. Two records of one case whose text
    differs did different work: of other inputs, or by another version of the function.

    Args:
        figures: of the record by metric name, in base units.
        tables: of the record.
    """
    parts = []
    step_s, rate = figures.get("device_time_s") or figures.get("host_time_s"), figures.get("throughput_per_s")
    items = step_s * rate if step_s and rate else 0.0
    if items >= 1 - _WHOLE and abs(items - round(items)) <= _WHOLE * items:
        parts.append(f"{round(items)} item{'' if round(items) == 1 else 's'}")
    parts += [_turn(rows) for name in (TABLE, BUSY_TABLE) if (rows := tables.get(name))]
    return ", ".join(parts)


def _turn(rows: Sequence[Row]) -> str:
    """``issue_s step_s of batches 1 8 64``: what is timed in a turn."""
    times = sorted({name for row in rows for name in row if name.endswith("_s")})
    batches = sorted({int(row["batch_size"] or 0) for row in rows})
    return f"{' '.join(times)} of batches {' '.join(map(str, batches))}"
