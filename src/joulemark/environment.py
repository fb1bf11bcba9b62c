"""Where a run takes place: software, host and GPUs, and which instrument stands behind each kind of figure."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from joulemark import __version__
from joulemark.collect.rapl import RaplSource
from joulemark.device.clocks import HINDERING
from joulemark.device.gpu import Gpu, GpuState, Inventory
from joulemark.device.nvml import Nvml
from joulemark.errors import DeviceError, NotSupported
from joulemark.metrics import format_value
from joulemark.records import Environment, Json, digest
from joulemark.store import git_commit

PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "numpy",
    "scipy",
    "pytest",
    "pytest-benchmark",
    "nvidia-ml-py",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-cupti-cu12",
    "nvidia-cuda-cupti",
    "cuda-core",
)
"""Distributions whose versions can move a figure."""

_NO_COUNTERS = (
    "not tried: pytest --bench --bench-collect counters opens the best instrument that works here, "
    "and says why a better one does not"
)
_COUNTERS_OF_OTHERS = "what another machine counted is read without a GPU: joulemark counters, attribution, report"
BUSY_UTILIZATION = 0.05
HIDDEN_USE = 0.05
"""Share of a GPU's memory that is in use although nobody is seen to use it: more than a driver reserves."""
HEADROOM_K = 5.0
"""A GPU nearer than this to its slowdown temperature will slow down under load."""

_UUID = re.compile(r"(GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]{7,}")
_PATH = re.compile(r"(?<![^\s=:,'\"])(?:~|\.{1,2})?/[^\s,:=]*")


def anonymous(uuid: str) -> str:
    """A digest that stands for a GPU's UUID: equal for equal GPUs, of the same kind (``GPU-``, ``MIG-``)."""
    kind = uuid[:4] if uuid[:4] in ("GPU-", "MIG-") else ""
    return f"{kind}{digest(uuid)}"


def gather(
    inventory: Inventory,
    cwd: Path,
    *,
    anonymize: bool = False,
    framework: Mapping[str, Json] | None = None,
    tiers: Mapping[str, str | None] | None = None,
    notes: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    backend: Any = None,
) -> Environment:
    """Describe this machine for the first line of a result file.

    Args:
        inventory: of :func:`joulemark.device.gpu.probe_gpus`.
        cwd: folder whose git commit counts.
        anonymize: leave out the host's name, paths, and UUIDs but for a digest.
        framework: what the framework says of itself in the measuring process (``cuda``, ``cudnn`` …), merged in.
        tiers: instruments that are in use, where the caller has opened them; found out here by default.
        notes: what is off and why, of these.
        options: the command line as given.
        backend: a stand-in for pynvml.
    """
    if tiers is None:
        tiers, notes = tiers_of(inventory, backend)
    facts: dict[str, Json] = {
        "joulemark": __version__,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "host": host_facts(),
        "packages": package_versions(),
        "git": git_commit(cwd),
        "gpus": [gpu_facts(gpu) for gpu in inventory.gpus],
        "visible": [
            {"ordinal": one.ordinal, "uuid": one.gpu.uuid, "verified": one.verified} for one in inventory.visible
        ],
        "simulated": inventory.simulated,
        "driver": inventory.driver,
        "cuda_driver": inventory.cuda_driver,
        "cuda": None,
        "cudnn": None,
        "options": list(options),
        **(framework or {}),
    }
    return Environment(
        _anonymous(facts) if anonymize else facts,
        {"counters": None, **tiers},
        ({} if "counters" in tiers else {"counters": _NO_COUNTERS}) | dict(notes or {}),
    )


def with_instruments(found: Environment, hello: Mapping[str, Json], on_gpu: bool) -> Environment:
    """The environment with the instruments that a measuring process has opened, as it says in its greeting.

    Args:
        found: of :func:`gather`.
        hello: the greeting; empty for a process that never came up.
        on_gpu: whether it measures a GPU.
    """
    clock = "host_clock" if hello.get("no_clock") or not on_gpu else "cuda_events"
    tiers = {**found.tiers, "timing": clock, "energy": hello.get("power")}
    why = {"energy": hello.get("no_power"), "timing": hello.get("no_clock")}
    notes, counters = dict(found.notes), hello.get("counters")
    if counters is not None:  # what the driver says of them before is what the ladder has tried since
        notes.pop("counters", None)
        tiers["counters"], why["counters"] = counters.get("tier"), counters.get("why")
    return replace(found, tiers=tiers, notes={**notes, **{name: text for name, text in why.items() if text}})


