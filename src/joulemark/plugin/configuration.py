"""What ``--bench`` changes of pytest's own configuration, before anything is collected."""

from __future__ import annotations

import pytest

from joulemark.errors import JoulemarkError
from joulemark.plugin.benchmark_plugin import MachineInfo, adapt
from joulemark.plugin.options import BenchOptions
from joulemark.plugin.session import SESSION, BenchSession
from joulemark.plugin.terminal import Terminal


def configure(config: pytest.Config) -> None:
    """Check the options, find the devices and register the session.

    Raises:
        pytest.UsageError: an option is wrong, or conflicts with another plugin.
    """
    try:
        options = BenchOptions.from_pytest_config(config)
        session = BenchSession(config, options)
    except JoulemarkError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[SESSION] = session
    # A project may turn warnings into errors for its tests; in a benchmark a warning is a Finding.
    # A case that was interrupted, failed or did not fit has nothing to replay: its outcome says so, no second voice is
    # needed.
    named = config.known_args_namespace.pythonwarnings or ()
    config.known_args_namespace.pythonwarnings = [*named, "default", "ignore:Benchmark fixture was not used"]
    adapt(config, options)
    config.pluginmanager.register(session, "joulemark-session")
    config.pluginmanager.register(Terminal(session), "joulemark-terminal")
    config.pluginmanager.register(MachineInfo(session), "joulemark-machine-info")
    _choose_paths(config)
    config.addinivalue_line("python_files", "bench_*.py")
    config.addinivalue_line("python_functions", "bench_*")
    config.addinivalue_line("python_classes", "Bench")


def _choose_paths(config: pytest.Config) -> None:
    """Without paths: the root's bench_* folders; where there are none, the invocation folder."""
    source = config.args_source
    if source not in (pytest.Config.ArgsSource.TESTPATHS, pytest.Config.ArgsSource.INVOCATION_DIR):
        return
    root, here = config.rootpath, config.invocation_params.dir
    if not here.is_relative_to(root):
        raise pytest.UsageError(
            f"pytest took {root} for the root of this project, most likely the value of an option: write options that "
            "name folders with an equals sign (--bench-results=DIR), or give the benchmarks' paths"
        )
    folders = sorted(str(path) for path in root.glob("bench_*") if path.is_dir())
    config.args[:] = folders or [str(config.invocation_params.dir)]
