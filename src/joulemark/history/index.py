"""An index of the figures of many result files in sqlite, made from the files and remade from them at any time.

The files are the truth. A file is read when its size or time of change is new; whatever is wrong with the index
itself (another version's, cut, not a database), it is thrown away and made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from joulemark import __version__
from joulemark.errors import UnreadableInput
from joulemark.history.lean import LeanReader, LeanRecord, LeanRun
from joulemark.history.runs import Figures, Floats, PastRun, Source, driver_of, order_of, setup_of
from joulemark.history.work import PARAMETER, work_of
from joulemark.records import Case, Environment, Json, Run

_FORMAT = f"4 of joulemark {__version__}"
_FILES_PER_COMMIT = 200
_WAIT_S = 30.0
_TABLES = """
CREATE TABLE format (text TEXT);
CREATE TABLE file (
    id INTEGER PRIMARY KEY, path BLOB UNIQUE, size INTEGER, mtime_ns INTEGER, error TEXT, problems TEXT);
CREATE TABLE run (
    id INTEGER PRIMARY KEY, file INTEGER REFERENCES file ON DELETE CASCADE,
    run_id TEXT, started_utc REAL, driver TEXT, setup TEXT, simulated INTEGER);
CREATE INDEX run_of_file ON run (file);
CREATE TABLE cell (id INTEGER PRIMARY KEY, content TEXT UNIQUE);
-- Texts are JSON. Figures have a row per run and metric with arrays side by side: int32, float64 and int8.
CREATE TABLE figures (
    run INTEGER REFERENCES run ON DELETE CASCADE, metric TEXT, cells BLOB, amounts BLOB, flags BLOB);
CREATE INDEX figures_of_metric ON figures (metric);
CREATE INDEX figures_of_run ON figures (run);
"""


_Cells = dict[tuple[str, str], int]
"""A case's id and its work → their number."""
_Fresh = tuple[bytes, Sequence[int], "LeanRun | Run | str"]
"""Name and stamp of a file, and its run or what is wrong with it."""


def default_path(places: Sequence[Path], environ: Mapping[str, str]) -> Path:
    """Where the index of some results lies: in the user's cache, never among the results.

    Args:
        places: folders and files of the results.
        environ: ``XDG_CACHE_HOME`` counts (XDG Base Directory Specification).
    """
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".cache")
    name = hashlib.sha256(b"\0".join(sorted({os.fsencode(one.resolve()) for one in places}))).hexdigest()[:16]
    return Path(home) / "joulemark" / f"history-{name}.sqlite3"


