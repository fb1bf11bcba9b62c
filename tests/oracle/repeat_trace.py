"""Makes a large trace from a real one: repeated, with shifted times, ids and step numbers."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_IDS = ("correlation", "External id", "Ev Idx", "wait_on_cuda_event_record_corr_id")
_STEP = re.compile(r"ProfilerStep#(\d+)")


def load(path: Path) -> dict[str, Any]:
    """A trace as JSON, from a plain or gzip file."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    return json.loads(text.decode("utf-8", "replace"), strict=False)


def _shifted(
    events: list[dict[str, Any]], number: int, period: float, ids: int, steps: int
) -> Iterator[dict[str, Any]]:
    for event in events:
        copy = dict(event)
        copy["ts"] = event["ts"] + number * period
        if "id" in copy:
            copy["id"] = event["id"] + number * ids
        if "args" in copy:
            args = copy["args"] = dict(event["args"])
            for key in _IDS:
                if isinstance(args.get(key), int) and args[key] > 0:
                    args[key] += number * ids
        if "name" in copy and (step := _STEP.fullmatch(copy["name"])):
            copy["name"] = f"ProfilerStep#{int(step.group(1)) + number * steps}"
        yield copy


def repeat(source: Path, target: Path, at_least: int) -> int:
    """Writes a trace of at least so many events in Kineto's layout; returns the number of events."""
    trace = load(source)
    fixed = [e for e in trace["traceEvents"] if e.get("ph") not in ("X", "s", "f") or e.get("cat") == "Trace"]
    timed = [e for e in trace["traceEvents"] if e.get("ph") in ("X", "s", "f") and e.get("cat") != "Trace"]
    first = min(e["ts"] for e in timed)
    period = max(e["ts"] + e.get("dur", 0) for e in timed) - first + 100.0
    ids = 1 + max(max(e.get("id", 0), *(e.get("args", {}).get(k, 0) for k in _IDS)) for e in timed)
    steps = len({e["name"] for e in timed if e.get("cat") == "user_annotation" and _STEP.fullmatch(e["name"])})
    copies = -(-at_least // len(timed))
    for event in fixed:
        if event.get("cat") == "Trace":
            event["dur"] = first - event["ts"] + copies * period
    header = {key: value for key, value in trace.items() if key != "traceEvents"}
    with target.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header, indent=1)[:-2] + ',\n "traceEvents": [\n')
        file.write(",\n".join("  " + json.dumps(event) for event in fixed))
        for number in range(copies):
            for event in _shifted(timed, number, period, ids, steps):
                file.write(",\n  " + json.dumps(event))
        file.write("\n ]\n}\n")
    return len(fixed) + copies * len(timed)


if __name__ == "__main__":
    print(repeat(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
