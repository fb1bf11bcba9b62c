"""Rows of a document in its file: which of them stay, and which are measured once more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from joulemark.errors import ConfigurationError


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a document whole, or leave the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A document from its file.

    Raises:
        ConfigurationError: it cannot be read, or holds no rows.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", "give a file that --out has written") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ConfigurationError(f"{path} holds no rows", "give a file that --out has written")
    return content


def check_writable(path: Path) -> None:
    """Find out before hours of work whether their file can be written.

    Raises:
        ConfigurationError: it cannot.
    """
    part = path.with_name(path.name + ".part")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}", "choose another file") from error


def measured_in(path: Path, dtype: str, tiny: bool = False) -> set[str]:
    """The subjects that need not be measured again for a file; none where it is not there.

    Args:
        path: of the file.
        dtype: number format of the rows that count.
        tiny: whether rows of tiny shapes count.

    Raises:
        ConfigurationError: the file holds no rows.
    """
    rows = read(path)["rows"] if path.exists() else ()
    return {row["subject"] for row in rows if row["dtype"] == dtype and is_whole(row, tiny)}


def ask_again(path: Path, names: Iterable[str]) -> None:
    """Have the subjects of a file's rows measured once more; the rows stay until then.

    Raises:
        ConfigurationError: there is no file, or no row of a subject in it.
    """
    if not path.exists():
        raise ConfigurationError(f"{path} is not there: nothing in it can be measured again", "give a file of rows")
    content = read(path)
    for name in names:
        found = [row for row in content["rows"] if row["subject"] == name]
        if not found:
            raise ConfigurationError(f"{path} holds no row of {name!r} to measure again", "leave it out")
        for row in found:
            row["again"] = True
    write(path, content)


def is_whole(row: Mapping[str, Any], tiny: bool = False) -> bool:
    """Whether a row stays as it is: figures in it, not cut short by time, not to be measured again.

    Args:
        row: of a document.
        tiny: whether its shapes may be tiny ones, as tests take.
    """
    complete = holds_figures(row) and not row.get("cut") and not row.get("again")
    return complete and (tiny or not row.get("tiny"))


def holds_figures(row: Mapping[str, Any]) -> bool:
    """Whether any rival was measured."""
    return any(one.get("burst_s") is not None for one in row["rivals"].values())
