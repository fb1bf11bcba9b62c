"""Files that are whole or as they were, whatever befalls the process or the disk meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def put(content: bytes, path: Path) -> None:
    """Put bytes into a file at once; missing folders are made.

    Raises:
        OSError: the disk refuses; what stood in the file still does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
