"""A thin binding to libcupti's profiler host and PM sampling API: its library, its calls, its errors.

Source: CUPTI's headers (see :mod:`joulemark.collect.cupti_structs`) and the CUPTI documentation, sections "CUPTI PM
Sampling API" and "CUPTI Profiler Host API". :mod:`joulemark.collect.cupti_device` builds on it what
one device does.
"""

from __future__ import annotations

import ctypes
import os
import site
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.collect import cupti_structs as c
from joulemark.errors import (
    ConfigurationError,
    CountersBusy,
    CountersOverflow,
    CountersUnavailable,
    CountersUnreadable,
    DeviceError,
    NotPermitted,
    NotSupported,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PERMISSION_REMEDY = (
    "let the administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run as root "
    "(in a container: with the capability SYS_ADMIN)"
)
BUSY_REMEDY = "stop the other profiler (dcgm, nsys, ncu, another run); `dcgmi profile --pause` pauses DCGM's"
LIBRARY_REMEDY = "pip install nvidia-cuda-cupti (of the same CUDA as torch), or name a library"

_OLDEST = 24  # CUPTI 12.6: the first with PM sampling
_NAMES_SETS = 130200
_PERMISSION = frozenset({35, 40})
_BUSY = frozenset({26, 39})
_LACKING = frozenset({11, 27, 33, 41, 42, 43, 44, 45, 46})
_LIBRARY = frozenset({14, 15, 36})
_INVALID_OPERATION, _OUT_OF_MEMORY = 7, 8
_OF_ONE_GROUP = frozenset(
    {
        "cuptiPmSamplingSetConfig",
        "cuptiPmSamplingGetCounterDataSize",
        "cuptiPmSamplingCounterDataImageInitialize",
        "cuptiPmSamplingDecodeData",
        "cuptiProfilerHostEvaluateToGpuValues",
    }
)
_SUPPORT_LEVELS = {0: "unknown", 1: "unsupported", 2: "disabled by the system", 3: "supported", 4: "limited"}


def translate(function: str, code: int, text: str) -> DeviceError:
    """The typed error of a ``CUptiResult``.

    Args:
        function: that answered it.
        code: the number in ``cupti_result.h``.
        text: CUPTI's name of it.
    """
    what = f"{function} answered {text} ({code})"
    if code in _PERMISSION:
        return NotPermitted(what, PERMISSION_REMEDY)
    if code in _BUSY or (code == _INVALID_OPERATION and function == "cuptiPmSamplingEnable"):
        return CountersBusy(what, BUSY_REMEDY)
    if code == _OUT_OF_MEMORY and function == "cuptiPmSamplingDecodeData":
        return CountersOverflow(what, "sample at a longer interval, or run for less time")
    if function in _OF_ONE_GROUP:
        return CountersUnreadable(what, "count fewer metrics in one pass, or sample at a longer interval")
    if code in _LACKING:
        return NotSupported(what)
    if code in _LIBRARY:
        return CountersUnavailable(what, "see that libcupti, libnvperf_host and the driver are of one CUDA")
    return DeviceError(what)


def find_library(named: str | None = None) -> Path:
    """The libcupti to use: the one that is loaded, else one named, else one installed beside this Python.

    Args:
        named: path of a library, or of a folder that holds one (``pip install --target FOLDER nvidia-cuda-cupti``).

    Raises:
        ConfigurationError: nothing is there where the user pointed.
        CountersUnavailable: none is installed, or another than the named one is already loaded.
    """
    loaded = loaded_libraries()
    if named is None:
        found = _first(loaded) or _installed()
        if found is None:
            raise CountersUnavailable("no libcupti is installed", LIBRARY_REMEDY)
        return found
    wanted = _named(named)
    # torch loads its own beside one that is there already; the first one stays the one that everybody is linked with.
    if loaded and not any(path.samefile(wanted) for path in loaded):
        raise CountersUnavailable(
            f"{wanted} was named, but {loaded[0]} is already loaded",
            "load the named library before torch is imported: everybody in a process is linked with the first",
        )
    return wanted


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> tuple[Path, ...]:
    """Paths of the libcuptis that this process has loaded, by torch or otherwise, in order of address."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = (Path(line.split(maxsplit=5)[5]) for line in lines if "/libcupti.so" in line)
    return tuple(dict.fromkeys(path for path in paths if path.name.startswith("libcupti.so")))


def _first(loaded: Sequence[Path]) -> Path | None:
    """Of several loaded libraries the one that came first, which the dynamic linker finds by its bare name."""
    if len(loaded) < 2:
        return next(iter(loaded), None)
    there = ctypes.CDLL(loaded[0].name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    address = ctypes.cast(there.cuptiGetVersion, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        low, high = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if low <= address < high:
            return Path(line.split(maxsplit=5)[5])
    return loaded[0]


def _named(named: str) -> Path:
    path = Path(named).expanduser()
    found = next(iter(sorted(path.rglob("libcupti.so.*"))), None) if path.is_dir() else path
    if found is None or not found.is_file():
        raise ConfigurationError(
            f"no libcupti at {named}", "name libcupti.so.13 itself, or the folder that pip installed it into"
        )
    return found.resolve()


def _installed() -> Path | None:
    folders = [*sys.path, *site.getsitepackages()]
    found = (path for folder in folders for path in Path(folder).glob("nvidia/*/lib/libcupti.so.*"))
    return next(found, None)


def load_library(named: str | None = None) -> Cupti:
    """Loads libcupti for the whole process; to use another than torch's own, call it before torch is imported.

    Args:
        named: see :func:`find_library`.

    Raises:
        ConfigurationError: nothing is there where the user pointed.
        CountersUnavailable: it cannot be loaded, is too old, or another one is loaded already.
    """
    path = find_library(named)
    # libcupti opens these two by name, which fails where the dynamic linker does not know their folder.
    for sibling in ("libnvperf_target.so", "libnvperf_host.so"):
        if (path.parent / sibling).exists():
            _load(path.parent / sibling)
    return Cupti(_load(path), path)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise CountersUnavailable(f"{path} cannot be loaded ({error})", LIBRARY_REMEDY) from error


def names(texts: Iterable[str]) -> Any:
    """An array of C strings."""
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


class Cupti:
    """The loaded library.

    Args:
        library: of ctypes.
        path: where it lies.

    Raises:
        CountersUnavailable: it is too old for PM sampling, or does not start.
    """

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self._library = library
        self.path = path
        number = ctypes.c_uint32()
        code = library.cuptiGetVersion(ctypes.byref(number))
        if code:
            raise CountersUnavailable(
                f"{path} does not start (cuptiGetVersion answered {code})", "see whether the NVIDIA driver is loaded"
            )
        self.api_version = int(number.value)
        if self.api_version < _OLDEST or not hasattr(library, "cuptiPmSamplingEnable"):
            raise CountersUnavailable(
                f"{path} has no PM sampling (API version {self.api_version})", "use CUPTI 12.6 or later"
            )

    @property
    def version(self) -> str:
        """As ``13.0.1``; CUPTI before 13 says a bare number."""
        major, rest = divmod(self.api_version, 10000)
        return f"{major}.{rest // 100}.{rest % 100}" if major else f"API {self.api_version}"

    @property
    def names_sets(self) -> bool:
        """Whether the set of metrics that a pass is made of can be named (13.2 and later)."""
        return self.api_version >= _NAMES_SETS

    def call(self, function: str, struct: str, **fields: Any) -> Any:
        """Call a function with its parameter structure, and return the structure.

        Raises:
            DeviceError: the typed form of what CUPTI answered.
        """
        given = c.parameters(struct, self.api_version, **fields)
        self.call_with(function, given)
        return given

    def call_with(self, function: str, struct: Any) -> None:
        """Call a function with a structure that is already there.

        Raises:
            DeviceError: the typed form of what CUPTI answered.
        """
        try:
            target = getattr(self._library, function)
        except AttributeError:
            raise CountersUnavailable(f"{self.path} has no {function}", "use a newer CUPTI") from None
        code = target(ctypes.byref(struct))
        if code:
            raise translate(function, code, self._text(code))

    def _text(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuptiGetResultString(code, ctypes.byref(text))
        return (text.value or b"an unnamed error").decode("utf-8", "replace")

    def initialize(self) -> None:
        """Start the driver and CUPTI's profiling; may be repeated.

        Raises:
            DeviceError: either does not start.
        """
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CountersUnavailable(f"the CUDA driver cannot be loaded ({error})", "install the driver") from error
        if code := driver.cuInit(0):
            raise DeviceError(f"cuInit answered {code}", "see whether nvidia-smi works")
        self.call("cuptiProfilerInitialize", "CUpti_Profiler_Initialize_Params")

    def chip(self, device: int) -> str:
        """Name of a device's chip, as ``GH100``."""
        found = self.call("cuptiDeviceGetChipName", "CUpti_Device_GetChipName_Params", deviceIndex=device)
        return str(found.pChipName.decode("ascii", "replace"))

    def unsupported(self, device: int) -> dict[str, str]:
        """What of a device's configuration keeps PM sampling from working: aspect → level; empty when nothing does."""
        found = self.call(
            "cuptiProfilerDeviceSupported",
            "CUpti_Profiler_DeviceSupported_Params",
            cuDevice=device,
            api=c.PROFILER_API_PM_SAMPLING,
        )
        if found.isSupported in (3, 4):
            return {}
        aspects = [field[0] for field in found._fields_ if field[0] not in ("structSize", "pPriv", "cuDevice", "api")]
        levels = {aspect: int(getattr(found, aspect)) for aspect in aspects}
        return {
            aspect: _SUPPORT_LEVELS.get(level, str(level)) for aspect, level in levels.items() if level not in (3, 4)
        }

    def chips(self) -> tuple[str, ...]:
        """Chips whose metrics this library knows."""
        found = self.call("cuptiProfilerHostGetSupportedChips", "CUpti_Profiler_Host_GetSupportedChips_Params")
        return tuple(found.ppChipNames[i].decode() for i in range(found.numChips))

    def availability(self, device: int) -> bytes:
        """Image of which counters the device gives to this process; needed for chips that the library does not know."""
        name = "CUpti_PmSampling_GetCounterAvailability_Params"
        size = self.call("cuptiPmSamplingGetCounterAvailability", name, deviceIndex=device)
        image = (ctypes.c_uint8 * size.counterAvailabilityImageSize)()
        self.call(
            "cuptiPmSamplingGetCounterAvailability",
            name,
            deviceIndex=device,
            counterAvailabilityImageSize=len(image),
            pCounterAvailabilityImage=ctypes.addressof(image),
        )
        return bytes(image)
