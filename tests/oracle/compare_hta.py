"""Compute, copy and idle time against HolisticTraceAnalysis; where the two differ, says who is right and why.

python tests/oracle/compare_hta.py --hta-python /path/to/venv/bin/python [FILE…]

The other Python needs ``traceinsight``. Without files, the traces of the tests are compared. A plain brute force over
the JSON is the referee. Exit 1 when a difference is not explained, or when the referee is against us.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]

from repeat_trace import load  # noqa: E402 - beside this script

from joulemark.trace import analyse_files  # noqa: E402

TOLERANCE = 1e-3
DATA = Path(__file__).parents[1] / "data" / "trace"
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
FIGURES = ("compute", "copy", "idle")
Figures = dict[str, float]
Event = dict[str, Any]


def ours(path: Path) -> Figures | None:
    """Our figures in s; copy is device time without a computing kernel, as HolisticTraceAnalysis defines it."""
    entry = analyse_files([path])["files"][0]
    if entry["busy_s"] is None:
        return None
    compute = entry["compute_busy_s"]
    return {"compute": compute, "copy": entry["busy_s"] - compute, "idle": entry["span_s"] - entry["busy_s"]}


def theirs(python: str, path: Path, mode: str) -> Figures | str:
    """HolisticTraceAnalysis' figures in s, or why it has none."""
    command = [python, str(Path(__file__).parent / "hta_child.py"), str(path), mode]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        return run.stderr.strip().splitlines()[-1]
    result = json.loads(run.stdout.splitlines()[-1])
    if "error" in result:
        return str(result["error"])
    return {"compute": result["compute_time"], "copy": result["non_compute_time"], "idle": result["idle_time"]}


def _union(events: list[Event]) -> Decimal:
    total, reach = Decimal(0), None
    for event in sorted(events, key=lambda e: e["ts"]):
        start = round(Decimal(event["ts"]), 3)
        end = start + round(Decimal(event["dur"]), 3)
        begin = start if reach is None else max(start, reach)
        total += max(Decimal(0), end - begin)
        reach = end if reach is None else max(reach, end)
    return total


def referee(events: list[Event], is_work: Callable[[Event], bool]) -> Figures:
    """The figures by brute force, in s, for one notion of what is work."""
    work = [e for e in events if e.get("ph") == "X" and e["dur"] >= 0 and is_work(e)]
    other = ("nccl", "Memcpy", "Memset", "Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event")
    kernels = [e for e in work if not e["name"].startswith(other)]
    ends = [round(Decimal(e["ts"]), 3) + round(Decimal(e["dur"]), 3) for e in work]
    span = max(ends) - min(round(Decimal(e["ts"]), 3) for e in work)
    busy, compute = _union(work), _union(kernels)
    micro = {"compute": compute, "copy": busy - compute, "idle": span - busy}
    return {name: float(value) * 1e-6 for name, value in micro.items()}


def _is_device_event(event: Event) -> bool:
    return event.get("cat") in DEVICE


def _has_stream(event: Event) -> bool:
    stream = event.get("args", {}).get("stream", -1)
    return isinstance(stream, int) and stream != -1


def agree(a: Figures, b: Figures) -> bool:
    """Whether all figures agree within the tolerance; what is below a millionth of the span is nothing."""
    nothing = 1e-6 * sum(a.values())
    return all(abs(a[n] - b[n]) <= max(TOLERANCE * max(abs(a[n]), abs(b[n])), nothing) for n in FIGURES)


def verdict(path: Path, python: str, mine: Figures) -> tuple[bool, str]:
    """Whether the two agree or their difference is explained, and the sentence that says so."""
    default = theirs(python, path, "default")
    if isinstance(default, str):
        return True, f"HolisticTraceAnalysis cannot read it: {default}"
    truth = referee(load(path)["traceEvents"], _is_device_event)
    if not agree(mine, truth):
        return False, f"the brute force is against us: {_shown(truth)}"
    if agree(mine, default):
        return True, "agree within 0.1 %"
    exact = theirs(python, path, "exact")
    why = "it rounds every time to whole microseconds and leaves the last ProfilerStep out"
    if isinstance(exact, dict) and agree(mine, exact):
        return (
            True,
            f"we are right, by brute force: by default {why}; without that, it agrees within 0.1 % ({_shown(default)})",
        )
    streams = referee(load(path)["traceEvents"], _has_stream)
    if isinstance(exact, dict) and agree(exact, streams):
        more = "it takes every event with a `stream` argument for device work, also synchronizations and host operators"
        return True, f"we are right, by brute force: {more}, as a brute force with that rule shows ({_shown(exact)})"
    return False, f"NOT EXPLAINED: default {_shown(default)}; exact {exact}"


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {figures[name] * 1e6:.3f} µs" for name in FIGURES)


def main() -> int:
    """Compares the files one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hta-python", required=True, help="a Python with traceinsight")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    small = ("overlap_streams.json", "cuda_graph_replays.json", "driver_launch_and_orphan.json", "full.json")
    files = options.files or [*sorted(DATA.rglob("*.json.gz")), *(DATA / name for name in small)]
    good = True
    for path in files:
        mine = None if path.name == "cut.json.gz" else ours(path)
        if mine is None:
            print(f"{path.name}: nothing to compare (no device events, or cut)")
            continue
        fine, sentence = verdict(path, options.hta_python, mine)
        good &= fine
        print(f"{path.name}: {_shown(mine)}\n    {sentence}")
    print("all agree or are explained" if good else "DIFFERENCES")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
