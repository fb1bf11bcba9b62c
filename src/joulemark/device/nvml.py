"""A session with NVML whose every failure is a typed error; the only module that imports pynvml."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from joulemark.device.clocks import reason_names
from joulemark.errors import DeviceError, GpuLost, NotPermitted, NotSupported, NvmlUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FAKE_GPUS = "JOULEMARK_FAKE_GPUS"
"""Environment variable with the path of a scenario of simulated GPUs (see :mod:`joulemark.testing`)."""

# Numbers of nvml.h rather than the module's constants: older releases of nvidia-ml-py lack some of them.
_INIT_CAUSES: Mapping[int, tuple[str, str]] = {
    9: ("driver_not_loaded", "load the NVIDIA kernel driver (is the GPU there, and passed into this container?)"),
    12: ("library_not_found", "install the NVIDIA driver's libnvidia-ml.so.1, or start the container with GPU support"),
    17: ("blocked_by_os", "let this user or container open /dev/nvidia* (cgroup and device permissions)"),
    18: (
        "driver_library_mismatch",
        "reboot or reload the kernel driver: its version differs from the library's after an update",
    ),
}
_UNINITIALIZED = 1
_NOT_FOUND = frozenset({2, 6, 28})
_LOST = frozenset({15, 16})
_REFUSED = frozenset({4, 17})
_LACKING = frozenset({2, 3, 13, 25, 26})
_FI_POWER_INSTANT = 186
_FIELD_TEXTS = {2: "Invalid Argument", 3: "Not Supported", 4: "Insufficient Permissions", 15: "GPU is lost"}
_VALUE_FIELDS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_UNCORRECTED, _SINCE_LOAD = 1, 0
_SLOWDOWN = 1
_GPM_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """A process that holds a compute context on a GPU.

    Args:
        pid: of the process, in NVML's namespace (a container may not know it).
        memory_bytes: that it uses on the device; None where the driver does not tell.
    """

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class MemoryFaults:
    """What error correction found in a GPU's memory; None where the GPU does not tell.

    Args:
        uncorrected: errors that could not be corrected, since the driver was loaded.
        remap_pending: rows wait for a reset of the GPU to be replaced by spare ones.
        remap_failed: there was no spare row left.
    """

    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


def load_backend() -> Any:
    """The module that speaks NVML: pynvml, or simulated GPUs when ``JOULEMARK_FAKE_GPUS`` names a scenario.

    Raises:
        NvmlUnavailable: nvidia-ml-py is not installed.
    """
    scenario = os.environ.get(FAKE_GPUS)
    if scenario:
        # By name: the layers above this one may import it, it may not import them.
        return importlib.import_module("joulemark.testing").backend_from_file(scenario)
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(
            f"NVML did not start: the Python module pynvml cannot be imported ({error})",
            "pip install nvidia-ml-py",
            cause="library_not_found",
        ) from error
    return pynvml


def translate(error: BaseException, what: str) -> DeviceError:
    """The typed error of an NVML error, with NVML's own text.

    Args:
        error: what the back end raised; its ``value`` is the number of nvml.h.
        what: what was asked, as in ``power of GPU-1234``.
    """
    code = int(getattr(error, "value", 999))
    text = f"{what}: {_own_text(error)} (NVML error {code})"
    if code in _LOST:
        return GpuLost(text, "check the kernel log for Xid messages, then reset the GPU or reboot")
    if code in _REFUSED:
        return NotPermitted(text, "ask the administrator for access, or run with more privilege")
    if code in _LACKING:
        return NotSupported(text)
    if code == _UNINITIALIZED or code in _INIT_CAUSES:
        cause, remedy = _INIT_CAUSES.get(code, ("unknown", "open the session with `with Nvml() as nvml`"))
        return NvmlUnavailable(text, remedy, cause=cause)
    return DeviceError(text)


def _own_text(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


def _text(value: str | bytes) -> str:
    """NVML's strings came as bytes before nvidia-ml-py 11.515."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class Nvml:
    """A session with NVML; a context manager.

    Args:
        backend: a module or object with pynvml's functions; by default see :func:`load_backend`.

    Example:
        >>> with Nvml() as nvml:  # doctest: +SKIP
        ...     nvml.device("GPU-…").power_w()
    """

    def __init__(self, backend: Any = None) -> None:
        self._backend = backend
        self._opened = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are fakes."""
        return bool(getattr(self._backend, "joulemark_simulated", False))

    def open(self) -> None:
        """Initialize NVML.

        Raises:
            NvmlUnavailable: with the cause.
        """
        if self._opened:
            return
        if self._backend is None:
            self._backend = load_backend()
        try:
            self._backend.nvmlInit()
        except self._backend.NVMLError as error:
            code = int(getattr(error, "value", 999))
            cause, remedy = _INIT_CAUSES.get(code, ("unknown", "see whether nvidia-smi works"))
            raise NvmlUnavailable(
                f"NVML did not start: {_own_text(error)} (NVML error {code})", remedy, cause=cause
            ) from error
        self._opened = True

    def close(self) -> None:
        """Shut the session down; nothing after an open that failed.

        Raises:
            DeviceError: NVML refuses to shut down.
        """
        if self._opened:
            self._opened = False
            self._raw("nvmlShutdown", "shutting NVML down")

    def call(self, function: str, *args: Any, what: str) -> Any:
        """Call a function of NVML by name.

        Raises:
            DeviceError: the typed form of what NVML answered; NotSupported when the function is not there.
        """
        if not self._opened:
            raise NvmlUnavailable(f"{what}: the NVML session is not open", "use `with Nvml() as nvml`")
        return self._raw(function, what, *args)

    def _raw(self, function: str, what: str, *args: Any) -> Any:
        target = getattr(self._backend, function, None)
        if target is None:
            raise NotSupported(f"{what}: nvidia-ml-py has no {function}", "pip install -U nvidia-ml-py")
        try:
            return target(*args)
        except self._backend.NVMLError as error:
            raise translate(error, what) from error

    def gpm_request(self, first: Any, second: Any, ids: Sequence[int]) -> Any:
        """NVML's structure that asks for metrics between two samples.

        Raises:
            NotSupported: nvidia-ml-py is too old for it.
        """
        kind = getattr(self._backend, "c_nvmlGpmMetricsGet_t", None)
        if kind is None:
            raise NotSupported("GPM metrics: nvidia-ml-py has no nvmlGpmMetricsGet", "pip install -U nvidia-ml-py")
        request = kind()
        request.version = _GPM_VERSION
        request.numMetrics = len(ids)
        request.sample1, request.sample2 = first, second
        for place, number in enumerate(ids):
            request.metrics[place].metricId = number
        return request

    def driver_version(self) -> str:
        """Version of the kernel driver, as ``580.159.03``."""
        return _text(self.call("nvmlSystemGetDriverVersion", what="driver version"))

    def cuda_driver_version(self) -> str:
        """Newest CUDA that the driver supports, as ``13.0``."""
        number = int(self.call("nvmlSystemGetCudaDriverVersion", what="CUDA driver version"))
        return f"{number // 1000}.{number % 1000 // 10}"

    def count(self) -> int:
        """Number of GPUs that NVML sees."""
        return int(self.call("nvmlDeviceGetCount", what="number of GPUs"))

    def device(self, uuid: str) -> NvmlDevice:
        """The GPU or MIG instance of a UUID.

        Raises:
            DeviceError: there is none.
        """
        what = f"handle of {uuid}"
        if not self._opened:
            raise NvmlUnavailable(f"{what}: the NVML session is not open", "use `with Nvml() as nvml`")
        try:
            # str: nvidia-ml-py encodes it by itself.
            handle = self._backend.nvmlDeviceGetHandleByUUID(uuid)
        except self._backend.NVMLError as error:
            if int(getattr(error, "value", 999)) in _NOT_FOUND:
                raise DeviceError(f"NVML knows no GPU {uuid}", "`joulemark env` lists the GPUs here") from error
            raise translate(error, what) from error
        return NvmlDevice(self, handle, uuid)

    def uuid_at(self, index: int) -> str:
        """UUID of the GPU at NVML's index (bus order), for listing; an index is never an identity."""
        handle = self.call("nvmlDeviceGetHandleByIndex", index, what=f"GPU at NVML index {index}")
        return _text(self.call("nvmlDeviceGetUUID", handle, what=f"UUID of the GPU at NVML index {index}"))


