"""Several GPUs of one host: is ``-n auto`` faster and as right as one GPU, and does every figure belong to its GPU?

Run: ``python tests/gpu/several.py OUT`` on a host with two or more CUDA GPUs (about two minutes). Writes
OUT/several.json; exits 1 where a check does not hold.

- ``spread``: the same cells on one GPU, then over all of them; speed-up, and the ratio of every figure.
- ``each``: the same cells on each GPU at once; how the boards differ in clock, power and throughput.
- ``reversed``, ``by_uuid``: one GPU chosen by ``CUDA_VISIBLE_DEVICES`` in reverse order and by UUID; it works, the
  others stay idle, and the power on the record is that of the one that worked.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from sessions import Session, figures, finish, guarded, overlaps, ratios, span

from joulemark.device.gpu import Gpu, list_gpus
from joulemark.device.nvml import Nvml, read_or_none
from joulemark.records import Record

TIME_LIMIT, POWER_LIMIT, IDLE_UTILIZATION, IDLE_RISE_W = 0.03, 0.1, 0.05, 15.0
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpus() -> list[Gpu]:
    """The boards of this host, in bus order."""
    with Nvml() as nvml:
        return sorted(list_gpus(nvml), key=lambda gpu: gpu.pci_bus_id or "")


def spread(out: Path, args: list[str], left: float) -> dict[str, Any]:
    """One GPU against all."""
    deadline = time.monotonic() + left
    alone = Session("alone", out, [*args, "-n0", "--bench-gpus=auto"], ORDER)
    one = alone.end(left)
    workers = Session("workers", out, [*args, "-n", "auto"], ORDER)
    many = workers.end(deadline - time.monotonic())
    found = ratios(figures(many), figures(one))
    times = [row["device_time_s"] or row["host_time_s"] for row in found.values()]
    assert alone.wall_s is not None
    assert workers.wall_s is not None
    measuring = [end - begin for begin, end in (span(one), span(many))]
    return {
        "alone": figures(one),
        "workers": figures(many),
        "over_alone": found,
        "wall_s_alone": alone.wall_s,
        "wall_s_workers": workers.wall_s,
        "speed_up_whole": alone.wall_s / workers.wall_s,
        "speed_up_without_start": measuring[0] / measuring[1],
        "median_time_ratio": median(times),
        "checks": {
            "the same cells": {record.case_id for record in one} == {record.case_id for record in many},
            "every GPU worked": len({record.gpu_uuid for record in many}) == len(gpus()),
            "no GPU measured two cases at once": overlaps(many) == [],
            "faster": measuring[0] / measuring[1] > 1.3,
            f"times within {TIME_LIMIT:.0%} (median cell)": abs(median(times) - 1) <= TIME_LIMIT,
        },
    }


def each(out: Path, args: list[str], left: float) -> dict[str, Any]:
    """Every cell on every GPU."""
    records = Session("each", out, [*args, "-n", "auto", "--bench-gpus=all"], ORDER).end(left)
    by_gpu: dict[str, dict[str, Record]] = {}
    for record in records:
        case = record.case
        cell = f"{case.workload}-{case.phase}-{case.dtype}-b{case.batch_size}"
        by_gpu.setdefault(record.gpu_uuid or "", {})[cell] = record
    first, *others = by_gpu
    table = {
        cell: {
            name: [by_gpu[uuid][cell].value(name) for uuid in by_gpu if cell in by_gpu[uuid]]
            for name in ("sm_clock_hz", "power_w", "throughput_per_s", "device_time_s", "energy_per_item_j")
        }
        for cell in by_gpu[first]
    }
    return {
        "gpus": list(by_gpu),
        "table": table,
        "checks": {
            "every GPU measured every cell": len(by_gpu) == len(gpus())
            and all(set(by_gpu[uuid]) == set(by_gpu[first]) for uuid in others),
            "no GPU measured two cases at once": overlaps(records) == [],
        },
    }


class Watch(threading.Thread):
    """Power and utilization of every GPU, 20 times a second."""

    def __init__(self, uuids: list[str]) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, list[tuple[float, float | None, float | None]]] = {uuid: [] for uuid in uuids}
        self.stopped = threading.Event()

    def run(self) -> None:
        with Nvml() as nvml:
            devices = {uuid: nvml.device(uuid) for uuid in self.seen}
            while not self.stopped.wait(0.05):
                for uuid, device in devices.items():
                    power, used = read_or_none(device.instant_power_w), read_or_none(device.utilization)
                    power = read_or_none(device.average_power_w) if power is None else power
                    self.seen[uuid].append((time.time(), power, used))

    def within(self, uuid: str, begin: float, end: float) -> list[tuple[float | None, float | None]]:
        """What was seen of a GPU between two times."""
        return [(power, used) for at, power, used in self.seen[uuid] if begin <= at <= end]


def chosen(name: str, out: Path, args: list[str], visible: str, expected: str, left: float) -> dict[str, Any]:
    """One GPU by ``CUDA_VISIBLE_DEVICES``; all of them watched."""
    watch = Watch([gpu.uuid for gpu in gpus()])
    watch.start()
    time.sleep(1.0)
    begun = time.time()
    try:
        session = Session(name, out, [*args, "-n0", "--bench-gpus=0"], {**ORDER, "CUDA_VISIBLE_DEVICES": visible})
        (record,) = session.end(left - 1.0)
    finally:
        watch.stopped.set()
        watch.join(5)
    # The last stored windows are those of the power pass and of what follows it; the longest is the power pass.
    begin, end = max(record.measured_windows_utc, key=lambda window: window[1] - window[0])
    seen = {uuid: watch.within(uuid, begin, end) for uuid in watch.seen}
    power = {uuid: _mean([one for one, _ in rows]) for uuid, rows in seen.items()}
    before = {uuid: _mean([one for one, _ in watch.within(uuid, begun - 1.0, begun)]) for uuid in watch.seen}
    others = [uuid for uuid in watch.seen if uuid != expected]
    busiest = {uuid: max((used for _, used in seen[uuid] if used is not None), default=None) for uuid in seen}
    stored, watched = record.value("power_w"), power[expected]
    return {
        "visible": visible,
        "expected": expected,
        "record": figures([record]),
        "watched_power_w": power,
        "power_before_w": before,
        "highest_utilization": busiest,
        "checks": {
            "the GPU that was chosen has the record": record.gpu_uuid == expected,
            "its power is the record's": bool(stored and watched) and abs(stored / watched - 1) <= POWER_LIMIT,
            "the others stayed idle": all(_idle(busiest[uuid], power[uuid], before[uuid]) for uuid in others),
        },
    }


def _mean(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


def _idle(utilization: float | None, power_w: float | None, before_w: float | None) -> bool:
    """Whether a GPU did nothing, as far as its sensors tell; without any of them nobody knows."""
    if utilization is None or power_w is None or before_w is None:
        return False
    return utilization <= IDLE_UTILIZATION and power_w - before_w <= IDLE_RISE_W


def main() -> int:
    """Run all parts within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="resnet50,bert_base")
    parser.add_argument("--batch", default="16,32,64,128")
    parser.add_argument("--seconds", type=float, default=180.0)
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.seconds
    args = [f"--bench-models={given.models}", "--bench-dtypes=bf16", "-k", "inference"]
    every, last = f"--bench-batch-sizes={given.batch}", f"--bench-batch-sizes={given.batch.split(',')[-1]}"
    one = [f"--bench-models={given.models.split(',')[0]}", "--bench-dtypes=bf16", last]
    uuids = [gpu.uuid for gpu in gpus()]
    backwards = ",".join(str(index) for index in reversed(range(len(uuids))))
    results: dict[str, Any] = {}
    guarded(results, "spread", deadline, lambda left: spread(out, [*args, every], left))
    guarded(results, "each", deadline, lambda left: each(out, [*args, last], left))
    guarded(results, "reversed", deadline, lambda left: chosen("reversed", out, one, backwards, uuids[-1], left))
    guarded(results, "by_uuid", deadline, lambda left: chosen("by_uuid", out, one, uuids[-1], uuids[-1], left))
    return finish(results, "several-gpus", out / "several.json")


if __name__ == "__main__":
    sys.exit(main())
