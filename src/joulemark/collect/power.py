"""Energy and power of a device over windows of time, read beside the workload by a thread of its own.

Two sensors are read. A counter of energy moves in steps (every 100 ms on an H200), so a window is opened and
closed on the counter's own updates: the *edges*. A sensor of power is read at varied phase, since it sees only a
part of each of its periods (*Part-time Power Measurements*, arXiv:2312.02741); its integral is the cross-check, and
the answer where there is no counter. NVML's figures are of the whole board, with a gain error of about ±5 % per
board that no averaging removes: intervals given here are of repeatability and do not contain it.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, Self

from joulemark.collect.energy import (
    ConditionReading,
    EnergyEdge,
    EnergyReading,
    EnergyWindow,
    PowerReading,
    PowerWindow,
    aligned_windows,
    conditions_of,
    energy_of,
    integrate_power,
)
from joulemark.collect.rapl import RaplSource
from joulemark.device.nvml import Nvml, read_or_none
from joulemark.errors import DeviceError, NotPermitted, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from joulemark.device.nvml import NvmlDevice
    from joulemark.records import Value

__all__ = [
    "ConditionReading",
    "EnergyEdge",
    "EnergyReading",
    "EnergyWindow",
    "NullPowerSource",
    "NvmlPowerSource",
    "PowerReading",
    "PowerSampler",
    "PowerSource",
    "PowerWindow",
    "Recorder",
    "aligned_windows",
    "conditions_of",
    "energy_of",
    "idle_power",
    "integrate_power",
    "open_power",
    "sm_clock_of",
]


_FIRST_READINGS_S = 1.0
"""A window opens once each sensor was read, or after this time."""


class PowerSource(Protocol):
    """Where energy and power are read; times are the caller's business.

    Attributes:
        name: what is read, for messages.
        energy_tier, power_tier: names of the counter and of the integral of power.
        update_s: longest time between two updates of the counter, in s.
        power_is_instant: False where the power sensor averages over about 1 s.

    A sensor that lacks raises :class:`joulemark.errors.NotSupported` or ``NotPermitted``; the sampler then does
    without it. Any other error ends the sampling.
    """

    name: str
    energy_tier: str
    power_tier: str
    update_s: float

    @property
    def power_is_instant(self) -> bool: ...

    def open(self) -> None:
        """Get ready to read in this process; a second call does nothing."""
        ...

    def close(self) -> None: ...

    def read_energy_j(self) -> float: ...

    def read_power_w(self) -> float: ...

    def read_conditions(self) -> ConditionReading | None: ...


class NvmlPowerSource:
    """The sensors of one GPU by NVML, in a session of this process.

    Args:
        uuid: of the GPU.
        backend: a stand-in for pynvml.
    """

    energy_tier = "nvml_energy_counter"
    power_tier = "nvml_power_integral"
    update_s = 0.11

    def __init__(self, uuid: str, backend: Any = None) -> None:
        self.name = uuid
        self.power_is_instant = False
        self._nvml = Nvml(backend)
        self._device: NvmlDevice | None = None
        self._max_sm_clock_hz: float | None = None

    def open(self) -> None:
        """Open NVML and find the GPU.

        Raises:
            NotSupported: the UUID is a MIG instance's, whose power no sensor tells.
            DeviceError: NVML or the GPU does not answer; the cause is the type.
        """
        if self._device is not None:
            return
        if self.name.startswith("MIG-"):
            raise NotSupported(
                f"power of {self.name}: a MIG instance shares the sensors of its board",
                "measure energy with MIG off, or with the only instance in use by the board's UUID",
            )
        self._nvml.open()
        try:
            device = self._nvml.device(self.name)
            self.power_is_instant = read_or_none(device.instant_power_w) is not None
            self._max_sm_clock_hz = read_or_none(device.max_sm_clock_hz)
        except DeviceError:
            self._nvml.close()
            raise
        self._device = device

    def close(self) -> None:
        """Close the session."""
        self._device = None
        self._nvml.close()

    def _ready(self) -> NvmlDevice:
        if self._device is None:
            raise DeviceError(f"power of {self.name}: the source is not open", "call open() first")
        return self._device

    def read_energy_j(self) -> float:
        """The board's energy counter, in J."""
        return self._ready().energy_j()

    def read_power_w(self) -> float:
        """The board's power, in W: instant where the GPU has that sensor."""
        device = self._ready()
        return device.instant_power_w() if self.power_is_instant else device.average_power_w()

    def read_conditions(self) -> ConditionReading:
        """Clocks, temperature and clock-event reasons."""
        device = self._ready()
        return ConditionReading(
            sm_clock_hz=read_or_none(device.sm_clock_hz),
            memory_clock_hz=read_or_none(device.memory_clock_hz),
            max_sm_clock_hz=self._max_sm_clock_hz,
            temperature_c=read_or_none(device.temperature_c),
            reasons=read_or_none(device.clock_reasons),
        )


