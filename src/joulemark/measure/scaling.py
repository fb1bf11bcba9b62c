"""How throughput grows with the number of ranks (pure)."""

from __future__ import annotations

from dataclasses import replace

from joulemark.records import Finding, Record, Value

_MEASURED = ("ok", "flagged")
_SHARED_CORES = "ranks_share_cores"


def with_efficiency(record: Record, one: Record | None) -> Record:
    """The record of N ranks with its scaling efficiency, or with the reason why there is none.

    Weak scaling: every rank has the batch that the one rank had, so that N ranks at best have N times its throughput
    (Gustafson, *Reevaluating Amdahl's law*, 1988). The interval combines the bounds of both throughputs.

    Args:
        record: of a case with several ranks.
        one: of the same case with one rank, measured in the same run; None where there is none.
    """
    if record.outcome not in _MEASURED:
        return record
    efficiency, why = _efficiency(record, one)
    metrics = {**record.metrics, "scaling_efficiency": efficiency or Value(None, "1")}
    notes = record.notes if efficiency is not None else {**record.notes, "scaling_efficiency": why}
    findings = record.findings
    if record.case.gpu_model == "cpu":
        text = (
            f"{record.case.world_size} ranks share the cores of one CPU: their efficiency is not that of several CPUs"
        )
        findings = (*findings, Finding(_SHARED_CORES, text))
    return replace(record, metrics=metrics, notes=notes, findings=findings)


def _efficiency(record: Record, one: Record | None) -> tuple[Value | None, str]:
    name = "throughput_per_s"
    if one is None:
        return None, "this run has no row of one rank to compare with (--bench-world-size 1,…)"
    if one.outcome not in _MEASURED:
        return None, f"the case with one rank ended {one.outcome}"
    base, several = one.metrics.get(name), record.metrics.get(name)
    if base is None or several is None or not base.value or several.value is None:
        return None, "throughput was not measured for both"
    ranks = record.case.world_size
    interval = None
    if base.interval is not None and several.interval is not None:
        interval = (several.interval[0] / (ranks * base.interval[1]), several.interval[1] / (ranks * base.interval[0]))
    confidence = min(base.confidence, several.confidence)
    n = min(base.n, several.n)
    return Value(several.value / (ranks * base.value), "1", interval, confidence, n, several.tier), ""
