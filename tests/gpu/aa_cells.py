"""How often does the gate cry wolf on this GPU, and does it find 3 % and 5 % of real work? Writes ``aa.json``.

Eight cheap cells (LeNet-5, ResNet-18, matrix products, elementwise chains) are measured in many fresh processes. A
cell's step repeats its unit of work 100 times; the arms with added work repeat it 103 and 105 times, so that 3 % and
5 % are kernels of the same kind, counted in units and never in seconds.

One process builds all cells and goes through them three times, a stretch of steady steps of each arm at a time; which
arm comes first changes with the process, the cell and the round. The stretches are the harness's own
(:mod:`joulemark.measure.steady`), with lead-in and clock; nothing else is measured, and those of one arm are
seconds of other work apart. That is fair to the gate: what differs between processes differs between the two sides of
every verdict, since the gate is judged on disjoint sets of processes; the arms of one process never meet. It costs a
third of processes that measure one arm each.

``--restless`` adds cells that are known to change their speed, between processes or within one, by more than the gate
is asked to find: a CUDA graph of many tiny kernels, and operands that just fit the L2 cache.

Run: ``python tests/gpu/aa_cells.py --parts PARTS --out results/nvidia-h200`` (about 6 minutes on an H200 for 24
processes). PARTS is a folder outside the checkout: each process leaves one file there; the same command goes on where
it was stopped (``--limit`` stops it by itself, with exit code 3), and writes the records and ``aa.json`` when all are
there. ``--device cpu`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.records import Case, Json, Measurement, Record

if TYPE_CHECKING:
    from joulemark.workloads.base import Step

UNITS = {0.0: 100, 0.03: 103, 0.05: 105}
"""Added work → repetitions of the unit in a step."""

Unit = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """One kind of work.

    Args:
        case: what it is called; for a model of the zoo also how it is built.
        size: of the operands, for what is no model.
    """

    case: Case
    size: int = 0


def _zoo(name: str, mode: str, dtype: str, batch: int) -> Cell:
    return Cell(Case(name, "inference", mode, dtype, batch, "contiguous", "device"))


def _operation(name: str, dtype: str, size: int) -> Cell:
    return Cell(Case(f"{name}-{size}", dtype=dtype), size)


CELLS = (
    _zoo("lenet5", "graph", "fp32", 256),
    _zoo("lenet5", "graph", "fp32", 512),
    _zoo("resnet18", "graph", "bf16", 1),
    _operation("gemm", "bf16", 4096),
    _operation("gemm", "fp32", 2048),
    _operation("gemm", "fp32", 1024),
    _operation("gemm", "tf32", 2048),
    _operation("elementwise", "bf16", 1 << 25),
)
"""Steps of 5 to 50 ms that keep the device busy: the time of a step that waits for its host has the host's spread."""

RESTLESS = (_zoo("lenet5", "graph", "bf16", 64), _operation("elementwise", "fp32", 1 << 23))
"""On an H200 the first ran 5 % faster from some moment on in 3 of 24 processes, the second differs by 1.6 % from
process to process."""

ON_CPU = (
    _zoo("lenet5", "eager", "fp32", 1),
    _operation("gemm", "fp32", 64),
    _operation("elementwise", "fp32", 1 << 12),
)


def build(cell: Cell, device: str) -> Unit:
    """The unit of work of a cell."""
    import torch

    from joulemark.workloads import zoo

    if not cell.size:
        return zoo.find(cell.case.workload).build(cell.case, device).run
    dtype = torch.bfloat16 if cell.case.dtype == "bf16" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    if cell.case.workload.startswith("gemm"):
        a, b = (torch.randn(cell.size, cell.size, device=device, generator=generator).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)
    x = torch.rand(cell.size, device=device, generator=generator).to(dtype)

    def chain() -> None:
        # Bounded whatever the number of repetitions, so that the data stay as random as they were.
        x.mul_(-1.0).add_(1.0).mul_(-1.0).add_(1.0)

    return chain


ROUNDS = 3
STRETCH_S = 0.06
"""Of each arm in each round, half of it lead-in."""


def steps_of(cell: Cell, device: str) -> list[Step]:
    """The steps of a cell's arms, in the order of :data:`UNITS`."""
    from joulemark.workloads import precision
    from joulemark.workloads.base import Step

    unit, tf32 = build(cell, device), cell.case.dtype == "tf32"

    def repeated(times: int) -> Unit:
        def run() -> None:
            precision.set_fp32(tf32=tf32)  # of the whole process, and cells take turns
            for _ in range(times):
                unit()

        return run

    return [Step(repeated(units), items=units) for units in UNITS.values()]


