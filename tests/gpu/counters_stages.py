"""Where does the time of counting go? Every stage of it by itself, as it is done now and as it could be done.

Run: ``python tests/gpu/counters_stages.py OUT [--seconds 25] [--parts gpm,workloads]`` on a machine with a CUDA GPU and
PM sampling. Writes OUT/counters-stages.json after each part: times in s, raw. A part that fails costs itself alone; of
one that takes the process along, name those after it in ``--parts``. Parts that no time is left for are ``skipped``.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20
SIZES = (("largest", 128 * MIB, 4096), ("64 MiB", 64 * MIB, 2048), ("32 MiB", 32 * MIB, 1024))
"""Name, hardware buffer in B, samples of the image."""
RUN_S, TURNS = 0.05, 2
CELLS = (("resnet50", 8), ("resnet50", 128))


@contextmanager
def clock(into: dict[str, Any], name: str) -> Iterator[None]:
    """Appends the block's seconds."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        into.setdefault(name, []).append(time.perf_counter() - begin)


@contextmanager
def per_function(cupti: Any) -> Iterator[dict[str, list[float]]]:
    """Seconds and calls of each function of the library."""
    spent: dict[str, list[float]] = {}

    def call_with(function: str, struct: Any) -> None:
        begin = time.perf_counter()
        try:
            type(cupti).call_with(cupti, function, struct)
        finally:
            one = spent.setdefault(function, [0.0, 0])
            one[0] += time.perf_counter() - begin
            one[1] += 1

    cupti.call_with = call_with
    try:
        yield spent
    finally:
        del cupti.call_with


@dataclass
class Stand:
    """The device, its groups, and work of a known length."""

    uuid: str = ""
    cupti: Any = None
    device: Any = None
    groups: list[Any] = field(default_factory=list)
    work: Callable[[], object] = lambda: None

    def settings(self, buffer_bytes: int, image_samples: int) -> Any:
        from joulemark.collect.cupti_device import SamplingSettings

        return SamplingSettings(buffer_bytes=buffer_bytes, image_samples=image_samples)

    def busy(self) -> Any:
        """Column of the SMs' activity in the first group."""
        return self.groups[0].full_names().index(self.groups[0].raw()["sm_active"].split("+")[0])


def summary(samples: Any, column: int = 0) -> dict[str, Any]:
    """What shows whether a sampling saw its run: number, length of all, mean of a column where it is not 0."""
    length = (samples.end - samples.start) * 1e-9
    values = samples.values[:, column]
    held = values[values > 0]
    return {
        "samples": len(length),
        "covered_s": float(length[length < 1].sum()),
        "overflow": samples.overflow,
        "mean": float(held.mean()) if len(held) else None,
    }


def opening(stand: Stand) -> dict[str, Any]:
    """Imports, the context, the library, the plan, the proof of each group."""
    found: dict[str, Any] = {}
    with clock(found, "import torch"):
        import torch
    with clock(found, "import torch._dynamo"):
        importlib.import_module("torch._dynamo")
    with clock(found, "context"):
        torch.cuda.synchronize()
    stand.uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    from joulemark.collect.counters import _busy_work
    from joulemark.collect.cupti import load_library
    from joulemark.collect.cupti_device import CuptiDevice
    from joulemark.collect.pm_metrics import metrics_of, plan
    from joulemark.collect.pm_sampling import prove
    from joulemark.utilization.levels import READ

    with clock(found, "load library"):
        stand.cupti = load_library()
    with clock(found, "device"):
        stand.device = CuptiDevice(stand.cupti, 0)
    with clock(found, "plan"):
        planned = plan(stand.device, metrics_of(READ))
    with clock(found, "first work"):
        exercise = _busy_work(0)
    with clock(found, "second work"):
        exercise()
    for group in planned.groups:
        with clock(found, "proofs"):
            stand.groups += prove(stand.device, group, exercise)[0]
    found["metrics"] = [len(group.full_names()) for group in stand.groups]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def work() -> None:
        end = time.perf_counter() + RUN_S
        while time.perf_counter() < end:
            for _ in range(8):
                torch.mm(a, a, out=out)
            torch.cuda.synchronize()

    stand.work = work
    work()
    return found


def sampler(stand: Stand) -> dict[str, Any]:
    """A sampler of its own for each run: every stage, by group and by size of buffer and image."""
    found: dict[str, Any] = {}
    for name, buffer_bytes, image_samples in SIZES:
        for group in stand.groups:
            times: dict[str, Any] = {}
            turns = TURNS if group is stand.groups[0] else 1
            for turn in range(turns):
                with per_function(stand.cupti) as spent:
                    one = timed_sampling(stand, group, stand.settings(buffer_bytes, image_samples), times)
                if turn == turns - 1:
                    times |= {"functions": spent, **one}
            found[f"{name}, {group.name}"] = times
    return found


