"""Many processes of the same cells, of one binary and of slowed ones: the data on which the gate itself is judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from joulemark.errors import UnreadableInput
from joulemark.records import Case, Record, Run
from joulemark.regression.simulate import Components
from joulemark.stats import summarize

Array = NDArray[np.float64]

ADDED_WORK = "added_work"
"""Parameter of a case whose step holds so much more real work, as a fraction; a case without it is the plain one."""

METRICS = ("device_time_s", "host_time_s")
"""What the gate is judged on: what most cells have, with raw samples (the other rules need them)."""

_LEAST = 6
"""Processes for one pair of disjoint triples."""


@dataclass(frozen=True)
class Cell:
    """One case, measured in many processes, plain and with added work.

    Args:
        key: the plain case in words.
        logs: added work → (processes,), logarithm of each process's figure.
        samples: added work → per process its raw samples.
    """

    key: str
    logs: Mapping[float, Array]
    samples: Mapping[float, Sequence[Array]]

    @property
    def components(self) -> Components:
        """Scatter between and within the plain processes, as standard deviations of the logarithm.

        The figures' own variance holds both; what the median of a process's samples is uncertain by is taken off.
        """
        total = float(self.logs[0.0].var(ddof=1))
        inside = min(total, float(np.mean([_variance_of_log_median(one) for one in self.samples[0.0]])))
        return Components(math.sqrt(total - inside), math.sqrt(inside))


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
    arms: dict[str, dict[float, tuple[Array, list[Array]]]] = {}
    labels: dict[str, str] = {}
    left_out = []
    for group in by_case.values():
        found = _processes(group, name)
        plain, added = _arm(group[0].case)
        if len(found) < _LEAST:
            left_out.append(f"{group[0].case.label}: {len(found)} processes with samples of {name}, six are needed")
            continue
        logs = np.array([math.log(figure) for figure, _ in found])
        arms.setdefault(plain.case_id, {})[added] = (logs, [samples for _, samples in found])
        labels[plain.case_id] = plain.label
    cells = [_cell(labels[one], of_cell) for one, of_cell in arms.items() if 0.0 in of_cell]
    if not cells:
        why = left_out[0] if left_out else "no case was measured"
        raise UnreadableInput(f"nothing to judge the gate on ({why})", "measure with --bench-processes 24")
    return name, _of_equal_size(cells), left_out


def _extent(groups: Iterable[Sequence[Record]], metric: str) -> tuple[int, int]:
    """How many cases can be judged on a metric, and how many processes have it at all."""
    counts = [len(_processes(group, metric)) for group in groups]
    return sum(count >= _LEAST for count in counts), sum(counts)


def _arm(case: Case) -> tuple[Case, float]:
    added = case.params.get(ADDED_WORK, 0.0)
    rest = {name: value for name, value in case.params.items() if name != ADDED_WORK}
    return replace(case, params=rest), float(added) if isinstance(added, (int, float)) else 0.0


def _processes(group: Iterable[Record], metric: str) -> list[tuple[float, Array]]:
    """Figure and samples of each process that has both."""
    out = []
    for record in group:
        samples = record.samples_by_process(metric) or []
        figures = [process.get(metric) for process in record.processes] or [record.value(metric)]
        for figure, own in zip(figures, samples, strict=False):
            if figure and own:
                out.append((figure, np.asarray(own, dtype=float)))
    return out


def _cell(key: str, arms: Mapping[float, tuple[Array, list[Array]]]) -> Cell:
    ordered = sorted(arms.items())
    return Cell(key, {added: logs for added, (logs, _) in ordered}, {added: own for added, (_, own) in ordered})


def _of_equal_size(cells: Sequence[Cell]) -> list[Cell]:
    """Process k of one cell belongs with process k of the others: as many as all of them have."""
    size = min(len(logs) for cell in cells for logs in cell.logs.values())
    return [
        replace(
            cell,
            logs={added: logs[:size] for added, logs in cell.logs.items()},
            samples={added: own[:size] for added, own in cell.samples.items()},
        )
        for cell in cells
    ]
