"""What sequences of layers as one kernel gain by themselves: merged beside itself with every layer alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from joulemark.merged_bench.networks import figure, gain, in_order
from joulemark.merged_bench.remarks import of_use
from joulemark.records import Table

_COLUMNS = ("network", "sequences", "layers in them", "layer by layer", "merged", "gain of sequences")
_NOTE = (
    "layer by layer: what merging gives with depth=1, each layer alone on its best path and all else as ever, measured "
    "in the same process; both in bursts. Where merging takes no sequence, what stands there is how far two like plans "
    "are apart."
)


def sequences_table(document: Mapping[str, Any]) -> Table | None:
    """A row per network and batch that was measured both ways, and geometric means; None where none was."""
    rows = in_order(one for one in of_use(document) if one["gains"].get("over_layerwise") is not None)
    if not rows:
        return None
    cells = [*map(_cells, rows), *_means(rows)]
    title = f"What sequences gain, over every layer alone ({document['gpu']})"
    return Table(_COLUMNS, tuple(cells), frozenset(range(1, len(_COLUMNS))), (_NOTE,), title)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    merged, alone = row["rivals"]["merged"], row["rivals"]["layerwise"]
    counts = (merged.get(name) for name in ("merged_ranges", "merged_layers"))
    return (
        row["subject"],
        *("–" if one is None else str(one) for one in counts),
        figure(alone["burst_s"], "s"),
        figure(merged["burst_s"], "s"),
        gain(row["gains"]["over_layerwise"]),
    )


def _means(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Geometric means per batch."""
    cells: list[tuple[str, ...]] = []
    for batch in sorted({row["shape"][0] for row in rows}):
        known = [row["gains"]["over_layerwise"] for row in rows if row["shape"][0] == batch]
        cells.append((f"geometric mean, batch {batch}, of {len(known)}", "", "", "", "", gain(geometric_mean(known))))
    return cells
