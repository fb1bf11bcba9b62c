"""Simulated GPUs, clocks and recorded sensors: what a test needs to see joulemark work without a GPU.

>>> gpu = FakeGpu(power_w=300.0)
>>> window = simulate_window(gpu, seconds=3.0)
>>> round(window.power_w), window.tier
(300, 'nvml_energy_counter')

``JOULEMARK_FAKE_GPUS=FILE.json`` puts simulated GPUs in NVML's place in every process that inherits it. The file
holds ``driver`` (text), ``cuda_driver`` (number), ``init_error`` (NVML error number) and ``gpus``, a list of objects
with ``name``, ``uuid``, ``pci``, ``mig`` (list of ``{name, uuid}``), ``lost_after_calls`` and the sensors
``power_mw``, ``power_instant_mw``, ``energy``, ``sm_clock``, ``mem_clock``, ``max_sm_clock`` (MHz), ``temp``,
``throttle`` (bit mask), ``limit_mw``, ``mem_total``, ``mem_used``, ``util`` (per cent), and ``processes``,
``graphics_processes`` (pids), ``persistence``, ``slowdown_temp``, ``uncorrected_errors``, ``remap_pending``,
``remap_failed``. A sensor is a number,
``{"error": NVML error number}`` or ``{"series": [[seconds, number], …]}``, a step function of time; ``energy`` is
``{"counter_from_power": true, "period_s": …, "start_mj": …}`` or an error. ``counters`` of a GPU holds per tier, best
first (``pm_sampling``, ``gpm``), the name of a refusal (``permission``, ``unsupported``, ``library``, ``busy``,
``unreadable``) or ``{"rates": {counter: share, or number per second}, "passes": {name: [counters]}, "missing":
{counter: reason}}`` (see :class:`FakeCounters`); without it, no tier works.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from joulemark.collect.power import ConditionReading, NvmlPowerSource, PowerSampler, PowerWindow
from joulemark.device.clocks import reason_mask
from joulemark.errors import ConfigurationError, NotSupported
from joulemark.fake_counters import FakeCounters, FakePmDevice, counters_from_file, fake_ladder

__all__ = [
    "FakeClock", "FakeCounters", "FakeGpu", "FakeNvml", "FakeNvmlError", "FakePmDevice", "Level", "ReplayCollector",
    "backend_from_file", "backend_of", "counters_from_file", "fake_ladder", "simulate_window",
]  # fmt: skip

Level = float | Callable[[float], float]
"""A constant, or a function of the seconds since the GPU's ``clock`` showed ``born``."""

_NOT_SUPPORTED, _NOT_FOUND, _LOST, _INVALID = 3, 6, 15, 2
_SI_PREFIX_STEP = 1e-3


