"""Which families of kernels there are, and what of them can execute a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product

from joulemark.merged.cost import Candidate, How
from joulemark.merged.kernels import Description, Kernel, KernelError
from joulemark.merged.sequence import Shape


@dataclass(frozen=True)
class Family:
    """Kernels of one kind.

    Args:
        name: unique.
        how: their schedule.
        kernels: those of the family that execute a description at a spatial size, in several bricks; none where it is
            not made for it.
    """

    name: str
    how: How
    kernels: Callable[[Description, Shape], Iterable[Kernel]]


@dataclass(frozen=True)
class Offer:
    """A kernel of a family for one description.

    Args:
        candidate: what the performance model needs of it.
        kernel: to run.
    """

    candidate: Candidate
    kernel: Kernel

    @property
    def path(self) -> str:
        """What identifies it among all offers for its description."""
        edge = "x".join(str(one) for one in self.kernel.edge)
        return f"{self.candidate.family}/{self.kernel.name}/{edge}"


def offers(families: Iterable[Family], description: Description, size: Shape) -> list[Offer]:
    """All kernels that execute a description at a spatial size."""
    found = []
    for family in families:
        try:
            kernels = list(family.kernels(description, size))
        except (KernelError, ValueError):
            continue
        for kernel in kernels:
            candidate = Candidate(family.how, family.name, kernel.edge, kernel.shared, kernel.block, kernel.persistent)
            found.append(Offer(candidate, kernel))
    return found


def known_families() -> tuple[Family, ...]:
    """The families that this version has."""
    return (Family("chain", "padded", _chains), Family("inverted_residual", "padded", _inverted_residuals))


def _made(make: Callable[[], Kernel]) -> Iterable[Kernel]:
    """A kernel, or nothing where its sizes do not fit together."""
    try:
        yield make()
    except ValueError:
        return


def _chains(description: Description, size: Shape) -> Iterable[Kernel]:
    """Chains of 3×3 (×3): bricks whose rows with their halo are whole groups of 16."""
    from joulemark.merged.kernels.chain import Plan, chain, unsuited

    if unsuited(description) is not None:
        return
    halo = 2 * len(description.sequence.layers)
    volume = description.sequence.dimensions == 3
    for rows, width in product((4, 8) if volume else (8, 12, 16, 24, 32), (16, 32) if volume else (16, 32, 48, 64)):
        edge = (*((rows,) if volume else ()), min(rows, size[-2]), width - halo)
        for warps, blocks in ((4, 2), (8, 1), (8, 2), (16, 1)):
            if edge[-1] > 1:
                yield from _made(partial(chain, description, Plan(edge, warps, blocks)))


def _inverted_residuals(description: Description, size: Shape) -> Iterable[Kernel]:
    from joulemark.merged.kernels.inverted_residual import Sizes, inverted_residual, unsupported

    if unsupported(description) is not None:
        return
    out = description.sequence.sizes(size)[-1]
    for height, width, narrow in product((4, 8, 16), (14, 28, 30, 56), (False, True)):
        if width >= 2 * out[1] or height >= 2 * out[0] + 4:
            continue
        for tiles, groups, buffers, resident in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2)):
            sizes = Sizes(height, width, tiles, groups, buffers, resident, narrow)
            if 4 <= sizes.warps * groups <= 16:
                yield from _made(partial(inverted_residual, description, sizes))
