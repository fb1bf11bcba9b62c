"""One process of ``merged_restarts.py``: it merges one network as a user does who starts a new process.

    python tests/gpu/merged_restart.py NETWORK BATCH --ready F --out F.json   # then a line on its input, and its end

It gets ready without a GPU: imports, and the network's weights, on few threads. ``--ready`` is made; then it waits for
a line, and ends where its input ends instead. With the line the GPU is its own: model and input are moved there and one
small operation runs, so that the clock finds a context; it merges, and calls what came of it. When its input has ended
nobody else is at work, and many calls are timed. What it measures is written to ``--out``: every figure in SI units,
null where it is missing, with the reason. Exit code 0 where that was written: the process is gone at once then.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from joulemark.argument_types import positive, seconds
from joulemark.collect.timing import first_line
from joulemark.merged import MergedModel, merge
from joulemark.merged.executor import BUDGET_S
from joulemark.merged.paths import cudnn_tuning
from joulemark.merged.questions import relative_error
from joulemark.merged.spent import Spent
from joulemark.merged.stopwatch import race_calls
from joulemark.merged_bench.options import Options
from joulemark.merged_bench.prepare import arranged, inputs_of, weighted
from joulemark.merged_bench.rows import write
from joulemark.merged_bench.subjects import Subject, network
from joulemark.workloads import precision

DTYPE = "bf16"
FIGURES = ("merge_s", "first_call_s", "call_s", "relative_error", "peak_bytes")
"""What is null with its reason where it was not measured."""
FACTS = ("cached", "variant", "captured", "spent_s", "problems")
"""What a merged model says of itself; null where there is none."""
_READY_THREADS = 2
"""While another process merges, whose seconds count."""
_CHECKED = 16
"""Images that the model itself is given at once to check an output: all at once might not fit beside a merged model."""
_CALLS_S = 0.3
"""Of races of steady calls, at least one."""
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
_SHOWN = 60
"""Lines of a profile, by either order."""
T = TypeVar("T")


def nothing(why: str) -> dict[str, Any]:
    """What is told of a process that has measured nothing."""
    return {**dict.fromkeys((*FIGURES, *FACTS)), "missing": {"all": why}}


def timed(call: Callable[[], T], device: str) -> tuple[T, float]:
    """What a call gives, and its seconds, until the device is done."""
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    made = call()
    if on_gpu:
        torch.cuda.synchronize(device)
    return made, time.perf_counter() - begin


def merged_in(model: nn.Module, x: Tensor, budget_s: float) -> MergedModel:
    """As a user has it; on a CPU, which has no kernels, at least the whole is timed, and so kept on the disk.

    Raises:
        RuntimeError: it runs as it is, with the reason.
    """
    made = merge(model, x, budget_s=budget_s, measure=True)
    if made.failed is not None:
        raise RuntimeError(made.failed)
    return made


def facts_of(merged: MergedModel, merge_s: float) -> dict[str, Any]:
    """How long merging took, and what came of it."""
    return {"merge_s": merge_s, **{name: getattr(merged, name) for name in FACTS}}


def call_seconds(call: Callable[[], object], device: str) -> float:
    """Median seconds of one of many calls back to back, on the host's clock, once it has run."""
    until, found = time.perf_counter() + _CALLS_S, []
    while not found or time.perf_counter() < until:
        found += race_calls({"merged": call}, torch.device(device)).values()
    return median(found)


def error_of(out: Tensor, model: nn.Module, x: Tensor) -> float:
    """Relative error of an output against the model's own, which gets its images some at a time."""
    with torch.no_grad(), cudnn_tuning(False):
        return relative_error(out, torch.cat([model(some) for some in x.split(_CHECKED)]))


def measured(
    model: nn.Module, x: Tensor, device: str, budget_s: float, beside: Spent, quiet: Callable[[], object]
) -> dict[str, Any]:
    """Seconds of merging and of calls, what came of them, and the most memory that tensors held until the first call.

    Args:
        model: in its number format and layout, on the device.
        x: its input.
        device: as torch calls it.
        budget_s: of merging.
        beside: gets the seconds of all else.
        quiet: returns when nobody else is at work.
    """
    found: dict[str, Any] = {"compilers_imported": [one for one in _COMPILERS if one in sys.modules]}
    missing: dict[str, str] = {}
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    merged, merge_s = timed(lambda: merged_in(model, x, budget_s), device)
    found |= dict.fromkeys(FIGURES) | facts_of(merged, merge_s)
    with torch.no_grad():
        out, found["first_call_s"] = timed(lambda: merged(x), device)
    if device == "cpu":
        missing["peak_bytes"] = "memory is counted on a GPU alone"
    else:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    with beside.on("waiting"):
        quiet()
    with beside.on("calls"), told_in(missing, "call_s"), torch.no_grad():
        found["call_s"] = call_seconds(partial(merged, x), device)
    with beside.on("checking"), told_in(missing, "relative_error"):
        error = error_of(out, model, x)
        if not isfinite(error):  # which JSON cannot say
            raise ValueError("its output, or the model's own, is not finite")
        found["relative_error"] = error
    return {**found, "missing": missing}


