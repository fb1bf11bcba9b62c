"""What stored runs and documents hold about each workload, arranged for a reader: configurations over batch sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from joulemark.history.runs import driver_of
from joulemark.records import Case, Json, Record, Run, Value
from joulemark.tandem import Crossover, crossover_of
from joulemark.utilization.curves import best_equipped_last, by_batch, plateau_of
from joulemark.utilization.plateau import Plateau
from joulemark.utilization.waterfall import Waterfall, waterfall_of

MOST_SHOWN = 12
"""Workloads with answers and figures of their own; the tables hold all."""

CPU = "cpu"
"""Model of a case that ran on no GPU."""
_NEARLY_ALL = 0.9
_BOARD_DIGITS = 8
_PHASES = ("train", "inference", "prefill", "decode")
_ENERGY_NAME = re.compile(r"(?P<workload>.+)-(?P<phase>[a-z]+)-(?P<dtype>[a-z0-9]+)-b(?P<batch>\d+)")


@dataclass(frozen=True)
class Document:
    """A JSON document that joulemark wrote and no run holds: an energy split, say.

    Args:
        path: its file.
        kind: of its schema ``joulemark/<kind>/<version>``.
        content: the document.
    """

    path: Path
    kind: str
    content: Mapping[str, Json]


@dataclass(frozen=True)
class Curve:
    """A workload in one configuration over its batch sizes, of all runs and functions that measured it.

    Args:
        case: the configuration, without batch size and function.
        records: batch size → its measured records, the best equipped last.
        did_not_fit: the smallest batch that ran out of memory; None where none did.
    """

    case: Case
    records: Mapping[int, tuple[Record, ...]]
    did_not_fit: int | None = None

    @property
    def name(self) -> str:
        """``bf16 eager``, with layout's and input's names left out where they are usual."""
        case = self.case
        extra = None if case.input in (None, "device") else case.input
        ranks = f"×{case.world_size}" if case.world_size != 1 else None
        return " ".join(part for part in (case.dtype, case.mode, extra, ranks) if part) or case.workload

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Rising."""
        return tuple(sorted(self.records))

    def record(self, batch: int, has: Callable[[Record], bool]) -> Record | None:
        """The last record of a batch that has something."""
        return next((one for one in reversed(self.records[batch]) if has(one)), None)

    def value(self, batch: int, metric: str) -> Value | None:
        """A figure with its instrument and interval, of the last record that has it."""
        found = self.record(batch, lambda one: one.value(metric) is not None)
        return None if found is None else found.metrics[metric]

    def line(self, metric: str) -> list[tuple[int, Value]]:
        """A metric over the batches that have it."""
        return [(batch, value) for batch in self.batches if (value := self.value(batch, metric)) is not None]

    def positive(self, metric: str) -> list[tuple[int, Value]]:
        """The same without what a logarithmic axis and a ratio cannot take."""
        return [(batch, value) for batch, value in self.line(metric) if value.value is not None and value.value > 0]

    @cached_property
    def plateau(self) -> Plateau:
        """Of throughput over the batch; of which run is told by :func:`joulemark.utilization.curves.plateau_of`."""
        return plateau_of(self.records, self.did_not_fit)

    @cached_property
    def crossover(self) -> Crossover:
        """Of device busy time and host issue time."""
        found = (self.record(batch, lambda one: bool(one.samples.get("gpu_busy_s"))) for batch in self.batches)
        return crossover_of([one for one in found if one is not None])

    @cached_property
    def waterfalls(self) -> Mapping[int, Waterfall | str]:
        """Batch → its waterfall, or why there is none."""
        found: dict[int, Waterfall | str] = {}
        for batch in self.batches:
            tried = [waterfall_of(record) for record in reversed(self.records[batch])]
            found[batch] = next((one for one in tried if isinstance(one, Waterfall)), tried[0])
        return found

    def profiled(self, batch: int) -> Record | None:
        """The record that tells most of a batch's kernels: with counters before without; None without a profile."""
        counted = self.record(batch, lambda one: bool(one.tables.get("timeline") and one.tables.get("levels")))
        return counted or self.record(batch, lambda one: bool(one.tables.get("timeline")))

    @cached_property
    def plateau_batch(self) -> int | None:
        """The first measured batch at or beyond the knee; the largest where there is no knee."""
        knee = self.plateau.knee
        beyond = [batch for batch in self.batches if knee is not None and batch >= knee]
        return beyond[0] if beyond else self.batches[-1] if self.batches else None

    @cached_property
    def weight(self) -> tuple[int, int, int]:
        """How much is known: batches with counters or profile, with energy, with anything."""
        profiled = sum(any(one.tables.get("timeline") or one.value("gpu_busy_s") for one in found)
                       for found in self.records.values())  # fmt: skip
        energy = sum(any(one.value("energy_per_item_j") for one in found) for found in self.records.values())
        return profiled, energy, len(self.records)