def timed_sampling(stand: Stand, group: Any, settings: Any, times: dict[str, Any]) -> dict[str, Any]:
    with clock(times, "make"):
        one = stand.device.sampler(group.full_names(), group.metric_set, settings)
    try:
        with clock(times, "start"):
            one.start()
        with clock(times, "run"):
            stand.work()
        with clock(times, "stop"):
            one.stop()
        with clock(times, "read"):
            samples = one.read()
    finally:
        with clock(times, "close"):
            one.close()
    return {"image_bytes": len(one._image), **summary(samples)}


def intervals(stand: Stand) -> dict[str, Any]:
    """What a sample costs: the same run at several intervals."""
    found: dict[str, Any] = {}
    from dataclasses import replace

    for interval in (100_000, 200_000, 400_000):
        times: dict[str, Any] = {}
        settings = replace(stand.settings(64 * MIB, 2048), interval=interval)
        with per_function(stand.cupti) as spent:
            one = timed_sampling(stand, stand.groups[0], settings, times)
        found[f"{interval // 1000} us"] = {**times, "functions": spent, **one}
    return found


def gpm(stand: Stand) -> dict[str, Any]:
    """NVML's GPM: opening, one sample with its metrics, and runs of two lengths."""
    from joulemark.collect.gpm import GpmSource, _Recorder

    found: dict[str, Any] = {}
    with clock(found, "open"):
        source = GpmSource(stand.uuid)
    with _Recorder(source._device) as recorder:
        for _ in range(4):
            with clock(found, "sample"):
                recorder.sample()
            time.sleep(0.06)
    for seconds in (0.4, 0.45, 0.6):

        def run(seconds: float = seconds) -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                stand.work()

        with clock(found, f"record of {seconds} s"):
            series = source.record("gpm", run)
        found[f"readings of {seconds} s"] = [float(one) for one in series.values["sm_active"]]
    source.close()
    return found


def workloads(stand: Stand) -> dict[str, Any]:
    """Build, warm-up step by step, steady steps, the flop counter's step; twice, since the first loads libraries."""
    import torch

    from joulemark.collect.flops import count_flops
    from joulemark.records import Case
    from joulemark.workloads import zoo

    found: dict[str, Any] = {}
    for model, batch in (CELLS[0], *CELLS):
        times: dict[str, Any] = {}
        case = Case(model, "train", "eager", "bf16", batch, "channels_last", "device", "gpu")
        with clock(times, "collect garbage"):
            gc.collect()
        with clock(times, "build"):
            step = zoo.find(model).build(case, "cuda:0")
            torch.cuda.synchronize()
        for name, count in (("warm-up", 5), ("steady", 5)):
            for _ in range(count):
                with clock(times, name):
                    step.run()
                    torch.cuda.synchronize()
        for _ in range(2):
            with clock(times, "flop counter"):
                times["flops"] = count_flops(step.run)
                torch.cuda.synchronize()
        with clock(times, "forget"):
            del step
            gc.collect()
            torch.cuda.empty_cache()
        found[f"{len(found)}: {model} b{batch}"] = times
    return found


def compiler(stand: Stand) -> dict[str, Any]:
    """What forgetting what was never compiled costs, the first time and later."""
    import torch

    found: dict[str, Any] = {}
    for _ in range(2):
        with clock(found, "reset"):
            torch._dynamo.reset()
    return found


def evaluation_in_threads(stand: Stand) -> dict[str, Any]:
    """One image evaluated by 1, 2, 4 threads, each with a host object of its own: times, and whether values agree."""
    found: dict[str, Any] = {}
    group = stand.groups[0]
    one = stand.device.sampler(group.full_names(), group.metric_set, stand.settings(64 * MIB, 2048))
    try:
        one.start()
        stand.work()
        one.stop()
        samples = one.read()
        image, metrics, n = one._image, group.full_names(), len(samples.start)
        for threads in (1, 2, 4):
            hosts = [stand.device._host(group.metric_set) for _ in range(threads)]
            parts = np.array_split(np.arange(n), threads)
            with clock(found, f"{threads} threads"), ThreadPoolExecutor(threads) as pool:
                made = pool.map(lambda pair: evaluate(stand, *pair, image, metrics), zip(hosts, parts, strict=True))
                values = np.concatenate(list(made))
            found[f"{threads} threads agree"] = bool(np.array_equal(values, samples.values, equal_nan=True))
            for host in hosts:
                host.close()
        found["samples"] = n
    finally:
        one.close()
    return found


