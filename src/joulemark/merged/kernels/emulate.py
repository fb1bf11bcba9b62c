"""Runs kernels on a CPU: the same text, compiled by g++ with ``device/emulation.hpp`` for a vocabulary."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from joulemark.merged.kernels.compile import KernelError, cache_folder, full_source, write_whole
from joulemark.merged.kernels.kernel import Arguments, Kernel
from joulemark.merged.kernels.launch import scratch_of

_OPTIONS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-ffp-contract=off")


def run(
    kernel: Kernel,
    x: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    *,
    resident: int = 2,
    descending: bool = False,
) -> Tensor:
    """:meth:`Kernel.run` on a CPU.

    Args:
        resident: blocks that run at the same time; a persistent kernel gets that many in all.
        descending: order in which warps get their turn.

    Raises:
        KernelError: no compiler, or the kernel left its shared memory or came to a deadlock.
    """
    kernel.check(x, residual)
    out = kernel.empty_output(x) if out is None else out
    scratch = scratch_of(kernel, x)
    blocks = kernel.blocks(x.shape[0], tuple(x.shape[2:]), 1)
    if kernel.persistent is not None:
        blocks = min(blocks, resident)
    arguments = kernel.arguments(x, weights, out, residual, scratch, blocks)
    launch = getattr(_library(full_source(kernel, "emulation.hpp")), f"emulate_{kernel.name}")
    launch.restype = ctypes.c_char_p
    launch.argtypes = [ctypes.POINTER(Arguments), *[ctypes.c_int] * 5]
    said = launch(ctypes.byref(arguments), blocks, kernel.block, kernel.shared, resident, int(descending))
    if said is not None:
        raise KernelError(f"{kernel.name}, emulated: {said.decode()}")
    return out


@cache
def _library(source: str) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        raise KernelError("emulated kernels need g++, which is not on the PATH")
    key = hashlib.sha256("\0".join((*_OPTIONS, source)).encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            text, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            text.write_text(source, encoding="utf-8")
            done = subprocess.run([compiler, *_OPTIONS, str(text), "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise KernelError(f"g++ refuses the kernel: {done.stderr[:2000]}")
            write_whole(path, made.read_bytes())
    return ctypes.CDLL(str(path))
