"""Exact arithmetic on intervals and step functions of integer time (pure)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulemark.trace.events import Codes, Ints


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals [start, end) in ascending order; the time unit is the caller's."""

    start: Ints
    end: Ints

    def __len__(self) -> int:
        return int(self.start.size)

    @property
    def length(self) -> int:
        """Sum of the lengths."""
        return int((self.end - self.start).sum())

    def before(self, time: Ints) -> Ints:
        """Covered time before each ``time``: the measure's cumulative function."""
        if len(self) == 0:
            return np.zeros(time.shape, np.int64)
        total = np.concatenate([[0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, time, "right")
        last = np.maximum(index - 1, 0)
        inside = np.where(index > 0, np.minimum(time, self.end[last]) - self.start[last], 0)
        return np.where(index > 0, total[last] + inside, 0).astype(np.int64)

    def within(self, start: Ints, end: Ints) -> Ints:
        """Covered time in each [start, end)."""
        return np.asarray(self.before(end) - self.before(start), np.int64)


def distinct(*times: Ints) -> Ints:
    """All different times in ascending order (by sorting, which is faster here than the hashing of ``np.unique``)."""
    time = np.sort(np.concatenate([np.empty(0, np.int64), *times]))
    first = np.ones(time.size, np.bool_)
    first[1:] = time[1:] != time[:-1]
    return np.asarray(time[first], np.int64)


def union(start: Ints, end: Ints) -> Intervals:
    """The union of intervals; touching ones are joined, empty ones vanish."""
    keep = end > start
    start, end = start[keep], end[keep]
    if start.size == 0:
        return Intervals(start, end)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [start.size - 1]])
    return Intervals(start[first], reach[last])


@dataclass(frozen=True)
class Steps:
    """A step function: ``values[i]`` on [edges[i], edges[i + 1]), ``outside`` before the first edge."""

    edges: Ints
    values: Codes
    outside: int

    def at(self, time: Ints) -> Codes:
        """The value at each time."""
        if self.edges.size == 0:
            return np.full(time.shape, self.outside, np.int32)
        index = np.searchsorted(self.edges, time, "right") - 1
        return np.where(index < 0, self.outside, self.values[np.maximum(index, 0)]).astype(np.int32)


def innermost(start: Ints, end: Ints, outside: int = -1) -> Steps:
    """Which of properly nested intervals is the innermost at each time.

    Args:
        start, end: sorted by start, an outer interval before an inner one that begins with it; empty ones are ignored.
        outside: value where there is none.

    Returns:
        A step function whose values are row numbers. Where intervals overlap without nesting (rounded times), the
        overhang is given to the outer one.
    """
    rows = np.flatnonzero(end > start)
    n = rows.size
    time = np.concatenate([end[rows], start[rows]])
    row = np.concatenate([np.full(n, -1), rows])
    order = np.lexsort((np.concatenate([np.zeros(n, np.int8), np.ones(n, np.int8)]), time))
    time, row = time[order], row[order]
    depth = np.cumsum(np.where(row >= 0, 1, -1))
    # At depth d the innermost interval is the last one that was opened at depth d: fill forward within each depth.
    by_depth = np.lexsort((np.arange(2 * n), depth))
    opened = np.where(row[by_depth] >= 0, np.arange(2 * n), 0)
    filled = row[by_depth][np.maximum.accumulate(opened)]
    owner = np.empty(2 * n, np.int64)
    owner[by_depth] = filled
    owner[depth <= 0] = outside
    return _last_at_each_time(time, owner, outside)


def _last_at_each_time(time: Ints, value: Ints, outside: int) -> Steps:
    """Steps from values in the order of time, of which the last one at a time counts."""
    last = np.concatenate([time[1:] != time[:-1], [True]]) if time.size else np.empty(0, np.bool_)
    time, code = time[last], value[last].astype(np.int32)
    changes = np.concatenate([[True], code[1:] != code[:-1]]) if time.size else np.empty(0, np.bool_)
    return Steps(time[changes], code[changes], outside)


def split(start: Ints, end: Ints, edges: Ints) -> tuple[Ints, Ints, npt.NDArray[np.intp]]:
    """Cuts intervals at the edges strictly inside them.

    Args:
        start, end: intervals, empty ones vanish.
        edges: ascending.

    Returns:
        Starts and ends of the pieces, and the row of the interval that each comes from.
    """
    rows = np.flatnonzero(end > start)
    start, end = start[rows], end[rows]
    first = np.searchsorted(edges, start, "right")
    count = np.searchsorted(edges, end, "left") - first
    parent = np.repeat(np.arange(rows.size), count + 1)
    offset = np.concatenate([[0], np.cumsum(count + 1)])
    within = np.arange(parent.size) - offset[parent]
    cut = first[parent] + within
    safe = edges if edges.size else np.zeros(1, np.int64)
    piece_start = np.where(within == 0, start[parent], safe[np.clip(cut - 1, 0, safe.size - 1)])
    piece_end = np.where(within == count[parent], end[parent], safe[np.clip(cut, 0, safe.size - 1)])
    return piece_start, piece_end, rows[parent]


def overlay(layers: list[Steps], rank: npt.NDArray[np.int64], outside: int) -> Steps:
    """At each time the value that ranks highest among several step functions.

    Args:
        layers: step functions with values 0 … len(rank) - 1.
        rank: per value; higher wins.
        outside: the value where no layer has another.
    """
    if len(layers) == 1:
        return layers[0]
    edges = distinct(*(layer.edges for layer in layers))
    best = np.full(edges.size, outside, np.int32)
    for layer in layers:
        value = layer.at(edges)
        best = np.where(rank[value] > rank[best], value, best).astype(np.int32)
    return Steps(edges, best, outside)
