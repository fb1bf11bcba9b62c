"""What all share who try a kernel of our own beside torch's operators: whether there can be one, and why one failed."""

from __future__ import annotations

import importlib.util


def has_triton() -> bool:
    """Whether Triton is installed, which kernels of single operators are written in; nothing is imported for it."""
    return importlib.util.find_spec("triton") is not None


def told(error: Exception) -> str:
    """An error in one line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"
