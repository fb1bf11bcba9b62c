"""Two sessions started at once on one GPU: does one wait for the other, and are its figures those of a lone run?

Run: ``python tests/gpu/lease.py OUT`` on a machine with a CUDA GPU (about a minute). Writes OUT/lease.json with the
ratio of every figure to the lone run's; exits 1 where a check does not hold.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sessions import CELLS, ROOT, Session, figures, finish, guarded, ratios, span

from joulemark.device.gpu import list_gpus
from joulemark.device.lease import LeaseFolder, claim_of
from joulemark.device.nvml import Nvml

LIMITS = {"device_time_s": 0.02, "power_w": 0.03}
"""How far a figure may be from a lone run's: what two runs of one sweep differ by on a quiet GPU, and a bit of heat."""


def at_once(out: Path, args: list[str], left: float) -> dict[str, Any]:
    """A lone session, then two that begin together."""
    deadline = time.monotonic() + left
    lone = figures(Session("lone", out, args).end(left))
    both = [Session(name, out, args) for name in ("first", "second")]
    records = [one.end(deadline - time.monotonic()) for one in both]
    order = sorted(range(2), key=lambda i: span(records[i])[0])
    gap_s = span(records[order[1]])[0] - span(records[order[0]])[1]
    found = {one.name: ratios(figures(mine), lone) for one, mine in zip(both, records, strict=True)}
    off = [
        f"{name} {cell} {figure} {row[figure]}"
        for name, rows in found.items()
        for cell, row in rows.items()
        for figure, limit in LIMITS.items()
        if row[figure] is None or abs(row[figure] - 1) > limit
    ]
    waited = [line for line in both[order[1]].said.splitlines() if line.startswith("waiting up to")]
    return {
        "lone": lone,
        "over_lone": found,
        "off": off,
        "gap_s": gap_s,
        "waited": waited,
        "checks": {
            "one waited and said for whom": any(f"pid {both[order[0]].process.pid}," in line for line in waited),
            "they did not measure at one time": gap_s > 0,
            "every cell of both has its figures": all(len(rows) == len(lone) for rows in found.values()),
            "no figure differs from the lone run's": not off,
        },
    }


def refused(left: float) -> dict[str, Any]:
    """A session that does not want to wait, while this process holds the GPU."""
    with Nvml() as nvml:
        gpus = list_gpus(nvml)
    lease = LeaseFolder().acquire([claim_of(one, gpus, power=True) for one in gpus], 0, print)
    command = [sys.executable, "-m", "pytest", "--bench", CELLS, "--bench-lease=refuse", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False)
    lease.close()
    named = f"pid {os.getpid()}," in done.stderr
    return {
        "exit": done.returncode,
        "said": done.stderr[-500:],
        "checks": {"it is refused with the holder's name": done.returncode == 4 and named},
    }


def main() -> int:
    """Run both parts within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="resnet50,bert_base")
    parser.add_argument("--batch", default="128")
    parser.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.seconds
    args = [f"--bench-models={given.models}", f"--bench-batch-sizes={given.batch}", "--bench-dtypes=bf16"]
    args += ["-k", "inference"]
    results: dict[str, Any] = {}
    guarded(results, "refused", deadline, refused)
    guarded(results, "at_once", deadline, lambda left: at_once(out, args, left))
    return finish(results, "lease", out / "lease.json")


if __name__ == "__main__":
    sys.exit(main())