class NullPowerSource:
    """No sensor, and the reason why."""

    name = "no power sensor"
    energy_tier = "none"
    power_tier = "none"
    update_s = 1.0
    power_is_instant = False

    def __init__(self, problem: DeviceError) -> None:
        self.problem = problem

    def open(self) -> None:
        """There is nothing to open.

        Raises:
            DeviceError: always, the reason.
        """
        raise self.problem

    def close(self) -> None:
        """Nothing is held."""

    def read_energy_j(self) -> float:
        """Raises the reason."""
        raise self.problem

    def read_power_w(self) -> float:
        """Raises the reason."""
        raise self.problem

    def read_conditions(self) -> None:
        """Raises the reason."""
        raise self.problem


class PowerSampler:
    """Reads a power source beside a workload.

    Args:
        source: what to read; opened by the first window, in the process and thread of the caller.
        clock: the time of edges and readings.

    Example:
        >>> with open_power("GPU-…") as power, power.window() as w:  # doctest: +SKIP
        ...     train()
        >>> w.energy_j, w.tier, w.findings  # doctest: +SKIP
    """

    def __init__(self, source: PowerSource, clock: Callable[[], float] = time.perf_counter) -> None:
        self.source = source
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the source."""
        self.source.close()

    @contextmanager
    def window(self) -> Iterator[PowerWindow]:
        """Sample while the block runs. No trouble of the sensors is raised here: see ``problem`` and ``missing``."""
        window, recorder = self.prepare()
        stop = threading.Event()
        thread: threading.Thread | None = None
        if recorder is not None:
            thread = threading.Thread(target=recorder.run, args=(stop.wait,), name="joulemark-power", daemon=True)
            thread.start()
            recorder.started.wait(_FIRST_READINGS_S)
        window.start = self._clock()
        try:
            yield window
        finally:
            window.end = self._clock()
            stop.set()
            if thread is not None:
                thread.join()

    def prepare(self) -> tuple[PowerWindow, Recorder | None]:
        """A window and what fills it; no recorder when the source does not open (the window then holds the problem)."""
        try:
            self.source.open()
        except DeviceError as problem:
            return PowerWindow(self.source.energy_tier, self.source.power_tier, problem=problem), None
        window = PowerWindow(self.source.energy_tier, self.source.power_tier, self.source.power_is_instant)
        return window, Recorder(self.source, window, self._clock)


class Recorder:
    """Fills a window from a source until it is told to stop.

    The energy counter is polled densely only around the time at which its next update is due, as one read may
    take 5 ms; power is read in between, a few ms apart with jitter.

    Args:
        source: open.
        window: to fill.
        clock: of the times.
        seed: of the jitter.
    """

    condition_s = 0.1
    _dense_s = 1e-3
    _sparse_s = 0.02
    _early = 0.9

    def __init__(
        self, source: PowerSource, window: PowerWindow, clock: Callable[[], float], seed: int | None = None
    ) -> None:
        self._source = source
        self._window = window
        self._clock = clock
        self._jitter = random.Random(seed)
        self._last: tuple[float, float] | None = None
        self._due: dict[str, float] = {}
        self.started = threading.Event()

    def run(self, wait: Callable[[float], bool]) -> None:
        """Sample until ``wait(seconds)`` answers True; what goes wrong is left in the window."""
        cpu = time.thread_time()
        try:
            self._loop(wait)
        except DeviceError as problem:
            self._break_off(problem)
        except Exception as problem:  # the workload must go on, and its figures say why there is no energy
            self._break_off(DeviceError(f"power sampling stopped: {type(problem).__name__}: {problem}"))
        finally:
            self.started.set()
        self._window.sampler_cpu_s = time.thread_time() - cpu

    def _break_off(self, problem: DeviceError) -> None:
        self._window.problem, self._window.problem_t = problem, self._clock()

    def _loop(self, wait: Callable[[float], bool]) -> None:
        take = {"energy": self._take_energy, "power": self._take_power, "conditions": self._take_conditions}
        self._due = dict.fromkeys(take, self._clock())
        rounds = 0
        while self._due:
            sensor = min(self._due, key=self._due.__getitem__)
            stopped = wait(max(0.0, self._due[sensor] - self._clock()))
            if stopped:
                break
            self._try(sensor, take[sensor])
            rounds += 1
            if rounds == len(take):
                self.started.set()
        if "power" in self._due:
            self._try("power", self._take_power)  # so that the integral reaches the end of the block

    def _try(self, sensor: str, take: Callable[[], None]) -> None:
        try:
            take()
        except (NotSupported, NotPermitted) as lack:
            self._window.missing[sensor] = lack
            del self._due[sensor]

    def _take_energy(self) -> None:
        begin = self._clock()
        energy = self._source.read_energy_j()
        end = self._clock()
        middle = (begin + end) / 2
        last, self._last = self._last, (middle, energy)
        if last is not None and energy != last[1]:
            # The update lies after the last read that did not show it, and within one period.
            earliest = max(last[0], middle - self._source.update_s)
            edge = EnergyEdge((earliest + middle) / 2, energy, (middle - earliest) / 2 + (end - begin) / 2)
            self._window.edges.append(edge)
            self._due["energy"] = max(end + self._dense_s, edge.t + max(self._sparse_s, self._early * self._period()))
        else:
            self._due["energy"] = end + self._dense_s

    def _period(self) -> float:
        """Time between updates as seen so far, in s; 0 until three are known."""
        times = [edge.t for edge in self._window.edges[-9:]]
        return median(b - a for a, b in pairwise(times)) if len(times) > 3 else 0.0

    def _take_power(self) -> None:
        power = self._source.read_power_w()
        now = self._clock()
        self._window.readings.append(PowerReading(now, power))
        self._due["power"] = now + self._jitter.uniform(2e-3, 8e-3)

    def _take_conditions(self) -> None:
        state = self._source.read_conditions()
        if state is None:
            del self._due["conditions"]
            return
        now = self._clock()
        self._window.states.append((now, state))
        self._due["conditions"] = now + self.condition_s


def open_power(gpu_uuid: str | None, backend: Any = None) -> PowerSampler:
    """The sampler of a GPU, or of the CPU packages when there is none.

    A source that does not open becomes a null source with the typed reason: windows then run, and say why they
    have no figures.

    Args:
        gpu_uuid: NVML's UUID; None for the CPU.
        backend: a stand-in for pynvml.
    """
    source: PowerSource = RaplSource() if gpu_uuid is None else NvmlPowerSource(gpu_uuid, backend)
    try:
        source.open()
    except DeviceError as problem:
        return PowerSampler(NullPowerSource(problem))
    return PowerSampler(source)


def sm_clock_of(gpu_uuid: str, backend: Any = None) -> Callable[[], float | None]:
    """What reads the SM clock of a GPU in Hz, quickly; it answers None where NVML does not.

    NVML stays open as long as the process lives.

    Args:
        gpu_uuid: NVML's UUID.
        backend: a stand-in for pynvml.
    """
    nvml = Nvml(backend)
    try:
        nvml.open()
        device = nvml.device(gpu_uuid)
    except DeviceError:
        nvml.close()
        return lambda: None
    return lambda: read_or_none(device.sm_clock_hz)


def idle_power(source: PowerSource, seconds: float, sleep: Callable[[float], object] = time.sleep) -> Value:
    """Mean power while this process does nothing, for a baseline.

    Args:
        source: what to read.
        seconds: of waiting; two or more for a figure without a finding.
        sleep: waits.

    Raises:
        DeviceError: the sensors give no figure; the message says why.
    """
    with PowerSampler(source).window() as window:
        sleep(seconds)
    if window.power_w is None:
        raise window.problem or DeviceError(f"idle power of {source.name}: {window.reason}")
    return window.reading.power_w
