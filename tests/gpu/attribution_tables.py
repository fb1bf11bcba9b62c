"""The tables of an ``attribution-ncu.json`` in Markdown, as ``docs/attribution-h200.md`` shows them.

Run: ``python tests/gpu/attribution_tables.py results/nvidia-h200/attribution-ncu.json``. The file was written by
``tests/gpu/attribution.py OUT --analyse``, which prints the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Cell = Callable[[Mapping[str, Any], Mapping[str, Any]], str]
"""Of a model's recording, and of ``ncu`` beside it with caches kept."""
NAMES = {"resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "bert_base": "encoder"}
CLASSES = ("model", "class", "launches", "time", "DRAM bytes", "tensor activity", "its time", "its reads", "its writes")


def tables(found: Mapping[str, Any]) -> str:
    """Both, with an empty line between them."""
    return "\n".join((*figures_table(found), "", *errors_table(found)))


def figures_table(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: a column per model, with what it is held to.

    A model that was not recorded, or of which ``ncu`` said nothing, has none.
    """
    told = {model: one for model, one in found["models"].items() if one["recording"] and compared(one, "kept")}
    yield from _head(("", *(NAMES[model] for model in told), "held to"))
    for title, cell, bar in _ROWS:
        yield _row((title, *(cell(one["recording"], one["ncu"]["kept"]) for one in told.values()), bar))


def errors_table(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: per model and class, all launches, what attribution says over what Nsight Compute does.

    A cell is relative to Nsight Compute with caches kept; behind a stroke, flushed.
    """
    yield from _head(CLASSES)
    for model, one in found["models"].items():
        both = [compared(one, caches) for caches in ("kept", "flushed")]
        kept, flushed = ({row["class"]: row for row in (seen or {}).get("classes", ())} for seen in both)
        for name, row in kept.items():
            other = flushed.get(name)
            if other and other["launches"] == row["launches"]:
                yield _row((model, name, str(row["launches"]), f"{row['time_s'] * 1e3:.2f} ms", *beside(row, other)))


def compared(one: Mapping[str, Any], caches: str) -> Mapping[str, Any] | None:
    """What a model's errors stand on; None where ``ncu`` said nothing of it."""
    found: Mapping[str, Any] | None = one["ncu"] and one["ncu"][caches]["compared"]
    return found


def beside(kept: Mapping[str, Any], flushed: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a class: errors, then how a flush changes what Nsight Compute itself says."""

    def changed(of: Callable[[Mapping[str, Any]], float]) -> str:
        return percent(of(flushed) / of(kept) - 1 if of(kept) else None)

    yield f"{percent(kept['dram_error'])} / {percent(flushed['dram_error'])}"
    yield f"{kept['tensor']:.4f}, {kept['ncu_tensor']:.4f} ({percent(kept['tensor_error'])})"
    yield " / ".join(percent(one["ncu_time_s"] / kept["time_s"] - 1) for one in (kept, flushed))
    yield changed(lambda row: row["ncu_dram_read_bytes"])
    yield changed(lambda row: row["ncu_dram_bytes"] - row["ncu_dram_read_bytes"])


def percent(share: float | None, sign: str = "+") -> str:
    """An error; a dash where there is none.

    >>> percent(0.0124), percent(0.01, sign=""), percent(None)
    ('+1.2 %', '1.0 %', '–')
    """
    return "–" if share is None else f"{100 * share:{sign}.1f} %"


def _head(titles: Iterable[str]) -> Iterator[str]:
    titles = tuple(titles)
    yield _row(titles)
    yield f"|{' --- |' * len(titles)}"


def _row(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _totals(recording: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    ratios = recording["totals"].values()
    return f"{min(ratios):.3f} … {max(ratios):.3f}"


def _largest(error: str) -> Cell:
    return lambda _, ncu: percent(ncu["largest_errors"][error])


def _alone(_: Mapping[str, Any], ncu: Mapping[str, Any]) -> str:
    one = ncu["one_window"]
    return ", ".join((*map(percent, one["largest_errors"].values()), percent(one["largest_total_error"], sign="")))


def _times(_: Mapping[str, Any], ncu: Mapping[str, Any]) -> str:
    one = ncu["one_window"]
    return f"**{one['times_as_long']:.0f}** ({ncu['profiled_s']:.1f}, {one['seconds']:.3f})"


def _times_of_more(_: Mapping[str, Any], ncu: Mapping[str, Any]) -> str:
    whole = ncu["times_as_long_as_recording"]
    return f"{ncu['times_as_long']:.0f}; {'–' if whole is None else f'{whole:.1f}'}"


def _slower(recording: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    ends = recording["slowdown_interval"]
    around = "" if ends is None else f" [{', '.join(map(percent, ends))}]"
    return f"**{percent(recording['slowdown'])}**{around}"


def _slower_than_bare(recording: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    return percent(recording["slowdown_from_bare"])


def _clock(recording: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    return f"{1e9 * recording['clock_uncertainty_s']:.0f} ns"


_ROWS: tuple[tuple[str, Cell, str], ...] = (
    ("kernels' totals over the run's, all counters", _totals, "within 2 %"),
    ("launches of 50 µs and more: DRAM bytes, furthest class", _largest("dram_error"), "within 10 %"),
    ("the same, tensor activity", _largest("tensor_error"), "within 10 %"),
    ("one window alone: DRAM bytes, tensor activity, totals", _alone, "the same"),
    ("`ncu`'s profiled step over one window (seconds)", _times, "over 100"),
    ("… over all windows; over the whole recording", _times_of_more, ""),
    ("step beside both over its neighbours without", _slower, "at most 5 %"),
    ("step beside both over the one before any session", _slower_than_bare, "at most 5 %"),
    ("standard error of the clocks, worst window", _clock, ""),
)


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
