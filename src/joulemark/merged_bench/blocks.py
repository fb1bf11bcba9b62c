"""What a document of blocks says: gains over the best rival in time, energy, bytes; schedules side by side (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from joulemark.merged_bench.gains import dram_bytes
from joulemark.merged_bench.judge import GOOD
from joulemark.merged_bench.networks import figure, gain
from joulemark.merged_bench.remarks import of_use, remarks
from joulemark.records import Table

BARS: Mapping[str, float] = {"inverted": 3.0, "chain-16": 3.0, "chain-32": 1.8, "bottleneck": 1.3, "chain3d": 2.0}
"""Kind of block → geometric mean of the gains over the best rival that is asked for."""
_KINDS: Mapping[str, str] = {
    "inverted": "inverted", "inverted-s2": "inverted", "chain-16": "chain-16", "chain-16-b1": "chain-16",
    "chain-32": "chain-32", "bottleneck": "bottleneck", "chain3d-16": "chain3d", "chain3d-16-b1": "chain3d",
    "chain3d-32": "chain3d",
}  # fmt: skip
_SCHEDULES = ("padded", "memoized", "rows", "bricks", "own_unmerged")
_RUNS = re.compile(r"(.*): (\w+), .* by (\w+)/")
"""A line of what merging explains: layers, schedule, family."""
_PLAIN = "the whole model: plain"
"""How the line begins that says that a rival was faster than what was merged."""
_FIGURES = ("burst", "sustained", "energy", "dram_bytes")


def gains_table(document: Mapping[str, Any]) -> Table:
    """A row per block: merged and unmerged beside the best rival, and what is saved in time, energy and bytes."""
    cells = [tuple(_gains(row)) for row in document["rows"]]
    columns = (
        "block", "merged", "unmerged", "best rival", "rival's time", "burst gain", "sustained gain", "energy",
        "energy gain", "DRAM bytes", "DRAM gain",
    )  # fmt: skip
    notes = [
        "Times per call in bursts; gains are the best rival's over merged's; energy and DRAM bytes per call of merged.",
        *_means(of_use(document)),
        *remarks(document),
    ]
    title = f"Blocks merged, against their best rival ({document['gpu']})"
    return Table(columns, tuple(cells), frozenset((1, 2, *range(4, len(columns)))), tuple(notes), title)


def schedules_table(document: Mapping[str, Any]) -> Table:
    """A row per block that several schedules of our own were measured on: their times, the fastest, merged's choice."""
    told = [row for row in document["rows"] if len(_timed(row)) > 1]
    cells = [tuple(_schedules(row)) for row in told]
    columns = ("block", *(one.removeprefix("own_") for one in _SCHEDULES), "fastest", "merged", "merged runs")
    notes = (
        "Times per call in bursts: the fastest kernels of one schedule wherever it has any, whatever merging takes.",
        "bricks: padded, over activations that lie in bricks.",
        *_choices(told),
    )
    title = f"Schedules of blocks side by side ({document['gpu']})"
    return Table(columns, tuple(cells), frozenset(range(1, 1 + len(_SCHEDULES))), notes, title)


def _gains(row: Mapping[str, Any]) -> list[str]:
    rivals, gains = row["rivals"], row["gains"]
    best, merged = gains["best_rival"], rivals.get("merged", {})
    return [
        row["subject"],
        _time(rivals, "merged"),
        _time(rivals, "own_unmerged"),
        best or "–",
        "–" if best is None else _time(rivals, best),
        *(gain(gains[name]) for name in ("burst", "sustained")),
        figure(merged.get("energy_j"), "J"),
        gain(gains["energy"]),
        figure(dram_bytes(merged), "B"),
        gain(gains["dram_bytes"]),
    ]


def _schedules(row: Mapping[str, Any]) -> list[str]:
    timed = _timed(row)
    return [
        row["subject"],
        *(_time(row["rivals"], one) for one in _SCHEDULES),
        min(timed, key=lambda name: timed[name]).removeprefix("own_"),
        _time(row["rivals"], "merged"),
        _runs(row["rivals"].get("merged", {})),
    ]


def _runs(merged: Mapping[str, Any]) -> str:
    """What merging runs: its segments, or the whole model by the rival that it took."""
    told = merged.get("explain", ())
    if any(one.startswith(_PLAIN) for one in told):
        return f"nothing merged: {merged['variant']}"
    segments = filter(None, map(_RUNS.match, told))
    return "; ".join(f"{one[1]}: {one[2]} by {one[3]}" for one in segments) or "–"


def _choices(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How often merging took what is as fast as the fastest schedule by itself."""
    costs = [
        merged / min(_timed(row).values())
        for row in rows
        if (merged := row["rivals"].get("merged", {}).get("burst_s")) is not None
    ]
    good = sum(cost <= GOOD for cost in costs)
    return [f"merged takes at most {GOOD - 1:.0%} longer than the fastest of them in {good} of {len(costs)} blocks."]


def _timed(row: Mapping[str, Any]) -> dict[str, float]:
    """The schedules that the block was measured with."""
    found = {name: row["rivals"].get(name, {}).get("burst_s") for name in _SCHEDULES}
    return {name: time_s for name, time_s in found.items() if time_s is not None}


def _time(rivals: Mapping[str, Mapping[str, Any]], name: str) -> str:
    return figure(rivals.get(name, {}).get("burst_s"), "s")


def _means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Geometric means per kind, of how many blocks, beside what is asked for."""
    lines = []
    for kind, asked in BARS.items():
        alike = [row["gains"] for row in rows if _KINDS.get(row["group"]) == kind]
        told = []
        for name in _FIGURES:
            known = [gains[name] for gains in alike if gains[name]]
            if known:
                of = f" ({len(known)})" if len(known) < len(alike) else ""
                told.append(f"{name} {geometric_mean(known):.2f}×{of}")
        if told:
            lines.append(f"{kind} ({len(alike)} blocks), geometric means: {', '.join(told)}; {asked:g}× is asked for.")
    return lines
