"""What do hardware counters cost a training step? Stretches of steps with and without PM sampling in turns.

A step that waits for its host varies by ±10 % and more, so that the three pairs of a sweep's case tell nothing of a
cost of 2 %. Here short stretches of steps follow each other in an order that cancels drifts (``paired.py``), hundreds
of them, and nothing is decoded in between but a proof now and then that the samples are there. Beside the wall time
stands the device's own (CUDA events). Of a cell that waits for its host, the same step replayed as a CUDA graph shows
what sampling costs the GPU alone; what it costs the host is one thing in all of them: their ratios are judged together.

Run: ``python tests/gpu/counters_cost.py OUT [--seconds 55]`` on a machine with a CUDA GPU. Writes
OUT/counters-cost.json. Exits 1 where a step of 10 ms and more misses the limit of 2 %, 4 where one is not told.
``--again FILE …`` judges the stretches of such files anew, without a GPU: each cell, those of the same name together,
and together those that wait for their host.
``--simulate results/nvidia-h200`` says instead, without a GPU, how narrow the intervals of such a run would be: from
the scatter of committed steps and windows (``cost_simulation.py``).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from paired import FEWEST, QUAD, Estimate, estimate, evened, order, ratios, steady_estimate

LIMIT, SHORTEST_S, SCHEMA = 0.02, 0.010, "joulemark/counters-cost/4"
STRETCH_S = 0.06
"""About the time of a stretch, which has one step at least."""
PROBE_S = 0.001
"""About the time of the probe of the host's speed on either side of a stretch."""
Times = tuple[float, float, float]
"""Of a stretch, in s per step: by the host's clock, by the device's; of the probe around it."""
NARROW, FEWEST_QUADS = 0.004, 8
"""Half-width at which a cell ends before its time."""
RUNS, PROOF_EVERY, COVERED = 3, 5, 0.9
"""Runs beside one sampler, where it bears that; of how many one is read; share of the time that it must span."""
MOST_SAMPLES, ROOM = 3900, 1.5
"""Of one sampler, within one image of CUPTI's usual size; over its first run, as of two stretches instead of one."""


@dataclass(frozen=True)
class Cell:
    """A training step; ``weight`` is its share of the time that is left when its turn comes."""

    model: str
    batch: int
    mode: str
    weight: float


CELLS = (
    Cell("resnet50", 256, "eager", 2), Cell("gpt2_small", 16, "eager", 2),
    Cell("resnet50", 8, "graph", 2), Cell("resnet50", 64, "graph", 2),
    Cell("bert_base", 8, "graph", 2), Cell("bert_base", 64, "graph", 2),
    Cell("resnet50", 8, "eager", 8), Cell("bert_base", 8, "eager", 8),
)  # fmt: skip
"""What the GPU limits first: it is told soon."""
LAYOUTS = {"resnet50": "channels_last"}


@dataclass
class Beside:
    """PM sampling as a sweep uses it, switched on and off without decoding.

    Args:
        device, groups: proved, as a sweep does it.
        runs: that a sampler is started for before another is made, where it has room for their samples.
        covered: per sampler that was read, the part of its runs that its samples span; 0 where it could not be read.
    """

    device: Any
    groups: list[Any]
    runs: int = 1
    covered: list[float] = field(default_factory=list)
    _sampler: Any = None
    _spent_s: list[float] = field(default_factory=list)
    _made: int = 0
    _holds: int = 1

    def begin(self) -> None:
        """Of a cell: its first sampler is read, however few it has."""
        self.close()
        self.covered.clear()
        self._made = 0

    @contextmanager
    def sampling(self, expected_s: float) -> Iterator[None]:
        """Samples while the block runs."""
        if self._sampler is None:
            self._sampler = self._new_sampler(expected_s)
        self._sampler.start()
        begin = time.perf_counter()
        yield
        self._spent_s.append(time.perf_counter() - begin)
        self._sampler.stop()
        if len(self._spent_s) >= self._holds:
            self.close()

    def _new_sampler(self, expected_s: float) -> Any:
        from joulemark.collect.pm_sampling import INTERVAL_S, Pace

        group, pace = self.groups[self._made % len(self.groups)], Pace(most_samples=MOST_SAMPLES)
        self._holds = max(1, min(self.runs, int(MOST_SAMPLES * INTERVAL_S / (ROOM * expected_s))))
        whole_s = ROOM * self._holds * expected_s
        settings = pace.settings(self.device.chip, pace.interval_for(whole_s), whole_s)
        self._made += 1
        return self.device.sampler(group.full_names(), group.metric_set, settings)

    def close(self) -> None:
        """Gives the counters back; the first sampler and then every fifth is read before."""
        if self._sampler is None:
            return
        sampler, spent_s = self._sampler, sum(self._spent_s)
        self._sampler, self._spent_s = None, []
        try:
            if self._made % PROOF_EVERY == 1 and spent_s:
                self.covered.append(_covered_s(sampler) / spent_s)
        finally:
            sampler.close()

    def try_restarts(self, work: Callable[[], object]) -> None:
        """Whether one sampler sees several runs: it is then made once for them."""
        from joulemark.errors import DeviceError

        begin = time.perf_counter()
        work()
        spent_s = time.perf_counter() - begin
        self.runs = RUNS
        self.begin()
        try:
            for _ in range(RUNS):
                with self.sampling(spent_s):
                    work()
        except DeviceError:  # it is not started a second time
            self.covered.append(0.0)
        if min(self.covered) < COVERED:
            self.runs = 1
        self.begin()


