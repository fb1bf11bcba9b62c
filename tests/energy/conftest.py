"""Kernels are compiled once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from joulemark.energy.microbench.compile import Cubin, compile_family

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_100")


@pytest.fixture(scope="session")
def cubin_of() -> Callable[[str, str], Cubin]:
    """(family, architecture) → machine code, or a skip where cuda-core is not installed."""
    pytest.importorskip("cuda.core", exc_type=ImportError)
    return compile_family
