"""One device through libcupti: what its chip can count, and one sampling of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from joulemark.collect import cupti_structs as c
from joulemark.collect.cupti import Cupti, names
from joulemark.errors import DeviceError, NotSupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


COMPUTE_SET = "TriageCompute"
"""The set of a compute chip (GH100, GB100) whose counters describe kernels, seen by Nsight too."""


class MetricHost:
    """CUPTI's knowledge of one chip's metrics: names, images of a configuration, evaluation; a context manager.

    It needs no GPU.

    Args:
        cupti: the library.
        chip: as ``GH100``.
        metric_set: set that the metrics are taken from (``TriageCompute``); None leaves it open.
        availability: see :meth:`Cupti.availability`.

    Raises:
        DeviceError: the library does not know the chip or the set.
    """

    def __init__(
        self, cupti: Cupti, chip: str, metric_set: str | None = None, availability: bytes | None = None
    ) -> None:
        self._cupti = cupti
        self._availability = None if availability is None else ctypes.create_string_buffer(availability)
        fields: dict[str, Any] = {"profilerType": c.PROFILER_TYPE_PM_SAMPLING, "pChipName": chip.encode()}
        if self._availability is not None:
            fields["pCounterAvailabilityImage"] = ctypes.addressof(self._availability)
        if metric_set is not None:
            fields["pSinglePassMetricSetName"] = metric_set.encode()
        made = cupti.call("cuptiProfilerHostInitialize", "CUpti_Profiler_Host_Initialize_Params", **fields)
        self._object = made.pHostObject

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it; nothing the second time."""
        if self._object is not None:
            made, self._object = self._object, None
            self._cupti.call(
                "cuptiProfilerHostDeinitialize", "CUpti_Profiler_Host_Deinitialize_Params", pHostObject=made
            )

    def base_metrics(self) -> frozenset[str]:
        """Names without submetric, of all kinds."""
        found: set[str] = set()
        for kind in c.METRIC_TYPES:
            some = self._cupti.call(
                "cuptiProfilerHostGetBaseMetrics",
                "CUpti_Profiler_Host_GetBaseMetrics_Params",
                pHostObject=self._object,
                metricType=kind,
            )
            found.update(some.ppMetricNames[i].decode() for i in range(some.numMetrics))
        return frozenset(found)

    def submetrics(self, metric: str, kind: int = 0) -> tuple[str, ...]:
        """Endings that a metric can take, as ``.sum``."""
        found = self._cupti.call(
            "cuptiProfilerHostGetSubMetrics",
            "CUpti_Profiler_Host_GetSubMetrics_Params",
            pHostObject=self._object,
            metricType=kind,
            pMetricName=metric.encode(),
        )
        return tuple(found.ppSubMetrics[i].decode() for i in range(found.numOfSubmetrics))

    def config_image(self, metrics: Sequence[str]) -> bytes:
        """Image that configures the counters of some metrics.

        Raises:
            DeviceError: a metric is unknown, or they exclude each other.
        """
        self._cupti.call(
            "cuptiProfilerHostConfigAddMetrics",
            "CUpti_Profiler_Host_ConfigAddMetrics_Params",
            pHostObject=self._object,
            ppMetricNames=names(metrics),
            numMetrics=len(metrics),
        )
        size = self._cupti.call(
            "cuptiProfilerHostGetConfigImageSize",
            "CUpti_Profiler_Host_GetConfigImageSize_Params",
            pHostObject=self._object,
        ).configImageSize
        image = (ctypes.c_uint8 * size)()
        self._cupti.call(
            "cuptiProfilerHostGetConfigImage",
            "CUpti_Profiler_Host_GetConfigImage_Params",
            pHostObject=self._object,
            configImageSize=size,
            pConfigImage=ctypes.addressof(image),
        )
        return bytes(image)

    def passes(self, image: bytes) -> int:
        """Passes that a configuration needs; PM sampling takes those that need one."""
        buffer = ctypes.create_string_buffer(image, len(image))
        found = self._cupti.call(
            "cuptiProfilerHostGetNumOfPasses",
            "CUpti_Profiler_Host_GetNumOfPasses_Params",
            configImageSize=len(image),
            pConfigImage=ctypes.addressof(buffer),
        )
        return int(found.numOfPasses)

    def evaluate(self, image: Any, metrics: Sequence[str], samples: int) -> NDArray[np.float64]:
        """Values of all metrics in the first samples of a counter data image, shape [samples, metrics]."""
        values = np.empty((samples, len(metrics)))
        listed = names(metrics)
        row = ctypes.POINTER(ctypes.c_double)
        given = c.parameters(
            "CUpti_Profiler_Host_EvaluateToGpuValues_Params",
            self._cupti.api_version,
            pHostObject=self._object,
            pCounterDataImage=ctypes.addressof(image),
            counterDataImageSize=len(image),
            ppMetricNames=listed,
            numMetrics=len(metrics),
        )
        for index in range(samples):
            given.rangeIndex = index
            given.pMetricValues = values[index].ctypes.data_as(row)
            self._cupti.call_with("cuptiProfilerHostEvaluateToGpuValues", given)
        return values


