"""The document of an attribution: its file, its name, and those of its parts that others read, held to their types.

Documents come from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from joulemark import whole_files
from joulemark.records import Amount, Json, Share, converted
from joulemark.utilization.kernels import CLASSES

SCHEMA = "joulemark/attribution/1"
POOLED = "pooled"
"""Class of kernels that are too short and rare to be told apart."""
_Interval = tuple[Amount, Amount] | None


class _Cell(TypedDict):
    value: Amount
    interval: _Interval


class _Point(TypedDict):
    tensor_flop: Amount
    vector_flop_at_most: Amount
    dram_bytes: Amount
    flop_per_byte: Amount
    flop_per_s: Amount
    bytes_per_s: Amount
    roof_flop_per_s: Amount
    of_roof: Amount | None
    bound_by: Literal["dram", "tensor"]


_Class = TypedDict(
    "_Class",
    {
        "class": str,
        "uses_tensor_cores": bool | None,
        "time_s": Amount,
        "time_share": Amount,
        "launches": Amount,
        "by_level": Mapping[str, Amount],
        "counters": Mapping[str, _Cell],
        "roofline": _Point | None,
    },
)


class _Roofs(TypedDict):
    flop_per_s: Amount
    bytes_per_s: Amount
    ridge_flop_per_byte: Amount


class _Steps(TypedDict):
    recorded: int


class _Finding(TypedDict):
    code: str
    message: str
    remedy: str
    flags: bool


class _Document(TypedDict):
    schema: str
    label: str
    facts: Mapping[str, Json]
    confidence: Share
    steps: _Steps
    classes: list[_Class]
    roofline: _Roofs | None
    findings: list[_Finding]
    notes: Mapping[str, str]


def folder_beside(results: Path) -> Path:
    """Where a sweep leaves the documents of its cases, ``<case_id>.json`` each, beside the file with its records."""
    return results.with_name(f"{results.stem}-attribution")


def write(path: Path, document: Mapping[str, Json]) -> None:
    """Write a document, whole or not at all, into a folder that is made where it is not there."""
    whole_files.put((json.dumps(document, indent=1, allow_nan=False) + "\n").encode(), path)


def check(document: Json) -> None:
    """What readers of classes and roofs rely on is there.

    Raises:
        ValueError: something is missing or of another type; says which.
    """
    found = converted(document, _Document)
    if found["schema"] != SCHEMA:
        raise ValueError(f"schema {found['schema']!r}")
    roofs = found["roofline"]
    if roofs is not None and not all(roofs[name] > 0 for name in ("flop_per_s", "bytes_per_s", "ridge_flop_per_byte")):
        raise ValueError("a roof of nothing")
    unknown = {one["class"] for one in found["classes"]} - {*CLASSES, POOLED}
    if unknown:
        raise ValueError(f"no class of kernels is called {min(unknown)!r}")
