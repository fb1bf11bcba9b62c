"""Which families of kernels there are, and what of them can execute a sequence."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from joulemark.merged import cache
from joulemark.merged.cost import Candidate, How, Rates
from joulemark.merged.kernels import Description, Kernel, KernelError
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.seconds import fitted, seconds_of
from joulemark.merged.sequence import Shape


@dataclass(frozen=True)
class Problem:
    """What is to be executed.

    Args:
        description: the sequence in its number format.
        size: spatial, of the input.
        batch: images.
        device: limits of the GPU.
        gpu: its name; None where it is not known.
    """

    description: Description
    size: Shape
    batch: int
    device: Device
    gpu: str | None = None


@dataclass(frozen=True)
class Family:
    """Kernels of one kind.

    Args:
        name: unique.
        how: their schedule.
        kernels: those that solve a problem, in several sizes, the most promising first where the family ranks them;
            none where it is not made for it.
    """

    name: str
    how: How
    kernels: Callable[[Problem], Iterable[Kernel]]


@dataclass(frozen=True)
class Offer:
    """A kernel of a family for one problem.

    Args:
        candidate: what the performance model needs of it.
        kernel: to run.
        rank: place in its family's order, from 0.
    """

    candidate: Candidate
    kernel: Kernel
    rank: int

    @property
    def path(self) -> str:
        """What identifies it among all offers for its problem."""
        return f"{self.candidate.family}/{self.kernel.name}"


def offers(families: Iterable[Family], problem: Problem) -> list[Offer]:
    """All kernels that solve a problem; none where a layer has a norm, which no family knows."""
    found: list[Offer] = []
    if any(one.norm is not None for one in problem.description.sequence.layers):
        return found
    for family in families:
        try:
            kernels = list(family.kernels(problem))
        except (KernelError, ValueError):
            continue
        for rank, kernel in enumerate(kernels):
            candidate = Candidate(
                family.how,
                family.name,
                kernel.edge,
                kernel.shared,
                kernel.block,
                kernel.persistent,
                kernel.parts,
                kernel.images,
                counted_s=_counted_s(family, kernel, problem),
            )
            found.append(Offer(candidate, kernel, rank))
    return found


def _counted_s(family: Family, kernel: Kernel, problem: Problem) -> float | None:
    """What the kernel's counts come to on the GPU that the family was measured on; None where that is another."""
    if kernel.counts is None or problem.gpu != fitted().gpu:
        return None
    return seconds_of(family.name, kernel.counts(problem.size, problem.batch, problem.device))


def limits_of(rates: Rates | None) -> Device:
    """What a device offers to blocks; an H200's where its rates are not known."""
    return Device() if rates is None else Device(rates.multiprocessors, rates.shared_bytes, rates.shared_bytes - 1024)


_SCHEDULES: dict[str, How] = {
    "chain": "padded",
    "stream": "rows",
    "memoized": "memoized",
    "inverted_residual": "padded",
    "stream_warpgroup": "rows",
    "inverted_residual_warpgroup": "padded",
    "expand_depthwise": "padded",
    "wide": "rows",
    "planes": "rows",
    "planes_warpgroup": "rows",
    "bottleneck": "padded",
    "bottleneck_warpgroup": "padded",
    "stem_warpgroup": "padded",
}
"""Module of ``joulemark.merged.kernels`` → its schedule.

Each has ``unsuited``, ``candidates``, ``Plan`` and a function of its name."""


_JOINING = ("bottleneck_warpgroup",)
"""Those that know layers which join the channels of two tensors."""


def known_families() -> tuple[Family, ...]:
    """The families that this version has."""
    return tuple(Family(name, how, partial(_best_kernels, name)) for name, how in _SCHEDULES.items())


def _best_kernels(name: str, problem: Problem) -> list[Kernel]:
    """Kernels of the plans that a family ranks best; ranking takes some hundredths of a second and is kept on disk."""
    module: Any = importlib.import_module(f"joulemark.merged.kernels.{name}")
    if name not in _JOINING and any(one.joined is not None for one in problem.description.sequence.layers):
        return []
    if module.unsuited(problem.description) is not None:
        return []
    key = cache.key_of(name, cache.code_key("kernels"), fitted(), problem)
    kept = cache.read("plans", key, list[dict[str, Any]])
    if kept is None:
        ranked = module.candidates(problem.description, problem.size, problem.batch, problem.device)
        kept = [asdict(one) for one in ranked]
        cache.write("plans", key, kept)
    found: dict[str, Kernel] = {}
    for one in kept:
        sizes = {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
        kernel: Kernel = getattr(module, name)(problem.description, module.Plan(**sizes))
        found.setdefault(kernel.name, replace(kernel, plan=one))
    return list(found.values())
