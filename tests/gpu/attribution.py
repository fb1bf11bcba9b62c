"""Counters per kernel without replay on this GPU: three models recorded, Nsight Compute beside them, costs.

Run: ``python tests/gpu/attribution.py OUT --seconds 170`` on a machine with a CUDA GPU. Every part is a process of its
own that leaves its files in ``OUT/PART`` and, behind them, ``done.json``; the same command goes on with what is not
done (``--parts`` chooses). Nothing is analysed there, so that no GPU waits; afterwards, anywhere:

    python tests/gpu/attribution.py OUT --analyse

writes ``OUT/MODEL.json`` (the attribution), ``OUT/MODEL.svg`` and ``OUT/attribution.json`` (totals, costs, and errors
against Nsight Compute). ``--fake`` rehearses all of it without a GPU. Parts:

- ``MODEL-record``: both instruments over steady steps, the same steps without them before, the roofline's references;
- ``MODEL-ncu-kept``, ``MODEL-ncu-flushed``: one step under Nsight Compute, caches as the model leaves them, or flushed
  before each kernel. Each phase of the step is profiled for its share of ``--ncu-seconds`` and then let go.

A recording is expected to take some 30 s (building 5 to 10, opening and proving the passes 5, five windows of 8,000
samples 2.5 each, the references 3, the modules 4), a part with Nsight Compute ``--ncu-seconds`` and 15 to 25 more: in
175 s all three recordings and one of the latter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from joulemark.collect.ncu import profiled_region, run_ncu
from joulemark.errors import JoulemarkError
from joulemark.records import Case
from joulemark.utilization.ncu_csv import Launch, read_export
from joulemark.utilization.refine import joined_name

MODELS = {
    "resnet50": Case("resnet50", "train", "eager", "bf16", 128, "channels_last", "device", "gpu"),
    "mobilenet_v2": Case("mobilenet_v2", "inference", "eager", "bf16", 256, "channels_last", "device", "gpu"),
    "bert_base": Case("bert_base", "train", "eager", "bf16", 32, "contiguous", "device", "gpu"),
}
WINDOWS = {"resnet50": 5, "mobilenet_v2": 3, "bert_base": 5}
NCU_METRICS = (
    "gpu__time_duration.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
)
LONG_S, ERROR, COST, TOTALS = 50e-6, 0.10, 0.05, 0.02
WARM_STEPS = 5
RECORD_S = 20.0
LEAST_S = {"record": 15.0, "ncu": 45.0}
"""No part is begun with less time left."""
UNTIL = {"forward": 0.35, "backward": 0.9, "optimizer": 1.0}
"""Of the time with Nsight Compute, when each phase of a training step is let go; what one leaves is the next one's."""
NCU_AROUND_S = 30.0
"""Of a part with Nsight Compute, for what is not profiled: start, building and warming up the model, reading out."""
AGAIN = ((), ("--careful",), ("--careful", "--beside"))
"""How a recording is tried: as usual, with samples as few and far apart as is known to work, by another process."""


def parts() -> list[str]:
    """All of them, the most telling first."""
    names = [f"{model}-record" for model in MODELS]
    return names + [f"{model}-ncu-{caches}" for caches in ("kept", "flushed") for model in MODELS]


# In the processes that measure.


def build(model: str) -> Any:
    """A step of the zoo."""
    from joulemark.workloads import zoo

    case = MODELS[model]
    return zoo.find(case.workload).build(case, "cuda:0")


