"""Cases that say something of a GPU only: a sweep without one names them in a line per file."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from joulemark.errors import ConfigurationError
from joulemark.plugin.sweep import SweepMarker

if TYPE_CHECKING:
    from joulemark.plugin.session import BenchSession


class LeftOut:
    """Leaves the cases that need a GPU out of a sweep without one, unless they were asked for.

    A case is asked for by its id, by ``-k`` or ``-m``, or with all others by ``--bench-all``: then it has its record.

    Attributes:
        items: each with what it needs a GPU for.
    """

    def __init__(self, session: BenchSession) -> None:
        self.session = session
        self.items: dict[pytest.Item, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Drop them; a measuring process keeps all, since it is asked for each by its id."""
        session = self.session
        if session.is_child or any(one.on_gpu for one in session.targets) or self._asked_for(config):
            return
        self.items = {item: why for item in items if (why := _need(item))}
        if self.items:
            config.hook.pytest_deselected(items=list(self.items))
            items[:] = [item for item in items if item not in self.items]
            if session.journal is not None:
                session.journal.notes["left_out"] = "; ".join(("no GPU", *self._lines()))

    def pytest_report_collectionfinish(self) -> list[str]:
        """Say what is left out before the first case runs."""
        if not self.items:
            return []
        from joulemark.report.escape import printable

        lines = [f"  {printable(line)}" for line in self._lines()]
        return ["left out: these cases need a GPU (--bench-all lists them)", *lines]

    def _asked_for(self, config: pytest.Config) -> bool:
        by_id = any("::" in str(one) for one in config.args)
        return self.session.options.all_cases or by_id or bool(config.option.keyword or config.option.markexpr)

    def _lines(self) -> list[str]:
        """Per file how many of its cases need a GPU, and what for."""
        counts = Counter((item.nodeid.partition("::")[0], why) for item, why in self.items.items())
        files: dict[str, list[str]] = {}
        for (file, why), count in counts.items():
            files.setdefault(file, []).append(f"{count} case{'' if count == 1 else 's'}, {why}")
        return [f"{file}: {'; '.join(parts)}" for file, parts in files.items()]


def _need(item: pytest.Item) -> str:
    """What an item needs a GPU for; a marker that makes no sense is refused where its cells are made."""
    try:
        return SweepMarker.read(item.iter_markers("bench")).needs_gpu
    except ConfigurationError:
        return ""
