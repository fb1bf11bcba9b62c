"""A small project of its own for each test, and what ``pytest --bench`` left in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# An inner session forgets the modules that it was the first to import; numpy and matplotlib cannot be loaded twice.
import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401
import pytest

import joulemark.cli
import joulemark.environment
import joulemark.plugin.baseline
import joulemark.plugin.child
import joulemark.plugin.configuration
import joulemark.plugin.parent
import joulemark.report.comparison_table
import joulemark.report.output
import joulemark.workloads.loader
import joulemark.workloads.zoo  # noqa: F401

SUITES = Path(__file__).parents[1] / "data" / "suites"
ON_CPU = ("--bench", "--bench-gpus", "cpu", "--bench-quick")


@dataclass
class Project:
    """A folder with benchmarks."""

    pytester: pytest.Pytester
    _last: pytest.RunResult | None = None

    @property
    def path(self) -> Path:
        return self.pytester.path

    def write(self, files: dict[str, str]) -> None:
        """Files by their names."""
        for name, text in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def copy(self, suite: str) -> None:
        """A suite of tests/data, into the project's root."""
        shutil.copytree(SUITES / suite, self.path, dirs_exist_ok=True)

    def bench(self, *args: str) -> pytest.RunResult:
        """``pytest --bench`` on the CPU, the parent in this process."""
        self._last = self.pytester.runpytest_inprocess(*ON_CPU, *args)
        return self._last

    def pytest(self, *args: str) -> pytest.RunResult:
        """A whole ``pytest`` of its own."""
        self._last = self.pytester.runpytest_subprocess(*args)
        return self._last

    @property
    def outcomes(self) -> dict[str, int]:
        """Counts of the last run's summary; a flagged case is a passed one (a shared machine flags at will)."""
        assert self._last is not None
        counts = dict(self._last.parseoutcomes())
        passed = counts.pop("passed", 0) + counts.pop("flagged", 0)
        return counts | ({"passed": passed} if passed else {})

    @property
    def files(self) -> list[Path]:
        """Result files."""
        return sorted(self.path.rglob("sweep-*.jsonl"))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of the one result file, as strict JSON."""
        (file,) = self.files
        return [json.loads(line, parse_constant=_refuse) for line in file.read_text().splitlines()]

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """Records by the last part of their node ids."""
        return {one["nodeid"].split("::")[-1]: one for one in self.lines if one["kind"] == "record"}

    @property
    def end(self) -> dict[str, Any]:
        """The last line of the file."""
        last = self.lines[-1]
        assert last["kind"] == "end"
        return last


def _refuse(token: str) -> float:
    raise AssertionError(f"{token} is not strict JSON")


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Sessions of tests hear signals also where this one ignores them: a job in a shell's background, under nohup."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [one for one in heard if signal.getsignal(one) is signal.SIG_IGN]
    for one in ignored:
        signal.signal(one, heard[one])
    yield
    for one in ignored:
        signal.signal(one, signal.SIG_IGN)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty project; no option of the session that runs this test reaches it."""
    of_workers = [name for name in os.environ if name.startswith("PYTEST_XDIST_")]
    for name in ("CUDA_VISIBLE_DEVICES", "JOULEMARK_WORKER_TARGETS", "JOULEMARK_WORKER_FD", *of_workers):
        monkeypatch.delenv(name, raising=False)
    # What no project uses. Hypothesis loads itself at the end of each session, which takes longer than all the rest.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:syrupy")
    # Simulated GPUs are the same in every test, and so would their leases be.
    monkeypatch.setenv("JOULEMARK_LEASE_DIR", str(pytester.path / "leases"))
    return Project(pytester)
