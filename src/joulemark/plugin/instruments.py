"""Opens the instruments of a measuring process: the device's clock, memory, power and baselines."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.collect.counters import Ladder, open_counters
from joulemark.collect.framework import device_uuid
from joulemark.collect.gpm import GpmSource
from joulemark.collect.memory import ProcessMemoryPeak, memory_peak
from joulemark.collect.pm_sampling import SWEEP_PACE
from joulemark.collect.power import NullPowerSource, PowerSampler, idle_power, open_power, sm_clock_of
from joulemark.collect.timing import HostTimer, Timer, timer_for
from joulemark.counter_series import CounterSource
from joulemark.device.nvml import FAKE_GPUS, Nvml
from joulemark.errors import DeviceError, Unsupported
from joulemark.measure.counters import Counting
from joulemark.measure.steady import unknown_clock
from joulemark.plugin.fixture import Instruments
from joulemark.plugin.sweep import Target
from joulemark.records import Finding
from joulemark.utilization.levels import READ

if TYPE_CHECKING:
    from joulemark.measure.attribution_pass import Attributing

_STATIC_WINDOW_S = 1.3
_SETTLING_S, _AVERAGED_S = 0.15, 1.2


def open_instruments(
    target: Target, collect: Collection[str], baselines: bool = True, cupti: Path | None = None, rank: int = 0
) -> Instruments:
    """What this process has for a target; what is off carries its reason.

    Args:
        baselines: measure the static power too.
        cupti: the libcupti to count with; None for the one that torch loads.
        rank: of this process; on a CPU, rank 0 alone reads the sensors that see all ranks.
    """
    device, timer, no_clock = _clock(target)
    power, no_power = (
        _power(target) if "power" in collect else (None, "power was not asked for (--bench-collect power)")
    )
    if rank and (power is None or not target.on_gpu):
        # Rank 0 may have a power pass, and this rank takes its steps in it.
        power = PowerSampler(NullPowerSource(DeviceError(no_power or "rank 0 reads the sensors of this CPU")))
    memory = memory_peak(device) if device != "cpu" else ProcessMemoryPeak()
    facts = framework_facts(device)
    static = None
    if baselines and power is not None and target.on_gpu and device != "cpu":
        static = _static_power_w(timer, power, facts)
    counting = open_counting(target, device, no_clock, cupti) if "counters" in collect else None
    attributing = open_attributing(target, device, no_clock, cupti) if "attribution" in collect else None
    sm_clock = unknown_clock if target.uuid is None or device == "cpu" else sm_clock_of(target.uuid)
    return Instruments(
        target, device, timer, memory, power, no_power, static, no_clock, facts, counting, attributing, sm_clock
    )


def _clock(target: Target) -> tuple[str, Timer, str]:
    """The device and its timer; a GPU that torch cannot use leaves the host's clock and a reason."""
    if not target.on_gpu:
        return "cpu", HostTimer(), ""
    if importlib.util.find_spec("torch") is None:
        return (
            "cpu",
            HostTimer(),
            "torch is not installed, so the device's clock cannot be read (pip install joulemark[torch])",
        )
    import torch

    if not torch.cuda.is_available():
        return "cpu", HostTimer(), "torch sees no CUDA device"
    return "cuda:0", timer_for("cuda:0"), ""


def _power(target: Target) -> tuple[PowerSampler | None, str]:
    sampler = open_power(target.uuid)
    if isinstance(sampler.source, NullPowerSource):
        return None, "; ".join(part for part in (target.no_gpu, str(sampler.source.problem)) if part)
    return sampler, ""


def energy_tier(power: PowerSampler | None) -> str | None:
    """The sensor that energy will come from: not every GPU with NVML has a counter."""
    if power is None:
        return None
    source = power.source
    for read, name in ((source.read_energy_j, source.energy_tier), (source.read_power_w, source.power_tier)):
        try:
            read()
        except DeviceError:  # its text is in the header and in the notes of each record
            continue
        return name
    return None


def describe_power(uuid: str | None) -> str:
    """Which sensors of a device answer, in words for the session's header."""
    sampler, why = _power(Target(uuid, "", "", ""))
    if sampler is None:
        return f"off: {why}"
    with sampler:
        source = sampler.source
        lacks: list[str] = []
        for read, name in ((source.read_energy_j, source.energy_tier), (source.read_power_w, source.power_tier)):
            try:
                read()
            except DeviceError as error:
                lacks.append(f"{name} off: {error}")
            else:
                return f"{name} beside the workload" + "".join(f" ({lack})" for lack in lacks)
    return "off: " + "; ".join(lacks)