def once_more(model: nn.Module, x: Tensor, device: str, budget_s: float, cached: bool) -> dict[str, Any]:
    """Merging alone, by a process that has merged it before and holds nothing of that any more.

    Not where the disk had no plan before: it would have none again, and merging takes as long as the first time.
    """
    missing: dict[str, str] = {}
    found = dict.fromkeys(("merge_s", *FACTS))
    if not cached:
        return {**found, "missing": {"all": "its plan was not from the disk before"}}
    gc.collect()
    with told_in(missing, "all"):
        found = facts_of(*timed(lambda: merged_in(model, x, budget_s), device))
    return {**found, "missing": missing}


@contextmanager
def told_in(missing: dict[str, str], name: str) -> Iterator[None]:
    """Whatever a device or a compiler says costs one figure, and is its reason."""
    try:
        yield
    except Exception as error:
        missing[name] = reason_of(error)


def reason_of(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {first_line(error)}"[:400]


def on_device(model: nn.Module, subject: Subject, device: str, tiny: bool) -> tuple[nn.Module, Tensor]:
    """The model and an input in their format and layout, on a device that has a context and has run something."""
    options = Options(DTYPE, most_inputs=1, tiny=tiny)
    precision.set_fp32(tf32=False)
    x = inputs_of(subject.tiny if tiny else subject.shape, options, device)[0]
    made = arranged(model, DTYPE, device)
    float((x[:1] * 2).sum())
    return made, x


def profiled(merge_it: Callable[[], object], text: Path) -> None:
    """Merge under Python's profiler, which makes it slower, and write where its time went."""
    profile, said = cProfile.Profile(), io.StringIO()
    profile.runcall(merge_it)
    for order in ("cumulative", "tottime"):
        pstats.Stats(profile, stream=said).sort_stats(order).print_stats(_SHOWN)
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(said.getvalue(), encoding="utf-8")


def ready(subject: Subject) -> nn.Module:
    """The network with its weights, on threads that leave the others to whoever merges."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(_READY_THREADS, threads))
    try:
        return weighted(subject)
    finally:
        torch.set_num_threads(threads)


def main(arguments: list[str] | None = None) -> int:
    """Get ready, wait, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("batch", type=positive)
    parser.add_argument("--ready", type=Path, required=True, metavar="F", help="made as soon as it is ready")
    parser.add_argument("--out", type=Path, required=True, metavar="F.json")
    parser.add_argument("--budget", type=seconds, default=BUDGET_S, metavar="S", help="of merging")
    parser.add_argument("--again", action="store_true", help="merge a second time too")
    parser.add_argument("--profile", type=Path, metavar="F.txt", help="merge under Python's profiler, no figures")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    options = parser.parse_args(arguments)
    subject = network(options.network, options.batch)
    model = ready(subject)
    options.ready.touch()
    if not sys.stdin.readline():
        return 0
    beside = Spent()
    try:
        with beside.on("moving"):
            model, x = on_device(model, subject, options.device, options.tiny)
        if options.profile is None:
            found = measured(model, x, options.device, options.budget, beside, sys.stdin.read)
            if options.again:
                found["again"] = once_more(model, x, options.device, options.budget, found["cached"])
        else:
            profiled(lambda: timed(lambda: merged_in(model, x, options.budget), options.device), options.profile)
            found = nothing("merged under a profiler: its seconds are no result")
    except Exception as error:  # whatever CUDA or a compiler says is what this process has to tell
        found = nothing(reason_of(error))
    write(options.out, {**found, "beside_s": beside.seconds})
    return 0


if __name__ == "__main__":
    code = main()
    # Merging has kept by now what it keeps. A usual end would wait for compilers' threads and processes, seconds where
    # these have just begun; whoever has started this one ends them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
