"""What ``joulemark env`` shows of this machine, for a person and for a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from joulemark.errors import DeviceError
from joulemark.metrics import format_value

if TYPE_CHECKING:
    from joulemark.device.gpu import Gpu, GpuState, Inventory, VisibleGpu
    from joulemark.device.nvml import Process
    from joulemark.environment import Preflight
    from joulemark.records import Environment, Json

    States = Mapping[str, GpuState | DeviceError]

SCHEMA = "joulemark/env/1"


def lines(inventory: Inventory, environment: Environment, states: States) -> Iterator[str]:
    """The machine line by line.

    Args:
        inventory: of :func:`joulemark.device.gpu.probe_gpus`.
        environment: of :func:`joulemark.environment.gather`.
        states: of the visible GPUs by UUID, or why there is none.
    """
    facts = environment.facts
    host = facts["host"]
    memory = format_value(host["memory_bytes"], "B")
    yield f"host      {host['name']}: {host['os']}, kernel {host['kernel']}"
    yield f"cpu       {host['cpu']}, {host['cores']} cores, {memory} memory"
    yield f"python    {facts['python']} ({facts['python_implementation']})"
    installed = [f"{name} {version}" for name, version in facts["packages"].items() if version is not None]
    yield f"packages  joulemark {facts['joulemark']}, {', '.join(installed)}"
    git = facts["git"]
    yield (
        f"commit    {git['hash']}{' (dirty)' if git['dirty'] else ''}"
        if git
        else "commit    none (not a git repository)"
    )
    newest = f", CUDA up to {inventory.cuda_driver}" if inventory.cuda_driver else ""
    yield f"driver    {inventory.driver or 'n/a'}{newest}{' (simulated GPUs)' if inventory.simulated else ''}"
    yield from _gpu_lines(inventory, states)
    for instrument, tier in environment.tiers.items():
        note = environment.notes.get(instrument)
        yield f"{instrument:<9} {tier or 'none'}{f' ({note})' if note else ''}"


def _gpu_lines(inventory: Inventory, states: States) -> Iterator[str]:
    if inventory.problem is not None:
        yield f"gpus      none: {inventory.problem}"
        return
    shown = {one.gpu.uuid for one in inventory.visible}
    hidden = [gpu for gpu in inventory.gpus if gpu.uuid not in shown]
    if not inventory.gpus:
        yield "gpus      none: NVML lists none"
    for one in inventory.visible:
        yield f"cuda:{one.ordinal}    {_gpu_line(one.gpu)}"
        yield f"          {_identity(one)}"
        state = states.get(one.gpu.uuid)
        if state is not None:
            yield f"          now: {_state_line(state)}"
    for gpu in hidden:
        yield f"hidden    {_gpu_line(gpu)}"


def _identity(one: VisibleGpu) -> str:
    return f"identity {'certain' if one.verified else 'A GUESS'}: {one.why}"


def _gpu_line(gpu: Gpu) -> str:
    limit = format_value(gpu.power_limit_w, "W")
    if gpu.default_power_limit_w is not None and gpu.default_power_limit_w != gpu.power_limit_w:
        limit += f" (as delivered {format_value(gpu.default_power_limit_w, 'W')})"
    parts = [
        f"{gpu.name} {gpu.uuid}",
        f"{format_value(gpu.memory_bytes, 'B')} memory",
        f"power limit {limit}",
        f"SM clock up to {format_value(gpu.max_sm_clock_hz, 'Hz')}",
        f"ECC {_switch(gpu.ecc)}",
        f"MIG {_switch(gpu.mig)}" if gpu.parent_uuid is None else f"a MIG instance of {gpu.parent_uuid}",
        f"persistence {_switch(gpu.persistence)}",
        f"VBIOS {gpu.vbios or 'n/a'}",
    ]
    return ", ".join(parts)


def _switch(value: bool | None) -> str:
    return "n/a" if value is None else "on" if value else "off"


def _state_line(state: GpuState | DeviceError) -> str:
    if isinstance(state, DeviceError):
        return str(state)
    busy = "n/a" if state.utilization is None else f"{state.utilization:.0%}"
    users = "n/a" if state.processes is None else str(len(state.processes))
    reasons = "n/a" if state.reasons is None else ", ".join(sorted(state.reasons)) or "none"
    parts = [
        f"{format_value(state.power_w, 'W')}",
        f"SM {format_value(state.sm_clock_hz, 'Hz')}",
        f"memory {format_value(state.memory_clock_hz, 'Hz')}",
        f"{format_value(state.temperature_c, 'degC')}",
        f"utilization {busy}",
        f"compute processes {users}",
        f"clock-event reasons {reasons}",
    ]
    return ", ".join(parts)


def document(
    inventory: Inventory,
    environment: Environment,
    states: States,
    check: Preflight | None,
) -> Json:
    """The machine as a JSON document, described by ``docs/schema/env.schema.json``.

    Args:
        inventory: of :func:`joulemark.device.gpu.probe_gpus`.
        environment: of :func:`joulemark.environment.gather`.
        states: of the visible GPUs by UUID, or why there is none.
        check: of :func:`joulemark.environment.preflight`; None when it was not asked for.
    """
    return {
        "schema": SCHEMA,
        "facts": dict(environment.facts),
        "tiers": dict(environment.tiers),
        "notes": dict(environment.notes),
        "problem": _problem(inventory.problem),
        "gpus": [_visible(one, states[one.gpu.uuid]) for one in inventory.visible],
        "check": None
        if check is None
        else {
            "passed": not check.refusals,
            "refusals": list(check.refusals),
            "doubts": list(check.doubts),
            "notes": list(check.notes),
        },
    }


def _problem(problem: DeviceError | None) -> Json:
    if problem is None:
        return None
    return {"what": problem.what, "remedy": problem.remedy, "cause": getattr(problem, "cause", None)}


def _visible(one: VisibleGpu, state: GpuState | DeviceError) -> Json:
    return {
        "ordinal": one.ordinal,
        "uuid": one.gpu.uuid,
        "name": one.gpu.name,
        "verified": one.verified,
        "why": one.why,
        "state": {"problem": str(state)} if isinstance(state, DeviceError) else _state(state),
    }


def _state(state: GpuState) -> Json:
    return {
        "problem": None,
        "processes": _processes(state.processes),
        "graphics_processes": _processes(state.graphics_processes),
        "utilization": state.utilization,
        "memory_used_bytes": state.memory_used_bytes,
        "power_w": state.power_w,
        "sm_clock_hz": state.sm_clock_hz,
        "memory_clock_hz": state.memory_clock_hz,
        "temperature_c": state.temperature_c,
        "slowdown_margin_k": state.slowdown_margin_k,
        "reasons": None if state.reasons is None else sorted(state.reasons),
        "memory_faults": asdict(state.faults),
    }


def _processes(processes: Iterable[Process] | None) -> Json:
    return None if processes is None else [asdict(one) for one in processes]