@dataclass(frozen=True)
class Workload:
    """A workload in one phase on one GPU model.

    Args:
        key: of its anchor and its figures' file names, unique in a report.
        title: for people, of untrusted parts.
        curves: its configurations, the best known first.
    """

    key: str
    title: str
    curves: tuple[Curve, ...]

    @property
    def main(self) -> Curve:
        """The configuration that answers are about."""
        return self.curves[0]

    @property
    def configuration(self) -> str:
        """Its name; empty where it has none beside the workload's."""
        return "" if self.main.name == self.main.case.workload else self.main.name

    @property
    def full_title(self) -> str:
        """``resnet50 train, bf16 eager``."""
        return f"{self.title}, {self.configuration}" if self.configuration else self.title


@dataclass(frozen=True)
class Evidence:
    """All that a report is made of.

    Args:
        runs: oldest first.
        workloads: that swept a batch size, best known first.
        documents: that no run holds.
    """

    runs: tuple[Run, ...]
    workloads: tuple[Workload, ...]
    documents: tuple[Document, ...] = ()

    @property
    def shown(self) -> tuple[Workload, ...]:
        """Those with answers and figures of their own."""
        return self.workloads[:MOST_SHOWN]

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """Of all runs."""
        return tuple(record for run in self.runs for record in run.records)

    @cached_property
    def colours(self) -> Mapping[str, int]:
        """Name of a configuration → its place in the palette: the same in every figure."""
        names = dict.fromkeys(curve.name for workload in self.shown for curve in workload.curves)
        return {name: at for at, name in enumerate(names)}

    def of_kind(self, kind: str) -> list[Document]:
        """Documents of one schema."""
        return [one for one in self.documents if one.kind == kind]

    @cached_property
    def energy_rows(self) -> Mapping[str, Mapping[str, Json]]:
        """Name of a workload → its row in the documents of ``joulemark energy``; the first document counts."""
        found: dict[str, Mapping[str, Json]] = {}
        for document in self.of_kind("energy"):
            board = {key: document.content.get(key) for key in ("gpu", "gpu_uuid")}
            for row in document.content["rows"]:
                found.setdefault(str(row["workload"]), {**row, **board})
        return found

    def energy_of(self, workload: Workload) -> list[tuple[int, Mapping[str, Json]]]:
        """(batch, row) of a workload's split energy in its main number format, batches rising."""
        case, found = workload.main.case, []
        wanted = (case.workload, case.phase, case.dtype)
        for name, row in self.energy_rows.items():
            match = _ENERGY_NAME.fullmatch(name)
            if match is None or row["split"] is None or not same_gpu(row.get("gpu"), case.gpu_model):
                continue
            if match.group("workload", "phase", "dtype") == wanted:
                found.append((int(match["batch"]), row))
        return sorted(found, key=lambda one: one[0])


def same_gpu(name: Json, model: str) -> bool:
    """Whether a document's name of a GPU, if it has one, is a case's model."""
    return name is None or slug(str(name)) == model


