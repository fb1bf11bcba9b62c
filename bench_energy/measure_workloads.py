"""Measures workloads with their counters on a GPU, for `joulemark energy`.

python bench_energy/measure_workloads.py --out results/nvidia-h200/energy-measurements.json
python bench_energy/measure_workloads.py --list held_out --only gemm --out gemm.json

Goes on with a file that is there: what it already holds is not measured again, what failed comes last. Exit codes: 0
done, 2 wrong use or no GPU, 3 time was up first, 4 the GPU no longer answers this process: start it again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench_energy.held_out import HELD_OUT, HeldOut
from bench_energy.splits import ALL, SPLITS
from joulemark.collect.power import open_power
from joulemark.device.gpu import Gpu, probe_gpus
from joulemark.energy.calibrate import SampledMeter
from joulemark.energy.counting import Counting
from joulemark.energy.validation import MEASUREMENTS_SCHEMA
from joulemark.energy.workload_windows import WINDOW_S, Facts, Stepper, measure_workload
from joulemark.errors import ConfigurationError, JoulemarkError

LISTS = {"held_out": HELD_OUT, "splits": SPLITS, "all": ALL}
LAST_S = 12.0
"""Time that one workload may take."""
EXIT_UNFINISHED, EXIT_LOST = 3, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="F.json")
    parser.add_argument("--list", choices=sorted(LISTS), default="all", help="which workloads (all)")
    parser.add_argument("--only", default="", metavar="WORD", help="those with WORD in their name")
    parser.add_argument("--limit", type=float, default=500.0, metavar="S", help="begin no workload after S seconds")
    parser.add_argument("--window", type=float, default=WINDOW_S, metavar="S", help=f"of each workload ({WINDOW_S:g})")
    parser.add_argument("--device", default="cuda:0", help="as torch calls it")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except JoulemarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    gpu = _gpu()
    document = _document(args.out, gpu)
    todo = _todo(args, document)
    counters = importlib.import_module("joulemark.collect.counters")
    ladder = counters.open_counters(gpu.uuid, args.device)
    print(f"{len(todo)} workloads; counters: {ladder.tier}", *map(str, ladder.refused.values()), sep="\n  refused: ")
    try:
        with open_power(gpu.uuid) as power:
            bench = Bench(args.device, gpu, SampledMeter(power), ladder.source, args.window)
            first = time.perf_counter()
            for number, one in enumerate(todo):
                now = time.perf_counter()
                if now - begin > args.limit - LAST_S:
                    return EXIT_UNFINISHED
                line = bench.measure(one, document)
                _give_memory_back()
                _write(document, args.out)
                left_s = (time.perf_counter() - first) / (number + 1) * (len(todo) - number - 1)
                took_s = time.perf_counter() - now
                print(f"{line}; {took_s:.1f} s, {len(todo) - number - 1} to go, {left_s:.0f} s", flush=True)
                if bench.lost:
                    return EXIT_LOST
    finally:
        ladder.close()
    return 0


def _todo(args: argparse.Namespace, document: dict[str, Any]) -> list[HeldOut]:
    """What the file lacks; what failed before comes last."""
    done = {row["workload"] for row in document["rows"]}
    todo = [one for one in LISTS[args.list] if one.name not in done and args.only in one.name]
    return sorted(todo, key=lambda one: one.name in document["failed"])


def _gpu() -> Gpu:
    inventory = probe_gpus(os.environ)
    if not inventory.visible:
        raise inventory.problem or ConfigurationError("no GPU is visible", "see joulemark env")
    return inventory.visible[0].gpu


def _document(path: Path, gpu: Gpu) -> dict[str, Any]:
    if not path.exists():
        return {
            "schema": MEASUREMENTS_SCHEMA, "gpu": gpu.name, "gpu_uuid": gpu.uuid, "driver": gpu.driver,
            "measured_utc": datetime.now(UTC).isoformat(timespec="seconds"), "rows": [], "failed": {},
        }  # fmt: skip
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != MEASUREMENTS_SCHEMA or document.get("gpu_uuid") != gpu.uuid:
        raise ConfigurationError(f"{path} is of another GPU or no file of measured workloads", "choose another --out")
    return document


@dataclass
class Bench:
    """What measures workloads.

    Args:
        device: as torch calls it.
        gpu: its board.
        meter: of the board.
        recorder: of its counters; None without any.
        window_s: length of a window.
        lost: whether the device no longer answers this process.
    """

    device: str
    gpu: Gpu
    meter: SampledMeter
    recorder: Any
    window_s: float
    lost: bool = False

    def __post_init__(self) -> None:
        self._counting = None if self.recorder is None else Counting(self.recorder)

    def measure(self, one: HeldOut, document: dict[str, Any]) -> str:
        """Add a row, or the reason why there is none; returns a line to print."""
        document["failed"].pop(one.name, None)
        try:
            row = self._row(one)
        except Exception as error:  # one workload must not cost the others
            document["failed"][one.name] = f"{type(error).__name__}: {error}"[:500]
            self.lost = not self._answers()
            return f"{one.name}: {document['failed'][one.name]}"
        document["rows"].append(row)
        capped = ", capped" if row["capped"] else ""
        return f"{one.name}: {row['measured_j'] / row['window_s']:.0f} W{capped}, {len(row['counters'])} counters"

    def _row(self, one: HeldOut) -> dict[str, Any]:
        stepper = Stepper(one.build(self.device, self.device == "cpu"), self._wait)
        facts = Facts(one.name, one.kind, one.dtype, one.batch_size, one.batch_size)
        return measure_workload(facts, stepper, self.meter, self._counting, self.gpu.power_limit_w, self.window_s)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def _answers(self) -> bool:
        try:
            self._wait()
        except RuntimeError:
            return False
        return True


def _give_memory_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
