"""Measures workloads with their counters on a GPU, for `joulemark energy`.

python bench_energy/measure_workloads.py --out results/nvidia-h200/energy-measurements.json
python bench_energy/measure_workloads.py --list splits --out results/nvidia-h200/split-measurements.json

Goes on with a file that is there: what it already holds is not measured again. Exit codes: 0 done, 2 wrong use or no
GPU, 3 time was up first.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench_energy.held_out import HELD_OUT, HeldOut
from bench_energy.splits import SPLITS
from joulemark.collect.power import PowerSampler, open_power
from joulemark.device.gpu import Gpu, probe_gpus
from joulemark.energy.calibrate import SampledMeter
from joulemark.energy.validation import MEASUREMENTS_SCHEMA
from joulemark.energy.workload_windows import Facts, Stepper, measure_workload
from joulemark.errors import ConfigurationError, JoulemarkError

LISTS = {"held_out": HELD_OUT, "splits": SPLITS}
LAST_S = 15.0
"""Time that one workload may take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="F.json")
    parser.add_argument("--list", choices=sorted(LISTS), default="held_out", help="which workloads")
    parser.add_argument("--only", default="", metavar="WORD", help="those with WORD in their name")
    parser.add_argument("--limit", type=float, default=500.0, metavar="S", help="begin no workload after S seconds")
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
    done = {row["workload"] for row in document["rows"]}
    todo = [one for one in LISTS[args.list] if one.name not in done and args.only in one.name]
    counters = importlib.import_module("joulemark.collect.counters")
    ladder = counters.open_counters(gpu.uuid, args.device)
    print(f"{len(todo)} workloads; counters: {ladder.tier}", *map(str, ladder.refused.values()), sep="\n  refused: ")
    try:
        with open_power(gpu.uuid) as power:
            for one in todo:
                if time.perf_counter() - begin > args.limit - LAST_S:
                    return 3
                print(_measure(one, args.device, document, power, ladder.source, gpu), flush=True)
                _write(document, args.out)
    finally:
        ladder.close()
    return 0


def _gpu() -> Gpu:
    inventory = probe_gpus(os.environ)
    if not inventory.visible:
        raise inventory.problem or ConfigurationError("no GPU is visible", "see joulemark env")
    return inventory.visible[0].gpu


def _document(path: Path, gpu: Gpu) -> dict[str, Any]:
    if not path.exists():
        return {"schema": MEASUREMENTS_SCHEMA, "gpu": gpu.name, "gpu_uuid": gpu.uuid, "rows": [], "failed": {}}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != MEASUREMENTS_SCHEMA or document.get("gpu_uuid") != gpu.uuid:
        raise ConfigurationError(f"{path} is of another GPU or no file of measured workloads", "choose another --out")
    return document


def _measure(one: HeldOut, device: str, document: dict[str, Any], power: PowerSampler, recorder: Any, gpu: Gpu) -> str:
    """Add a row, or the reason why there is none; returns a line to print."""
    document["failed"].pop(one.name, None)
    try:
        stepper = Stepper(one.build(device, device == "cpu"), _wait_for(device))
        facts = Facts(one.name, one.kind, one.dtype, one.batch_size, one.batch_size)
        row = measure_workload(facts, stepper, SampledMeter(power), recorder, gpu.power_limit_w)
    except (JoulemarkError, RuntimeError) as error:
        document["failed"][one.name] = f"{type(error).__name__}: {error}"
        return f"{one.name}: {document['failed'][one.name]}"
    document["rows"].append(row)
    capped = ", capped" if row["capped"] else ""
    return f"{one.name}: {row['measured_j'] / row['window_s']:.0f} W{capped}, {len(row['counters'])} counters"


def _wait_for(device: str) -> Any:
    return (lambda: None) if device == "cpu" else torch.cuda.synchronize


def _write(document: dict[str, Any], path: Path) -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
