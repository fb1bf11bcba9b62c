"""What the driver of a large sweep holds and how fast it is: measured here on a small one, extrapolated by its slopes.

Run by hand: ``python tests/oracle/simulate_cluster.py [--gpus 10000] [--cases 1000]``. The driver is the real one
(pytest, the dispatcher, the store); only the cluster is simulated: every seat answers at once with the measurements of
a committed record. Nothing is timed on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from joulemark.device.gpu import Gpu, Inventory, VisibleGpu
from joulemark.measure.dispatch import Dispatcher, Event, Job, Seat
from joulemark.records import Environment, Record
from joulemark.store import RunWriter, read_run

ROOT = Path(__file__).parents[2]
CONFTEST = """
import sys
sys.path.insert(0, {folder!r})
from simulate_cluster import SimulatedCluster
from joulemark.plugin import cluster
cluster.open_cluster = lambda config, options: SimulatedCluster({seats})
"""
BENCHES = """
import pytest
@pytest.mark.parametrize("n", range({cases}))
def bench_one(bench, n):
    bench(abs, n)
"""
REPORT = """
import sys, time
sys.path.insert(0, {folder!r})
import pytest
code = pytest.main(sys.argv[1:])
status = open("/proc/self/status").read()  # getrusage would count the process that this one was forked from
peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024
print("DRIVER", code, time.process_time(), peak)
"""


def sample_records() -> list[Record]:
    """Records of the largest committed sweep."""
    file = max((ROOT / "results").glob("*/sweep-*.jsonl"), key=lambda path: path.stat().st_size)
    return [one for one in read_run(file).records if one.outcome in ("ok", "flagged")]


class SimulatedCluster:
    """Seats that answer at once, with the measurements of one committed record.

    Args:
        seats: how many GPUs.
    """

    no_gpu = None
    problems: tuple[str, ...] = ()

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self._gpus = [Gpu(f"GPU-{n:08d}", "NVIDIA H200", f"00000000:{n:02X}:00.0") for n in range(seats)]
        self._events = deque(Event(Seat(gpu.uuid, gpu.uuid, gpu.slug, "node")) for gpu in self._gpus)
        self._reply = _reply_of(sample_records()[0])

    def inventory(self) -> Inventory:
        visible = tuple(VisibleGpu(gpu, n, True, "simulated") for n, gpu in enumerate(self._gpus))
        return Inventory(tuple(self._gpus), visible, simulated=True)

    def keep(self, wanted: Callable[[Seat], bool]) -> None:
        self._events = deque(event for event in self._events if wanted(event.seat))

    def start(self, seat: Seat, job: Job, attempt: int) -> None:
        self._events.append(Event(seat, job, attempt, {**self._reply, "nodeid": job.nodeid, "gpu_uuid": seat.uuid}))

    def wait(self) -> Iterator[Event]:
        while self._events:
            yield self._events.popleft()

    def close(self, *, at_once: bool = False) -> None:
        self._events.clear()


def _reply_of(record: Record) -> dict:
    """What a measuring process would have said for a record."""
    told = record.to_json()
    measured = {
        "name": "steady", "values": told["metrics"], "samples": told["samples"], "missing": {}, "findings": [],
        "conditions": told["conditions"], "windows_utc": told["measured_windows_utc"], "process": 0,
    }  # fmt: skip
    return {
        "outcome": "ok", "reason": None, "measurements": [measured], "findings": told["findings"],
        "window_utc": told["window_utc"], "environment": {"facts": {"node": 1}, "tiers": {}, "notes": {}},
    }  # fmt: skip


def drive(cases: int, seats: int) -> tuple[float, float]:
    """CPU time (s) and peak memory (B) of a driver process over so many cases."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = str(Path(__file__).parent)
        (folder / "conftest.py").write_text(CONFTEST.format(folder=here, seats=seats))
        (folder / "bench_many.py").write_text(BENCHES.format(cases=cases))
        (folder / "driver.py").write_text(REPORT.format(folder=here))
        options = ["--bench", "--bench-cluster=ray", "--bench-gpus=auto", "--bench-results=results", "-qq"]
        plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        done = subprocess.run(
            [sys.executable, "driver.py", *options, *plugins],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        told = next((line.split() for line in done.stdout.splitlines() if line.startswith("DRIVER")), None)
        (file,) = folder.rglob("sweep-*.jsonl")
        assert told is not None, done.stdout[-2000:] + done.stderr[-2000:]
        assert len(read_run(file).records) == cases
        return float(told[2]), float(told[3])


def dispatch(seats: int, per_seat: int) -> tuple[float, float]:
    """Seconds per case of the dispatcher alone, and bytes that it holds per queued case."""
    tracemalloc.start()
    jobs = [Job(f"bench_many.py::bench_one[{n}]", f"{n:016x}", "nvidia-h200") for n in range(seats * per_seat)]
    cluster = SimulatedCluster(seats)
    dispatcher = Dispatcher(cluster, jobs)
    held = tracemalloc.get_traced_memory()[0] / len(jobs)
    tracemalloc.stop()
    begin = time.perf_counter()
    answered = sum(len(together) for together in dispatcher.run())
    spent = time.perf_counter() - begin
    assert answered == len(jobs)
    return spent / answered, held


def store(records: list[Record], together: int) -> float:
    """Records per second that reach the disk, so many with each wait for it."""
    with (
        tempfile.TemporaryDirectory(dir=ROOT) as folder,
        RunWriter(Path(folder) / "r.jsonl", "r", Environment({}), 0.0) as out,
    ):
        out.write(records[0])
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < 2.0:
            with out.together():
                for record in records[:together]:
                    out.write(record)
                    count += 1
        return count / (time.perf_counter() - begin)


def bytes_in_memory(records: list[Record], samples: bool) -> float:
    """Bytes of a record as Python holds it."""
    lines = [json.dumps(one.to_json()) for one in records]
    tracemalloc.start()
    held = [Record.from_json(json.loads(line)) for line in lines]
    if not samples:
        held = [replace(one, samples={}) for one in held]
    size = tracemalloc.get_traced_memory()[0] / len(held)
    tracemalloc.stop()
    return size


def ray_wait(refs: int) -> float | None:
    """Seconds of one look at so many calls under way; None without ray."""
    try:
        import ray
    except ImportError:
        return None
    ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False, object_store_memory=80 * 2**20)

    @ray.remote(num_gpus=1)  # no GPU is there: the calls stay under way
    def never() -> None: ...

    pending = [never.remote() for _ in range(refs)]
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        ray.wait(pending, num_returns=len(pending), timeout=0)
        times.append(time.perf_counter() - begin)
    ray.shutdown()
    return median(times)