class FakeClock:
    """A clock that moves only when told, in s.

    It serves as ``time.perf_counter``, as ``time.sleep`` (:meth:`sleep`) and as the sampler's wait.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(0.0, seconds)


class FakeNvmlError(Exception):
    """An error of the simulated NVML, by its number in nvml.h."""

    _texts: Mapping[int, str] = {
        1: "Uninitialized",
        2: "Invalid Argument",
        3: "Not Supported",
        4: "Insufficient Permissions",
        6: "Not Found",
        9: "Driver Not Loaded",
        12: "NVML Shared Library Not Found",
        15: "GPU is lost",
        17: "GPU access blocked by the operating system",
        18: "RM has detected an NVML/RM version mismatch.",
    }

    def __init__(self, value: int) -> None:
        super().__init__(self._texts.get(value, "Unknown Error"))
        self.value = value


@dataclass
class FakeGpu:
    """A simulated GPU: a power source by itself, and a device of :class:`FakeNvml`.

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
    energy_tier: str = field(default=NvmlPowerSource.energy_tier, init=False)
    power_tier: str = field(default=NvmlPowerSource.power_tier, init=False)
    update_s: float = field(default=0.11, init=False)
    _source: NvmlPowerSource | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if math.isnan(self.born):
            self.born = self.clock()
        self.update_s = 1.1 * (self.energy_period_s or 0.1)

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
            raise FakeNvmlError(_LOST)
        if sensor in self.errors:
            raise FakeNvmlError(self.errors[sensor])

    def level(self, level: Level) -> float:
        """A constant or function of time, now."""
        return level(self.age_s) if callable(level) else level

    def counter_j(self) -> float:
        """The energy counter, which moves every ``energy_period_s``, in J."""
        if self.energy_period_s is None:
            raise FakeNvmlError(_NOT_SUPPORTED)
        updates = math.floor(self.age_s / self.energy_period_s + 1e-9)
        if callable(self.power_w):
            spent = sum(self.power_w((k + 0.5) * self.energy_period_s) for k in range(updates)) * self.energy_period_s
        else:
            spent = self.power_w * updates * self.energy_period_s
        return self.energy_start_j + self.gain * spent

    # The protocol of a power source, by way of the real one over a simulated NVML.

    @property
    def power_is_instant(self) -> bool:
        """Whether power is read from an instant sensor; known once open."""
        return self._source is not None and self._source.power_is_instant

    def open(self) -> None:
        """Get ready to be read.

        Raises:
            DeviceError: as the GPU was told to fail.
        """
        if self._source is None:
            source = NvmlPowerSource(self.uuid, FakeNvml([self]))
            source.open()
            self._source = source

    def close(self) -> None:
        """Stop being read."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _opened(self) -> NvmlPowerSource:
        self.open()
        assert self._source is not None
        return self._source

    def read_energy_j(self) -> float:
        """The counter, in J; raises as :class:`joulemark.collect.power.PowerSource` says."""
        return self._opened().read_energy_j()

    def read_power_w(self) -> float:
        """The power, in W."""
        return self._opened().read_power_w()

    def read_conditions(self) -> ConditionReading:
        """Clocks, temperature and reasons."""
        return self._opened().read_conditions()


class _GpmRequest:
    """NVML's structure of a request for GPM metrics."""

    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1: Any = None
        self.sample2: Any = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(100)]