class NvmlDevice:
    """The sensors of one GPU, in SI units; a sensor that is not there raises NotSupported.

    Made by :meth:`Nvml.device`. Every method raises a :class:`joulemark.errors.DeviceError` of its cause.
    """

    def __init__(self, nvml: Nvml, handle: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = uuid

    def _get(self, function: str, *args: Any, what: str) -> Any:
        return self._nvml.call(function, self._handle, *args, what=f"{what} of {self.uuid}")

    def name(self) -> str:
        """Model name, as ``NVIDIA H200``."""
        return _text(self._get("nvmlDeviceGetName", what="name"))

    def pci_bus_id(self) -> str:
        """Domain, bus, device and function, as ``00000000:1B:00.0``."""
        return _text(self._get("nvmlDeviceGetPciInfo", what="PCI bus id").busId)

    def memory_bytes(self) -> int:
        """Total memory, in bytes."""
        return int(self._get("nvmlDeviceGetMemoryInfo", what="memory size").total)

    def memory_used_bytes(self) -> int:
        """Memory in use by anyone, in bytes."""
        return int(self._get("nvmlDeviceGetMemoryInfo", what="memory in use").used)

    def vbios(self) -> str:
        """Version of the board's firmware."""
        return _text(self._get("nvmlDeviceGetVbiosVersion", what="VBIOS version"))

    def ecc(self) -> bool:
        """Whether memory error correction is on."""
        return bool(self._get("nvmlDeviceGetEccMode", what="ECC mode")[0])

    def memory_faults(self) -> MemoryFaults:
        """Errors of the memory and rows that wait to be replaced (row remapping: Ampere and later)."""
        errors = read_or_none(lambda: self._get(
            "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_LOAD, what="uncorrected memory errors"))  # fmt: skip
        rows = read_or_none(lambda: self._get("nvmlDeviceGetRemappedRows", what="remapped rows"))
        _, _, pending, failed = (None,) * 4 if rows is None else rows
        return MemoryFaults(
            None if errors is None else int(errors),
            None if pending is None else bool(pending),
            None if failed is None else bool(failed),
        )

    def persistence(self) -> bool:
        """Whether the driver stays loaded without clients."""
        return bool(self._get("nvmlDeviceGetPersistenceMode", what="persistence mode"))

    def mig(self) -> bool:
        """Whether the GPU is partitioned into MIG instances."""
        return bool(self._get("nvmlDeviceGetMigMode", what="MIG mode")[0])

    def mig_uuids(self) -> list[str]:
        """UUIDs of the MIG instances, in NVML's order."""
        found = []
        for index in range(int(self._get("nvmlDeviceGetMaxMigDeviceCount", what="MIG device count"))):
            try:
                handle = self._get("nvmlDeviceGetMigDeviceHandleByIndex", index, what=f"MIG instance {index}")
            except GpuLost:
                raise
            except DeviceError:
                continue  # a slot without an instance
            found.append(_text(self._nvml.call("nvmlDeviceGetUUID", handle, what=f"UUID of MIG instance {index}")))
        return found

    def energy_j(self) -> float:
        """Energy of the board since the driver was loaded, in J (Volta and later; steps of about 100 ms on Hopper)."""
        return int(self._get("nvmlDeviceGetTotalEnergyConsumption", what="energy counter")) * 1e-3

    def instant_power_w(self) -> float:
        """Power of the board now, in W: ``NVML_FI_DEV_POWER_INSTANT``, Ampere and later."""
        (field,) = self._get("nvmlDeviceGetFieldValues", [_FI_POWER_INSTANT], what="instant power")
        if field.nvmlReturn != 0:
            error = _FieldError(int(field.nvmlReturn))
            raise translate(error, f"instant power of {self.uuid}")
        return float(getattr(field.value, _VALUE_FIELDS.get(int(field.valueType), "uiVal"))) * 1e-3

    def average_power_w(self) -> float:
        """Power of the board in W; an average over 1 s on Ampere (except GA100) and later."""
        return int(self._get("nvmlDeviceGetPowerUsage", what="power")) * 1e-3

    def power_limit_w(self) -> float:
        """Power limit that is enforced, in W."""
        return int(self._get("nvmlDeviceGetEnforcedPowerLimit", what="power limit")) * 1e-3

    def default_power_limit_w(self) -> float:
        """Power limit of the board as delivered, in W."""
        return int(self._get("nvmlDeviceGetPowerManagementDefaultLimit", what="default power limit")) * 1e-3

    def sm_clock_hz(self) -> float:
        """Clock of the SMs, in Hz."""
        return int(self._get("nvmlDeviceGetClockInfo", _CLOCK_SM, what="SM clock")) * 1e6

    def memory_clock_hz(self) -> float:
        """Clock of the memory, in Hz."""
        return int(self._get("nvmlDeviceGetClockInfo", _CLOCK_MEMORY, what="memory clock")) * 1e6

    def max_sm_clock_hz(self) -> float:
        """Highest clock of the SMs, in Hz."""
        return int(self._get("nvmlDeviceGetMaxClockInfo", _CLOCK_SM, what="highest SM clock")) * 1e6

    def temperature_c(self) -> float:
        """Temperature of the die, in degrees Celsius."""
        return float(self._get("nvmlDeviceGetTemperature", 0, what="temperature"))

    def slowdown_margin_k(self) -> float:
        """How much hotter the GPU may get before the hardware slows its clocks down, in K."""
        try:
            return float(self._get("nvmlDeviceGetMarginTemperature", what="thermal margin"))
        except NotSupported:  # before Ada: there the threshold itself is told
            limit = float(self._get("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN, what="slowdown temperature"))
            return limit - self.temperature_c()

    def clock_reasons(self) -> frozenset[str]:
        """Names of the active clock-event reasons (see :mod:`joulemark.device.clocks`)."""
        what = "clock-event reasons"
        try:
            mask = self._get("nvmlDeviceGetCurrentClocksEventReasons", what=what)
        except NotSupported:
            mask = self._get("nvmlDeviceGetCurrentClocksThrottleReasons", what=what)  # its name before driver 535
        return reason_names(int(mask))

    def utilization(self) -> float:
        """Share of the last sample period (1/6 to 1 s) in which some kernel ran, 0 to 1."""
        return int(self._get("nvmlDeviceGetUtilizationRates", what="utilization").gpu) / 100

    def has_gpm(self) -> bool:
        """Whether the GPU has performance metrics between samples (Hopper and later)."""
        return bool(self._get("nvmlGpmQueryDeviceSupport", what="GPM support").isSupportedDevice)

    def gpm_sample(self) -> GpmSample:
        """A snapshot of the GPU's performance counters; free it."""
        sample = GpmSample(self._nvml, self._nvml.call("nvmlGpmSampleAlloc", what="memory for a GPM sample"))
        try:
            self._get("nvmlGpmSampleGet", sample.handle, what="GPM sample")
        except DeviceError:
            sample.free()
            raise
        return sample

    def gpm_metrics(self, first: GpmSample, second: GpmSample, ids: Sequence[int]) -> dict[int, float | DeviceError]:
        """Metrics between two samples of the same GPU, as NVML counts them (per cent, or MiB/s).

        Args:
            first, second: in order of time; less than 50 ms apart, NVML may answer 0 without an error.
            ids: of ``nvmlGpmMetricId_t``.

        Returns:
            Per id its value, or the typed reason why this GPU or driver gives none.
        """
        request = self._nvml.gpm_request(first.handle, second.handle, ids)
        self._nvml.call("nvmlGpmMetricsGet", request, what=f"GPM metrics of {self.uuid}")
        found: dict[int, float | DeviceError] = {}
        for metric, _ in zip(request.metrics, ids, strict=False):
            number, code = int(metric.metricId), int(metric.nvmlReturn)
            what = f"GPM metric {number} of {self.uuid}"
            found[number] = translate(_FieldError(code), what) if code else float(metric.value)
        return found

    def processes(self) -> list[Process]:
        """Processes with a compute context on the GPU."""
        return self._processes("nvmlDeviceGetComputeRunningProcesses", "compute processes")

    def graphics_processes(self) -> list[Process]:
        """Processes that draw with the GPU."""
        return self._processes("nvmlDeviceGetGraphicsRunningProcesses", "graphics processes")

    def _processes(self, function: str, what: str) -> list[Process]:
        return [Process(int(one.pid), getattr(one, "usedGpuMemory", None)) for one in self._get(function, what=what)]


class GpmSample:
    """A snapshot of performance counters, which NVML holds until it is freed.

    Args:
        nvml: the session that it is of.
        handle: NVML's.
    """

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self.handle = handle

    def free(self) -> None:
        """Give it back; nothing the second time."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._nvml.call("nvmlGpmSampleFree", handle, what="memory of a GPM sample")


class _FieldError(Exception):
    """The return code of one field value, in the shape of an NVML error."""

    def __init__(self, value: int) -> None:
        super().__init__(_FIELD_TEXTS.get(value, "field not readable"))
        self.value = value


def read_or_none(read: Callable[[], T]) -> T | None:
    """The reading of a sensor that may lack; a lost GPU is still an error.

    Raises:
        GpuLost: the GPU is gone.
    """
    try:
        return read()
    except GpuLost:
        raise
    except DeviceError:
        return None