def main() -> None:
    """Measure, and print what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--case-s", type=float, default=5.0, help="what a case takes on its GPU, in s")
    given = parser.parse_args()
    total = given.gpus * given.cases

    records = sample_records()
    line = median(len(json.dumps(one.to_json(), separators=(",", ":"))) + 1 for one in records)
    whole, slim = bytes_in_memory(records, samples=True), bytes_in_memory(records, samples=False)
    singly, grouped = store(records, 1), store((records * 100)[:100], 100)
    hand_out_s, queued = dispatch(given.gpus, 20)
    small, large = drive(500, 8), drive(2500, 8)
    case_s, case_bytes = ((b - a) / 2000 for a, b in zip(small, large, strict=True))
    look_s = ray_wait(1000)

    rate = given.gpus / given.case_s
    print(f"record: {line:.0f} B in the store, {whole:.0f} B in memory, {slim:.0f} B without samples")
    print(f"store: {singly:.0f} records/s one by one, {grouped:.0f} records/s by the hundred")
    print(f"dispatcher with {given.gpus} seats: {hand_out_s * 1e6:.1f} µs per case, {queued:.0f} B per queued case")
    print(f"driver, all of it: {case_s * 1e3:.2f} ms of CPU time and {case_bytes:.0f} B per case (500 to 2500 cases)")
    if look_s is not None:
        print(f"ray.wait over 1000 calls under way: {look_s * 1e3:.1f} ms")
    print(f"\n{given.gpus} GPUs x {given.cases} cases of {given.case_s:g} s:")
    print(f"  sharing the cases (auto): {given.cases} items a model, {given.cases * case_bytes / 1e6:.0f} MB")
    print(
        f"  each GPU all of them: {total} items, {total * case_bytes / 1e9:.0f} GB, {total * line / 1e9:.0f} GB stored"
    )
    print(f"  answers come at {rate:.0f}/s; this driver takes {1 / case_s:.0f}/s: {total * case_s / 3600:.1f} h")
    print(f"  one driver keeps up with {given.case_s / case_s:.0f} GPUs")


if __name__ == "__main__":
    main()
