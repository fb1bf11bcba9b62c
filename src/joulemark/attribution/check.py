"""Whether counts and timeline fit as they are mapped, or better when one is shifted (pure).

Beacons map the clocks; the run itself checks the mapping. For trial offsets the counts are fitted again, with one rate
per kernel name, and what the fit leaves over is weighed. Wrong clocks leave more: every edge between kernels falls into
the wrong sample. The trial with the least left over must be the mapping itself, within a fraction of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from joulemark.attribution.clock import Floats
from joulemark.attribution.solve import Window, counts_of, normal, overlaps
from joulemark.errors import UnreadableInput
from joulemark.records import Json

COUNTERS = ("sm_active_cycles", "instructions", "pipe_tensor_cycles", "dram_read_bytes", "dram_write_bytes", "l2_bytes")
"""What is fitted, as far as a window counts it: counters whose rates differ much between kernels."""
REACH, STEP = 12.0, 0.5
"""Trial offsets, in samples."""
LEAST_REACH_S = 150e-6
TOLERANCE = 0.25
"""Of a sample, by which the best trial offset may be off zero, besides some standard errors of the mapping."""
_DEVIATIONS = 3.0
_TELLING = 0.05
"""The worst trial leaves over more than the best by this share, or the run does not tell offsets apart."""


@dataclass(frozen=True)
class Profile:
    """What trial offsets leave over.

    Args:
        trial_s: offsets that were tried, in s.
        misfit: sum of squares left over by each, of that of the counts; a mean over counters.
        best_s: offset with the least, interpolated.
        tolerance_s: that it may be off.
    """

    trial_s: Floats
    misfit: Floats
    best_s: float
    tolerance_s: float

    @property
    def telling(self) -> bool:
        """Whether a wrong offset would show."""
        return float(self.misfit.max()) > (1 + _TELLING) * float(self.misfit.min())

    @property
    def fits(self) -> bool:
        """Whether no other offset fits better."""
        return not self.telling or abs(self.best_s) <= self.tolerance_s

    def to_json(self) -> dict[str, Json]:
        """Strict JSON, in s."""
        return {
            "best_s": self.best_s,
            "tolerance_s": self.tolerance_s,
            "telling": self.telling,
            "trial_s": self.trial_s.tolist(),
            "misfit": self.misfit.tolist(),
        }


def profile(window: Window) -> Profile:
    """What trial offsets around a window's mapping leave over.

    Raises:
        UnreadableInput: the window counts nothing that can be fitted.
    """
    names = [name for name in COUNTERS if name in window.series.values]
    if not names:
        raise UnreadableInput(
            f"the group {window.series.group} counts nothing that tells kernels apart", f"count {COUNTERS[0]}"
        )
    sample_s = float(np.median(window.series.duration_s))
    reach = max(REACH * sample_s, LEAST_REACH_S)
    trials = np.arange(-reach, reach + STEP * sample_s / 2, STEP * sample_s)
    # One rate per name: rates of every place could follow the counts to a wrong place.
    names_used, unit = np.unique(window.launches.name, return_inverse=True)
    by_name = replace(window, launches=replace(window.launches, place=unit.reshape(-1)))
    counts = counts_of(window.series, names)
    misfit = np.array([_misfit(by_name, counts, trial, len(names_used)) for trial in trials])
    allowed = TOLERANCE * sample_s + _DEVIATIONS * window.clock.uncertainty_s
    return Profile(trials, misfit, _least(trials, misfit), allowed)


def _misfit(window: Window, counts: Floats, trial_s: float, units: int) -> float:
    shifted = replace(window, clock=window.clock.shifted(trial_s))
    found = overlaps(shifted, np.arange(units), units)
    seen = counts[found.rows]
    system = normal([(found, seen)])
    left = seen - found.matrix @ np.linalg.solve(system.gram, system.rhs)
    of = ((seen - seen.mean(axis=0)) ** 2).sum(axis=0)
    told = of > 0
    return float(((left**2).sum(axis=0)[told] / of[told]).mean()) if told.any() else 0.0


def _least(trials: Floats, misfit: Floats) -> float:
    """Trial with the least left over, by a parabola through it and its neighbours."""
    at = int(misfit.argmin())
    if at in (0, len(trials) - 1):
        return float(trials[at])
    before, here, behind = misfit[at - 1 : at + 2]
    bend = before - 2 * here + behind
    shift = 0.0 if bend <= 0 else 0.5 * (before - behind) / bend
    return float(trials[at] + shift * (trials[1] - trials[0]))
