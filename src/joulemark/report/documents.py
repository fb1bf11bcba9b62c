"""Documents that joulemark wrote beside its runs (an energy split, say), found among what a report is given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from joulemark.attribution import stored as attribution
from joulemark.energy import stored as energy
from joulemark.errors import ConfigurationError, UnreadableInput, in_words
from joulemark.records import Json, Run
from joulemark.report import foreign
from joulemark.report.evidence import Document
from joulemark.store import kind_of

WANTED = ("energy", "attribution")
"""Kinds that a section of the report shows: of schema ``joulemark/<kind>/<version>``."""

_SHOWN_BY = {
    "merged": "python bench_inference/bench_merged.py table FILE, in a clone, shows it",
    "merged-restarts": "python tests/gpu/merged_restarts.py --show FILE, in a clone, shows it",
    "calibration": "joulemark energy --calibration FILE shows it",
}
"""Kind of a document that no report shows → what does."""


def read_all(paths: Sequence[Path]) -> tuple[list[Run], list[Document], list[str]]:
    """Runs and documents of some files and folders.

    Documents that are made of runs (``tandem``, ``utilization`` …) are passed over: their runs tell the same.

    Returns:
        the runs, the documents, and a line for each file of a folder that cannot be used.

    Raises:
        UnreadableInput: a file that is named cannot be used.
        ConfigurationError: a document is named that no report shows.
    """
    runs: list[Run] = []
    documents: list[Document] = []
    unusable: list[str] = []
    for path in paths:
        if path.is_dir():
            inside, lines = in_folder(path)
            found, more = foreign.read_results([path])
            runs += found
            documents += inside
            unusable += (*lines, *more)
        elif (kind := kind_of(path)) in WANTED and kind is not None:
            documents.append(read(path, kind))
        elif kind is not None:
            what = f"{path} holds a document of joulemark {kind}, which no report shows"
            runs_wanted = "give runs (sweep-*.jsonl), and documents of joulemark energy and joulemark attribution"
            raise ConfigurationError(what, _SHOWN_BY.get(kind, runs_wanted).replace("FILE", str(path)))
        else:
            runs += foreign.read_results([path])[0]
            inside, lines = in_folder(attribution.folder_beside(path))
            documents += inside
            unusable += lines
    return runs, documents, unusable


def in_folder(folder: Path, wanted: Collection[str] = WANTED) -> tuple[list[Document], list[str]]:
    """Documents of some kinds in a folder and those below it, by what they are of; none where there is no folder.

    Returns:
        the documents, and a line for each that cannot be used.
    """
    found: list[Document] = []
    unusable: list[str] = []
    for path in sorted(folder.rglob("*.json")):
        kind = kind_of(path)
        if kind is None or kind not in wanted:
            continue
        try:
            found.append(read(path, kind))
        except UnreadableInput as error:
            unusable.append(str(error))
    return sorted(found, key=_by_label), unusable


def _by_label(document: Document) -> str:
    """Batch 8 before batch 16."""
    label = str(document.content.get("label", document.path))
    return re.sub(r"[0-9]+", lambda number: number[0].zfill(12), label)


def read(path: Path, kind: str) -> Document:
    """A document of one of the kinds that are wanted.

    Raises:
        UnreadableInput: it is none, or not whole.
    """
    try:
        content: Json = json.loads(path.read_text(encoding="utf-8"))
        schema = content.get("schema") if isinstance(content, dict) else None
        if not str(schema).startswith(f"joulemark/{kind}/"):
            raise ValueError(f"its schema is {schema!r}")
        _CHECKS[kind](content)
    except (OSError, ValueError, RecursionError) as error:
        what = f"{path} is no whole document of joulemark {kind} ({in_words(error)})"
        raise UnreadableInput(what, f"give one that joulemark {kind} --out has written, or make it again") from error
    return Document(path, kind, content)


_CHECKS: Mapping[str, Callable[[Json], None]] = {"energy": energy.check, "attribution": attribution.check}
