"""Activity of data in memory from their bits (pure).

A wire spends energy where two words in a row differ. Random words differ in half of their bits, equal ones in none: the
share of bits that differ, over a half, is the activity. Of the calibration's own normal values it says 0.70 in bf16 and
0.85 in FP32, where an H200's HBM showed 0.70 and 0.85.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from joulemark.energy.microbench.operands import operand_block

if TYPE_CHECKING:
    from collections.abc import Mapping

    from joulemark.energy.microbench.suite import Operands

_SECTOR_BYTES = 32


def toggling(data: Any) -> float:
    """Share of bits in which neighbouring sectors (32 B) of memory differ, over that of random bits.

    Args:
        data: array of any type and shape, contiguous in memory.

    Raises:
        ValueError: it holds fewer than two sectors.
    """
    whole = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    sectors = whole[: len(whole) // _SECTOR_BYTES * _SECTOR_BYTES].reshape(-1, _SECTOR_BYTES)
    if len(sectors) < 2:
        raise ValueError(f"{whole.nbytes} bytes hold no two sectors of {_SECTOR_BYTES} bytes")
    return 2 * float(np.unpackbits(sectors[1:] ^ sectors[:-1]).mean())


@lru_cache
def of_operands(kind: Operands) -> float:
    """Of the calibration's operands in memory."""
    return toggling(operand_block("word", kind))


def activity(bits: float, measured: Mapping[str, float]) -> float:
    """Activity in a level of memory of data with a toggling, by what that level showed of others.

    Args:
        bits: of the data, see :func:`toggling`; above 1 nothing was measured, and that of random bits is taken.
        measured: kind of operands (``normal``, ``normal_fp32``) → activity that the level showed.
    """
    kinds: tuple[Operands, ...] = ("normal", "normal_fp32")
    points = sorted((of_operands(kind), measured[kind]) for kind in kinds if kind in measured)
    at, shown = zip((0.0, 0.0), *points, (1.0, 1.0), strict=True)
    return float(np.interp(bits, at, shown))
