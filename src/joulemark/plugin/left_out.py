"""Cases that say something of a GPU only: on a machine without one, a sweep names them in a line per file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from joulemark.errors import ConfigurationError
from joulemark.plugin.sweep import SweepMarker

if TYPE_CHECKING:
    import pytest

    from joulemark.plugin.options import BenchOptions


def of_gpus(items: Iterable[pytest.Item]) -> dict[pytest.Item, str]:
    """Items whose marker says why they need a GPU, with that reason.

    A marker that makes no sense is refused where its cells are made, and named there.
    """
    out = {}
    for item in items:
        try:
            why = SweepMarker.read(item.iter_markers("bench")).needs_gpu
        except ConfigurationError:
            continue
        if why:
            out[item] = why
    return out


def asked_for(config: pytest.Config, options: BenchOptions) -> bool:
    """Whether the cases were asked for: one by one (an id, ``-k``, ``-m``), or all of them (``--bench-all``)."""
    by_id = any("::" in str(one) for one in config.args)
    return options.all_cases or by_id or bool(config.option.keyword or config.option.markexpr)


def lines(items: dict[pytest.Item, str]) -> Sequence[str]:
    """A line per file: how many of its cases need a GPU, and what for."""
    counts = Counter((item.nodeid.partition("::")[0], why) for item, why in items.items())
    files: dict[str, list[str]] = {}
    for (file, why), count in counts.items():
        files.setdefault(file, []).append(f"{count} case{'' if count == 1 else 's'}, {why}")
    return [f"{file}: {'; '.join(parts)}" for file, parts in files.items()]
