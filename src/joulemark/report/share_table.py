"""Which part spends how much, side by side over models, GPUs, drivers and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulemark.history.runs import sorted_drivers
from joulemark.records import Table


@dataclass(frozen=True)
class Share:
    """A part's share of a workload's total (of its energy, say).

    Args:
        workload: name of what ran.
        part: that spent it: ``hbm``, ``l2``, ``tensor``, ``static`` …
        share: of the total, 1 for all of it; None where it was not found out.
        interval: (lo, hi) of the share; None where there is none.
        gpu_model, driver, run: where and when it was measured.
    """

    workload: str
    part: str
    share: float | None
    interval: tuple[float, float] | None = None
    gpu_model: str = ""
    driver: str = ""
    run: str = ""


def table_of(shares: Sequence[Share], title: str, confidence: float = 0.95) -> Table:
    """A row per workload, GPU, driver and run, a column per part, the largest part first.

    Args:
        shares: in any order; a part that a row lacks is ``n/a`` there.
        title: over the table.
        confidence: of the intervals.

    Raises:
        ValueError: a part stands twice in a row.
    """
    ranks = {driver: rank for rank, driver in enumerate(sorted_drivers(one.driver for one in shares))}
    cells: dict[tuple[str, str, int, str], dict[str, Share]] = {}
    for one in shares:
        row = cells.setdefault((one.workload, one.gpu_model, ranks[one.driver], one.run), {})
        if one.part in row:
            raise ValueError(f"{one.part!r} stands twice for {one.workload!r} in run {one.run!r}")
        row[one.part] = one
    parts = _by_size(shares)
    drivers = list(ranks)
    rows = tuple(
        (workload, gpu, drivers[rank], run, *(share_text(row.get(part)) for part in parts))
        for (workload, gpu, rank, run), row in sorted(cells.items())
    )
    columns = ("workload", "gpu", "driver", "run", *parts)
    note = f"shares with {confidence:.0%} intervals"
    return Table(columns, rows, frozenset(range(4, len(columns))), (note,) if rows else (), title)


def _by_size(shares: Sequence[Share]) -> list[str]:
    """Parts by the largest share that any row has of them."""
    largest: dict[str, float] = {}
    for one in shares:
        largest[one.part] = max(largest.get(one.part, 0.0), one.share or 0.0)
    return sorted(largest, key=lambda part: (-largest[part], part))


def share_text(share: Share | None) -> str:
    """``34.2% [31.0, 37.4]``."""
    if share is None or share.share is None:
        return "n/a"
    text = f"{100 * share.share:.1f}%"
    if share.interval is None:
        return text
    return f"{text} [{100 * share.interval[0]:.1f}, {100 * share.interval[1]:.1f}]"