def record_part(model: str, folder: Path, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Records a model; with its sampler in another process where the two instruments do not bear each other."""
    from joulemark.measure.attribution import CAREFUL_PACE, PACE, Plan, TorchBench, record

    began, pace = time.perf_counter(), CAREFUL_PACE if options.careful else PACE
    if options.fake:
        bench, step = fake_bench(model)
    else:
        step, bench = build(model), TorchBench("cuda:0", pace=pace, beside=options.beside)
    opened = time.perf_counter()
    plan = Plan(windows=WINDOWS[model], limit_s=min(RECORD_S, max(5.0, 0.6 * seconds - (opened - began))))
    done = record(bench, step, folder, MODELS[model].label, plan, pace)
    windows = [one for one in done.windows if one.role == "steps"]
    return {
        "mode": done.mode,
        "interval_s": pace.interval_s,
        "opened_s": opened - began,
        "recorded_s": time.perf_counter() - opened,
        "in_windows_s": sum(one.seconds or 0.0 for one in windows),
        "steps": sum(one.steps for one in windows),
    }


def ncu_part(model: str, folder: Path, caches: str, seconds: float, ncu_seconds: float, fake: bool) -> dict[str, Any]:
    """One step of a model under Nsight Compute."""
    csv = folder / "ncu.csv"
    ncu = str(fake_ncu(model, folder, caches)) if fake else None
    case = [sys.executable, __file__, str(folder), "--ncu-child", model, "--ncu-seconds", str(ncu_seconds)]
    done = run_ncu(case, csv, seconds, NCU_METRICS, flush_caches=caches == "flushed", ncu=ncu)
    told = folder / "child.json"
    held = json.loads(told.read_text()) if told.exists() else {}
    options = done.command[1 : done.command.index("--log-file")]
    return {"caches": caches, "wall_s": done.wall_s, "options": options, **held}


def ncu_child(model: str, folder: Path, ncu_seconds: float) -> None:
    """Runs one step, each of its phases profiled for its share of the time."""
    import torch

    began = time.perf_counter()
    step = build(model)
    for _ in range(WARM_STEPS):
        step.run()
    torch.cuda.synchronize()
    ready = time.perf_counter()
    cut: list[str] = []
    until = UNTIL if MODELS[model].phase == "train" else {"forward": 1.0}
    clocks: dict[str, threading.Timer] = {}

    def let_go(phase: str) -> None:
        cut.append(phase)
        torch.cuda.profiler.stop()

    def begin(phase: str) -> None:
        for timer in clocks.values():
            timer.cancel()
        torch.cuda.profiler.start()
        left = ready + until[phase] * ncu_seconds - time.perf_counter()
        clocks[phase] = threading.Timer(max(1.0, left), let_go, [phase])
        clocks[phase].start()

    if step.phases is not None:
        step.phases.listener = begin
    with profiled_region():
        if step.phases is None:
            begin("forward")
        step.run()
        torch.cuda.synchronize()
        for timer in clocks.values():
            timer.cancel()
    held = {"cut": cut, "build_s": ready - began, "profiled_s": time.perf_counter() - ready}
    (folder / "child.json").write_text(json.dumps(held))


def run_part(part: str, out: Path, options: argparse.Namespace) -> None:
    """One part in this process, which waits for a line with its seconds once it has imported what it needs."""
    if not options.fake and part.endswith("-record"):
        import torch  # noqa: F401 - no context yet: another part may be measuring
    print("ready", flush=True)
    seconds = float(sys.stdin.readline())
    folder = out / part
    folder.mkdir(parents=True, exist_ok=True)
    model, what = part.split("-", 1)
    began = time.perf_counter()
    try:
        if what == "record":
            found = record_part(model, folder / "recording", seconds, options)
        else:
            profiled = min(options.ncu_seconds, max(5.0, seconds - NCU_AROUND_S))
            found = ncu_part(model, folder, what.removeprefix("ncu-"), seconds, profiled, options.fake)
    except JoulemarkError as error:
        (folder / "failed.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        print(f"{part}: {error}", flush=True)
        sys.exit(1)
    found["part_s"] = time.perf_counter() - began
    (folder / "done.json").write_text(json.dumps(found, indent=1))
    print(f"{part}: {json.dumps(found)}", flush=True)


# In the process that starts them.


def measure(out: Path, options: argparse.Namespace) -> None:
    """Runs parts one after the other until all are done or the time is over; the next one's imports run meanwhile.

    A recording that fails is tried in other ways (:data:`AGAIN`). A part without enough time is passed over.
    """
    end = time.monotonic() + options.seconds
    wanted = [part for part in options.parts if not (out / part / "done.json").exists()]
    waiting = start(wanted[0], out, options) if wanted else None
    for part, following in zip(wanted, [*wanted[1:], None], strict=True):
        current, least_s = waiting, LEAST_S[part.split("-")[1]]
        assert current is not None
        enough = options.fake or end - time.monotonic() > least_s
        if enough:
            go(current, end)
        else:
            current.kill()
            print(f"{part}: no time left", flush=True)
        waiting = None if following is None else start(following, out, options)
        done = not enough or ended(current, part, end)
        for more in AGAIN[1:] if part.endswith("-record") else ():
            if not done and end - time.monotonic() > least_s:
                current = start(part, out, options, *more)
                go(current, end)
                done = ended(current, f"{part} ({' '.join(more)})", end)


def ended(process: subprocess.Popen[str], part: str, end: float) -> bool:
    """Waits for a part; whether it is done."""
    try:
        code = process.wait(max(1.0, end - time.monotonic() - 2))
    except subprocess.TimeoutExpired:
        process.kill()
        code = None
    print(f"{part}: exit {code}, {end - time.monotonic():.0f} s left", flush=True)
    return code == 0


def start(part: str, out: Path, options: argparse.Namespace, *more: str) -> subprocess.Popen[str]:
    """A process for a part, which waits."""
    command = [sys.executable, __file__, str(out), "--part", part, "--ncu-seconds", str(options.ncu_seconds), *more]
    command += ["--fake"] * options.fake
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


def go(process: subprocess.Popen[str], end: float) -> None:
    """Lets a waiting process begin, and tells how many seconds it has."""
    assert process.stdin is not None
    try:
        process.stdin.write(f"{max(1.0, end - time.monotonic() - 3)}\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has died: its exit code says so


# Afterwards, without a GPU.


def analyse(out: Path) -> dict[str, Any]:
    """Attributions of all models that were recorded, and what they are held to."""
    from joulemark.attribution import attribute
    from joulemark.report import attribution_plot, attribution_view, formats
    from joulemark.report.jsonout import dumps

    found: dict[str, Any] = {}
    for model in MODELS:
        folder = out / f"{model}-record" / "recording"
        if not (folder / "recording.json").exists():
            found[model] = {"error": "not recorded"}
            continue
        try:
            document = attribute(folder)
        except JoulemarkError as error:
            found[model] = {"error": f"{type(error).__name__}: {error}"}
            continue
        (out / f"{model}.json").write_text(dumps(document))
        attribution_plot.draw(document, out / f"{model}.svg")
        print(formats.render(attribution_view.tables(document)))
        cost = json.loads((out / f"{model}-record" / "done.json").read_text())
        found[model] = {**held_to(document), "cost": cost, "ncu": {}}
        for caches in ("kept", "flushed"):
            part = out / f"{model}-ncu-{caches}"
            if (part / "done.json").exists():
                found[model]["ncu"][caches] = against_ncu(document, part, cost)
    (out / "attribution.json").write_text(dumps(found))
    return found


def held_to(document: Mapping[str, Any]) -> dict[str, Any]:
    """Totals and cost of one model."""
    told = {name: one["ratio"] for name, one in document["counters"].items() if one["ratio"] is not None}
    slower = document["steps"]["slowdown"]
    return {
        "totals": told,
        "clock_uncertainty_s": max(one["uncertainty_s"] for one in document["clock"]["windows"]),
        "clock_best_s": [one["check"]["best_s"] for one in document["clock"]["windows"]],
        "slowdown": slower,
        "checks": {
            "totals within 2 %": all(abs(ratio - 1) <= TOTALS for ratio in told.values()),
            "at most 5 % slower": slower is not None and slower <= COST,
        },
    }


def against_ncu(document: Mapping[str, Any], part: Path, cost: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of kernels and classes against Nsight Compute, over kernels that both saw equally often in a step."""
    done = json.loads((part / "done.json").read_text())
    launches = read_export(part / "ncu.csv").launches
    counted: dict[str, list[Launch]] = {}
    for one in launches:
        counted.setdefault(joined_name(one.kernel), []).append(one)
    rows = [row for kernel in document["kernels"] if (row := kernel_row(kernel, counted)) is not None]
    long = [row for row in rows if row["mean_s"] >= LONG_S]
    whole = sum(one["time_s"] for one in document["kernels"])
    checks = {  # flushed caches change the work itself: their errors are shown and not held to anything
        "long kernels' DRAM bytes within 10 %": within(by_class(long), "dram_error"),
        "long kernels' tensor activity within 10 %": within(by_class(long), "tensor_error"),
    }
    return {
        **done,
        "launches": len(launches),
        "launches_of_step": document["steps"]["kernels_per_step"],
        "time_compared": sum(row["time_s"] for row in rows) / whole,
        "ratio_of_wall_time": done["wall_s"] / cost["in_windows_s"],
        "ratio_with_reading": done["wall_s"] / cost["recorded_s"],
        "classes": by_class(rows),
        "classes_of_long_kernels": by_class(long),
        "kernels": sorted(rows, key=lambda row: -row["time_s"]),
        "checks": {} if done["caches"] == "flushed" else checks,
    }


def kernel_row(kernel: Mapping[str, Any], counted: Mapping[str, list[Launch]]) -> dict[str, Any] | None:
    """One kernel by both; None where they did not see it equally often."""
    seen = counted.get(joined_name(kernel["name"]), [])
    if not seen or abs(len(seen) - kernel["launches"]) > 0.01 or "dram_read_bytes" not in kernel["counters"]:
        return None
    times = [one.value("gpu__time_duration.sum") or 0.0 for one in seen]
    tensor = [one.value(NCU_METRICS[1]) or 0.0 for one in seen]
    moved = sum((one.value(name) or 0.0) for one in seen for name in NCU_METRICS[2:])
    counters = kernel["counters"]
    return {
        "name": kernel["name"],
        "class": kernel["class"],
        "launches": len(seen),
        "time_s": kernel["time_s"],
        "mean_s": kernel["time_s"] / len(seen),
        "ncu_time_s": sum(times),
        "dram_bytes": sum(counters[name]["value"] for name in ("dram_read_bytes", "dram_write_bytes")),
        "ncu_dram_bytes": moved,
        "tensor": counters["pipe_tensor"]["value"],
        "ncu_tensor": sum(t * u / 100 for t, u in zip(times, tensor, strict=True)) / sum(times) if sum(times) else 0.0,
        "by_level": kernel["by_level"],
    }


def by_class(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sums and relative errors per class. Tensor work is activity × time: the two clocks and times differ."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["class"], []).append(row)
    out = []
    for name, members in groups.items():
        time_s, ncu_s = (sum(row[key] for row in members) for key in ("time_s", "ncu_time_s"))
        moved, ncu_moved = (sum(row[key] for row in members) for key in ("dram_bytes", "ncu_dram_bytes"))
        tensor = sum(row["tensor"] * row["time_s"] for row in members)
        ncu_tensor = sum(row["ncu_tensor"] * row["ncu_time_s"] for row in members)
        entry = {
            "class": name,
            "kernels": len(members),
            "time_s": time_s,
            "ncu_time_s": ncu_s,
            "dram_bytes": moved,
            "ncu_dram_bytes": ncu_moved,
            "dram_error": moved / ncu_moved - 1 if ncu_moved else None,
            "tensor": tensor / time_s,
            "ncu_tensor": ncu_tensor / ncu_s if ncu_s else None,
            "tensor_error": tensor / time_s / (ncu_tensor / ncu_s) - 1
            if ncu_tensor / max(ncu_s, 1e-12) > 0.01
            else None,
            "tensor_work_error": tensor / ncu_tensor - 1 if ncu_tensor / max(ncu_s, 1e-12) > 0.01 else None,
        }
        out.append(entry)
    return sorted(out, key=lambda entry: -entry["time_s"])


def within(classes: Iterable[Mapping[str, Any]], error: str) -> bool:
    """Whether all classes that have an error keep it."""
    known = [abs(one[error]) for one in classes if one[error] is not None]
    return bool(known) and max(known) <= ERROR


# The rehearsal.


def fake_bench(model: str) -> tuple[Any, Any]:
    """A known run in place of a model."""
    from joulemark.synthetic_run import SyntheticBench, SyntheticRun
    from joulemark.workloads.base import Step

    return SyntheticBench(SyntheticRun(fake_kernels(model), steps=12)), Step(lambda: time.sleep(2e-3))


def fake_kernels(model: str) -> list[Any]:
    """Kernels of the known run."""
    import numpy as np

    from joulemark.synthetic_run import SyntheticKernel

    rng = np.random.default_rng(sum(model.encode()))
    kinds = (
        ("void sm90_xmma_gemm_bf16(int)", 120e-6),
        ("void at::elementwise_kernel<4>(int)", 60e-6),
        ("bn_fw", 30e-6),
    )
    kernels = []
    for name, length in kinds * 4:
        rates = {"dram_read_bytes": 1e12, "dram_write_bytes": 5e11, "pipe_tensor": 0.6 if "gemm" in name else 0.0}
        kernels.append(SyntheticKernel(name, length * rng.uniform(0.8, 1.2), rates))
    return kernels


def fake_ncu(model: str, folder: Path, caches: str) -> Path:
    """A program that writes an export of the known run as ``ncu`` would."""
    more = 1.3 if caches == "flushed" else 1.02
    lines = ['"ID","Process ID","Kernel Name","Device",' + ",".join(f'"{name}"' for name in NCU_METRICS)]
    lines.append('"","","","","ns","%","byte","byte"')
    for number, one in enumerate(fake_kernels(model)):
        read, written = (one.rates[name] * one.length_s * more for name in ("dram_read_bytes", "dram_write_bytes"))
        cells = (number, 1, one.name, 0, one.length_s * 1e9, 100 * one.rates["pipe_tensor"], read, written)
        lines.append(",".join(f'"{cell}"' for cell in cells))
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n"
        f"Path(sys.argv[sys.argv.index('--log-file') + 1]).write_text({chr(10).join(lines)!r} + '\\n')\n"
    )
    path.chmod(0o755)
    return path


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--ncu-seconds", type=float, default=45.0)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=parts())
    parser.add_argument("--analyse", action="store_true")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--careful", action="store_true", help="fewer samples, further apart")
    parser.add_argument("--beside", action="store_true", help="PM sampling by another process")
    parser.add_argument("--part")
    parser.add_argument("--ncu-child")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts()):
        parser.error(f"no parts are called {sorted(unknown)}; there are {', '.join(parts())}")
    if options.ncu_child:
        ncu_child(options.ncu_child, options.out, options.ncu_seconds)
    elif options.part:
        run_part(options.part, options.out, options)
    elif options.analyse:
        found = analyse(options.out)
        print(json.dumps({model: summary(one) for model, one in found.items()}, indent=1))
        return 0 if all(all(checks_of(one)) for one in found.values()) else 1
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options.out, options)
    return 0


def checks_of(found: Mapping[str, Any]) -> list[bool]:
    """All checks of a model."""
    if "error" in found:
        return [False]
    return [*found["checks"].values(), *(ok for one in found["ncu"].values() for ok in one["checks"].values())]


def summary(found: Mapping[str, Any]) -> Any:
    """A model's figures without its tables."""
    if "error" in found:
        return found
    short = {key: found[key] for key in ("checks", "slowdown", "clock_uncertainty_s")}
    short["totals"] = median(found["totals"].values())
    for caches, one in found["ncu"].items():
        short[caches] = {
            key: one[key] for key in ("checks", "wall_s", "ratio_of_wall_time", "time_compared", "launches")
        }
    return short


if __name__ == "__main__":
    sys.exit(main())
