"""Recorded sensors, played back."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from joulemark.collect.power import ConditionReading, NvmlPowerSource
from joulemark.errors import ConfigurationError, NotSupported


class ReplayCollector:
    """A power source that plays recorded readings back, from the moment it is opened.

    Args:
        readings: (seconds, energy counter in J, power in W), in order of time; each holds until the next. None
            as a figure is a sensor that lacks.
        clock: of the playing.
        instant: whether the power was instant.
        conditions: what it tells of clocks and temperature.
    """

    name = "a recording"
    energy_tier = NvmlPowerSource.energy_tier
    power_tier = NvmlPowerSource.power_tier
    update_s = 0.11

    def __init__(
        self,
        readings: Sequence[tuple[float, float | None, float | None]],
        clock: Callable[[], float] = time.perf_counter,
        instant: bool = True,
        conditions: ConditionReading | None = None,
    ) -> None:
        if not readings:
            raise ConfigurationError("a recording without readings cannot be played", "give at least one reading")
        self.power_is_instant = instant
        self.clock = clock
        self._readings = list(readings)
        self._times = [reading[0] for reading in self._readings]
        self._conditions = conditions
        self._begin: float | None = None

    def open(self) -> None:
        """Begin to play, if it has not begun."""
        if self._begin is None:
            self._begin = self.clock()

    def close(self) -> None:
        """Rewind."""
        self._begin = None

    def _now(self) -> tuple[float, float | None, float | None]:
        self.open()
        assert self._begin is not None
        played = self.clock() - self._begin + self._times[0]
        return self._readings[max(0, bisect_right(self._times, played + 1e-9) - 1)]

    def read_energy_j(self) -> float:
        """The recorded counter, in J."""
        energy = self._now()[1]
        if energy is None:
            raise NotSupported("energy counter: not in the recording")
        return energy

    def read_power_w(self) -> float:
        """The recorded power, in W."""
        power = self._now()[2]
        if power is None:
            raise NotSupported("power: not in the recording")
        return power

    def read_conditions(self) -> ConditionReading | None:
        """What was given."""
        return self._conditions
