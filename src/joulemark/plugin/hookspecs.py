"""The hook by which a project brings its own workloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from joulemark.workloads.base import Workload


@pytest.hookspec
def pytest_joulemark_workloads(config: pytest.Config) -> Mapping[str, Workload] | None:
    """Workloads by name; the names are then known to ``--bench-models`` and to the marker ``bench``."""
