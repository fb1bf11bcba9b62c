"""The exceptions of joulemark, one per cause.

::

    JoulemarkError
    ├── ConfigurationError      an option, a name or a file of the user is wrong (exit 2)
    ├── UnreadableInput         a result or trace file cannot be read (exit 2)
    ├── Unsupported             this machine cannot do what the case asks (a skip, with its reason)
    ├── DeviceError
    │   ├── NvmlUnavailable     NVML did not start; `cause` names why
    │   ├── NotPermitted        the driver refuses without more privilege
    │   ├── NotSupported        this GPU or driver lacks the sensor
    │   ├── GpuLeased           another session measures on the GPU
    │   ├── GpuLost             the GPU fell off the bus or needs a reset
    │   ├── CountersUnavailable the library or tool that reads hardware counters is missing, too old or mismatched
    │   ├── CountersBusy        another profiler holds the hardware counters
    │   └── CountersUnreadable  the counters were sampled, but gave nothing that can be believed
    │       └── CountersOverflow    more was sampled than the hardware buffer holds
    └── MeasurementError
        ├── OutOfMemory         the case does not fit: a result, not a failure
        ├── CaseTimeout         the case was killed at its timeout
        ├── WorkerDied          the measuring process ended without an answer
        └── DevicePoisoned      a CUDA error made the context unusable
"""

from __future__ import annotations


def in_words(error: BaseException) -> str:
    """What went wrong with a file, for a message that names it: without types of Python and numbers of errors."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__


class JoulemarkError(Exception):
    """Base of all errors that joulemark raises on purpose.

    A message has three parts: what failed, the value seen, what to do.

    Args:
        what: what failed, one clause, with the value seen.
        remedy: what the user can do; empty when there is nothing.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        # A message of somebody else's, quoted at the end, may be a sentence of its own.
        return f"{self.what.removesuffix('.')}: {self.remedy}" if self.remedy else self.what

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.remedy), self.__dict__)


class ConfigurationError(JoulemarkError):
    """An option, a name or a file of the user is wrong."""


class UnreadableInput(JoulemarkError):
    """A result or trace file cannot be read."""


class Unsupported(JoulemarkError):
    """This machine cannot do what the case asks."""


class DeviceError(JoulemarkError):
    """A GPU or its management library did not answer as needed."""


class NvmlUnavailable(DeviceError):
    """NVML did not start.

    Args:
        cause: one of ``library_not_found``, ``driver_not_loaded``,
            ``driver_library_mismatch``, ``blocked_by_os``, ``unknown``.
    """

    def __init__(self, what: str, remedy: str = "", cause: str = "unknown") -> None:
        super().__init__(what, remedy)
        self.cause = cause


class NotPermitted(DeviceError):
    """The driver refuses without more privilege."""


class NotSupported(DeviceError):
    """This GPU or driver lacks the sensor."""


class GpuLeased(DeviceError):
    """Another session measures on the GPU."""


class GpuLost(DeviceError):
    """The GPU fell off the bus or needs a reset."""


class CountersUnavailable(DeviceError):
    """The library or tool that reads hardware counters is missing, too old or mismatched."""


class CountersBusy(DeviceError):
    """Another profiler holds the hardware counters."""


class CountersUnreadable(DeviceError):
    """The counters were sampled, but gave nothing that can be believed."""


class CountersOverflow(CountersUnreadable):
    """More was sampled than the hardware buffer holds."""


class MeasurementError(JoulemarkError):
    """A case could not be measured to its end."""


class OutOfMemory(MeasurementError):
    """The case does not fit into memory."""


class CaseTimeout(MeasurementError):
    """The case was killed at its timeout."""


class WorkerDied(MeasurementError):
    """The measuring process ended without an answer."""


class DevicePoisoned(MeasurementError):
    """A CUDA error made the context of the process unusable."""
