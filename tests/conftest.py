"""What every test has."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "gpu"))
"""Scripts for GPUs import each other by name, as they do when they are run."""

LIMIT_S = 600.0
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """The terminal, before a test's output is captured; and the cores, before torch counts them."""
    config.stash[_STDERR] = os.dup(2)
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        # Threads of several workers on the same cores wait for each other, and spin: most of torch's time on a CPU.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))


@pytest.fixture(autouse=True, scope="session")
def compiled_once() -> None:
    """What hundreds of processes compile alike is kept: the package, and plugins as pytest rewrites them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def end_of_waiting(pytestconfig: pytest.Config) -> Iterator[None]:
    """A test that waits for ever ends its process, with the stack of each thread, so that the others are still told."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=pytestconfig.stash[_STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()
