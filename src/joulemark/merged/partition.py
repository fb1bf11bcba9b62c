"""Bricks of a sequence: which part of every tensor a brick of the output needs, and in which order bricks can be made.

Source: Lakshminarasimhan et al., BrickDL (ICPP 2024): *padded* bricks recompute their halo, *memoized* bricks are
computed once and kept until their last consumer has read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from joulemark.merged.sequence import Conv, Sequence, Shape


@dataclass(frozen=True)
class Box:
    """A half-open box of positions of one tensor.

    Args:
        low: first position per dimension.
        high: behind the last position per dimension.
    """

    low: Shape
    high: Shape

    @property
    def size(self) -> Shape:
        """Positions per dimension."""
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    @property
    def positions(self) -> int:
        """Number of positions."""
        return prod(self.size)

    def clipped(self, size: Shape) -> Box:
        """The part inside a tensor of spatial ``size``; one position at its edge where there is none."""
        low = tuple(min(max(a, 0), n - 1) for a, n in zip(self.low, size, strict=True))
        high = tuple(max(min(b, n), a + 1) for a, b, n in zip(low, self.high, size, strict=True))
        return Box(low, high)

    def hull(self, other: Box | None) -> Box:
        """The smallest box around both."""
        if other is None:
            return self
        return Box(
            tuple(min(pair) for pair in zip(self.low, other.low, strict=True)),
            tuple(max(pair) for pair in zip(self.high, other.high, strict=True)),
        )


def reach(layer: Conv, box: Box) -> Box:
    """The input positions that a box of a convolution's output reads, those in the zero padding included."""
    per_dimension = zip(box.low, box.high, layer.stride, layer.padding, layer.extent, strict=True)
    ends = [(a * s - p, (b - 1) * s - p + e) for a, b, s, p, e in per_dimension]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def bricks_of(size: Shape, edge: Shape) -> Iterator[Box]:
    """Bricks of ``edge`` that tile a tensor in row-major order; those at its far ends are cut."""
    for low in product(*(range(0, n, e) for n, e in zip(size, edge, strict=True))):
        yield Box(low, tuple(min(a + e, n) for a, e, n in zip(low, edge, size, strict=True)))


def regions(sequence: Sequence, sizes: list[Shape], brick: Box) -> list[Box]:
    """Per tensor, the box that one brick of the last tensor needs: the halo grows towards the input.

    Args:
        sizes: of :meth:`Sequence.sizes`.
        brick: of the last tensor.
    """
    needed: list[Box | None] = [None] * len(sizes)
    needed[-1] = brick
    for number in reversed(range(len(sequence.layers))):
        layer, box = sequence.layers[number], needed[number + 1]
        assert box is not None
        needed[number] = reach(layer, box).clipped(sizes[number]).hull(needed[number])
        for other in layer.also_reads:
            needed[other] = box.hull(needed[other])
    return [one for one in needed if one is not None]


def positions_needed(sequence: Sequence, size: Shape, edge: Shape) -> list[int]:
    """Per tensor, the positions that all padded bricks of one image need together, what overlaps counted each time.

    A brick's boxes grow in each dimension alone, so the sum over bricks is a product over dimensions of sums.

    Args:
        size: spatial, of the input.
        edge: of the output's bricks.
    """
    lines = [
        _line_positions(Sequence(tuple(_along(one, d) for one in sequence.layers)), size[d], edge[d])
        for d in range(sequence.dimensions)
    ]
    return [prod(one) for one in zip(*lines, strict=True)]


@lru_cache(maxsize=4096)
def _line_positions(line: Sequence, length: int, edge: int) -> tuple[int, ...]:
    """:func:`positions_needed` in one dimension."""
    lengths = list(line.sizes((length,)))
    parts = [regions(line, lengths, brick) for brick in bricks_of(lengths[-1], (edge,))]
    return tuple(sum(boxes[n].positions for boxes in parts) for n in range(len(lengths)))


def inner_positions(sequence: Sequence, edge: Shape) -> list[Shape]:
    """Per tensor, the positions per dimension that a brick far from all borders needs."""
    box = Box((0,) * sequence.dimensions, edge)
    needed: list[Box | None] = [None] * len(sequence.layers) + [box]
    for number in reversed(range(len(sequence.layers))):
        layer, target = sequence.layers[number], needed[number + 1]
        assert target is not None
        needed[number] = reach(layer, target).hull(needed[number])
        for other in layer.also_reads:
            needed[other] = target.hull(needed[other])
    return [one.size for one in needed if one is not None]


