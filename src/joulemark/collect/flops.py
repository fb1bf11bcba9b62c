"""Floating-point operations of a step as torch's flop counter has them, and the measured peak of the unit for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from joulemark.collect.timing import first_line
from joulemark.errors import Unsupported

_PEAK_SIZE = {"cuda": 8192, "cpu": 512}
"""Edge of the square product: large enough that its edges and its launch cost nothing."""
_ITS_OWN = (AssertionError, AttributeError, KeyError, NotImplementedError, TypeError, ValueError)
"""What its formulas raise on operators that they do not know; errors of the device pass through."""
_WARM_S, _TIMED_S = 0.15, 0.15


def count_flops(run: Callable[[], object]) -> int:
    """FLOP of one call by ``torch.utils.flop_counter``: products, convolutions and attention, forward and backward.

    A multiply-add is two. Elementwise work, normalizations and optimizers are not in it: it is the work that matrix
    units could do.

    Raises:
        Unsupported: torch is not loaded, so the step does not run in it; or its operators are hidden from the counter.
    """
    if sys.modules.get("torch") is None:
        raise Unsupported("the step does not use torch, so its flop counter sees nothing")
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    try:
        with counter:
            run()
    except _ITS_OWN as error:
        what = f"torch's flop counter does not take this step ({type(error).__name__}: {first_line(error)})"
        raise Unsupported(what) from error
    found = int(counter.get_total_flops())
    if not found:
        raise Unsupported(
            "torch's flop counter saw no product: the step has none, or runs them compiled or captured",
            "measure the same case in eager mode too",
        )
    return found


@dataclass(frozen=True)
class Product:
    """A square matrix product on random data, again and again: the work at the peak of its unit.

    Args:
        run: one product; returns before the device is done.
        flops: of one, 2·n³.
    """

    run: Callable[[], object]
    flops: int


def product_of(dtype: str, device: str) -> Product:
    """The product of a number format; its matrices hold random data, because zeros draw less power and run faster.

    Args:
        dtype: ``fp32`` (TF32 off), ``tf32``, ``bf16`` or ``fp16``.
        device: torch's name of it.

    Raises:
        Unsupported: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise Unsupported("torch is not installed, so no product can be timed") from error
    n = _PEAK_SIZE.get(device.split(":")[0], 512)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    out: Any = torch.empty_like(a)

    def run() -> None:
        torch.mm(a, b, out=out)

    return Product(run, 2 * n**3)


def calls_per_window(run: Callable[[], object], synchronize: Callable[[], None], seconds: float = _TIMED_S) -> int:
    """Warm up, and find how many calls fill a window of about ``seconds``."""
    calls, begin = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - begin < _WARM_S:
        run()
        synchronize()
        calls += 1
    each = (time.perf_counter() - begin) / calls
    return max(1, round(seconds / each))
