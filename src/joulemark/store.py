"""The store: result files of JSON lines that are only ever appended to, and read back whatever befell them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from joulemark.errors import ConfigurationError, JoulemarkError, UnreadableInput
from joulemark.records import SCHEMA, Environment, Json, Outcome, Record, Run

FINISHED: frozenset[Outcome] = frozenset({"ok", "flagged", "oom", "unsupported"})
"""Outcomes that a resumed sweep does not measure again."""

PRIVATE_FOLDER = ".joulemark"
"""Where results go by default in a project that is not ours; it hides itself from git."""

_FAMILY, _, _VERSION = SCHEMA.rpartition("/")
_GIT_TIMEOUT_S = 10.0
_KIND = re.compile(rb'"schema"\s*:\s*"joulemark[./]([a-z-]+)/\d+"')
_RUNS = b"sweep"
_HEAD = 4096


def new_run_id() -> str:
    """A fresh random name of a run: 32 hex digits."""
    return uuid.uuid4().hex


def new_path(results_dir: Path, gpu_slug: str, started_utc: float, run_id: str) -> Path:
    """Where a run's file goes: ``<results_dir>/<gpu>/sweep-YYYYmmddTHHMMSSZ-<run6>.jsonl``.

    Args:
        results_dir: need not exist yet.
        gpu_slug: of NVML's name, or ``cpu``; anything else is made harmless as a folder name.
        started_utc: seconds since the Unix epoch.
        run_id: of :func:`new_run_id`.
    """
    folder = re.sub(r"[^a-z0-9]+", "-", gpu_slug.lower()).strip("-")[:100] or "unknown"
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started_utc))
    return results_dir / folder / f"sweep-{stamp}-{run_id[:6]}.jsonl"


def check_writable(path: Path) -> None:
    """Refuse a result file that could not be written, before anything is measured for it.

    Raises:
        ConfigurationError: its folder, or the one in which that would be made, is no folder or may not be written.
    """
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigurationError(f"results cannot be stored in {path.parent}: {folder} is no folder", "choose another")
    target = path if path.exists() else folder
    if not os.access(target, os.W_OK):
        raise ConfigurationError(f"results cannot be stored: {target} may not be written", "choose another folder")


def git_commit(cwd: Path) -> dict[str, Json] | None:
    """The commit that ``cwd`` stands on, ``{"hash": …, "dirty": …}``; None without git, repository or commit.

    Untracked files count as dirty: a benchmark that is not committed changes results too. ``dirty`` is None
    when git does not answer in time. Nothing that git says reaches the console.
    """
    commit = _git(cwd, "rev-parse", "--verify", "HEAD^{commit}")
    if not commit:
        return None
    status = _git(cwd, "status", "--porcelain")
    return {"hash": commit.strip(), "dirty": None if status is None else bool(status.strip())}


def _git(cwd: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *args],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            # Optional locks would race with the user's own git in the same tree.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


class RunWriter:
    """Appends one run to its file; each line is on disk before the call returns.

    Nothing is created before the first record, so a sweep that measured nothing leaves no file. An existing file
    is continued: what stands in it is never changed, and a last line that a kill left half-written stays behind
    as a line of its own.

    Args:
        path: of the file; its folder is created with it.
        run_id: of :func:`new_run_id`, or of the file that is continued.
        environment: stored once, before the first record that was measured in it; :meth:`write` may bring others.
        started_utc: seconds since the Unix epoch.
    """

    def __init__(self, path: Path, run_id: str, environment: Environment, started_utc: float) -> None:
        self.path = path
        self._run_id = run_id
        self._environment = environment
        self._started_utc = started_utc
        self._fd: int | None = None
        self._held: set[str] = set()
        self._ended = False
        self._waits = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Record, environment: Environment | None = None) -> None:
        """Store a record.

        Args:
            record: to store.
            environment: that it was measured in, where it is another than the run's.

        Raises:
            JoulemarkError: the file cannot be written.
        """
        line = _line(record.to_json())
        if environment is not None:
            self._on_file(lambda fd: self._put_environment(fd, environment))
        self._on_file(lambda fd: self._put(fd, line))
        self._ended = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Lines that are written in this block are on disk when it ends: one wait for the disk instead of many.

        Raises:
            JoulemarkError: the file cannot be written.
        """
        self._waits = False
        try:
            yield
        finally:
            self._waits = True
            if self._fd is not None:
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    raise self._cannot_write(error) from error

    def end(self, *, completed: bool, wall_s: float, measured_s: float, reason: str | None = None) -> None:
        """Close the run with its ``end`` line.

        A second call in a row, or one before anything was stored, writes nothing.

        Args:
            completed: whether every case of the sweep has its record.
            wall_s: duration of the sweep (of this part of it, when resumed), in s.
            measured_s: union of the windows whose samples are stored, in s.
            reason: why it is not complete.

        Raises:
            JoulemarkError: the file cannot be written.
        """
        if self._ended or (self._fd is None and not self.path.exists()):
            return
        line = _line(
            {
                "kind": "end",
                "schema": SCHEMA,
                "run_id": self._run_id,
                "wall_s": wall_s,
                "measured_s": measured_s,
                "completed": completed,
                "reason": reason,
            }
        )
        self._on_file(lambda fd: self._put(fd, line))
        self._ended = True

    def close(self) -> None:
        """Release the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _on_file(self, put: Callable[[int], None]) -> None:
        try:
            if self._fd is None:
                self._fd = self._open()
            put(self._fd)
        except OSError as error:
            self.close()  # the next line looks at the file's end again
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> JoulemarkError:
        kept = f"; what it holds is kept, go on with --bench-resume {self.path}" if self.path.is_file() else ""
        return JoulemarkError(
            f"cannot write the result file {self.path} ({error.strerror or error})",
            f"make room or choose another folder with --bench-results{kept}",
        )

    def _put_environment(self, fd: int, environment: Environment) -> None:
        if environment.environment_id not in self._held:
            self._put(fd, _line(environment.to_json(self._run_id, self._started_utc)))
            self._held.add(environment.environment_id)

    def _put(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if self._waits:
            os.fsync(fd)

    def _open(self) -> int:
        _make_folder(self.path.parent)
        new = not self.path.exists()
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if new:
                _sync_folder(self.path.parent)
            if not new and _is_torn(self.path):
                self._put(fd, b"\n")
            self._held = set() if new else _environments_in(self.path)
            self._put_environment(fd, self._environment)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder, *folder.parents):
        if parent.name == PRIVATE_FOLDER:
            ignore = parent / ".gitignore"
            if not ignore.exists():
                ignore.write_text("# benchmark results; delete this file to commit them\n*\n")
            return


def _sync_folder(folder: Path) -> None:
    """Make a new file's name survive a power cut, where the file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _line(content: Json) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def _environments_in(path: Path) -> set[str]:
    """Ids of the environments that a file holds."""
    with path.open("rb") as file:
        return {
            str(line.get("environment_id"))
            for line in map(_json_or_none, file)
            if isinstance(line, dict) and line.get("kind") == "environment"
        }


