"""The host's issue time and the step time of several cases, measured in turns within one process.

A host that changes its speed from one moment to the next is slow for one case and fast for another if each has a time
of its own. Here every case is issued in each of many short rounds, in a random order: what the host does to a round it
does to all cases (:mod:`joulemark.tandem.turns` compares them within rounds). A burst into an empty queue tells what
the host needs for a step; a short stretch of steps back to back behind it, what a step takes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

from joulemark.collect.timing import Timer
from joulemark.errors import Unsupported
from joulemark.measure.steady import LEAD_S, Clock, unknown_clock
from joulemark.records import Case, Row
from joulemark.workloads.base import Step

ROUNDS, QUICK_ROUNDS = 20, 8
WARM_S = 2e-3
"""Issued before the timed steps of a burst: behind a wait of some ms LeNet-5's steps took half as long again [H200]."""
_WARM_STEPS = 2
FEWEST_STEPS = 4
"""Of a stretch: the steps that the timer issues before it looks are as many, or fill some 25 ms."""
WAITS = 1.2
"""Step time over issue time from which on the device is taken for the limit: its clock settles before the samples."""


class IssueTurns:
    """Steps that are built and warm, issued a burst each in every round.

    Args:
        timer: of the device.
        steps: each with its case, which has a batch size.
        clock: reads the SM clock while the device works.

    Attributes:
        steps: as given.
        rows: of the table :data:`joulemark.tandem.turns.TABLE`: case and batch size, number of the round, the median
            issue time of the burst's steps and the median step time of the stretch, both in s, and the SM clock in the
            stretch in Hz, None where it cannot be read.

    Raises:
        Unsupported: a setup runs between the steps, or work on this device is not issued ahead.
    """

    def __init__(self, timer: Timer, steps: Sequence[tuple[Case, Step]], clock: Clock = unknown_clock) -> None:
        if any(step.setup is not None for _, step in steps):
            raise Unsupported("a setup runs between the steps, so they cannot be issued back to back")
        if not timer.device.startswith("cuda"):
            raise Unsupported("a host does its work when it is called: nothing is issued ahead")
        self._timer, self.steps, self._clock = timer, steps, clock
        self._rng, self._round = random.Random(0), 0
        self.rows: list[Row] = []
        for _, step in steps:
            for _ in range(_WARM_STEPS):
                step.run()
        timer.synchronize()

    def round(self) -> None:
        """A burst of each step, in a random order."""
        for case, step in self._rng.sample(self.steps, len(self.steps)):
            issue_s = median(self._timer.burst(step.run, WARM_S))
            step_s, sm_clock_hz = self._stretch(step, issue_s, self.step_s(case) or issue_s)
            self.rows.append({
                "case_id": case.case_id, "batch_size": case.batch_size, "round": self._round,
                "issue_s": issue_s, "step_s": step_s, "sm_clock_hz": sm_clock_hz,
            })  # fmt: skip
        self._round += 1

    def step_s(self, case: Case) -> float | None:
        """Median step time of a case so far, in s; None before its first round."""
        known = [row["step_s"] for row in self.rows if row["case_id"] == case.case_id]
        return median(one for one in known if isinstance(one, float)) if known else None

    def _stretch(self, step: Step, issue_s: float, about_s: float) -> tuple[float, float | None]:
        """Median time of steps back to back in s, and the SM clock meanwhile in Hz.

        Args:
            step: what is timed.
            issue_s: what the host needs for one, in s.
            about_s: how long one takes, in s.
        """
        lead_s = LEAD_S if about_s > WAITS * issue_s else 0.0
        lead = int(lead_s / about_s)
        readings: list[float | None] = []

        def stop(samples: Sequence[float]) -> str | None:
            if len(samples) < lead + FEWEST_STEPS:
                return None
            readings.append(self._clock())
            return "enough"

        samples = self._timer.steady(step.run, stop, max(issue_s, about_s)).step_s
        return median(samples[lead:]), readings[-1]
