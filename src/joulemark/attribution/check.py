"""Whether counts and timeline fit as they are mapped, or better when one is shifted (pure).

Beacons map the clocks; the run itself checks the mapping. For trial offsets the counts are fitted again, and what
the fit leaves over is weighed. Wrong clocks leave more: every edge between kernels falls into
the wrong sample. The trial with the least left over must be the mapping itself, within a fraction of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulemark.attribution.clock import Floats
from joulemark.attribution.solve import Window, counts_of, normal, overlaps, unbounded_rates
from joulemark.attribution.units import Units
from joulemark.errors import UnreadableInput
from joulemark.records import Json

COUNTERS = ("instructions", "pipe_tensor", "pipe_fma_instructions", "l2_bytes", "dram_read_bytes")
"""What is fitted, as far as a window counts it: rates that differ much between kernels, and happen when these run.

Bytes written to DRAM leave the L2 when later kernels need the room.
"""
REACH, STEP = 12.0, 0.5
"""Trial offsets, in samples."""
LEAST_REACH_S = 150e-6
_LONGEST_HEAD_S, _HEAD_STEP_S = 3e-6, 0.5e-6
TOLERANCE = 0.25
"""Of a sample, by which the best trial offset may be off zero, besides some standard errors of the mapping."""
_DEVIATIONS = 3.0
_TELLING = 0.05
"""Share by which one trial leaves over more than another before the two are told apart."""


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
        """Whether no offset beyond the tolerance fits better."""
        as_mapped = float(np.interp(0.0, self.trial_s, self.misfit))
        return abs(self.best_s) <= self.tolerance_s or as_mapped <= (1 + _TELLING) * float(self.misfit.min())

    @property
    def off_s(self) -> float:
        """What the counts say against the mapping, in s: nothing where they cannot tell."""
        return self.best_s if self.telling and abs(self.best_s) <= self.tolerance_s else 0.0

    def to_json(self) -> dict[str, Json]:
        """Strict JSON, in s."""
        return {
            "best_s": self.best_s,
            "tolerance_s": self.tolerance_s,
            "telling": self.telling,
            "trial_s": self.trial_s.tolist(),
            "misfit": self.misfit.tolist(),
        }


def profile(window: Window, units: Units) -> Profile:
    """What trial offsets around a window's mapping leave over.

    Args:
        window: with its mapping.
        units: how the launches of a step are grouped.

    Raises:
        UnreadableInput: the window counts nothing that can be fitted.
    """
    names = _counted(window)
    sample_s = float(np.median(window.series.duration_s))
    reach = max(REACH * sample_s, LEAST_REACH_S)
    trials = np.arange(-reach, reach + STEP * sample_s / 2, STEP * sample_s)
    counts = counts_of(window, names)
    misfit = np.array([_misfit(window, counts, trial, units) for trial in trials])
    allowed = TOLERANCE * sample_s + _DEVIATIONS * window.clock.uncertainty_s
    return Profile(trials, misfit, _least(trials, misfit), allowed)


def _counted(window: Window) -> list[str]:
    names = [name for name in COUNTERS if name in window.series.values]
    if not names:
        raise UnreadableInput(
            f"the group {window.series.group} counts nothing that tells kernels apart", f"count {COUNTERS[0]}"
        )
    return names


def idle_head(windows: Sequence[Window], units: Units) -> float:
    """Time in s at the begin of kernels, beside launching, with which all windows' counts fit best.

    A kernel loads and sets up before it counts much. One time is sought for all: what is left over says little about
    single ones.
    """
    counts = [counts_of(one, _counted(one)) for one in windows]

    def misfit(head_s: float) -> float:
        trial = [replace(one, clock=replace(one.clock, head_s=head_s)) for one in windows]
        return sum(_misfit(one, seen, 0.0, units) for one, seen in zip(trial, counts, strict=True))

    trials = np.arange(0.0, _LONGEST_HEAD_S + _HEAD_STEP_S / 2, _HEAD_STEP_S)
    return _least(trials, np.array([misfit(one) for one in trials]))


def _misfit(window: Window, counts: Floats, trial_s: float, units: Units) -> float:
    shifted = replace(window, clock=window.clock.shifted(trial_s))
    found = overlaps(shifted, units.of_place, len(units.units))
    seen = counts[found.rows]
    left = seen - found.matrix @ unbounded_rates(normal([(found, seen)]))
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
