"""Which families of kernels there are, and what of them can execute a sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from joulemark.merged import cache
from joulemark.merged.cost import Candidate, How, Rates
from joulemark.merged.kernels import Description, Kernel, KernelError
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.sequence import Shape


@dataclass(frozen=True)
class Problem:
    """What is to be executed.

    Args:
        description: the sequence in its number format.
        size: spatial, of the input.
        batch: images.
        device: limits of the GPU.
    """

    description: Description
    size: Shape
    batch: int
    device: Device

    @property
    def out(self) -> Shape:
        """Spatial size of the output."""
        return self.description.sequence.sizes(self.size)[-1]


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
    """All kernels that solve a problem."""
    found = []
    for family in families:
        try:
            kernels = list(family.kernels(problem))
        except (KernelError, ValueError):
            continue
        for rank, kernel in enumerate(kernels):
            blocks = kernel.persistent
            candidate = Candidate(
                family.how, family.name, kernel.edge, kernel.shared, kernel.block, blocks, kernel.parts
            )
            found.append(Offer(candidate, kernel, rank))
    return found


def limits_of(rates: Rates | None) -> Device:
    """What a device offers to blocks; an H200's where its rates are not known."""
    return Device() if rates is None else Device(rates.multiprocessors, rates.shared_bytes, rates.shared_bytes - 1024)


def known_families() -> tuple[Family, ...]:
    """The families that this version has."""
    return (
        Family("chain", "padded", _chains),
        Family("stream", "rows", _streams),
        Family("memoized", "memoized", _memoized),
        Family("inverted_residual", "padded", _inverted_residuals),
        Family("wide", "rows", _wide),
        Family("planes", "rows", _planes),
        Family("bottleneck", "padded", _bottlenecks),
        Family("bottleneck_warpgroup", "padded", _bottlenecks_by_warpgroups),
    )


def _all_made(makers: Iterable[Callable[[], Kernel]]) -> Iterator[Kernel]:
    """Kernels, without those whose sizes do not fit together; each once."""
    names: set[str] = set()
    for make in makers:
        try:
            kernel = make()
        except ValueError:
            continue
        if kernel.name not in names:
            names.add(kernel.name)
            yield kernel


def _chains(problem: Problem) -> Iterable[Kernel]:
    """Chains of 3×3 (×3) in bricks whose rows with their halo are whole groups of 16."""
    from joulemark.merged.kernels.chain import Plan, chain, unsuited

    if unsuited(problem.description) is not None:
        return ()
    halo, volume = 2 * len(problem.description.sequence.layers), problem.description.sequence.dimensions == 3
    rows = (4, 6, 8, 12) if volume else (8, 12, 16, 24, 32)
    widths = (16, 32, 48) if volume else (16, 32, 48, 64)
    plans = [
        Plan((*((depth,) if volume else ()), min(height, problem.out[-2]), width - halo), warps, blocks)
        for depth, height, width in product(rows if volume else (1,), rows, widths)
        for warps, blocks in ((4, 2), (8, 1), (8, 2), (16, 1))
        if width - halo > 1
    ]
    return _all_made(partial(chain, problem.description, plan) for plan in plans)


def _streams(problem: Problem) -> Iterable[Kernel]:
    """Chains of 3×3 in streamed rows; shorter bricks where whole columns would leave multiprocessors without work."""
    from joulemark.merged.kernels.stream import Plan, stream, unsuited

    if unsuited(problem.description) is not None:
        return ()
    halo = 2 * len(problem.description.sequence.layers)
    heights = dict.fromkeys(min(rows, problem.out[0]) for rows in (16, 32, 64, 128, 256))
    plans = [
        Plan(width, rows, blocks)
        for width, rows, blocks in product((32, 48, 64, 96, 128), heights, (1, 2))
        if halo < width < 2 * problem.out[1] + halo + 16
    ]
    return _all_made(partial(stream, problem.description, plan) for plan in plans)


def _memoized(problem: Problem) -> Iterable[Kernel]:
    """Chains of 3×3 in memoized bricks; a lane is an image, and lanes are what blocks find work in."""
    from joulemark.merged.kernels.memoized import Plan, memoized, unsuited

    if unsuited(problem.description) is not None:
        return ()
    plans = [
        Plan((min(rows, problem.out[0]), columns), warps, blocks, lanes)
        for rows, columns in ((8, 30), (8, 62), (16, 30), (16, 62), (32, 30))
        for warps, blocks in ((8, 2), (8, 1), (4, 4), (16, 1))
        for lanes in (2, 8, 32)
        if lanes <= problem.batch
    ]
    return _all_made(partial(memoized, problem.description, plan) for plan in plans)


def _wide(problem: Problem) -> Iterable[Kernel]:
    """Layers of up to 64 channels in streamed rows by ``wgmma``; short bricks where whole columns are too few."""
    from joulemark.merged.kernels.wide import Plan, unsuited, wide

    if unsuited(problem.description) is not None:
        return ()
    plans = [
        Plan(width, pairs, groups)
        for width, pairs in ((32, 4), (32, 3), (64, 2), (32, 2))
        for groups in dict.fromkeys(min(one, -(-problem.out[0] // pairs)) for one in (4, 14, 28, 64, 128))
    ]
    return _all_made(partial(wide, problem.description, plan) for plan in plans)


def _planes(problem: Problem) -> Iterable[Kernel]:
    """Chains of 3×3×3 whose planes stream from front to back."""
    from joulemark.merged.kernels.planes import Plan, planes, unsuited

    if unsuited(problem.description) is not None:
        return ()
    halo = 2 * len(problem.description.sequence.layers)
    depths = dict.fromkeys(min(one, problem.out[0]) for one in (16, 32, 64, 128))
    plans = [
        Plan((depth, min(height, problem.out[1]), width - halo), warps, blocks)
        for depth, height, width in product(depths, (8, 12, 16, 24), (16, 32, 48))
        for warps, blocks in ((4, 1), (4, 2), (8, 1))
        if width - halo > 1
    ]
    return _all_made(partial(planes, problem.description, plan) for plan in plans)


def _inverted_residuals(problem: Problem) -> Iterable[Kernel]:
    from joulemark.merged.kernels import inverted_residual as module

    return _ranked(problem, module, module.inverted_residual)


def _bottlenecks(problem: Problem) -> Iterable[Kernel]:
    from joulemark.merged.kernels import bottleneck as module

    return _ranked(problem, module, module.bottleneck)


def _bottlenecks_by_warpgroups(problem: Problem) -> Iterable[Kernel]:
    from joulemark.merged.kernels import bottleneck_warpgroup as module

    return _ranked(problem, module, module.bottleneck_warpgroup)


def _ranked(problem: Problem, module: Any, make: Callable[[Description, Any], Kernel]) -> Iterable[Kernel]:
    """The plans that a family's own module ranks best; ranking takes up to half a second and is kept on disk.

    Args:
        module: has ``unsuited``, ``candidates`` and ``Plan``.
        make: its kernel of a plan.
    """
    if module.unsuited(problem.description) is not None:
        return ()
    key = cache.key_of(inspect.getsource(module), problem)
    kept = cache.read("plans", key)
    if kept is None:
        ranked = module.candidates(problem.description, problem.size, problem.batch, problem.device)
        kept = [asdict(one) for one in ranked]
        cache.write("plans", key, kept)
    return _all_made(partial(make, problem.description, module.Plan(**one)) for one in kept)
