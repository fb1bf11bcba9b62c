"""Speed and memory of the trace analysis, alone over sizes and against HolisticTraceAnalysis on one file.

python tests/oracle/trace_speed.py [--hta-python PYTHON] [--events 100000 1000000 5000000] [--work FOLDER]

Each measurement runs in a fresh process, which reports its own wall time (imports left out) and peak resident memory
(all of the process). The files repeat a real trace with shifted times and ids. Exit 1 when a bar is missed:
ten times faster with a quarter of the memory, and time linear in events within a factor of two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from repeat_trace import repeat  # noqa: E402 - beside this script

SOURCE = HERE.parent / "data" / "trace" / "hta" / "ns_resolution_trace.json.gz"

OURS = """
import json, resource, sys, time
from pathlib import Path
from joulemark.trace import analyse_files
begin = time.perf_counter()
entry = analyse_files([Path(sys.argv[1])])["files"][0]
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "events": entry["events"], "kernels": entry["kernels"]}))
"""


def measured(command: list[str], **environment: str) -> dict[str, Any]:
    """The JSON line that a fresh process prints."""
    run = subprocess.run(command, capture_output=True, text=True, env=environment or None, check=True)
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def _line(who: str, result: dict[str, Any]) -> str:
    return f"{who:<12} {result['seconds']:8.2f} s  {result['peak_bytes'] / 1e6:8.0f} MB peak"


def main() -> int:
    """Measures, prints, and says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hta-python", help="a Python with traceinsight")
    parser.add_argument("--events", nargs="+", type=int, default=[100_000, 1_000_000, 5_000_000])
    parser.add_argument("--against", type=int, default=1_000_000, help="size of the file for the comparison")
    parser.add_argument("--work", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    good, per_event = True, []
    for size in options.events:
        path = options.work / f"trace_speed_{size}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        repeat(SOURCE, path, size)
        mine = measured([sys.executable, "-c", OURS, str(path)], PYTHONPATH=str(HERE.parents[1] / "src"))
        per_event.append(mine["seconds"] / mine["events"])
        what = f"{mine['events']} events, {mine['kernels']} kernels, {path.stat().st_size / 1e6:.0f} MB"
        print(f"{what}: {per_event[-1] * 1e6:.2f} µs an event")
        print(_line("joulemark", mine), flush=True)
        if options.hta_python and size == options.against:
            theirs = measured([options.hta_python, str(HERE / "hta_child.py"), str(path), "default"])
            speed, memory = theirs["seconds"] / mine["seconds"], mine["peak_bytes"] / theirs["peak_bytes"]
            print(_line("HTA", theirs))
            print(f"{speed:.1f} times faster, {memory:.3f} of the memory (bars: 10 and 0.25)")
            good &= speed >= 10 and memory <= 0.25
        path.unlink()
    linear = max(per_event) / min(per_event)
    print(f"time per event varies by a factor of {linear:.2f} over sizes (bar: 2)")
    return 0 if good and linear <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