class Index:
    """The index of a folder of results.

    Args:
        path: of the database; None keeps it in memory.
        anew: throw away what is there.

    Attributes:
        why_in_memory: why it is not kept although a path was given; None when it is.
    """

    def __init__(self, path: Path | None, anew: bool = False) -> None:
        self.why_in_memory: str | None = None
        self._database = self._opened(path, anew)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def _opened(self, path: Path | None, anew: bool) -> sqlite3.Connection:
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if anew:
                    path.unlink(missing_ok=True)
                return _kept(path)
            except (OSError, sqlite3.Error) as error:
                self.why_in_memory = f"the index {path} cannot be kept ({error})"
        return _prepared(sqlite3.connect(":memory:"))

    def update(
        self, folder: Path, files: Iterable[Path], read: Callable[[Path], Run], on_read: Callable[[Path], None] | None
    ) -> None:
        """Read the files that are new or changed, and forget those that are gone.

        Files in which everything is as it should be are read by :mod:`joulemark.history.lean`.

        Args:
            folder: that all files lie in.
            files: the result files as they are now.
            read: what reads any other; its :class:`UnreadableInput` is kept as the file's error.
            on_read: called before each file that is read.
        """
        known = {name: stamp for name, *stamp in self._database.execute("SELECT path, size, mtime_ns FROM file")}
        cells = {(case.case_id, work): key for key, (case, work) in self._cells().items()}
        lean = LeanReader()
        fresh: list[_Fresh] = []
        for path in files:
            name, stamp = os.fsencode(path.relative_to(folder)), _stamp(path)
            if known.pop(name, None) == stamp:
                continue
            if on_read is not None:
                on_read(path)
            fresh.append((name, stamp, lean.read(path) or _run_or_error(path, read)))
            if len(fresh) == _FILES_PER_COMMIT:
                self._take(fresh, cells)
                fresh = []
        self._take(fresh, cells)
        with self._database:
            self._database.executemany("DELETE FROM file WHERE path = ?", [(name,) for name in known])

    def _take(self, fresh: Sequence[_Fresh], cells: _Cells) -> None:
        """Store what was read, all at once: nobody else has to wait while files are read."""
        with self._database:
            for name, stamp, found in fresh:
                self._database.execute("DELETE FROM file WHERE path = ?", (name,))
                error, problems = (found, ()) if isinstance(found, str) else (None, found.problems)
                entry = self._database.execute(
                    "INSERT INTO file (path, size, mtime_ns, error, problems) VALUES (?, ?, ?, ?, ?)",
                    (name, *stamp, _ascii(error), _ascii(problems)),
                ).lastrowid
                for past, records in () if isinstance(found, str) else _by_driver(_lean(found)):
                    self._add(entry, past, records, cells)

    def _add(self, file: int | None, past: PastRun, records: Sequence[LeanRecord], cells: _Cells) -> None:
        row = self._database.execute(
            "INSERT INTO run (file, run_id, started_utc, driver, setup, simulated) VALUES (?, ?, ?, ?, ?, ?)",
            (file, _ascii(past.run_id), past.started_utc, _ascii(past.driver), _ascii(past.setup), past.simulated),
        ).lastrowid
        columns: dict[str, tuple[list[int], list[float], list[bool]]] = {}
        for record in records:
            cell, flagged = self._cell(record, cells), record.outcome == "flagged"
            for name, value in record.figures.items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = ([], [], [])
                column[0].append(cell)
                column[1].append(value)
                column[2].append(flagged)
        self._database.executemany(
            "INSERT INTO figures (run, metric, cells, amounts, flags) VALUES (?, ?, ?, ?, ?)",
            ((row, _ascii(name), *_arrays(column)) for name, column in columns.items()),
        )

    def _cell(self, record: LeanRecord, cells: _Cells) -> int:
        """The number of a case and its work. A case remembers its hash; its content would be written anew each time."""
        key = record.case.case_id, record.work
        cell = cells.get(key)
        if cell is None:
            content = _ascii([record.case.to_json(), record.work])
            # Another process that brings the same index up to date may have been faster.
            self._database.execute("INSERT OR IGNORE INTO cell (content) VALUES (?)", (content,))
            (cell,) = self._database.execute("SELECT id FROM cell WHERE content = ?", (content,)).fetchone()
            cells[key] = cell
        return int(cell)

    def sources(self, folder: Path) -> list[Source]:
        """The files, in order of their names.

        Args:
            folder: that they lie in.
        """
        rows = self._database.execute("SELECT path, error, problems FROM file ORDER BY path")
        return [
            Source(str(folder / os.fsdecode(name)), json.loads(error), tuple(json.loads(problems)))
            for name, error, problems in rows
        ]

    def metrics(self) -> list[str]:
        """Names of the metrics that any run has."""
        return sorted(json.loads(name) for (name,) in self._database.execute("SELECT DISTINCT metric FROM figures"))

    def figures(self, folder: Path, metric: str, wanted: Callable[[Case], bool]) -> Figures:
        """A metric of the cases that are wanted; runs without any of them are left out.

        Runs on simulated GPUs are left out too where there are others: they are no part of one history.

        Args:
            folder: that the files lie in.
            metric: its name.
            wanted: which cases.
        """
        found = self._database.execute(_FIGURES, (_ascii(metric),)).fetchall()
        cells = self._cells()
        measured = [np.empty(0, _KINDS[0]), *(np.frombuffer(row[6], _KINDS[0]) for row in found)]
        used = np.unique(np.concatenate(measured))
        rows, works_apart = _rows_of({key: cells[key] for key in used.tolist() if wanted(cells[key][0])})
        cases = sorted({case.case_id: case for case in rows.values()}.values(), key=_order)
        row_of = {case.case_id: row for row, case in enumerate(cases)}
        place = np.full(max(cells, default=0) + 1, -1)
        for key, case in rows.items():
            place[key] = row_of[case.case_id]
        columns: dict[tuple[str, str, bool], tuple[PastRun, Floats, int]] = {}
        copies = 0
        for path, run_id, started, driver, setup, simulated, *blobs in found:
            at, amounts, flags = (np.frombuffer(blob, kind) for blob, kind in zip(blobs, _KINDS, strict=True))
            inside = place[at] >= 0
            if (run_id, driver, simulated) in columns:
                copies += 1
            elif inside.any():
                column = np.full(len(cases), np.nan)
                column[place[at[inside]]] = amounts[inside]
                place_of = str(folder / os.fsdecode(path))
                name, version, facts = (json.loads(text) for text in (run_id, driver, setup))
                past = PastRun(place_of, name, started, version, facts, bool(simulated))
                columns[run_id, driver, simulated] = past, column, int(flags[inside].sum())
        return replace(_joined(metric, cases, list(columns.values()), copies), works_apart=works_apart)

    def _cells(self) -> dict[int, tuple[Case, str]]:
        """Number → a case and its work."""
        rows = ((key, *json.loads(content)) for key, content in self._database.execute("SELECT id, content FROM cell"))
        return {key: (Case.from_json(case), work) for key, case, work in rows}


