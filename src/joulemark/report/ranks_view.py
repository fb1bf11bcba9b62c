"""Communication of the ranks of one run as text for a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from joulemark.metrics import format_value
from joulemark.records import Json, Table

_COLUMNS = ("rank", "collectives", "comm.", "exposed comm.", "overlap", "computation")
_SOURCES = {"device": "kernels of the communication library", "host": "ranges of gloo on the host"}


def tables(document: Mapping[str, Json]) -> list[Table]:
    """Of the document of :func:`joulemark.trace.communication.ranks_document`."""
    return [ranks_table(document)]


def ranks_table(document: Mapping[str, Json]) -> Table:
    """A row per rank and one for their mean; the straggler stands below."""
    rows = [_row(str(one["rank"]), str(one["collectives"]), one) for one in document["ranks"]]
    rows.append(_row("mean", "", {"compute_s": None, **document}))
    late = document["straggler"]
    if late is None:
        said = "straggler: none; no rank comes last more often than chance would have it"
    else:
        wait = format_value(document["straggler_wait_s"], "s")
        said = (
            f"straggler: rank {late['rank']} comes last in {late['last_in']} of {document['iterations']} iterations; "
            f"the others wait for it, up to {wait} per iteration"
        )
    title = f"communication per iteration, medians over {document['iterations']}"
    notes = (said, f"communication: {_SOURCES[document['source']]}")
    return Table(_COLUMNS, tuple(rows), numeric=frozenset(range(1, len(_COLUMNS))), title=title, notes=notes)


def _row(name: str, collectives: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    keys = ("communication_s", "exposed_communication_s")
    times = [format_value(entry[key], "s") for key in keys]
    computed = "" if entry["compute_s"] is None else format_value(entry["compute_s"], "s")
    return (name, collectives, *times, format_value(entry["overlap_fraction"], "1"), computed)
