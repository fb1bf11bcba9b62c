"""What all share who try a kernel of our own beside torch's operators: whether there can be one, and why one failed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

COMPILERS = max(2, min(16, len(os.sched_getaffinity(0)) - 1))
"""Kernels that are compiled at a time."""


def has_triton() -> bool:
    """Whether Triton is installed, which kernels of single operators are written in; nothing is imported for it."""
    return importlib.util.find_spec("triton") is not None


def compile_at_once(trials: Iterable[tuple[Hashable, Callable[[], object]]], device: torch.device) -> None:
    """Compile kernels in Triton for a GPU by running each once, several at a time: they wait for compilers mostly.

    What a trial finds here is dropped, whatever it is: it counts when it runs by itself, with its kernel compiled. A
    thread can meet a kernel that another one is loading, which has what launches before it has what is launched
    (``CompiledKernel._init_handles`` of Triton 3.6 and 3.8), and fail where there is no fault.

    All are on the caller's stream, behind what it has launched.

    Args:
        trials: what a kernel is compiled for, and what runs it and may be run again; one for each kernel runs. None is
            looked at for another device.
    """
    if device.type != "cuda":
        return
    tasks = dict(trials)
    if len(tasks) < 2:
        return
    stream = torch.cuda.current_stream(device)

    def run(trial: Callable[[], object]) -> None:
        with suppress(Exception), torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
            stream.synchronize()  # makes torch's context current in this thread
            trial()

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(run, tasks.values()))


def told(error: Exception) -> str:
    """An error in one line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"
