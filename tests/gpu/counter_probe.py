"""Learns what the counters of this GPU give, in little time and even if much goes wrong.

Run on a machine with a GPU: ``python tests/gpu/counter_probe.py OUT [LIBCUPTI…]``. It examines the libcupti that torch
loads, then each named one (a library, or the folder that pip installed it into). Every stage writes its own JSON file
into OUT; a stage that crashes or hangs costs itself alone: the process is started again with the stages that are left.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

STAGE_LIMIT_S = 14.0
LIBRARY_LIMIT_S = 45.0
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
GROUPS = ("T", "TA", "TB", "TC", "TD", "TAD", "TBD", "M", "TM", "TADM", "TADMP")


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


def metrics_of(probe: Probe) -> dict[str, Any]:
    from joulemark.collect.pm_sampling import plan

    device = probe.device()
    found: dict[str, Any] = {}
    for metric_set in device.metric_sets():
        known = guarded(lambda one=metric_set: sorted(device.base_metrics(one)))
        found[f"base_{metric_set}"] = known
        for name in GROUPS:
            full = [metric for part in name for metric in PARTS[part]]
            found[f"fits_{metric_set}_{name}"] = guarded(lambda full=full, one=metric_set: device.fits(full, one))
    t0 = time.perf_counter()
    planned = guarded(lambda: plan(device))
    found["plan_s"] = time.perf_counter() - t0
    if not isinstance(planned, dict):
        found["plan"] = [
            {"set": group.metric_set, "counters": group.counters, "raw": group.full_names()} for group in planned.groups
        ]
        found["missing"] = dict(planned.missing)
    else:
        found["plan"] = planned
    return found


def groups(probe: Probe) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric_set in probe.device().metric_sets():
        for name in GROUPS:
            full = [metric for part in name for metric in PARTS[part]]
            key = f"{metric_set}/{name}"
            found[key] = guarded(lambda full=full, one=metric_set: sampled(probe, full, lambda: probe.work(60), one))
    found["idle T"] = guarded(lambda: sampled(probe, PARTS["T"], lambda: time.sleep(0.05)))
    found["repeat T"] = guarded(lambda: sampled(probe, PARTS["T"], lambda: probe.work(60)))
    return found


def intervals(probe: Probe) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for interval in (5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000):
        found[f"{interval} ns"] = guarded(
            lambda one=interval: sampled(probe, PARTS["T"], lambda: probe.work(100), interval=one)
        )
    for mib in (1, 4, 16, 64, 256, 512):
        found[f"{mib} MiB at 20 us"] = guarded(
            lambda one=mib: sampled(
                probe, PARTS["T"], lambda: probe.work(300), interval=20_000, buffer_bytes=one * 2**20
            )
        )
    for samples in (256, 20_000):
        found[f"image of {samples}"] = guarded(
            lambda one=samples: sampled(probe, PARTS["T"], lambda: probe.work(300), interval=50_000, image_samples=one)
        )
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
    from joulemark.collect.gpm import GpmSource

    metrics = PARTS["T"] + PARTS["D"]
    found: dict[str, Any] = {}

    def gpm(run: Callable[[], object]) -> dict[str, Any]:
        source = GpmSource(probe.uuid())
        try:
            series = source.record("gpm", run)
        finally:
            source.close()
        shares = {name: series.mean(name) for name, unit in series.units.items() if unit == "1"}
        return {"shares": shares, "totals": {n: series.total(n) for n, u in series.units.items() if u != "1"},
                "missing": dict(series.missing), "samples": len(series), "source": dict(series.source)}  # fmt: skip

    found["gpm"] = guarded(lambda: gpm(lambda: probe.work(600)))
    found["pm"] = guarded(lambda: sampled(probe, metrics, lambda: probe.work(600)))
    found["gpm again"] = guarded(lambda: gpm(lambda: probe.work(300)))
    held: dict[str, Any] = {}

    def both() -> None:
        held["gpm"] = guarded(lambda: gpm(lambda: probe.work(400)))

    found["together pm"] = guarded(lambda: sampled(probe, metrics, both))
    found["together gpm"] = held.get("gpm")
    found["gpm idle"] = guarded(lambda: gpm(lambda: time.sleep(0.5)))
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
            found[group] = guarded(lambda one=group: summary(ladder.source.record(one, lambda: probe.work(150))))
    ladder.close()
    return found


def summary(series: Any) -> dict[str, Any]:
    work = series.at_work()
    shares = {name: work.mean(name) for name, unit in series.units.items() if unit == "1"}
    totals = {name: work.total(name) for name, unit in series.units.items() if unit != "1"}
    return {
        "samples": len(series), "at_work": len(work), "work_s": float(work.duration_s.sum()), "shares": shares,
        "totals": totals, "raw": dict(series.raw), "missing": dict(series.missing), "source": dict(series.source),
    }  # fmt: skip


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
    command = [sys.executable, __file__, os.devnull, "--sample-for", seconds, path]
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
    "groups": groups,
    "agreement": agreement,
    "overhead": overhead,
    "intervals": intervals,
    "clocks": clocks,
    "others": others,
    "metrics": metrics_of,
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


def examine(out: Path, label: str, libcupti: str | None) -> None:
    """Starts children until every stage has run, crashed or run out of time."""
    left = list(STAGES)
    deadline = time.monotonic() + LIBRARY_LIMIT_S
    while left and time.monotonic() < deadline:
        begun = run_child(out, label, libcupti, left, deadline)
        if begun == "start":
            break
        left = left[left.index(begun) + 1 :] if begun in left else []


def run_child(out: Path, label: str, libcupti: str | None, left: list[str], deadline: float) -> str:
    """One child; returns the stage that it ended in."""
    command = [sys.executable, __file__, str(out), "--child", label, "--stages", ",".join(left)]
    command += [libcupti] if libcupti else []
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
    parser.add_argument("libcupti", nargs="*")
    parser.add_argument("--child")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--sample-for", type=float)
    options = parser.parse_args()
    if options.sample_for:
        sample_alone(options.libcupti[0], options.sample_for)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options.out, options.child, next(iter(options.libcupti), None), options.stages.split(","))
        return
    examine(options.out, "own", None)
    for number, named in enumerate(options.libcupti):
        examine(options.out, f"named{number}", named)
    for path in sorted(options.out.glob("*.json")):
        text = path.read_text()
        print(f"== {path.name}\n{text[:1500]}", flush=True)


if __name__ == "__main__":
    main()
