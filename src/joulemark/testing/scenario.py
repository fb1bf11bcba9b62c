"""Scenarios: files that say what GPUs a machine has, and the fakes that they stand for."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.collect.counters import Ladder
from joulemark.counter_series import Tier
from joulemark.device.clocks import reason_names
from joulemark.errors import ConfigurationError, NotSupported
from joulemark.testing.counters import HALF_BUSY, REFUSALS, FakeCounters, fake_ladder
from joulemark.testing.device import Level
from joulemark.testing.gpu import FakeGpu
from joulemark.testing.nvml import FakeNvml
from joulemark.testing.nvml_error import NOT_SUPPORTED

if TYPE_CHECKING:
    from joulemark.synthetic_run import SyntheticBench

_INTERVAL_S = 10e-6
"""Between samples of known kernels: as finely as recordings sample."""


@cache
def backend_from_file(path: str) -> FakeNvml:
    """The simulated NVML of a scenario file; one per process, so that its counters go on over sessions.

    Raises:
        ConfigurationError: the file cannot be read as a scenario.
    """
    with _refused(path, "is no scenario"):
        return backend_of(json.loads(Path(path).read_text(encoding="utf-8")))


def backend_of(scenario: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter) -> FakeNvml:
    """The simulated NVML of a scenario (its form stands in :mod:`joulemark.testing`)."""
    born = clock()
    return FakeNvml(
        [_gpu_of(entry, clock, born) for entry in scenario.get("gpus", ())],
        driver=str(scenario.get("driver", "580.159.03")),
        cuda_driver=int(scenario.get("cuda_driver", 13000)),
        init_error=scenario.get("init_error"),
        bytes_strings=bool(scenario.get("bytes_strings", False)),
    )


def counters_from_file(path: str, uuid: str) -> Ladder:
    """The simulated counters of a GPU in a scenario file (its form stands in :mod:`joulemark.testing`).

    Raises:
        ConfigurationError: the file cannot be read, or describes no counters as it should.
    """
    with _refused(path, "describes no counters"):
        scenario = json.loads(Path(path).read_text(encoding="utf-8"))
        gpu: Mapping[str, Any] = next((one for one in scenario.get("gpus", ()) if one["uuid"] == uuid), {})
        tiers = gpu.get("counters", {"pm_sampling": "unsupported", "gpm": "unsupported"})
        return fake_ladder({tier: _source_of(tier, what) for tier, what in tiers.items()})


def attribution_from_file(path: str, uuid: str) -> SyntheticBench:
    """Both instruments of attribution on a GPU of a scenario file; they see its known kernels.

    Raises:
        ConfigurationError: the file cannot be read, or describes no kernels as it should.
        DeviceError: PM sampling of this GPU is refused, or knows no kernels.
    """
    # other simulated instruments need none of it
    from joulemark.synthetic_run import SyntheticBench, SyntheticKernel, SyntheticRun

    with _refused(path, "describes no kernels"):
        scenario = json.loads(Path(path).read_text(encoding="utf-8"))
        gpu: Mapping[str, Any] = next((one for one in scenario.get("gpus", ()) if one["uuid"] == uuid), {})
        sampling = gpu.get("counters", {}).get("pm_sampling", "unsupported")
        if isinstance(sampling, str):
            raise REFUSALS[sampling]
        kernels = [SyntheticKernel(**one) for one in sampling.get("kernels", ())]
    if not kernels:
        raise NotSupported("PM sampling of this simulated GPU knows no kernels", "see joulemark.testing for their form")
    return SyntheticBench(SyntheticRun(kernels, interval_s=_INTERVAL_S))


@contextmanager
def _refused(path: str, why: str) -> Iterator[None]:
    """What a file that is not as it should be raises while it is read, as one error."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"JOULEMARK_FAKE_GPUS={path} {why} ({type(error).__name__}: {error})",
            "see joulemark.testing for its form, or unset the variable",
        ) from error


def _source_of(tier: Tier, what: str | Mapping[str, Any]) -> FakeCounters | str:
    if isinstance(what, str):
        return what
    return FakeCounters(
        rates=what.get("rates", HALF_BUSY),
        passes={name: tuple(counters) for name, counters in what.get("passes", {}).items()},
        tier=tier,
        missing=what.get("missing", {}),
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
                "power_mw": round(gpu["power_w"] / 1e-3),
                "energy": {"counter_from_power": True, "period_s": 0.1, "start_mj": 1_000_000},
            }
            for gpu in gpus
        ]
    }


_SENSORS: Mapping[str, tuple[str, float]] = {
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
"""Key of a scenario → sensor of a :class:`FakeGpu`, and the key's unit in SI units."""


def _gpu_of(entry: Mapping[str, Any], clock: Callable[[], float], born: float) -> FakeGpu:
    energy = entry.get("energy")
    counter = energy if isinstance(energy, Mapping) else {}
    return FakeGpu(
        name=entry["name"],
        uuid=entry["uuid"],
        pci_bus_id=entry["pci"],
        power_w=_level(entry, "power_mw", 0.0),
        instant_power_w=_level(entry, "power_instant_mw", 0.0),
        has_instant_power="power_instant_mw" in entry,
        energy_period_s=float(counter.get("period_s", 0.1)),
        energy_start_j=float(counter.get("start_mj", 0.0)) * 1e-3,
        sm_clock_hz=_level(entry, "sm_clock", 1.98e9),
        memory_clock_hz=_level(entry, "mem_clock", 2.619e9),
        max_sm_clock_hz=float(entry.get("max_sm_clock", 1980)) * 1e6,
        temperature_c=_level(entry, "temp", 41.0),
        utilization=_level(entry, "util", 0.5),
        reasons=reason_names(int(_number(entry.get("throttle", 0)))),
        errors=_errors_of(entry),
        mig=tuple(one["uuid"] for one in entry.get("mig", ())),
        memory_bytes=int(entry.get("mem_total", 80 * 2**30)),
        memory_used_bytes=int(entry.get("mem_used", 2**30)),
        power_limit_w=float(_number(entry.get("limit_mw", 700000))) * 1e-3,
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


def _errors_of(entry: Mapping[str, Any]) -> dict[str, int]:
    """Sensors that fail, with NVML's error number; an energy counter that counts nothing is not supported."""
    errors = {
        name: int(entry[key]["error"])
        for key, (name, _) in _SENSORS.items()
        if isinstance(entry.get(key), Mapping) and "error" in entry[key]
    }
    energy = entry.get("energy")
    if not (isinstance(energy, Mapping) and energy.get("counter_from_power")):
        errors.setdefault("energy", NOT_SUPPORTED)
    return errors


def _number(value: Any) -> float:
    return 0.0 if isinstance(value, Mapping) else float(value)


def _level(entry: Mapping[str, Any], key: str, otherwise: float) -> Level:
    """A sensor of a scenario as a constant or step function, in its SI unit."""
    value, scale = entry.get(key), _SENSORS[key][1]
    if value is None or (isinstance(value, Mapping) and "series" not in value):
        return otherwise
    if not isinstance(value, Mapping):
        return float(value) * scale
    steps = [(float(t), float(level) * scale) for t, level in value["series"]]
    times = [t for t, _ in steps]
    return lambda age: steps[max(0, bisect_right(times, age) - 1)][1]
