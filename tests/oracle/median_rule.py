"""Would a verdict by medians of three processes be a better rule than the gate's, by means? Simulated rows.

The rival: the difference of the medians of both sides; each side's scale from the smaller of its two gaps, moderated
over rows like the gate's variances; the same multiplicity. One cell runs 6 % faster in a share of its processes.

Usage: ``python tests/oracle/median_rule.py``.
"""

from __future__ import annotations

import json
import math
import sys

import numpy as np
from scipy import special

from joulemark.regression.simulate import regressions
from joulemark.regression.variance import moderate
from joulemark.regression.verdicts import Rule, established

CELLS = (0.0015, 0.002, 0.0005, 0.0018, 0.0012, 0.0036, 0.005, 0.0039)
"""Standard deviation between processes; the third cell has two states."""
RUNS, FASTER, TWO_STATES = 4000, 0.064, 2
MEDIAN_VARIANCE = 0.4487
"""Of the median of three standard normal values."""
GAP_FREEDOM = 1.6
"""Degrees of freedom of two squared gaps: keeps false alarms of normal rows under the gate's own limit."""


def by_medians(base: np.ndarray, new: np.ndarray, rule: Rule) -> np.ndarray:
    """Which rows the rival calls regressed, of (runs, rows, 3) logarithms."""
    gaps = sum(_smaller_gap(side) ** 2 for side in (base, new))
    normal = _smaller_gap(np.random.default_rng(0).standard_normal((400_000, 3)))
    variance = gaps / (2 * (normal**2).mean())
    spread = moderate(variance, np.full(variance.shape[-1], GAP_FREEDOM))
    effect = np.median(new, axis=-1) - np.median(base, axis=-1)
    p = special.stdtr(spread.df, -effect / np.sqrt(spread.variance * 2 * MEDIAN_VARIANCE))
    return established(p, rule) & (effect >= math.log1p(rule.min_effect))


def _smaller_gap(side: np.ndarray) -> np.ndarray:
    return np.diff(np.sort(side, axis=-1), axis=-1).min(axis=-1)


def _side(rng: np.random.Generator, share: float) -> np.ndarray:
    logs = rng.standard_normal((RUNS, len(CELLS), 3)) * np.array(CELLS)[:, None]
    logs[:, TWO_STATES] += np.where(rng.random((RUNS, 3)) < share, math.log1p(-FASTER), 0.0)
    return logs


def main() -> int:
    """Print one JSON document: shares of rows called regressed, of all cells and of the one with two states."""
    rng, rule, found = np.random.default_rng(2), Rule(), []
    for share in (0.0, 0.05, 0.2, 0.5):
        for slowdown in (0.0, 0.03, 0.05):
            base, new = _side(rng, share), _side(rng, share) + math.log1p(slowdown)
            row = {"share_in_the_fast_state": share, "slowdown": slowdown}
            for name, verdicts in (
                ("means", regressions(base, new, rule)),
                ("medians", by_medians(base, new, rule)),
            ):
                row |= {name: float(verdicts.mean()), f"{name}_two_states": float(verdicts[:, TWO_STATES].mean())}
            found.append(row)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
