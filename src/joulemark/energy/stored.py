"""The parts of a stored document of ``joulemark energy`` that reports read, held to their types.

Documents come from anywhere, and of any version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from joulemark.energy.units import GROUPS
from joulemark.records import Amount, Finite, Json, converted

_FEWEST = 2
_Interval = tuple[Finite, Finite]


class _Split(TypedDict):
    measured_j: Amount
    parts: Mapping[str, Mapping[str, Finite]]
    residual_share: Finite
    movement_share: Finite | None
    path_share: Finite | None
    share_intervals: Mapping[str, _Interval]
    movement_interval: _Interval | None
    path_interval: _Interval | None
    notes: list[str]


class _Row(TypedDict):
    workload: str
    batch_size: int | None
    measured_j: Amount
    window_s: Amount | None
    split: _Split | None


class _Document(TypedDict):
    gpu: str | None
    gpu_uuid: NotRequired[str | None]
    driver: str | None
    measured_utc: str | None
    gain: Amount
    rows: list[_Row]


def check(document: Json) -> None:
    """What readers of splits rely on is there.

    Raises:
        ValueError: something is missing, of another type, or no energy; says which.
    """
    for row in converted(document, _Document)["rows"]:
        split = row["split"]
        if split is not None and (not split["measured_j"] > 0 or len(split["parts"].keys() & set(GROUPS)) < _FEWEST):
            raise ValueError(f"{row['workload']!r} has no energy that can be split")
