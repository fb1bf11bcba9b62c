"""What all share who try a kernel of our own beside torch's operators: whether there can be one, and why one failed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

COMPILERS = max(2, min(16, len(os.sched_getaffinity(0)) - 1))
"""Kernels that are compiled at a time."""
Found = TypeVar("Found")


def has_triton() -> bool:
    """Whether Triton is installed, which kernels of single operators are written in; nothing is imported for it."""
    return importlib.util.find_spec("triton") is not None


def tried_at_once(trials: Iterable[Callable[[], Found]], device: torch.device) -> list[Found]:
    """What trials of kernels in Triton find, several at a time on a GPU: each waits for its compiler most of the time.

    All are on the caller's stream, behind what it has launched.
    """
    if device.type != "cuda":
        return [one() for one in trials]
    stream = torch.cuda.current_stream(device)

    def tried(trial: Callable[[], Found]) -> Found:
        with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
            stream.synchronize()  # makes torch's context current in this thread
            return trial()

    with ThreadPoolExecutor(COMPILERS) as pool:
        return list(pool.map(tried, trials))


def told(error: Exception) -> str:
    """An error in one line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"
