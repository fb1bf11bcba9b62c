"""What flows through joulemark: frozen records in SI base units, and their strict-JSON form.

``Case → Measurement… → Record → results/*.jsonl → Comparison → Table``. The JSON form of each line
of a result file is described by ``docs/schema/sweep.schema.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Self, TypedDict, TypeVar

import msgspec

from joulemark.bounds import MOST, check_figures

SCHEMA = "joulemark/sweep/1"

Outcome = Literal["ok", "flagged", "oom", "unsupported", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "flagged", "oom", "unsupported", "failed")
Json = Any
"""A value of strict JSON: None, bool, int, finite float, str, list or dict with str keys."""
_LARGEST = 1e100
"""No figure of ours comes near it; beyond it, ratios and products of two would overflow."""
Finite = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
"""A number of a file: JSON's 1e999 is an infinity in Python, and none here."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]
"""A number that is not negative."""
Duration = Annotated[float, msgspec.Meta(gt=0, le=MOST["s"])]
"""Seconds that something took."""
Hertz = Annotated[float, msgspec.Meta(ge=-MOST["Hz"], le=MOST["Hz"])]
Celsius = Annotated[float, msgspec.Meta(ge=-MOST["degC"], le=MOST["degC"])]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_AnyFinite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Row = Mapping[str, str | int | _AnyFinite | bool | None]
"""A row of a small table that a record carries: kernel classes, levels per phase …"""


def canonical_json(value: Json) -> str:
    """One spelling per value: sorted keys, no blanks, no NaN.

    Raises:
        ValueError: NaN or an infinity is inside.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Json) -> str:
    """Sixteen hex digits that identify a JSON value."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


_T = TypeVar("_T")


def converted(data: Json, kind: type[_T]) -> _T:
    """Data of a file as a dataclass or typed dictionary, held to the types of its fields.

    Raises:
        ValueError: an entry that must be there is missing, or one is not of its field's type; says which.
    """
    try:
        one: _T = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return one


class _FromJson:
    """What is read from JSON and held to the types of its fields; entries that are no field are newer, and left out."""

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Self:
        """One of these.

        Raises:
            ValueError: an entry that must be there is missing, or one is not of its field's type; says which.
        """
        return converted(data, cls)


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def _fields_of(one: object) -> dict[str, Json]:
    """The fields of a flat dataclass in their order; ``asdict`` copies each value deeply, at six times the cost."""
    cls: type = type(one)
    return {name: getattr(one, name) for name in _field_names(cls)}


@dataclass(frozen=True)
class Case(_FromJson):
    """One cell of a sweep. What does not apply to a workload is None.

    Args:
        workload: zoo name, ``pkg.mod:factory`` or name of the user's function.
        phase: ``inference``, ``train``, ``prefill`` or ``decode``.
        mode: ``eager``, ``jit``, ``compile`` or ``graph``.
        dtype: ``fp32`` (TF32 off), ``tf32`` (fp32 with TF32 on), ``bf16`` or ``fp16``.
        batch_size: samples per step.
        layout: ``channels_last`` or ``contiguous``.
        input: where a step's input comes from: ``device``, ``pinned``, ``pageable`` or ``loader``.
        gpu_model: NVML's name as a slug (``nvidia-h200``), or ``cpu``.
        world_size: number of GPUs that work together.
        params: the user's own pytest parameters, as JSON scalars.
        benchmark: function that swept the workload; None where the workload itself is the function.
    """

    workload: str
    phase: str | None = None
    mode: str | None = None
    dtype: str | None = None
    batch_size: Positive | None = None
    layout: str | None = None
    input: str | None = None
    gpu_model: str = "cpu"
    world_size: Positive = 1
    params: Row = field(default_factory=dict)
    benchmark: str | None = None

    @cached_property
    def case_id(self) -> str:
        """Hash of the canonical case: equal over runs, machines and orders of parameters."""
        return digest(self.to_json())

    @property
    def label(self) -> str:
        """``resnet50-train-bf16-eager-b32-nvidia-h200``: the id of its pytest item."""
        batch = None if self.batch_size is None else f"b{self.batch_size}"
        extras = [
            self.layout if self.layout not in (None, "contiguous") else None,
            self.input if self.input not in (None, "device") else None,
            f"x{self.world_size}" if self.world_size != 1 else None,
        ]
        own = [f"{key}={value}" for key, value in sorted(self.params.items())]
        parts = [self.workload, self.phase, self.dtype, self.mode, batch, *extras, *own, self.gpu_model]
        return "-".join(part for part in parts if part)

    @property
    def series(self) -> Case:
        """The case without its batch size: larger batches of one series are not tried after an out-of-memory."""
        return replace(self, batch_size=None)

    def to_json(self) -> dict[str, Json]:
        return {**_fields_of(self), "params": dict(self.params)}

    def series_to_json(self) -> dict[str, Json]:
        """What the cases of a series have in common."""
        return {name: value for name, value in self.to_json().items() if name != "batch_size"}


