"""The record that the reply of a measuring process makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from joulemark.measure.assemble import assemble
from joulemark.plugin.sweep import Target
from joulemark.plugin.targets import shown
from joulemark.records import Case, Finding, Measurement, Record

if TYPE_CHECKING:
    from joulemark.plugin.options import BenchOptions


def record_of(nodeid: str, case: Case, target: Target, reply: Mapping[str, Any], options: BenchOptions) -> Record:
    """The record that a reply makes; its run and its environment are the journal's to name.

    Args:
        nodeid: of the item that was measured.
        case: that it is.
        target: that it was measured on.
        reply: of its measuring process.
        options: of the session.
    """
    if reply.get("gpu_uuid") is not None:  # a cluster's, of the model that the target names
        target = replace(target, uuid=reply["gpu_uuid"])
    findings = [Finding.from_json(one) for one in reply["findings"]]
    if target.note is not None:
        findings.append(Finding("gpu_unverified", target.note, "name the GPU by its UUID", flags=True))
    uuids = tuple(shown(one, options) for one in target.uuids)
    record = assemble(
        case,
        [Measurement.from_json(one) for one in reply["measurements"]],
        run_id="",
        environment_id="",
        outcome=reply["outcome"],
        reason=reply["reason"],
        gpu_uuid=next(iter(uuids), None),
        nodeid=nodeid,
        findings=findings,
        window_utc=tuple(reply["window_utc"]),
        static_power_w=reply.get("static_power_w"),
    )
    return record if case.world_size == 1 or target.lacks is not None else replace(record, rank_gpu_uuids=uuids)
