"""Many plans at once: each of their sizes is a column of numbers, so that numpy works out what follows from them.

A plan, and the geometry that follows from it, is arithmetic on a few numbers. Where a plan's sizes are columns, the
same lines tell of as many plans as a column has rows; ``larger``, ``smaller`` and ``where`` say of both what Python's
own words say of single numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from functools import reduce
from itertools import islice, product
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, Any]
"""Names of sizes → a number or truth of each plan; all of one length, up to ``BLOCK``."""
N = TypeVar("N")
BLOCK = 500
"""Most rows at a time: above, numpy gives up the interpreter's lock for each operation, and beside threads that compile
it comes back late. 600 operations beside 4 busy threads took 1.3 ms on 500 rows, 222 ms on 501."""


def larger(first: N, *others: N) -> N:
    """The largest of numbers, row by row where some are columns."""
    return reduce(lambda a, b: _of_both(np.maximum, max, a, b), others, first)


def smaller(first: N, *others: N) -> N:
    """The smallest of numbers, row by row where some are columns."""
    return reduce(lambda a, b: _of_both(np.minimum, min, a, b), others, first)


def _of_both(of_columns: Callable[..., Any], of_numbers: Callable[..., Any], a: Any, b: Any) -> Any:
    return (of_columns if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else of_numbers)(a, b)


def where(which: Any, yes: N, no: N) -> N:
    """``yes if which else no``, row by row where ``which`` is a column."""
    if isinstance(which, np.ndarray):
        return cast(N, np.where(which, cast(Any, yes), cast(Any, no)))
    return yes if which else no


def combined(**axes: Iterable[int]) -> Iterator[Columns]:
    """Every combination of sizes, the last of which varies fastest, in blocks."""
    ways = product(*axes.values())
    while block := list(islice(ways, BLOCK)):
        yield {name: np.array(column) for name, column in zip(axes, zip(*block, strict=True), strict=True)}


def crossed(blocks: Iterable[Columns], **axes: Iterable[int]) -> Iterator[Columns]:
    """Each row with every combination of further sizes, of which there are from 1 to ``BLOCK``."""
    (further,) = combined(**axes)
    count = length(further)
    for rows in blocks:
        for begin in range(0, length(rows), BLOCK // count):
            numbers = np.arange(begin * count, min(begin + BLOCK // count, length(rows)) * count)
            yield {**rows_of(rows, numbers // count), **rows_of(further, numbers % count)}


def kept(blocks: Iterable[Columns], which: Callable[[Columns], Any]) -> Iterator[Columns]:
    """The rows of which ``which`` is true, gathered into fewer blocks."""
    gathered: list[Columns] = []
    for rows in blocks:
        chosen = rows_of(rows, which(rows))
        if sum(map(length, gathered)) + length(chosen) > BLOCK:
            yield _joined(gathered)
            gathered = []
        gathered += [chosen] if length(chosen) else []
    if gathered:
        yield _joined(gathered)


def _joined(blocks: List[Columns]) -> Columns:
    return {name: np.concatenate([one[name] for one in blocks]) for name in blocks[0]}


def length(rows: Columns) -> int:
    """How many rows there are."""
    return len(next(iter(rows.values())))


def rows_of(rows: Columns, which: NDArray[Any]) -> Columns:
    """Some rows: those of a column of truths, or of numbers."""
    return {name: column[which] for name, column in rows.items()}


def row(rows: Columns, number: int) -> dict[str, Any]:
    """The sizes of one plan, Python's own numbers and truths."""
    return {name: column[number].item() for name, column in rows.items()}


def each(values: Any, rows: Columns) -> list[Any]:
    """A number for each row, of a column or of what is the same for all."""
    return np.broadcast_to(values, length(rows)).tolist()  # type: ignore[no-any-return]