def _along(layer: Conv, d: int) -> Conv:
    """A layer in one of its dimensions."""
    return replace(
        layer,
        in_channels=1,
        out_channels=1,
        groups=1,
        kernel=(layer.kernel[d],),
        stride=(layer.stride[d],),
        padding=(layer.padding[d],),
        dilation=(layer.dilation[d],),
        residual=layer.residual if layer.joined is None else layer.joined,  # channels do not matter here, places do
        joined=None,
        adds_behind=False,
    )


def recompute_factor(sequence: Sequence, size: Shape, edge: Shape) -> float:
    """FLOPs of padded bricks over FLOPs without recomputation; 1 for a single layer.

    Far from the borders, with L layers of 3^d taps and bricks of edge B, it is Σ_{l=1..L} (B + 2(L−l))^d / (L·B^d).
    """
    needed = positions_needed(sequence, size, edge)[1:]
    spent = sum(one.flops_per_position * positions for one, positions in zip(sequence.layers, needed, strict=True))
    return spent / sequence.flops(size)


@dataclass(frozen=True)
class Task:
    """One brick of one intermediate, computed once.

    Args:
        tensor: number of the tensor that it is part of, from 1.
        brick: its number among the bricks of that tensor, row-major.
        box: its positions.
        needs: numbers of the tasks whose bricks it reads.
    """

    tensor: int
    brick: int
    box: Box
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Memoized bricks in an order in which each comes after all that it needs.

    Workers that take tasks by a counter in this order cannot wait for each other in a circle: whatever a task waits
    for has a smaller number, so it was taken before, and of the tasks taken the one with the smallest number waits
    for none that is not done.

    Args:
        tasks: in order; ``needs`` holds positions in it.
    """

    tasks: tuple[Task, ...]

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """Per task the number of the last task that reads its brick; its own where none does."""
        last = list(range(len(self.tasks)))
        for number, task in enumerate(self.tasks):
            for need in task.needs:
                last[need] = number
        return tuple(last)

    def live_bytes(self, channels: list[int], itemsize: int) -> int:
        """Most bytes of intermediate bricks alive at once when tasks run one by one; the last tensor is not kept.

        Args:
            channels: per tensor.
            itemsize: bytes of one element.
        """
        final = max(task.tensor for task in self.tasks)
        ends: dict[int, int] = {}
        alive = most = 0
        for number, task in enumerate(self.tasks):
            if task.tensor != final:
                size = task.box.positions * channels[task.tensor] * itemsize
                alive += size
                ends[self.last_use[number]] = ends.get(self.last_use[number], 0) + size
            most = max(most, alive)
            alive -= ends.pop(number, 0)
        return most


def schedule(sequence: Sequence, size: Shape, edge: Shape) -> Schedule:
    """Memoized bricks of one image: each brick of the output pulls in what it lacks, depth first.

    Args:
        size: spatial, of the input.
        edge: of the bricks of every tensor, per dimension.
    """
    sizes = list(sequence.sizes(size))
    grids = [tuple(-(-n // e) for n, e in zip(one, edge, strict=True)) for one in sizes]
    done: dict[tuple[int, Shape], int] = {}
    tasks: list[Task] = []

    def make(tensor: int, cell: Shape) -> int:
        known = done.get((tensor, cell))
        if known is not None:
            return known
        low = tuple(c * e for c, e in zip(cell, edge, strict=True))
        box = Box(low, tuple(min(a + e, n) for a, e, n in zip(low, edge, sizes[tensor], strict=True)))
        needs = tuple(make(source, other) for source, other in _sources(sequence, sizes, edge, tensor, box))
        number = 0
        for position, cells in zip(cell, grids[tensor], strict=True):
            number = number * cells + position
        tasks.append(Task(tensor, number, box, needs))
        done[tensor, cell] = len(tasks) - 1
        return len(tasks) - 1

    for cell in product(*(range(n) for n in grids[-1])):
        make(len(sizes) - 1, cell)
    return Schedule(tuple(tasks))


def _sources(sequence: Sequence, sizes: list[Shape], edge: Shape, tensor: int, box: Box) -> list[tuple[int, Shape]]:
    """Tensor and cell of every intermediate brick that a box reads; the input is always there."""
    layer = sequence.layers[tensor - 1]
    read = [(tensor - 1, reach(layer, box).clipped(sizes[tensor - 1]))]
    read += [(other, box) for other in layer.also_reads]
    out: dict[tuple[int, Shape], None] = {}
    for source, part in read:
        if source > 0:
            ranges = (range(a // e, -(-b // e)) for a, b, e in zip(part.low, part.high, edge, strict=True))
            out.update(dict.fromkeys((source, cell) for cell in product(*ranges)))
    return list(out)
