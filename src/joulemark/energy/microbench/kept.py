"""Machine code, and what was read from it, kept on disk by the hash of all that went in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER_VARIABLE = "JOULEMARK_KERNEL_CACHE"


def folder() -> Path:
    """$JOULEMARK_KERNEL_CACHE, or the user's cache folder (XDG Base Directory Specification)."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(home) / "joulemark" / "kernels"


def kept(kind: str, inputs: tuple[str | bytes, ...], make: Callable[[], bytes]) -> bytes:
    """What ``make`` gives, from the disk where it was made from the same inputs before.

    Args:
        kind: suffix of the file.
        inputs: all that the content depends on.
        make: makes it.
    """
    digest = hashlib.sha256()
    for one in inputs:
        data = one.encode() if isinstance(one, str) else one
        digest.update(len(data).to_bytes(8, "big") + data)
    path = folder() / f"{digest.hexdigest()[:32]}.{kind}"
    try:
        return path.read_bytes()
    except OSError:
        made = make()
    with contextlib.suppress(OSError):  # a folder that cannot be written costs time alone
        _write_whole(path, made)
    return made


def _write_whole(path: Path, content: bytes) -> None:
    """So that the file appears whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)
