"""A simulated GPU: its facts, its sensors, and how they fail."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from joulemark.testing.nvml_error import LOST, NOT_SUPPORTED, FakeNvmlError

Level = float | Callable[[float], float]
"""A constant, or a function of the seconds since the GPU's ``clock`` showed ``born``."""


@dataclass
class FakeDevice:
    """A simulated GPU as NVML shows it: a device of :class:`joulemark.testing.FakeNvml`.

    Args:
        name, uuid, pci_bus_id, memory_bytes, memory_used_bytes, power_limit_w: its facts.
        power_w: true power, in W.
        instant_power_w: what the instant sensor shows, where that is not the true power.
        has_instant_power: whether there is an instant sensor besides the averaging one.
        energy_period_s: time between updates of the energy counter; None for a GPU without one.
        energy_start_j: what the counter showed at ``born``.
        gain: factor by which the counter errs against power.
        sm_clock_hz, memory_clock_hz, max_sm_clock_hz, temperature_c, utilization: its other sensors.
        reasons: active clock-event reasons, by joulemark's names.
        errors: sensor → NVML error number; sensors are called ``energy``, ``power``, ``power_instant``,
            ``sm_clock``, ``memory_clock``, ``temperature``, ``reasons``, ``utilization``, ``power_limit``,
            ``slowdown_margin``, ``slowdown_temperature``, ``memory_faults``, ``processes``.
        gpm: GPM metric id → level in NVML's unit (per cent, MiB/s), or ``{"error": NVML error number}``; None for a
            GPU without GPM.
        gpm_lag_s: how far behind the present GPM's levels are.
        gpm_blind_s: two GPM samples less than this apart read 0, without an error.
        processes, graphics_processes: pids with a compute context, and of those that draw.
        mig: UUIDs of MIG instances.
        slowdown_temperature_c, persistence: what the driver tells of them.
        uncorrected_errors, remap_pending, remap_failed: faults of its memory.
        lost_after_s: time after which the GPU is lost, in s since ``born``.
        lost_after_calls: number of calls after which it is lost.
        read_s: time that one read of the energy counter takes on ``clock``, if that has a ``sleep``.
        clock: of all this.
        born: where the clock stood when the GPU began; by default when it was made.
    """

    name: str = "NVIDIA H200"
    uuid: str = "GPU-5a3c0000-0000-4000-8000-000000000000"
    pci_bus_id: str = "00000000:1B:00.0"
    power_w: Level = 300.0
    instant_power_w: Level | None = None
    has_instant_power: bool = True
    energy_period_s: float | None = 0.1
    energy_start_j: float = 1e6
    gain: float = 1.0
    sm_clock_hz: Level = 1.98e9
    memory_clock_hz: Level = 3.201e9
    max_sm_clock_hz: float = 1.98e9
    temperature_c: Level = 45.0
    utilization: Level = 0.5
    reasons: frozenset[str] = frozenset()
    errors: Mapping[str, int] = field(default_factory=dict)
    gpm: Mapping[int, Level | Mapping[str, int]] | None = None
    gpm_lag_s: float = 0.0
    gpm_blind_s: float = 0.04
    processes: tuple[int, ...] = ()
    graphics_processes: tuple[int, ...] = ()
    mig: tuple[str, ...] = ()
    slowdown_temperature_c: float = 90.0
    persistence: bool = True
    uncorrected_errors: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    memory_bytes: int = 141 * 2**30
    memory_used_bytes: int = 2**30
    power_limit_w: float = 700.0
    lost_after_s: float | None = None
    lost_after_calls: int | None = None
    read_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    born: float = math.nan
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if math.isnan(self.born):
            self.born = self.clock()

    @property
    def age_s(self) -> float:
        """Seconds since ``born``."""
        return self.clock() - self.born

    def touch(self, sensor: str = "") -> None:
        """Count a call, and fail as the GPU was told to.

        Raises:
            FakeNvmlError: the GPU is lost or the sensor is set to fail.
        """
        self.calls += 1
        too_old = self.lost_after_s is not None and self.age_s > self.lost_after_s
        if too_old or (self.lost_after_calls is not None and self.calls > self.lost_after_calls):
            raise FakeNvmlError(LOST)
        if sensor in self.errors:
            raise FakeNvmlError(self.errors[sensor])

    def level(self, level: Level) -> float:
        """A constant or function of time, now."""
        return level(self.age_s) if callable(level) else level

    def counter_j(self) -> float:
        """The energy counter, which moves every ``energy_period_s``, in J."""
        if self.energy_period_s is None:
            raise FakeNvmlError(NOT_SUPPORTED)
        updates = math.floor(self.age_s / self.energy_period_s + 1e-9)
        if callable(self.power_w):
            spent = sum(self.power_w((k + 0.5) * self.energy_period_s) for k in range(updates)) * self.energy_period_s
        else:
            spent = self.power_w * updates * self.energy_period_s
        return self.energy_start_j + self.gain * spent
