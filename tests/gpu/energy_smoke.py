"""Every stage of a calibration and of its validation, shortly, on the real GPU.

Run: ``python tests/gpu/energy_smoke.py OUT --seconds 70`` on a machine with a CUDA GPU that nobody else uses. A line
per stage goes to OUT/stages.jsonl: what it found, how long it took, or its error. One summary line each is printed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from stages import LINES, Stage, main

from joulemark.collect.energy import PowerWindow, energy_of
from joulemark.energy.caches import Caches
from joulemark.energy.engine import Engine, Launch, Run
from joulemark.energy.microbench.suite import SUITE, benchmarks_for, tiles_for

COUNTED = ("fp32", "integer", "fp64", "special", "wgmma_bf16", "mma_fp64", "shared_read", "l2_read", "hbm_write")
HELD_OUT = ("gemm-bf16-8192", "resnet50-train-bf16-b64", "stencil-fp64", "gpt2_small-decode-bf16-b32")
LONG = (("fp32", "random", 1.0), ("fp32", "random", 2.3), ("wgmma_bf16", "random", 1.2), ("hbm_read", "random", 1.2))
_SETTLE_S, _SHORT_S = 0.12, 0.25


class Smoke:
    """The stages; what several of them need is made once per process."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @cached_property
    def gpu(self) -> Any:
        from joulemark.device.gpu import probe_gpus

        inventory = probe_gpus(os.environ)
        if inventory.problem is not None:
            raise inventory.problem
        return inventory.visible[0]

    @cached_property
    def engine(self) -> Engine:
        from joulemark.energy.cuda_engine import CudaEngine

        return CudaEngine(self.gpu.ordinal, self.gpu.gpu.uuid)

    @cached_property
    def meter(self) -> Any:
        from joulemark.collect.power import open_power
        from joulemark.energy.calibrate import SampledMeter

        return SampledMeter(open_power(self.gpu.gpu.uuid))

    @cached_property
    def ladder(self) -> Any:
        from joulemark.collect.counters import open_counters

        return open_counters(self.gpu.gpu.uuid, f"cuda:{self.gpu.ordinal}")

    @cached_property
    def counting(self) -> Any:
        from joulemark.energy.counting import Counting

        return Counting(self.ladder.source)

    @cached_property
    def caches(self) -> Caches | None:
        """As an earlier stage found them."""
        for line in (self.out / LINES).read_text().splitlines() if (self.out / LINES).exists() else ():
            found = json.loads(line)
            if found["stage"] == "caches" and found.get("caches"):
                return Caches.from_json(found["caches"])
        return None

    def stages(self) -> dict[str, Stage]:
        names = [one.name for one in benchmarks_for("sm_90a") if one.kernel]
        return {
            "facts": Stage(self.facts),
            "compile": Stage(self.compile, 25),
            "idle": Stage(self.idle, 8),
            **{f"kernel {name}": Stage(partial(self.kernel, name), 6) for name in names},
            **{f"window {one[0]} {one[2]}": Stage(partial(self.window, *one), 10) for one in LONG},
            "caches": Stage(self.find_caches, 20),
            "counters": Stage(self.open_counters, 25),
            **{f"count {name}": Stage(partial(self.count, name), 10) for name in COUNTED},
            **{f"workload {name}": Stage(partial(self.workload, name), 20) for name in HELD_OUT},
            "window after": Stage(partial(self.window, "fp32", "random", 1.0), 10),
        }

    def facts(self) -> Mapping[str, Any]:
        from importlib import metadata

        packages = ("cuda-core", "cuda-bindings", "torch", "nvidia-cuda-nvdisasm", "nvidia-cuda-nvrtc", "numpy")
        known = {one.metadata["Name"]: one.version for one in metadata.distributions()}
        one = self.gpu.gpu
        return {
            "packages": {name: known.get(name) for name in packages},
            "cpus": os.cpu_count(),
            "gpu": [one.name, one.uuid, one.driver, one.power_limit_w, one.max_sm_clock_hz],
            "facts": self.engine.facts,
        }

    def compile(self) -> Mapping[str, Any]:
        from joulemark.energy.microbench.compile import compile_family, families_for
        from joulemark.energy.microbench.sass import problems

        architecture = self.engine.facts.architecture
        took, wrong = {}, []
        for family in families_for(architecture):
            begin = time.perf_counter()
            compile_family(family, architecture)
            took[family] = round(time.perf_counter() - begin, 2)
        for one in benchmarks_for(architecture):
            if one.kernel and one.work(architecture):
                wrong += problems(one, compile_family(one.family, architecture))
        return {"compile_s": took, "problems": wrong}

    def idle(self) -> Mapping[str, Any]:
        ran, power = self.meter(lambda: self.engine.run(None, 0.1, 1.3))
        return seen(ran, power)

    def kernel(self, name: str) -> Mapping[str, Any]:
        launch, took = self._load(name, "random")
        ran, power = self.meter(lambda: self.engine.run(launch, _SETTLE_S, _SHORT_S))
        paused = self._sized(name, paused=True)
        return took | self._rates(name, launch, ran) | seen(ran, power) | {"launch": vars(launch), "paused": paused}

    def window(self, name: str, operands: str, seconds: float) -> Mapping[str, Any]:
        launch, took = self._load(name, operands)
        begin = time.perf_counter()
        ran, power = self.meter(lambda: self.engine.run(launch, 0.3, seconds))
        whole = time.perf_counter() - begin
        return took | {"whole_s": whole} | self._rates(name, launch, ran) | seen(ran, power)

    def _load(self, name: str, operands: Any) -> tuple[Launch, dict[str, Any]]:
        from joulemark.energy.calibrate import l2_bytes_of, sized

        benchmark, facts = SUITE[name], self.engine.facts
        begin = time.perf_counter()
        operands = operands if operands in benchmark.operands else "zero"
        tiles = tiles_for(benchmark, l2_bytes_of(facts, self.caches), facts.sms, facts.memory_bytes)
        self.engine.load(benchmark, operands, tiles)
        loaded = time.perf_counter()
        launch = sized(self.engine, facts.sms, paused=False)
        each = self.engine.time_launch(launch)
        return launch, {
            "load_s": round(loaded - begin, 3), "size_s": round(time.perf_counter() - loaded, 3), "tiles": tiles,
            "launch_s": each,
        }  # fmt: skip

    def _sized(self, name: str, paused: bool) -> Mapping[str, Any]:
        """Whether a pause makes a launch about half as busy."""
        from joulemark.energy.calibrate import sized

        if not SUITE[name].work(self.engine.facts.architecture):
            return {}
        launch = sized(self.engine, self.engine.facts.sms, paused)
        dense = Launch(launch.blocks, launch.iterations)
        return vars(launch) | {"over_dense": self.engine.time_launch(launch) / self.engine.time_launch(dense)}

    def _rates(self, name: str, launch: Launch, ran: Run) -> dict[str, Any]:
        benchmark, facts = SUITE[name], self.engine.facts
        if not benchmark.work(facts.architecture):
            return {"launches": ran.launches}
        instructions = self.engine.instructions(benchmark, paused=False)
        counts = benchmark.counts_per_launch(facts.architecture, launch.blocks, launch.iterations, instructions)
        length = ran.end - ran.start
        return {"per_s": {unit: f"{count * ran.launches / length:.4g}" for unit, count in counts.items()}}

    def find_caches(self) -> Mapping[str, Any]:
        from joulemark.energy.caches import find_caches
        from joulemark.energy.calibrate import chase_curve

        curve = chase_curve(self.engine)
        try:
            return {"caches": find_caches(*zip(*curve, strict=True)).to_json()}
        except Exception as error:
            return {"error": str(error), "curve": curve}

    def open_counters(self) -> Mapping[str, Any]:
        begin = time.perf_counter()
        import torch

        imported = time.perf_counter()
        source = self.ladder.source
        return {
            "torch": torch.__version__, "import_s": imported - begin, "open_s": time.perf_counter() - imported,
            "tier": self.ladder.tier, "refused": {key: str(value) for key, value in self.ladder.refused.items()},
            "groups": {} if source is None else {name: source.counters(name) for name in source.groups},
        }  # fmt: skip

    def count(self, name: str) -> Mapping[str, Any]:
        from joulemark.energy.calibrate import count_benchmark

        counted = count_benchmark(self.engine, self.counting, SUITE[name], self.caches)
        per = {unit: f"{count:.4g}" for unit, count in counted.counts.items()}
        return {"counts": per, "counters": {key: f"{value:.5g}" for key, value in counted.counters.items()}}

    def workload(self, name: str) -> Mapping[str, Any]:
        import torch

        from bench_energy.held_out import HELD_OUT as EVERY
        from joulemark.energy.workload_windows import Facts, Stepper, measure_energy, with_counters

        one = next(held_out for held_out in EVERY if held_out.name == name)
        begin = time.perf_counter()
        stepper = Stepper(one.build(f"cuda:{self.gpu.ordinal}", False), torch.cuda.synchronize)
        built = time.perf_counter()
        facts = Facts(one.name, one.kind, one.dtype, one.batch_size, one.batch_size)
        row = measure_energy(facts, stepper, self.meter, self.gpu.gpu.power_limit_w, 1.2)
        row = with_counters(row, stepper, self.counting)
        row["counters"] = {key: f"{value:.4g}" for key, value in row["counters"].items()}
        del stepper
        torch.cuda.empty_cache()
        power = row["measured_j"] / row["window_s"]
        return {"power_w": power, "build_s": built - begin, "measure_s": time.perf_counter() - built, **row}


