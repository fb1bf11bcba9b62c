"""What workloads hold in memory, and how often its bits toggle: the activity of their operands there.

python bench_energy/operand_bits.py MEASUREMENTS.json     # adds it to measured workloads, on the CPU, by their seeds

Networks and products hold normal values, which the calibration measured, and are left as they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench_energy.held_out import HELD_OUT, HeldOut
from joulemark.energy.bits import toggling

KINDS = frozenset({"memory", "hpc"})
SAMPLE_BYTES = 1 << 22
"""From the middle of each tensor."""
STEPS = 2
"""Before what a workload holds is what it holds all along."""
LONGEST_S = 120.0


def memory_bits(step: Any) -> float | None:
    """Toggling of all tensors that a step holds and returns, by their bytes; None if it holds none worth looking at."""
    for _ in range(STEPS - 1):
        step()
    parts = {one.data_ptr(): one for tensor in _tensors([step, step()], set()) for one in _dense(tensor)}
    sampled = [(one.nbytes, _bytes_of(one)) for one in parts.values()]
    known = [(size, toggling(data)) for size, data in sampled if len(data) >= 64]
    total = sum(size for size, _ in known)
    return sum(size * bits for size, bits in known) / total if total else None


def _tensors(found: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Of a step's closure, arguments and attributes."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        yield found
        return
    inside: list[Any] = []
    if isinstance(found, (list, tuple)):
        inside += found
    elif isinstance(found, partial):
        inside += [found.func, *found.args, *found.keywords.values()]
    elif hasattr(found, "__closure__"):
        inside += [cell.cell_contents for cell in found.__closure__ or ()]
    elif type(found).__module__ == HeldOut.__module__:
        inside += vars(found).values()
    for one in inside:
        yield from _tensors(one, seen)


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_csr:
        return [tensor.values(), tensor.col_indices(), tensor.crow_indices()]
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor]


def _bytes_of(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().contiguous().reshape(-1)
    count = max(SAMPLE_BYTES // flat.element_size(), 1)
    begin = max((flat.numel() - count) // 2, 0)
    return flat[begin : begin + count].cpu().view(torch.uint8).numpy()


def main(argv: Sequence[str] | None = None) -> int:
    """Each workload in a process of its own, so that one that is too slow for a CPU costs the others nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path, metavar="MEASUREMENTS")
    parser.add_argument("--limit", type=float, default=LONGEST_S, metavar="S", help=f"of each workload ({LONGEST_S:g})")
    args = parser.parse_args(argv)
    document = json.loads(args.measurements.read_text(encoding="utf-8"))
    rows = {row["workload"]: row for row in document["rows"]}
    for one in HELD_OUT:
        if one.kind in KINDS and one.name in rows:
            rows[one.name]["memory_bits"] = found = _within(args.limit, one)
            print(f"{one.name}: {'not found' if found is None else f'{found:.3f}'}", flush=True)
            args.measurements.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def _within(limit_s: float, one: HeldOut) -> float | None:
    """None where a CPU takes longer, or cannot."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_look, args=(one.name, answers))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
    return None if answers.empty() else answers.get()


def _look(name: str, answers: Any) -> None:
    torch.set_num_threads(1)
    (one,) = [one for one in HELD_OUT if one.name == name]
    answers.put(memory_bits(one.build("cpu", False)))


if __name__ == "__main__":
    sys.exit(main())
