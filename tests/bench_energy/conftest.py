"""Windows of synthetic GPUs need not outlive a power cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from joulemark.energy import windows


@pytest.fixture(scope="package", autouse=True)
def _no_sync():
    """A window per millisecond: waiting for the disk after each would take most of a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "os", SimpleNamespace(fsync=lambda handle: None))
        yield
