"""Hands our samples to pytest-benchmark: one ``benchmark.pedantic`` on a clock that replays them.

Its fixture works once per test, with fixed rounds and a timer that the public marker ``benchmark(timer=…)``
sets. So the samples may come from another process, and ``--benchmark-json``, ``--benchmark-compare`` and
``pytest-benchmark compare`` see exactly those that a record holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.metrics import find, format_value

if TYPE_CHECKING:
    from joulemark.records import Record

_CLOCK = pytest.StashKey["ReplayClock"]()


class ReplayClock:
    """A clock that moves only when a sample is replayed."""

    __name__ = "ReplayClock"

    def __init__(self) -> None:
        self._now = 0.0
        self._samples: list[float] = []

    def __call__(self) -> float:
        """The replayed time, in s."""
        return self._now

    def load(self, samples: Sequence[float]) -> None:
        """The samples to replay, in s."""
        self._samples = list(reversed(samples))

    def advance(self) -> None:
        """Replay the next sample."""
        if self._samples:
            self._now += self._samples.pop()


def prepare(item: pytest.Item) -> None:
    """Give an item its own clock, keeping what its user's ``benchmark`` marker says."""
    clock = ReplayClock()
    item.stash[_CLOCK] = clock
    theirs = item.get_closest_marker("benchmark")
    kwargs: dict[str, Any] = dict(theirs.kwargs) if theirs else {}
    item.add_marker(pytest.mark.benchmark(**{**kwargs, "timer": clock}), append=False)


def replay(item: pytest.Item, benchmark: Any, record: Record) -> None:
    """Run pytest-benchmark's fixture once over a record's host times."""
    samples = record.samples.get("host_time_s", [])
    if benchmark is None or not samples:
        return
    clock = item.stash[_CLOCK]
    clock.load(samples)
    benchmark.extra_info.update(
        {
            "joulemark_case_id": record.case_id,
            "joulemark_run_id": record.run_id,
            "outcome": record.outcome,
            "gpu_uuid": record.gpu_uuid,
            "case": record.case.to_json(),
            **{name: value.value for name, value in record.metrics.items()},
        }
    )
    benchmark.pedantic(clock.advance, rounds=len(samples))


def progress_line(record: Record) -> str:
    """What a record says in one line: ``1.23 ms, 812 items/s, 0.31 J/item``."""
    if record.outcome == "oom":
        return "OOM"
    parts = []
    for names, suffix in (
        (("device_time_s", "host_time_s"), ""),
        (("throughput_per_s",), " items/s"),
        (("energy_per_item_j",), "/item"),
    ):
        value = next((record.value(name) for name in names if record.value(name) is not None), None)
        if value is not None:
            parts.append(format_value(value, find(names[0]).unit) + suffix)
    mark = "" if record.outcome == "ok" else f" [{record.outcome}]"
    return (", ".join(parts) or (record.reason or "")) + mark
