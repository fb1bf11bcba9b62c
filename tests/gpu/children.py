"""The processes that scripts in this folder start: their environment, their end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

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
    """Variables that let compilers find what they, and other processes, have compiled; those that are set stay."""
    return {name: os.environ.get(name, f"/var/tmp/{folder}") for name, folder in _CACHES.items()}


def caches_in(folder: Path) -> dict[str, str]:
    """Variables that have compilers keep what they compile in a folder and find nothing else, CUDA's own among them."""
    return {name: str(folder / kept) for name, kept in (*_CACHES.items(), ("CUDA_CACHE_PATH", "cuda"))}


def end_process(child: subprocess.Popen[Any]) -> None:
    """Ask a process to end, so that it can say that it was at work; end it where it hangs."""
    child.terminate()
    try:
        child.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
