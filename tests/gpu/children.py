"""The processes that scripts in this folder start: their environment, their end."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 5.0
_CACHES = {
    "JOULEMARK_KERNEL_CACHE": "joulemark-kernels",
    "JOULEMARK_MERGED_CACHE": "joulemark-merged-cache",
    "TORCHINDUCTOR_CACHE_DIR": "joulemark-inductor",
    "TRITON_CACHE_DIR": "joulemark-triton",
}


def environment(**more: str) -> dict[str, str]:
    """This process's own, with the checkout's package and benches ahead of what else is on the path."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def compilers() -> dict[str, str]:
    """Variables that let compilers find what they have compiled, in this process and others; those that are set stay.

    Torch's worker processes assemble by torch's own ptxas and Triton by its own. The version of ptxas is part of the
    key of Triton's cache: with two of them a process compiles again what its workers have compiled for it.
    """
    found = {name: f"/var/tmp/{folder}" for name, folder in _CACHES.items()}
    torch = importlib.util.find_spec("torch")
    assembler = Path((torch and torch.origin) or "").parent / "bin" / "ptxas"
    if assembler.exists():
        found["TRITON_PTXAS_PATH"] = str(assembler)
    return {name: os.environ.get(name, value) for name, value in found.items()}


def end_process(child: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, so that it can say that it was at work; end it where it hangs."""
    child.terminate()
    try:
        child.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
