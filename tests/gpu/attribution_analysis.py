"""What recordings and Nsight Compute say of the same models: ``attribution.py OUT --analyse``, which needs no GPU."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from attribution_parts import CACHES, MODELS, SHARES, best_recording, read_json

from joulemark.attribution.against import compare, largest_error
from joulemark.attribution.recording import read_recording, read_series
from joulemark.attribution.timeline import read_timeline
from joulemark.errors import UnreadableInput
from joulemark.utilization.ncu_csv import Launch, parse, read_export

SCHEMA = "joulemark/attribution-ncu/1"
ERROR, COST, TOTALS, FASTER = 0.10, 0.05, 0.02, 100.0
BARS = {"dram_error": "DRAM bytes", "tensor_error": "tensor activity"}
STEPS, SLOWER = ("kernel_time_s", "bare_s", "plain_s", "recorded_s"), ("slowdown", "slowdown_from_bare")
"""Of an attribution's steps: seconds per step, and what the instruments cost."""


def analyse(out: Path) -> dict[str, Any]:
    """Attributions of all models that were recorded, and what they are held to."""
    return {"schema": SCHEMA, "models": {model: of_model(out, model) for model in MODELS}}


def of_model(out: Path, model: str) -> dict[str, Any]:
    """Figures of one model; its attribution is written."""
    from joulemark.attribution.document import Attribution  # its statistics take a while to load
    from joulemark.report.jsonout import dumps

    folder = best_recording(out, model)
    if folder is None:
        why = read_json(out / f"{model}-record" / "failed.json") or {"error": "NotMeasured", "message": "not recorded"}
        return {"label": MODELS[model].label, "recording": None, "ncu": None, "why": why}
    try:
        found = Attribution.of(folder)
    except UnreadableInput as error:
        why = {"error": "UnreadableInput", "message": error.what}
        return {"label": MODELS[model].label, "recording": None, "ncu": None, "why": why}
    document = found.document()
    (out / f"attribution-{model}.json").write_text(dumps(document))
    recording = held_to(document, folder, read_json(out / f"{model}-record" / "done.json"))
    alone = one_window_alone(folder)
    ncu = {caches: against(out, model, caches, found.places(), recording, alone) for caches in CACHES}
    return {"label": document["label"], "recording": recording, "ncu": ncu, "why": None}


class Alone(NamedTuple):
    """What the first window of a recording that can be used says without the others.

    Args:
        window: its number.
        seconds: of its steps, with what holds the device before them.
        places: of a step.
        totals: counter → what kernels are given, over what was counted.
    """

    window: int
    seconds: float
    places: list[dict[str, Any]]
    totals: dict[str, float]


def one_window_alone(folder: Path) -> Alone:
    """As much as Nsight Compute tells of one step: no intervals over windows, no references, no modules.

    Raises:
        UnreadableInput: no window can be used.
    """
    from joulemark.attribution.document import Attribution

    whole = read_recording(folder)
    refused = UnreadableInput(f"{folder} holds no window of steps", "record again")
    for one in whole.of_role("steps"):
        recording = replace(whole, windows=(one,), plain_step_s=(), recorded_step_s=())
        try:
            timeline = read_timeline(folder, recording)
            found = Attribution(recording, timeline, {one.number: read_series(folder / one.file)})
        except UnreadableInput as error:
            refused = error
            continue
        return Alone(one.number, (one.seconds or 0.0) + one.hold_s, found.places(), totals_of(found.counters()))
    raise refused


def totals_of(counters: Mapping[str, Any]) -> dict[str, float]:
    """Counter → what kernels are given, over what was counted."""
    return {name: one["ratio"] for name, one in counters.items() if one["ratio"] is not None}


def show(out: Path) -> None:
    """Tables and a picture of each attribution that was written."""
    from joulemark.report import attribution_plot, attribution_view, formats

    for path in sorted(out.glob("attribution-*.json")):
        document = read_json(path)
        if document is not None and document["schema"] != SCHEMA:
            print(formats.render(attribution_view.tables(document)))
            attribution_plot.draw(document, path.with_suffix(".svg"))


def held_to(document: Mapping[str, Any], folder: Path, done: Mapping[str, Any] | None) -> dict[str, Any]:
    """Totals and cost of one model."""
    told = totals_of(document["counters"])
    windows, steps = document["clock"]["windows"], document["steps"]
    return {
        "file": f"{folder.parent.name}/{folder.name}",
        "ended": done is not None,
        "in_windows_s": sum((one.seconds or 0.0) + one.hold_s for one in read_recording(folder).of_role("steps")),
        "recorded_s": None if done is None else done["recorded_s"],
        "opened_s": None if done is None else done["opened_s"],
        "totals": told,
        "clock_uncertainty_s": max(one["uncertainty_s"] for one in windows),
        "counts_best_at_s": [one["check"]["best_s"] for one in windows],
        "steps": {name: steps[name] for name in STEPS},
        **{name: steps[name] for name in (*SLOWER, "slowdown_interval")},
        "checks": {
            "totals within 2 %": all(abs(ratio - 1) <= TOTALS for ratio in told.values()),
            "at most 5 % slower": within_cost([steps[name] for name in SLOWER]),
        },
    }