def _rows_of(cells: Mapping[int, tuple[Case, str]]) -> tuple[dict[int, Case], int]:
    """Cell → the case of its row, and how many cases have a row for each work: those with several that are known."""
    works: dict[str, set[str]] = {}
    for case, work in cells.values():
        works.setdefault(case.case_id, set()).update({work} - {""})
    rows = {
        key: case
        if len(works[case.case_id]) < 2
        else replace(case, params={**case.params, PARAMETER: work or "unknown"})
        for key, (case, work) in cells.items()
    }
    return rows, sum(len(one) > 1 for one in works.values())


def _joined(metric: str, cases: Sequence[Case], columns: Sequence[tuple[PastRun, Floats, int]], copies: int) -> Figures:
    """Runs in order of time, each with its figures and how many are flagged; cases without a figure are left out."""
    chosen = [column for column in columns if not column[0].simulated] or columns
    ordered = sorted(chosen, key=lambda column: order_of(column[0]))
    values = np.stack([column[1] for column in ordered], axis=1) if ordered else np.empty((len(cases), 0))
    seen = np.flatnonzero(np.isfinite(values).any(axis=1))
    return Figures(
        metric,
        tuple(column[0] for column in ordered),
        tuple(cases[at] for at in seen.tolist()),
        values[seen],
        flagged=sum(column[2] for column in ordered),
        copies=copies,
        simulated_apart=len(columns) - len(chosen),
    )


_KINDS = (np.int32, np.float64, np.int8)
_FIGURES = """
SELECT path, run_id, started_utc, driver, setup, simulated, cells, amounts, flags
FROM figures JOIN run ON run.id = figures.run JOIN file ON file.id = run.file WHERE metric = ? ORDER BY path
"""


def _arrays(column: tuple[list[int], list[float], list[bool]]) -> list[bytes]:
    """Cells, amounts and flags of a metric as the bytes of arrays."""
    return [np.array(part, kind).tobytes() for part, kind in zip(column, _KINDS, strict=True)]


def _ascii(value: Json) -> str:
    """A value's JSON in ASCII: text from files may hold what sqlite takes for no text."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _order(case: Case) -> tuple[str, int, str]:
    return case.series.label, case.batch_size or 0, case.benchmark or ""


def _stamp(path: Path) -> list[int]:
    """What tells a file from its former self; that of a file which is gone is like no other."""
    try:
        found = path.stat()
    except OSError:
        return [-1, -1]
    return [found.st_size, found.st_mtime_ns]


def _run_or_error(path: Path, read: Callable[[Path], Run]) -> Run | str:
    try:
        return read(path)
    except UnreadableInput as error:
        return str(error)


def _kept(path: Path) -> sqlite3.Connection:
    """The database of a file; one that is none, or another version's, is replaced."""
    try:
        database = sqlite3.connect(path, timeout=_WAIT_S)
        if database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            return _prepared(database)
        if database.execute("SELECT text FROM format").fetchone() == (_FORMAT,):
            database.execute("PRAGMA foreign_keys = ON")
            return database
        database.close()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        database.close()
    except sqlite3.DatabaseError:
        database.close()
    path.unlink()
    return _prepared(sqlite3.connect(path, timeout=_WAIT_S))


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    database.executescript(_TABLES)
    database.execute("INSERT INTO format VALUES (?)", (_FORMAT,))
    database.execute("PRAGMA foreign_keys = ON")
    database.commit()
    return database


def _lean(run: LeanRun | Run) -> LeanRun:
    if isinstance(run, LeanRun):
        return run
    records = tuple(
        LeanRecord(
            one.case,
            one.outcome,
            one.environment_id,
            one.gpu_uuid,
            figures,
            work_of(figures, one.tables),
        )
        for one in run.records
        for figures in [{name: value.value for name, value in one.metrics.items() if value.value is not None}]
    )
    return LeanRun(run.path, run.run_id, dict(run.environments), records, run.started_utc, run.problems)


def _by_driver(run: LeanRun) -> list[tuple[PastRun, list[LeanRecord]]]:
    """What a file measured under each driver, simulated GPUs apart: a sweep may be resumed after an update."""
    measured = {record.gpu_uuid for record in run.records if record.gpu_uuid}
    pasts = {key: _past(run, one, measured) for key, one in run.environments.items()}
    unknown = _past(run, Environment({}))
    if len({record.environment_id for record in run.records}) == 1:
        return [(pasts.get(run.records[0].environment_id, unknown), list(run.records))]
    parts: dict[tuple[str, bool], tuple[PastRun, list[LeanRecord]]] = {}
    for record in run.records:
        past = pasts.get(record.environment_id, unknown)
        parts.setdefault((past.driver, past.simulated), (past, []))[1].append(record)
    return list(parts.values())


def _past(run: LeanRun, environment: Environment, measured: Collection[str] = ()) -> PastRun:
    setup = setup_of(environment, measured)
    driver, simulated = driver_of(environment.facts), bool(environment.simulated)
    return PastRun(run.path, run.run_id, run.started_utc, driver, setup, simulated)