def _covered_s(sampler: Any) -> float:
    """Time that the samples of a sampler span; 0 where they cannot be decoded."""
    from joulemark.errors import DeviceError

    try:
        samples = sampler.read()
    except DeviceError:
        return 0.0
    lengths = (samples.end - samples.start) * 1e-9
    return float(lengths[(lengths > 0) & (lengths < 0.01)].sum())


def open_beside() -> Beside:
    """Every group proved, as a sweep does.

    Raises:
        DeviceError: there is no PM sampling here.
    """
    from joulemark.collect.counters import _busy_work
    from joulemark.collect.cupti import load_library
    from joulemark.collect.cupti_device import CuptiDevice
    from joulemark.collect.pm_metrics import metrics_of, plan
    from joulemark.collect.pm_sampling import prove
    from joulemark.utilization.levels import READ

    device = CuptiDevice(load_library(), 0)
    work, groups = _busy_work(0), plan(device, metrics_of(READ)).groups
    beside = Beside(device, [one for group in groups for one in prove(device, group, work)[0]])
    beside.try_restarts(work)
    return beside


class Stretches:
    """Times stretches of a cell's steps, by the host's clock and by the device's."""

    def __init__(self, cell: Cell) -> None:
        import torch

        from joulemark.records import Case
        from joulemark.workloads import zoo

        layout = LAYOUTS.get(cell.model, "contiguous")
        case = Case(cell.model, "train", cell.mode, "bf16", cell.batch, layout, "device", "gpu")
        self._step = zoo.find(cell.model).build(case, "cuda:0")
        self._fence = torch.cuda.synchronize
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.steps = 1
        self._turns = 1000
        self._turns = max(1, round(self._turns * PROBE_S / min(self._probe() for _ in range(9))))
        for _ in range(3):
            self.time()
        self.step_s = self.time()[0]
        self.steps = max(1, round(STRETCH_S / self.step_s))

    def lead(self) -> None:
        """A step that is not kept: the first one after a pause takes longer."""
        self._step.run()
        self._fence()

    def _probe(self) -> float:
        """Seconds of a fixed piece of the host's work."""
        kept: dict[int, int] = {}
        begin = time.perf_counter()
        for number in range(self._turns):
            kept[number & 255] = kept.get(number & 127, 0) + 1
        return time.perf_counter() - begin

    def time(self) -> Times:
        """Of a stretch."""
        first, last = self._events
        before_s = self._probe()
        begin = time.perf_counter()
        first.record()
        for _ in range(self.steps):
            self._step.run()
        last.record()
        self._fence()
        wall_s = time.perf_counter() - begin
        probe_s = math.sqrt(before_s * self._probe())
        return wall_s / self.steps, first.elapsed_time(last) * 1e-3 / self.steps, probe_s


def alternate(one: Stretches, beside: Beside, end: float, enough: Callable[[list[Times]], bool]) -> list[Times]:
    """Stretches in :func:`paired.order` until a time on ``monotonic``, or until there are enough of them.

    However slow they are, there are so many that they have an interval. Each change of sides is followed by a step that
    is not kept, so that what making a sampler leaves behind (cold caches of the host) is no part of a step's cost.
    """
    found: list[Times] = []
    plan = order()
    on = next(plan)
    while (time.monotonic() < end or len(found) < QUAD * FEWEST) and not enough(found):
        row = [on]
        while (following := next(plan)) == on:
            row.append(following)
        with beside.sampling((len(row) * one.steps + 1) * one.step_s) if on else nullcontext():
            one.lead()
            found += [one.time() for _ in row]
        on = following
    return found


