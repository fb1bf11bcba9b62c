"""What joulemark calls of the module pynvml, answered by simulated GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from joulemark.device.clocks import reason_mask
from joulemark.testing.device import FakeDevice
from joulemark.testing.nvml_error import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, FakeNvmlError

_MILLI = 1e-3


class _GpmRequest:
    """NVML's structure of a request for GPM metrics."""

    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1: Any = None
        self.sample2: Any = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(100)]


class FakeNvml:
    """What joulemark calls of the module pynvml, answered by :class:`FakeDevice`.

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
        gpus: Sequence[FakeDevice] = (),
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

    def _touch(self, device: Any, call: str, sensor: str = "") -> FakeDevice:
        self._need_session()
        if not isinstance(device, FakeDevice):
            raise FakeNvmlError(NOT_SUPPORTED)  # a MIG instance has no sensors of its own
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

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self._need_session()
        self.gpm_samples -= 1

    def nvmlGpmMetricsGet(self, request: _GpmRequest) -> _GpmRequest:
        first, second = request.sample1, request.sample2
        levels = first.gpu.gpm or {}
        for metric in request.metrics[: request.numMetrics]:
            level = levels.get(metric.metricId, {"error": INVALID_ARGUMENT})
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

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        self._need_session()
        if not 0 <= index < len(self.gpus):
            raise FakeNvmlError(INVALID_ARGUMENT)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._need_session()
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
            if uuid in gpu.mig:
                return self._instance(gpu, gpu.mig.index(uuid))
        raise FakeNvmlError(NOT_FOUND)

    def _instance(self, gpu: FakeDevice, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=gpu.mig[index], name=f"{gpu.name} MIG 1g", memory=gpu.memory_bytes // 8)

    def nvmlDeviceGetName(self, device: Any) -> str | bytes:
        return self._text(device.name)

    def nvmlDeviceGetUUID(self, device: Any) -> str | bytes:
        return self._text(device.uuid)

    def nvmlDeviceGetPciInfo(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(busId=self._text(self._touch(device, "pci").pci_bus_id))

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> SimpleNamespace:
        if not isinstance(device, FakeDevice):
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
            raise FakeNvmlError(NOT_SUPPORTED)
        return round(gpu.slowdown_temperature_c)

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        mode = int(bool(self._touch(device, "mig").mig))
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        return 7 if self._touch(device, "mig").mig else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> SimpleNamespace:
        gpu = self._touch(device, "mig")
        if index >= len(gpu.mig):
            raise FakeNvmlError(NOT_FOUND)
        return self._instance(gpu, index)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any) -> int:
        gpu = self._touch(device, "energy", "energy")
        pause = getattr(gpu.clock, "sleep", None)
        if pause is not None:
            pause(gpu.read_s)
        return round(gpu.counter_j() / _MILLI)

    def nvmlDeviceGetPowerUsage(self, device: Any) -> int:
        gpu = self._touch(device, "power", "power")
        return round(gpu.level(gpu.power_w) / _MILLI)

    def nvmlDeviceGetFieldValues(self, device: Any, fields: Sequence[int]) -> list[SimpleNamespace]:
        gpu = self._touch(device, "power_instant")
        code = gpu.errors.get("power_instant", 0 if gpu.has_instant_power else NOT_SUPPORTED)
        shown = gpu.power_w if gpu.instant_power_w is None else gpu.instant_power_w
        milliwatts = 0 if code else round(gpu.level(shown) / _MILLI)
        value = SimpleNamespace(uiVal=milliwatts)
        return [SimpleNamespace(nvmlReturn=code if f == 186 else 3, valueType=1, value=value) for f in fields]

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any) -> int:
        return round(self._touch(device, "power_limit", "power_limit").power_limit_w / _MILLI)

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
