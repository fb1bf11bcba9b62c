"""The parts of ``tests/gpu/attribution.py``: their names, and what they leave in their folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from joulemark.attribution.recording import read_recording
from joulemark.attribution.timeline import Timeline, read_timeline
from joulemark.errors import UnreadableInput
from joulemark.records import Case

MODELS = {
    "resnet50": Case("resnet50", "train", "eager", "bf16", 128, "channels_last", "device", "gpu"),
    "mobilenet_v2": Case("mobilenet_v2", "inference", "eager", "bf16", 256, "channels_last", "device", "gpu"),
    "bert_base": Case("bert_base", "train", "eager", "bf16", 128, "contiguous", "device", "gpu"),
}
"""Batches at which the device is the limit, not the host: of a step that waits, no instrument shows its own cost."""
CACHES, SHARES = ("kept", "flushed"), ("long", "rest")


def parts() -> list[str]:
    """All of them, the most telling first."""
    ncu = [f"{model}-ncu-{caches}-{share}" for share in SHARES for caches in CACHES for model in MODELS]
    return [*(f"{model}-record" for model in MODELS), *ncu]


def model_of(part: str) -> str:
    """The model of a part."""
    return part.partition("-")[0]


def is_ncu(part: str) -> bool:
    """Whether Nsight Compute runs in it."""
    return "-ncu-" in part


def read_json(path: Path) -> dict[str, Any] | None:
    """A file's content; None where it is not there, or its writer was killed."""
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return held


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def one_window(folder: Path) -> Timeline:
    """The timeline of the first window of a recording whose trace can be used: all of them take long to read.

    Raises:
        UnreadableInput: there is none.
    """
    whole = read_recording(folder)
    refused = UnreadableInput(f"{folder} holds no window of steps", "record again")
    for one in whole.of_role("steps"):
        try:
            return read_timeline(folder, replace(whole, windows=(one,)))
        except UnreadableInput as error:
            refused = error
    raise refused


def best_recording(out: Path, model: str) -> Path | None:
    """The recording that was ended, or else the one with most windows."""
    done = read_json(out / f"{model}-record" / "done.json")
    if done is not None:
        return out / f"{model}-record" / str(done["recording"])
    held: list[tuple[int, Path]] = []
    for folder in sorted((out / f"{model}-record").glob("recording-*")):
        with suppress(UnreadableInput):
            held.append((len(read_recording(folder).of_role("steps")), folder))
    return max(held, key=lambda one: one[0])[1] if held else None
