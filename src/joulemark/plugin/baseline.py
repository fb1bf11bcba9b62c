"""``--bench-baseline``: the run that a session is held against, and the verdict on each case as it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from joulemark.metrics import find, format_ratio, format_value
from joulemark.records import Case, Environment, Record, Run
from joulemark.regression.verdicts import Rule
from joulemark.report.compare import GATED_METRICS, compare
from joulemark.report.comparison import OUTCOME, Comparison, Row
from joulemark.report.foreign import read_result
from joulemark.store import find_runs

LATEST = "latest"


@dataclass(frozen=True)
class Baseline:
    """A stored run that has cases in common with this session.

    Args:
        run: the stored one.
        rule: with the number of rows that will be judged one by one.
        simulated: whether this session's GPUs are simulated ones; None where that is not known.
    """

    run: Run
    rule: Rule = field(default_factory=Rule)
    simulated: bool | None = None

    def judge(self, record: Record) -> list[Row]:
        """What got worse in a case that has just ended.

        The rows are judged alone, at the share of the false-alarm rate that each of all planned rows has; the
        comparison at the end judges them together, which never finds fewer.
        """
        environments = {record.environment_id: Environment({"simulated": self.simulated})}
        run = Run("this run", record.run_id, environments, (record,), True)
        rows = compare(self.run, run, rule=self.rule).rows
        return [row for row in rows if row.gated and row.verdict == "regressed"]

    def compare(self, run: Run) -> Comparison:
        """The whole session against the baseline."""
        return compare(self.run, run, rule=replace(self.rule, family=None))


def in_words(row: Row) -> str:
    """``device time 1.23 ms -> 1.35 ms (1.098x, 95 % interval 1.081..1.112, spread measured over 3 + 3 processes)``."""
    if row.metric == OUTCOME:
        return f"{row.base} -> {row.new} ({'; '.join(row.notes)})"
    metric = find(row.metric)
    base, new = (format_value(value, row.unit) for value in (row.base, row.new) if not isinstance(value, str))
    parts = [f"{format_ratio(row.ratio)}x"] if row.ratio is not None else []
    parts += [f"95 % interval {'..'.join(map(format_ratio, row.interval))}"] if row.interval is not None else []
    if row.spread == "measured" and row.processes is not None:
        parts.append(f"spread measured over {row.processes[0]} + {row.processes[1]} processes")
    elif row.spread is not None:
        parts.append("spread assumed")
    return f"{metric.title} {base} -> {new} ({', '.join(parts)})"


def open_baseline(
    given: str, folder: Path, results: Path, planned: Mapping[str, Case], exclude: Path | None
) -> tuple[Baseline | None, list[str]]:
    """The baseline of a session, and lines about what was left out.

    Args:
        given: a file, or ``latest``: the newest usable run under ``results`` that holds a planned case.
        folder: relative to which a file is named.
        results: where this session stores its own records.
        planned: the session's cases by the node ids of their items.
        exclude: the session's own file.

    Raises:
        UnreadableInput: nothing in the file can be used.
    """
    if given != LATEST:
        return _of_run(_known_by_node_id(read_result(folder / given), planned), planned), []
    if not results.is_dir():
        return None, [f"no baseline: there is no folder {results} yet"]
    listing = find_runs(results, suffixes=(".jsonl", ".json"), read=read_result)
    lines = [f"left out as a baseline: {line}" for line in listing.unusable]
    wanted = {case.case_id for case in planned.values()}
    for run in listing.runs:
        run = _known_by_node_id(run, planned)
        if (exclude is None or Path(run.path) != exclude) and wanted & {one.case_id for one in run.records}:
            return _of_run(run, planned), lines
    return None, [*lines, f"no baseline: no run under {results} holds a case of this one"]


def _of_run(run: Run, planned: Mapping[str, Case]) -> Baseline:
    wanted = {case.case_id for case in planned.values()}
    rows = sum(
        record.value(name) is not None
        for record in run.records
        if record.case_id in wanted
        for name in GATED_METRICS
        if name != "throughput_per_s"  # restates a time, and is not counted
    )
    return Baseline(run, Rule(family=max(rows, 1)))


def _known_by_node_id(run: Run, planned: Mapping[str, Case]) -> Run:
    """A run that pytest-benchmark stored names its functions by node id: these are this session's own cases."""
    if run.source != "pytest-benchmark":
        return run
    counts = Counter(record.nodeid for record in run.records)
    return replace(run, records=tuple(_renamed(run.records, planned, counts)))


def _renamed(
    records: Sequence[Record], planned: Mapping[str, Case], counts: Mapping[str | None, int]
) -> Iterable[Record]:
    ours = {case.case_id for case in planned.values()}
    for record in records:
        case = planned.get(record.nodeid or "")
        if case is None or counts[record.nodeid] > 1 or record.case_id in ours:
            yield record
        else:
            yield replace(record, case=replace(case, gpu_model=record.case.gpu_model))
