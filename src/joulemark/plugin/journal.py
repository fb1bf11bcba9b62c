"""The journal of a session: its result file, an environment for each device, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.errors import JoulemarkError
from joulemark.plugin.replay import progress_line
from joulemark.plugin.sweep import Target
from joulemark.records import Case, Environment, Record, Run
from joulemark.stats import union_length
from joulemark.store import RunWriter, read_run

if TYPE_CHECKING:
    from joulemark.device.gpu import Inventory
    from joulemark.plugin.options import BenchOptions
    from joulemark.plugin.schedule import Planned


@dataclass(frozen=True)
class Seen:
    """What a session knows of a device once its first case has run.

    Args:
        target: the device.
        hello: the measuring process' greeting: facts of the framework, tiers, what is off and why.
        idle: baseline of the board, see :func:`joulemark.plugin.instruments.idle_baseline`.
        elsewhere: the environment of another node, which knows itself; None for this machine.
    """

    target: Target
    hello: Mapping[str, Any] = field(default_factory=dict)
    idle: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Environment | None = None


class Journal:
    """Stores each record as its case ends, under the environment of the device that measured it.

    Args:
        config: pytest's.
        options: of the session.
        inventory: GPUs as NVML shows them.
        path: of the result file.
        run_id: of this run.

    Attributes:
        keeps_samples: whether the records in memory have their samples; those in the file always do.
        notes: what each environment says of the whole session.
    """

    def __init__(
        self, config: pytest.Config, options: BenchOptions, inventory: Inventory, path: Path, run_id: str
    ) -> None:
        self.config = config
        self.options = options
        self.inventory = inventory
        self.path = path
        self.run_id = run_id
        self.records: list[Record] = []
        self.keeps_samples = True
        self.notes: dict[str, str] = {}
        self._name: Callable[[Case], str] = lambda case: case.label
        self.environments: dict[str, Environment] = {}
        self._of: dict[str | None, Environment] = {}
        self._greeted: set[str | None] = set()
        self.begin = time.time()
        self.started = time.monotonic()  # the clock on the wall may be set while the sweep runs
        self.total = 0
        self.completed = False
        self._writer: RunWriter | None = None
        self._said: dict[str, int] = {}

    def expect(self, plan: Sequence[Planned]) -> None:
        """Know the cases to come: how many, and what to call them so that no two go by one name."""
        from joulemark.report.names import namer

        self.total = len(plan)
        self._name = namer(one.case for one in plan if one.case is not None)

    def keep(self, record: Record, seen: Seen) -> Record:
        """Store a record; what comes back names its run and its environment."""
        environment = self._environment(seen)
        kept = replace(record, run_id=self.run_id, environment_id=environment.environment_id)
        if self._writer is None:
            self._writer = RunWriter(self.path, self.run_id, environment, self.begin)
        try:
            self._writer.write(kept, environment)
        except JoulemarkError as error:
            pytest.exit(f"joulemark: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
        self.records.append(kept if self.keeps_samples else replace(kept, samples={}))
        return kept

    def together(self) -> AbstractContextManager[None]:
        """Records that are kept in this block reach the disk at its end, with one wait for it."""
        return nullcontext() if self._writer is None else self._writer.together()

    def _environment(self, seen: Seen) -> Environment:
        """Of one device: its baselines, its sensors and the framework in its measuring process."""
        if seen.elsewhere is not None:
            return self.environments.setdefault(seen.elsewhere.environment_id, seen.elsewhere)
        uuid = seen.target.uuid
        if uuid not in self._of or (seen.hello and uuid not in self._greeted):
            found = self._of[uuid] = self._gather(seen)
            self.environments[found.environment_id] = found
            self._greeted |= {uuid} if seen.hello else set()
        return self._of[uuid]

    def _gather(self, seen: Seen) -> Environment:
        from joulemark.environment import gather, tiers_of, with_instruments

        framework = dict(seen.hello.get("facts") or {})
        if seen.idle:
            framework["baselines"] = {**framework.get("baselines", {}), **seen.idle}
        tiers, notes = tiers_of(self.inventory, uuid=seen.target.uuid)
        found = gather(
            self.inventory,
            self.config.rootpath,
            anonymize=self.options.anonymize,
            framework=framework,
            tiers=tiers,
            notes={**notes, **self.notes},
            options=[str(one) for one in self.config.invocation_params.args],
        )
        counters = (seen.hello.get("counters") or {}) if "counters" in self.options.collect else None
        return with_instruments(found, {**seen.hello, "counters": counters}, on_gpu=seen.target.on_gpu)

    def go_on_with(self, run: Run) -> None:
        """Open a resumed file to which this session had no record to add, so that it gets its end."""
        if self._writer is None and run.environments:
            last = list(run.environments.values())[-1]
            self._writer = RunWriter(self.path, self.run_id, last, self.begin)

    def status(self, record: Record) -> str:
        """``[12/96, 2 min left] resnet50-… 1.23 ms``; a reason not to measure is said once, then referred to."""
        done, total = len(self.records), max(self.total, len(self.records))
        left = self.wall_s / max(1, done) * (total - done)
        # The first cases pay for imports, and skipped ones for nothing: no estimate is better than theirs.
        costly = sum(one.outcome in ("ok", "flagged") for one in self.records)
        estimate = f", about {_duration(left)} left" if costly >= 3 and done < total else ""
        line = progress_line(record)
        if record.outcome == "unsupported" and (first := self._said.setdefault(line, done)) != done:
            line = f"as case {first} [unsupported]"
        return f"[{done}/{total}{estimate}] {self._name(record.case)}: {line}"

    def whole_run(self, plan: Sequence[Planned], resumed: Run | None) -> Run:
        """What this session measured, in the order of its items; of a resumed sweep, all that its file holds.

        Several workers end their cases in an order of their own, in which they are stored.

        Args:
            plan: the session's items.
            resumed: the run that this session goes on with.
        """
        place = {one.nodeid: number for number, one in enumerate(plan)}

        def in_order(records: Iterable[Record]) -> tuple[Record, ...]:
            return tuple(sorted(records, key=lambda one: place.get(one.nodeid or "", len(place))))

        if resumed is not None:
            whole = read_run(self.path)
            return replace(whole, records=in_order(whole.records))
        return Run(
            str(self.path),
            self.run_id,
            dict(self.environments),
            in_order(self.records),
            self.completed,
            self.wall_s,
            self.measured_s,
            started_utc=self.begin,
        )

    def close(self, completed: bool, reason: str | None) -> None:
        """Mark the file.

        Args:
            completed: whether every case has its record.
            reason: why it is not complete.
        """
        self.completed = completed
        if self._writer is not None:
            with suppress(JoulemarkError):  # a file that cannot be written has ended the session with this very error
                self._writer.end(completed=completed, wall_s=self.wall_s, measured_s=self.measured_s, reason=reason)
            self._writer.close()

    @property
    def wall_s(self) -> float:
        """Wall time of the session so far, in s."""
        return time.monotonic() - self.started

    @property
    def measured_s(self) -> float:
        """Union of the windows whose samples are stored, in s."""
        return union_length(window for record in self.records for window in record.measured_windows_utc)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
