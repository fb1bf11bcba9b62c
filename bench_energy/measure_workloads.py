"""Measures workloads with their counters on a GPU, for `joulemark energy`.

python bench_energy/measure_workloads.py --out results/nvidia-h200/energy-measurements.json
python bench_energy/measure_workloads.py --list held_out --only gemm --out gemm.json
python bench_energy/measure_workloads.py --models my_models:mlp --phase train --batch-sizes 8:64 --out mine.json

First the energy of all, then the counters of all: counting raises the power of this process's idle board. Goes on with
a file that is there: what it already holds is not measured again, what failed comes last. Exit codes: 0
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench_energy.held_out import ADDED, FIRST, HeldOut, Step, own
from bench_energy.operand_bits import KINDS, memory_bits
from bench_energy.splits import ALL, SPLITS
from joulemark.argument_types import sizes
from joulemark.collect.power import open_power
from joulemark.device.gpu import Gpu, probe_gpus
from joulemark.energy.calibrate import SampledMeter
from joulemark.energy.counting import Counting
from joulemark.energy.validation import MEASUREMENTS_SCHEMA
from joulemark.energy.workload_windows import WINDOW_S, Facts, Idle, Stepper, measure_energy, weigh_idle, with_counters
from joulemark.errors import ConfigurationError, JoulemarkError
from joulemark.plugin.options import DTYPES, MODES


def taking_turns(*lists: Sequence[HeldOut]) -> tuple[HeldOut, ...]:
    """All of several lists, each at its own pace: whatever a broken-off run has measured holds all of them."""
    placed = [((i + 0.5) / len(one), number, it) for number, one in enumerate(lists) for i, it in enumerate(one)]
    return tuple(it for _, _, it in sorted(placed, key=lambda place: place[:2]))


LISTS = {"held_out": taking_turns(FIRST, ADDED), "splits": SPLITS, "all": ALL}
LAST_S = 4.0
"""Time that most workloads take."""
COOL_S = 1.0
"""Before the idle board is weighed for comparison."""
IDLE_EVERY = 3
"""Workloads after which the idle board is weighed again: some ten seconds."""
EXIT_UNFINISHED, EXIT_LOST = 3, 4


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, required=True, metavar="F.json")
    found.add_argument("--list", choices=sorted(LISTS), default="all", help="which workloads (all)")
    found.add_argument("--models", type=_words, metavar="NAMES", help="instead: the zoo's, or your pkg.mod:factory")
    found.add_argument(
        "--phase", default="inference", help="of --models: inference, train, prefill, decode (inference)"
    )
    found.add_argument("--dtype", default="bf16", choices=DTYPES, help="of --models (bf16)")
    found.add_argument("--mode", default="eager", choices=MODES, help="of --models (eager)")
    found.add_argument("--batch-sizes", type=sizes, default=(1,), metavar="SIZES", help="of --models (1)")
    found.add_argument("--only", default="", metavar="WORD", help="those with WORD in their name")
    found.add_argument("--limit", type=float, default=500.0, metavar="S", help="begin no workload after S seconds")
    found.add_argument("--window", type=float, default=WINDOW_S, metavar="S", help=f"of each workload ({WINDOW_S:g})")
    found.add_argument("--keep", type=float, default=0.0, metavar="S", help="of the limit, for the counters (0)")
    found.add_argument("--energy-only", action="store_true", help="count nothing")
    found.add_argument("--device", default="cuda:0", help="as torch calls it")
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())


def wanted(args: argparse.Namespace) -> list[HeldOut]:
    """The workloads that the command line names.

    Raises:
        ConfigurationError: a model that there is not, or without that phase.
    """
    if args.models is None:
        found: Sequence[HeldOut] = LISTS[args.list]
    else:
        cells = [(model, args.phase, args.dtype, size) for model in args.models for size in args.batch_sizes]
        found = [own(*cell, args.mode) for cell in cells]
    return [one for one in found if args.only in one.name]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file lacks."""
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except JoulemarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    end = time.perf_counter() + args.limit
    wanted(args)  # a wrong name is refused before anything is opened
    gpu = _gpu()
    document = _document(args.out, gpu)
    todo = _todo(args, document)
    with open_power(gpu.uuid) as power:
        bench = Bench(args.device, gpu, SampledMeter(power), args.window)
        tasks = [Task("energy", one, bench.weigh) for one in todo if _row_of(document, one) is None]
        code = _work(tasks, bench, document, args.out, end - args.keep)
        if code == EXIT_LOST or args.energy_only:
            return code
        counted = _counted(args, bench, document, end)
    return code or counted


