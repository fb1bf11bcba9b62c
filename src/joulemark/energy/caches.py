"""Where the caches of a GPU end, from the latency of a pointer chase over footprints (pure).

The ends are measured since they are not the datasheet's: the L1 shares its memory with shared memory, and the part of
the L2 that one SM reaches at one latency is smaller than the whole. Source: Saavedra and Smith, *Measuring Cache and
TLB Performance and Their Effect on Benchmark Run Times*, IEEE ToC 44 (1995).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from joulemark.errors import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from joulemark.records import Json

LINE_BYTES = 128
_KIB, _MIB = 1 << 10, 1 << 20
_RISE = 1.3
_ON_PLATEAU = 1.1


@dataclass(frozen=True)
class CacheEnd:
    """Where a level ends.

    Args:
        fits_bytes: largest footprint that was still at the level's own latency.
        beyond_bytes: smallest one that was nearer to the next level's.
        latency_cycles: median over the level.
    """

    fits_bytes: int
    beyond_bytes: int
    latency_cycles: float


@dataclass(frozen=True)
class Caches:
    """The levels of a GPU as a pointer chase sees them.

    Args:
        l1, l2: their ends.
        hbm_latency_cycles: beyond the L2.
        curve: (footprint in bytes, latency in cycles) as measured.
    """

    l1: CacheEnd
    l2: CacheEnd
    hbm_latency_cycles: float
    curve: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Caches:
        curve = tuple((int(size), float(latency)) for size, latency in data["curve"])
        return cls(CacheEnd(**data["l1"]), CacheEnd(**data["l2"]), float(data["hbm_latency_cycles"]), curve)


def chase_sizes(l2_bytes: int) -> list[int]:
    """Footprints to chase through: eight per octave around the L1's and the L2's end, three elsewhere.

    Args:
        l2_bytes: what the driver says that the L2 has; the largest footprint is three times that.
    """
    top = max(3 * l2_bytes, 64 * _MIB)
    sizes, size = [], 16.0 * _KIB
    while size <= top:
        sizes.append(int(size) // LINE_BYTES * LINE_BYTES)
        near = 64 * _KIB <= size <= 512 * _KIB or l2_bytes / 3 <= size <= 1.5 * l2_bytes
        size *= 2 ** (1 / 8 if near else 1 / 3)
    return sizes


def chase_ring(size: int, seed: int = 0) -> NDArray[np.uint32]:
    """One cycle through all lines of a footprint, in random order.

    Args:
        size: in bytes, a multiple of :data:`LINE_BYTES`.
        seed: of the order.

    Returns:
        Words, shape [size / 4]: the first word of each line holds the byte offset of the next line.
    """
    lines = size // LINE_BYTES
    order = np.random.default_rng(seed).permutation(lines).astype(np.int64)
    words = np.zeros(size // 4, dtype=np.uint32)
    words[order * (LINE_BYTES // 4)] = np.roll(order, -1) * LINE_BYTES
    return words


def find_caches(sizes: Sequence[int], latencies: Sequence[float]) -> Caches:
    """The ends of L1 and L2 in a latency curve.

    Three plateaus are fitted to the logarithm of latency, least absolute deviation; a plateau ends at the last
    footprint whose latency is within a tenth of it.

    Args:
        sizes: footprints in bytes, ascending, at least eight.
        latencies: cycles per step.

    Raises:
        MeasurementError: the curve has no two rises of 30 %: it ended too early, or the clock was not steady.
    """
    if len(sizes) != len(latencies) or len(sizes) < 8:
        raise MeasurementError(f"cache ends need a curve of 8 points or more, got {len(sizes)} and {len(latencies)}")
    values = np.asarray(latencies, dtype=float)
    if not (np.isfinite(values).all() and (values > 0).all() and (np.diff(np.asarray(sizes)) > 0).all()):
        raise MeasurementError("cache ends need positive latencies over ascending footprints")
    first, second = _two_cuts(np.log(values))
    plateaus = [float(np.median(part)) for part in np.split(values, (first, second))]
    for name, low, high in zip(("L1", "L2"), plateaus, plateaus[1:], strict=False):
        if high < _RISE * low:
            raise MeasurementError(
                f"no end of the {name} in the latency curve: {low:.0f} to {high:.0f} cycles over "
                f"{sizes[0]} to {sizes[-1]} B",
                "chase through larger footprints on an idle GPU",
            )
    ends = [
        _end(sizes, values, stop, low, high)
        for stop, low, high in ((first, plateaus[0], plateaus[1]), (second, plateaus[1], plateaus[2]))
    ]
    curve = tuple(zip(map(int, sizes), map(float, latencies), strict=True))
    return Caches(ends[0], ends[1], plateaus[2], curve)


def _end(sizes: Sequence[int], values: NDArray[np.float64], stop: int, low: float, high: float) -> CacheEnd:
    inside = [i for i in range(len(sizes)) if values[i] <= _ON_PLATEAU * low and i <= stop]
    beyond = next(i for i in range(stop, len(sizes)) if values[i] > np.sqrt(low * high) or i == len(sizes) - 1)
    return CacheEnd(int(sizes[max(inside)]), int(sizes[beyond]), low)


def _two_cuts(logs: NDArray[np.float64]) -> tuple[int, int]:
    """The two cuts that leave the least absolute deviation from three medians; each part has two points or more."""
    n = len(logs)
    cost = np.full((n + 1, n + 1), np.inf)
    for a in range(n):
        for b in range(a + 2, n + 1):
            cost[a, b] = np.abs(logs[a:b] - np.median(logs[a:b])).sum()
    _, first, second = min(
        (cost[0, i] + cost[i, j] + cost[j, n], i, j) for i in range(2, n - 3) for j in range(i + 2, n - 1)
    )
    return first, second
