"""Shares of measured energy, each with its interval, side by side over workloads, GPUs, drivers and runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from joulemark.device.gpu import slug
from joulemark.energy import stored
from joulemark.energy.validation import SCHEMA
from joulemark.errors import UnreadableInput, in_words
from joulemark.records import Table
from joulemark.report.share_table import Share, table_of

TITLE = "where the joules went: shares of measured energy"


def read_shares(paths: Iterable[Path]) -> list[Share]:
    """The shares of documents of ``joulemark energy`` (``energy-split.json``).

    Where several split one measurement (by another calibration, say), their files tell them apart.

    Raises:
        UnreadableInput: a file is none.
    """
    read = [(path, _read(path)) for path in dict.fromkeys(paths)]
    runs = Counter(document["measured_utc"] for _, document in read)
    found: list[Share] = []
    for path, document in read:
        measured = document["measured_utc"]
        run = str(path) if not measured else f"{measured} {path}" if runs[measured] > 1 else measured
        found += _shares(document, run)
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        stored.check(document)
        twice = [name for name, count in Counter(row["workload"] for row in document["rows"]).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} stands twice")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableInput(
            f"{path} holds no split of energy ({in_words(error)})",
            "give what joulemark energy FILE --calibration F --out wrote",
        ) from error
    return document  # type: ignore[no-any-return]


def _shares(document: Mapping[str, Any], run: str) -> Iterator[Share]:
    where = {
        "gpu_model": slug(document["gpu"]) if document["gpu"] else "",
        "driver": document["driver"] or "",
        "run": run,
    }
    for row in document["rows"]:
        split = row["split"]
        if split is None:
            continue
        measured = split["measured_j"]
        for part, interval in split["share_intervals"].items():
            parts = split["parts"].get(part)
            share = split["residual_share"] if parts is None else sum(parts.values()) / measured
            yield Share(row["workload"], part, share, (interval[0], interval[1]), **where)


def shares_table(shares: Sequence[Share]) -> Table:
    """The shares as one table."""
    return table_of(shares, TITLE)