class FakeNvml:
    """What joulemark calls of the module pynvml, answered by :class:`FakeGpu`.

    Args:
        gpus: in bus order.
        driver: version of the kernel driver.
        cuda_driver: as NVML numbers it: 13000 for 13.0.
        init_error: error number with which ``nvmlInit`` fails.
        bytes_strings: answer text as bytes, as old releases do.
    """

    NVMLError = FakeNvmlError
    c_nvmlGpmMetricsGet_t = _GpmRequest
    joulemark_simulated = True

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        driver: str = "580.159.03",
        cuda_driver: int = 13000,
        init_error: int | None = None,
        bytes_strings: bool = False,
    ) -> None:
        self.gpus = list(gpus)
        self.driver = driver
        self.cuda_driver = cuda_driver
        self.init_error = init_error
        self.bytes_strings = bytes_strings
        self.sessions = 0
        self.gpm_samples = 0
        self.log: list[tuple[str, str]] = []

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.bytes_strings else text

    def _touch(self, device: Any, call: str, sensor: str = "") -> FakeGpu:
        self._need_session()
        if not isinstance(device, FakeGpu):
            raise FakeNvmlError(_NOT_SUPPORTED)  # a MIG instance has no sensors of its own
        self.log.append((call, device.uuid))
        device.touch(sensor)
        return device

    def _need_session(self) -> None:
        if self.sessions <= 0:
            raise FakeNvmlError(1)

    def nvmlGpmQueryDeviceSupport(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(self._touch(device, "nvmlGpmQueryDeviceSupport").gpm is not None))

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        self._need_session()
        self.gpm_samples += 1
        return SimpleNamespace(gpu=None, age_s=math.nan)

    def nvmlGpmSampleGet(self, device: Any, sample: SimpleNamespace) -> SimpleNamespace:
        sample.gpu = self._touch(device, "nvmlGpmSampleGet", "gpm")
        sample.age_s = sample.gpu.age_s
        return sample

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:  # noqa: ARG002
        self._need_session()
        self.gpm_samples -= 1

    def nvmlGpmMetricsGet(self, request: _GpmRequest) -> _GpmRequest:
        first, second = request.sample1, request.sample2
        levels = first.gpu.gpm or {}
        for metric in request.metrics[: request.numMetrics]:
            level = levels.get(metric.metricId, {"error": _INVALID})
            metric.nvmlReturn = level["error"] if isinstance(level, Mapping) else 0
            if not isinstance(level, Mapping):
                middle = (first.age_s + second.age_s) / 2 - first.gpu.gpm_lag_s
                blind = second.age_s - first.age_s < first.gpu.gpm_blind_s
                metric.value = 0.0 if blind else float(level(middle) if callable(level) else level)
        return request

    def nvmlInit(self) -> None:
        self.log.append(("nvmlInit", ""))
        if self.init_error:
            raise FakeNvmlError(self.init_error)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.log.append(("nvmlShutdown", ""))
        self._need_session()
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        self._need_session()
        return self._text(self.driver)

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._need_session()
        return self.cuda_driver

    def nvmlDeviceGetCount(self) -> int:
        self._need_session()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._need_session()
        if not 0 <= index < len(self.gpus):
            raise FakeNvmlError(_INVALID)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._need_session()
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
            if uuid in gpu.mig:
                return self._instance(gpu, gpu.mig.index(uuid))
        raise FakeNvmlError(_NOT_FOUND)

    def _instance(self, gpu: FakeGpu, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=gpu.mig[index], name=f"{gpu.name} MIG 1g", memory=gpu.memory_bytes // 8)

    def nvmlDeviceGetName(self, device: Any) -> str | bytes:
        return self._text(device.name)

    def nvmlDeviceGetUUID(self, device: Any) -> str | bytes:
        return self._text(device.uuid)

    def nvmlDeviceGetPciInfo(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(busId=self._text(self._touch(device, "pci").pci_bus_id))

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> SimpleNamespace:
        if not isinstance(device, FakeGpu):
            return SimpleNamespace(total=device.memory, used=0)
        return SimpleNamespace(total=device.memory_bytes, used=device.memory_used_bytes)

    def nvmlDeviceGetVbiosVersion(self, device: Any) -> str | bytes:
        self._touch(device, "vbios")
        return self._text("96.00.AF.00.01")

    def nvmlDeviceGetEccMode(self, device: Any) -> list[int]:
        self._touch(device, "ecc")
        return [1, 1]

    def nvmlDeviceGetPersistenceMode(self, device: Any) -> int:
        return int(self._touch(device, "persistence").persistence)

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, counter: int) -> int:
        gpu = self._touch(device, "memory_faults", "memory_faults")
        return gpu.uncorrected_errors if (kind, counter) == (1, 0) else 0

    def nvmlDeviceGetRemappedRows(self, device: Any) -> list[int]:
        gpu = self._touch(device, "memory_faults", "memory_faults")
        return [0, 0, int(gpu.remap_pending), int(gpu.remap_failed)]

    def nvmlDeviceGetMarginTemperature(self, device: Any) -> int:
        gpu = self._touch(device, "slowdown_margin", "slowdown_margin")
        return round(gpu.slowdown_temperature_c - gpu.level(gpu.temperature_c))

    def nvmlDeviceGetTemperatureThreshold(self, device: Any, threshold: int) -> int:
        gpu = self._touch(device, "slowdown_temperature", "slowdown_temperature")
        if threshold != 1:
            raise FakeNvmlError(_NOT_SUPPORTED)
        return round(gpu.slowdown_temperature_c)

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        mode = int(bool(self._touch(device, "mig").mig))
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        return 7 if self._touch(device, "mig").mig else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> SimpleNamespace:
        gpu = self._touch(device, "mig")
        if index >= len(gpu.mig):
            raise FakeNvmlError(_NOT_FOUND)
        return self._instance(gpu, index)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any) -> int:
        gpu = self._touch(device, "energy", "energy")
        pause = getattr(gpu.clock, "sleep", None)
        if pause is not None:
            pause(gpu.read_s)
        return round(gpu.counter_j() / _SI_PREFIX_STEP)

    def nvmlDeviceGetPowerUsage(self, device: Any) -> int:
        gpu = self._touch(device, "power", "power")
        return round(gpu.level(gpu.power_w) / _SI_PREFIX_STEP)

    def nvmlDeviceGetFieldValues(self, device: Any, fields: Sequence[int]) -> list[SimpleNamespace]:
        gpu = self._touch(device, "power_instant")
        code = gpu.errors.get("power_instant", 0 if gpu.has_instant_power else _NOT_SUPPORTED)
        shown = gpu.power_w if gpu.instant_power_w is None else gpu.instant_power_w
        milliwatts = 0 if code else round(gpu.level(shown) / _SI_PREFIX_STEP)
        value = SimpleNamespace(uiVal=milliwatts)
        return [SimpleNamespace(nvmlReturn=code if f == 186 else 3, valueType=1, value=value) for f in fields]

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any) -> int:
        return round(self._touch(device, "power_limit", "power_limit").power_limit_w / _SI_PREFIX_STEP)

    nvmlDeviceGetPowerManagementDefaultLimit = nvmlDeviceGetEnforcedPowerLimit

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int) -> int:
        sensor = "sm_clock" if kind in (0, 1) else "memory_clock"
        gpu = self._touch(device, sensor, sensor)
        return round(gpu.level(gpu.sm_clock_hz if sensor == "sm_clock" else gpu.memory_clock_hz) / 1e6)

    def nvmlDeviceGetMaxClockInfo(self, device: Any, kind: int) -> int:
        del kind
        return round(self._touch(device, "max_sm_clock").max_sm_clock_hz / 1e6)

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int) -> int:
        del sensor
        gpu = self._touch(device, "temperature", "temperature")
        return round(gpu.level(gpu.temperature_c))

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Any) -> int:
        return reason_mask(self._touch(device, "reasons", "reasons").reasons)

    def nvmlDeviceGetUtilizationRates(self, device: Any) -> SimpleNamespace:
        gpu = self._touch(device, "utilization", "utilization")
        return SimpleNamespace(gpu=round(100 * gpu.level(gpu.utilization)), memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> list[SimpleNamespace]:
        gpu = self._touch(device, "processes", "processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in gpu.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, device: Any) -> list[SimpleNamespace]:
        gpu = self._touch(device, "graphics_processes", "processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in gpu.graphics_processes]


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


def simulate_window(
    source: FakeGpu | ReplayCollector, seconds: float, lead_s: float = 0.0, tail_s: float = 0.0
) -> PowerWindow:
    """What the sampler records of a source in ``seconds``, in no time: its clock becomes a :class:`FakeClock`.

    Args:
        source: to sample.
        seconds: length of the window.
        lead_s, tail_s: how much earlier and later the sampling begins and ends.
    """
    clock = source.clock if isinstance(source.clock, FakeClock) else FakeClock()
    if source.clock is not clock:
        source.clock = clock
        if isinstance(source, FakeGpu):
            source.born = clock()
    window, recorder = PowerSampler(source, clock).prepare()
    window.start = clock() + lead_s
    window.end = window.start + seconds
    stop = window.end + tail_s

    def wait(pause: float) -> bool:
        clock.sleep(min(pause, max(0.0, stop - clock())))
        return clock() >= stop

    if recorder is not None:
        recorder.run(wait)
    return window


@cache
def backend_from_file(path: str) -> FakeNvml:
    """The simulated NVML of a scenario file; one per process, so that its counters go on over sessions.

    Raises:
        ConfigurationError: the file cannot be read as a scenario.
    """
    try:
        scenario = json.loads(Path(path).read_text(encoding="utf-8"))
        return backend_of(scenario)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"JOULEMARK_FAKE_GPUS={path} is no scenario ({type(error).__name__}: {error})",
            "see joulemark.testing for its form, or unset the variable",
        ) from error


def backend_of(scenario: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter) -> FakeNvml:
    """The simulated NVML of a scenario (its form stands at the top of this module)."""
    born = clock()
    return FakeNvml(
        [_gpu_of(entry, clock, born) for entry in scenario.get("gpus", ())],
        driver=str(scenario.get("driver", "580.159.03")),
        cuda_driver=int(scenario.get("cuda_driver", 13000)),
        init_error=scenario.get("init_error"),
        bytes_strings=bool(scenario.get("bytes_strings", False)),
    )


def scenario_of(gpus: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A scenario of GPUs that each draw a constant power and have an energy counter.

    Args:
        gpus: per GPU its ``name``, ``power_w`` (in W) and ``number``, from which UUID and bus address are made.
    """
    return {
        "gpus": [
            {
                "name": gpu["name"],
                "uuid": f"GPU-{gpu['number']:08x}-0a0a-4b4b-8c8c-000000000000",
                "pci": f"00000000:{gpu['number'] + 16:02X}:00.0",
                "power_mw": round(gpu["power_w"] / _SI_PREFIX_STEP),
                "energy": {"counter_from_power": True, "period_s": 0.1, "start_mj": 1_000_000},
            }
            for gpu in gpus
        ]
    }


_SCENARIO_SENSORS = {
    "power_mw": ("power", 1e-3),
    "power_instant_mw": ("power_instant", 1e-3),
    "energy": ("energy", 1e-3),
    "sm_clock": ("sm_clock", 1e6),
    "mem_clock": ("memory_clock", 1e6),
    "temp": ("temperature", 1.0),
    "util": ("utilization", 1e-2),
    "limit_mw": ("power_limit", 1e-3),
    "throttle": ("reasons", 1.0),
}


def _gpu_of(entry: Mapping[str, Any], clock: Callable[[], float], born: float) -> FakeGpu:
    errors = {
        name: int(entry[key]["error"])
        for key, (name, _) in _SCENARIO_SENSORS.items()
        if isinstance(entry.get(key), Mapping) and "error" in entry[key]
    }
    energy = entry.get("energy")
    counts = isinstance(energy, Mapping) and bool(energy.get("counter_from_power"))
    if not counts:
        errors.setdefault("energy", _NOT_SUPPORTED)
    counter = energy if isinstance(energy, Mapping) else {}
    return FakeGpu(
        name=entry["name"],
        uuid=entry["uuid"],
        pci_bus_id=entry["pci"],
        power_w=_level(entry, "power_mw", 0.0),
        instant_power_w=_level(entry, "power_instant_mw", 0.0),
        has_instant_power="power_instant_mw" in entry,
        energy_period_s=float(counter.get("period_s", 0.1)),
        energy_start_j=float(counter.get("start_mj", 0.0)) * _SI_PREFIX_STEP,
        sm_clock_hz=_level(entry, "sm_clock", 1.98e9),
        memory_clock_hz=_level(entry, "mem_clock", 2.619e9),
        max_sm_clock_hz=float(entry.get("max_sm_clock", 1980)) * 1e6,
        temperature_c=_level(entry, "temp", 41.0),
        utilization=_level(entry, "util", 0.5),
        reasons=_reasons(entry.get("throttle", 0)),
        errors=errors,
        mig=tuple(one["uuid"] for one in entry.get("mig", ())),
        memory_bytes=int(entry.get("mem_total", 80 * 2**30)),
        memory_used_bytes=int(entry.get("mem_used", 2**30)),
        power_limit_w=float(_number(entry.get("limit_mw", 700000))) * _SI_PREFIX_STEP,
        lost_after_calls=entry.get("lost_after_calls"),
        processes=tuple(entry.get("processes", ())),
        graphics_processes=tuple(entry.get("graphics_processes", ())),
        persistence=bool(entry.get("persistence", True)),
        uncorrected_errors=int(entry.get("uncorrected_errors", 0)),
        remap_pending=bool(entry.get("remap_pending", False)),
        remap_failed=bool(entry.get("remap_failed", False)),
        slowdown_temperature_c=float(entry.get("slowdown_temp", 90.0)),
        clock=clock,
        born=born,
    )


def _number(value: Any) -> float:
    return 0.0 if isinstance(value, Mapping) else float(value)


def _reasons(mask: Any) -> frozenset[str]:
    from joulemark.device.clocks import reason_names

    return reason_names(int(_number(mask)))


def _level(entry: Mapping[str, Any], key: str, otherwise: float) -> Level:
    """A sensor of a scenario as a constant or step function, in its SI unit."""
    value, scale = entry.get(key), _SCENARIO_SENSORS[key][1]
    if value is None or (isinstance(value, Mapping) and "series" not in value):
        return otherwise
    if not isinstance(value, Mapping):
        return float(value) * scale
    steps = [(float(t), float(level) * scale) for t, level in value["series"]]
    times = [t for t, _ in steps]
    return lambda age: steps[max(0, bisect_right(times, age) - 1)][1]
