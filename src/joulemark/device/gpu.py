"""Which GPUs are here and which of them CUDA shows, each known by its UUID and never by its position."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark.device.nvml import MemoryFaults, Nvml, read_or_none
from joulemark.errors import ConfigurationError, DeviceError

if TYPE_CHECKING:
    from joulemark.device.nvml import NvmlDevice, Process

Probe = Callable[[Mapping[str, str]], "Sequence[str] | None"]
"""Given an environment, the UUIDs that the framework sees in it, by its ordinals; None if it cannot tell."""

_MIG_DOUBT = "MIG: CUDA shows instances by a rule of its own"
PROC_DRIVER = Path("/proc/driver/nvidia/version")


def slug(name: str) -> str:
    """A model's name for ids and folders: lower case, everything but letters and digits to ``-``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True)
class Gpu:
    """What is fixed about a GPU, or about a MIG instance of one. A fact that the driver does not tell is None.

    Args:
        uuid: NVML's, as ``GPU-…`` or ``MIG-…``.
        name: model, as ``NVIDIA H200``.
        pci_bus_id: as ``00000000:1B:00.0``; of the board for a MIG instance.
        memory_bytes: total memory.
        vbios, driver: versions.
        power_limit_w: enforced limit.
        default_power_limit_w: limit of the board as delivered.
        max_sm_clock_hz: highest clock of the SMs.
        ecc, persistence: modes.
        mig: whether the GPU is partitioned.
        nvml_index: position in NVML's list, for display only.
        parent_uuid: of the board, for a MIG instance.
    """

    uuid: str
    name: str
    pci_bus_id: str | None = None
    memory_bytes: int | None = None
    vbios: str | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    max_sm_clock_hz: float | None = None
    ecc: bool | None = None
    persistence: bool | None = None
    mig: bool | None = None
    nvml_index: int | None = None
    parent_uuid: str | None = None

    @property
    def slug(self) -> str:
        """The model as in case ids and result folders: ``nvidia-h200``."""
        return slug(self.name)


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU as CUDA numbers it.

    Args:
        gpu: the GPU; a mere guess from the bus order when not ``verified``.
        ordinal: of CUDA: ``cuda:ordinal`` in the environment that was asked about.
        verified: whether the identity is certain.
        why: what makes it certain, or what is missing.
    """

    gpu: Gpu
    ordinal: int
    verified: bool
    why: str


@dataclass(frozen=True)
class GpuState:
    """What a GPU is doing now; what could not be read is None."""

    processes: tuple[Process, ...] | None
    utilization: float | None
    memory_used_bytes: int | None
    power_w: float | None
    sm_clock_hz: float | None
    memory_clock_hz: float | None
    temperature_c: float | None
    reasons: frozenset[str] | None
    slowdown_margin_k: float | None = None
    graphics_processes: tuple[Process, ...] | None = None
    faults: MemoryFaults = field(default_factory=MemoryFaults)


@dataclass(frozen=True)
class Inventory:
    """All that a session needs to know about GPUs before it measures.

    Args:
        gpus: every GPU and MIG instance that NVML lists.
        visible: those that CUDA shows, by ordinal.
        problem: why there is no list, None when NVML answered.
        driver: version of the kernel driver, from NVML or else from the kernel.
        cuda_driver: newest CUDA that the driver supports.
        simulated: whether the GPUs are fakes.
    """

    gpus: tuple[Gpu, ...] = ()
    visible: tuple[VisibleGpu, ...] = ()
    problem: DeviceError | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    simulated: bool = False

    def by_uuid(self, uuid: str) -> Gpu | None:
        """The GPU of a UUID in any of its spellings."""
        return next((gpu for gpu in self.gpus if _same_uuid(gpu.uuid, uuid)), None)


def list_gpus(nvml: Nvml) -> list[Gpu]:
    """Every GPU that NVML sees, in bus order, each followed by its MIG instances.

    Raises:
        DeviceError: NVML does not list its GPUs. A single GPU that does not answer is left out.
    """
    driver = read_or_none(nvml.driver_version)
    found: list[Gpu] = []
    for index in range(nvml.count()):
        try:
            device = nvml.device(nvml.uuid_at(index))
            gpu = _describe(device, index, driver)
            found.append(gpu)
            found.extend(_describe_mig(nvml, gpu, uuid) for uuid in (device.mig_uuids() if gpu.mig else ()))
        except DeviceError:
            continue  # lost, or not this user's: the others are still of use
    return found


def _describe(device: NvmlDevice, index: int, driver: str | None) -> Gpu:
    return Gpu(
        uuid=device.uuid,
        name=device.name(),
        pci_bus_id=read_or_none(device.pci_bus_id),
        memory_bytes=read_or_none(device.memory_bytes),
        vbios=read_or_none(device.vbios),
        driver=driver,
        power_limit_w=read_or_none(device.power_limit_w),
        default_power_limit_w=read_or_none(device.default_power_limit_w),
        max_sm_clock_hz=read_or_none(device.max_sm_clock_hz),
        ecc=read_or_none(device.ecc),
        persistence=read_or_none(device.persistence),
        mig=read_or_none(device.mig),
        nvml_index=index,
    )


def _describe_mig(nvml: Nvml, parent: Gpu, uuid: str) -> Gpu:
    instance = nvml.device(uuid)
    return Gpu(
        uuid=uuid,
        name=read_or_none(instance.name) or f"{parent.name} MIG",
        pci_bus_id=parent.pci_bus_id,
        memory_bytes=read_or_none(instance.memory_bytes),
        vbios=parent.vbios,
        driver=parent.driver,
        max_sm_clock_hz=parent.max_sm_clock_hz,
        ecc=parent.ecc,
        persistence=parent.persistence,
        nvml_index=parent.nvml_index,
        parent_uuid=parent.uuid,
    )


def gpu_state(nvml: Nvml, uuid: str) -> GpuState:
    """What a GPU is doing now, to see whether it is busy, shared or throttled.

    Raises:
        DeviceError: there is no such GPU, or it is lost.
    """
    device = nvml.device(uuid)
    processes = read_or_none(device.processes)
    drawing = read_or_none(device.graphics_processes)
    power = read_or_none(device.instant_power_w)
    return GpuState(
        processes=None if processes is None else tuple(processes),
        utilization=read_or_none(device.utilization),
        memory_used_bytes=read_or_none(device.memory_used_bytes),
        power_w=read_or_none(device.average_power_w) if power is None else power,
        sm_clock_hz=read_or_none(device.sm_clock_hz),
        memory_clock_hz=read_or_none(device.memory_clock_hz),
        temperature_c=read_or_none(device.temperature_c),
        reasons=read_or_none(device.clock_reasons),
        slowdown_margin_k=read_or_none(device.slowdown_margin_k),
        graphics_processes=None if drawing is None else tuple(drawing),
        faults=device.memory_faults(),
    )


def probe_gpus(environ: Mapping[str, str], probe: Probe | None = None, backend: Any = None) -> Inventory:
    """The GPUs of this machine as CUDA would show them in ``environ``; a missing NVML is a finding, not an exception.

    Args:
        environ: of the process that will measure.
        probe: asked for the framework's UUIDs when the environment alone does not tell which GPU is which.
        backend: a stand-in for pynvml.
    """
    try:
        with Nvml(backend) as nvml:
            gpus = list_gpus(nvml)
            driver, cuda = read_or_none(nvml.driver_version), read_or_none(nvml.cuda_driver_version)
            simulated = nvml.simulated
    except DeviceError as problem:
        return Inventory(problem=problem, driver=driver_of_kernel())
    visible = visible_gpus(gpus, environ, probe)
    return Inventory(tuple(gpus), tuple(visible), None, driver or driver_of_kernel(), cuda, simulated)


def driver_of_kernel(path: Path | None = None) -> str | None:
    """Driver version that the kernel module tells of itself in ``path``; None without one."""
    try:
        text = (path or PROC_DRIVER).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str], probe: Probe | None = None) -> list[VisibleGpu]:
    """The GPUs that CUDA shows in an environment, in the order of its ordinals.

    ``CUDA_VISIBLE_DEVICES`` is read as CUDA does (CUDA C++ Programming Guide, "CUDA Environment Variables"): the
    list ends at the first entry that is no device, and an entry given twice leaves none. An ordinal counts in
    CUDA's own order, which is the bus order only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and otherwise fastest
    first by a rule that is not published. Where that order decides, ``probe`` is asked, and without an answer
    the rows come back with ``verified=False`` and the bus order as a guess.

    Args:
        gpus: as from :func:`list_gpus`.
        environ: of the measuring process.
        probe: see :data:`Probe`; called at most once, and only when needed.
    """
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    boards = _in_bus_order([gpu for gpu in gpus if gpu.parent_uuid is None])
    candidates = _unfold(boards, gpus)
    if mask is not None and mask.strip().startswith(("GPU-", "MIG-")):
        chosen = _by_uuid(mask, gpus)
        if not any(gpu.mig for gpu in chosen):
            return [VisibleGpu(gpu, i, True, "named by UUID in CUDA_VISIBLE_DEVICES") for i, gpu in enumerate(chosen)]
        return _asked(_unfold(chosen, gpus), candidates, environ, probe, _MIG_DOUBT)
    chosen = candidates if mask is None else _by_ordinal(mask, candidates)
    if not chosen:
        return []
    doubt = _doubt(boards, environ, mask)
    if doubt is None:
        why = "the only GPU here" if len(boards) == 1 else "bus order (CUDA_DEVICE_ORDER=PCI_BUS_ID)"
        if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len(boards) > 1:
            why = "like GPUs, all visible: CUDA keeps them in bus order"
        return [VisibleGpu(gpu, i, True, why) for i, gpu in enumerate(chosen)]
    return _asked(chosen, candidates, environ, probe, doubt)


def _doubt(boards: Sequence[Gpu], environ: Mapping[str, str], mask: str | None) -> str | None:
    """Why ordinals do not tell which GPU is meant; None when they do."""
    if any(gpu.mig for gpu in boards):
        return _MIG_DOUBT
    if len(boards) == 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return None
    unlike = len({(gpu.name, gpu.memory_bytes) for gpu in boards}) > 1
    if mask is None and not unlike:
        return None
    kind = "unlike GPUs" if unlike else "several GPUs"
    return f"{kind} numbered in CUDA's own order (CUDA_DEVICE_ORDER is not PCI_BUS_ID)"


def _asked(
    guess: Sequence[Gpu], candidates: Sequence[Gpu], environ: Mapping[str, str], probe: Probe | None, doubt: str
) -> list[VisibleGpu]:
    """The framework's own list where it answers; else the guess, marked as one."""
    told = None if probe is None else probe(environ)
    if told is None:
        silent = "nobody asked the framework" if probe is None else "the framework did not answer"
        return [VisibleGpu(gpu, i, False, f"{doubt}; {silent}") for i, gpu in enumerate(guess)]
    known = _known_digits(candidates)
    found = [known.get(_digits(uuid)) for uuid in told]
    if not found or None in found:
        why = f"{doubt}; the framework sees {', '.join(told) or 'no device'}"
        return [VisibleGpu(gpu, i, False, why) for i, gpu in enumerate(guess)]
    return [VisibleGpu(gpu, i, True, "UUID told by the framework") for i, gpu in enumerate(found) if gpu is not None]