@dataclass(frozen=True)
class Value(_FromJson):
    """One figure of a record.

    Args:
        value: in the unit's base scale; None when it was not measured (the record's notes say why).
        unit: see :mod:`joulemark.metrics`.
        interval: (lo, hi) in the same unit; None when there are too few samples for one.
        confidence: of the interval.
        n: number of samples behind it.
        tier: the instrument: ``cuda_events``, ``host_clock``, ``nvml_energy_counter``, ``rapl`` …
    """

    value: Finite | None
    unit: str
    interval: tuple[Finite, Finite] | None = None
    confidence: Share = 0.95
    n: Count = 0
    tier: str | None = None

    def __post_init__(self) -> None:
        for number in (self.value, *(self.interval or ())):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"a record holds finite numbers or null, not {number!r}")

    def to_json(self) -> dict[str, Json]:
        return {**_fields_of(self), "interval": None if self.interval is None else list(self.interval)}


@dataclass(frozen=True)
class Finding(_FromJson):
    """Something about a figure that its reader must know.

    Args:
        code: stable snake_case name.
        message: what was seen, with the value.
        remedy: what to do; empty when nothing helps.
        flags: whether the record is ``flagged`` for it (kept out of silent comparison).
    """

    code: str
    message: str
    remedy: str = ""
    flags: bool = False

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


@dataclass(frozen=True)
class Conditions(_FromJson):
    """The state of the device over a window, from its own sensors. What could not be read is None.

    Args:
        sm_clock_hz, memory_clock_hz: medians.
        max_sm_clock_hz: the clock that the GPU would reach unhindered.
        temperature_c: highest.
        reasons: clock-event reason (``power_cap``, ``thermal`` …) → share of the samples in which it was active.
        n: number of samples.
    """

    sm_clock_hz: Hertz | None = None
    memory_clock_hz: Hertz | None = None
    max_sm_clock_hz: Hertz | None = None
    temperature_c: Celsius | None = None
    reasons: Mapping[str, Share] = field(default_factory=dict)
    n: Count = 0

    def to_json(self) -> dict[str, Json]:
        return {**asdict(self), "reasons": dict(self.reasons)}


def _tables_to_json(tables: Mapping[str, list[Row]]) -> dict[str, Json]:
    return {name: [dict(row) for row in rows] for name, rows in tables.items()}


