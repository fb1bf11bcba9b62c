"""Learns what the counters of this GPU give, in little time and even if much goes wrong.

Run on a machine with a GPU: ``python tests/gpu/counter_probe.py OUT [--libcupti PATH]``. It examines the libcupti that
torch loads, then the named one (a library, or the folder that pip installed it into). Every stage writes its own JSON
file into OUT; a stage that crashes or hangs costs itself alone: the process is started again with the stages that are
left.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

STAGE_LIMIT_S = 18.0
LIBRARY_LIMIT_S = 60.0
T = [
    "sm__cycles_active",
    "sm__pipe_tensor_cycles_active_realtime",
    "sm__pipe_tensor_op_hmma_cycles_active_realtime",
    "sm__pipe_tensor_op_imma_cycles_active_realtime",
    "sm__inst_executed_realtime",
    "tpc__warps_active_realtime",
    "sm__inst_executed_pipe_alu_realtime",
    "sm__inst_executed_pipe_fma_realtime",
    "sm__inst_executed_pipe_fmaheavy_realtime",
    "sm__pipe_fp64_cycles_active_realtime",
]
SUM, PCT = ".sum", ".avg.pct_of_peak_sustained_elapsed"
PARTS = {
    "T": [f"TPC.TriageCompute.{name}{end}" for name in T for end in (SUM, PCT)]
    + ["TPC.TriageCompute.sm__cycles_active.sum.peak_sustained_elapsed"],
    "A": [
        "SM_A.TriageCompute.l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "SM_A.TriageCompute.sm__thread_inst_executed_pred_on_realtime.sum",
        "SM_A.TriageCompute.sm__inst_executed_pipe_xu_realtime.sum",
    ],
    "B": ["SM_B.TriageCompute.l1tex__t_sectors.sum", "SM_B.TriageCompute.l1tex__t_sectors_lookup_hit.sum"],
    "C": [f"SM_C.TriageCompute.smsp__pipe_tensor_op_dmma_cycles_active{PCT}"],
    "D": [
        f"FBSP.TriageCompute.dramc__throughput{PCT}",
        f"FBSP.TriageCompute.dramc__write_throughput{PCT}",
        f"LTS.TriageCompute.lts__t_sector_throughput{PCT}",
    ],
    "M": ["dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"],
    "P": ["PCI.TriageCompute.pcie__read_bytes.sum", "PCI.TriageCompute.pcie__write_bytes.sum"],
}


class Probe:
    """One process's view: torch, the library, and the work."""

    def __init__(self, libcupti: str | None) -> None:
        from joulemark.collect.cupti import load_library

        self.libcupti = libcupti
        self.cupti = load_library(libcupti) if libcupti else None
        import torch

        self.torch = torch
        self.a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.c = torch.empty_like(self.a)
        if self.cupti is None:
            self.cupti = load_library(None)
        self.work(5)

    def work(self, products: int) -> None:
        for _ in range(products):
            self.torch.mm(self.a, self.b, out=self.c)
        self.torch.cuda.synchronize()

    def device(self) -> Any:
        from joulemark.collect.cupti_device import CuptiDevice

        return CuptiDevice(self.cupti, 0)

    def uuid(self) -> str:
        found = str(self.torch.cuda.get_device_properties(0).uuid)
        return found if found.startswith("GPU-") else f"GPU-{found}"


