"""What a document of networks says: gains over the best rival, energy, bytes, costs; several files as one (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from joulemark.errors import ConfigurationError
from joulemark.merged_bench.gains import gains_of, replayed_over_burst, unmerged_variants
from joulemark.merged_bench.judge import judge
from joulemark.merged_bench.provenance import UNKNOWN, versions
from joulemark.merged_bench.remarks import of_use, only_a_test, remarks, why_missing
from joulemark.merged_bench.rivals import NOT_ASKED
from joulemark.merged_bench.rows import is_whole
from joulemark.merged_bench.subjects import NETWORKS
from joulemark.metrics import format_ratio, format_value
from joulemark.records import Table

BARS: Mapping[str, float] = {"mobilenet_v2": 1.7, "efficientnet_b0": 1.3, "resnet50": 1.1}
"""Gains over the best rival that are asked for, in batches of 32 and 128."""
LEAST, MEAN = 0.98, 1.25
"""Below which no network may fall, and what the geometric mean of all is to reach."""
_SAME = ("schema", "kind", "gpu", "driver", "software")


_GAINS = (
    "Gains are a rival's figure over merged's: above 1 × merging is better. Each is over the rival that is best in "
    "that figure, of those that have it: time per call in bursts, each after a rest (those times stand beside it), and "
    "sustained, in a steady window; energy in that window; bytes through DRAM. Steady windows are of merged and of the "
    "rivals that are fastest in bursts, one at least."
)
_UNMERGED = (
    "the fastest whole without merging that merge itself timed (folded batch norms, cuDNN's fused kernels, a compiler "
    "without tuning) over merged's burst. It is no rival, and only about comparable: these are replays back to back on "
    "one input, bursts are single rounds over rotating inputs"
)
_ASKED = "asked: the gain that is asked for, and whether burst and sustained reach it."
_COSTS = (
    "first merge: the first time; cached: again in the same process, by the plan on the disk; torch.compile: what the "
    "rival that tunes took to be built; memory: the most that a call of merged holds."
)
_FLOOR = (
    "layers' floor: the roofline of every layer as one kernel, at rates measured on this GPU, over merged's time: "
    "above 100 % merging went below what layers one by one can reach."
)
_NO_REASON = "no reason was kept"
"""By rows of before."""
_FIGURES = ("burst", "sustained", "over_unmerged_variants", "energy", "dram_bytes")


def joined(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Files of one GPU model and one software as one, each row with the GPU that it was measured on.

    Rows say what is known of their code, and have the gains that rows have today.

    Raises:
        ConfigurationError: there is none, or they are of different GPUs or software.
    """
    if not documents:
        raise ConfigurationError("there is no file to join", "name some")
    first = documents[0]
    for number, other in enumerate(documents[1:], 2):
        for name in _SAME:
            if other[name] != first[name]:
                raise ConfigurationError(
                    f"files 1 and {number} differ in {name}: {first[name]!r} and {other[name]!r}",
                    "join files of one machine",
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
    """A row per network and batch: merged beside the best rival in time, energy and bytes, and the bars; then means."""
    rows = in_order(document["rows"])
    document = {**document, "rows": rows}
    judged = of_use(document)
    cells = [(*_gains(row), "–" if only_a_test(row, document["gpu"]) else _verdict(row)) for row in rows]
    columns = (
        "network", "merged", "best rival", "rival's time", "burst gain", "sustained gain", "gain over unmerged",
        "energy/sample", "energy gain", "DRAM gain", "asked",
    )  # fmt: skip
    notes = [
        _GAINS if rows else "No network was measured yet.",
        *_unmerged(rows),
        *([_ASKED] if judged else []),
        *(
            f"{row['subject']}: no compiler that tunes among the rivals: {why}."
            for row in rows
            if (why := why_missing(row, "compile")) not in (None, NOT_ASKED)
        ),
        *remarks(document),
        *versions(rows),
    ]
    title = f"Networks merged, against their best rival ({document['gpu']})"
    numeric = frozenset({1, *range(3, len(columns) - 1)})
    return Table(columns, (*cells, *_means(judged)), numeric, tuple(notes), title)


def costs_table(document: Mapping[str, Any]) -> Table:
    """A row per network and batch: seconds until it is merged or compiled, memory, and how near its floor it is."""
    rows = in_order(document["rows"])
    columns = ("network", "first merge", "cached", "torch.compile", "memory", "layers' floor")
    notes = (
        _COSTS,
        *([_FLOOR] if any(row["floors"] for row in rows) else []),
        *_without("cached figure", {row["subject"]: _why_not_cached(row["rivals"].get("merged", {})) for row in rows}),
        *_without("layers' floor", {row["subject"]: _why_no_floor(row) for row in rows}),
    )
    title = f"What merging costs ({document['gpu']})"
    return Table(columns, tuple(map(_costs, rows)), frozenset(range(1, len(columns))), notes, title)


def _without(what: str, reasons: Mapping[str, str | None]) -> list[str]:
    """Why a figure is not known, in a line for all subjects of one reason; None for those that have it."""
    subjects: dict[str, list[str]] = {}
    for subject, why in reasons.items():
        if why is not None:
            subjects.setdefault(why, []).append(subject)
    return [f"No {what} of {', '.join(names)}: {why.removesuffix('.')}." for why, names in subjects.items()]


def _why_no_floor(row: Mapping[str, Any]) -> str | None:
    return None if row["floors"] is not None else str(row.get("floors_missing", _NO_REASON))


def _why_not_cached(merged: Mapping[str, Any]) -> str | None:
    """None where merging itself was not timed, too: why stands at the rival."""
    known = merged.get("merge_s") is None or merged.get("merge_cached_s") is not None
    return None if known else str(merged.get("merge_cached_missing", _NO_REASON))


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows by batch and network."""
    return sorted(rows, key=lambda one: (one["shape"][0], one["group"]))


def _gains(row: Mapping[str, Any]) -> list[str]:
    gains, merged, batch = row["gains"], row["rivals"].get("merged", {}), row["shape"][0]
    best, energy = gains["best_rival"], merged.get("energy_j")
    return [
        row["subject"],
        figure(merged.get("burst_s"), "s"),
        best or "–",
        figure(row["rivals"][best].get("burst_s") if best else None, "s"),
        *(gain(gains[name]) for name in _FIGURES[:3]),
        figure(None if energy is None else energy / batch, "J"),
        *(gain(gains[name]) for name in _FIGURES[3:]),
    ]


def _costs(row: Mapping[str, Any]) -> tuple[str, ...]:
    merged, floors = row["rivals"].get("merged", {}), row["floors"]
    mine = merged.get("burst_s")
    return (
        row["subject"],
        *(figure(merged.get(name), "s") for name in ("merge_s", "merge_cached_s")),
        figure(row["rivals"].get("compile", {}).get("build_s"), "s"),
        figure(merged.get("peak_bytes"), "B"),
        "–" if floors is None or not mine else f"{floors['layers_s'] / mine:.0%}",
    )


def _unmerged(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the gain over unmerged variants is, and how far the two ways to time are apart; nothing without any."""
    timed = {row["subject"]: unmerged_variants(row["rivals"]) for row in rows}
    if not any(timed.values()):
        return []
    apart = [one for row in rows if (one := replayed_over_burst(row["rivals"])) is not None]
    own = f" (timed so, merged itself takes {min(apart):.2f} to {max(apart):.2f} of its burst)" if apart else ""
    bare = [name for name, times in timed.items() if times and not any("compiled" in one for one in times)]
    lines = [
        f"gain over unmerged: {_UNMERGED}{own}.",
        f"gain over unmerged without a compiled one, which was not built: {', '.join(bare)}." if bare else "",
    ]
    return [one for one in lines if one]


def figure(value: float | None, unit: str) -> str:
    """A figure in a cell, with the prefix that its size asks for; a dash where it is missing."""
    return "–" if value is None else format_value(value, unit)


def gain(value: float | None) -> str:
    """A gain in a cell; a dash where it is missing."""
    return "–" if value is None else f"{format_ratio(value, 2)} ×"


def asked_of(row: Mapping[str, Any]) -> float:
    """The gain over the best rival that is asked for."""
    return BARS.get(row["group"], LEAST) if row["shape"][0] > 1 else LEAST


def _verdict(row: Mapping[str, Any]) -> str:
    known = [row["gains"][name] for name in ("burst", "sustained") if row["gains"][name] is not None]
    return _held(known, asked_of(row))


def _held(known: Sequence[float], asked: float) -> str:
    """Whether the least of some gains is what is asked for."""
    told = "not measured" if not known else "reached" if min(known) >= asked else f"missed by {asked - min(known):.2g}"
    return f"{asked:g}×: {told}"


def _means(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Geometric means per batch, a row each; of how many networks, where a figure is missing of others."""
    cells = []
    for batch in sorted({row["shape"][0] for row in rows}):
        alike = [row["gains"] for row in rows if row["shape"][0] == batch]
        known = {name: [one[name] for one in alike if one[name]] for name in _FIGURES}
        means = {name: geometric_mean(found) for name, found in known.items() if found}
        few = {name: f" ({len(found)})" if 0 < len(found) < len(alike) else "" for name, found in known.items()}
        time, more = ([gain(means.get(one)) + few[one] for one in some] for some in (_FIGURES[:3], _FIGURES[3:]))
        reached = _held([means[one] for one in ("burst", "sustained") if one in means], MEAN)
        whole = reached if len(alike) >= len(NETWORKS) else f"{MEAN:g}× over {len(NETWORKS)}: {len(alike)} are there"
        named = f"geometric mean, batch {batch}, of {len(alike)}"
        cells.append((named, "", "", "", *time, "", *more, whole if batch > 1 else ""))
    return cells
