"""``--bench-inprocess`` (``--pdb``, ``--trace``): the record of an item is made in this process when it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from joulemark.plugin.child import BENCH, outcome_of
from joulemark.plugin.parent import Sweep
from joulemark.records import Finding


class InProcess:
    """Hooks that store what the fixture has measured.

    Args:
        sweep: keeps the records.
        shared: that others use the GPU; None where nobody does.
    """

    def __init__(self, sweep: Sweep, shared: Finding | None) -> None:
        self.sweep = sweep
        self._shared = [] if shared is None else [shared]
        self._error: BaseException | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """The record is made when the item has ended."""
        begin = time.time()
        result = yield
        self._keep(item, begin)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Note the first exception of the item."""
        if call.excinfo is not None and self._error is None:
            self._error = call.excinfo.value
        return (yield)

    def _keep(self, item: pytest.Item, begin: float) -> None:
        bench, error = item.stash.get(BENCH, None), self._error
        self._error = None
        if bench is None or not isinstance(item, pytest.Function):
            return
        outcome, reason = outcome_of(error, bench)
        self.sweep.keep_in_process(
            item,
            {
                "outcome": outcome,
                "reason": reason,
                "window_utc": [begin, time.time()],
                "measurements": [one.to_json() for one in bench.measurements],
                "findings": [one.to_json() for one in (*bench.findings, *self._shared)],
                "static_power_w": bench.instruments.static_power_w,
            },
        )


def show_one_gpu(config: pytest.Config, uuid: str) -> None:
    """To this very process, until pytest ends: a process that runs several sessions finds its own mask again."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    os.environ[name] = uuid
    config.add_cleanup(restore)
