"""What stretches and a lead-in do for the figure of a case, simulated with states that were seen on an H200.

Two things move a short window of steady steps. **Power regulation:** matrix products begin fast and slow down over
some 0.1 s of load, each window in its own way; the stored windows of an A/A trial are cut here in several ways.
**States of seconds:** CUDA graphs of small kernels ran 5 % faster from some moment on; here a process changes its state
now and then, the fast one lasting for times that bracket what was seen.

Usage: ``python tests/oracle/stretches.py AA.jsonl``: a result file with ``device_time_s`` samples of many processes in
windows from the start of the load on, as the trial of November 2026 stored them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from joulemark.records import Record
from joulemark.store import read_run

LEAD_S, CASE_S, DROP, RUNS = 0.08, 4.0, 0.053, 20_000
EARLY_S, LATE_S = 0.09, 0.17


def settling(records: list[Record]) -> dict[str, dict[str, float | None]]:
    """Scatter between windows of the same work, in per cent: whole windows as they were, and cut in three ways."""
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for record in records:
        work = 1 + float(record.case.params.get("added_work", 0.0))
        plain = record.case.label.replace(f"added_work={record.case.params.get('added_work')}-", "")
        for samples in record.samples_by_process("device_time_s") or []:
            times = np.asarray(samples)
            found.setdefault(plain, []).append((np.cumsum(times) - times, times / work))
    return {name: _scatter(windows) for name, windows in found.items()}


def _scatter(windows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float | None]:
    whole = [float(np.median(times)) for _, times in windows]
    long = [(at, times) for at, times in windows if at[-1] + times[-1] > LATE_S]
    early = [float(np.median(times[at < EARLY_S])) for at, times in long]
    late = [float(np.median(times[at >= LEAD_S])) for at, times in long]
    return {"windows": len(whole), "as_stopped": _percent(whole), "long_windows": len(long),
            "first_90_ms": _percent(early), "after_80_ms": _percent(late)}  # fmt: skip


def _percent(medians: list[float]) -> float | None:
    return round(100 * float(np.std(np.log(medians), ddof=1)), 2) if len(medians) > 2 else None


def states(rng: np.random.Generator, fast: float, stays_s: float, stretches: int) -> dict[str, float]:
    """How often the figure of a case is that of the rarer, fast state, and how often the record shows both states.

    Args:
        fast: share of the time that a process is in the fast state.
        stays_s: mean time for which the fast state lasts.
        stretches: spread evenly over the case.
    """
    at = CASE_S * (np.linspace(0.1, 0.95, stretches) if stretches > 1 else np.array([0.15]))
    back, into = 1 / stays_s, fast / (1 - fast) / stays_s
    state = rng.random(RUNS) < fast
    seen = []
    for gap in np.diff(at, prepend=0.0):
        keep = np.exp(-(back + into) * gap)
        state = rng.random(RUNS) < np.where(state, fast + (1 - fast) * keep, fast * (1 - keep))
        seen.append(state)
    count = np.sum(seen, axis=0)
    wrong = 2 * count > stretches
    figure = np.where(wrong, 1 - DROP, 1.0)
    return {"figure_is_fast": round(float(wrong.mean()), 4), "sd_percent": round(100 * float(figure.std()), 2),
            "both_seen": round(float(((count > 0) & (count < stretches)).mean()), 4)}  # fmt: skip


def main(path: str) -> int:
    """Print one JSON document."""
    rng = np.random.default_rng(5)
    simulated = [
        {"share_fast": fast, "stays_s": stays_s, "stretches": stretches, **states(rng, fast, stays_s, stretches)}
        for stays_s in (0.5, 1.0, 3.0, 10.0)
        for fast in (0.07,)
        for stretches in (1, 3, 5)
    ]
    report = {"settling": settling(list(read_run(Path(path)).records)), "states": simulated}
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
