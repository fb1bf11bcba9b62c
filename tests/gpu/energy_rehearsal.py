"""The whole campaign without a GPU: commands that are cut off, one that is killed, an evaluation of what they left.

Run: ``python tests/gpu/energy_rehearsal.py OUT [--limit 60]``. The engine, the sensors and the counters are those of a
synthetic GPU whose windows take a twentieth of their time; workloads run at tiny size on the CPU. Says how long each
command took, what the campaign left and whether every bar of ``bench_energy/bars.py`` could be judged.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UUID = "GPU-00000000-0000-4000-8000-000000000000"
SPEED = 20.0
SWITCH = "JOULEMARK_REHEARSAL"
MOVING = {
    "wgmma_bf16": 1.2e14, "fp32": 6e11, "fp32_operands": 4.8e11, "logic": 3e11, "shared_read": 3e12, "l1": 5e12,
    "l2_read": 1.6e12, "l2_write": 8e11, "hbm_read": 9e11, "hbm_write": 4e11, "instruction": 4e10,
    "memory_access": 2.5e10, "l1_request": 2e10, "l2_request": 2.4e10,
}  # fmt: skip
"""Counts per second of a workload that keeps the GPU busy."""
ACTIVITY = 0.8
FAILS = "sort"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="of each command (60)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environ = _environ(Path(folder))
        first = ["--limit", f"{args.limit:g}", "--workload-window", "0.3"]
        _command(args.out, environ, Path(folder), first, kill_after_s=0.4 * args.limit)
        for _ in range(20):
            if _command(args.out, environ, Path(folder), [*first, "--resume"]) == 0:
                break
    found = [args.out / name for name in ("nvidia-h200-windows.jsonl", "energy-measurements.json")]
    command = [sys.executable, "bench_energy/evaluate.py", *map(str, found), "--out", str(args.out / "results")]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


def _environ(folder: Path) -> dict[str, str]:
    """Of a process whose GPU is synthetic."""
    gpus = {"gpus": [{"name": "NVIDIA H200", "uuid": UUID, "pci": "0", "energy": {"counter_from_power": True}}]}
    (folder / "gpus.json").write_text(json.dumps(gpus))
    (folder / "sitecustomize.py").write_text("import energy_rehearsal\nenergy_rehearsal.install()\n")
    paths = [str(folder), str(Path(__file__).parent), str(ROOT / "src"), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), SWITCH: "1",
            "JOULEMARK_FAKE_GPUS": str(folder / "gpus.json")}  # fmt: skip


def _command(
    out: Path, environ: dict[str, str], folder: Path, more: list[str], kill_after_s: float | None = None
) -> int:
    begin = time.monotonic()
    command = [sys.executable, "tests/gpu/energy_campaign.py", str(out), "--work", str(folder / "work"), *more]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        code = process.wait(kill_after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    print(f"== {' '.join(more)}: exit {code} after {time.monotonic() - begin:.0f} s", flush=True)
    return code


def install() -> None:
    """Put the synthetic GPU in the place of the engine, the sensors and the counters of this process."""
    script = " ".join(sys.orig_argv)
    if not os.environ.get(SWITCH) or not ("measure_workloads.py" in script or "joulemark.cli" in script):
        return
    from joulemark.collect import counters
    from joulemark.energy import calibrate, cuda_engine, workload_windows

    bench = Rehearsal()
    cuda_engine.CudaEngine = lambda ordinal, uuid: bench
    calibrate.SampledMeter = lambda sampler: bench.gpu.meter if "joulemark.cli" in script else bench.meter
    counters.open_counters = lambda *_, **__: SimpleNamespace(
        tier="rehearsal", refused={}, source=bench, close=lambda: None
    )
    for name in ("measure_energy", "with_counters"):
        setattr(workload_windows, name, bench.noting(getattr(workload_windows, name)))
    if "measure_workloads.py" in script:
        sys.argv += ["--device", "cpu"]


class Rehearsal:
    """An engine, sensors and counters that agree with each other."""

    groups = ("all",)

    def __init__(self) -> None:
        from joulemark.synthetic_gpu import Noise, SyntheticGpu

        self.gpu = SyntheticGpu(noise=Noise(drift_w=0.3), limit_w=700.0, peak_w=420.0, seed=os.getpid())
        self.facts = self.gpu.facts
        self.workload, self.dtype, self.steps, self.step_s = "", "", 0, 0.0
        self.launched: tuple[Any, int] | None = None

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gpu, name)

    def run(self, launch: Any, settle_s: float, seconds: float) -> Any:
        time.sleep((settle_s + seconds) / SPEED)
        return self.gpu.run(launch, settle_s, seconds)

    def repeat(self, launch: Any, times: int) -> None:
        self.launched = launch, times
        self.gpu.repeat(launch, times)

    def noting(self, function: Any) -> Any:
        """The function, which says first on which workload it is."""

        def noted(what: Any, stepper: Any, *args: Any, **more: Any) -> Any:
            row = what if isinstance(what, dict) else {"workload": what.workload, "dtype": what.dtype}
            self.workload, self.dtype = row["workload"], row["dtype"]
            if self.workload == FAILS:
                raise RuntimeError("a workload that fails, as one may")
            self.step_s = row.get("window_s", 0.0) / row.get("steps", 1)
            stepper.run = self._counting(stepper.run)
            return function(what, stepper, *args, **more)

        return noted

    def _counting(self, run: Any) -> Any:
        def counting(steps: int) -> None:
            self.steps = steps
            run(steps)

        return counting

    def meter(self, run: Any) -> tuple[Any, Any]:
        """What ran, and the power that the workload should have."""
        from joulemark.collect.energy import ConditionReading, EnergyEdge, PowerReading, PowerWindow

        before = time.perf_counter()
        ran = run()
        power = self._power_w() if ran.launches else 122.0
        window = PowerWindow("nvml_energy_counter", "nvml_power_integral", True, before, ran.end + 0.01)
        period = (ran.end - before) / 24
        window.edges = [EnergyEdge(before + i * period, i * period * power, 1e-4) for i in range(25)]
        window.readings = [PowerReading(before + i * period, power) for i in range(25)]
        state = ConditionReading(1.98e9, 3.2e9, 1.98e9, 45.0, frozenset())
        window.states = [(before + i * period, state) for i in range(25)]
        return ran, window

    def _busy(self) -> float:
        """Share of the time that a workload keeps the GPU busy; its name fixes it."""
        return 0.1 + (sum(self.workload.encode()) % 90) / 100

    def _moving(self) -> dict[str, float]:
        """Counts per second while the GPU is busy; tensor pipes for the format that counts as theirs."""
        return {unit: rate for unit, rate in MOVING.items() if self.dtype == "bf16" or unit != "wgmma_bf16"}

    def _power_w(self) -> float:
        from joulemark.energy.fit import with_loss
        from joulemark.energy.units import fed_by_core

        core, memory, known = 132 * 0.08, 12.0 * self._busy(), self.gpu.coefficients
        for unit, rate in self._moving().items():
            spent = self._busy() * rate * (known[unit, "control"] + ACTIVITY * known.get((unit, "datapath"), 0.0))
            core, memory = (core + spent, memory) if fed_by_core(unit) else (core, memory + spent)
        return 122.0 + memory + float(with_loss(core, known["supply", "static"]))  # type: ignore[arg-type]

    def record(self, group: str, run: Any, expected_s: float | None = None) -> Any:
        """Totals of counters over what runs: of a microbenchmark's launches, or of a workload's time."""
        del group
        run()
        totals = self._of_workload(self.steps * self.step_s) if self.workload else self._of_benchmark()
        return SimpleNamespace(units=dict.fromkeys(totals, "count"), total=totals.get)

    def _of_workload(self, seconds: float) -> dict[str, float]:
        busy_s = seconds * self._busy()
        return counters_of({unit: rate * busy_s for unit, rate in self._moving().items()}, busy_s)

    def _of_benchmark(self) -> dict[str, float]:
        launch, times = self.launched or (None, 0)
        benchmark = self.gpu._loaded[0]  # type: ignore[index]
        counts = benchmark.counts_per_launch(
            "sm_90a", launch.blocks, launch.iterations, self.gpu.instructions(benchmark, False)
        )
        return counters_of({unit: count * times for unit, count in counts.items()}, times * 4e-3)


def counters_of(counts: dict[str, float], seconds: float) -> dict[str, float]:
    """What hardware counters would show of counts of the model's units."""
    of = {unit: counts.get(unit, 0.0) for unit in (*counts, *MOVING, "integer", "fp64", "special")}
    tensor = sum(count for unit, count in counts.items() if "mma_" in unit) / 1024
    cycles = 132 * 1.98e9 * seconds
    return {
        "gpu_busy_s": seconds, "instructions": of["instruction"], "sm_active_cycles": cycles, "sm_cycles": cycles,
        "pipe_fma_instructions": (of["fp32"] + of["integer"]) / 32,
        "pipe_fmaheavy_instructions": (of["fp32"] / 2 + of["integer"]) / 32,
        "pipe_alu_instructions": of["logic"] / 32, "pipe_xu_instructions": of["special"] / 32,
        "pipe_fp64_cycles": of["fp64"] / 16, "pipe_lsu_instructions": of["memory_access"],
        "pipe_tensor_cycles": tensor, "pipe_tensor_hmma_cycles": tensor, "pipe_tensor_imma_cycles": 0.0,
        "shared_wavefronts": (of["shared_read"] + of.get("shared_write", 0.0)) / 128, "l1_sectors": of["l1"] / 32,
        "l1_requests": of["l1_request"], "l2_requests": of["l2_request"],
        "l2_write_sectors": of["l2_write"] / 32, "l2_bytes": of["l2_read"] + of["l2_write"],
        "dram_read_bytes": of["hbm_read"], "dram_write_bytes": of["hbm_write"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
