"""The ladder of counters: the best instrument that works on this GPU, and why the better ones do not.

::

    pm_sampling   CUPTI's hardware counters over time (joulemark.collect.pm_sampling)
    gpm           NVML's GPU performance metrics, Hopper and later, without privilege (joulemark.collect.gpm)
    (none)        shares of kernel time from the framework's profiler are all that is left

Nsight Compute is no rung: it replays kernels in a process of its own and is used on request
(:mod:`joulemark.collect.ncu`).
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from joulemark.device.nvml import FAKE_GPUS
from joulemark.errors import ConfigurationError, CountersUnavailable, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from joulemark.collect.pm_sampling import Pace
    from joulemark.counter_series import CounterSource, Tier

_TORCH_REMEDY = "pip install joulemark[torch]"
_PRODUCTS = 800
"""Of 2048³ in half precision: 17 GFLOP each, some 20 ms in all on an H200, longer on a smaller GPU."""


@dataclass(frozen=True)
class Ladder:
    """What was found on the way down.

    Args:
        source: the best instrument that works; None when none does. Close it.
        refused: per better instrument that does not work the reason, best first; ``remedy`` says what would help.
    """

    source: CounterSource | None
    refused: Mapping[Tier, DeviceError] = field(default_factory=dict)

    @property
    def tier(self) -> Tier | None:
        """Of the instrument; None without one."""
        return None if self.source is None else self.source.tier

    def close(self) -> None:
        """Closes the instrument, if there is one."""
        if self.source is not None:
            self.source.close()


def open_counters(
    uuid: str,
    device: str = "cuda:0",
    libcupti: str | None = None,
    pace: Pace | None = None,
    memory_requests: bool = False,
    wanted: Collection[str] | None = None,
) -> Ladder:
    """The best instrument that works on a GPU, proved by using it once.

    Args:
        uuid: of the GPU, for NVML.
        device: the same GPU as torch calls it, for CUPTI.
        libcupti: library or folder to use in place of the loaded one; see
            :func:`joulemark.collect.cupti.load_library`, which must have loaded it before torch was imported.
        pace: how finely PM sampling samples.
        memory_requests: whether PM sampling also counts how memory is asked, in more passes.
        wanted: canonical counters that PM sampling is to give, which then decodes faster; None for all.

    Raises:
        ConfigurationError: ``device`` is no CUDA device, or ``libcupti`` names nothing.
    """
    if scenario := os.environ.get(FAKE_GPUS):
        # By name: the layers above this one may import it, it may not import them.
        fake: Ladder = importlib.import_module("joulemark.testing").counters_from_file(scenario, uuid)
        return fake
    ordinal = _ordinal(device)
    return descend(
        {
            "pm_sampling": lambda: _pm_sampling(ordinal, libcupti, pace, memory_requests, wanted),
            "gpm": lambda: _gpm(uuid),
        }
    )


def descend(openers: Mapping[Tier, Callable[[], CounterSource]]) -> Ladder:
    """Tries instruments in order; the first that opens is the answer.

    Args:
        openers: per instrument, best first, what opens it or raises the typed reason.
    """
    refused: dict[Tier, DeviceError] = {}
    for tier, opener in openers.items():
        try:
            return Ladder(opener(), refused)
        except DeviceError as error:
            refused[tier] = error
    return Ladder(None, refused)


def _ordinal(device: str) -> int:
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if found is None:
        raise ConfigurationError(f"{device!r} is no CUDA device", "name one as cuda:0")
    return int(found[1] or 0)


def _pm_sampling(
    ordinal: int, libcupti: str | None, pace: Pace | None, memory_requests: bool, wanted: Collection[str] | None
) -> CounterSource:
    from joulemark.collect.cupti import load_library
    from joulemark.collect.cupti_device import CuptiDevice
    from joulemark.collect.pm_metrics import MEMORY_REQUESTS, METRICS, metrics_of
    from joulemark.collect.pm_sampling import PmSamplingSource

    device = CuptiDevice(load_library(libcupti), ordinal)
    metrics = METRICS if wanted is None else metrics_of(wanted)
    metrics = (*metrics, *MEMORY_REQUESTS) if memory_requests else metrics
    return PmSamplingSource(device, _busy_work(ordinal), pace, metrics)


def _gpm(uuid: str) -> CounterSource:
    from joulemark.collect.gpm import GpmSource

    return GpmSource(uuid)


def _busy_work(ordinal: int) -> Callable[[], object]:
    """Matrix products for some 20 ms: work that no counter of an SM misses.

    Raises:
        CountersUnavailable: torch is not there, or has no CUDA.
        DeviceError: the device has no memory left for it.
    """
    try:
        import torch
    except ImportError as error:
        raise CountersUnavailable(f"PM sampling is proved on work of torch: {error}", _TORCH_REMEDY) from error
    if not torch.cuda.is_available():
        raise CountersUnavailable("PM sampling is proved on work of torch, which has no CUDA here", _TORCH_REMEDY)
    device = torch.device("cuda", ordinal)

    def run() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize(device)

    try:
        matrix = torch.randn(2048, 2048, device=device, dtype=torch.float16)
        product = torch.empty_like(matrix)
        run()
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"cuda:{ordinal} has no memory left to prove its counters on", "free some") from error
    return run
