"""Do joulemark's figures agree with other instruments on this GPU? Prints a table, exits 1 where they do not.

Device time against torch.utils.benchmark and against bare CUDA events (within 2 % for steps of 1 ms and more);
energy against another process that integrates instant power over at least 10 s (within 3 %).

Run: ``python tests/gpu/agreement.py [--json FILE]`` on a machine with a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.utils.benchmark import Timer as TorchTimer

from joulemark.collect.power import energy_of, open_power
from joulemark.collect.timing import timer_for
from joulemark.measure.stopping import Precision
from joulemark.records import Case
from joulemark.workloads import zoo
from joulemark.workloads.base import Step

TIME_LIMIT, ENERGY_LIMIT, SECONDS = 0.02, 0.03, 11.0
CASES = (
    # Steps that the device bounds: one that waits for the host is as long as the host's mood.
    Case("resnet50", "inference", "eager", "bf16", 128, "channels_last", "device", "gpu"),
    Case("resnet50", "train", "graph", "bf16", 64, "channels_last", "device", "gpu"),
    Case("vgg16", "inference", "eager", "fp32", 64, "channels_last", "device", "gpu"),
    Case("bert_base", "train", "graph", "bf16", 32, "contiguous", "device", "gpu"),
    Case("gpt2_small", "prefill", "graph", "fp32", 16, "contiguous", "device", "gpu"),
)

OTHER_PROCESS = """
import json, sys, time
import pynvml as n
n.nvmlInit()
handle = n.nvmlDeviceGetHandleByUUID(sys.argv[1])
end, out = time.time() + float(sys.argv[2]), []
field = n.NVML_FI_DEV_POWER_INSTANT
while time.time() < end:
    value = n.nvmlDeviceGetFieldValues(handle, [field])[0]
    out.append((time.time(), value.value.uiVal / 1000))
    time.sleep(0.0037)
print(json.dumps(out))
"""


def steps() -> dict[str, Step]:
    """The steps that are measured, built one by one."""
    made = {case.label: (lambda case=case: zoo.find(case.workload).build(case, "cuda:0")) for case in CASES}
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    made["matmul-8192-bf16"] = lambda: Step(lambda: a @ b)
    return made


def bare_events(run, count: int) -> float:
    """Median time of a step between CUDA events, in s."""
    for _ in range(5):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in pairwise(events)])) * 1e-3


def time_row(name: str, step: Step) -> dict:
    """Device time by us, by torch.utils.benchmark and by bare events.

    The three take turns many times: clocks and power limit then act on all alike.
    """
    timer = timer_for("cuda:0")
    timer.sustain(step.run, 2.0, 0.01)
    begin = time.perf_counter()
    step.run()
    timer.synchronize()
    about = time.perf_counter() - begin
    count = max(8, int(0.4 / about))
    ours, torchs, bare = [], [], []
    for _ in range(6):
        # The same load before each turn: at the power limit a short rest alone makes the next steps faster.
        timer.sustain(step.run, 0.5, about)
        ours.append(float(np.median(timer.steady(step.run, Precision(0.4), about).step_s)))
        timer.sustain(step.run, 0.5, about)
        torchs.append(TorchTimer("run()", globals={"run": step.run}).timeit(count).mean)
        timer.sustain(step.run, 0.5, about)
        bare.append(bare_events(step.run, count))
    mine, theirs, events = (float(np.median(one)) for one in (ours, torchs, bare))
    return {
        "case": name,
        "device_time_s": mine,
        "torch_benchmark_s": theirs,
        "bare_events_s": events,
        "over_torch": mine / theirs,
        "over_events": mine / events,
        "ok": mine < 1e-3 or (abs(mine / theirs - 1) <= TIME_LIMIT and abs(mine / events - 1) <= TIME_LIMIT),
    }


def energy_row(name: str, step: Step, uuid: str) -> dict:
    """Energy by our window and by a separate process over the same stretch of time."""
    timer, sampler = timer_for("cuda:0"), open_power(uuid)
    timer.sustain(step.run, 1.0, 0.01)
    begin = time.perf_counter()
    step.run()
    timer.synchronize()
    step_s = time.perf_counter() - begin
    other = subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, uuid, str(SECONDS + 3)], stdout=subprocess.PIPE)
    time.sleep(0.5)
    epoch = time.time() - time.perf_counter()
    with sampler.window() as window:
        timer.sustain(step.run, SECONDS + 0.5, step_s)
    reading = energy_of(window, window.start + 0.1, window.end)
    text, _ = other.communicate()
    sampler.close()
    moments, watts = (np.array(column) for column in zip(*json.loads(text), strict=True))
    start, end = (edge + epoch for edge in (reading.windows[0][0], reading.windows[-1][1]))
    grid = np.concatenate([[start], moments[(moments > start) & (moments < end)], [end]])
    theirs = float(np.trapezoid(np.interp(grid, moments, watts), grid))
    ours = sum(reading.energy_j)
    return {
        "case": name,
        "energy_j": ours,
        "other_process_j": theirs,
        "window_s": end - start,
        "ratio": ours / theirs,
        "own_cross_check": reading.cross_check_ratio,
        "sampler_cpu_s": window.sampler_cpu_s,
        "ok": end - start >= 10 and abs(ours / theirs - 1) <= ENERGY_LIMIT,
    }


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    rows: dict[str, list[dict]] = {"time": [], "energy": []}
    for name, build in steps().items():
        step = build()
        rows["time"].append(time_row(name, step))
        print(rows["time"][-1], flush=True)
        if name.startswith(("matmul", "resnet50-train", "bert")):
            rows["energy"].append(energy_row(name, step, uuid))
            print(rows["energy"][-1], flush=True)
        del step
        torch.cuda.empty_cache()
    if options.json:
        facts = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
        options.json.write_text(json.dumps({"schema": "joulemark/agreement/1", **facts, **rows}, indent=1))
    bad = [row["case"] for table in rows.values() for row in table if not row["ok"]]
    print("disagreement: " + ", ".join(bad) if bad else "all agree")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
