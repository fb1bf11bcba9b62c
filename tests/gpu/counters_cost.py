"""What do hardware counters cost a training step? Windows with and without them in turns, many of them.

A step that waits for its host varies by ±10 % and more from window to window, so that the three pairs of a sweep's
case tell nothing of a cost of 2 %. Here each cell has as many pairs as fit into its time, and the window in between
belongs to both of its neighbours.

Run: ``python tests/gpu/counters_cost.py OUT [--seconds 60]`` on a machine with a CUDA GPU. Writes
OUT/counters-cost.json: per cell the median of the paired ratios with its interval (bootstrap over pairs), for steps of
10 ms and more. Exits 1 where an interval lies above 2 % altogether, 4 where one reaches above it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from joulemark.collect.counters import open_counters
from joulemark.collect.timing import timer_for
from joulemark.records import Case
from joulemark.workloads import zoo

LIMIT, SHORTEST_S, WINDOW_S = 0.02, 0.010, 0.12
CELLS = (("resnet50", 8), ("resnet50", 64), ("resnet50", 256), ("bert_base", 8), ("bert_base", 64), ("gpt2_small", 16))
LAYOUTS = {"resnet50": "channels_last"}


def paired(off: list[float], on: list[float]) -> dict[str, Any]:
    """Median cost and its 95 % interval; ``off`` has one window more, each of ``on`` lies between two of them."""
    costs = np.array([with_ / ((a + b) / 2) - 1 for with_, (a, b) in zip(on, pairwise(off), strict=True)])
    draws = np.random.default_rng(0).choice(costs, (4000, len(costs)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {"cost": float(np.median(costs)), "interval": [float(low), float(high)], "pairs": len(costs)}


def measure(model: str, batch: int, seconds: float, source: Any) -> dict[str, Any]:
    """One cell."""
    case = Case(model, "train", "eager", "bf16", batch, LAYOUTS.get(model, "contiguous"), "device", "gpu")
    step, timer = zoo.find(model).build(case, "cuda:0"), timer_for("cuda:0")

    def loop(steps: int) -> float:
        timer.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step.run()
        timer.synchronize()
        return (time.perf_counter() - begin) / steps

    loop(3)
    step_s = loop(5)
    steps = max(2, round(WINDOW_S / step_s))
    off, on, lost = [loop(steps)], [], []
    groups, end = source.groups, time.monotonic() + seconds
    while time.monotonic() < end:
        told: list[float] = []
        series = source.record(
            groups[len(on) % len(groups)], lambda: told.append(loop(steps)), steps * step_s
        ).at_work()
        covered = float(series.end_s[-1] - series.start_s[0]) / (told[0] * steps) if len(series) else 0.0
        lost.append(1 - covered)
        on.append(told[0])
        off.append(loop(steps))
    found = {"workload": model, "batch_size": batch, "steps_per_window": steps, "step_s": float(np.median(off))}
    return {**found, **paired(off, on), "off_s": off, "on_s": on, "not_covered": float(np.median(lost))}


def main() -> int:
    """All cells; the exit code says whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all cells together, without building them")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ladder = open_counters(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    source = ladder.source
    if source is None or source.tier != "pm_sampling":
        print(f"no PM sampling here: {dict(ladder.refused)}", file=sys.stderr)
        return 2
    rows = []
    for model, batch in CELLS:
        gc.collect()
        torch.cuda.empty_cache()
        row = measure(model, batch, options.seconds / len(CELLS), source)
        rows.append(row)
        low, high = row["interval"]
        print(
            f"{model} b{batch}: {row['step_s'] * 1e3:.1f} ms, cost {row['cost']:+.2%} [{low:+.2%}, {high:+.2%}], "
            f"{row['pairs']} pairs",
            flush=True,
        )
        (options.out / "counters-cost.json").write_text(json.dumps({"limit": LIMIT, "cells": rows}))
    judged = [row["interval"] for row in rows if row["step_s"] >= SHORTEST_S]
    return 1 if any(low > LIMIT for low, _ in judged) else 4 if any(high > LIMIT for _, high in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
