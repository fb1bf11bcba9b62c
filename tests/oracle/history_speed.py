"""A history of 2,000 runs × 200 rows through the command line: is every change found, how fast, and nothing else?

Usage: ``python tests/oracle/history_speed.py [RUNS] [ROWS] [HISTORIES]``, from the root of the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from joulemark.history.changes import find_changes
from tests.history.simulated import drivers_by_run, levels, write_store


def main(runs: int = 2000, rows: int = 200, histories: int = 50) -> int:
    """Print one JSON document of what was found and how long it took."""
    rng = np.random.default_rng(7)
    updates = (round(0.35 * runs), round(0.7 * runs))
    shifts = ((updates[0], 1.04, 1.0), (updates[1], 0.97, 0.5))
    report = {"shifted": _through_files(levels(rng, rows, runs, shifts), drivers_by_run(runs, updates), updates)}
    report["stationary"] = _through_files(levels(rng, rows, runs), drivers_by_run(runs, updates), ())
    began = time.perf_counter()
    alarms = sum(bool(find_changes(levels(rng, rows, runs), seed=seed)) for seed in range(histories))
    report["stationary_histories"] = {"tried": histories, "with_a_change": alarms, "s": time.perf_counter() - began}
    print(json.dumps(report, indent=2))
    good = report["shifted"]["as_it_was"] and report["stationary"]["as_it_was"]
    return 0 if good else 1


def _through_files(times: np.ndarray, drivers: list[str], updates: tuple[int, ...]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        store, cache = Path(folder, "store"), Path(folder, "cache")
        write_store(store, times, drivers)
        size = sum(path.stat().st_size for path in store.iterdir())
        cold, _ = _history(store, cache)
        warm, document = _history(store, cache)
        index = sum(path.stat().st_size for path in cache.rglob("*.sqlite3"))
    found = [(one["run"], one["driver"]) for one in document["changes"]]
    wanted = [(at, {"before": drivers[at - 1], "after": drivers[at]}) for at in updates]
    return {"store_bytes": size, "index_bytes": index, "cold_s": cold, "warm_s": warm, "found": found,
            "ratios": [one["ratio"] for one in document["changes"]], "as_it_was": found == wanted}  # fmt: skip


def _history(store: Path, cache: Path) -> tuple[float, dict]:
    script = "import sys; from joulemark.cli import main; sys.exit(main(sys.argv[1:]))"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, "history", str(store), "--json"],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return time.perf_counter() - began, json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
