"""Which families of kernels there are, and what of them can execute a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
            candidate = Candidate(family.how, family.name, kernel.edge, kernel.shared, kernel.persistent)
            found.append(Offer(candidate, kernel))
    return found


def known_families() -> tuple[Family, ...]:
    """The families that this version has."""
    return ()
