"""GPU performance metrics of NVML (GPM): shares of peak between two samples, on Hopper and later, without privilege.

Source: NVML documentation, "GPM Functions" and ``nvmlGpmMetricId_t``. NVML gives means over the time between two
samples. On an H200 its values move every 100 ms and some 50 ms late: between two samples without a move it answers 0.0
and says success, so a reading in which everything is 0 while work ran is taken as missing; and the first value that
shows nothing but a run came 0.18 to 0.22 s into it, so the first :data:`SETTLE_S` of a run are not sampled.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from joulemark.counter_series import COUNTERS, CounterSeries, Tier
from joulemark.device.nvml import Nvml
from joulemark.errors import CountersUnreadable, DeviceError, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from joulemark.device.nvml import GpmSample, NvmlDevice

MIN_INTERVAL_S = 0.05
INTERVAL_S = 0.1
SETTLE_S = 0.25
"""Longest lag behind the work that was seen, and a little more."""

_MIB = 2.0**20
_PER_CENT = 100.0

IDS: Mapping[int, str] = {
    2: "sm_active",
    3: "warps_active",
    4: "pipe_integer",
    5: "pipe_tensor",
    6: "pipe_tensor_dfma",
    7: "pipe_tensor_hmma",
    9: "pipe_tensor_imma",
    10: "dram_throughput",
    11: "pipe_fp64",
    12: "pipe_fp32",
    13: "pipe_fp16",
    20: "pcie_tx_bytes",
    21: "pcie_rx_bytes",
    60: "nvlink_rx_bytes",
    61: "nvlink_tx_bytes",
}
"""``nvmlGpmMetricId_t`` → canonical counter: per cent of peak, or MiB/s."""

_NAMES: Mapping[int, str] = {
    2: "SM_UTIL",
    3: "SM_OCCUPANCY",
    4: "INTEGER_UTIL",
    5: "ANY_TENSOR_UTIL",
    6: "DFMA_TENSOR_UTIL",
    7: "HMMA_TENSOR_UTIL",
    9: "IMMA_TENSOR_UTIL",
    10: "DRAM_BW_UTIL",
    11: "FP64_UTIL",
    12: "FP32_UTIL",
    13: "FP16_UTIL",
    20: "PCIE_TX_PER_SEC",
    21: "PCIE_RX_PER_SEC",
    60: "NVLINK_TOTAL_RX_PER_SEC",
    61: "NVLINK_TOTAL_TX_PER_SEC",
}


@dataclass(frozen=True)
class _Interval:
    """Metrics between two samples: times on ``time.perf_counter`` in s, per id a value or why there is none."""

    start_s: float
    end_s: float
    readings: Mapping[int, float | DeviceError]


class GpmSource:
    """Counters by GPM on one GPU.

    Args:
        uuid: of the GPU.
        nvml: an open session, for tests; by default one of its own.
        interval_s: between samples, in s; at least 50 ms.
        settle_s: of each run before the first sample, in s.

    Raises:
        NotSupported: the GPU has no GPM.
        DeviceError: NVML does not start, or refuses.
    """

    tier: Tier = "gpm"
    groups: tuple[str, ...] = ("gpm",)

    def __init__(
        self, uuid: str, nvml: Nvml | None = None, interval_s: float = INTERVAL_S, settle_s: float = SETTLE_S
    ) -> None:
        if interval_s < MIN_INTERVAL_S:
            raise ValueError(f"GPM samples {interval_s} s apart read 0; {MIN_INTERVAL_S} s is the least")
        self._interval_s, self._settle_s = interval_s, settle_s
        self._nvml = Nvml() if nvml is None else nvml
        self._owned = nvml is None
        self._gives: tuple[str, ...] = ()
        self._nvml.open()
        try:
            self._device = self._nvml.device(uuid)
            if not self._device.has_gpm():
                raise NotSupported(f"{uuid} has no GPM", "GPM comes with Hopper and later GPUs")
            self._prove()
        except DeviceError:
            self.close()
            raise

    def _prove(self) -> None:
        """Two samples and their metrics, so that a refusal shows now and not in the middle of a run.

        Raises:
            DeviceError: NVML refuses, or knows none of the metrics.
        """
        with _Recorder(self._device) as recorder:
            recorder.sample()
            time.sleep(MIN_INTERVAL_S)
            recorder.sample()
        readings = recorder.intervals[0].readings
        self._gives = tuple(IDS[one] for one, found in readings.items() if not isinstance(found, DeviceError))
        if not self._gives:
            said = next(iter(readings.values()))
            raise NotSupported(f"NVML gives none of the GPM metrics ({said})", "update the driver")

    def counters(self, group: str) -> tuple[str, ...]:  # noqa: ARG002
        """Canonical names of the metrics that NVML gave when the source was opened."""
        return self._gives

    def record(self, group: str, run: Callable[[], object], expected_s: float | None = None) -> CounterSeries:  # noqa: ARG002
        """See :meth:`joulemark.counter_series.CounterSource.record`; samples are on ``perf_counter``.

        Raises:
            CountersUnreadable: the run was over before two samples, or everything read 0.
            DeviceError: NVML refuses.
        """
        if group not in self.groups:
            raise KeyError(group)
        with _Recorder(self._device) as recorder:
            done = threading.Event()
            began = time.perf_counter()
            thread = threading.Thread(
                target=recorder.sample_until,
                args=(done, self._settle_s, self._interval_s),
                name="joulemark-gpm",
                daemon=True,
            )
            thread.start()
            try:
                run()
            finally:
                run_s = time.perf_counter() - began
                done.set()
                thread.join()
        if recorder.problem is not None:
            raise recorder.problem
        if not recorder.intervals:
            raise CountersUnreadable(
                f"a run of {run_s:.3g} s is too short for GPM, which lags {self._settle_s:g} s behind",
                f"repeat the work for {self._settle_s + self._interval_s:g} s at least",
            )
        return _series(recorder.intervals, run_s, self._interval_s)

    def close(self) -> None:
        """Ends the session with NVML, if it is its own."""
        if self._owned:
            self._nvml.close()


class _Recorder:
    """Takes samples and keeps the metrics between each and the one before; frees them when its block ends."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        self._last: tuple[float, GpmSample] | None = None
        self.intervals: list[_Interval] = []
        self.problem: DeviceError | None = None

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._last[1].free()
            self._last = None

    def sample(self) -> None:
        """Takes a sample, and the metrics since the last.

        Raises:
            DeviceError: NVML refuses.
        """
        before = time.perf_counter()
        sample = self._device.gpm_sample()
        now = (before + time.perf_counter()) / 2
        last, self._last = self._last, (now, sample)
        if last is not None:
            try:
                readings = self._device.gpm_metrics(last[1], sample, tuple(IDS))
            finally:
                last[1].free()
            self.intervals.append(_Interval(last[0], now, readings))

    def sample_until(self, done: threading.Event, settle_s: float, interval_s: float) -> None:
        """Samples at an interval, and once more when the work is done if that is not too soon after the last.

        Args:
            done: set when the work is done.
            settle_s: before the first sample, in s.
            interval_s: between samples, in s.
        """
        try:
            if done.wait(settle_s):
                return
            self.sample()
            while not done.wait(interval_s):
                self.sample()
            if self._last is not None and time.perf_counter() - self._last[0] >= MIN_INTERVAL_S:
                self.sample()
        except DeviceError as error:
            self.problem = error


