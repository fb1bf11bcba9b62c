"""When a row was measured, and by which code: rows of one file may be of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from joulemark import __version__
from joulemark.merged.cache import code_key
from joulemark.store import git_commit

UNKNOWN: Mapping[str, Any] = {
    **dict.fromkeys(("at", "joulemark", "commit", "dirty", "merged_code")),
    "missing": {"all": "the row is older than what is known of rows"},
}
"""Of a row that does not say."""
_SHORT = 8


def measured_now() -> dict[str, Any]:
    """The time, and the code of this process: version, commit where it is a checkout, and a hash of ``merged``."""
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), **_code()}


@cache
def _code() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[3]
    commit = git_commit(root) if (root / ".git").exists() else None  # of nobody else's checkout around this one
    known = {"joulemark": __version__, "merged_code": code_key()}
    if commit is None:
        return {**known, "commit": None, "dirty": None, "missing": {"commit": "joulemark ran from no git checkout"}}
    why = {"dirty": "git did not say in time"} if commit["dirty"] is None else {}
    return {**known, "commit": commit["hash"], "dirty": commit["dirty"], "missing": why}


def versions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which rows are of which code, in lines, the latest last."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        known = row.get("measured", UNKNOWN)
        told = (known["at"] or "")[:10], _told(known)
        found.setdefault(told, []).append(row["subject"])
    return [
        f"{' '.join(filter(None, ('Measured', *told)))}: {', '.join(names)}." for told, names in sorted(found.items())
    ]


def _told(known: Mapping[str, Any]) -> str:
    if known["joulemark"] is None:
        return "at an unknown time by unknown code"
    commit = "without git" if known["commit"] is None else f"commit {known['commit'][:_SHORT]}"
    changed = ", changed" if known["dirty"] else ""
    return f"by joulemark {known['joulemark']} ({commit}{changed}; merged {known['merged_code'][:_SHORT]})"