def _reject_constant(token: str) -> float:
    raise ValueError(f"{token} is not strict JSON")


def _json_or_none(line: bytes) -> Json:
    try:
        return json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None


@dataclass
class Reading:
    """What the lines of a file have given so far.

    Args:
        problems: lines that could not be read, in words.
        foreign_schemas: what other lines than ours call themselves.
        last_kind: of the last line that was read.
    """

    environments: dict[str, Environment] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    ends: list[Mapping[str, Json]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    foreign_schemas: list[str] = field(default_factory=list)
    run_id: str | None = None
    started_utc: float | None = None
    last_kind: str | None = None

    def take(self, number: int, line: bytes, whole: bool) -> None:
        """Read a line, or keep what is wrong with it; ``whole``: it does not lack its end."""
        data = _json_or_none(line)
        if data is None:
            self.problems.append(f"line {number}: " + ("not JSON" if whole else "cut off (the run was killed here)"))
            return
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            self.problems.append(f"line {number}: {_foreign(schema)}")
            if isinstance(schema, str):
                self.foreign_schemas.append(schema)
            return
        try:
            self._take_known(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            kind = data.get("kind")
            self.problems.append(f"line {number}: a {kind} line that does not hold what it should ({error!r})")

    def _take_known(self, data: Mapping[str, Json]) -> None:
        kind = data.get("kind")
        if kind == "environment":
            environment = Environment.from_json(data)
            self.environments[str(data["environment_id"])] = environment
            if self.started_utc is None:
                self.started_utc = _number(data["started_utc"])
        elif kind == "record":
            record = Record.from_json(data)
            case_id = record.case_id
            self.records.pop(case_id, None)  # the place of its last line
            self.records[case_id] = record
        elif kind == "end":
            self.ends.append({**data, "wall_s": _number(data["wall_s"]), "measured_s": _number(data["measured_s"])})
        else:
            raise ValueError(f"unknown kind {kind!r}")
        self.run_id = self.run_id or str(data["run_id"])
        self.last_kind = kind


def _foreign(schema: Json) -> str:
    if isinstance(schema, str) and schema.rpartition("/")[0] == _FAMILY:
        return f"schema {schema!r} is another version than the one read here ({SCHEMA}): update joulemark"
    return f"not a line of joulemark (schema {schema!r})"


def _number(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def read_run(path: Path) -> Run:
    """Read a result file, as much of it as can be read; what cannot is named in ``problems``.

    Raises:
        UnreadableInput: there is no such file, or nothing in it can be used.
    """
    reading = Reading()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    reading.take(number, line, line.endswith(b"\n"))
    except OSError as error:
        raise UnreadableInput(f"cannot read {path} ({error.strerror or error})", "check the path") from error
    if reading.run_id is None:
        raise _unusable(path, reading)
    if not reading.records:
        reading.problems.append("holds no record")
    # Only a file's last word counts: a resumed run that was killed is not complete although its first part was.
    last = reading.ends[-1] if reading.ends and reading.last_kind == "end" else None
    return Run(
        path=str(path),
        run_id=reading.run_id,
        environments=reading.environments,
        records=tuple(reading.records.values()),
        completed=last is not None and last.get("completed") is True,
        wall_s=sum(end["wall_s"] for end in reading.ends) if reading.ends else None,
        measured_s=sum(end["measured_s"] for end in reading.ends) if reading.ends else None,
        problems=tuple(reading.problems),
        started_utc=reading.started_utc,
        reason=(last or {"reason": "killed before its end"}).get("reason"),
    )


def _unusable(path: Path, reading: Reading) -> UnreadableInput:
    newer = [schema for schema in reading.foreign_schemas if schema.rpartition("/")[0] == _FAMILY]
    if newer:
        return UnreadableInput(
            f"{path} is of schema {newer[0]!r}, this version reads {SCHEMA}",
            "update joulemark (pip install -U joulemark)",
        )
    if not reading.problems:
        return UnreadableInput(f"{path} is empty", "the run that made it was killed before its first case ended")
    more = f" and {len(reading.problems) - 1} more" if len(reading.problems) > 1 else ""
    return UnreadableInput(f"{path} is not a result file ({reading.problems[0]}{more})", "give a joulemark JSONL file")


def finished_case_ids(run: Run) -> frozenset[str]:
    """Cases that a resumed sweep need not measure again; a failed one is tried anew."""
    return frozenset(record.case_id for record in run.records if record.outcome in FINISHED)


@dataclass(frozen=True)
class Listing:
    """The runs of a folder.

    Args:
        runs: newest first.
        unusable: one line per file that cannot be used, with its name and why.
    """

    runs: tuple[Run, ...]
    unusable: tuple[str, ...]


def find_runs(
    folder: Path, *, suffixes: Sequence[str] = (".jsonl",), read: Callable[[Path], Run] = read_run
) -> Listing:
    """All runs under a folder, newest first; nothing there is changed.

    A run's age is what its file says, or else the time in the file's name; files of equal age go by name.

    Args:
        folder: searched with its sub-folders.
        suffixes: of the files to look at.
        read: what reads one of them.

    Raises:
        ConfigurationError: there is no such folder.
    """
    runs: list[Run] = []
    unusable: list[str] = []
    for path in result_files(folder, suffixes):
        try:
            run = read(path)
        except UnreadableInput as error:
            unusable.append(str(error))
            continue
        if run.records:
            runs.append(run)
        else:
            unusable.append(f"{path} holds no record")
    runs.sort(key=lambda run: (run.started_utc or 0.0, Path(run.path).name), reverse=True)
    return Listing(tuple(runs), tuple(unusable))


def result_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files under a folder that may hold runs, by their names; not the documents that joulemark wrote beside them.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if not folder.is_dir():
        what = f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"
        raise ConfigurationError(what, "give the folder of the results")
    found = sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    return [path for path in found if kind_of(path) is None]


def kind_of(path: Path) -> str | None:
    """Kind of the joulemark document in a JSON file (``tandem``, ``energy`` …); None of runs and of anything else."""
    if path.suffix.lower() not in (".json", ".jsonl") or not path.is_file():  # a pipe would wait for its writer
        return None
    try:
        with path.open("rb") as file:
            found = _KIND.search(file.read(_HEAD))
    except OSError:
        return None
    return None if found is None or found[1] == _RUNS else found[1].decode()
