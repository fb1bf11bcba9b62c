"""What a document of networks says: gains over the best rival, energy, bytes, costs; several files as one (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

from joulemark.errors import ConfigurationError
from joulemark.merged_bench.gains import gains_of, replayed_over_burst, unmerged_variants
from joulemark.merged_bench.judge import judge
from joulemark.merged_bench.provenance import UNKNOWN, versions
from joulemark.merged_bench.remarks import of_use, only_a_test, remarks, why_missing
from joulemark.merged_bench.rivals import NOT_ASKED
from joulemark.merged_bench.rows import is_whole
from joulemark.records import Table

BARS: Mapping[str, float] = {"mobilenet_v2": 1.7, "efficientnet_b0": 1.3, "resnet50": 1.1}
"""Gains over the best rival that are asked for, in batches of 32 and 128."""
LEAST, MEAN = 0.98, 1.25
"""Below which no network may fall, and what the geometric mean of all is to reach."""
_SAME = ("schema", "kind", "gpu", "driver", "software")


_FLOOR = (
    "The floor is the roofline of every layer as one kernel, at rates measured on this GPU, over merged's time: above "
    "100 % merging went below what layers one by one can reach."
)
_ASKED = "asked: the gain that is asked for, and whether burst and sustained reach it."

_CALLED = {"over_unmerged_variants": "over unmerged"}
_OVER_UNMERGED = (
    "the fastest whole without merging that merge itself timed (folded batch norms, cuDNN's fused kernels, a compiler "
    "without tuning) over merged's burst. It is no rival, and only about comparable: these are replays back to back on "
    "one input, bursts are single rounds over rotating inputs"
)


def joined(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Files of one GPU model and one software as one, each row with the GPU that it was measured on.

    Rows say what is known of their code, and have the gains that rows have today.

    Raises:
        ConfigurationError: there is none, or they are of different GPUs or software.
    """
    if not documents:
        raise ConfigurationError("there is no file to join", "name some")
    first = documents[0]
    for other in documents[1:]:
        for name in _SAME:
            if other[name] != first[name]:
                raise ConfigurationError(
                    f"files differ in {name}: {first[name]!r} and {other[name]!r}", "join files of one machine"
                )
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for one in documents:
        failed |= one["failed"]
        for row in one["rows"]:
            key = (row["subject"], row["dtype"])
            if is_whole(row) or key not in rows or not is_whole(rows[key]):
                rows[key] = {"gpu_uuid": one["gpu_uuid"], "measured": UNKNOWN, **row, "gains": gains_of(row["rivals"])}
    uuids = {one["gpu_uuid"] for one in documents}
    failed = {name: why for name, why in failed.items() if not any(name.partition(":")[0] == key for key, _ in rows)}
    whole = {"gpu_uuid": uuids.pop() if len(uuids) == 1 else None, "rows": list(rows.values()), "failed": failed}
    document = {**first, **whole, "model": None}
    return {**document, "model": judge(document)} if first["kind"] == "blocks" else document


def gains_table(document: Mapping[str, Any]) -> Table:
    """A row per network and batch: merged beside the best rival; energy per image, bytes, costs and the bars."""
    rows = sorted(document["rows"], key=lambda one: (one["shape"][0], one["group"]))
    document = {**document, "rows": rows}
    judged = of_use(document)
    cells = [(*_cells(row), "–" if only_a_test(row, document["gpu"]) else _verdict(row)) for row in rows]
    columns = (
        "network", "merged", "best rival", "its time", "burst", "sustained", "over unmerged", "energy/image", "gain",
        "DRAM gain", "layers' floor", "merge", "cached", "compile", "memory", "asked",
    )  # fmt: skip
    notes = [
        "Times per call; gains are the best rival's figure over merged's; energy per image of merged, then its gain.",
        *_unmerged(rows),
        *([_FLOOR] if any(row["floors"] for row in rows) else []),
        *([_ASKED] if judged else []),
        *_means(judged),
        *(
            f"{row['subject']}: no compiler that tunes among the rivals: {why}."
            for row in rows
            if (why := why_missing(row, "compile")) not in (None, NOT_ASKED)
        ),
        *remarks(document),
        *versions(rows),
    ]
    title = f"Networks merged, against their best rival ({document['gpu']})"
    return Table(columns, tuple(cells), frozenset(range(3, len(columns) - 1)), tuple(notes), title)


def _cells(row: Mapping[str, Any]) -> list[str]:
    gains, merged, batch = row["gains"], row["rivals"].get("merged", {}), row["shape"][0]
    best = gains["best_rival"]
    energy, floors = merged.get("energy_j"), row["floors"]
    mine = merged.get("burst_s")
    return [
        row["subject"],
        unit(mine, 1e3, "ms"),
        best or "–",
        unit(row["rivals"][best].get("burst_s") if best else None, 1e3, "ms"),
        *(unit(gains[name], 1, "×") for name in ("burst", "sustained", "over_unmerged_variants")),
        unit(None if energy is None else energy / batch, 1e3, "mJ"),
        *(unit(gains[name], 1, "×") for name in ("energy", "dram_bytes")),
        "–" if floors is None or not mine else f"{floors['layers_s'] / mine:.0%}",
        *(unit(merged.get(name), 1, "s") for name in ("merge_s", "merge_cached_s")),
        unit(row["rivals"].get("compile", {}).get("build_s"), 1, "s"),
        unit(merged.get("peak_bytes"), 2**-30, "GiB"),
    ]


def _unmerged(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the gain over unmerged variants is, and how far the two ways to time are apart; nothing without any."""
    timed = {row["subject"]: unmerged_variants(row["rivals"]) for row in rows}
    if not any(timed.values()):
        return []
    apart = [one for row in rows if (one := replayed_over_burst(row["rivals"])) is not None]
    own = f" (timed so, merged itself takes {min(apart):.2f} to {max(apart):.2f} of its burst)" if apart else ""
    bare = [name for name, times in timed.items() if times and not any("compiled" in one for one in times)]
    lines = [
        f"over unmerged: {_OVER_UNMERGED}{own}.",
        f"over unmerged without a compiled one, which was not built: {', '.join(bare)}." if bare else "",
    ]
    return [one for one in lines if one]


def unit(value: float | None, scale: float, name: str) -> str:
    """A figure in a cell, in a unit that is ``scale`` to one of SI; a dash where it is missing."""
    return "–" if value is None else f"{value * scale:.3g} {name}"


def asked_of(row: Mapping[str, Any]) -> float:
    """The gain over the best rival that is asked for."""
    return BARS.get(row["group"], LEAST) if row["shape"][0] > 1 else LEAST


def _verdict(row: Mapping[str, Any]) -> str:
    asked = asked_of(row)
    known = [row["gains"][name] for name in ("burst", "sustained") if row["gains"][name] is not None]
    told = "not measured" if not known else "reached" if min(known) >= asked else f"missed by {asked - min(known):.2f}"
    return f"{asked:g}×: {told}"


def _means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Geometric means per batch, of how many networks."""
    lines = []
    for batch in sorted({row["shape"][0] for row in rows}):
        told = []
        for name in ("burst", "sustained", "over_unmerged_variants", "energy", "dram_bytes"):
            known = [row["gains"][name] for row in rows if row["shape"][0] == batch and row["gains"][name]]
            if known:
                told.append(f"{_CALLED.get(name, name)} {exp(sum(map(log, known)) / len(known)):.3f}× ({len(known)})")
        asked = f"; {MEAN}× is asked for over eleven" if batch > 1 else ""
        lines.append(f"batch {batch}, geometric means (of so many networks): {', '.join(told) or 'none'}{asked}.")
    return lines