def evaluate(stand: Stand, host: Any, rows: Any, image: Any, metrics: Any) -> Any:
    """Rows of an image, as ``MetricHost.evaluate`` does it."""
    import ctypes

    from joulemark.collect import cupti_structs as c
    from joulemark.collect.cupti import names

    values = np.empty((len(rows), len(metrics)))
    given = c.parameters(
        "CUpti_Profiler_Host_EvaluateToGpuValues_Params",
        stand.cupti.api_version,
        pHostObject=host._object,
        pCounterDataImage=ctypes.addressof(image),
        counterDataImageSize=len(image),
        ppMetricNames=names(metrics),
        numMetrics=len(metrics),
    )
    for place, index in enumerate(rows):
        given.rangeIndex = int(index)
        given.pMetricValues = values[place].ctypes.data_as(ctypes.POINTER(ctypes.c_double))
        stand.cupti.call_with("cuptiProfilerHostEvaluateToGpuValues", given)
    return values


def one_object_again(stand: Stand) -> dict[str, Any]:
    """An enabled sampler started again and again as it is configured: does it fall silent, what does a run cost?"""
    found: dict[str, Any] = {"runs": []}
    group = stand.groups[0]
    one = stand.device.sampler(group.full_names(), group.metric_set, stand.settings(64 * MIB, 2048))
    try:
        for _ in range(8):
            with clock(found, "start, stop, read"):
                one.start()
                stand.work()
                one.stop()
                samples = one.read()
            found["runs"].append(summary(samples, stand.busy()))
    finally:
        one.close()
    return found


def one_object_configured_anew(stand: Stand) -> dict[str, Any]:
    """An enabled object configured for one group after the other, in turns: times, and what each run saw."""
    import ctypes

    found: dict[str, Any] = {"runs": []}
    settings = stand.settings(64 * MIB, 2048)
    first = stand.groups[0]
    one = stand.device.sampler(first.full_names(), first.metric_set, settings)
    try:
        for turn in range(4 * len(stand.groups)):
            group = stand.groups[turn % len(stand.groups)]
            with clock(found, "configure"):
                one._host.close()
                one._host = stand.device._host(group.metric_set)
                one._metrics = tuple(group.full_names())
                one._config = ctypes.create_string_buffer(one._host.config_image(one._metrics))
                one._configure()
                one._image = one._new_image()
            with clock(found, "start, run, stop"):
                one.start()
                stand.work()
                one.stop()
            with clock(found, "read"):
                samples = one.read()
            found["runs"].append({"group": group.name, **summary(samples)})
    finally:
        one.close()
    return found


PARTS: tuple[Callable[[Stand], dict[str, Any]], ...] = (
    sampler,
    intervals,
    gpm,
    one_object_again,
    one_object_configured_anew,
    evaluation_in_threads,
    workloads,
    compiler,
)


def main() -> int:
    """All parts that fit into the time; the exit code says whether each that ran came to an end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=25.0, help="after opening; no part begins later")
    parser.add_argument("--parts", default=",".join(part.__name__ for part in PARTS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path, end = options.out / "counters-stages.json", float("inf")
    wanted = options.parts.split(",")
    if unknown := set(wanted) - {part.__name__ for part in PARTS}:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    faulthandler.enable()
    faulthandler.dump_traceback_later(2 * options.seconds + 30, exit=True)
    found: dict[str, Any] = {"parts": {}, "skipped": [], "seconds": {}}
    stand, failed = Stand(), False
    for part in (opening, *(one for one in PARTS if one.__name__ in wanted)):
        name = part.__name__
        if time.monotonic() > end or (part is not opening and not stand.groups):
            found["skipped"].append(name)
            continue
        begin = time.perf_counter()
        try:
            found["parts"][name] = part(stand)
        except Exception as error:  # raw material: whatever it is, the other parts are worth having
            failed = True
            found["parts"][name] = {"error": repr(error), "where": traceback.format_exc().splitlines()[-8:]}
        found["seconds"][name] = time.perf_counter() - begin
        print(f"{name}: {found['seconds'][name]:.2f} s {found['parts'][name].get('error', '')}", flush=True)
        path.write_text(json.dumps(found, indent=1))
        end = min(end, time.monotonic() + options.seconds)
    path.write_text(json.dumps(found, indent=1))
    return 1 if failed or not stand.groups else 0


if __name__ == "__main__":
    sys.exit(main())
