"""What merging gains over rivals, of one row and of groups of them, and a row in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from joulemark.merged_bench.rivals import OURS

_UNMERGED = ("folded", "fused")
"""How variants of the whole are called in which nothing is merged: batch norms folded, cuDNN's fused kernels."""
_OVER_OURS = ("over_own_unmerged", "over_layerwise", "over_unmerged_variants")
IN_L2 = 0.01
"""Of the bytes that a rival moves through the L2: where it moves less than that through DRAM there is nothing to gain,
and merged's bytes count as that many at least. A ratio of leftovers says nothing (553× of 0.3 MB).
"""


def gains_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Best rival over merged, for time, energy and DRAM bytes; unmerged over merged.

    Why a gain over rivals is missing stands at the rivals; of what ``merge`` itself timed, and of bytes that are nearly
    none, it stands here.
    """
    others = [name for name in found if name not in OURS]
    timed = [name for name in others if found[name].get("burst_s") is not None]
    dram, hardly = over_dram(found)
    unmerged, why = over_unmerged_variants(found)
    reasons = {"dram_bytes": hardly, "over_unmerged_variants": why}
    return {
        "best_rival": min(timed, key=lambda name: found[name]["burst_s"]) if timed else None,
        "burst": over_best(found, "merged", others, "burst_s"),
        "sustained": over_best(found, "merged", others, "sustained_s"),
        "energy": over_best(found, "merged", others, "energy_j"),
        "dram_bytes": dram,
        "over_own_unmerged": over_best(found, "merged", ["own_unmerged"], "burst_s"),
        "over_layerwise": over_best(found, "merged", ["layerwise"], "burst_s"),
        "over_unmerged_variants": unmerged,
        "missing": {name: reason for name, reason in reasons.items() if reason is not None},
    }


def with_gains(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with its rows' gains as they are counted today: older rows have fewer."""
    return {**document, "rows": [{**row, "gains": gains_of(row["rivals"])} for row in document["rows"]]}


def over_dram(found: Mapping[str, Mapping[str, Any]]) -> tuple[float | None, str | None]:
    """Fewest DRAM bytes of a rival over merged's, which count as :data:`IN_L2` at least; None, and why, without any."""
    moved = {name: bytes_ for name, row in found.items() if (bytes_ := dram_bytes(row)) is not None}
    theirs = {name: bytes_ for name, bytes_ in moved.items() if name not in OURS}
    if "merged" not in moved or not theirs:
        return None, None
    best = min(theirs, key=lambda name: theirs[name])
    through_l2 = found[best].get("l2_bytes") or 0.0
    mine = max(moved["merged"], IN_L2 * through_l2)
    if mine and theirs[best] >= IN_L2 * through_l2:
        return theirs[best] / mine, None
    told = f"{best} moves {theirs[best] / 1e6:.2g} MB through DRAM, merged {moved['merged'] / 1e6:.2g}"
    return None, told + (f"; {best} moves {through_l2 / 1e6:.3g} MB through the L2" if through_l2 else "")


def dram_bytes(rival: Mapping[str, Any]) -> float | None:
    """Read and written, per call; None where one was not counted."""
    read, written = rival.get("dram_read_bytes"), rival.get("dram_write_bytes")
    return None if read is None or written is None else float(read + written)


def unmerged_variants(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Wholes in which nothing is merged that ``merge`` itself timed: variant → seconds of a graph's replay.

    A user can have most of them: batch norms folded, then compiled without tuning, is not always slower than the model
    as it is compiled with tuning. Replays come back to back on one input (``stopwatch.race_replays``).
    """
    times = found.get("merged", {}).get("device_times", {})
    return {name: seconds for name, seconds in times.items() if name.startswith(_UNMERGED)}


def over_unmerged_variants(found: Mapping[str, Mapping[str, Any]]) -> tuple[float | None, str | None]:
    """The fastest of these over merged's burst, which rotates inputs; None, and why, where either is missing."""
    mine, times = found.get("merged", {}).get("burst_s"), unmerged_variants(found)
    if not mine:
        return None, "merged has no time of bursts"
    if not times:
        return None, "merge timed no graph of a whole in which nothing is merged"
    return min(times.values()) / mine, None


def replayed_over_burst(found: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Merged's own replay as ``merge`` timed it over its burst: how far the two ways to time are apart."""
    merged = found.get("merged", {})
    replay, burst = merged.get("device_times", {}).get(merged.get("captured")), merged.get("burst_s")
    return replay / burst if replay and burst else None


def over_best(figures: Mapping[str, Mapping[str, Any]], ours: str, rivals: Sequence[str], figure: str) -> float | None:
    """Best rival's figure over ours; None where either is missing."""
    mine = figures.get(ours, {}).get(figure)
    theirs = [found for one in rivals if (found := figures.get(one, {}).get(figure)) is not None]
    return min(theirs) / mine if mine and theirs else None


def group_gains(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Per group the geometric means of the gains over the best rival, and of how many rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["gains"])
    found = {}
    for group, gains in groups.items():
        found[group] = {"rows": float(len(gains))}
        for name in ("burst", "sustained", "energy", "dram_bytes"):
            known = [one[name] for one in gains if one[name]]
            if known:
                found[group][name] = geometric_mean(known)
    return found


def line_of(row: Mapping[str, Any]) -> str:
    """A row in one line for a terminal."""
    gains = row["gains"]
    told = [
        f"{name} {gains[name]:.2f}×"
        for name in ("burst", "sustained", "energy", "dram_bytes", *_OVER_OURS)
        if gains[name] is not None
    ]
    merged = row["rivals"].get("merged", {}).get("burst_s")
    mine = "not measured" if merged is None else f"{merged * 1e3:.4g} ms"
    return f"  merged {mine} against {gains['best_rival']}: {', '.join(told) or 'no gain known'}"
