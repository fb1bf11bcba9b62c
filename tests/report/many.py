"""Thousands of records that differ: a year of sweeps in one report.

python tests/report/many.py OUT.html [COUNT] writes a page of them and says how long it took.
"""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path

from joulemark.records import Case, Environment, Finding, Record, Run, Value

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def many_records(count: int) -> Run:
    """A run of made-up records: models, formats and modes over ten batch sizes, some flagged, some out of memory."""
    draw = random.Random(7)
    environment = Environment(
        {"driver": "580.1", "gpus": [{"name": "NVIDIA H200", "uuid": "GPU-0"}], "torch": "2.11"},
        {"timing": "cuda_events"},
    )
    records = []
    for number in range(count):
        series, place = divmod(number, len(_BATCHES))
        records.append(_record(series, _BATCHES[place], environment.environment_id, draw))
    return Run("many.jsonl", "ab" * 16, {environment.environment_id: environment}, tuple(records), True, 9e3, 7e3)


def _record(series: int, batch: int, environment_id: str, draw: random.Random) -> Record:
    phase, dtype = ("train", "inference")[series % 2], ("bf16", "fp32")[series // 2 % 2]
    mode = ("eager", "graph", "compile")[series // 4 % 3]
    case = Case(f"model_{series // 12}", phase, mode, dtype, batch, "contiguous", "device", "nvidia-h200")
    if batch == 512 and series % 5 == 0:
        return Record(case, "ab" * 16, "oom", environment_id, reason="out of memory")
    step = 3e-3 * math.hypot(1, batch / 40) * draw.uniform(0.98, 1.02)
    figures = {
        "device_time_s": (step, "s", "cuda_events"), "host_time_s": (1.2 * step, "s", "host_clock"),
        "device_time_graph_s": (step * batch / (batch + 20), "s", "cuda_events"),
        "throughput_per_s": (batch / step, "1/s", "cuda_events"), "power_w": (400.0, "W", "nvml_energy_counter"),
        "energy_per_item_j": (400 * step / batch, "J", "nvml_energy_counter"),
        "peak_memory_bytes": (1e9 + 1e7 * batch, "B", "torch_allocator"),
    }  # fmt: skip
    metrics = {
        name: Value(value, unit, (0.99 * value, 1.01 * value), n=20, tier=tier)
        for name, (value, unit, tier) in figures.items()
    }
    flagged = series % 7 == 0
    finding = Finding("unstable", f"device time varies by {draw.uniform(5, 30):.1f}%", "give it more time", flags=True)
    return Record(
        case, "ab" * 16, "flagged" if flagged else "ok", environment_id, metrics=metrics,
        samples={"host_time_s": [1.2 * step * draw.uniform(0.95, 1.1) for _ in range(20)]},
        findings=(finding,) if flagged else (), notes={"sm_active_fraction": "counters were not asked for"},
    )  # fmt: skip


def main(out: Path, count: int = 10_000) -> None:
    """Write the page and say what it took."""
    from joulemark.report import write_report

    run = many_records(count)
    begin, cpu = time.perf_counter(), time.process_time()
    write_report([run], out)
    wall, used = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{count} records: {wall:.1f} s ({used:.1f} s of CPU), {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
