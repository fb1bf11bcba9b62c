"""Totals of hardware counters over repeated work: each group of counters sees the same number of repetitions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from joulemark.energy.engine import CountedSeries, CounterRecorder

BUSY = "gpu_busy_s"
"""Time of the samples in which any SM did anything: a tenth of a millisecond each, or a thousandth of the work."""
_TIMES = frozenset({"sm_cycles", BUSY})
"""Count time, not work: a host that launches unevenly changes them alone."""
_ACTIVE = "sm_active_cycles"
_LINGER_S = 2e-3
_LINGER_SHARE = 2e-3
"""Idle time after the work, at least, and as a share of it: the last sample is dropped while it is not complete."""


@dataclass(frozen=True)
class Totals:
    """Counts of work.

    Args:
        each: canonical name → count per repetition.
        spread: largest relative difference of a count that several groups gave: how far the groups saw the same work;
            None where no count was given twice.
        differs: the count with that difference.
    """

    each: Mapping[str, float]
    spread: float | None
    differs: str | None = None


class Counting:
    """Counts work by as many runs of it as there are groups that give counts.

    Args:
        recorder: of hardware counters. Groups that turn out to give shares only, or nothing that an earlier group
            did not give, are left out from the second work on.
    """

    def __init__(self, recorder: CounterRecorder) -> None:
        self._recorder = recorder
        self._groups = recorder.groups

    def of(self, run: Callable[[], object], times: int, expected_s: float) -> Totals:
        """Counts per repetition.

        Args:
            run: does ``times`` repetitions, from an idle device to an idle device.
            times: see ``run``.
            expected_s: about how long they take.
        """
        linger_s = max(_LINGER_S, _LINGER_SHARE * expected_s)

        def work() -> None:
            run()
            time.sleep(linger_s)

        found: dict[str, list[float]] = {}
        useful = []
        for group in self._groups:
            series = self._recorder.record(group, work, expected_s + linger_s)
            names = [name for name, unit in series.units.items() if unit != "1"]
            if set(names) - found.keys():
                useful.append(group)
            for name in names:
                total = series.total(name)
                found.setdefault(name, []).extend([] if total is None else [total / times])
            if (busy_s := _busy_s(series)) is not None:
                found.setdefault(BUSY, []).append(busy_s / times)
        self._groups = tuple(useful)
        spread, differs = _spread(found)
        return Totals({name: values[0] for name, values in found.items() if values}, spread, differs)


def _busy_s(series: CountedSeries) -> float | None:
    """None where the series has no samples of active SMs."""
    samples = getattr(series, "values", {}).get(_ACTIVE)
    if samples is None:
        return None
    lengths = np.subtract(getattr(series, "end_s"), getattr(series, "start_s"))  # noqa: B009
    return float(lengths[samples > 0].sum())


def _spread(found: Mapping[str, list[float]]) -> tuple[float | None, str | None]:
    twice = {
        name: values for name, values in found.items() if name not in _TIMES and len(values) > 1 and max(values) > 0
    }
    spreads = [((max(values) - min(values)) / max(values), name) for name, values in twice.items()]
    return max(spreads, default=(None, None))