def gpu_facts(gpu: Gpu) -> dict[str, Json]:
    """What is fixed about a GPU, with its model's slug."""
    return {**asdict(gpu), "model": gpu.slug}


def _anonymous(facts: Mapping[str, Json]) -> dict[str, Json]:
    hidden = {key: _scrub(value) for key, value in facts.items()}
    hidden["host"] = {**hidden["host"], "name": None}
    return hidden


def _scrub(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _scrub(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_scrub(one) for one in value]
    if isinstance(value, str):
        return _PATH.sub("<path>", _UUID.sub(lambda match: anonymous(match.group()), value))
    return value


def host_facts() -> dict[str, Json]:
    """Name, system and processor of this machine; ``cores`` are those that this process may use."""
    return {
        "name": platform.node() or None,
        "os": _os_name(),
        "kernel": platform.release() or None,
        "machine": platform.machine() or None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }


def _os_name() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME") or platform.system()
    except OSError:
        return platform.system() or None


def _cpu_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Versions of installed distributions, without importing them; None for one that is not there."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def tiers_of(
    inventory: Inventory, backend: Any = None, uuid: str | None = None
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Which instrument gives times, energy and counters here, and why a better one does not.

    Args:
        inventory: of :func:`joulemark.device.gpu.probe_gpus`.
        backend: a stand-in for pynvml.
        uuid: of the GPU that is measured; the first visible one by default.

    Returns:
        instrument → tier or None, and instrument → what is off, why, and what would help.
    """
    tiers: dict[str, str | None] = {"timing": "host_clock", "energy": None, "counters": None}
    notes = {"counters": _NO_COUNTERS}
    missing = why_no_gpu(inventory)
    if missing is None and importlib.util.find_spec("torch") is None:
        notes["timing"] = "torch is not installed: pip install joulemark[torch] to time on the GPU"
    elif missing is None:
        tiers["timing"] = "cuda_events"
    else:
        notes["timing"] = f"no device clock: {missing}"
        notes["counters"] = "; ".join((f"{missing}{_remedy(inventory)}", _COUNTERS_OF_OTHERS))
    if missing is None:
        tiers["energy"], why = gpu_energy_tier(uuid or inventory.visible[0].gpu.uuid, backend)
    else:
        why = _cpu_energy_problem()
        tiers["energy"] = None if why else "rapl"
        why = f"{missing}; {why}" if why else f"of the CPU only: {missing}"
    if why:
        notes["energy"] = why
    return tiers, notes


def why_no_gpu(inventory: Inventory) -> str | None:
    """Why there is no GPU to measure; None when there is one."""
    if inventory.problem is not None:
        return f"no GPU: {inventory.problem.what}"
    if not inventory.gpus:
        return "no GPU: NVML lists none"
    if not inventory.visible:
        return f"no GPU visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}): unset it"
    return None


def _remedy(inventory: Inventory) -> str:
    """What would give this machine its GPU, as it stands behind :func:`why_no_gpu`; empty where that says it."""
    if inventory.problem is not None:
        return f": {inventory.problem.remedy}" if inventory.problem.remedy else ""
    return "" if inventory.gpus else ": look whether nvidia-smi -L lists one, or whether its container was given one"


def gpu_energy_tier(uuid: str, backend: Any = None) -> tuple[str | None, str | None]:
    """The best energy sensor of a GPU, and why it is not the energy counter.

    Args:
        uuid: of the GPU.
        backend: a stand-in for pynvml.
    """
    try:
        with Nvml(backend) as nvml:
            device = nvml.device(uuid)
            try:
                device.energy_j()
            except DeviceError as error:
                refused = str(error)
            else:
                return "nvml_energy_counter", None
            try:
                device.instant_power_w()
            except NotSupported:
                device.average_power_w()
    except DeviceError as error:
        return None, str(error)
    return "nvml_power_integral", f"energy is integrated from power readings: {refused}"


def _cpu_energy_problem() -> str | None:
    """Why the CPU's energy cannot be read; None when it can."""
    source = RaplSource()
    try:
        source.open()
    except DeviceError as error:
        return str(error)
    source.close()
    return None


@dataclass(frozen=True)
class Preflight:
    """Whether this machine is fit to measure on.

    Args:
        refusals: why not, one line each.
        doubts: what could not be found out.
        notes: what does not stand in the way, and yet moves figures.
    """

    refusals: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def preflight(inventory: Inventory, states: Mapping[str, GpuState | DeviceError], own_pid: int) -> Preflight:
    """Refuse GPUs that are missing, busy, throttled, hot, shared, or whose memory is faulty.

    Args:
        inventory: of :func:`joulemark.device.gpu.probe_gpus`.
        states: of the visible GPUs by UUID, or why there is none.
        own_pid: a process that may hold a context.
    """
    missing = why_no_gpu(inventory)
    if missing is not None:
        return Preflight((f"{missing}{_remedy(inventory)}",))
    refusals: list[str] = []
    doubts: list[str] = []
    notes: list[str] = []
    for one in inventory.visible:
        name = f"{one.gpu.name} ({one.gpu.uuid})"
        if not one.verified:
            doubts.append(f"{name}: which GPU cuda:{one.ordinal} is, is a guess: {one.why}")
        state = states[one.gpu.uuid]
        if isinstance(state, DeviceError):
            refusals.append(f"{name}: {state}")
            continue
        refusals += [f"{name}: {why}" for why in (*_taken(one.gpu, state, own_pid), *_unfit(state))]
        notes += [f"{name}: {what}" for what in _worth_knowing(one.gpu, state)]
        doubts += [f"{name}: {what} cannot be read here" for what in _unread(state)]
        siblings = [
            gpu for gpu in inventory.gpus if gpu.parent_uuid is not None and gpu.parent_uuid == one.gpu.parent_uuid
        ]
        if len(siblings) > 1:
            refusals.append(f"{name}: shared: {len(siblings)} MIG instances draw on one board's power and clocks")
    return Preflight(tuple(refusals), tuple(doubts), tuple(notes))


def _taken(gpu: Gpu, state: GpuState, own_pid: int) -> Iterable[str]:
    others = [process.pid for process in state.processes or () if process.pid != own_pid]
    if others:
        pids = ", ".join(str(pid) for pid in others)
        yield f"shared: {len(others)} other process(es) hold a context (pid {pids}): end them, or choose another GPU"
    elif state.memory_used_bytes is not None and state.memory_used_bytes > HIDDEN_USE * (gpu.memory_bytes or math.inf):
        used = format_value(state.memory_used_bytes, "B")
        yield f"shared: {used} of its memory in use by processes that cannot be seen from here: ask who uses it"
    if state.utilization is not None and state.utilization > BUSY_UTILIZATION:
        yield f"busy: utilization {state.utilization:.0%}: wait until it is idle"


def _unfit(state: GpuState) -> Iterable[str]:
    heat = format_value(state.temperature_c, "degC")
    hindered = sorted(HINDERING & (state.reasons or frozenset()))
    if hindered:
        clock = format_value(state.sm_clock_hz, "Hz")
        yield f"throttled: {', '.join(hindered)} (SM clock {clock}, {heat}): let it cool down, check power and cooling"

    margin = state.slowdown_margin_k
    if margin is not None and margin < HEADROOM_K:
        yield f"hot: {heat}, {margin:.0f} K before it slows down: let it cool down, check its cooling"
    faults = state.faults
    if faults.remap_failed:
        yield "faulty memory: a bad row has no spare left: replace the board"
    if faults.remap_pending:
        yield "faulty memory: bad rows wait to be replaced: reset the GPU (nvidia-smi --gpu-reset) or reboot"
    if faults.uncorrected:
        yield f"faulty memory: {faults.uncorrected} uncorrected errors since the driver was loaded: reset the GPU"


def _worth_knowing(gpu: Gpu, state: GpuState) -> Iterable[str]:
    if gpu.persistence is False:
        yield "persistence mode is off: the driver may unload between runs, start them slowly and drop its settings"
    if state.graphics_processes:
        pids = ", ".join(str(process.pid) for process in state.graphics_processes)
        yield f"{len(state.graphics_processes)} process(es) draw with it (pid {pids}): a display moves figures"
    if "application_clocks" in (state.reasons or ()):
        yield "its clocks are set by hand: figures compare with runs at the same clocks only"
    limit, delivered = gpu.power_limit_w, gpu.default_power_limit_w
    if limit is not None and delivered is not None and limit < delivered:
        yield f"its power limit is {format_value(limit, 'W')}, as delivered {format_value(delivered, 'W')}"


def _unread(state: GpuState) -> Iterable[str]:
    if state.processes is None:
        yield "who uses it"
    if state.utilization is None:
        yield "its utilization"
    if state.reasons is None:
        yield "its clock-event reasons"