def turns(cells: int, process: int) -> list[list[int]]:
    """The order of all steps in each round: cell by cell, the first arm chosen by process, cell and round."""
    arms = len(UNITS)
    return [
        [cell * arms + (process + cell + turn + arm) % arms for cell in range(cells) for arm in range(arms)]
        for turn in range(ROUNDS)
    ]


def measure(cells: tuple[Cell, ...], device: str, process: int) -> list[tuple[Cell, float, Measurement]]:
    """All arms of all cells in this process."""
    from joulemark.collect.framework import device_uuid
    from joulemark.collect.memory import ProcessMemoryPeak
    from joulemark.collect.power import sm_clock_of
    from joulemark.collect.timing import timer_for
    from joulemark.measure.plan import Pass
    from joulemark.measure.runner import Runner
    from joulemark.measure.steady import unknown_clock

    steps = [step for cell in cells for step in steps_of(cell, device)]
    uuid = device_uuid(device)
    runner = Runner(timer_for(device), ProcessMemoryPeak(), clock=sm_clock_of(uuid) if uuid else unknown_clock)
    one = Pass("steady", STRETCH_S, min_samples=1, target=0.0)
    measured = runner.in_turns(steps, one, turns(len(cells), process), warmup_rounds=2)
    arms = [(cell, added) for cell in cells for added in UNITS]
    return [(cell, added, found) for (cell, added), found in zip(arms, measured, strict=True)]


def cells_on(options: argparse.Namespace) -> tuple[Cell, ...]:
    """What is measured on the device."""
    if not options.device.startswith("cuda"):
        return ON_CPU
    return CELLS + RESTLESS if options.restless else CELLS


def child(device: str, process: int, file: Path, cells: tuple[Cell, ...]) -> None:
    """Measure all cells and write them to a file, whole or not at all.

    Imports come first and touch no device; then it waits for a line on its standard input, and ends where none comes.
    A process whose parent was killed measures to its end; the one after it waits for that.
    """
    import torch
    from filelock import FileLock

    from joulemark.collect.timing import timer_for
    from joulemark.measure.runner import Runner  # noqa: F401
    from joulemark.workloads import zoo  # noqa: F401

    with suppress(ImportError):  # seconds of imports, for ResNet-18
        import torchvision  # noqa: F401
    if not sys.stdin.readline():
        return
    with FileLock(file.parent / "measuring.lock"):
        if file.exists():
            return
        started = time.time()
        torch.backends.cudnn.benchmark = False
        if device.startswith("cuda"):
            warm = build(_operation("gemm", "bf16", 4096), device)
            timer_for(device).sustain(warm, 0.3, 1e-3)  # clocks up, as after any case before
        rows = [_row(*of_arm) for of_arm in measure(cells, device, process)]
        framework = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        wall_s = time.time() - started
        part = {"plan": plan_of(device, cells), "framework": framework, "rows": rows, "wall_s": wall_s}
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(part))
        os.replace(temporary, file)


def _row(cell: Cell, added: float, measured: Measurement) -> Json:
    return {
        "case": cell.case.to_json(),
        "added_work": added,
        "measurements": [measured.to_json()],
        "window_utc": [measured.windows_utc[0][0], measured.windows_utc[-1][1]],
    }


def plan_of(device: str, cells: tuple[Cell, ...]) -> Json:
    """What all processes of a trial have in common."""
    return {"device": device, "cells": [cell.case.label for cell in cells], "units": list(UNITS.values())}


def read_parts(parts: list[Path], plan: Json) -> list[Json]:
    """The files of the processes.

    Raises:
        ValueError: one is of another trial, or was measured with another framework than the first.
    """
    found = [json.loads(part.read_text()) for part in parts]
    for part, one in zip(parts, found, strict=True):
        for name, wanted in (("plan", plan), ("framework", found[0]["framework"])):
            if one[name] != wanted:
                raise ValueError(f"{part} is of another trial: {one[name]}, not {wanted}. Give an empty folder")
    return found


def assemble_all(parts: list[Json], gpu_model: str, uuid: str | None, environment_id: str, run_id: str) -> list[Record]:
    """Records of many processes from what each of them left."""
    from dataclasses import replace

    from joulemark.measure.assemble import assemble
    from joulemark.regression.processes import ADDED_WORK

    found: dict[str, tuple[Case, list[Measurement], list[tuple[float, float]]]] = {}
    for process, part in enumerate(parts):
        for row in part["rows"]:
            case = replace(Case.from_json(row["case"]), gpu_model=gpu_model)
            if row["added_work"]:
                case = replace(case, params={ADDED_WORK: row["added_work"]})
            _, measurements, windows = found.setdefault(case.case_id, (case, [], []))
            measurements += [replace(Measurement.from_json(one), process=process) for one in row["measurements"]]
            windows.append(tuple(row["window_utc"]))
    return [
        assemble(
            case,
            measurements,
            run_id=run_id,
            environment_id=environment_id,
            outcome="ok",
            gpu_uuid=uuid,
            window_utc=(min(lo for lo, _ in windows), max(hi for _, hi in windows)),
        )
        for case, measurements, windows in found.values()
    ]


