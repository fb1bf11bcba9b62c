"""Whole sessions of ``pytest --bench``, one after the other: two environments that take turns on one machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from joulemark.errors import ConfigurationError, MeasurementError
from joulemark.measure.assemble import join
from joulemark.measure.worker import tail
from joulemark.records import Record, Run
from joulemark.store import RunWriter, new_path, new_run_id, read_run

SIDES = ("old", "new")
_MEASURED = (0, 1)
"""Exit codes of a session that has measured: all passed, or some failed (their records say why)."""
_LAST = 3
"""Lines of a session that failed, in its error."""


def interpreter_of(environment: Path) -> Path:
    """The Python of an environment.

    Args:
        environment: an interpreter, or the folder of a virtual environment.

    Raises:
        ConfigurationError: there is none, or it does not have joulemark.
    """
    inside = [environment / "bin" / "python", environment / "Scripts" / "python.exe"]
    found = next((one for one in (environment, *inside) if one.is_file() and os.access(one, os.X_OK)), None)
    if found is None:
        raise ConfigurationError(
            f"{environment} is neither a Python interpreter nor a virtual environment", "give its folder"
        )
    probe = subprocess.run([found, "-c", "import joulemark, pytest"], capture_output=True, text=True, check=False)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
        raise ConfigurationError(
            f"{found} cannot import joulemark ({last})", f"install it there: {found} -m pip install 'joulemark[torch]'"
        )
    return found.absolute()


def session(interpreter: Path, folder: Path, arguments: Sequence[str]) -> Run:
    """Run ``pytest --bench`` and read what it stored.

    Args:
        interpreter: of the environment.
        folder: for the records and the session's output; it must not hold a run yet.
        arguments: of pytest.

    Raises:
        MeasurementError: nothing was measured; the message holds the end of the output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "session.log"
    command = [str(interpreter), "-m", "pytest", "--bench", *arguments, "--bench-results", str(folder.absolute())]
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        )  # fmt: skip
    files = sorted(folder.rglob("sweep-*.jsonl"))
    if done.returncode not in _MEASURED or not files:
        raise MeasurementError(
            f"pytest --bench measured nothing (exit status {done.returncode})", f"{log} ends: {_last_lines(log)}"
        )
    return read_run(files[-1])


def _last_lines(log: Path) -> str:
    """The lines that say why, on one line."""
    return " | ".join([line.strip(" =") for line in tail(log).splitlines() if line.strip(" =")][-_LAST:])


def take_turns(
    old: Path,
    new: Path,
    rounds: int,
    folder: Path,
    arguments: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Run, Run]:
    """Measure two environments in alternation: each round one session per side, the first of them changing.

    What drifts (temperature, neighbours on the host) then meets both sides alike.

    Args:
        old, new: interpreters.
        rounds: of both; each is one process per case and side.
        folder: for the records of all rounds and, at the end, of each side.
        arguments: of pytest.
        progress: told what begins.

    Returns:
        one run per side, with a process per round in each record.
    """
    pythons = dict(zip(SIDES, (old, new), strict=True))
    found: dict[str, list[Run]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            progress(f"round {number + 1} of {rounds}: {side}")
            found[side].append(session(pythons[side], folder / f"round-{number + 1}-{side}", arguments))
    old_run, new_run = (store(joined(found[side]), folder / side) for side in SIDES)
    return old_run, new_run


def joined(runs: Sequence[Run]) -> Run:
    """Several runs of the same cases as one of several processes; a case that one of them lacks keeps the others'."""
    by_case: dict[str, list[Record]] = {}
    for run in runs:
        for record in run.records:
            by_case.setdefault(record.case_id, []).append(record)
    return Run(
        path="",
        run_id=new_run_id(),
        environments={key: one for run in runs for key, one in run.environments.items()},
        records=tuple(join(records) for records in by_case.values()),
        completed=all(run.completed for run in runs),
        wall_s=sum(run.wall_s or 0.0 for run in runs),
        measured_s=sum(run.measured_s or 0.0 for run in runs),
        problems=tuple(problem for run in runs for problem in run.problems),
        started_utc=min((run.started_utc for run in runs if run.started_utc is not None), default=None),
        reason=next((run.reason for run in runs if not run.completed), None),
    )


def store(run: Run, folder: Path) -> Run:
    """Write a run that was put together to a file of its own, and read it back."""
    environment = next(iter(run.environments.values()))
    started = run.started_utc or 0.0
    path = new_path(folder, run.records[0].case.gpu_model if run.records else "unknown", started, run.run_id)
    with RunWriter(path, run.run_id, environment, started) as writer:
        for record in run.records:
            writer.write(replace(record, run_id=run.run_id))
        writer.end(
            completed=run.completed, wall_s=run.wall_s or 0.0, measured_s=run.measured_s or 0.0, reason=run.reason
        )
    return read_run(path)
