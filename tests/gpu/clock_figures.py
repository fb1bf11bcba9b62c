"""What the raw data of ``clock_probe.py`` says of clocks, samples, costs and rates (no GPU, no torch).

Run: ``python tests/gpu/clock_figures.py OUT --json F [--recording FOLDER]``, with the folder that the probe wrote. The
stage ``together`` is analysed as a recording of ``joulemark.attribution``, which ``--recording`` keeps: its samples,
and of its trace the kernels, their launches and the marks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np

from joulemark.attribution import attribute
from joulemark.attribution.clock import Beacons, fit_clock, line_through, sightings
from joulemark.attribution.recording import (
    TRACE,
    RecordedWindow,
    Recording,
    read_recording,
    read_series,
    write_recording,
    write_series,
)
from joulemark.attribution.timeline import BEACON, WINDOW, read_timeline
from joulemark.counter_series import COUNTERS, CounterSeries
from joulemark.report.jsonout import dumps
from joulemark.trace.iterations import OWN_MARK

CANONICAL = (
    "sm_active_cycles",
    "sm_cycles",
    "instructions",
    "pipe_tensor_cycles",
    "dram_read_bytes",
    "dram_write_bytes",
    "l2_bytes",
)
"""The probe's metrics, in their order."""
STEPS = {"together": 12, "16384": 160, "16384_in_128_MiB": 160, "10_us": 80, "5_us": 40}
BEACONS_OF_WINDOW, AROUND_US = 12, 500.0
KEPT = ("kernel", "gpu_memset", "gpu_memcpy", "cuda_runtime", "cuda_driver", "user_annotation")
FLOP_PER_TENSOR_CYCLE = 1024
"""Of a tensor core of Hopper on dense bf16: 4096 per SM and cycle (NVIDIA, H100 whitepaper)."""
BIG, SMALL, WIDE = 6144, 1024, 2**27
BYTES = 2
NEAR_S, PIPES = 40e-6, 4


def series(out: Path, name: str) -> tuple[CounterSeries, dict[str, Any]]:
    """Samples of a stage on ticks of its clock, and what is to be said about the samples."""
    with np.load(out / f"{name}.npz") as held:
        start, end, values = held["start"], held["end"], held["values"]
        run_s = float(held["seconds"][1]) if "seconds" in held else None
    length, asked = end - start, interval_of(name)
    usual = float(np.median(length))
    stale = (length <= 0) | (length > 2 * usual)
    start, end, values = start[~stale], end[~stale], values[~stale]
    rate = float((end - start).mean()) / asked
    rate = 1e9 if abs(rate / 1e9 - 1) < 0.02 else rate
    counts = dict(zip(CANONICAL, values.T, strict=True))
    first = int(start[0])
    found = CounterSeries(
        tier="pm_sampling",
        group="pass1",
        start_s=(start - first) / rate,
        end_s=(end - first) / rate,
        values=counts,
        units={key: COUNTERS[key].unit for key in counts},
        source={
            "library": "CUPTI 13.0.1",
            "chip": "GH100",
            "interval_s": asked,
            "first_tick": first,
            "ticks_per_s": rate,
        },
    )
    steps = STEPS[name.split("-")[1]] if name.startswith("large") else STEPS["together"]
    told = {
        "samples": len(start),
        "stale": np.flatnonzero(stale).tolist(),
        "gaps": int((start[1:] != end[:-1]).sum()),
        "ticks_per_s": rate,
        "interval_s": asked,
        "lengths_s": [float(edge) for edge in np.percentile(found.duration_s, (0, 50, 100))],
        "covered": None if run_s is None else float(found.duration_s.sum()) / run_s,
        "tensor_cycles_per_step": float(counts["pipe_tensor_cycles"].sum()) / steps,
        "steps": steps,
    }
    return found, told


def interval_of(name: str) -> float:
    """What a stage asked for, in s."""
    return {"large_images-10_us": 10e-6, "large_images-5_us": 5e-6}.get(name, 20e-6)


