"""Measures a workload as the energy model needs it: one window of steady steps, and the same steps under counters.

The two are measured apart, and energy first: once a process has sampled hardware counters, an idle board draws more
until the process ends (123 W before and 133 W after, at one clock [H200]); profilers hold clock gating off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from joulemark.collect.energy import conditions_of, energy_of
from joulemark.energy.engine import Meter, Run
from joulemark.energy.windows import hindered
from joulemark.errors import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from joulemark.energy.counting import Counting
    from joulemark.records import Json

    Step = Callable[[], object]

WINDOW_S = 2.3
_IDLE_SETTLE_S, _IDLE_S = 0.3, 0.9
_SETTLE_S = 0.4
_CHUNK_S = 0.1
_COUNTED_S = 0.06
_COUNTED_STEPS = 2
_PILOT_STEPS = 3


@dataclass(frozen=True)
class Facts:
    """What is known of a workload before it is measured; see :class:`joulemark.energy.outcome.Measured`."""

    workload: str
    kind: str
    dtype: str
    batch_size: int | None = None
    items_per_step: float | None = None


class Stepper:
    """Runs steps in chunks, so that the host waits seldom and the device never for long.

    Args:
        step: launches one step.
        synchronize: waits for the device.
        clock: in s.
    """

    def __init__(
        self, step: Step, synchronize: Callable[[], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._step, self._synchronize, self._clock = step, synchronize, clock
        self.run(_PILOT_STEPS)
        begin = clock()
        self.run(_PILOT_STEPS)
        self.step_s = max((clock() - begin) / _PILOT_STEPS, 1e-7)

    def run(self, steps: int) -> None:
        """Exactly that many steps, from an idle device to an idle device."""
        for _ in range(steps):
            self._step()
        self._synchronize()

    def steps_in(self, seconds: float) -> int:
        """How many steps take about that long, at least one."""
        return max(1, round(seconds / self.step_s))

    def steady(self, settle_s: float, seconds: float) -> Run:
        """Steps for a time, the first of it uncounted."""
        chunk = self.steps_in(_CHUNK_S)
        begin = self._clock()
        while self._clock() - begin < settle_s:
            self.run(chunk)
        start = self._clock()
        done = 0
        while (now := self._clock()) - start < seconds:
            self.run(chunk)
            done += chunk
        return Run(done, start, now)


def measure_energy(
    facts: Facts,
    stepper: Stepper,
    meter: Meter,
    power_limit_w: float | None = None,
    window_s: float = WINDOW_S,
    idle: Idle | None = None,
) -> dict[str, Json]:
    """A row of a file of measured workloads, without counters as yet.

    Args:
        facts: of the workload.
        stepper: runs it.
        meter: reads the sensors.
        power_limit_w: of the GPU, stored for capped windows.
        window_s: length of the window.
        idle: the idle board, weighed a moment ago; None weighs it now.

    Raises:
        MeasurementError: the sensors gave no energy; the message says why.
    """
    before = idle or weigh_idle(meter)
    ran, power = meter(lambda: stepper.steady(_SETTLE_S, window_s))
    if hindered(power, ran.start, ran.end):  # clocks fall for a second; now they are where they stay
        ran, power = meter(lambda: stepper.steady(_SETTLE_S, window_s))
    reading, state = energy_of(power, ran.start, ran.end), conditions_of(power, ran.start, ran.end)
    if reading.power_w.value is None:
        raise MeasurementError(f"{facts.workload}: no energy ({reading.reason})", "repeat with a longer window")
    length = ran.end - ran.start
    return {
        "workload": facts.workload,
        "kind": facts.kind,
        "dtype": facts.dtype,
        "batch_size": facts.batch_size,
        "items": None if facts.items_per_step is None else facts.items_per_step * ran.launches,
        "steps": ran.launches,
        "window_s": length,
        "measured_j": reading.power_w.value * length,
        "idle_w": before.power_w,
        "idle_temperature_c": before.temperature_c,
        "power_interval_w": None if reading.power_w.interval is None else list(reading.power_w.interval),
        "cross_check_ratio": reading.cross_check_ratio,
        "findings": [finding.code for finding in reading.findings],
        "counters": {},
        "passes_differ": None,
        "sm_clock_hz": None if state is None else state.sm_clock_hz,
        "max_sm_clock_hz": None if state is None else state.max_sm_clock_hz,
        "temperature_c": None if state is None else state.temperature_c,
        "reasons": {} if state is None else dict(state.reasons),
        "capped": hindered(power, ran.start, ran.end),
        "power_limit_w": power_limit_w,
    }


@dataclass(frozen=True)
class Idle:
    """An idle board: power in W and temperature in °C, each None where no sensor tells."""

    power_w: float | None
    temperature_c: float | None


def weigh_idle(meter: Meter) -> Idle:
    """The idle board: static power steps by up to 10 W between processes and minutes, and grows with temperature."""

    def wait() -> Run:
        time.sleep(_IDLE_SETTLE_S)
        start = time.perf_counter()
        time.sleep(_IDLE_S)
        return Run(0, start, time.perf_counter())

    ran, power = meter(wait)
    state = conditions_of(power, ran.start, ran.end)
    return Idle(energy_of(power, ran.start, ran.end).power_w.value, None if state is None else state.temperature_c)


def with_counters(row: Mapping[str, Json], stepper: Stepper, counting: Counting) -> dict[str, Json]:
    """The row with the totals of hardware counters over its window, from fewer of the same steps.

    Args:
        row: of :func:`measure_energy`.
        stepper: runs the same workload.
        counting: of hardware counters.
    """
    steps = max(_COUNTED_STEPS, stepper.steps_in(_COUNTED_S))
    totals = counting.of(lambda: stepper.run(steps), steps, steps * stepper.step_s)
    counters = {name: total * row["steps"] for name, total in totals.each.items()}
    return {**row, "counters": counters, "passes_differ": totals.spread, "passes_differ_in": totals.differs}
