"""Findings with their remedies, what was not measured, and where the runs took place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from joulemark.records import NOT_REAL, Environment, Json, Run, Table
from joulemark.report.evidence import MOST_SHOWN, Evidence
from joulemark.report.generations_table import generations_table
from joulemark.report.names import namer
from joulemark.report.page.parts import Section, Seen
from joulemark.report.scaling_table import scaling_table
from joulemark.report.tables import groups_of_findings, notes_of_missing, summary_line

_MOST_SEEN = 200
_MOST_CASES = 40
_LEFT_OUT = frozenset({"options", "visible", "gpus", "packages", "host", "device_uuid", "git"})
_HOST = ("os", "kernel", "cpu", "cores", "memory_bytes")


def findings(evidence: Evidence) -> Section:
    """One entry per kind of Finding, flagging ones first, then the most frequent."""
    name = namer(record.case for record in evidence.records)
    groups = groups_of_findings(evidence.records)
    groups.sort(key=lambda one: (not one[0].flags, -len(one[1])))
    seen = [
        Seen(finding.code, finding.message, finding.remedy, finding.flags, _named([name(one.case) for one in records]))
        for finding, records in groups[:_MOST_SEEN]
    ]
    left = len(groups) - len(seen)
    return Section(
        "findings",
        "What to know about these figures",
        "What the harness saw while it measured, with the figures of the first case and what to do about it.",
        seen=tuple(seen),
        notes=(f"{left} rarer kinds are in the records (--format csv)",) if left > 0 else (),
        short="Findings",
    )


def _named(names: list[str]) -> tuple[str, ...]:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - _MOST_CASES
    return (*distinct[:_MOST_CASES], *([f"and {more} more"] if more > 0 else []))


def several_gpus(evidence: Evidence) -> Section:
    """How work on several GPUs of a host scales, and what the GPUs of a run differ in."""
    found = [
        table
        for run in evidence.runs
        for table in (scaling_table(run.records), generations_table(run.records))
        if table is not None
    ]
    return Section(
        "several-gpus",
        "Several GPUs",
        "Cases on several GPUs against one, and the GPUs of one run against each other.",
        tables=tuple(found),
    )


def missing(evidence: Evidence) -> Section:
    """Figures that records lack, by reason."""
    notes = []
    if len(evidence.workloads) > MOST_SHOWN:
        rest = len(evidence.workloads) - MOST_SHOWN
        notes.append(
            f"{rest} more workloads have no answers and figures here: name fewer files; the table has them all"
        )
    notes += [f"{Path(run.path).name}: {problem}" for run in evidence.runs for problem in run.problems]
    return Section(
        "missing",
        "What was not measured, and why",
        "A figure that is missing is never zero. These are the reasons that the records give.",
        notes=tuple(notes),
        missing=tuple(
            dict.fromkeys(
                note.removeprefix("not measured: ") for run in evidence.runs for note in notes_of_missing(run.records)
            )
        ),
        short="Not measured",
    )


def environment(evidence: Evidence) -> Section:
    """Runs, the machines' hardware and software, and the instruments."""
    tables = [_runs(evidence), _facts(evidence), _tiers(evidence)]
    return Section(
        "environment",
        "Where and how it was measured",
        "Every run keeps its command, software, GPUs and instruments in its first line.",
        tables=tuple(one for one in tables if one.rows),
        short="Environment",
    )


def _runs(evidence: Evidence) -> Table:
    rows = tuple(
        (
            Path(run.path).name,
            _when(run.started_utc),
            ", ".join(sorted({record.case.gpu_model for record in run.records})) + (" (simulated)" * run.simulated),
            ", ".join(_values(run, "driver")) or "unknown",
            str(len(run.records)),
            summary_line(run),
            _command(run),
        )
        for run in evidence.runs
    )
    return Table(
        ("run", "started (UTC)", "GPU", "driver", "cases", "outcome", "command"), rows, frozenset({4}), (), "runs"
    )


def _when(seconds: float | None) -> str:
    return "unknown" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _values(run: Run, fact: str) -> list[str]:
    return sorted({str(one.facts[fact]) for one in run.environments.values() if one.facts.get(fact)})