def _counted(args: argparse.Namespace, on: Bench, document: dict[str, Any], end: float) -> int:
    """Counters, last of all: from the first sample on an idle board draws more, until this process ends."""
    lacking = [one for one in wanted(args) if _lacks_counters(document, one)]
    if not lacking:
        return 0
    if time.perf_counter() > end - LAST_S:
        return EXIT_UNFINISHED
    idle = document.setdefault("idle", {})
    time.sleep(COOL_S)
    idle["before_counters_w"] = weigh_idle(on.meter).power_w
    counters = importlib.import_module("joulemark.collect.counters")
    ladder = counters.open_counters(on.gpu.uuid, args.device, memory_requests=True)
    print(f"{len(lacking)} to count by {ladder.tier}", *map(str, ladder.refused.values()), sep="\n  refused: ")
    if ladder.source is None:
        return EXIT_UNFINISHED
    try:
        idle["after_counters_w"] = weigh_idle(on.meter).power_w
        on.counting = Counting(ladder.source)
        return _work([Task("counters", one, on.count) for one in lacking], on, document, args.out, end)
    finally:
        ladder.close()


@dataclass(frozen=True)
class Task:
    """One thing to do of a workload.

    Args:
        name: of what is done.
        one: the workload.
        run: does it to the document; returns a line to print.
    """

    name: str
    one: HeldOut
    run: Callable[[HeldOut, dict[str, Any]], str]


def _work(tasks: Sequence[Task], on: Bench, document: dict[str, Any], out: Path, end: float) -> int:
    """One task after the other, each on disk before the next, while there is time."""
    print(f"{len(tasks)} workloads", flush=True)
    first = time.perf_counter()
    for number, task in enumerate(tasks):
        now = time.perf_counter()
        if now > end - LAST_S:
            return EXIT_UNFINISHED
        line = on.attempt(task, document)
        _give_memory_back()
        _write(document, out)
        left_s = (time.perf_counter() - first) / (number + 1) * (len(tasks) - number - 1)
        took_s = time.perf_counter() - now
        print(f"{line}; {took_s:.1f} s, {len(tasks) - number - 1} to go, {left_s:.0f} s", flush=True)
        if on.lost:
            return EXIT_LOST
    return 0


def _todo(args: argparse.Namespace, document: dict[str, Any]) -> list[HeldOut]:
    """What the file lacks; what failed before comes last."""
    return sorted(wanted(args), key=lambda one: one.name in document["failed"])


def _row_of(document: dict[str, Any], one: HeldOut) -> dict[str, Any] | None:
    return next((row for row in document["rows"] if row["workload"] == one.name), None)


def _lacks_counters(document: dict[str, Any], one: HeldOut) -> bool:
    row = _row_of(document, one)
    return row is not None and not row["counters"]


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
        window_s: length of a window.
        counting: of its counters, once they are open.
        lost: whether the device no longer answers this process.
        weighed: workloads so far.
        idle: the idle board, as weighed last.
    """

    device: str
    gpu: Gpu
    meter: SampledMeter
    window_s: float
    counting: Counting | None = None
    lost: bool = False
    weighed: int = 0
    idle: Idle | None = None

    def attempt(self, task: Task, document: dict[str, Any]) -> str:
        """Do a task, or note why it failed; returns a line to print."""
        name = task.one.name
        document["failed"].pop(name, None)
        try:
            return f"{name}: {task.run(task.one, document)}"
        except Exception as error:  # one workload must not cost the others
            document["failed"][name] = f"{task.name}: {type(error).__name__}: {error}"[:500]
            self.lost = not self._answers()
            return f"{name}: {document['failed'][name]}"

    def weigh(self, one: HeldOut, document: dict[str, Any]) -> str:
        """Add a row with the energy of a window."""
        facts = Facts(one.name, one.kind, one.dtype, one.batch_size, one.batch_size)
        step = self._build(one)
        stepper = Stepper(step, self._wait)
        if self.weighed % IDLE_EVERY == 0:
            self.idle = weigh_idle(self.meter)
        self.weighed += 1
        row = measure_energy(facts, stepper, self.meter, self.gpu.power_limit_w, self.window_s, self.idle)
        row["memory_bits"] = memory_bits(step) if one.kind in KINDS else None
        document["rows"].append(row)
        return f"{row['measured_j'] / row['window_s']:.0f} W{', capped' if row['capped'] else ''}"

    def count(self, one: HeldOut, document: dict[str, Any]) -> str:
        """Give a row its counters."""
        if self.counting is None:
            raise ConfigurationError("no counters are open", "open them first")
        at = next(i for i, row in enumerate(document["rows"]) if row["workload"] == one.name)
        row = with_counters(document["rows"][at], Stepper(self._build(one), self._wait), self.counting)
        document["rows"][at] = row
        return f"{len(row['counters'])} counters"

    def _build(self, one: HeldOut) -> Step:
        return one.build(self.device, self.device == "cpu")

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