def slug(text: str) -> str:
    """A name for anchors and files: lower-case ASCII letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:60].strip("-") or "unnamed"


def gather(runs: Sequence[Run], documents: Iterable[Document] = ()) -> Evidence:
    """Arrange runs and documents.

    Records of one configuration under one driver stand together, of several runs too, but never those of simulated GPUs
    with others; of a figure, the best equipped run counts: one with a profile before one without, then the newest.

    Args:
        runs: in any order.
        documents: beside them.
    """
    ordered = best_equipped_last(runs)
    groups: dict[tuple[Json, ...], dict[str, list[Record]]] = {}
    drivers: set[str] = set()
    for run in ordered:
        for record in run.records:
            case, driver = record.case, driver_of_record(run, record)
            drivers.add(driver)
            if case.batch_size is not None and case.batch_size > 0:
                simulated = bool(run.is_simulated(record))
                key = (case.workload, case.phase, case.gpu_model, driver, simulated, *sorted(case.params.items()))
                groups.setdefault(key, {}).setdefault(_configuration(case).case_id, []).append(record)
    usual = _usual_gpu(ordered)
    found: list[Workload] = []
    taken: set[str] = set()
    for (_, _, _, driver, simulated, *_), configurations in groups.items():
        curves = sorted(filter(None, map(_curve, configurations.values())), key=_usual, reverse=True)
        if curves:
            name = _with_board(title_of(curves[0].case, usual), next(iter(curves[0].records.values()))[-1])
            name += f", driver {driver}" if len(drivers) > 1 else ""
            name += ", simulated GPU" if simulated else ""
            anchor = untaken(slug(name), taken)
            found.append(Workload(anchor, name, tuple(curves)))
    found.sort(key=_rank)
    oldest = sorted(ordered, key=lambda run: run.started_utc or 0.0)
    return Evidence(tuple(oldest), tuple(found), tuple(documents))


def driver_of_record(run: Run, record: Record) -> str:
    """The driver that a record was measured under, or ``unknown``."""
    environment = run.environments.get(record.environment_id)
    return driver_of({} if environment is None else environment.facts)


def _configuration(case: Case) -> Case:
    return replace(case, batch_size=None, benchmark=None)


def _curve(records: Sequence[Record]) -> Curve | None:
    measured, did_not_fit = by_batch(records)
    return Curve(_configuration(records[0].case), measured, did_not_fit) if measured else None


def _usual(curve: Curve) -> tuple[bool, bool, tuple[int, int, int]]:
    """One GPU and input on the device before others, then eager, then what is known best."""
    case = curve.case
    return case.world_size == 1 and case.input in (None, "device"), case.mode in (None, "eager"), curve.weight


def _usual_gpu(runs: Sequence[Run]) -> str | None:
    """The GPU model of nearly all records, which needs no naming; None where there is none."""
    counts = Counter(record.case.gpu_model for run in runs for record in run.records)
    model, count = counts.most_common(1)[0] if counts else ("", 0)
    return model if count >= _NEARLY_ALL * counts.total() else None


def title_of(case: Case, usual_gpu: str | None) -> str:
    """``resnet50 train``, with parameters, and with the GPU unless it is the usual one."""
    own = [f"{key}={value}" for key, value in sorted(case.params.items())]
    parts = [case.workload, case.phase, *own, None if case.gpu_model == usual_gpu else f"on {case.gpu_model}"]
    return " ".join(part for part in parts if part)


def model_of(record: Record) -> str:
    """The GPU's model as a slug: without the board's UUID, which a sweep over several boards of a model appends."""
    return record.case.gpu_model.removesuffix(_board(record))


def _with_board(title: str, record: Record) -> str:
    """``… on nvidia-h200, board 336f5171`` for ``… on nvidia-h200-336f5171``."""
    board = _board(record)
    return f"{title.removesuffix(board)}, board {board[1:]}" if board and title.endswith(board) else title


def _board(record: Record) -> str:
    """What :mod:`joulemark.plugin.targets` appends to the model: a dash and eight digits of the UUID."""
    digits = (record.gpu_uuid or "").removeprefix("GPU-").removeprefix("MIG-")[:_BOARD_DIGITS]
    return f"-{digits}" if digits and record.case.gpu_model.endswith(f"-{digits}") else ""


def untaken(wanted: str, taken: set[str]) -> str:
    """A key that is not taken yet; then it is."""
    key, number = wanted, 2
    while key in taken:
        key, number = f"{wanted}-{number}", number + 1
    taken.add(key)
    return key


def _rank(workload: Workload) -> tuple[int, int, tuple[int, ...], str]:
    """What is known best first, training before inference."""
    case, weight = workload.main.case, workload.main.weight
    phase = _PHASES.index(case.phase) if case.phase in _PHASES else len(_PHASES)
    known = sum(1 for one in weight[:2] if one) + (weight[2] > 3)
    return -known, phase, tuple(-one for one in weight), workload.title
