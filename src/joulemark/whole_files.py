"""Files that are whole or as they were, whatever befalls the process or the disk meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from joulemark.errors import ConfigurationError


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


def write_text(text: str, path: Path) -> None:
    """Put a report into a file at once.

    Raises:
        ConfigurationError: the disk refuses.
    """
    try:
        put(text.encode("utf-8", "backslashreplace"), path)
    except OSError as error:
        raise ConfigurationError(
            f"the report {path} cannot be written ({error.strerror or error})", "choose another place"
        ) from error