def open_counting(target: Target, device: str, no_clock: str, cupti: Path | None) -> Counting:
    """The best counters of a target, and why the better ones are off.

    Args:
        device: torch's name of it.
        no_clock: why torch cannot use it; empty when it can.
        cupti: the libcupti to use; None for the one that torch loads.
    """
    none = _no_counters(target, device, no_clock)
    if target.uuid is None or none is not None:
        return Counting(None, {"counters": none or ""}, device)
    begin = time.perf_counter()
    ladder = open_counters(target.uuid, "cuda:0", None if cupti is None else str(cupti), SWEEP_PACE, wanted=READ)
    reasons: dict[str, str] = {tier: str(error) for tier, error in ladder.refused.items()}
    beside = _beside(ladder, target.uuid)
    return Counting(ladder.source, reasons, device, beside, opening_s=time.perf_counter() - begin)


def _no_counters(target: Target, device: str, no_clock: str) -> str | None:
    """Why no counters can be tried at all; None where they can."""
    if target.uuid is None:
        why = f" ({target.no_gpu})" if target.no_gpu else ""
        return f"a CPU has no GPU counters{why}"
    return no_clock if device == "cpu" and FAKE_GPUS not in os.environ else None


def open_attributing(target: Target, device: str, no_clock: str, cupti: Path | None) -> Attributing:
    """PM sampling and the profiler of a target at once, or why not.

    Args:
        device: torch's name of it.
        no_clock: why torch cannot use it; empty when it can.
        cupti: the libcupti to use; None for the one that torch loads.
    """
    # other measuring processes would pay for these imports
    from joulemark.measure.attribution_bench import Bench, TorchBench
    from joulemark.measure.attribution_pass import Attributing
    from joulemark.testing import attribution_from_file

    none = _no_counters(target, device, no_clock)
    if target.uuid is None or none is not None:
        return Attributing(None, f"attribution: {none}")
    scenario = os.environ.get(FAKE_GPUS)
    try:
        bench: Bench = (
            TorchBench("cuda:0", None if cupti is None else str(cupti))
            if scenario is None
            else attribution_from_file(scenario, target.uuid)
        )
    except (DeviceError, Unsupported) as error:
        return Attributing(None, f"pm_sampling: {error}")
    return Attributing(bench)


def _beside(ladder: Ladder, uuid: str) -> CounterSource | None:
    """NVML's GPM beside PM sampling: two instruments that know nothing of each other. Lacking it is no finding."""
    if ladder.tier != "pm_sampling":
        return None
    try:
        return GpmSource(uuid)
    except DeviceError:
        return None


def counters_hello(counting: Counting | None) -> dict[str, str | None] | None:
    """What the parent stores of the counters: the tier in use, and why there is no better one."""
    if counting is None:
        return None
    return {"tier": None if counting.source is None else counting.source.tier, "why": counting.why}


def _static_power_w(timer: Timer, power: PowerSampler, facts: dict[str, Any]) -> float | None:
    """Power of the board while it idles with a context and clocks up, in W; stored with its interval."""
    import torch

    matrix = torch.randn(2048, 2048, device=timer.device)
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        for _ in range(10):
            matrix @ matrix
        timer.synchronize()
    time.sleep(settling_s(power))
    del matrix
    torch.cuda.empty_cache()
    try:
        value = idle_power(power.source, _STATIC_WINDOW_S)
    except DeviceError as error:
        facts["baselines"] = {"static_power_w": None, "why": str(error)}
        return None
    facts["baselines"] = {"static_power_w": value.to_json()}
    return value.value


def settling_s(power: PowerSampler) -> float:
    """How long after a load what the sensors show is of the idle board: longer where only a mean over 1 s is read."""
    source = power.source
    averaged = energy_tier(power) == source.power_tier and not source.power_is_instant
    return _AVERAGED_S if averaged else _SETTLING_S


def idle_baseline(uuid: str) -> dict[str, Any]:
    """Power of the board before this session holds a context on it, in W, with its interval; or why there is none."""
    with open_power(uuid) as sampler:
        try:
            return {"idle_power_w": idle_power(sampler.source, _STATIC_WINDOW_S).to_json()}
        except DeviceError as error:
            return {"idle_power_w": None, "idle_why": str(error)}


def shared_gpu(uuid: str) -> Finding | None:
    """That others hold a context on a GPU before this session does; None where nobody does, or NVML does not tell.

    Power and counters are the whole GPU's, and its time is shared: what others do is in all figures.
    """
    try:
        with Nvml() as nvml:
            pids = [one.pid for one in nvml.device(uuid).processes() if one.pid != os.getpid()]
    except DeviceError:
        return None
    if not pids:
        return None
    who = f"{len(pids)} other process{'es' if len(pids) > 1 else ''}"
    what = f"{who} held a context on the GPU before this session did (pid {', '.join(map(str, pids))})"
    return Finding("gpu_shared", what, "end them, or choose another GPU (joulemark env --check)", flags=True)


def framework_facts(device: str) -> dict[str, Any]:
    """Versions and settings of torch as this process has them; empty when it is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    cuda = device.startswith("cuda")
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "threads": torch.get_num_threads(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "device_uuid": device_uuid(device),
    }