def _known_digits(candidates: Sequence[Gpu]) -> dict[str, Gpu]:
    """Devices by the digits of their UUID; a lone MIG instance also by its board's, which some CUDA versions give."""
    known = {_digits(gpu.uuid): gpu for gpu in candidates}
    parents = [gpu.parent_uuid for gpu in candidates]
    for gpu in candidates:
        if gpu.parent_uuid is not None and parents.count(gpu.parent_uuid) == 1:
            known.setdefault(_digits(gpu.parent_uuid), gpu)
    return known


def _in_bus_order(gpus: Sequence[Gpu]) -> list[Gpu]:
    """By domain, bus and device; where NVML hides one, in its own order (which is the bus order)."""
    if any(gpu.pci_bus_id is None for gpu in gpus):
        return list(gpus)
    return sorted(gpus, key=lambda gpu: (gpu.pci_bus_id or "").lower().rjust(16, "0"))


def _unfold(boards: Sequence[Gpu], gpus: Sequence[Gpu]) -> list[Gpu]:
    """Boards, a partitioned one replaced by its MIG instances: CUDA runs on those alone."""
    out: list[Gpu] = []
    for board in boards:
        out.extend([gpu for gpu in gpus if gpu.parent_uuid == board.uuid] if board.mig else [board])
    return out


