"""Which of many kernels are tested: those that prove most, or every one with ``JOULEMARK_EVERY_KERNEL=1``.

Each kernel costs a compiler one to four seconds. What is always tested holds every family, every format and every
way that blocks follow one another; the rest are more shapes of the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeVar

import pytest

A, B = TypeVar("A"), TypeVar("B")
EVERY = os.environ.get("JOULEMARK_EVERY_KERNEL") == "1"
rare = pytest.mark.skipif(not EVERY, reason="one more shape of what others test: JOULEMARK_EVERY_KERNEL=1")


def first(count: int, cases: Iterable[A]) -> list[A]:
    """The first cases, or all."""
    return list(cases) if EVERY else list(cases)[:count]


def crossed(left: Sequence[A], right: Sequence[B]) -> list[tuple[A, B]]:
    """Every case of the left beside the first of the right and the other way round, or all pairs."""
    if EVERY:
        return list(product(left, right))
    return [(one, right[0]) for one in left] + [(left[0], one) for one in right[1:]]