def error_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def guarded(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except Exception as error:
        return {"error": error_of(error), "where": traceback.format_exc().splitlines()[-6:]}


def sampled(
    probe: Probe, metrics: list[str], run: Callable[[], object], metric_set: str | None = None, **settings: Any
) -> dict[str, Any]:
    """One sampling: how many samples, their means over the middle, times and sizes."""
    from joulemark.collect.cupti_device import SamplingSettings

    t0 = time.perf_counter()
    sampler = probe.device().sampler(metrics, metric_set, SamplingSettings(**settings))
    t1 = time.perf_counter()
    try:
        sampler.start()
        wall0, t2 = time.time_ns(), time.perf_counter()
        run()
        t3, wall1 = time.perf_counter(), time.time_ns()
        sampler.stop()
        t4 = time.perf_counter()
        got = sampler.read()
        t5 = time.perf_counter()
    finally:
        sampler.close()
    n = len(got.start)
    found: dict[str, Any] = {
        "samples": n,
        "overflow": got.overflow,
        "setup_s": t1 - t0,
        "run_s": t3 - t2,
        "stop_s": t4 - t3,
        "decode_s": t5 - t4,
        "image_bytes": len(sampler._image),
        "wall_ns": [wall0, wall1],
    }
    if n:
        moving = [
            column for column, name in enumerate(metrics) if "peak_sustained_elapsed" not in name.split(".sum")[-1]
        ]
        active = [i for i in range(n) if got.values[i, moving].any()]
        found["first_last_active"] = [active[0], active[-1]] if active else None
        found["ticks"] = [int(got.start[0]), int(got.end[-1])]
        found["tick_step"] = [int(x) for x in (got.end - got.start)[:3]]
        found["gaps"] = int((got.start[1:] != got.end[:-1]).sum())
        middle = got.values[active[0] + 1 : active[-1]] if len(active) > 4 else got.values
        found["mean"] = {name: float(value) for name, value in zip(metrics, middle.mean(axis=0), strict=True)}
        found["max"] = {name: float(value) for name, value in zip(metrics, got.values.max(axis=0), strict=True)}
    return found


def facts(probe: Probe) -> dict[str, Any]:
    torch, cupti = probe.torch, probe.cupti
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": sys.version,
        "gpu": torch.cuda.get_device_name(0),
        "libcupti": str(cupti.path),
        "api_version": cupti.api_version,
        "root": os.geteuid() == 0,
    }
    found["initialize"] = guarded(lambda: cupti.initialize())
    found["chip"] = guarded(lambda: cupti.chip(0))
    found["unsupported"] = guarded(lambda: cupti.unsupported(0))
    found["availability_bytes"] = guarded(lambda: len(cupti.availability(0)))
    found["sets"] = guarded(lambda: probe.device().metric_sets())
    maps = Path("/proc/self/maps").read_text().splitlines()
    found["loaded"] = sorted({line.split()[-1] for line in maps if "cupti" in line or "nvperf" in line})
    return found


def costs(probe: Probe) -> dict[str, Any]:
    """Time inside each of CUPTI's functions, for several passes, buffers and images."""
    from joulemark.collect.pm_metrics import plan

    full = list(plan(probe.device()).groups[0].full_names())
    cases: dict[str, tuple[list[str], int, dict[str, Any]]] = {
        "pass1": (full, 200, {}),
        "pass1 sums": ([name for name in full if name.endswith(SUM)], 200, {}),
        "pass1 shares": ([name for name in full if name.endswith(PCT)], 200, {}),
        "T": (PARTS["T"], 200, {}),
        "pass1 image 64": (full, 200, {"image_samples": 64}),
        "pass1 image 2048": (full, 200, {"image_samples": 2048}),
        "pass1 buffer 16": (full, 60, {"buffer_bytes": 16 * 2**20}),
        "pass1 buffer 512": (full, 200, {"buffer_bytes": 512 * 2**20}),
        "pass1 20 us": (full, 40, {"interval": 20_000}),
        "pass1 1 ms": (full, 800, {"interval": 1_000_000}),
    }
    found: dict[str, Any] = {}
    for name, (metrics, products, settings) in cases.items():
        with timed(probe.cupti) as spent:
            found[name] = guarded(
                lambda m=metrics, p=products, o=settings: sampled(probe, m, lambda: probe.work(p), **o)
            )
        if isinstance(found[name], dict):
            found[name].pop("max", None)
            found[name].pop("mean", None)
        found[f"{name}: s per function"] = spent
    return found


@contextmanager
def timed(cupti: Any) -> Iterator[dict[str, Any]]:
    """Seconds and calls per function of the library."""
    spent: dict[str, Any] = {}
    real = cupti.call_with

    def call_with(function: str, struct: Any) -> None:
        began = time.perf_counter()
        try:
            real(function, struct)
        finally:
            seconds, calls = spent.get(function, (0.0, 0))
            spent[function] = (seconds + time.perf_counter() - began, calls + 1)

    cupti.call_with = call_with
    try:
        yield spent
    finally:
        cupti.call_with = real


