"""Many processes of the same cells, of one binary and of slowed ones: the data on which the gate itself is judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from joulemark.errors import UnreadableInput
from joulemark.records import Case, Record, Run
from joulemark.regression.clocks import CLOCKS, PER_CYCLE
from joulemark.regression.simulate import Components
from joulemark.regression.variance import RESOLUTION
from joulemark.stats import summarize

Array = NDArray[np.float64]

ADDED_WORK = "added_work"
"""Parameter of a case whose step holds so much more real work, as a fraction; a case without it is the plain one."""

METRICS = ("device_time_s", "host_time_s")
"""What the gate is judged on: what most cells have, with raw samples (the other rules need them)."""

LEAST = 6
"""Processes for one pair of disjoint triples."""

_APART, _MAD_TO_SD = 5.0, 1.4826
"""Of Hampel's identifier; the median of the distances from the median times the second is a standard deviation."""


@dataclass(frozen=True)
class Cell:
    """One case, measured in many processes, plain and with added work.

    Args:
        key: the plain case in words.
        logs: added work → (processes,), logarithm of each process's figure.
        samples: added work → per process its raw samples.
        clocks: added work → (processes,), logarithm of the SM clock; NaN where a process of the cell does not know it.
    """

    key: str
    logs: Mapping[float, Array]
    samples: Mapping[float, Sequence[Array]]
    clocks: Mapping[float, Array]

    @property
    def components(self) -> Components:
        """Scatter between and within the plain processes, as standard deviations of the logarithm, and their clocks.

        The figures' own variance holds both; what the median of a process's samples is uncertain by is taken off.
        Processes further from the median than five standard deviations, these estimated from the median of all such
        distances, stand apart (the identifier of Hampel; Davies and Gather, Journal of the American Statistical
        Association 88, 1993): they are no part of the scatter, but deviations that a share of processes has.
        """
        logs = self.logs[0.0]
        deviations = logs - np.median(logs)
        alike = np.abs(deviations) <= _APART * max(RESOLUTION, _MAD_TO_SD * float(np.median(np.abs(deviations))))
        total = float(logs[alike].var(ddof=1))
        inside = [_variance_of_log_median(one) for one, near in zip(self.samples[0.0], alike, strict=True) if near]
        within = min(total, float(np.mean(inside)))
        apart = (logs[~alike] - logs[alike].mean()).tolist()
        clocks = () if np.isnan(self.clocks[0.0]).any() else tuple(self.clocks[0.0].tolist())
        return Components(math.sqrt(total - within), math.sqrt(within), tuple(apart), len(apart) / len(logs), clocks)


@dataclass(frozen=True)
class _Process:
    """Logarithm of a figure, its samples, and the SM clocks in Hz that are known."""

    log: float
    samples: Array
    clocks: Mapping[str, float]


def _variance_of_log_median(samples: Array) -> float:
    summary = summarize(samples.tolist())
    if summary.interval is None or summary.interval[0] <= 0:
        return 0.0
    from statistics import NormalDist

    z = NormalDist().inv_cdf(0.5 + max(summary.confidence, 0.5) / 2)
    return (math.log(summary.interval[1] / summary.interval[0]) / 2 / z) ** 2


def cells_of(runs: Sequence[Run], metric: str | None = None) -> tuple[str, list[Cell], list[str]]:
    """Cells with the same number of processes in each arm.

    Args:
        runs: their processes of one case are put together, in the order of the runs.
        metric: of :data:`METRICS`, or None for the one that most cases have, the first of equals.

    Returns:
        the metric, the cells, and a line about each case that was left out.

    Raises:
        UnreadableInput: no case has at least six processes whose samples are told apart.
    """
    by_case: dict[str, list[Record]] = {}
    for record in (record for run in runs for record in run.records if record.outcome in ("ok", "flagged")):
        by_case.setdefault(record.case_id, []).append(record)
    names = METRICS if metric is None else (metric,)
    name = max(names, key=lambda one: _extent(by_case.values(), one))
    arms: dict[str, dict[float, list[_Process]]] = {}
    labels: dict[str, str] = {}
    left_out = []
    for group in by_case.values():
        found = _processes(group, name)
        plain, added = _arm(group[0].case)
        if len(found) < LEAST:
            count = f"{len(found)} process{'' if len(found) == 1 else 'es'}"
            left_out.append(f"{group[0].case.label}: {count} with samples of {name}, six are needed")
            continue
        arms.setdefault(plain.case_id, {})[added] = found
        labels[plain.case_id] = plain.label
    cells = [_cell(labels[one], of_cell) for one, of_cell in arms.items() if 0.0 in of_cell]
    if not cells:
        why = left_out[0] if left_out else "no case was measured"
        raise UnreadableInput(f"nothing to judge the gate on ({why})", "measure with --bench-processes 24")
    return name, _of_equal_size(cells), left_out


def _extent(groups: Iterable[Sequence[Record]], metric: str) -> tuple[int, int]:
    """How many cases can be judged on a metric, and how many processes have it at all."""
    counts = [len(_processes(group, metric)) for group in groups]
    return sum(count >= LEAST for count in counts), sum(counts)


def _arm(case: Case) -> tuple[Case, float]:
    added = case.params.get(ADDED_WORK, 0.0)
    rest = {name: value for name, value in case.params.items() if name != ADDED_WORK}
    return replace(case, params=rest), float(added) if isinstance(added, (int, float)) else 0.0


def _processes(group: Iterable[Record], metric: str) -> list[_Process]:
    """Processes that have both a figure and samples."""
    out = []
    for record in group:
        samples = record.samples_by_process(metric) or []
        each = record.processes or [{name: record.value(name) for name in (metric, *CLOCKS)}]
        for process, own in zip(each, samples, strict=False):
            if (figure := process.get(metric)) and figure > 0 and own:
                known = {name: process.get(name) for name in CLOCKS} if metric in PER_CYCLE else {}
                clocks = {name: clock for name, clock in known.items() if clock and clock > 0}
                out.append(_Process(math.log(figure), np.asarray(own, dtype=float), clocks))
    return out


def _cell(key: str, arms: Mapping[float, Sequence[_Process]]) -> Cell:
    ordered = sorted(arms.items())
    every = [one for processes in arms.values() for one in processes]
    clock = next((name for name in CLOCKS if all(name in one.clocks for one in every)), None)
    return Cell(
        key,
        {added: np.array([one.log for one in found]) for added, found in ordered},
        {added: [one.samples for one in found] for added, found in ordered},
        {
            added: np.array([math.nan if clock is None else math.log(one.clocks[clock]) for one in found])
            for added, found in ordered
        },
    )


def _of_equal_size(cells: Sequence[Cell]) -> list[Cell]:
    """Process k of one cell belongs with process k of the others: as many as all of them have."""
    size = min(len(logs) for cell in cells for logs in cell.logs.values())
    return [
        replace(
            cell,
            logs={added: logs[:size] for added, logs in cell.logs.items()},
            samples={added: own[:size] for added, own in cell.samples.items()},
            clocks={added: clocks[:size] for added, clocks in cell.clocks.items()},
        )
        for cell in cells
    ]
