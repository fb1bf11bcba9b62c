"""Which clocks PM samples and CUPTI activity records are on when one process has both, in little time.

Run on a machine with a GPU: ``python tests/gpu/clock_probe.py OUT [--seconds 55]``. Every stage writes its raw samples
(``STAGE-N.npz``), its trace (``STAGE.json.gz``) and what it found (``STAGE.json``) into OUT, the most telling stage
first; a stage that fails costs itself alone, and one that hangs ends the script with what stands there.

A window is: a train of beacons (a kernel that spins on one SM for a known number of cycles), a few steps, a train of
beacons. Beacons stand between idle stretches of several samples, so that both instruments see each of them alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np

METRICS = (
    "TPC.TriageCompute.sm__cycles_active.sum",
    "TPC.TriageCompute.sm__cycles_active.sum.peak_sustained_elapsed",
    "TPC.TriageCompute.sm__inst_executed_realtime.sum",
    "TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
)
BEACON_CYCLES = (300_000, 200_000, 400_000, 250_000, 350_000, 220_000)
GAP_S = 150e-6
SIDE = """
import sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from joulemark.collect.cupti import load_library
from joulemark.collect.cupti_device import CuptiDevice, SamplingSettings
device = CuptiDevice(load_library(sys.argv[3]), 0)
sampler = device.sampler(sys.argv[4].split(","), None, SamplingSettings(interval=20_000))
sampler.start()
print("started", flush=True)
sys.stdin.readline()
sampler.stop()
got = sampler.read()
np.savez_compressed(sys.argv[2], start=got.start, end=got.end, values=got.values, overflow=got.overflow)
sampler.close()
print("written", len(got.start), flush=True)
"""


class Probe:
    """Torch, the library and the work of one process."""

    def __init__(self, out: Path) -> None:
        import torch

        from joulemark.collect.cupti import load_library
        from joulemark.collect.cupti_device import CuptiDevice

        self.out, self.torch = out, torch
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.big = torch.randn(6144, 6144, **options)
        self.small = torch.randn(1024, 1024, **options)
        self.wide = torch.randn(2**27, **options)
        self.step()
        torch.cuda.synchronize()
        self.cupti = load_library(None)
        self.device = CuptiDevice(self.cupti, 0)

    def step(self) -> None:
        """Kernels of many lengths: some 600 µs of product, 250 µs of streaming, and many of 5 to 30 µs."""
        torch = self.torch
        torch.mm(self.big, self.big)
        self.wide.mul_(1.0)
        for _ in range(5):
            torch.mm(self.small, self.small)
            self.small.add(1.0)
        torch.softmax(self.big, dim=1)
        self.wide.sum()

    def beacons(self) -> None:
        for cycles in BEACON_CYCLES:
            self.torch.cuda._sleep(cycles)
            self.torch.cuda.synchronize()
            _wait(GAP_S)

    def window(self, steps: int) -> None:
        _wait(1e-3)
        self.beacons()
        for number in range(steps):
            with self.torch.profiler.record_function(f"joulemark.iteration#{number}"):
                self.step()
        self.torch.cuda.synchronize()
        _wait(GAP_S)
        self.beacons()
        _wait(1e-3)

    def sampled(self, name: str, run: Callable[[], object], **settings: Any) -> dict[str, Any]:
        """A sampling whose raw samples are kept; what it cost and covered."""
        from joulemark.collect.cupti_device import SamplingSettings

        spent = [time.perf_counter()]
        settings = {"interval": 20_000, **settings}
        sampler = self.device.sampler(METRICS, None, SamplingSettings(**settings))
        try:
            spent.append(time.perf_counter())
            sampler.start()
            begin_ns = time.time_ns()
            run()
            end_ns = time.time_ns()
            spent.append(time.perf_counter())
            sampler.stop()
            got = sampler.read()
            spent.append(time.perf_counter())
        finally:
            sampler.close()
        return self.kept(name, got, settings, {"begin_ns": begin_ns, "end_ns": end_ns, "seconds": np.diff(spent)})

    def kept(self, name: str, got: Any, settings: Any, more: dict[str, Any]) -> dict[str, Any]:
        np.savez_compressed(
            self.out / f"{name}.npz", start=got.start, end=got.end, values=got.values, names=np.array(METRICS), **more
        )
        length = got.end - got.start
        return {
            "settings": settings,
            "samples": len(got.start),
            "overflow": bool(got.overflow),
            "ticks_per_sample": float(np.median(length)) if len(length) else None,
            "covered_ticks": int(length.sum()),
            "zero_or_long": [int((length <= 0).sum()), int((length > 2 * np.median(length)).sum())],
            **{key: np.asarray(value).tolist() for key, value in more.items()},
        }


def _wait(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def profiled(probe: Probe, stage: str, run: Callable[[], Any], cpu: bool = True) -> Any:
    """Runs inside one session of torch.profiler, and writes its trace."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if cpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        found = run()
    profiler.export_chrome_trace(str(probe.out / f"{stage}.json.gz"))
    return found


