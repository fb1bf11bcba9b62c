"""What merging gains over rivals, of one row and of groups of them, and a row in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

from joulemark.merged_bench.rivals import OURS


def gains_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Best rival over merged, for time, energy and DRAM bytes; unmerged over merged."""
    others = [name for name in found if name not in OURS]
    dram = {
        name: {"dram_bytes": row["dram_read_bytes"] + row["dram_write_bytes"]}
        for name, row in found.items()
        if row.get("dram_read_bytes") is not None and row.get("dram_write_bytes") is not None
    }
    timed = [name for name in others if found[name].get("burst_s") is not None]
    return {
        "best_rival": min(timed, key=lambda name: found[name]["burst_s"]) if timed else None,
        "burst": over_best(found, "merged", others, "burst_s"),
        "sustained": over_best(found, "merged", others, "sustained_s"),
        "energy": over_best(found, "merged", others, "energy_j"),
        "dram_bytes": over_best(dram, "merged", others, "dram_bytes"),
        "over_own_unmerged": over_best(found, "merged", ["own_unmerged"], "burst_s"),
    }


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
            known = [log(one[name]) for one in gains if one[name]]
            if known:
                found[group][name] = exp(sum(known) / len(known))
    return found


def line_of(row: Mapping[str, Any]) -> str:
    """A row in one line for a terminal."""
    gains = row["gains"]
    told = [
        f"{name} {gains[name]:.2f}×"
        for name in ("burst", "sustained", "energy", "dram_bytes", "over_own_unmerged")
        if gains[name] is not None
    ]
    merged = row["rivals"].get("merged", {}).get("burst_s")
    mine = "not measured" if merged is None else f"{merged * 1e3:.4g} ms"
    return f"  merged {mine} against {gains['best_rival']}: {', '.join(told) or 'no gain known'}"
