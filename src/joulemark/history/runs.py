"""A metric over runs: who ran when, on which driver, and the figure of every case."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulemark.records import Case, Environment, Json
from joulemark.regression.machines import facts_of, one_or_all

Floats = npt.NDArray[np.float64]
UNKNOWN_DRIVER = "unknown"
"""Of a run whose file names no driver."""


@dataclass(frozen=True)
class Source:
    """A file of the store.

    Args:
        path: of the file.
        error: why it cannot be used; None when it can.
        problems: parts of it that could not be read, in words.
    """

    path: str
    error: str | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class PastRun:
    """What one file measured under one driver.

    Args:
        path: of the file.
        run_id: of the run.
        started_utc: seconds since the Unix epoch; None when the file does not say.
        driver: version, or ``unknown``.
        setup: what else may move a figure, by name: ``torch``, ``cuda``, ``commit``, ``power_limit_w`` …
        simulated: whether its GPUs are simulated ones.
    """

    path: str
    run_id: str
    started_utc: float | None
    driver: str
    setup: Mapping[str, str]
    simulated: bool = False


@dataclass(frozen=True)
class Figures:
    """One metric over runs.

    Args:
        metric: its name.
        runs: in order of time.
        cases: of the rows, in order of their labels and batch sizes.
        values: rows × runs in the metric's base unit; NaN where it was not measured.
        flagged: how many of the values carry a Finding that flags them.
        copies: how many files hold a run that another file holds too; they are left out.
        simulated_apart: how many runs on simulated GPUs are left out because there are others.
        works_apart: how many cases did different work in different runs; each has a row for each work.
    """

    metric: str
    runs: tuple[PastRun, ...]
    cases: tuple[Case, ...]
    values: Floats
    flagged: int = 0
    copies: int = 0
    simulated_apart: int = 0
    works_apart: int = 0

    @property
    def simulated(self) -> bool:
        """Whether these are figures of simulated GPUs: they never stand beside others."""
        return any(run.simulated for run in self.runs)


def driver_of(facts: Mapping[str, Json]) -> str:
    """The driver's version of an environment's facts, or ``unknown``."""
    return str(facts.get("driver") or UNKNOWN_DRIVER)


def setup_of(environment: Environment, measured: Collection[str] = ()) -> dict[str, str]:
    """What may move a figure as text by name, see :func:`joulemark.regression.machines.facts_of`."""
    return {name: str(one_or_all(values)) for name, values in facts_of(environment, measured).items()}


def sorted_drivers(drivers: Iterable[str]) -> list[str]:
    """Driver versions, oldest first, as versions are ordered; what is no version comes before all."""
    from packaging.version import InvalidVersion, Version

    def key(driver: str) -> tuple[bool, Version, str]:
        try:
            return True, Version(driver), driver
        except InvalidVersion:
            return False, Version("0"), driver

    return sorted(set(drivers), key=key)


def differences(before: PastRun, after: PastRun) -> dict[str, tuple[str | None, str | None]]:
    """What changed from one run to another: name → (before, after); None where a run does not say."""
    names = dict.fromkeys((*before.setup, *after.setup))
    pairs = {name: (before.setup.get(name), after.setup.get(name)) for name in names}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def order_of(run: PastRun) -> tuple[float, str]:
    """What runs are sorted by: their time, those of equal or unknown time by the name of their file."""
    return run.started_utc or 0.0, run.path.rpartition("/")[2]
