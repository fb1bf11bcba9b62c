"""Runs kernels on a CPU: the same text, compiled by g++ with ``device/emulation.hpp`` for a vocabulary."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from joulemark.merged.kernels.compile import KernelError, cache_folder, words, write_whole
from joulemark.merged.kernels.kernel import Arguments, Kernel
from joulemark.merged.kernels.launch import scratch_of

_OPTIONS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-w",
    "-U_FORTIFY_SOURCE",
    "-fno-gnu-unique",
    "-fvisibility=hidden",
    "-ffp-contract=off",
)

_FENCE_BYTES, _FENCE = 4096, 0xFF
"""Every 16 or 32 bits of it are a NaN, as an output that is not written stays."""


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
    """:func:`joulemark.merged.kernels.run` on a CPU.

    Args:
        resident: blocks that run at the same time, rounded up to whole clusters; a persistent kernel gets that many
            in all.
        descending: order in which warps get their turn.

    Raises:
        KernelError: no compiler, or the kernel left its shared memory or came to a deadlock.
    """
    kernel.check(x, residual)
    out = kernel.empty_output(x) if out is None else out
    guarded, fence = _fenced(out)
    scratch = scratch_of(kernel, x)
    blocks = kernel.blocks(x.shape[0], kernel.size_of(x), 1)
    if kernel.persistent is not None:
        blocks = min(blocks, resident)
    arguments = kernel.arguments(x, weights, guarded, residual, scratch, blocks)
    resident = -(-resident // kernel.cluster) * kernel.cluster
    launch = getattr(_library(kernel.source), f"emulate_{kernel.name}")
    launch.restype = ctypes.c_char_p
    launch.argtypes = [ctypes.POINTER(Arguments), *[ctypes.c_int] * 5]
    said = launch(ctypes.byref(arguments), blocks, kernel.block, kernel.shared, resident, int(descending))
    if said is not None:
        raise KernelError(f"{kernel.name}, emulated: {said.decode()}")
    if not all(bool((side == _FENCE).all()) for side in fence):
        raise KernelError(f"{kernel.name}, emulated: it wrote outside of its output")
    return out.copy_(guarded)


def _fenced(out: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A tensor like ``out``, NaN where floating, and the bytes before and behind it that nobody may write."""
    size = out.numel() * out.element_size()
    memory = torch.full((size + 2 * _FENCE_BYTES,), _FENCE, dtype=torch.uint8)
    inside = memory[_FENCE_BYTES : _FENCE_BYTES + size].view(out.dtype)
    return torch.as_strided(inside, out.shape, out.stride(), inside.storage_offset()), (
        memory[:_FENCE_BYTES],
        memory[_FENCE_BYTES + size :],
    )


@cache
def _library(source: str) -> ctypes.CDLL:
    vocabulary = _vocabulary(cache_folder())
    path = vocabulary.with_name(f"{_key(vocabulary.name, source)}.so")
    if not path.exists():
        write_whole(path, _compiled(source, "-shared", "-include", str(vocabulary)))
    return ctypes.CDLL(str(path))


@cache
def _vocabulary(folder: Path) -> Path:
    """The header of all kernels, and beside it what g++ makes of it: to read it took a third of a kernel's build."""
    text = words("emulation.hpp")
    header = folder / f"{_key(text)}.hpp"
    precompiled = header.with_name(f"{header.name}.gch")  # of another g++ it is left alone, and the header read
    if not precompiled.exists():
        write_whole(header, text.encode())
        write_whole(precompiled, _compiled(text, "-x", "c++-header"))
    return header


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join((*_OPTIONS, *texts)).encode()).hexdigest()[:32]


def _compiled(text: str, *options: str) -> bytes:
    compiler = shutil.which("g++")
    if compiler is None:
        raise KernelError("emulated kernels need g++, which is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "kernel.cpp", Path(folder) / "made"
        given.write_text(text, encoding="utf-8")
        command = [compiler, *_OPTIONS, *options, str(given), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelError(f"g++ refuses the kernel: {done.stderr[:2000]}")
        return made.read_bytes()