def alone(probe: Probe) -> Any:
    """Before torch.profiler has run in this process."""
    return probe.sampled("alone-0", lambda: probe.window(12))


def together(probe: Probe) -> Any:
    """Both instruments at once: three windows in one session of the profiler."""
    return profiled(
        probe,
        "together",
        lambda: [guarded(lambda n=n: probe.sampled(f"together-{n}", lambda: probe.window(12))) for n in range(3)],
    )


def device_only(probe: Probe) -> Any:
    """A second session of the profiler, of the device alone."""
    return profiled(probe, "device_only", lambda: probe.sampled("device_only-0", lambda: probe.window(12)), cpu=False)


def large_images(probe: Probe) -> Any:
    """More samples in one run than 4,096: a larger image, and a larger hardware buffer."""
    found = {}
    for name, settings in {
        "16384": {"image_samples": 16384, "buffer_bytes": 512 * 2**20},
        "16384 in 128 MiB": {"image_samples": 16384},
        "10 us": {"interval": 10_000, "image_samples": 16384, "buffer_bytes": 512 * 2**20},
        "5 us": {"interval": 5_000, "image_samples": 16384, "buffer_bytes": 512 * 2**20},
    }.items():
        steps = {20_000: 160, 10_000: 80, 5_000: 40}[settings.get("interval", 20_000)]
        key = f"large_images-{name.replace(' ', '_')}"
        found[name] = guarded(lambda k=key, s=settings, n=steps: probe.sampled(k, lambda: probe.window(n), **s))
    return found


def reads_between(probe: Probe) -> Any:
    """One sampling that is decoded several times while it goes on, by images that are never full."""
    from joulemark.collect.cupti_device import SamplingSettings

    sampler = probe.device.sampler(METRICS, None, SamplingSettings(interval=20_000))
    found = []
    try:
        sampler.start()
        for number in range(4):
            begin_ns = time.time_ns()
            probe.window(10)
            end_ns = time.time_ns()
            if number == 3:
                sampler.stop()
            began = time.perf_counter()
            got = sampler.read()
            more = {"begin_ns": begin_ns, "end_ns": end_ns, "seconds": [time.perf_counter() - began]}
            found.append(probe.kept(f"reads_between-{number}", got, {}, more))
    finally:
        sampler.close()
    return found


def cost(probe: Probe) -> Any:
    """Time of a step bare, beside the profiler, beside the samples, beside both; in turns."""

    def steps() -> float:
        probe.torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(30):
            probe.step()
        probe.torch.cuda.synchronize()
        return (time.perf_counter() - began) / 30

    found: dict[str, list[float]] = {"bare": [], "samples": [], "profiler": [], "both": []}
    steps()
    for _ in range(2):
        found["bare"].append(steps())
        probe.sampled("cost", lambda: found["samples"].append(steps()))
        profiled(probe, "cost", lambda: found["profiler"].append(steps()))
        profiled(probe, "cost", lambda: probe.sampled("cost", lambda: found["both"].append(steps())))
    return found


def side(probe: Probe) -> Any:
    """Sampling by another process, while this one has the profiler."""
    script = [sys.executable, "-c", SIDE, str(Path(__file__).resolve().parents[2] / "src")]
    script += [str(probe.out / "side-0.npz"), str(probe.cupti.path), ",".join(METRICS)]
    child = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    said = child.stdout.readline()
    try:
        begin_ns = time.time_ns()
        if said.startswith("started"):
            profiled(probe, "side", lambda: probe.window(12))
        end_ns = time.time_ns()
        said += child.communicate("stop\n", timeout=8)[0]
    finally:
        child.kill()
    return {"said": said[-1500:], "begin_ns": begin_ns, "end_ns": end_ns}


STAGES = (alone, together, large_images, reads_between, device_only, side, cost)


def guarded(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc().splitlines()[-6:]}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=55.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    end = time.monotonic() + options.seconds
    probe = Probe(options.out)
    facts = {
        "torch": probe.torch.__version__,
        "gpu": probe.torch.cuda.get_device_name(0),
        "libcupti": probe.cupti.version,
        "chip": probe.device.chip,
        "baseline_ns": time.time_ns(),
    }
    (options.out / "facts.json").write_text(json.dumps(facts, indent=1))
    for stage in STAGES:
        if time.monotonic() > end - 4:
            print(f"{stage.__name__}: no time left", flush=True)
            continue
        began = time.perf_counter()
        found = guarded(lambda stage=stage: stage(probe))
        (options.out / f"{stage.__name__}.json").write_text(json.dumps(found, indent=1, default=str))
        print(
            f"{stage.__name__}: {time.perf_counter() - began:.1f} s {json.dumps(found, default=str)[:900]}", flush=True
        )


if __name__ == "__main__":
    main()