def _command(run: Run) -> str:
    options = next((one.facts.get("options") for one in run.environments.values()), None)
    return f"pytest {' '.join(map(str, options))}" if isinstance(options, list) else "unknown"


def _facts(evidence: Evidence) -> Table:
    """Every fact with its values; one value where all runs agree."""
    values: dict[str, list[str]] = {}
    for run in evidence.runs:
        for one in run.environments.values():
            for fact, text in _flat(one):
                found = values.setdefault(fact, [])
                if text not in found:
                    found.append(text)
    rows = tuple((fact, " | ".join(found)) for fact, found in values.items())
    return Table(("fact", "value (values, where runs differ)"), rows, title="hardware and software")


def _flat(environment: Environment) -> Iterator[tuple[str, str]]:
    facts = environment.facts
    for gpu in facts.get("gpus") or ():
        if isinstance(gpu, Mapping):
            parts = (gpu.get("name"), f"VBIOS {gpu.get('vbios')}", f"power limit {gpu.get('power_limit_w')} W",
                     f"ECC {_on(gpu.get('ecc'))}", f"MIG {_on(gpu.get('mig'))}", gpu.get("uuid"))  # fmt: skip
            yield "GPU", ", ".join(str(part) for part in parts if part)
    host = facts.get("host")
    if isinstance(host, Mapping):
        yield from ((f"host {name}", str(host[name])) for name in _HOST if host.get(name) is not None)
    for name, value in facts.items():
        if name not in _LEFT_OUT and isinstance(value, (str, int, float)):
            yield name, str(value)
    packages = facts.get("packages")
    if isinstance(packages, Mapping):
        yield from ((str(name), str(version)) for name, version in packages.items() if version)


def _on(value: Json) -> str:
    return {True: "on", False: "off"}.get(value, "unknown") if isinstance(value, bool) else "unknown"


def _tiers(evidence: Evidence) -> Table:
    seen: dict[tuple[str, str, str], list[str]] = {}
    for run in evidence.runs:
        for one in run.environments.values():
            for instrument, tier in one.tiers.items():
                key = (instrument, tier or "none", one.notes.get(instrument, ""))
                seen.setdefault(key, []).append(Path(run.path).name)
    rows = tuple((*key, str(len(dict.fromkeys(runs)))) for key, runs in seen.items())
    return Table(("instrument", "tier", "why not a better one", "runs"), rows, frozenset({3}), (), "instruments")


def headline(evidence: Evidence) -> list[str]:
    """Whether GPUs are simulated, their names, drivers and torch versions, for the top of the page."""
    gpus, drivers, torch = (_distinct(evidence, read) for read in (_gpu_names, _fact("driver"), _fact("torch")))
    dates = sorted(_when(run.started_utc)[:10] for run in evidence.runs if run.started_utc is not None)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    several = f"{len(evidence.runs)} runs" if len(evidence.runs) != 1 else Path(evidence.runs[0].path).name
    boards = {uuid for one in evidence.records for uuid in (one.gpu_uuid, *one.rank_gpu_uuids) if uuid}
    parts = [_simulated(evidence), gpus, f"{len(boards)} boards" if len(boards) > 1 else "",
             f"driver {drivers}" if drivers else "", f"torch {torch}" if torch else "",
             f"{len(evidence.records)} cases", several, days]  # fmt: skip
    return [part for part in parts if part]


def _simulated(evidence: Evidence) -> str:
    count, runs = sum(run.simulated for run in evidence.runs), len(evidence.runs)
    where = f" in {count} of {runs} runs" if count < runs else ""
    return f"simulated GPUs{where}: {NOT_REAL}" if count else ""


def _distinct(evidence: Evidence, read: Callable[[Environment], list[str]]) -> str:
    found = dict.fromkeys(text for run in evidence.runs for one in run.environments.values() for text in read(one))
    return ", ".join(found)


def _gpu_names(one: Environment) -> list[str]:
    gpus = one.facts.get("gpus")
    return (
        [str(gpu["name"]) for gpu in gpus if isinstance(gpu, Mapping) and gpu.get("name")]
        if isinstance(gpus, list)
        else []
    )


def _fact(name: str) -> Callable[[Environment], list[str]]:
    return lambda one: [str(one.facts[name])] if one.facts.get(name) else []
