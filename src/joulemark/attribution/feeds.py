"""What an attribution gives to other analyses: counters of each kernel in the form of Nsight Compute's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from joulemark.attribution.stored import SCHEMA
from joulemark.errors import UnreadableInput, in_words
from joulemark.records import Json
from joulemark.utilization.levels import COUNTS, SHARES


def per_kernel(document: Mapping[str, Json]) -> dict[str, Json]:
    """Kernels with their levels as shares of peak, and their amounts per step, as ``utilization.refine`` takes them.

    Kernels that share the rate of others for most of their time are left out: theirs is not their own.

    Args:
        document: of :func:`joulemark.attribution.attribute`.
    """
    return {"tier": "pm_sampling", "kernels": [_entry(one) for one in document["kernels"] if _own(one)]}


def _own(kernel: Mapping[str, Json]) -> bool:
    levels = kernel["by_level"]
    return bool(levels.get("place", 0.0) + levels.get("kernel", 0.0) > 0.5)


def _entry(kernel: Mapping[str, Json]) -> dict[str, Json]:
    counters = kernel["counters"]
    levels = {level: counters[name]["value"] for level, name in SHARES.items() if name in counters}
    amounts = {name: counters[raw]["value"] * each for name, (raw, each) in COUNTS.items() if raw in counters}
    kept = {key: kernel[key] for key in ("name", "class", "uses_tensor_cores", "time_s", "launches")}
    return {**kept, **levels, **amounts}


def read_per_kernel(path: Path) -> dict[str, Json]:
    """:func:`per_kernel` of a stored document.

    Raises:
        UnreadableInput: the file is no attribution.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise UnreadableInput(f"{path} is no attribution", "write one: joulemark attribution FOLDER --out F.json")
        return per_kernel(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableInput(
            f"{path} is no attribution ({in_words(error)})",
            "write one: joulemark attribution FOLDER --out F.json",
        ) from error
