"""How long the device works in a step of the cases that were timed in turns, in the process that timed them.

A process may stay slower after a profiler session, so this comes after the turns of all models. A busy time of another
run is of another day, board and clock: what that differs by exceeds the exposed overhead of large batches.

The profiler slows the host. A step whose kernels hardly hide the host then waits for it, and works faster, as a board
does whose clock rises because it draws less power: within ten profiled steps the busy time of the BERT-sized encoder at
batch 128 fell by 5 % [H200]. Where a step loses load so, replays of a CUDA graph of it are profiled, too: one call
each, so that the device stays as busy as it is without the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from joulemark.collect.timing import Run, Timer, first_line
from joulemark.collect.torch_profiler import Profiler, TorchProfiler
from joulemark.errors import JoulemarkError, Unsupported
from joulemark.measure.issue_turns import IssueTurns
from joulemark.measure.profile import measurement_of
from joulemark.measure.steady import Clock, unknown_clock
from joulemark.records import Case, Measurement, Row
from joulemark.workloads.base import Step

STEPS = 10
"""Recorded, behind as many warm ones; those of the first half are left out: the clock settles in them."""
LIMIT_S = 30.0
"""For all cases: those that are left then have no busy time, the smallest batches."""
BUSY_LOAD, LOAD_LOST = 0.75, 0.05
"""Share of an unprofiled step for which the device works, from which on a waiting host changes its clock; by how much
less it may work in a profiled one."""
_TRIES = 2


class BusyTurns:
    """Records one case after the other, the largest batches first; a case that fails has a reason and no busy time.

    Args:
        timer: of the device.
        turns: whose rounds are over; of each the steps are recorded.
        profiler: records the traces.
        clock: reads the SM clock.
        limit_s: for all cases, in s.

    Attributes:
        rows: of the table :data:`joulemark.tandem.turns.BUSY_TABLE`: case and batch size; whether replays of a graph
            were recorded; median busy time of a step, step time while it was recorded and before, in s; its kernels;
            the SM clock at the end in Hz; why there is no busy time.

    Raises:
        Unsupported: nothing was timed in turns in this process.
    """

    def __init__(
        self,
        timer: Timer,
        turns: Sequence[IssueTurns],
        profiler: Profiler | None = None,
        clock: Clock = unknown_clock,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._timer, self._clock, self._limit_s = timer, clock, limit_s
        self._profiler = TorchProfiler() if profiler is None else profiler
        self._left = [
            (case, step, one.step_s(case))
            for one in turns
            for case, step in sorted(one.steps, key=lambda each: -(each[0].batch_size or 0))
        ]
        if not self._left:
            raise Unsupported("no steps were timed in turns in this process, so there are none to profile")
        self._begin: float | None = None
        self.rows: list[Row] = []

    @property
    def count(self) -> int:
        """Cases that are left."""
        return len(self._left)

    def next(self) -> None:
        """Record the next case; the first call opens the profiler, which takes seconds, and keeps nothing."""
        if self._begin is None:
            self._begin = time.perf_counter()
            self._row(self._left[0][0], self._left[0][1].run, replayed=False)
            return
        case, step, step_s = self._left.pop(0)
        if time.perf_counter() - self._begin > self._limit_s:
            self.rows.append(_row(case, replayed=False, reason=f"the {self._limit_s:g} s for all cases were over"))
            return
        self.rows.append(self._row(case, step.run, replayed=False))
        if step_s is not None and lost_load(self.rows[-1], step_s):
            self.rows.append(self._replayed(case, step, self.rows[-1]["kernels"]))

    def _replayed(self, case: Case, step: Step, kernels: object) -> Row:
        """Of a graph of the step; without a busy time where it holds other kernels than the step."""
        try:
            if not step.capturable:
                raise Unsupported("the step is not one that a CUDA graph can hold")
            replay = self._timer.capture(step.run)
        except Exception as error:  # as in _row
            return _row(case, replayed=True, reason=_reason(error))
        row = self._row(case, replay, replayed=True)
        if row["busy_s"] is not None and row["kernels"] != kernels:
            return {**row, "busy_s": None, "reason": f"a replay has {row['kernels']} kernels, the step {kernels}"}
        return row

    def _row(self, case: Case, run: Run, *, replayed: bool) -> Row:
        """Of a recording, which is made once more where records were lost."""
        row = _row(case, replayed=replayed, reason="not tried")
        for _ in range(_TRIES):
            try:
                row = self._recorded(case, run, replayed)
            except Exception as error:  # a profiler raises anything; what was timed before it must not be lost by that
                return _row(case, replayed=replayed, reason=_reason(error))
            if row["busy_s"] is not None:
                break
        return row

    def _recorded(self, case: Case, run: Run, replayed: bool) -> Row:
        readings: list[float | None] = []

        def fence() -> None:
            """Reads the clock while the device still works on what was issued."""
            readings.append(self._clock())
            self._timer.synchronize()

        with TemporaryDirectory(prefix="joulemark-trace-") as folder:
            path = Path(folder) / "trace.json"
            recording = self._profiler.record(run, None, STEPS, fence, path)
            seen = measurement_of(recording, path)
        busy = seen.samples.get("gpu_busy_s", [])
        reason = next(_lost(seen), None)
        kernels = seen.values.get("kernels_per_step")
        return {
            **_row(case, replayed=replayed, reason=reason),
            "busy_s": None if reason else median(busy[len(busy) // 2 :]),
            "profiled_step_s": recording.profiled_s,
            "plain_step_s": median(recording.plain_s),
            "kernels": None if kernels is None else kernels.value,
            "sm_clock_hz": readings[-1] if readings else None,
        }


def lost_load(row: Row, step_s: float) -> bool:
    """Whether a device that hardly waits in an unprofiled step waited more in the profiled one.

    Args:
        row: of a recording.
        step_s: time of an unprofiled step, in s.
    """
    busy_s, profiled_s = row["busy_s"], row["profiled_step_s"]
    if not isinstance(busy_s, float) or not isinstance(profiled_s, float):
        return False
    load = busy_s / step_s
    return load >= BUSY_LOAD and busy_s / profiled_s < min(load, 1.0) - LOAD_LOST


def _row(case: Case, *, replayed: bool, reason: str | None) -> Row:
    """Without figures."""
    figures = dict.fromkeys(("busy_s", "profiled_step_s", "plain_step_s", "kernels", "sm_clock_hz"))
    return {
        "case_id": case.case_id, "batch_size": case.batch_size, "replayed": replayed, **figures, "reason": reason,
    }  # fmt: skip


def _lost(seen: Measurement) -> Iterator[str]:
    """Why the busy time of a recording cannot be used."""
    yield from (one.message for one in seen.findings if one.flags)
    if not min(seen.samples.get("gpu_busy_s", []), default=0):
        yield seen.missing.get("gpu_busy_s", "the trace holds a step without any work of a device")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, JoulemarkError) else f"{type(error).__name__}: {first_line(error)}"
