"""How narrow would ``counters_cost.py`` tell a cost? Simulated from the scatter of steps that a GPU's host has shown.

The log time of a step is taken as its own plus two autoregressive noises: a fast one, from the steps of stored sweeps,
and a slow one, from windows a second apart (the first ``counters-cost.json``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from paired import Estimate, estimate, order, ratios

WINDOWS_APART_S = 1.0
"""Between the windows of the first campaign: each was counted and decoded before the next."""
SWITCH_S = 0.1
"""Assumed to make and close a sampler without decoding; with the largest buffers it takes 0.3 s on an H200."""
RUNS = 3
"""Runs beside one sampler, where it bears that."""
STRETCH_S = 0.06

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Scatter:
    """Noise of a cell's step time.

    Args:
        step_s: its median, in s.
        fast, slow: deviation of the log time, and correlation of neighbours: of steps, and of windows a second apart.
    """

    step_s: float
    fast: tuple[float, float]
    slow: tuple[float, float]

    def drawn(self, moments: Floats, rng: np.random.Generator) -> Floats:
        """Log factors of steps that begin at some moments, in s."""
        apart = np.diff(moments, prepend=moments[:1] - self.step_s)
        return sum(
            (
                _autoregressive(deviation, correlation ** (apart / scale_s), rng)
                for (deviation, correlation), scale_s in ((self.fast, self.step_s), (self.slow, WINDOWS_APART_S))
            ),
            np.zeros(len(moments)),
        )


def _autoregressive(deviation: float, kept: Floats, rng: np.random.Generator) -> Floats:
    """A series of a standard deviation, of which each value keeps a part of the one before."""
    values, last = np.empty(len(kept)), rng.standard_normal()
    shocks = rng.standard_normal(len(kept)) * np.sqrt(1 - kept**2)
    for place, (part, shock) in enumerate(zip(kept, shocks, strict=True)):
        values[place] = last = part * last + shock
    return deviation * values


def scatters(results: Path) -> dict[str, Scatter]:
    """Cell → scatter, of the cells that the first campaign and a sweep on the same host have in common."""
    windows = {
        f"{cell['workload']} b{cell['batch_size']}": cell
        for cell in json.loads((results / "counters-cost.json").read_text(encoding="utf-8"))["cells"]
    }
    steps: dict[str, list[float]] = {}
    for path in sorted(results.glob("sweep-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            case = record.get("case", {})
            if case.get("phase") == "train" and case["mode"] == "eager" and record.get("tables", {}).get("levels"):
                steps[f"{case['workload']} b{case['batch_size']}"] = record["samples"]["device_time_s"]
    found = {}
    for name in windows.keys() & steps.keys():
        turns = zip_longest(windows[name]["off_s"], windows[name]["on_s"])
        slow = _noise(np.array([one for one in chain.from_iterable(turns) if one is not None]))
        found[name] = Scatter(windows[name]["step_s"], _noise(np.array(steps[name])), slow)
    return dict(sorted(found.items()))


def _noise(seconds: Floats) -> tuple[float, float]:
    logs = np.log(seconds)
    return float(logs.std()), float(np.clip(np.corrcoef(logs[:-1], logs[1:])[0, 1], 0.0, 0.95))


def simulate(scatter: Scatter, seconds: float, cost: float, rng: np.random.Generator, switch_s: float) -> Floats:
    """Ratios of a run of a length in s, at a cost; each run with it takes ``switch_s`` more."""
    steps = max(1, round(STRETCH_S / scatter.step_s))
    plan, stretches, now = order(), [], 0.0
    before: bool | None = None
    while now < seconds:
        on = next(plan)
        now += (on * switch_s + scatter.step_s) * (on != before)
        stretches.append((on, now))
        now, before = now + steps * scatter.step_s, on
    starts = np.array([[begin + number * scatter.step_s for number in range(steps)] for _, begin in stretches])
    factors = np.exp(scatter.drawn(starts.ravel(), rng)).reshape(starts.shape)
    times = scatter.step_s * factors.mean(axis=1) * np.where([on for on, _ in stretches], 1 + cost, 1.0)
    return ratios(times.tolist())


def widths(
    cells: Sequence[Scatter], seconds: float, switch_s: float, draws: int = 100, cost: float = 0.01
) -> tuple[float, float]:
    """Of cells judged together, a length in s in all: the interval's median half-width, how often it holds the cost."""
    rng = np.random.default_rng(0)
    share_s = seconds / len(cells)
    drawn: list[Estimate] = []
    for _ in range(draws):
        drawn.append(estimate(np.concatenate([simulate(one, share_s, cost, rng, switch_s) for one in cells])))
    held = [one.interval is not None and one.interval[0] <= cost <= one.interval[1] for one in drawn]
    return float(np.median([one.half_width for one in drawn])), sum(held) / draws


def report(results: Path, seconds: float, waiting: Sequence[str]) -> int:
    """Print what a length in s of each cell, and of some that wait for their host together, would tell; exits 0."""
    found = scatters(results)
    groups = {**{name: [one] for name, one in found.items()}, " + ".join(waiting): [found[name] for name in waiting]}
    print(f"{seconds:g} s; half-width of 95 %, and how often it holds, with {RUNS} runs beside a sampler, and with one")
    for name, cells in groups.items():
        told = [widths(cells, seconds, switch_s) for switch_s in (SWITCH_S / RUNS, SWITCH_S)]
        print(f"{name:>28}  " + "   ".join(f"±{half:.2%} ({held:.0%})" for half, held in told))
    return 0
