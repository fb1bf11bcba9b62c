"""The performance model: what an execution of a sequence moves and computes, and how long that takes on one GPU.

Roofline with corrections, after the usable form of BrickDL's model (Lakshminarasimhan et al., ICPP 2024)::

    T = max(dram / DRAM rate, l2 / L2 rate · idle, flops · recompute / FLOP rate · tail) + launches + flags

- *padded* bricks recompute their halo; *memoized* ones do not, but hand intermediates through the L2 and wait for
  flags, and are refused when the bricks alive at once exceed it; *rows* stream through the first dimension of a
  brick and keep what overlaps there on chip; *unmerged* runs layer by layer.
- ``tail``: the last wave of blocks is seldom full, and few bricks leave multiprocessors without work;
- ``idle``: fewer blocks than multiprocessors do not draw the whole L2 bandwidth.

Where a family's kernels were measured on the same GPU before, its own counts
(:mod:`joulemark.merged.kernels.seconds`) tell the time instead. The rates are of the GPU at hand
(:mod:`joulemark.merged.rates` measures them); nothing is assumed silently: where the
share of them that a family of kernels reaches was not measured, the prediction says that it is a bare roofline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf, prod
from typing import Any, Literal

import numpy as np

from joulemark.merged.partition import inner_positions, positions_needed
from joulemark.merged.sequence import Conv, Sequence, Shape

How = Literal["padded", "memoized", "rows", "unmerged"]
_TILE = 128 * 64
"""Outputs that one block of a library's convolution computes: positions times channels."""
_LIBRARY_BLOCKS = 1
_THREADS = 2048
"""Of a multiprocessor of compute capability 8.0 and 9.0 (CUDA C++ Programming Guide, compute capabilities)."""
_KEPT = 0.5
"""Share of the L2 in which a tensor is still found by the next kernel: the rest holds what is being written."""
_SHARES = tuple(0.02 * 1.12**n for n in range(36))
"""Shares that :func:`fit_reached` tries, from 2 % to just above 1."""