def _by_uuid(mask: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Entries ``GPU-…`` or ``MIG-…``, whole or any prefix that only one device has; all of the first one's kind."""
    kind = mask.strip()[:4]
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in mask.split(",")):
        matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
        if not entry.startswith(kind) or len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen.append(matches[0])
    return chosen


def _by_ordinal(mask: str, candidates: Sequence[Gpu]) -> list[Gpu]:
    """Entries read as C's ``strtoul`` does, so that ``1x`` is 1; the list ends where one is no ordinal of a device."""
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in mask.split(",")):
        number = re.match(r"\+?(\d+)", entry)
        if number is None or int(number.group(1)) >= len(candidates):
            break
        gpu = candidates[int(number.group(1))]
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def _digits(uuid: str) -> str:
    """The hexadecimal digits of a UUID: frameworks leave the prefix ``GPU-`` away."""
    return re.sub(r"^(gpu|mig)-", "", uuid.strip().lower())


def _same_uuid(one: str, other: str) -> bool:
    return _digits(one) == _digits(other)


def select_gpus(visible: Sequence[VisibleGpu], wanted: str) -> list[VisibleGpu]:
    """The GPUs that ``--bench-gpus`` names.

    Args:
        visible: as from :func:`visible_gpus`.
        wanted: ``auto`` (one of each model), ``all``, ``cpu`` or ``none`` (no GPU), or a comma list of CUDA
            ordinals, UUIDs (or a prefix) and model slugs; a slug takes one GPU of that model.

    Raises:
        ConfigurationError: a name fits none or several, or nothing is named.
    """
    text = wanted.strip()
    if text.lower() in ("cpu", "none"):
        return []
    if text.lower() == "all":
        return list(visible)
    if text.lower() == "auto":
        return _one_per_model(visible)
    chosen: list[VisibleGpu] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        found = _named(visible, entry)
        if found not in chosen:
            chosen.append(found)
    if not chosen:
        raise ConfigurationError(f"--bench-gpus names nothing (value {wanted!r})", _choices(visible))
    return chosen


