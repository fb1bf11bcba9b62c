"""Runs ``pytest --bench`` sessions for the scripts beside it and reads what they stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from joulemark.records import Record
from joulemark.store import read_run

ROOT = Path(__file__).parents[2]
CELLS = "bench_inference/bench_zoo.py"
FIGURES = ("device_time_s", "host_time_s", "power_w", "energy_per_item_j", "sm_clock_hz", "throughput_per_s")


class Session:
    """One ``pytest --bench`` with a results folder and a log of its own."""

    def __init__(self, name: str, out: Path, args: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.name, self.folder, self.log = name, out / name, out / f"{name}.log"
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pytest", "--bench", CELLS, f"--bench-results={self.folder}"]
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *args],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.wall_s: float | None = None

    def end(self, limit_s: float) -> list[Record]:
        """Wait for it; its records.

        Raises:
            RuntimeError: it took too long or stored nothing; the message holds the end of its output.
        """
        try:
            self.process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(30)
            raise RuntimeError(f"{self.name} took more than {limit_s:.0f} s: {self.said[-1500:]}") from None
        self.wall_s = time.monotonic() - self.begin
        files = sorted(self.folder.rglob("sweep-*.jsonl"))
        if len(files) != 1:
            raise RuntimeError(
                f"{self.name} (exit {self.process.returncode}) stored {len(files)} files: {self.said[-1500:]}"
            )
        return list(read_run(files[0]).records)

    @property
    def said(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace")


def figures(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Per cell what it measured, on which GPU, and how it ended."""
    return {
        one.nodeid or one.case.label: {
            **{name: one.value(name) for name in FIGURES},
            "gpu_uuid": one.gpu_uuid,
            "outcome": one.outcome,
            "findings": [finding.code for finding in one.findings],
        }
        for one in records
    }


def ratios(new: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per cell and figure new over base; None where one of them was not measured."""
    return {
        cell: {name: row[name] / base[cell][name] if row[name] and base[cell][name] else None for name in FIGURES}
        for cell, row in new.items()
        if cell in base
    }


def span(records: Iterable[Record]) -> tuple[float, float]:
    """From the first case's begin to the last one's end, seconds since the Unix epoch."""
    windows = [one.window_utc for one in records if one.window_utc is not None]
    return min(begin for begin, _ in windows), max(end for _, end in windows)


def overlaps(records: Iterable[Record]) -> list[str]:
    """Cases that were measured on one GPU at one time."""
    windows = sorted((one.gpu_uuid or "", *(one.window_utc or (0.0, 0.0)), one.case.label) for one in records)
    return [f"{a[3]} / {b[3]}" for a, b in pairwise(windows) if a[0] == b[0] and b[1] < a[2]]


def guarded(results: dict[str, Any], name: str, deadline: float, step: Callable[[float], dict[str, Any]]) -> None:
    """Run one step with the seconds that are left; what goes wrong is its result and costs no other step."""
    left = deadline - time.monotonic()
    begin = time.monotonic()
    try:
        results[name] = step(left) if left > 5 else {"skipped": "no time left"}
    except Exception as error:
        results[name] = {"error": f"{type(error).__name__}: {error}"}
    results[name]["wall_s"] = time.monotonic() - begin
    print(f"{name}: {json.dumps(results[name], indent=1)}", flush=True)


def finish(results: dict[str, Any], kind: str, path: Path) -> int:
    """Write everything as a document of a kind; 0 when every check of every step held."""
    checks = {
        f"{step}: {what}": held for step, found in results.items() for what, held in found.get("checks", {}).items()
    }
    broken = [step for step, found in results.items() if "checks" not in found]
    document = {"schema": f"joulemark/{kind}/1", "checks": checks, "broken": broken, **results}
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    for what, held in checks.items():
        print("ok  " if held else "FAIL", what)
    for step in broken:
        print("FAIL", step, results[step])
    return 0 if all(checks.values()) and not broken else 1