def estimates(found: list[Times]) -> tuple[Estimate, Estimate]:
    """Of wall and device time."""
    wall, device, _ = zip(*found, strict=True)
    return estimate(ratios(wall)), estimate(ratios(device))


def _enough(found: list[Times]) -> bool:
    if len(found) < 4 * FEWEST_QUADS or len(found) % 16:
        return False
    return all(one.half_width < NARROW for one in estimates(found))


def measure(cell: Cell, beside: Beside, seconds: float) -> dict[str, Any]:
    """One cell."""
    one = Stretches(cell)
    beside.begin()
    begin = time.monotonic()
    found = alternate(one, beside, begin + seconds, _enough)
    beside.close()
    return judged(
        {
            "workload": cell.model,
            "batch_size": cell.batch,
            "mode": cell.mode,
            "steps_per_stretch": one.steps,
            "step_s": one.step_s,
            "spent_s": time.monotonic() - begin,
            "covered": list(beside.covered),
            "wall_s": [one for one, _, _ in found],
            "device_s": [one for _, one, _ in found],
            "probe_s": [one for _, _, one in found],
        }
    )


def judged(measured: dict[str, Any]) -> dict[str, Any]:
    """A cell with what its stretches say; anew where it had been judged before."""
    wall, device = (estimate(ratios(measured[name])) for name in ("wall_s", "device_s"))
    steady, verdict = steadily([measured])
    lost = min(measured["covered"], default=0.0) < COVERED
    told = {"wall": wall.to_json(), "device": device.to_json(), "steady": steady}
    return {**measured, **told, "verdict": "samples lost" if lost else verdict}


def _even(measured: dict[str, Any]) -> list[float]:
    """Stretches of a cell, in s per step, evened by the probe of the host's speed where there was one."""
    probes = measured.get("probe_s")
    return measured["wall_s"] if probes is None else evened(measured["wall_s"], probes)[0]