def _series(intervals: Sequence[_Interval], run_s: float, interval_s: float) -> CounterSeries:
    """The intervals as a series; one in which every share reads 0 is left out.

    Raises:
        CountersUnreadable: none is left.
    """
    believed = [one for one in intervals if _moved(one)]
    if not believed:
        raise CountersUnreadable(
            f"GPM read 0 for everything in {len(intervals)} intervals while the GPU worked", "sample for longer"
        )
    start = np.array([one.start_s for one in believed])
    end = np.array([one.end_s for one in believed])
    values: dict[str, NDArray[np.float64]] = {}
    missing: dict[str, str] = {}
    for number, name in IDS.items():
        readings = [one.readings[number] for one in believed]
        refused = next((reading for reading in readings if isinstance(reading, DeviceError)), None)
        if refused is not None:
            missing[name] = refused.what
        else:
            values[name] = _in_units(name, np.array(readings, np.float64), end - start)
    return CounterSeries(
        tier="gpm",
        group="gpm",
        start_s=start,
        end_s=end,
        values=values,
        units={name: COUNTERS[name].unit for name in values},
        clock="perf_counter",
        raw={name: f"NVML_GPM_METRIC_{_NAMES[number]}" for number, name in IDS.items() if name in values},
        missing=missing,
        source={
            "library": "NVML GPM",
            "interval_s": interval_s,
            "run_s": run_s,
            "lost_intervals": len(intervals) - len(believed),
        },
    )


def _moved(interval: _Interval) -> bool:
    return any(isinstance(reading, float) and reading > 0 for reading in interval.readings.values())


def _in_units(name: str, readings: NDArray[np.float64], length_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Per cent to shares; MiB/s to bytes inside each interval."""
    return readings / _PER_CENT if COUNTERS[name].unit == "1" else readings * _MIB * length_s