def warps(probe: Probe) -> dict[str, Any]:
    """Work whose warps are known: one warp that spins on one SM, and an addition that fills every SM."""
    from joulemark.collect.counters import open_counters
    from joulemark.collect.gpm import GpmSource

    torch = probe.torch
    ladder, gpm = open_counters(probe.uuid(), "cuda:0", probe.libcupti), GpmSource(probe.uuid())
    big = torch.ones(2**28, device="cuda")

    def one_warp() -> None:
        torch.cuda._sleep(200_000_000)
        torch.cuda.synchronize()

    def additions() -> None:
        for _ in range(1200):
            big.add_(1.0)
        torch.cuda.synchronize()

    found: dict[str, Any] = {}
    for name, run in (("one warp", one_warp), ("additions", additions), ("products", lambda: probe.work(500))):
        found[name] = guarded(lambda run=run: summary(ladder.source.record("pass1", run, expected_s=0.8)))
        found[name].pop("raw", None)
        found[f"{name} by GPM"] = guarded(lambda run=run: summary(gpm.record("gpm", run))["shares"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        probe.work(1)
        big.add_(1.0)
        torch.cuda.synchronize()
    trace = Path(f"/tmp/joulemark-probe-{os.getpid()}.json")
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    found["kernels"] = [
        {"name": one["name"][:120], "block": one["args"].get("block"), "grid": one["args"].get("grid")}
        for one in events
        if one.get("cat") == "kernel"
    ]
    return found


def gpm_lag(probe: Probe) -> dict[str, Any]:
    """GPM between samples 25, 50, 100 and 200 ms apart, from before the work to after it."""
    from joulemark.device.nvml import Nvml

    with Nvml() as nvml:
        device = nvml.device(probe.uuid())
        samples: list[tuple[float, Any]] = []
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.025 if samples else 0.0):
                samples.append((time.perf_counter(), device.gpm_sample()))

        thread = threading.Thread(target=sample)
        thread.start()
        time.sleep(0.4)
        begin = time.perf_counter()
        probe.work(500)
        end = time.perf_counter()
        time.sleep(0.4)
        done.set()
        thread.join()
        found: dict[str, Any] = {"work": [0.0, end - begin], "samples": len(samples)}
        for apart in (1, 2, 4, 8):
            rows = []
            for (t1, one), (t2, two) in zip(samples, samples[apart:], strict=False):
                got = device.gpm_metrics(one, two, (2, 5, 10))
                rows.append([round(t1 - begin, 4), round(t2 - begin, 4), *(str(value)[:6] for value in got.values())])
            found[f"{25 * apart} ms: from, to, sm, tensor, dram"] = rows
        for _, one in samples:
            one.free()
    return found


def overhead(probe: Probe) -> dict[str, Any]:
    """Step time (10 products, more than 10 ms) by CUDA events, with and without sampling, interleaved."""
    from joulemark.collect.cupti_device import SamplingSettings

    torch = probe.torch

    def steps(n: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(10):
                torch.mm(probe.a, probe.b, out=probe.c)
            mark.record()
        torch.cuda.synchronize()
        return [one.elapsed_time(two) for one, two in pairwise(marks)]

    times: dict[str, list[float]] = {"without": [], "100 us": [], "20 us": []}
    steps(10)
    for _ in range(5):
        times["without"] += steps(12)
        for name, interval in (("100 us", 100_000), ("20 us", 20_000)):
            sampler = probe.device().sampler(PARTS["T"], None, SamplingSettings(interval=interval))
            try:
                sampler.start()
                times[name] += steps(12)
                sampler.stop()
            finally:
                sampler.close()
    return {name: {"median_ms": statistics.median(some), "all": some} for name, some in times.items()}


def agreement(probe: Probe) -> dict[str, Any]:
    """GPM and PM sampling over the same loop: one after the other, then together."""
    from joulemark.collect.counters import open_counters
    from joulemark.collect.gpm import GpmSource

    ladder = open_counters(probe.uuid(), "cuda:0", probe.libcupti)
    pm, gpm = ladder.source, GpmSource(probe.uuid())
    found: dict[str, Any] = {"tier": ladder.tier}

    def brief(series: Any) -> dict[str, Any]:
        work = series.at_work()
        shares = {name: work.mean(name) for name in ("sm_active", "pipe_tensor", "dram_throughput", "warps_active")}
        each = {name: [round(float(v), 4) for v in series.values[name][:30]] for name in ("pipe_tensor",)}
        return {"shares": shares, "n": len(series), "first": each, "source": dict(series.source)}

    def both() -> None:
        found["together gpm"] = guarded(lambda: brief(gpm.record("gpm", lambda: probe.work(700))))

    for turn in range(2):
        found[f"gpm {turn}"] = guarded(lambda: brief(gpm.record("gpm", lambda: probe.work(700))))
        found[f"pm {turn}"] = guarded(lambda: brief(pm.record("pass1", lambda: probe.work(700), expected_s=1.1)))
    found["together pm"] = guarded(lambda: brief(pm.record("pass1", both, expected_s=1.1)))
    gpm.close()
    return found


def clocks(probe: Probe) -> dict[str, Any]:
    """Where the sampler's time stamps stand: alone, and with torch.profiler in the same process."""
    from torch.profiler import ProfilerActivity, profile

    def burst() -> None:
        time.sleep(0.01)
        for products in (2, 4, 8):
            probe.work(products)
            time.sleep(0.01)

    found: dict[str, Any] = {"alone": guarded(lambda: sampled(probe, PARTS["T"], burst, interval=20_000))}

    def profiled() -> dict[str, Any]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            inner = guarded(lambda: sampled(probe, PARTS["T"], burst, interval=20_000))
        kernels = [e for e in profiler.events() if "cuda" in str(e.device_type).lower()]
        spans = [(e.time_range.start, e.time_range.end) for e in kernels]
        return {"sampling": inner, "kernels": len(kernels), "first_last_us": [spans[0], spans[-1]] if spans else None}

    found["profiled"] = guarded(profiled)
    found["after"] = guarded(lambda: sampled(probe, PARTS["T"], burst, interval=20_000))
    return found


def sources(probe: Probe) -> dict[str, Any]:
    """The ladder as a user gets it."""
    from joulemark.collect.counters import open_counters

    t0 = time.perf_counter()
    ladder = open_counters(probe.uuid(), "cuda:0", probe.libcupti)
    found: dict[str, Any] = {
        "open_s": time.perf_counter() - t0,
        "tier": ladder.tier,
        "refused": {tier: error_of(error) for tier, error in ladder.refused.items()},
    }
    if ladder.source is not None:
        found["groups"] = ladder.source.groups
        for group in ladder.source.groups:
            t1 = time.perf_counter()
            found[group] = guarded(lambda one=group: summary(ladder.source.record(one, lambda: probe.work(150))))
            found[f"{group} s"] = time.perf_counter() - t1
    ladder.close()
    return found


def summary(series: Any) -> dict[str, Any]:
    work = series.at_work()
    shares = {name: work.mean(name) for name, unit in series.units.items() if unit == "1"}
    totals = {name: work.total(name) for name, unit in series.units.items() if unit != "1"}
    return {
        "samples": len(series),
        "at_work": len(work),
        "work_s": float(work.duration_s.sum()),
        "clock": work.clock,
        "shares": shares,
        "totals": totals,
        "raw": dict(series.raw),
        "missing": dict(series.missing),
        "source": dict(series.source),
    }


def others(probe: Probe) -> dict[str, Any]:
    """What CUPTI answers beside another sampling: of this process, of another one, and without privilege."""
    found: dict[str, Any] = {}
    path = str(probe.cupti.path)

    def second() -> Any:
        return guarded(lambda: sampled(probe, PARTS["T"], lambda: probe.work(30)))

    def twice() -> dict[str, Any]:
        inner: dict[str, Any] = {}
        inner["first"] = sampled(probe, PARTS["T"], lambda: inner.update(second=second()))
        return inner

    found["twice here"] = guarded(twice)
    holder = alone(path, "0.8")
    time.sleep(1.0)
    found["beside another process"] = second()
    probe.work(300)
    found["the other process"] = told(holder)
    found["after the other"] = second()
    found["without privilege"] = guarded(lambda: told(alone(path, "0.1", user=65534, group=65534)))
    return found


def alone(path: str, seconds: str, **options: Any) -> subprocess.Popen[str]:
    """A process without torch that samples this GPU for a while."""
    command = [sys.executable, __file__, os.devnull, "--sample-for", seconds, "--libcupti", path]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def told(process: subprocess.Popen[str]) -> Any:
    try:
        text = process.communicate(timeout=6)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return {"error": "did not end in 6 s"}
    last = text.strip().splitlines()[-1:] or [""]
    return guarded(lambda: json.loads(last[0])) if last[0].startswith("{") else {"said": text[-1500:]}


def sample_alone(path: str, seconds: float) -> None:
    from joulemark.collect.cupti import load_library
    from joulemark.collect.cupti_device import CuptiDevice

    class Bare:
        def device(self) -> Any:
            return CuptiDevice(load_library(path), 0)

    found = guarded(lambda: sampled(Bare(), PARTS["T"], lambda: time.sleep(seconds)))  # type: ignore[arg-type]
    print(json.dumps(found), flush=True)


STAGES: dict[str, Callable[[Probe], dict[str, Any]]] = {
    "facts": facts,
    "sources": sources,
    "agreement": agreement,
    "warps": warps,
    "gpm_lag": gpm_lag,
    "costs": costs,
    "clocks": clocks,
    "others": others,
    "overhead": overhead,
}


def write(out: Path, label: str, stage: str, found: Any) -> None:
    (out / f"{label}-{stage}.json").write_text(json.dumps(found, indent=1, default=str))


def child(out: Path, label: str, libcupti: str | None, stages: list[str]) -> None:
    """Runs stages in order; says on stdout which one has begun."""
    print("BEGIN start", flush=True)
    probe = Probe(libcupti)
    for stage in stages:
        print(f"BEGIN {stage}", flush=True)
        began = time.perf_counter()
        faulthandler.dump_traceback_later(STAGE_LIMIT_S, exit=True)
        found = guarded(lambda stage=stage: STAGES[stage](probe))
        if isinstance(found, dict):
            found["stage_s"] = time.perf_counter() - began
        write(out, label, stage, found)
        faulthandler.cancel_dump_traceback_later()
        print(f"END {stage} {time.perf_counter() - began:.1f} s", flush=True)


def examine(out: Path, label: str, libcupti: str | None, stages: list[str]) -> None:
    """Starts children until every stage has run, crashed or run out of time."""
    left = list(stages)
    deadline = time.monotonic() + LIBRARY_LIMIT_S
    while left and time.monotonic() < deadline:
        begun = run_child(out, label, libcupti, left, deadline)
        if begun == "start":
            break
        left = left[left.index(begun) + 1 :] if begun in left else []


def run_child(out: Path, label: str, libcupti: str | None, left: list[str], deadline: float) -> str:
    """One child; returns the stage that it ended in."""
    command = [sys.executable, __file__, str(out), "--child", label, "--stages", ",".join(left)]
    command += ["--libcupti", libcupti] if libcupti else []
    log = out / f"{label}-log.txt"
    limit = deadline - time.monotonic()
    with log.open("ab") as sink:
        try:
            code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("BEGIN", "END"))]
    stage = lines[-1].split()[1] if lines else "start"
    if lines and lines[-1].startswith("BEGIN"):
        write(out, label, stage, {"died": f"exit {code}", "log": log.read_text(errors="replace")[-3000:]})
    print(f"{label}: ended in {stage}, exit {code}", flush=True)
    return stage


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--libcupti")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--named-stages", default="facts,sources", help="stages for the named library")
    parser.add_argument("--child")
    parser.add_argument("--sample-for", type=float)
    options = parser.parse_args()
    if options.sample_for:
        sample_alone(options.libcupti, options.sample_for)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options.out, options.child, options.libcupti, options.stages.split(","))
        return
    examine(options.out, "own", None, options.stages.split(","))
    if options.libcupti:
        examine(options.out, "named", options.libcupti, options.named_stages.split(","))
    for path in sorted(options.out.glob("*.json")):
        text = path.read_text()
        print(f"== {path.name}\n{text[:1500]}", flush=True)


if __name__ == "__main__":
    main()