def _one_per_model(visible: Sequence[VisibleGpu]) -> list[VisibleGpu]:
    """The first of each model, one of certain identity before a guess."""
    models: dict[str, VisibleGpu] = {}
    for one in visible:
        held = models.get(one.gpu.slug)
        if held is None or (one.verified and not held.verified):
            models[one.gpu.slug] = one
    return list(models.values())


def _named(visible: Sequence[VisibleGpu], entry: str) -> VisibleGpu:
    if entry.isdecimal():
        matches = [one for one in visible if one.ordinal == int(entry)]
    elif entry.upper().startswith(("GPU-", "MIG-")):
        matches = [one for one in visible if one.gpu.uuid.lower().startswith(entry.lower())]
    else:
        matches = [one for one in _one_per_model(visible) if one.gpu.slug == slug(entry)]
    if len(matches) == 1:
        return matches[0]
    fits = "fits several GPUs" if matches else "fits no visible GPU"
    raise ConfigurationError(f"--bench-gpus {entry!r} {fits}", _choices(visible))


def _choices(visible: Sequence[VisibleGpu]) -> str:
    if not visible:
        return "CUDA shows no GPU here; use --bench-gpus cpu, or see `joulemark env`"
    shown = "; ".join(f"{one.ordinal} = {one.gpu.slug} {one.gpu.uuid}" for one in visible)
    return f"use auto, all, cpu, or name some of: {shown}"