def write(parts: list[Json], device: str, out: Path) -> Path:
    """The records of all processes as one result file in a folder."""
    from joulemark.device.gpu import probe_gpus
    from joulemark.environment import anonymous, gather
    from joulemark.store import RunWriter, new_path, new_run_id

    inventory = probe_gpus(os.environ)
    gpu = inventory.visible[0].gpu if device.startswith("cuda") and inventory.visible else None
    model = "cpu" if gpu is None else gpu.slug
    environment = gather(inventory, Path.cwd(), anonymize=True, framework=parts[0]["framework"], options=sys.argv[1:])
    uuid = None if gpu is None else anonymous(gpu.uuid)
    run_id, started = new_run_id(), min(row["window_utc"][0] for part in parts for row in part["rows"])
    records = assemble_all(parts, model, uuid, environment.environment_id, run_id)
    path = new_path(out.parent, out.name, started, run_id)
    path = path.with_name(path.name.replace("sweep-", "aa-"))
    with RunWriter(path, run_id, environment, started) as writer:
        for record in records:
            writer.write(record)
        wall_s = sum(part["wall_s"] for part in parts)
        measured_s = sum(hi - lo for record in records for lo, hi in record.measured_windows_utc)
        writer.end(completed=True, wall_s=wall_s, measured_s=measured_s)
    return path


_LONGEST_S = 120.0


def run_processes(options: argparse.Namespace) -> list[Path]:
    """Let the processes that have no file yet measure one after the other, as far as the time allows.

    While one measures, the next imports what it needs.
    """
    begin, longest = time.monotonic(), 0.0
    options.parts.mkdir(parents=True, exist_ok=True)
    parts = [options.parts / f"process-{number:03d}.json" for number in range(options.processes)]
    todo = [number for number, part in enumerate(parts) if not part.exists()]
    read_parts([part for part in parts if part.exists()], plan_of(options.device, cells_on(options)))
    waiting = _started(options, todo[0], parts) if todo else None
    try:
        for done, (number, following) in enumerate(zip(todo, [*todo[1:], None], strict=True), 1):
            assert waiting is not None
            start = time.monotonic()
            if options.limit - (start - begin) < 1.2 * longest:
                break
            process, waiting = waiting, None if following is None else _started(options, following, parts)
            _let_measure(process, number)
            longest = max(longest, took := time.monotonic() - start)
            left = (len(todo) - done) * took
            print(f"process {number + 1} of {len(parts)}: {took:.1f} s, about {left:.0f} s left", flush=True)
    finally:
        if waiting is not None:
            waiting.kill()
            waiting.wait()
    return [part for part in parts if part.exists()]


def _let_measure(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(b"go\n", timeout=_LONGEST_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"process {number + 1} ended with {process.returncode}: run the same command again")


def _started(options: argparse.Namespace, number: int, parts: list[Path]) -> subprocess.Popen[bytes]:
    """A process that imports and then waits to be told."""
    command = [sys.executable, __file__, "--device", options.device, "--child", str(number)]
    command += ["--parts", str(parts[number]), *(["--restless"] if options.restless else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def main() -> int:
    """Measure what is missing; when all is there, write the records and the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=24)
    parser.add_argument(
        "--parts", type=Path, required=True, help="folder of the processes' files, outside the checkout"
    )
    parser.add_argument("--out", type=Path, default=Path("results/nvidia-h200"), help="folder of records and aa.json")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which no process starts")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--restless", action="store_true", help="also two cells that are known to change their speed")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.device, options.child, options.parts, cells_on(options))
        return 0
    try:
        return _measure_and_judge(options)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _measure_and_judge(options: argparse.Namespace) -> int:
    parts = run_processes(options)
    if len(parts) < options.processes:
        print(f"{len(parts)} of {options.processes} processes are measured: run the same command again")
        return 3
    from joulemark.cli import main as joulemark

    found = read_parts(parts, plan_of(options.device, cells_on(options)))
    path = write(found, options.device, options.out)
    print(f"records: {path}")
    return joulemark(["aa", str(path), "--out", str(options.out / "aa.json")])


if __name__ == "__main__":
    sys.exit(main())
