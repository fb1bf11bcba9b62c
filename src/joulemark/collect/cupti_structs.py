"""The parameter structures of CUPTI's C API that PM sampling needs, as each version of the library declares them.

Source: ``cupti_pmsampling.h``, ``cupti_profiler_host.h``, ``cupti_profiler_target.h`` and ``cupti_target.h`` of CUPTI
12.6 to 13.4. NVIDIA only appends fields; a library refuses a ``structSize`` that is not its own, so a structure is
built for the version that is loaded. A test compiles the shipped headers and compares every size and offset.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_SIZE, _POINTER, _TEXT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
_TEXTS = ctypes.POINTER(ctypes.c_char_p)
_ENUM, _BYTE, _U32, _U64 = ctypes.c_int, ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64

PROFILER_TYPE_PM_SAMPLING = 1
PROFILER_API_PM_SAMPLING = 3
TRIGGER_SYSCLK, TRIGGER_TIME = 0, 1
APPEND_KEEP_OLDEST = 0
STOP_COUNTER_DATA_FULL, STOP_END_OF_RECORDS = 1, 2
METRIC_TYPES = (0, 1, 2)
"""Counter, ratio, throughput (``CUpti_MetricType``)."""

_Field = tuple[str, Any] | tuple[str, Any, int]

STRUCTS: dict[str, tuple[_Field, ...]] = {
    "CUpti_Profiler_Initialize_Params": (),
    "CUpti_Profiler_DeviceSupported_Params": (
        ("cuDevice", _ENUM),
        ("isSupported", _ENUM),
        ("architecture", _ENUM),
        ("sli", _ENUM),
        ("vGpu", _ENUM),
        ("confidentialCompute", _ENUM),
        ("cmp", _ENUM),
        ("wsl", _ENUM),
        ("api", _ENUM),
        ("sku", _ENUM, 130100),
    ),
    "CUpti_Device_GetChipName_Params": (("deviceIndex", _SIZE), ("pChipName", _TEXT)),
    "CUpti_Profiler_Host_Initialize_Params": (
        ("profilerType", _ENUM),
        ("pChipName", _TEXT),
        ("pCounterAvailabilityImage", _POINTER),
        ("pHostObject", _POINTER),
        ("pSinglePassMetricSetName", _TEXT, 130200),
    ),
    "CUpti_Profiler_Host_Deinitialize_Params": (("pHostObject", _POINTER),),
    "CUpti_Profiler_Host_GetSupportedChips_Params": (("numChips", _SIZE), ("ppChipNames", _TEXTS)),
    "CUpti_Profiler_Host_GetBaseMetrics_Params": (
        ("pHostObject", _POINTER),
        ("metricType", _ENUM),
        ("ppMetricNames", _TEXTS),
        ("numMetrics", _SIZE),
    ),
    "CUpti_Profiler_Host_GetSubMetrics_Params": (
        ("pHostObject", _POINTER),
        ("metricType", _ENUM),
        ("pMetricName", _TEXT),
        ("numOfSubmetrics", _SIZE),
        ("ppSubMetrics", _TEXTS),
    ),
    "CUpti_Profiler_Host_ConfigAddMetrics_Params": (
        ("pHostObject", _POINTER),
        ("ppMetricNames", _TEXTS),
        ("numMetrics", _SIZE),
    ),
    "CUpti_Profiler_Host_GetConfigImageSize_Params": (("pHostObject", _POINTER), ("configImageSize", _SIZE)),
    "CUpti_Profiler_Host_GetConfigImage_Params": (
        ("pHostObject", _POINTER),
        ("configImageSize", _SIZE),
        ("pConfigImage", _POINTER),
    ),
    "CUpti_Profiler_Host_GetNumOfPasses_Params": (
        ("configImageSize", _SIZE),
        ("pConfigImage", _POINTER),
        ("numOfPasses", _SIZE),
    ),
    "CUpti_Profiler_Host_EvaluateToGpuValues_Params": (
        ("pHostObject", _POINTER),
        ("pCounterDataImage", _POINTER),
        ("counterDataImageSize", _SIZE),
        ("rangeIndex", _SIZE),
        ("ppMetricNames", _TEXTS),
        ("numMetrics", _SIZE),
        ("pMetricValues", ctypes.POINTER(ctypes.c_double)),
    ),
    "CUpti_PmSampling_Enable_Params": (("deviceIndex", _SIZE), ("pPmSamplingObject", _POINTER)),
    "CUpti_PmSampling_Disable_Params": (("pPmSamplingObject", _POINTER),),
    "CUpti_PmSampling_SetConfig_Params": (
        ("pPmSamplingObject", _POINTER),
        ("configSize", _SIZE),
        ("pConfig", _POINTER),
        ("hardwareBufferSize", _SIZE),
        ("samplingInterval", _U64),
        ("triggerMode", _ENUM),
        ("hwBufferAppendMode", _ENUM, 26),
    ),
    "CUpti_PmSampling_Start_Params": (("pPmSamplingObject", _POINTER),),
    "CUpti_PmSampling_Stop_Params": (("pPmSamplingObject", _POINTER),),
    "CUpti_PmSampling_DecodeData_Params": (
        ("pPmSamplingObject", _POINTER),
        ("pCounterDataImage", _POINTER),
        ("counterDataImageSize", _SIZE),
        ("decodeStopReason", _ENUM),
        ("overflow", _BYTE),
    ),
    "CUpti_PmSampling_GetCounterAvailability_Params": (
        ("deviceIndex", _SIZE),
        ("counterAvailabilityImageSize", _SIZE),
        ("pCounterAvailabilityImage", _POINTER),
    ),
    "CUpti_PmSampling_GetCounterDataSize_Params": (
        ("pPmSamplingObject", _POINTER),
        ("pMetricNames", _TEXTS),
        ("numMetrics", _SIZE),
        ("maxSamples", _U32),
        ("counterDataSize", _SIZE),
    ),
    "CUpti_PmSampling_CounterDataImage_Initialize_Params": (
        ("pPmSamplingObject", _POINTER),
        ("counterDataSize", _SIZE),
        ("pCounterData", _POINTER),
    ),
    "CUpti_PmSampling_GetCounterDataInfo_Params": (
        ("pCounterDataImage", _POINTER),
        ("counterDataImageSize", _SIZE),
        ("numTotalSamples", _SIZE),
        ("numPopulatedSamples", _SIZE),
        ("numCompletedSamples", _SIZE),
    ),
    "CUpti_PmSampling_CounterData_GetSampleInfo_Params": (
        ("pPmSamplingObject", _POINTER),
        ("pCounterDataImage", _POINTER),
        ("counterDataImageSize", _SIZE),
        ("sampleIndex", _SIZE),
        ("startTimestamp", _U64),
        ("endTimestamp", _U64),
    ),
}
"""Fields behind ``structSize`` and ``pPriv``; a third entry is the API version (``cuptiGetVersion``) that added it."""


@cache
def structure(name: str, version: int) -> type[ctypes.Structure]:
    """The ctypes structure of a C structure, as a version of CUPTI declares it.

    Args:
        name: in C.
        version: as ``cuptiGetVersion`` says it: 24 (12.6), 26 (12.8), 28 (12.9 update 1), 130001 (13.0), 130401 (13.4).
    """
    fields = [(field[0], field[1]) for field in STRUCTS[name] if len(field) == 2 or field[2] <= version]
    return type(name, (ctypes.Structure,), {"_fields_": [("structSize", _SIZE), ("pPriv", _POINTER), *fields]})


def struct_size(kind: type[ctypes.Structure]) -> int:
    """``CUPTI_PROFILER_STRUCT_SIZE``: offset of the last field and its size, without padding behind it."""
    last = getattr(kind, kind._fields_[-1][0])
    return int(last.offset + last.size)


def parameters(name: str, version: int, **values: Any) -> Any:
    """A structure with its ``structSize`` and fields set; a field that this version lacks must not be given."""
    kind = structure(name, version)
    known = {field[0] for field in kind._fields_}
    if unknown := set(values) - known:
        raise TypeError(f"{name} of CUPTI {version} has no {sorted(unknown)}")
    return kind(structSize=struct_size(kind), **values)
