"""Builds of kernels in tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory):
    """Builds of a test session, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOULEMARK_KERNEL_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield
