"""From the GPUs of a machine and the options to the devices under test, and to those that workers may measure on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from joulemark.errors import ConfigurationError
from joulemark.plugin.sweep import CPU, Target

if TYPE_CHECKING:
    from joulemark.device.gpu import Inventory
    from joulemark.device.lease import Claim
    from joulemark.plugin.options import BenchOptions

_INVENTORY = pytest.StashKey["Inventory"]()


def probed(config: pytest.Config) -> Inventory:
    """The GPUs of this machine, looked for once per session."""
    from joulemark.collect.framework import framework_uuids
    from joulemark.device.gpu import probe_gpus

    if _INVENTORY not in config.stash:
        config.stash[_INVENTORY] = probe_gpus(os.environ, framework_uuids)
    return config.stash[_INVENTORY]


def select_targets(options: BenchOptions, inventory: Inventory) -> list[Target]:
    """The devices that ``--bench-gpus`` names; the CPU where there is none.

    Raises:
        ConfigurationError: it names what is not there, or several where one process measures.
    """
    from joulemark.device.gpu import select_gpus

    chosen = select_gpus(inventory.visible, options.gpus)
    slugs = [one.gpu.slug for one in chosen]
    out = []
    for one in chosen:
        slug = one.gpu.slug
        if slugs.count(slug) > 1:
            stored = shown(one.gpu.uuid, options)
            slug += f"-{stored.removeprefix('GPU-').removeprefix('MIG-')[:8]}"
        doubt = one.why if _by_ordinal(options) and not one.verified else None
        out.append(Target(one.gpu.uuid, slug, one.gpu.slug, one.gpu.name, doubt))
    if not options.isolate and len(out) > 1:
        out = _one_of(out, options)
    return out or [_cpu(options, inventory)]


def _by_ordinal(options: BenchOptions) -> bool:
    """Chosen by UUID or model, a GPU is certain whatever CUDA's numbering: the child sees it by UUID alone."""
    return any(
        part.strip().isdecimal()
        for text in (os.environ.get("CUDA_VISIBLE_DEVICES", ""), options.gpus)
        for part in text.split(",")
    )


def _cpu(options: BenchOptions, inventory: Inventory) -> Target:
    """The CPU, with the reason why it is no GPU; none where the CPU was chosen."""
    from joulemark.environment import why_no_gpu

    return CPU if options.gpus in ("cpu", "none") else replace(CPU, no_gpu=why_no_gpu(inventory))


def _one_of(several: list[Target], options: BenchOptions) -> list[Target]:
    """This process sees one GPU; of another it would read the power and time the work of the first."""
    if options.gpus != "auto":
        raise ConfigurationError(
            f"--bench-gpus got {options.gpus!r}, {len(several)} GPUs, and one process measures one",
            "choose one of them, or leave out --bench-inprocess (--pdb, --trace)",
        )
    return several[:1]


def shown(uuid: str, options: BenchOptions) -> str:
    """A UUID as it may be stored."""
    from joulemark.environment import anonymous

    return anonymous(uuid) if options.anonymize else uuid


def stations_of(options: BenchOptions, inventory: Inventory, targets: Sequence[Target]) -> list[Target]:
    """Where workers of pytest-xdist may measure side by side.

    A GPU that ``--bench-gpus`` names by ordinal or UUID, and each of ``all``, is a target of its own: its cells are
    measured on it alone. One that it names by model, or by ``auto``, stands for all visible GPUs of its model: any of
    them may measure its cells.

    Raises:
        ConfigurationError: two of them are parts of one board whose power is measured.
    """
    stations = list(targets)
    if _names_models(options.gpus):
        known = {target.uuid: target for target in targets}
        by_slug = {target.slug: target for target in targets}
        stations = [
            known.get(one.gpu.uuid) or replace(by_slug[one.gpu.slug], uuid=one.gpu.uuid)
            for one in inventory.visible
            if one.gpu.slug in by_slug
        ] or stations
    apart: dict[tuple[str, ...], Target] = {}
    for station in stations:
        apart.setdefault(claim_for(station, options, inventory).keys if station.on_gpu else (), station)
    if {one.slug for one in stations} != {one.slug for one in apart.values()}:
        raise ConfigurationError(
            f"--bench-gpus got {options.gpus!r}, MIG instances of one board, which has one power sensor",
            "leave out -n, or measure no power (--bench-collect timing)",
        )
    return list(apart.values())


def pool_of(options: BenchOptions, inventory: Inventory, targets: Sequence[Target]) -> Mapping[str, Sequence[str]]:
    """UUIDs of the GPUs that may work together on one case, by model: all visible ones, or those that were named."""
    named = None if _names_models(options.gpus) else {one.uuid for one in targets}
    return {
        model: [
            one.gpu.uuid
            for one in inventory.visible
            if one.gpu.slug == model and (named is None or one.gpu.uuid in named)
        ]
        for model in dict.fromkeys(one.model for one in targets)
    }


def _names_models(wanted: str) -> bool:
    entries = [part.strip() for part in wanted.split(",") if part.strip()]
    return not any(
        one.isdecimal() or one.lower() == "all" or one.upper().startswith(("GPU-", "MIG-")) for one in entries
    )


def number_of_workers(config: pytest.Config) -> int:
    """What ``-n auto`` means: one worker per GPU; 0, this very process, where there is one GPU or none.

    Raises:
        pytest.UsageError: an option is wrong.
    """
    from joulemark.plugin.options import BenchOptions

    try:
        options, inventory = BenchOptions.from_pytest_config(config), probed(config)
        stations = stations_of(options, inventory, select_targets(options, inventory))
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from error
    return len(stations) if len(stations) > 1 else 0


def claim_for(target: Target, options: BenchOptions, inventory: Inventory) -> Claim:
    """The locks that measuring on a GPU needs."""
    from joulemark.device.lease import Claim, claim_of

    assert target.uuid is not None
    gpu = inventory.by_uuid(target.uuid)
    if gpu is None:
        return Claim(target.uuid, target.name, (target.uuid,))
    return claim_of(gpu, inventory.gpus, "power" in options.collect)
