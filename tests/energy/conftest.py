"""Kernels are compiled once per session, and windows of synthetic GPUs need not outlive a power cut."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from joulemark.energy import windows
from joulemark.energy.microbench.compile import Cubin, compile_family

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_100")


@pytest.fixture(scope="session")
def cubin_of() -> Callable[[str, str], Cubin]:
    """(family, architecture) → machine code, or a skip where cuda-core is not installed."""
    pytest.importorskip("cuda.core", exc_type=ImportError)
    return compile_family


@pytest.fixture(scope="package", autouse=True)
def _no_sync():
    """A window per millisecond: waiting for the disk after each would take most of a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "os", SimpleNamespace(fsync=lambda handle: None))
        yield
