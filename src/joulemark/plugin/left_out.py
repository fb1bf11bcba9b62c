"""Cases that a sweep does without unless they are asked for; it names them in a line per file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.mark.expression import Expression

from joulemark.errors import ConfigurationError
from joulemark.plugin.sweep import SweepMarker

if TYPE_CHECKING:
    from joulemark.plugin.journal import Journal
    from joulemark.plugin.options import BenchOptions
    from joulemark.plugin.parent import Sweep
    from joulemark.plugin.sweep import Target
    from joulemark.records import Case, Run

_FURTHER = "further cells of its grid"
_NO_GPU = "left out: these cases need a GPU (--bench-all lists them)"
_UNNAMED = "left out: {} of {} cases, unless asked for (by a path, an id, -k or -m; --bench-all takes all)"


class LeftOut:
    """Leaves cases out of a sweep, unless they were asked for.

    Those that need a GPU, where there is none: an id, ``-k``, ``-m`` or ``--bench-all`` asks for them.
    Campaigns: a path asks for them as well. A sweep that names no axis either is a first look: it takes of every grid
    the cells that its marker says. What ``--lf`` runs again is asked for too, and a resumed sweep goes on as it began.

    Args:
        config: pytest's.
        options: of the session.
        targets: devices that it measures.
        journal: whose environments hold the note; None in a process that stores nothing.
        sweep: None in a process that is asked for each case.
        resumed: the run that the session goes on with.

    Attributes:
        no_gpu: items that need a GPU, each with what for.
        unnamed: items that nobody named, each with why it is not in every sweep.
        lines, note: what the terminal and the stored run say of them; under pytest-xdist, of what the workers left out.
    """

    def __init__(
        self,
        config: pytest.Config,
        options: BenchOptions,
        targets: Sequence[Target],
        journal: Journal | None,
        sweep: Sweep | None,
        resumed: Run | None,
    ) -> None:
        self.config, self.options, self.targets = config, options, targets
        self.journal, self.sweep, self.resumed = journal, sweep, resumed
        self.no_gpu: dict[pytest.Item, str] = {}
        self.unnamed: dict[pytest.Item, str] = {}
        self.lines: list[str] = []
        self.note = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Drop them; a measuring process keeps all, since it is asked for each by its id."""
        if self.options.worker is not None or self._asked_for:
            return
        again = _failed_last(config)
        open_items = {item: _marker_of(item) for item in items if item.nodeid not in again}
        if not any(one.on_gpu for one in self.targets):
            self.no_gpu = {item: marker.needs_gpu for item, marker in open_items.items() if marker.needs_gpu}
        if not self._has_paths:
            words = {item: self._why(item, marker) for item, marker in open_items.items() if item not in self.no_gpu}
            self.unnamed = self._not_resumed({item: why for item, why in words.items() if why})
        left_out = self.no_gpu.keys() | self.unnamed.keys()
        if left_out:
            self.say(self._described(len(items)), self._noted())
            config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = [item for item in items if item not in left_out]

    def say(self, lines: list[str], note: str) -> None:
        """Keep what is to be said, and have each environment of the run hold the note."""
        self.lines, self.note = lines, note
        if note and self.journal is not None:
            self.journal.notes["left_out"] = note

    def pytest_report_collectionfinish(self) -> list[str]:
        """Say what is left out before the first case runs."""
        return self.lines

    def _noted(self) -> str:
        parts = [("no GPU", self.no_gpu), ("not named", self.unnamed)]
        return "; ".join("; ".join((said, *_by_file(items))) for said, items in parts if items)

    def instruments_for(self, item: pytest.Item) -> tuple[str, ...]:
        """What a first look adds to the instruments of a case, unless ``--bench-collect`` has chosen."""
        case = _cell_of(item)
        if case is None or not self._is_first_look or self.options.chose_instruments:
            return ()
        return _marker_of(item).first_instruments(case)

    @property
    def _asked_for(self) -> bool:
        by_id = any("::" in str(one) for one in self.config.args)
        by_expression = any(map(chooses, (self.config.option.keyword, self.config.option.markexpr)))
        return self.options.all_cases or by_id or by_expression

    @property
    def _has_paths(self) -> bool:
        return self.config.args_source is pytest.Config.ArgsSource.ARGS

    @property
    def _is_first_look(self) -> bool:
        return not (self._asked_for or self._has_paths or self.options.chose_cells)

    def _why(self, item: pytest.Item, marker: SweepMarker) -> str:
        """Why an item is not in a sweep that does not name it; empty where it is."""
        if marker.campaign or not self._is_first_look:
            return marker.campaign
        case = _cell_of(item)
        return "" if case is None or marker.takes_first(case) else _FURTHER

    def _not_resumed(self, unnamed: dict[pytest.Item, str]) -> dict[pytest.Item, str]:
        """Nothing where the resumed file holds one of them: its sweep had asked for them."""
        if self.resumed is None or self.sweep is None:
            return unnamed
        held = {record.case_id for record in self.resumed.records}
        return {} if held & self.sweep.case_ids(unnamed) else unnamed

    def _described(self, collected: int) -> list[str]:
        from joulemark.report.escape import printable

        parts = [(_NO_GPU, self.no_gpu), (_UNNAMED.format(len(self.unnamed), collected), self.unnamed)]
        lines = [line for said, items in parts if items for line in (said, *(f"  {one}" for one in _by_file(items)))]
        return [printable(line) for line in lines]


def chooses(expression: str) -> bool:
    """Whether ``-k`` or ``-m`` chooses by what cases have: ``not slow`` fits one that has nothing, so it does not."""
    if not expression:
        return False
    try:
        return not Expression.compile(expression).evaluate(lambda name, /, **arguments: False)
    except Exception:  # pytest itself says, a little later, what is wrong with it
        return True


def _failed_last(config: pytest.Config) -> frozenset[str]:
    """Ids of the items that ``--lf`` runs again."""
    if not getattr(config.option, "lf", False) or config.cache is None:
        return frozenset()
    return frozenset(config.cache.get("cache/lastfailed", {}))


def _by_file(items: Mapping[pytest.Item, str]) -> list[str]:
    """Per file how many of its cases are left out, and what they are."""
    counts = Counter((item.nodeid.partition("::")[0], why) for item, why in items.items())
    files: dict[str, list[str]] = {}
    for (file, why), count in counts.items():
        files.setdefault(file, []).append(f"{count} case{'' if count == 1 else 's'}, {why}")
    return [f"{file}: {'; '.join(parts)}" for file, parts in files.items()]


def _cell_of(item: pytest.Item) -> Case | None:
    """The cell of a grid that an item is."""
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("joulemark_case")


def _marker_of(item: pytest.Item) -> SweepMarker:
    """The marker of an item; one that makes no sense is refused where its cells are made, and leaves nothing out."""
    try:
        return SweepMarker.read(item.iter_markers("bench"))
    except ConfigurationError:
        return SweepMarker()