def steadily(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """What the fours say that one state of the host saw, and whether that keeps the limit."""
    one = steady_estimate([_even(row) for row in rows])
    return (None, "not told") if one is None else (one.to_json(), one.verdict(LIMIT))


def named(row: dict[str, Any]) -> tuple[str, int, str]:
    """What cells of several runs have in common."""
    return row["workload"], row["batch_size"], row["mode"]


def joined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that several runs measured, each with one verdict over all of its fours."""
    alike: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault(named(row), []).append(row)
    return [_joined(runs) for runs in alike.values() if len(runs) > 1]


def _joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one cell."""
    cell = dict(zip(("workload", "batch_size", "mode"), named(runs[0]), strict=True))
    told = {name: pooled(runs, f"{name}_s").to_json() for name in ("wall", "device")}
    steady, verdict = steadily(runs)
    if any(row["verdict"] == "samples lost" for row in runs):
        verdict = "samples lost"
    step_s = max(row["step_s"] for row in runs)
    return {**cell, "runs": len(runs), "step_s": step_s, **told, "steady": steady, "verdict": verdict}


def pooled(rows: Sequence[dict[str, Any]], name: str) -> Estimate:
    """Of all fours of some cells; each four lies within one of them."""
    return estimate(np.concatenate([ratios(row[name]) for row in rows]).tolist())


def host_bound(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The eager cells that take much longer than their replay on the GPU alone."""
    replays = {(row["workload"], row["batch_size"]): row["step_s"] for row in rows if row["mode"] == "graph"}
    eager = [row for row in rows if row["mode"] == "eager"]
    return [row for row in eager if replays.get((row["workload"], row["batch_size"]), math.inf) < 0.8 * row["step_s"]]


def document(rows: Sequence[dict[str, Any]], runs: int) -> dict[str, Any]:
    """All of it (``docs/schema/counters-cost.schema.json``)."""
    waiting = host_bound(rows)
    together = None
    if waiting:
        steady, verdict = steadily(waiting)
        cells = dict.fromkeys(f"{row['workload']} b{row['batch_size']}" for row in waiting)
        found = pooled(waiting, "wall_s").to_json()
        together = {"cells": list(cells), **found, "steady": steady, "verdict": verdict}
    told = {"cells": list(rows), "joined": joined(rows), "host_bound": together}
    return {"schema": SCHEMA, "limit": LIMIT, "runs_per_sampler": runs, **told}


def exit_code(found: dict[str, Any]) -> int:
    """1 where a step of 10 ms and more misses the limit, 4 where one is not told, else 0."""
    waiting = {named(row) for row in host_bound(found["cells"])}
    cells = {named(row): row for row in (*found["cells"], *found["joined"])}
    alone = [row for name, row in cells.items() if row["step_s"] >= SHORTEST_S and name not in waiting]
    told = {row["verdict"] for row in alone} | ({found["host_bound"]["verdict"]} if waiting else set())
    lost = any(cells[name]["verdict"] == "samples lost" for name in waiting)
    return 1 if "missed" in told else 0 if told == {"held"} and not lost else 4


def main() -> int:
    """All cells; the exit code says whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder, made where it is not there")
    parser.add_argument("--seconds", type=float, default=55.0, help="of all cells together, without building them")
    parser.add_argument("--simulate", type=Path, metavar="RESULTS", help="results/<gpu>, whose scatter is simulated")
    parser.add_argument("--again", type=Path, nargs="+", metavar="FILE", help="judge what these hold, write it to OUT")
    options = parser.parse_args()
    if options.simulate is not None:
        from cost_simulation import report

        waiting = [f"{one.model} b{one.batch}" for one in CELLS if one.mode == "eager" and one.weight > 2]
        return report(options.simulate, options.seconds, waiting)
    if options.out is None:
        parser.error("give OUT, as OUT --again FILE …, or --simulate RESULTS")
    return run(options.out, options.seconds) if options.again is None else again(options.out, options.again)


def again(out: Path, files: Sequence[Path]) -> int:
    """Judge the cells of several runs anew, each by itself and those of the same name together."""
    read = []
    for file in files:
        try:
            read.append(json.loads(file.read_text()))
            stretches = [tuple(row["wall_s"]) for one in read for row in one["cells"]]
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            print(f"{file} holds no stretches ({why}): give files that this script has written", file=sys.stderr)
            return 2
    rows = [row for one in read for row in one["cells"]]
    if len(set(stretches)) < len(rows):
        print("some stretches stand in these files twice: name each run once", file=sys.stderr)
        return 2
    found = document([judged(row) for row in rows], read[0]["runs_per_sampler"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "counters-cost.json").write_text(json.dumps(found))
    print(*(line_of(row) for row in (*found["cells"], *found["joined"])), line_together(found), sep="\n")
    return exit_code(found)


def run(out: Path, seconds: float) -> int:
    """Measure every cell, write after each."""
    import torch

    from joulemark.errors import DeviceError

    out.mkdir(parents=True, exist_ok=True)
    try:
        beside = open_beside()
    except DeviceError as error:
        print(f"no PM sampling here: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    left, weights = seconds, sum(cell.weight for cell in CELLS)
    for cell in CELLS:
        gc.collect()
        torch.cuda.empty_cache()
        row = measure(cell, beside, left * cell.weight / weights)
        left, weights = left - row["spent_s"], weights - cell.weight
        rows.append(row)
        print(line_of(row), flush=True)
        found = document(rows, beside.runs)
        (out / "counters-cost.json").write_text(json.dumps(found))
    print(line_together(found))
    return exit_code(found)


def line_together(found: dict[str, Any]) -> str:
    """The cells that wait for their host, in words."""
    one = found["host_bound"]
    if one is None:
        return "no cell waits for its host"
    return f"{' and '.join(one['cells'])} together: {_said(one)}, steady {_said(one['steady'])}: {one['verdict']}"


def line_of(row: dict[str, Any]) -> str:
    """A cell in words."""
    cell = f"{row['workload']} b{row['batch_size']} {row['mode']}" + (f", {row['runs']} runs" if "runs" in row else "")
    parts = [f"{name} {_said(row[name])}" for name in ("wall", "device", "steady")]
    return f"{cell}: {row['step_s'] * 1e3:.1f} ms, {', '.join(parts)}: {row['verdict']}"


def _said(one: dict[str, Any] | None) -> str:
    """An estimate in words."""
    if one is None:
        return "no four in one state of the host"
    interval = "no interval" if one["interval"] is None else "[{:+.2%}, {:+.2%}]".format(*one["interval"])
    return f"{one['cost']:+.2%} {interval} of {one['quads']}"


if __name__ == "__main__":
    sys.exit(main())