@dataclass(frozen=True)
class Rates:
    """What one GPU does, as measured on it.

    Args:
        gpu: its name.
        multiprocessors: of it.
        dram_bytes_per_s: reads and writes of a large copy.
        l2_bytes_per_s: reads and writes of a copy that stays in the L2.
        l2_bytes: size of the L2.
        shared_bytes: shared memory of a multiprocessor.
        flop_per_s: of a large matrix product, per number format (``bf16``, ``fp16``, ``tf32``, ``fp32``).
        launch_s: from kernel to kernel in a CUDA graph, without work.
        flag_s: from a flag set by one block until another block has seen it.
        reached: family of kernels → the shares of FLOP rate and of bandwidth that its kernels reach.

    Raises:
        ValueError: a rate is not positive and finite, a time is negative: a prediction by it would be of no use.
    """

    gpu: str
    multiprocessors: int
    dram_bytes_per_s: float
    l2_bytes_per_s: float
    l2_bytes: int
    shared_bytes: int
    flop_per_s: Mapping[str, float]
    launch_s: float
    flag_s: float
    reached: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speeds = {"dram_bytes_per_s": self.dram_bytes_per_s, "l2_bytes_per_s": self.l2_bytes_per_s, **self.flop_per_s}
        wrong = {name: value for name, value in speeds.items() if not 0 < value < inf}
        costs = {"launch_s": self.launch_s, "flag_s": self.flag_s}
        wrong |= {name: value for name, value in costs.items() if not 0 <= value < inf}
        if wrong:
            raise ValueError(f"rates of {self.gpu} that no GPU has: {wrong}: measure them again")

    def to_json(self) -> dict[str, Any]:
        """As a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Rates:
        """From :meth:`to_json`.

        Raises:
            TypeError: a field is missing or unknown.
            ValueError: a rate is not positive.
        """
        reached = {family: (float(a), float(b)) for family, (a, b) in given.get("reached", {}).items()}
        return cls(**{**given, "reached": reached})


@dataclass(frozen=True)
class Candidate:
    """A way to execute a sequence.

    Args:
        how: the schedule.
        family: of the kernels, a key of :attr:`Rates.reached`.
        edge: of the bricks; None where a library chooses.
        shared: bytes of shared memory of a block.
        threads: of a block; 0 for a library's.
        blocks: on a multiprocessor at once; None for as many as shared memory and threads admit, one for a library.
        parts: blocks that share a brick.
        images: whose bricks at the same place are one block's.
        live: bytes of intermediates that its rings hold; None where the schedule decides.
        counted_s: time by the family's own counts (:mod:`joulemark.merged.kernels.seconds`), on the GPU that is
            predicted for; None where neither the family nor one that it borrows from was measured on it.
    """

    how: How
    family: str
    edge: Shape | None = None
    shared: int = 0
    threads: int = 0
    blocks: int | None = None
    parts: int = 1
    images: int = 1
    live: int | None = None
    counted_s: float | None = None

    def __str__(self) -> str:
        bricks = "" if self.edge is None else f" {'×'.join(str(e) for e in self.edge)}"
        return f"{self.how} by {self.family}{bricks}"


@dataclass(frozen=True)
class Work:
    """What an execution moves and computes, for all images of a batch.

    Args:
        dram_bytes: read and written.
        l2_bytes: read and written by multiprocessors.
        flops: what is recomputed included.
        recompute: over the FLOPs that are needed; what bricks hang over the border is in it.
        tiles: pieces that blocks can work on at the same time.
        launches: of kernels.
        flags: that blocks wait for.
        live_bytes: intermediates in the L2 at once.
    """

    dram_bytes: float
    l2_bytes: float
    flops: float
    recompute: float
    tiles: int
    launches: int = 1
    flags: int = 0
    live_bytes: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """How long a candidate should take.

    Args:
        candidate: what is predicted.
        work: of it.
        time_s: None where it cannot run.
        bound: ``dram``, ``l2`` or ``flops``, what takes longest; ``counts`` where its family's counts tell.
        why_not: what forbids it.
    """

    candidate: Candidate
    work: Work
    time_s: float | None
    bound: str
    why_not: str | None = None


def work_of(
    sequence: Sequence, size: Shape, batch: int, itemsize: int, candidate: Candidate, rates: Rates, cold: bool = True
) -> Work:
    """What a candidate moves and computes.

    Args:
        size: spatial, of the input.
        itemsize: bytes of an element.
        rates: whose L2 decides what the next kernel still finds there.
        cold: the input is not in the L2 and the output does not stay there.
    """
    counts = [
        batch * prod(one) * sequence.channels(n) * itemsize for n, one in enumerate(sequence.sizes(size))
    ]  # bytes of every tensor
    weights = itemsize * sum(one.weights for one in sequence.layers)
    if candidate.how == "unmerged":
        return _unmerged(sequence, size, batch, counts, weights, rates, cold)
    assert candidate.edge is not None
    ends = counts[0] + counts[-1]
    dram = weights + (ends if cold or ends > _KEPT * rates.l2_bytes else 0)
    if candidate.how == "memoized":
        return _memoized(sequence, size, batch, counts, dram, candidate.edge, itemsize)
    sizes = sequence.sizes(size)
    edge = candidate.edge
    needed = positions_needed(sequence, size, edge)
    bricks = batch * prod(-(-n // e) for n, e in zip(sizes[-1], edge, strict=True))
    # A brick that hangs over the border is computed whole.
    inner = [
        tuple(all_ if e >= n else part for e, n, part, all_ in zip(edge, sizes[-1], shape, one, strict=True))
        for shape, one in zip(inner_positions(sequence, edge), sizes, strict=True)
    ]
    if candidate.how == "padded":
        inner = inner_positions(sequence, edge)
    flops = bricks * sum(one.flops_per_position * prod(n) for one, n in zip(sequence.layers, inner[1:], strict=True))
    again = sum(counts[other] for one in sequence.layers for other in one.also_reads if other == 0)
    l2 = batch * needed[0] * sequence.channels(0) * itemsize + counts[-1] + again
    taken = bricks // batch * ceil(batch / candidate.images)  # by blocks, or by as many as share one
    l2 += weights * min(taken, rates.multiprocessors)
    plain = batch * sequence.flops(size)
    return Work(dram, l2, flops, flops / plain, taken * candidate.parts)


def _unmerged(
    sequence: Sequence, size: Shape, batch: int, counts: List[int], weights: int, rates: Rates, cold: bool
) -> Work:
    """Each tensor is written by one kernel and read by the next; a small one is still in the L2."""
    dram: float = weights
    l2: float = weights
    for number, layer in enumerate(sequence.layers):
        read = [counts[number], *(counts[other] for other in layer.also_reads)]
        l2 += sum(read) + counts[number + 1]
        inner = number + 1 < len(sequence.layers)
        dram += sum(one for one in read if (number == 0 and cold) or one > _KEPT * rates.l2_bytes)
        if (cold and not inner) or counts[number + 1] > _KEPT * rates.l2_bytes:
            dram += counts[number + 1]
    flops = batch * sequence.flops(size)
    last = sequence.sizes(size)[1:]
    tiles = min(
        ceil(batch * prod(one) * sequence.channels(n + 1) / _TILE) for n, one in enumerate(last)
    )  # of the layer with fewest
    return Work(dram, l2, flops, 1.0, tiles, launches=len(sequence.layers))


def _memoized(
    sequence: Sequence,
    size: Shape,
    batch: int,
    counts: List[int],
    dram: float,
    edge: Shape,
    itemsize: int,
) -> Work:
    """Each brick of an intermediate goes to the L2 and back, halo and all; nothing is computed twice."""
    sizes = sequence.sizes(size)
    l2: float = counts[-1]
    live = 0.0
    bricks = [prod(-(-n // e) for n, e in zip(one, edge, strict=True)) for one in sizes]
    flags = 0
    for number, layer in enumerate(sequence.layers):
        alone = Sequence((replace(layer, residual=None, joined=None, adds_behind=False),))
        read = positions_needed(alone, sizes[number], edge)[0]
        channels = sequence.channels(number)
        l2 += batch * read * channels * itemsize + sum(counts[other] for other in layer.also_reads)
        if number > 0:
            l2 += counts[number]
            rows = min(edge[0] + layer.extent[0], sizes[number][0])
            live += rows * prod(sizes[number][1:]) * channels * itemsize
            flags += batch * round(bricks[number + 1] * read / max(prod(sizes[number]), 1))
    return Work(
        dram, l2, batch * sequence.flops(size), 1.0, batch * max(bricks[1:]), flags=flags, live_bytes=live * batch
    )


def predict(
    sequence: Sequence,
    size: Shape,
    batch: int,
    form: str,
    candidate: Candidate,
    rates: Rates,
    cold: bool = True,
) -> Prediction:
    """The time of a candidate.

    Args:
        form: number format, a key of ``rates.flop_per_s``.
        cold: see :func:`work_of`.

    Raises:
        KeyError: the rates lack the format.
    """
    work = work_of(sequence, size, batch, 4 if form in ("fp32", "tf32") else 2, candidate, rates, cold)
    why = _forbidden(work, candidate, rates)
    if why is not None:
        return Prediction(candidate, work, None, "", why)
    if candidate.counted_s is not None:
        return Prediction(candidate, work, candidate.counted_s, "counts")
    shares = rates.reached.get(candidate.family, (1.0, 1.0))
    parts, more = _parts(work, candidate, rates.flop_per_s[form], rates, shares)
    bound = max(parts, key=parts.__getitem__)
    return Prediction(candidate, work, parts[bound] + more, bound)


def _forbidden(work: Work, candidate: Candidate, rates: Rates) -> str | None:
    if candidate.shared > rates.shared_bytes:
        return f"a block takes {candidate.shared} B of shared memory, a multiprocessor has {rates.shared_bytes} B"
    alive = candidate.live
    if alive is None:
        alive = round(work.live_bytes * min(1.0, _slots(candidate, rates) / max(work.tiles, 1)))
    if alive > rates.l2_bytes:
        return f"{alive:.3g} B of bricks are alive at once, the L2 holds {rates.l2_bytes} B"
    return None


def _slots(candidate: Candidate, rates: Rates) -> int:
    """Blocks that run at the same time."""
    blocks = candidate.blocks
    if blocks is None:
        by_memory = rates.shared_bytes // candidate.shared if candidate.shared else _LIBRARY_BLOCKS
        by_threads = _THREADS // candidate.threads if candidate.threads else by_memory
        blocks = max(1, min(by_memory, by_threads))
    return rates.multiprocessors * blocks


def _parts(
    work: Work, candidate: Candidate, peak: float, rates: Rates, shares: tuple[float, float]
) -> tuple[dict[str, float], float]:
    """Seconds by what may bound them, and what comes on top."""
    slots = _slots(candidate, rates)
    waves = work.tiles / slots
    tail = ceil(waves) / waves
    idle = max(1.0, rates.multiprocessors / work.tiles)
    parts = {
        "dram": work.dram_bytes / (rates.dram_bytes_per_s * shares[1]),
        "l2": work.l2_bytes / (rates.l2_bytes_per_s * shares[1]) * idle,
        "flops": work.flops / (peak * shares[0]) * tail,
    }
    return parts, work.launches * rates.launch_s + work.flags * rates.flag_s / slots


@dataclass(frozen=True)
class Point:
    """A measured execution, to fit and to judge the model by.

    Args:
        sequence, size, batch, form, candidate, cold: see :func:`predict`.
        time_s: measured.
    """

    sequence: Sequence
    size: Shape
    batch: int
    form: str
    candidate: Candidate
    time_s: float
    cold: bool = True


def fit_reached(points: Iterable[Point], rates: Rates) -> dict[str, tuple[float, float]]:
    """Per family the shares of FLOP rate and bandwidth that explain its points best (least squares of log ratios)."""
    families: dict[str, list[Point]] = {}
    for one in points:
        families.setdefault(one.candidate.family, []).append(one)
    return {family: _fit(members, rates) for family, members in families.items()}


def _fit(points: List[Point], rates: Rates) -> tuple[float, float]:
    shares = np.array(_SHARES)
    # Among equals the larger share: what never bounds is not said to be slow.
    total = -1e-9 * (shares[:, None] + shares[None, :])
    for p in points:
        itemsize = 4 if p.form in ("fp32", "tf32") else 2
        work = work_of(p.sequence, p.size, p.batch, itemsize, p.candidate, rates, p.cold)
        parts, more = _parts(work, p.candidate, rates.flop_per_s[p.form], rates, (1.0, 1.0))
        by_flops, by_bytes = parts["flops"] / shares[:, None], max(parts["dram"], parts["l2"]) / shares[None, :]
        total = total + np.log((np.maximum(by_flops, by_bytes) + more) / p.time_s) ** 2
    best = divmod(int(np.argmin(total)), len(shares))
    return float(shares[best[0]]), float(shares[best[1]])


def kind_of(layer: Conv) -> str:
    """What a library's speed on a layer depends on: ``pointwise``, ``depthwise``, ``grouped`` or ``dense``; a norm."""
    if layer.norm is not None:
        return f"{kind_of(replace(layer, norm=None))} and norm"
    if layer.groups == layer.in_channels > 1:
        return "depthwise"
    if layer.groups > 1:
        return "grouped"
    return "pointwise" if prod(layer.kernel) == 1 else "dense"
