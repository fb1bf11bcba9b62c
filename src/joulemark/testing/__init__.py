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
{counter: reason}}`` (see :class:`FakeCounters`); without it, no tier works. ``kernels`` beside the rates of
``pm_sampling``, a list of what :class:`joulemark.synthetic_run.SyntheticKernel` takes, are those of every step that
attribution records.
"""

from __future__ import annotations

from joulemark.testing.clock import FakeClock
from joulemark.testing.counters import FakeCounters, FakePmDevice, fake_ladder
from joulemark.testing.device import FakeDevice, Level
from joulemark.testing.gpu import FakeGpu
from joulemark.testing.nvml import FakeNvml
from joulemark.testing.nvml_error import FakeNvmlError
from joulemark.testing.replay import ReplayCollector
from joulemark.testing.scenario import (
    attribution_from_file,
    backend_from_file,
    backend_of,
    counters_from_file,
    scenario_of,
)
from joulemark.testing.window import simulate_window

__all__ = [
    "FakeClock", "FakeCounters", "FakeDevice", "FakeGpu", "FakeNvml", "FakeNvmlError", "FakePmDevice", "Level",
    "ReplayCollector", "attribution_from_file", "backend_from_file", "backend_of", "counters_from_file", "fake_ladder",
    "scenario_of", "simulate_window",
]  # fmt: skip