def within_cost(slower: Sequence[float | None]) -> bool | None:
    """Whether a run is slowed no more than it may be, both against stretches in turns and against a bare process."""
    return None if None in slower else all(one is not None and one <= COST for one in slower)


def against(
    out: Path,
    model: str,
    caches: str,
    places: Sequence[Mapping[str, Any]],
    recording: Mapping[str, Any],
    alone: Alone | None = None,
) -> dict[str, Any]:
    """What Nsight Compute says of the same step, what it took, and why it says nothing.

    Flushed caches change the work itself: their errors are shown and not held to anything. Nsight Compute's answer is
    one step's, so what it took is held against one window, if that alone keeps the limits of errors and totals.
    """
    folders = {share: out / f"{model}-ncu-{caches}-{share}" for share in SHARES}
    done = {share: one for share, folder in folders.items() if (one := read_json(folder / "done.json")) is not None}
    missing = {
        share: read_json(folder / "failed.json") or {"error": "NotMeasured", "message": "it was not begun or not ended"}
        for share, folder in folders.items()
        if share not in done
    }
    launches = [launch for share, one in done.items() if one["launches"] for launch in launches_of(folders[share])]
    cut = any(one["cut"] for one in done.values())
    compared = compare(places, launches, cut=cut) if launches else None
    profiled_s = sum(one["profiled_s"] for one in done.values())
    ratio = profiled_s / recording["in_windows_s"] if launches and recording["in_windows_s"] else None
    errors = errors_of(compared)
    single = of_one_window(alone, launches, cut=cut, profiled_s=profiled_s) if alone and launches else None
    checks = {
        **{f"long launches' {what} within 10 %": within(errors[name], ERROR) for name, what in BARS.items()},
        "over 100 times faster": single and single["keeps_limits"] and single["times_as_long"] > FASTER,
    }
    return {
        "parts": {share: {key: value for key, value in one.items() if key != "caches"} for share, one in done.items()},
        "missing": missing,
        "profiled_s": profiled_s if done else None,
        "times_as_long": ratio,
        "times_as_long_as_recording": profiled_s / whole if launches and (whole := recording["recorded_s"]) else None,
        "one_window": single,
        "largest_errors": errors,
        "compared": compared,
        "checks": checks if caches == "kept" else {},
    }


def launches_of(folder: Path) -> Sequence[Launch]:
    """What Nsight Compute said in a part, also where that was packed to be kept."""
    packed = folder / "ncu.csv.gz"
    if packed.exists():
        return parse(gzip.decompress(packed.read_bytes()).decode(), str(packed)).launches
    return read_export(folder / "ncu.csv").launches


def errors_of(compared: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Of the class of long launches that is furthest off."""
    long = None if compared is None else compared["classes_of_long_launches"]
    return {name: largest_error(long, name) if long else None for name in BARS}


def of_one_window(alone: Alone, launches: Sequence[Launch], *, cut: bool, profiled_s: float) -> dict[str, Any]:
    """Whether one window gives the same answer, and how many times as long Nsight Compute took."""
    errors = errors_of(compare(alone.places, launches, cut=cut))
    off = max(abs(ratio - 1) for ratio in alone.totals.values())
    keeps = all(within(error, ERROR) is not False for error in errors.values()) and off <= TOTALS
    return {
        "window": alone.window,
        "seconds": alone.seconds,
        "times_as_long": profiled_s / alone.seconds,
        "largest_errors": errors,
        "largest_total_error": off,
        "keeps_limits": keeps,
    }


def within(error: float | None, limit: float) -> bool | None:
    """Whether an error keeps a limit; None where it is not known."""
    return None if error is None else abs(error) <= limit


def checks_of(found: Mapping[str, Any]) -> list[bool | None]:
    """All checks of a model."""
    if found["recording"] is None:
        return [None]
    told = [found["recording"]["checks"], *(one["checks"] for one in found["ncu"].values())]
    return [ok for checks in told for ok in checks.values()]


def summary(found: Mapping[str, Any]) -> Any:
    """A model's figures without its tables."""
    if found["recording"] is None:
        return found["why"]
    keys = ("steps", *SLOWER, "slowdown_interval", "clock_uncertainty_s", "checks")
    short: dict[str, Any] = {key: found["recording"][key] for key in keys}
    for caches, one in found["ncu"].items():
        short[caches] = {
            key: one[key] for key in ("missing", "times_as_long", "one_window", "largest_errors", "checks")
        }
        short[caches]["time_compared"] = None if one["compared"] is None else one["compared"]["time_compared"]
    return short
