"""The attribution pass: a case's step beside both instruments, its document, and the key figures of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from joulemark.attribution.recording import Recording
from joulemark.attribution.stored import POOLED, write
from joulemark.errors import UnreadableInput, Unsupported
from joulemark.measure.attribution import Plan, record
from joulemark.measure.attribution_bench import Bench
from joulemark.measure.plan import Pass
from joulemark.measure.value import value_of
from joulemark.metrics import ATTRIBUTION
from joulemark.records import Finding, Json, Measurement, Row, Value
from joulemark.workloads.base import Step

TIER = "pm_sampling"
_REMEDY = "--bench-keep-traces keeps what was recorded, for joulemark attribution"
_CELLS = {
    "tensor_active_fraction": "pipe_tensor",
    "issue_slot_fraction": "issue_active",
    "dram_read_bytes": "dram_read_bytes",
    "dram_write_bytes": "dram_write_bytes",
}
"""Column of the record's table → counter of the document."""


@dataclass(frozen=True)
class Attributing:
    """What a measuring process has for attribution.

    Args:
        bench: a device with both instruments; None without them.
        why: there is none, and what would give it.
    """

    bench: Bench | None
    why: str = ""


def attribute_step(
    attributing: Attributing, one: Pass, step: Step, recording: Path, document: Path | None, label: str,
    dtype: str | None,
) -> Measurement:  # fmt: skip
    """Record a step, tell its counters to its kernels, and write the document of that.

    The device is held until the host is ahead, as in the recordings that were set beside Nsight Compute.

    Args:
        attributing: instruments of this process.
        one: its samples are windows; none is begun behind its budget.
        step: to repeat.
        recording: folder to record into.
        document: file to write; None for the figures alone.
        label: of the case.
        dtype: number format of the case, for the roofline; None where it has none.

    Raises:
        Unsupported: the instruments are not there, or a setup runs between the steps.
        DeviceError: the counters of no window could be read; its type says why.
        UnreadableInput: the recording cannot be attributed.
    """
    if attributing.bench is None:
        raise Unsupported(attributing.why)
    from joulemark.attribution import attribute

    plan = Plan(
        one.min_samples, references=dtype is not None, dtype=dtype or Plan.dtype, ahead=True, limit_s=one.budget_s
    )
    done = record(attributing.bench, step, recording, label, plan)
    try:
        found = attribute(recording)
    except UnreadableInput as error:
        remedy = f"{error.remedy}; {_REMEDY}" if error.remedy else _REMEDY
        raise UnreadableInput(f"the recording cannot be attributed: {error.what}", remedy) from error
    if document is not None:
        write(document, found)
    return measurement_of(one.name, found, done)


def measurement_of(name: str, document: Mapping[str, Json], recording: Recording) -> Measurement:
    """The key figures of an attribution, its classes as a table, its Findings.

    Args:
        name: of the pass.
        document: of the attribution.
        recording: that it is of.
    """
    values = dict(_values(document, recording))
    why = "no stretch without the instruments stands beside a window of the recording"
    return Measurement(
        name,
        values,
        {
            "attribution_plain_step_s": list(recording.plain_step_s),
            "attribution_step_s": list(recording.recorded_step_s),
        },
        missing={metric: why for metric in ATTRIBUTION if metric not in values},
        findings=tuple(Finding.from_json(one) for one in document["findings"]),
        tables={"attribution": [_row(entry) for entry in document["classes"]]},
    )


def _values(document: Mapping[str, Json], recording: Recording) -> Iterator[tuple[str, Value]]:
    from joulemark.attribution.document import slowdowns  # its statistics take a while to load

    slower = slowdowns(recording.plain_step_s, recording.recorded_step_s)
    if slower:
        yield "attribution_overhead", value_of(slower, "attribution_overhead", TIER)
    pooled = sum(entry["time_share"] for entry in document["classes"] if entry["class"] == POOLED)
    yield "attributed_fraction", Value(1.0 - pooled, "1", n=document["steps"]["recorded"], tier=TIER)


def _row(entry: Mapping[str, Json]) -> Row:
    """A class of kernels, per step; what no counter told of it is null."""
    counted = {column: entry["counters"].get(name, {}).get("value") for column, name in _CELLS.items()}
    named = {key: entry[key] for key in ("class", "uses_tensor_cores", "time_s", "time_share", "launches")}
    return {**named, **counted}
