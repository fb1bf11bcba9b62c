"""A file of rows that is resumed, and what it keeps of rivals that ended their process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joulemark.errors import ConfigurationError
from joulemark.merged_bench.rows import check_writable, holds_figures, is_whole, read, write
from joulemark.merged_bench.stage import Poisoned
from joulemark.merged_bench.subjects import Subject

SCHEMA = "joulemark.merged/1"
FIRST_S = 20.0
"""What the first row of a process takes longer: compilers start (12 to 23 s on an H200's host)."""


class Document:
    """A file of rows that is resumed: a subject that it holds is not measured again.

    Args:
        path: of the file.
        kind: what it holds: ``blocks`` or ``networks``.
        facts: of GPU and software; another GPU's file is refused.

    Raises:
        ConfigurationError: the file is no such document, or of another GPU, or cannot be written.
    """

    def __init__(self, path: Path, kind: str, facts: Mapping[str, Any]) -> None:
        self.path, self.gpu_uuid = path, facts.get("gpu_uuid")
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": kind,
            **facts,
            "rates": None,
            "model": None,
            "rows": [],
            "failed": {},
        }
        check_writable(path)
        if not path.exists():
            return
        found = read(path)
        if (found.get("schema"), found.get("kind"), found.get("gpu")) != (SCHEMA, kind, facts["gpu"]):
            raise ConfigurationError(
                f"{path} is no document of merged {kind} on {facts['gpu']}", "choose another --out"
            )
        found["rows"] = [row for row in found["rows"] if holds_figures(row)]
        self.content = found

    def lacks(self, subject: Subject, dtype: str, tiny: bool = False) -> bool:
        """Whether the subject is still to be measured; once more where time was up before all its rivals were built.

        Args:
            subject: of the rows.
            dtype: its number format.
            tiny: whether a row of tiny shapes is enough.
        """
        return not any(_is_of(row, subject.name, dtype) and is_whole(row, tiny) for row in self.content["rows"])

    def expected_s(self, subject: Subject) -> float:
        """What a subject may take: as the shorter of the last two of its kind, or of all; 0 before the first.

        One of the two may have been the first of its process, which takes :data:`FIRST_S` longer.
        """
        kind = _kind(subject.group)
        took_s = [(_kind(row["group"]) == kind, row["took_s"]) for row in self.content["rows"] if not row.get("cut")]
        alike = [seconds for same, seconds in took_s if same] or [seconds for _, seconds in took_s]
        return float(min(alike[-2:], default=0.0))

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row in the place of an earlier one, and write the file; a row that was cut replaces no other."""
        rows, failed = self.content["rows"], self.content["failed"]
        if row.get("cut") and any(_is_of(one, row["subject"], row["dtype"]) and not one.get("cut") for one in rows):
            return
        rows[:] = [one for one in rows if not _is_of(one, row["subject"], row["dtype"])]
        for name in [one for one in failed if one.partition(":")[0] == row["subject"]]:
            del failed[name]
        other = self.gpu_uuid != self.content.get("gpu_uuid")  # than the one that the file was begun on
        rows.append(dict(row) | ({"gpu_uuid": self.gpu_uuid} if other else {}))
        self.write()

    def fail(self, subject: Subject, why: str) -> None:
        """Keep why a subject has no row; it is tried again next time."""
        self.content["failed"][subject.name] = why
        self.write()

    def write(self) -> None:
        """Write the file whole."""
        write(self.path, self.content)


def _is_of(row: Mapping[str, Any], subject: str, dtype: str) -> bool:
    return (row["subject"], row["dtype"]) == (subject, dtype)


def _kind(group: str) -> str:
    """Of a group the kind of its sequences: ``inverted`` of ``inverted-s2-b1``."""
    return group.partition("-")[0]


class Attempts:
    """Keeps in the file which rival is being built: one that has ended the process twice is left out.

    A kernel that never returns would else meet every new start. One that is known to have left CUDA unusable is left
    out at once.
    """

    most = 2

    def __init__(self, document: Document, subject: Subject) -> None:
        self.document, self.subject = document, subject

    def _key(self, rival: str) -> str:
        return f"{self.subject.name}:{rival}"

    def _broken(self, rival: str) -> str:
        return f"{self._key(rival)}, left CUDA unusable"

    def broke(self, error: Poisoned) -> None:
        """It ended the process."""
        self.document.content["failed"][self._broken(error.rival)] = str(error)
        self.document.write()

    def begins(self, rival: str) -> str | None:
        failed = self.document.content["failed"]
        if self._broken(rival) in failed:
            return str(failed[self._broken(rival)])
        count = int(failed.get(self._key(rival), "0").partition(" ")[0])
        if count >= self.most:
            return f"{count} times its process ended while it was built"
        failed[self._key(rival)] = f"{count + 1} times begun and not ended"
        self.document.write()
        return None

    def ends(self, rival: str) -> None:
        # At once: what ends the process later was not this rival's building.
        self.document.content["failed"].pop(self._key(rival), None)
        self.document.write()