@dataclass(frozen=True)
class Measurement(_FromJson):
    """What one pass saw of one case; a fresh process hands it to its parent in JSON.

    Args:
        name: the pass: ``latency``, ``steady``, ``cold``, ``graph``, ``power`` …
        values: figures by metric name.
        samples: raw samples by name, in base units.
        missing: metric name → why it was not measured.
        findings: what the pass itself noticed.
        conditions: of the device over the pass.
        windows_utc: (start, end) of the windows whose samples are stored, seconds since the Unix epoch.
        process: number of the measuring process, from 0.
        tables: rows by the table's name, in base units: what is no single figure.
    """

    name: str
    values: Mapping[str, Value] = field(default_factory=dict)
    samples: Mapping[str, list[Finite]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    conditions: Conditions | None = None
    windows_utc: tuple[tuple[Finite, Finite], ...] = ()
    process: Count = 0
    tables: Mapping[str, list[Row]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "values": {key: value.to_json() for key, value in self.values.items()},
            "samples": {key: list(values) for key, values in self.samples.items()},
            "missing": dict(self.missing),
            "findings": [finding.to_json() for finding in self.findings],
            "conditions": None if self.conditions is None else self.conditions.to_json(),
            "windows_utc": [list(window) for window in self.windows_utc],
            "process": self.process,
            "tables": _tables_to_json(self.tables),
        }


_Kernels = TypedDict("_Kernels", {"class": str, "uses_tensor_cores": bool | None, "time_s": Amount})


class _Kernel(_Kernels):
    name: str


class _Timeline(TypedDict):
    busy_s: Amount
    profiled_s: Duration
    plain_s: Amount


class _Level(TypedDict):
    tier: str
    phase: str
    level: str
    value: Finite | None


class _Reference(TypedDict, total=False):
    share: Amount | None
    peak_counts_per_s: Amount | None
    step_share: Amount | None
    step_peak_counts_per_s: Amount | None


class _IssueTurn(TypedDict):
    case_id: str
    batch_size: Positive
    round: Count
    issue_s: Duration
    step_s: NotRequired[Duration]
    sm_clock_hz: NotRequired[Amount | None]


class _BusyTurn(TypedDict):
    case_id: str
    batch_size: Positive
    replayed: bool
    busy_s: Duration | None
    sm_clock_hz: NotRequired[Amount | None]


class KnownTables(TypedDict, total=False):
    """What is computed with in the tables of a record; rows and tables may hold more."""

    kernel_classes: list[_Kernels]
    kernels: list[_Kernel]
    timeline: list[_Timeline]
    levels: list[_Level]
    reference: list[_Reference]
    issue_turns: list[_IssueTurn]
    busy_turns: list[_BusyTurn]


@dataclass(frozen=True)
class Record(_FromJson):
    """One line of a result file: a case with everything that was measured of it.

    Args:
        metrics: figures by metric name; a missing figure has ``value`` None and its reason in ``notes``.
        samples: raw samples by name, pooled over processes in the order of ``processes``.
        notes: metric name → why it was not measured.
        window_utc: (start, end) of the whole case, seconds since the Unix epoch.
        measured_windows_utc: the windows whose samples are stored.
        processes: per measuring process its own medians, by metric name.
        tables: rows by the table's name, in base units (see ``docs/metrics.md``).
        sample_counts: how many samples each of ``processes`` has in ``samples``, by name; empty in files that older
            versions wrote.
        rank_gpu_uuids: GPUs of a case with several ranks, in order of rank; empty for one, and on the CPU.
    """

    case: Case
    run_id: str
    outcome: Outcome
    environment_id: str
    reason: str | None = None
    gpu_uuid: str | None = None
    nodeid: str | None = None
    metrics: Mapping[str, Value] = field(default_factory=dict)
    samples: Mapping[str, list[Finite]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    conditions: Conditions | None = None
    window_utc: tuple[Finite, Finite] | None = None
    measured_windows_utc: tuple[tuple[Finite, Finite], ...] = ()
    processes: tuple[Mapping[str, Finite], ...] = ()
    tables: Mapping[str, list[Row]] = field(default_factory=dict)
    sample_counts: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    rank_gpu_uuids: tuple[str, ...] = ()

    @property
    def case_id(self) -> str:
        return self.case.case_id

    def value(self, metric: str) -> float | None:
        """The figure of a metric, None when it was not measured."""
        found = self.metrics.get(metric)
        return None if found is None else found.value

    def samples_by_process(self, name: str) -> list[list[float]] | None:
        """Raw samples of one name, a list per measuring process; None where the record does not tell them apart."""
        samples, counts = self.samples.get(name, []), self.sample_counts.get(name)
        if counts is None and len(self.processes) < 2:
            counts = (len(samples),)
        if counts is None or sum(counts) != len(samples):
            return None
        ends = list(accumulate(counts))
        return [samples[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": "record",
            "schema": SCHEMA,
            "run_id": self.run_id,
            "case_id": self.case_id,
            "case": self.case.to_json(),
            "nodeid": self.nodeid,
            "gpu_uuid": self.gpu_uuid,
            "outcome": self.outcome,
            "reason": self.reason,
            "metrics": {name: value.to_json() for name, value in self.metrics.items()},
            "samples": {name: list(values) for name, values in self.samples.items()},
            "notes": dict(self.notes),
            "findings": [finding.to_json() for finding in self.findings],
            "conditions": None if self.conditions is None else self.conditions.to_json(),
            "window_utc": None if self.window_utc is None else list(self.window_utc),
            "measured_windows_utc": [list(window) for window in self.measured_windows_utc],
            "processes": [dict(process) for process in self.processes],
            "tables": _tables_to_json(self.tables),
            "sample_counts": {name: list(counts) for name, counts in self.sample_counts.items()},
            "environment_id": self.environment_id,
            **({"rank_gpu_uuids": list(self.rank_gpu_uuids)} if self.rank_gpu_uuids else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Self:
        converted(data.get("tables", {}), KnownTables)
        record = super().from_json(data)
        check_figures(record.metrics, record.samples, record.processes)
        return record


NOT_REAL = "no figure of power or energy is real"
"""What is said of simulated GPUs wherever they are named."""


@dataclass(frozen=True)
class Environment(_FromJson):
    """Where a run took place; stored once per run.

    Args:
        facts: JSON of software, host and GPUs (see ``docs/metrics.md``); a missing fact is None.
        tiers: instrument → tier in use, or None with its reason in ``notes``.
        notes: what is off and why.
    """

    facts: Mapping[str, Json]
    tiers: Mapping[str, str | None] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment_id(self) -> str:
        return digest({"facts": dict(self.facts), "tiers": dict(self.tiers)})

    @property
    def simulated(self) -> bool | None:
        """Whether its GPUs are simulated ones (see :mod:`joulemark.testing`); None where the file does not say."""
        told = self.facts.get("simulated")
        return told if isinstance(told, bool) else None

    @property
    def gpus(self) -> list[Mapping[str, Json]]:
        """The facts' list of GPUs; empty where there is none."""
        listed = self.facts.get("gpus")
        return [gpu for gpu in listed if isinstance(gpu, Mapping)] if isinstance(listed, list) else []

    def to_json(self, run_id: str, started_utc: float) -> dict[str, Json]:
        return {
            "kind": "environment",
            "schema": SCHEMA,
            "run_id": run_id,
            "environment_id": self.environment_id,
            "started_utc": started_utc,
            "facts": dict(self.facts),
            "tiers": dict(self.tiers),
            "notes": dict(self.notes),
        }


@dataclass(frozen=True)
class Run:
    """A result file, read.

    Args:
        path: the file; empty for a run in memory.
        environments: by environment_id, in the order of the file.
        records: in the order of the file; a case measured again (resume) counts by its last line.
        completed: whether the file ends with ``completed``; False after a kill or an interrupt.
        wall_s, measured_s: of the ``end`` lines, added over resumed parts; None when there is none.
        problems: lines of the file that could not be read, in words.
        source: ``joulemark`` or ``pytest-benchmark``.
        started_utc: when the run began, seconds since the Unix epoch; None when the file does not say.
        reason: why the run is not complete, of its last ``end`` line.
    """

    path: str
    run_id: str
    environments: Mapping[str, Environment]
    records: tuple[Record, ...]
    completed: bool
    wall_s: float | None = None
    measured_s: float | None = None
    problems: tuple[str, ...] = ()
    source: str = "joulemark"
    started_utc: float | None = None
    reason: str | None = None

    @property
    def simulated(self) -> bool:
        """Whether any of its GPUs are simulated."""
        return any(one.simulated for one in self.environments.values())

    def is_simulated(self, record: Record) -> bool | None:
        """Whether a record is of simulated GPUs; None where the file does not say."""
        environment = self.environments.get(record.environment_id)
        return None if environment is None else environment.simulated


def of_simulated(runs: Iterable[Run]) -> list[str]:
    """A line that says which of some runs were measured on simulated GPUs; empty where none was."""
    files = [Path(run.path).name for run in runs if run.simulated]
    return [f"measured on simulated GPUs: {', '.join(files)}: {NOT_REAL}"] if files else []


@dataclass(frozen=True)
class Table:
    """Rows of text ready for any printer, identifiers kept character for character.

    Args:
        columns: headings.
        rows: cells as text; numbers are already formatted with their units.
        numeric: indices of columns to align right.
        notes: lines under the table.
        title: heading over it.
        lead: what is to be read before all else, over the title.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    title: str = ""
    lead: str = ""
