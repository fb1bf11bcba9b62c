"""Replies of measuring processes: the one that none gave, and those of several as one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.records import Json, Measurement


def unmeasured(outcome: str, reason: str, begin: float | None = None) -> dict[str, Any]:
    """The reply for a case that no process has measured.

    Args:
        outcome: of the case.
        reason: why there is no measurement.
        begin: when a process was asked, in s since the Unix epoch; None where none was.
    """
    now = time.time()
    window = [now if begin is None else begin, now]
    return {"outcome": outcome, "reason": reason, "measurements": [], "findings": [], "window_utc": window}


def died(error: CaseTimeout | WorkerDied, begin: float) -> dict[str, Any]:
    """The reply for a case whose process died or was killed at its time-out.

    Args:
        error: what became of the process; what to do against a time-out is said elsewhere.
        begin: when it was asked, in s since the Unix epoch.
    """
    return unmeasured("failed", error.what if isinstance(error, CaseTimeout) else str(error), begin)


def as_one(replies: Sequence[Json]) -> Json:
    """The replies of all processes of a case as one."""
    return {
        **replies[-1],
        "measurements": [one for reply in replies for one in reply["measurements"]],
        "findings": [one for reply in replies for one in reply["findings"]],
        "window_utc": [replies[0]["window_utc"][0], replies[-1]["window_utc"][1]],
    }


def joined(reply: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A case's reply with what a process of its own for one pass has just added to it."""
    return {
        **reply,
        "measurements": [*reply["measurements"], *other["measurements"]],
        "findings": [*reply["findings"], *other["findings"]],
        "window_utc": [reply["window_utc"][0], time.time()],
    }


def filled(reply: dict[str, Any], name: str, metrics: Sequence[str]) -> dict[str, Any]:
    """The reply of one pass with a Measurement that says why there is none; what was measured before a failure stands.

    Args:
        reply: of the pass's process.
        name: of the pass.
        metrics: that the pass gives.
    """
    if reply["measurements"]:
        return reply
    why = f"the {name} pass ended {reply['outcome']}: {reply['reason']}"
    return {**reply, "measurements": [Measurement(name, missing=dict.fromkeys(metrics, why)).to_json()]}