@dataclass(frozen=True)
class Samples:
    """What a sampler decoded.

    Args:
        start, end: time stamps of the samples in CUPTI's ticks, shape [n].
        values: shape [n, metrics].
        overflow: whether the hardware buffer or the image ran full, so that later samples are lost.
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    values: NDArray[np.float64]
    overflow: bool = False


@dataclass(frozen=True)
class SamplingSettings:
    """How a device samples.

    Args:
        interval: in ns where ``by_time``, else in cycles of the system clock.
        by_time: GA100 and Turing cannot.
        buffer_bytes: hardware buffer, in which undecoded samples wait.
        image_samples: samples that one decoding holds.
    """

    interval: int = 100_000
    by_time: bool = True
    buffer_bytes: int = 128 * 2**20
    image_samples: int = 4096


class Sampler:
    """One configured sampling of one device; made fresh for every run, since a reused one can fall silent.

    Args:
        cupti: the library.
        device: ordinal of CUDA.
        host: of the device's chip; closed with the sampler.
        metrics: full names.
        settings: of the sampling.

    Raises:
        DeviceError: the device refuses.
    """

    def __init__(
        self, cupti: Cupti, device: int, host: MetricHost, metrics: Sequence[str], settings: SamplingSettings
    ) -> None:
        self._cupti, self._host, self._metrics, self._settings = cupti, host, tuple(metrics), settings
        self._object = None
        try:
            self._config = ctypes.create_string_buffer(host.config_image(metrics))
            made = cupti.call("cuptiPmSamplingEnable", "CUpti_PmSampling_Enable_Params", deviceIndex=device)
            self._object = made.pPmSamplingObject
            self._configure()
            self._image = self._new_image()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        fields: dict[str, Any] = {
            "pPmSamplingObject": self._object,
            "configSize": len(self._config) - 1,  # without the zero that ctypes adds
            "pConfig": ctypes.addressof(self._config),
            "hardwareBufferSize": self._settings.buffer_bytes,
            "samplingInterval": self._settings.interval,
            "triggerMode": c.TRIGGER_TIME if self._settings.by_time else c.TRIGGER_SYSCLK,
        }
        self._cupti.call("cuptiPmSamplingSetConfig", "CUpti_PmSampling_SetConfig_Params", **fields)

    def _new_image(self) -> Any:
        size = self._cupti.call(
            "cuptiPmSamplingGetCounterDataSize",
            "CUpti_PmSampling_GetCounterDataSize_Params",
            pPmSamplingObject=self._object,
            pMetricNames=names(self._metrics),
            numMetrics=len(self._metrics),
            maxSamples=self._settings.image_samples,
        ).counterDataSize
        return (ctypes.c_uint8 * size)()

    def _clear_image(self) -> None:
        self._cupti.call(
            "cuptiPmSamplingCounterDataImageInitialize",
            "CUpti_PmSampling_CounterDataImage_Initialize_Params",
            pPmSamplingObject=self._object,
            counterDataSize=len(self._image),
            pCounterData=ctypes.addressof(self._image),
        )

    def _simple(self, verb: str) -> None:
        self._cupti.call(f"cuptiPmSampling{verb}", f"CUpti_PmSampling_{verb}_Params", pPmSamplingObject=self._object)

    def start(self) -> None:
        """Begin to sample."""
        self._simple("Start")

    def stop(self) -> None:
        """End it; what was sampled waits to be read."""
        self._simple("Stop")

    def close(self) -> None:
        """Give the counters back; nothing the second time."""
        held, self._object = self._object, None
        try:
            if held is not None:
                self._cupti.call("cuptiPmSamplingDisable", "CUpti_PmSampling_Disable_Params", pPmSamplingObject=held)
        finally:
            self._host.close()

    def read(self) -> Samples:
        """Decodes all samples that wait in the hardware buffer, by one call into one image.

        CUPTI 13.0 on a GH100 does not go on well after an image is full: the last sample of the following ones had no
        time, and at 20 µs nothing followed. So a full image is an overflow.

        Raises:
            CountersOverflow: the hardware buffer ran full.
            CountersUnreadable: CUPTI cannot decode the samples.
        """
        self._clear_image()
        image = {"pCounterDataImage": ctypes.addressof(self._image), "counterDataImageSize": len(self._image)}
        decoded = self._cupti.call(
            "cuptiPmSamplingDecodeData", "CUpti_PmSampling_DecodeData_Params", pPmSamplingObject=self._object, **image
        )
        info = self._cupti.call(
            "cuptiPmSamplingGetCounterDataInfo", "CUpti_PmSampling_GetCounterDataInfo_Params", **image
        )
        n = int(info.numCompletedSamples)
        start, end = self._times(n)
        full = decoded.decodeStopReason == c.STOP_COUNTER_DATA_FULL
        return Samples(start, end, self._host.evaluate(self._image, self._metrics, n), bool(decoded.overflow) or full)

    def _times(self, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, end = np.empty(n, np.int64), np.empty(n, np.int64)
        given = c.parameters(
            "CUpti_PmSampling_CounterData_GetSampleInfo_Params",
            self._cupti.api_version,
            pPmSamplingObject=self._object,
            pCounterDataImage=ctypes.addressof(self._image),
            counterDataImageSize=len(self._image),
        )
        for index in range(n):
            given.sampleIndex = index
            self._cupti.call_with("cuptiPmSamplingCounterDataGetSampleInfo", given)
            start[index], end[index] = given.startTimestamp, given.endTimestamp
        return start, end


class CuptiDevice:
    """A device as PM sampling sees it, through the loaded libcupti.

    Args:
        cupti: the library.
        device: ordinal of CUDA.

    Raises:
        DeviceError: CUPTI or the driver does not start, or this configuration has no PM sampling.
    """

    def __init__(self, cupti: Cupti, device: int) -> None:
        cupti.initialize()
        if lacking := cupti.unsupported(device):
            said = ", ".join(f"{aspect} {level}" for aspect, level in lacking.items())
            raise NotSupported(f"CUPTI has no PM sampling for device {device} as it is configured ({said})")
        self._cupti, self._device = cupti, device
        self.library = cupti.version
        self.chip = cupti.chip(device)
        self._availability = None if self.chip in cupti.chips() else cupti.availability(device)

    def _host(self, metric_set: str | None) -> MetricHost:
        return MetricHost(self._cupti, self.chip, metric_set, self._availability)

    def metric_sets(self) -> tuple[str | None, ...]:
        """Sets to take metrics from, the best first; None is the open set, the only one before CUPTI 13.2."""
        if not self._cupti.names_sets:
            return (None,)
        try:
            self._host(COMPUTE_SET).close()
        except DeviceError:
            return (None,)
        return (COMPUTE_SET, None)

    def base_metrics(self, metric_set: str | None) -> frozenset[str]:
        """Metrics of the chip in a set, without submetric."""
        with self._host(metric_set) as host:
            return host.base_metrics()

    def fits(self, metrics: Sequence[str], metric_set: str | None) -> bool:
        """Whether the chip counts these metrics in one pass, by CUPTI's word; only decoding proves it."""
        try:
            with self._host(metric_set) as host:
                return host.passes(host.config_image(metrics)) == 1
        except DeviceError:
            return False

    def sampler(self, metrics: Sequence[str], metric_set: str | None, settings: SamplingSettings) -> Sampler:
        """A sampling of its own, configured and not yet started.

        Raises:
            DeviceError: the device refuses.
        """
        return Sampler(self._cupti, self._device, self._host(metric_set), metrics, settings)