def seen(ran: Run, power: PowerWindow) -> dict[str, Any]:
    """What the sensors showed, and how well."""
    reading = energy_of(power, ran.start, ran.end)
    inside = [one.power_w for one in power.readings if ran.start <= one.t <= ran.end]
    gaps = [b.t - a.t for a, b in pairwise(power.edges)]
    states = [state for t, state in power.states if ran.start <= t <= ran.end]
    return {
        "power_w": reading.power_w.value, "instant_w": mean(inside) if inside else None,
        "cross_check": reading.cross_check_ratio, "reason": reading.reason, "length_s": ran.end - ran.start,
        "readings": len(inside), "edges": len(power.edges), "updates": reading.updates,
        "edge_gap_s": [f"{one:.4f}" for one in (min(gaps), median(gaps), max(gaps))] if gaps else None,
        "edge_uncertainty_ms": [round(1e3 * one.uncertainty_s, 2) for one in power.edges],
        "clock_hz": sorted({state.sm_clock_hz for state in states}, key=str)[:4],
        "temperature_c": states[-1].temperature_c if states else None,
        "reasons": sorted(frozenset().union(*(state.reasons or frozenset() for state in states))) if states else None,
        "sampler_cpu_s": power.sampler_cpu_s, "problem": str(power.problem) if power.problem else None,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__ or "", lambda out: Smoke(out).stages(), 70.0))