def write(out: Path, folder: Path, facts: dict[str, Any], cost: dict[str, list[float]]) -> None:
    """The stage ``together`` as a recording."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(out / "together.json.gz", "rt", encoding="utf-8") as file:
        trace = json.load(file)
    events = sorted((one for one in trace["traceEvents"] if one.get("cat") in KEPT), key=lambda one: one["ts"])
    marks = [one for one in events if one["cat"] == "user_annotation" and one["name"].startswith(OWN_MARK)]
    for number, one in enumerate(marks):
        one["name"] = f"{OWN_MARK}#{number}"
    spins = [one for one in events if one["cat"] == "kernel" and BEACON in one["name"]]
    numbers = range(len(spins) // BEACONS_OF_WINDOW)
    for number in numbers:
        first, last = spins[BEACONS_OF_WINDOW * number], spins[BEACONS_OF_WINDOW * (number + 1) - 1]
        begin, end = first["ts"] - AROUND_US, last["ts"] + last["dur"] + AROUND_US
        events.append({**marks[0], "name": f"{WINDOW}#{number}", "ts": begin, "dur": end - begin})
        write_series(folder / f"window-{number}.npz", series(out, f"together-{number}")[0])
    for one in events:
        args = one.get("args", {})
        one["args"] = {key: args[key] for key in ("correlation", "device", "stream", "External id") if key in args}
    rest = {"baseTimeNanoseconds": trace.get("baseTimeNanoseconds"), "displayTimeUnit": "ms"}
    with gzip.GzipFile(folder / TRACE, "wb", mtime=0) as packed:
        packed.write(json.dumps({**rest, "traceEvents": events}).encode())
    windows = tuple(RecordedWindow(number, "steps", "pass1", STEPS["together"]) for number in numbers)
    label = "products, streams and small kernels"
    plain, both = tuple(cost["bare"]), tuple(cost["both"])
    write_recording(folder, Recording(label, windows, facts=facts, plain_step_s=plain, recorded_step_s=both))


def other_stage(out: Path, stage: str) -> dict[str, Any]:
    """How well the beacons of a stage with one window map its clocks."""
    with gzip.open(out / f"{stage}.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spins = sorted((one["ts"], one["dur"]) for one in events if one.get("cat") == "kernel" and BEACON in one["name"])
    start, length = (np.array(some) * 1e-6 for some in zip(*spins, strict=True))
    one, told = series(out, f"{stage}-0")
    first = float(start[0])
    clock = fit_clock(one, Beacons(start - first, start - first + length, BEACONS_OF_WINDOW // 2))
    kept = ("drift", "uncertainty_s", "residual_s", "launch_s")
    return {**{key: getattr(clock, key) for key in kept}, "ticks_per_s": told["ticks_per_s"]}


def clocks(folder: Path) -> dict[str, Any]:
    """How far beacons lie off a line through one window, through all windows, and through the other windows."""
    timeline = read_timeline(folder, read_recording(folder))
    samples = {number: read_series(folder / f"window-{number}.npz") for number in timeline.beacons}
    rate = float(np.median([float(one.source["ticks_per_s"]) for one in samples.values()]))
    found: list[dict[str, Any]] = []
    middles, seen, of_window = [], [], []
    for number, beacons in timeline.beacons.items():
        one = samples[number]
        clock = fit_clock(one, beacons)
        middle, length = sightings(one, beacons)
        off, longer = middle - clock.to_samples(beacons.middle_s), beacons.length_s - length
        middles.append(beacons.middle_s)
        seen.append((middle * float(one.source["ticks_per_s"]) + float(one.source["first_tick"])) / rate)
        of_window.append(np.full(len(middle), number))
        found.append({"drift": clock.drift, "uncertainty_s": clock.uncertainty_s, "off_s": off, "longer_s": longer})
    x, y, window = (np.concatenate(some) for some in (middles, seen, of_window))
    whole = line_through(x, y, BEACONS_OF_WINDOW // 2)
    predicted = []
    for number in timeline.beacons:
        others = line_through(x[window != number], y[window != number], BEACONS_OF_WINDOW // 2)
        predicted.append(y[window == number] - others.to_samples(x[window == number]))
    return {
        "windows": [{key: np.asarray(value).tolist() for key, value in one.items()} for one in found],
        "one_line": {"ticks_per_s": rate * (1 + whole.drift), "off_s": (y - whole.to_samples(x)).tolist()},
        "predicted_by_other_windows_off_s": [one.tolist() for one in predicted],
    }


def rates(document: dict[str, Any]) -> dict[str, Any]:
    """Kernels with their counts per step, and amounts that are known beforehand."""
    kernels = [
        {key: one[key] for key in ("name", "class", "time_s", "launches", "by_level", "counters")}
        for one in document["kernels"]
    ]
    product, tensor = 2.0 / FLOP_PER_TENSOR_CYCLE, "pipe_tensor_cycles"
    known = (
        ("192x192", tensor, product * BIG**3),
        ("128x64", tensor, 5 * product * SMALL**3),
        ("AUnaryFunctor", "dram_read_bytes", BYTES * WIDE),
        ("reduce_kernel", "dram_read_bytes", BYTES * WIDE),
        ("SoftMax", "dram_read_bytes", BYTES * BIG**2),
    )
    compared = []
    for part, counter, amount in known:
        cell = next(one for one in document["kernels"] if part in one["name"])["counters"][counter]
        compared.append({"kernel": part, "counter": counter, "known": amount, **cell})
    total = {name: {key: one[key] for key in ("measured", "ratio")} for name, one in document["counters"].items()}
    return {"kernels": kernels, "totals": total, "known": compared}


def first_counts(folder: Path, part: str, counter: str) -> float:
    """Time in s behind a kernel's recorded begin at which a counter begins: the step that fits its samples best."""
    begin, end, counted = around(folder, part, counter)
    best = []
    for at in np.arange(-1e-6, 4e-6, 0.05e-6):
        overlap = np.stack(
            [np.clip(np.minimum(end, at) - begin, 0, None), np.clip(end - np.maximum(begin, at), 0, None)]
        )
        left = counted - overlap.T @ np.linalg.lstsq(overlap.T, counted, rcond=None)[0]
        best.append((float(left @ left), float(at)))
    return min(best)[1]


