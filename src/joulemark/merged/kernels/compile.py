"""CUDA C++ → machine code by NVRTC, without a GPU; kept on disk by the hash of all that went in."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from joulemark.merged.kernels import nvrtc
from joulemark.merged.kernels.kernel import Kernel

CACHE_VARIABLE = "JOULEMARK_KERNEL_CACHE"
_FACTS = "2"
"""Version of what is kept beside a build."""
_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class KernelError(RuntimeError):
    """A kernel cannot be compiled or launched."""


@dataclass(frozen=True)
class Build:
    """Machine code of one kernel for one architecture.

    Args:
        name: of the kernel.
        architecture: as in ``sm_90a``.
        code: an ELF image.
        registers: per thread.
        stack: bytes of stack frame per thread.
        spilled: bytes stored and loaded per thread because registers ran out.
        serialized: the compiler has put a wait behind each product of warpgroups (its note C7510 and the like).
    """

    name: str
    architecture: str
    code: bytes
    registers: int
    stack: int
    spilled: int
    serialized: bool


def architecture_of(major: int, minor: int) -> str:
    """The target for a compute capability; Hopper's and Blackwell's have the suffix that admits all instructions."""
    number = 10 * major + minor
    return f"sm_{number}a" if number == 90 else f"sm_{number}"


@cache
def device_text(name: str) -> str:
    """A file of ``device/``; ``#include`` and ``#pragma once`` of files beside it are left out."""
    text = (resources.files(__package__) / "device" / name).read_text(encoding="utf-8")
    return text.replace("#pragma once\n", "")


def words(vocabulary: str) -> str:
    """What stands in front of every kernel's text, with ``prelude.cuh`` or ``emulation.hpp`` for a vocabulary."""
    return device_text(vocabulary) + device_text("arguments.cuh")


def full_source(kernel: Kernel, vocabulary: str) -> str:
    """A kernel's text with the vocabulary in front."""
    return words(vocabulary) + kernel.source


def cache_folder() -> Path:
    """Where builds are kept: $JOULEMARK_KERNEL_CACHE, or the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "joulemark" / "kernels"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)


def build(kernel: Kernel, architecture: str) -> Build:
    """Machine code of a kernel, from the cache where it is there.

    Raises:
        KernelError: NVRTC is missing, or NVRTC refuses the text.
    """
    return build_text(kernel.name, full_source(kernel, "prelude.cuh"), architecture)


@cache
def build_text(name: str, source: str, architecture: str) -> Build:
    """:func:`build` of a kernel's name and :func:`full_source`, which other processes take more easily."""
    key = hashlib.sha256("\0".join((_FACTS, _compiler(), architecture, name, source)).encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}.cubin"
    facts = path.with_suffix(".json")
    if path.exists() and facts.exists():
        return Build(name, architecture, path.read_bytes(), **json.loads(facts.read_text()))
    code, log = _compile(name, source, architecture)
    used, spills = _USED.search(log), _SPILLS.search(log)
    if used is None or spills is None:
        raise KernelError(f"NVRTC does not say what {name} takes: {log[:400]!r}")
    stack, stored, loaded = (int(one) for one in spills.groups())
    serialized = "instructions are serialized" in log
    numbers: dict[str, Any] = {
        "registers": int(used[1]),
        "stack": stack,
        "spilled": stored + loaded,
        "serialized": serialized,
    }
    write_whole(path, code)
    write_whole(facts, json.dumps(numbers).encode())
    return Build(name, architecture, code, **numbers)


@cache
def _compiler() -> str:
    """The compiler's version, a part of every key."""
    try:
        from cuda.bindings import nvrtc as bindings
    except ImportError as error:
        raise KernelError(f"kernels need cuda-bindings ({error}): pip install cuda-core") from error
    return ".".join(str(one) for one in bindings.nvrtcVersion())


def _compile(name: str, source: str, architecture: str) -> tuple[bytes, str]:
    """A cubin and the compilers' log, by a process of its own: a thread each for several compiles them at once."""
    if not sys.executable:  # Python is a part of another program
        return _compile_here(name, source, architecture)
    # Not the script's folder: its modules' names are this package's alone. What this process finds the child finds too.
    command = (sys.executable, "-P", nvrtc.__file__, name, architecture)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run(command, input=source.encode(), capture_output=True, env=variables, check=False)
    told = made.stderr.decode(errors="replace")
    if made.returncode == nvrtc.REFUSED:
        raise KernelError(f"NVRTC refuses {name} for {architecture}: {told.strip()}")
    # What else ends a process is no fault of the text: here NVRTC may be there, since torch has loaded it.
    return _compile_here(name, source, architecture) if made.returncode else (made.stdout, told)


def _compile_here(name: str, source: str, architecture: str) -> tuple[bytes, str]:
    try:
        return nvrtc.machine_code(name, source, architecture)
    except nvrtc.Refused as error:
        raise KernelError(f"NVRTC refuses {name} for {architecture}: {error}") from error
    except (ImportError, RuntimeError) as error:  # a library that is not found
        raise KernelError(f"NVRTC cannot compile {name}: {error}") from error
