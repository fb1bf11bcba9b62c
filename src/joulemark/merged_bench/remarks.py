"""What the tables of blocks and of networks say of their rows alike (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from joulemark.merged_bench.gains import IN_L2
from joulemark.merged_bench.rivals import NOT_ASKED, USERS


def only_a_test(row: Mapping[str, Any], gpu: str) -> str | None:
    """Of what a row is that only tests the command: its figures are of no use, no bar is asked of it; else None.

    Args:
        row: of a document.
        gpu: the document's; ``cpu`` without one.
    """
    tiny, on_cpu = bool(row.get("tiny")), gpu == "cpu"
    return " ".join(filter(None, ("tiny shapes" if tiny else "", "on a CPU" if on_cpu else ""))) or None


def of_use(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows that are more than a test of the command."""
    return [row for row in document["rows"] if only_a_test(row, document["gpu"]) is None]


def lines_of_tests(document: Mapping[str, Any]) -> list[str]:
    """Which rows only test the command, in lines."""
    found: dict[str, list[str]] = {}
    for row in document["rows"]:
        why = only_a_test(row, document["gpu"])
        if why is not None:
            found.setdefault(why, []).append(row["subject"])
    return [
        f"Only a test of the command, {why}: no figure is of use and no bar asked for: {', '.join(names)}."
        for why, names in found.items()
    ]


def remarks(document: Mapping[str, Any]) -> list[str]:
    """Rows that only test the command, rivals that were not asked for, what time cut short and what failed."""
    rows = document["rows"]
    return [
        *lines_of_tests(document),
        *_in_l2(rows),
        *_not_asked(rows),
        *(f"{row['subject']}: time was up before all rivals were built." for row in rows if row.get("cut")),
        *(f"{name}: {why}" for name, why in document["failed"].items()),
    ]


def _in_l2(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whose bytes have no gain because nearly all stay in the L2, and how many merged's count as."""
    names = [row["subject"] for row in rows if "dram_bytes" in row["gains"].get("missing", {})]
    least = f"{IN_L2:.0%} of what the rival moves through the L2"
    counted = f"Of DRAM bytes merged's count as {least} at least"
    none = f", and where the rival moves less there is no gain: {', '.join(names)}" if names else ""
    return [f"{counted}{none}."] if any(row["gains"].get("dram_bytes") for row in rows) or names else []


def _not_asked(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """In lines; older rows say nothing of such rivals."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        names = tuple(one for one in USERS if why_missing(row, one, NOT_ASKED) == NOT_ASKED)
        found.setdefault(names, []).append(row["subject"])
    return [
        f"Rivals that were not asked for: {', '.join(names)} of {', '.join(subjects)}."
        for names, subjects in found.items()
        if names
    ]


def why_missing(row: Mapping[str, Any], rival: str, unnamed: str | None = None) -> str | None:
    """Why a rival has no figures; None where it has, ``unnamed`` where the row does not name it."""
    if rival not in row["rivals"]:
        return unnamed
    missing: Mapping[str, str] = row["rivals"][rival].get("missing", {})
    return missing.get("all")