def around(folder: Path, part: str, counter: str) -> tuple[Any, Any, Any]:
    """Begin, end (in s from the kernel's begin) and counts of the samples near the begins of a kernel."""
    timeline, rows = read_timeline(folder, read_recording(folder)), []
    for number, beacons in timeline.beacons.items():
        one = read_series(folder / f"window-{number}.npz")
        clock = fit_clock(one, beacons)
        begin, end = clock.to_timeline(one.start_s), clock.to_timeline(one.end_s)
        launches = timeline.of_window(number)
        chosen = np.array([part in timeline.place_name(place) for place in launches.place])
        for at in launches.start_s[chosen]:
            near = (begin > at - NEAR_S) & (end < at + NEAR_S)
            rows.append(np.stack([begin[near] - at, end[near] - at, one.values[counter][near]]))
    begin, end, counted = np.concatenate(rows, axis=1)
    return begin, end, counted


def tensor_inside(folder: Path, part: str) -> float:
    """Tensor activity in samples that lie wholly inside a kernel, without its first and last microseconds."""
    begin, end, tensor = around(folder, part, "pipe_tensor_cycles")
    _, _, cycles = around(folder, part, "sm_cycles")
    inside = (begin > 5e-6) & (end < NEAR_S)
    return float(tensor[inside].sum() / (PIPES * cycles[inside].sum()))


def figures(out: Path, folder: Path, driver: str | None) -> dict[str, Any]:
    """The whole document."""
    facts = {**json.loads((out / "facts.json").read_text()), "driver": driver}
    facts.pop("baseline_ns", None)
    cost = json.loads((out / "cost.json").read_text())
    write(out, folder, facts, cost)
    names = ["alone-0", *(f"together-{number}" for number in range(3))]
    names += [f"large_images-{key}" for key in STEPS if key != "together"]
    document = attribute(folder)
    windows = document["clock"]["windows"]
    return {
        "schema": "joulemark/attribution-clocks/1",
        "facts": facts,
        "samples": {name: series(out, name)[1] for name in names},
        "clocks": clocks(folder),
        "sampled_by_another_process": other_stage(out, "side"),
        "profiled_without_the_host": other_stage(out, "device_only"),
        "counts_best_at_s": [one["check"]["best_s"] for one in windows],
        "head_s": windows[0]["head_s"],
        "launch_s": [one["launch_s"] for one in windows],
        "first_counts_s": {
            "product, tensor cycles": first_counts(folder, "192x192", "pipe_tensor_cycles"),
            "softmax, instructions": first_counts(folder, "SoftMax", "instructions"),
        },
        "tensor_activity_inside_softmax": tensor_inside(folder, "SoftMax"),
        "rates": rates(document),
        "step_s": cost,
        "slowdown": {name: float(np.median(some) / np.median(cost["bare"])) - 1 for name, some in cost.items()},
        "findings": document["findings"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--driver", help="version, which the probe does not record")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        text = dumps(figures(options.out, options.recording or Path(scratch), options.driver))
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
