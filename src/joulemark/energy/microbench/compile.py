"""Kernels from source to machine code by NVRTC; needs neither a GPU nor a driver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from joulemark.energy.microbench.kept import kept
from joulemark.errors import JoulemarkError, Unsupported

FAMILIES = ("control", "vector", "tensor", "memory", "wgmma")
_WGMMA_ONLY = "sm_90a"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one family of kernels.

    Args:
        family: name of the source file.
        architecture: as in ``sm_90a``.
        code: an ELF image.
    """

    family: str
    architecture: str
    code: bytes


def architecture_of(major: int, minor: int) -> str:
    """The target for a compute capability; Hopper's has the suffix that admits ``wgmma``."""
    return _WGMMA_ONLY if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def number_of(architecture: str) -> int:
    """``sm_90a`` → 90.

    Raises:
        ValueError: the text names no architecture.
    """
    digits = architecture.removeprefix("sm_").rstrip("af")
    if not architecture.startswith("sm_") or not digits.isdigit():
        raise ValueError(f"{architecture!r} is no architecture such as sm_90a")
    return int(digits)


def families_for(architecture: str) -> tuple[str, ...]:
    """The families that an architecture can run."""
    return tuple(family for family in FAMILIES if family != "wgmma" or architecture == _WGMMA_ONLY)


def source_of(family: str) -> str:
    """CUDA C++ of a family, complete: NVRTC needs no header beside it."""
    folder = resources.files(__package__) / "kernels"
    return (folder / "prelude.cuh").read_text(encoding="utf-8") + (folder / f"{family}.cu").read_text(encoding="utf-8")


@cache
def compile_family(family: str, architecture: str) -> Cubin:
    """Machine code of a family of kernels.

    Args:
        family: one of :func:`families_for` the architecture.
        architecture: from ``sm_75`` on.

    Raises:
        Unsupported: cuda-core or NVRTC is not installed, or NVRTC does not know the architecture.
    """
    try:
        import cuda.core
        from cuda.bindings import nvrtc

        version = ".".join(map(str, nvrtc.nvrtcVersion()))
    except (ImportError, RuntimeError) as error:  # the latter where the library itself is missing
        raise Unsupported(
            f"kernels cannot be compiled: {error}", "pip install 'joulemark[torch]', which brings cuda-core and NVRTC"
        ) from error
    source = source_of(family)
    code = kept("cubin", (version, architecture, source), lambda: _compiled(cuda.core, family, architecture, source))
    return Cubin(family, architecture, code)


def _compiled(core: Any, family: str, architecture: str, source: str) -> bytes:
    options = core.ProgramOptions(name=f"{family}.cu", arch=architecture, std="c++17")
    try:
        code = core.Program(source, "c++", options).compile("cubin").code
    except Exception as error:  # NVRTC's errors have no common type over releases of cuda-core
        raise Unsupported(
            f"NVRTC does not compile {family}.cu for {architecture}: {_first_lines(error)}",
            "kernels need an architecture from sm_75 on that the installed NVRTC knows",
        ) from error
    if not isinstance(code, bytes):
        raise JoulemarkError(f"NVRTC gave {type(code).__name__} instead of machine code for {architecture}")
    return code


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
