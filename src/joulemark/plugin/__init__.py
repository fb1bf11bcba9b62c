"""The pytest plugin: ``--bench``, the fixtures ``bench`` and ``workload``, and the marker ``bench``.

Nothing heavy is imported here: a pytest run without ``--bench`` pays for one small module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from joulemark.plugin.fixture import Bench
    from joulemark.workloads.base import Step

_NEEDS_BENCH = "needs --bench"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--bench`` and its options."""
    from joulemark.plugin.options import add_options

    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hook for own workloads."""
    from joulemark.plugin import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; with ``--bench`` set up the session."""
    config.addinivalue_line(
        "markers",
        "bench(models, phases, batch_sizes, dtypes, modes, inputs, layout, cpu, requires, world_sizes, needs_gpu, "
        "first_look, campaign): what a benchmark sweeps unless the --bench options say otherwise (joulemark)",
    )
    if not config.pluginmanager.hasplugin("benchmark"):
        # Under --strict-markers its marker must not break a file that joulemark would only skip.
        config.addinivalue_line("markers", "benchmark: of pytest-benchmark, which is switched off")
    if config.getoption("joulemark_bench") or config.getoption("joulemark_worker"):
        from joulemark.plugin.configuration import configure

        configure(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto`` with ``--bench`` is one worker per GPU; with one GPU or none, this process does the work."""
    if not config.getoption("joulemark_bench"):
        return None
    from joulemark.plugin.targets import number_of_workers

    return number_of_workers(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--bench``, a benchmark is skipped and says what it needs."""
    if config.getoption("joulemark_bench"):
        return
    for item in items:
        if "bench" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=_NEEDS_BENCH))


@pytest.fixture
def joulemark_gpu(request: pytest.FixtureRequest) -> Any:
    """The device under test; swept where several GPUs were selected."""
    from joulemark.plugin.session import session_of

    return getattr(request, "param", None) or session_of(request.config).targets[0]


@pytest.fixture
def joulemark_case(request: pytest.FixtureRequest) -> Any:
    """The cell of the sweep that this item is."""
    return getattr(request, "param", None)


@pytest.fixture
def bench(request: pytest.FixtureRequest, joulemark_gpu: Any) -> Bench:
    """Measures a function: ``bench(fn, *args)``, ``bench.pedantic(…)`` or ``bench.step(fn, items=N)``.

    Host and device time, energy, power and peak memory of the call, with intervals, stored as one record.
    """
    from joulemark.plugin.session import session_of

    return session_of(request.config).make_bench(request, joulemark_gpu)


@pytest.fixture
def workload(request: pytest.FixtureRequest, bench: Bench, joulemark_case: Any) -> Iterator[Step]:
    """The built step of a zoo model or of your own, for the cell that this item is.

    Override it in a conftest to bring a step of your own: return a ``joulemark.workloads.base.Step``.
    """
    from joulemark.plugin.session import session_of

    step = session_of(request.config).build(bench)
    yield step
    if step.close is not None:
        step.close()
