"""Measures the held-out workloads with their counters, for `joulemark energy`.

python bench_energy/measure_held_out.py --out results/nvidia-h200/energy-measurements.json [--only WORD] [--limit 500]

Goes on with a file that is there: what it already holds is not measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from joulemark.collect.counters import open_counters

from bench_energy.held_out import HELD_OUT
from joulemark.collect.power import open_power
from joulemark.device.gpu import probe_gpus
from joulemark.energy.calibrate import SampledMeter
from joulemark.energy.validation import MEASUREMENTS_SCHEMA
from joulemark.energy.workload_windows import Facts, Stepper, measure_workload
from joulemark.errors import JoulemarkError


def main() -> int:
    """Measure what the file lacks; exit 3 when time was up first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=500.0)
    args = parser.parse_args()
    begin = time.perf_counter()
    gpu = probe_gpus(os.environ).visible[0].gpu
    document = {"schema": MEASUREMENTS_SCHEMA, "gpu": gpu.name, "gpu_uuid": gpu.uuid, "rows": [], "failed": {}}
    if args.out.exists():
        document = json.loads(args.out.read_text(encoding="utf-8"))
    ladder = open_counters(gpu.uuid, "cuda:0")
    print(f"counters: {ladder.tier}; refused: {ladder.refused}")
    done = {row["workload"] for row in document["rows"]}
    with open_power(gpu.uuid) as power:
        for one in HELD_OUT:
            if one.name in done or args.only not in one.name:
                continue
            if time.perf_counter() - begin > args.limit - 15:
                return 3
            try:
                step = one.build("cuda:0", False)
                stepper = Stepper(step, torch.cuda.synchronize)
                facts = Facts(one.name, one.kind, one.dtype)
                row = measure_workload(facts, stepper, SampledMeter(power), ladder.source, gpu.power_limit_w)
                document["rows"].append(row)
                watts = row["measured_j"] / row["window_s"]
                print(
                    f"{one.name}: {watts:.0f} W{', capped' if row['capped'] else ''}, {len(row['counters'])} counters"
                )
                del stepper, step
            except (JoulemarkError, RuntimeError) as error:
                document["failed"][one.name] = f"{type(error).__name__}: {error}"
                print(f"{one.name}: {document['failed'][one.name]}")
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            gc.collect()
            torch.cuda.empty_cache()
    ladder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
