"""Reads what the index needs of a result file of joulemark at a twentieth of the cost, or leaves it to the store.

A record line is decoded straight into typed fields, of the very types that :class:`joulemark.records.Record` holds its
lines to, and most of it is thrown away. A file with any line that is not understood this way is not read here at all:
the store's reader takes it whole, and says what is wrong with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from joulemark.bounds import check_figures
from joulemark.history.work import work_of
from joulemark.records import (
    SCHEMA,
    Case,
    Conditions,
    Count,
    Environment,
    Finding,
    Finite,
    KnownTables,
    Outcome,
    Row,
    Share,
    converted,
)
from joulemark.store import Reading

_MOST_CASES = 100_000
"""Texts of cases that are remembered."""


class _Figure(msgspec.Struct, gc=False):
    value: Finite | None
    unit: str
    interval: tuple[Finite, Finite] | None = None
    confidence: Share = 0.95
    n: Count = 0
    tier: str | None = None


class _Line(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A record line: the fields of a Record and what its line adds; nothing else, so that nothing is skipped unread."""

    kind: Literal["record"]
    schema: Annotated[str, msgspec.Meta(pattern=f"^{SCHEMA}$")]
    run_id: Annotated[str, msgspec.Meta(min_length=1)]
    case: msgspec.Raw
    outcome: Outcome
    environment_id: str
    case_id: str = ""
    reason: str | None = None
    nodeid: str | None = None
    gpu_uuid: str | None = None
    metrics: dict[str, _Figure] = {}
    samples: dict[str, list[Finite]] = {}
    notes: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()
    conditions: Conditions | None = None
    window_utc: tuple[Finite, Finite] | None = None
    measured_windows_utc: tuple[tuple[Finite, Finite], ...] = ()
    processes: tuple[dict[str, Finite], ...] = ()
    tables: dict[str, list[Row]] = {}
    sample_counts: dict[str, tuple[Count, ...]] = {}
    rank_gpu_uuids: tuple[str, ...] = ()


class LeanRecord(msgspec.Struct, gc=False):
    """What the index needs of a record: a struct, since a store of thousands of runs has a million of them.

    Args:
        figures: value by metric name, of those that were measured.
        work: see :func:`joulemark.history.work.work_of`.
    """

    case: Case
    outcome: str
    environment_id: str
    gpu_uuid: str | None
    figures: dict[str, float]
    work: str


@dataclass(frozen=True)
class LeanRun:
    """What the index needs of a run; the fields are those of :class:`joulemark.records.Run`."""

    path: str
    run_id: str
    environments: dict[str, Environment]
    records: tuple[LeanRecord, ...]
    started_utc: float | None
    problems: tuple[str, ...] = ()


class LeanReader:
    """Reads result files whose every line is as it should be."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Line).decode
        self._cases: dict[bytes, Case] = {}

    def read(self, path: Path) -> LeanRun | None:
        """The run of a file; None where the store's reader must look, at a file that is no file of ours above all."""
        reading = Reading()
        records: dict[str, LeanRecord] = {}
        try:
            text = path.read_bytes()
            if not text.isascii():
                text.decode("utf-8")  # msgspec lets some bytes pass that are none
        except (OSError, UnicodeDecodeError):
            return None
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            try:
                found = self._decode(line)
                case = self._case(bytes(found.case))
                if found.tables:
                    converted(found.tables, KnownTables)
                check_figures(found.metrics, found.samples, found.processes)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                if line.strip():
                    reading.take(number, line, line.endswith(b"\n"))
                if reading.problems or reading.records:
                    return None
                continue
            figures = {name: figure.value for name, figure in found.metrics.items() if figure.value is not None}
            records.pop(case.case_id, None)  # the place of its last line, as in the store's reader
            records[case.case_id] = LeanRecord(
                case, found.outcome, found.environment_id, found.gpu_uuid, figures, work_of(figures, found.tables)
            )
            reading.run_id = reading.run_id or found.run_id
        if reading.run_id is None or not records:
            return None
        return LeanRun(str(path), reading.run_id, reading.environments, tuple(records.values()), reading.started_utc)

    def _case(self, text: bytes) -> Case:
        """The case of a text, the same object for the same text: a sweep repeats its cases run after run."""
        case = self._cases.get(text)
        if case is None:
            if len(self._cases) >= _MOST_CASES:
                self._cases.clear()
            case = self._cases[text] = converted(json.loads(text), Case)
        return case
