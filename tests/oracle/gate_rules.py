"""What should a gate do with three processes per side, one of which ran at another speed? Rules on the same rows.

**gate** is the rule in use: means, without the one process of six that stands apart. **stands apart** leaves it out
even where two speeds explain the row. **means** keeps all processes. **medians**: difference of the medians, each
side's scale from the smaller of its two gaps. All moderate their variances over rows and control false alarms alike.

When does a row have to be slower in cycles too? **sides differ** is the rule in use
(:mod:`joulemark.regression.clocks`), **any process** asks for it where any two processes differ by 0.5 %, **never**
does not look at clocks.

The rows: processes of a stored A/A trial, split into disjoint triples (:func:`joulemark.regression.trials.draw_pairs`);
and simulated ones, of which one cell in eight runs faster in a share of its processes, or whose new side runs at
another clock.

Usage: ``python tests/oracle/gate_rules.py [AA.jsonl]``; prints one JSON document of shares of rows called regressed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from scipy import special

from joulemark.regression import clocks, scatter, simulate
from joulemark.regression.processes import cells_of
from joulemark.regression.simulate import regressions
from joulemark.regression.trials import draw_pairs
from joulemark.regression.variance import moderate
from joulemark.regression.verdicts import Rule, established
from joulemark.store import read_run

RULE = Rule()
CELLS = (0.0015, 0.002, 0.0005, 0.0018, 0.0012, 0.0036, 0.005, 0.0039)
"""Standard deviation between processes, as medians of an H200's cells had it; the third cell has two speeds."""
RUNS, TWO_SPEEDS = 4000, 2
MEDIAN_VARIANCE = 0.4487
"""Of the median of three standard normal values."""
GAP_FREEDOM = 1.6
"""Degrees of freedom of two squared gaps: keeps false alarms of normal rows under the gate's own limit."""


def stands_apart(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    with mock.patch.object(scatter, "SAME_SPEED", 2.0):
        return regressions(base, new, RULE)


def means(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    with mock.patch.object(scatter, "STANDS_APART", 0.0):
        return regressions(base, new, RULE)


def medians(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    gaps = sum(_smaller_gap(side) ** 2 for side in (base, new))
    normal = _smaller_gap(np.random.default_rng(0).standard_normal((400_000, 3)))
    spread = moderate(gaps / (2 * (normal**2).mean()), np.full(base.shape[-2], GAP_FREEDOM))
    effect = np.median(new, axis=-1) - np.median(base, axis=-1)
    p = special.stdtr(spread.df, -effect / np.sqrt(spread.variance * 2 * MEDIAN_VARIANCE))
    return established(p, RULE) & (effect >= math.log1p(RULE.min_effect))


def _smaller_gap(side: np.ndarray) -> np.ndarray:
    return np.diff(np.sort(side, axis=-1), axis=-1).min(axis=-1)


def any_process(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    both = np.concatenate((base, new), axis=-1)
    return np.expm1(both.max(axis=-1) - both.min(axis=-1)) > clocks.CLOCK_MOVED


def never(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.zeros(base.shape[:-1], dtype=bool)


CLOCK_RULES = {"sides differ": clocks.sides_differ, "any process": any_process, "never": never}


def by_clock_rule(base: np.ndarray, new: np.ndarray, hertz: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    """Verdicts of the gate with each rule about clocks."""
    found = {}
    for name, rule in CLOCK_RULES.items():
        with mock.patch.object(simulate, "sides_differ", rule):
            found[name] = regressions(base, new, RULE, hertz)
    return found


RULES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "gate": lambda base, new: regressions(base, new, RULE),
    "stands apart": stands_apart,
    "means": means,
    "medians": medians,
}


def simulated(speed: float, share: float, slowdown: float) -> dict[str, object]:
    """One cell whose processes run at ``speed`` times the time in a share of cases."""
    rng = np.random.default_rng(2)

    def side() -> np.ndarray:
        logs = rng.standard_normal((RUNS, len(CELLS), 3)) * np.array(CELLS)[:, None]
        logs[:, TWO_SPEEDS] += np.where(rng.random((RUNS, 3)) < share, math.log(speed), 0.0)
        return logs

    verdicts = {name: rule(side(), side() + math.log1p(slowdown)) for name, rule in RULES.items()}
    return {
        "speed": speed,
        "share": share,
        "slowdown": slowdown,
        "all_rows": {name: round(float(one.mean()), 4) for name, one in verdicts.items()},
        "that_cell": {name: round(float(one[:, TWO_SPEEDS].mean()), 4) for name, one in verdicts.items()},
    }


def at_another_clock(lower: float, reading: float, slowdown: float) -> dict[str, object]:
    """Cells that follow the clock, which is lower on the new side; its readings scatter by ``reading``."""
    rng = np.random.default_rng(3)

    def side(down: float) -> tuple[np.ndarray, np.ndarray]:
        noise = rng.standard_normal((RUNS, len(CELLS), 3)) * np.array(CELLS)[:, None]
        return noise - math.log1p(-down), math.log1p(-down) + reading * rng.standard_normal(noise.shape)

    (base, old_clock), (new, new_clock) = side(0.0), side(lower)
    verdicts = by_clock_rule(base, new + math.log1p(slowdown), (old_clock, new_clock))
    shares = {name: round(float(one.mean()), 4) for name, one in verdicts.items()}
    return {"clock_lower_by": lower, "readings_scatter": reading, "slowdown": slowdown, "all_rows": shares}


def stored(path: Path) -> list[dict[str, object]]:
    """The rules on the processes of a trial, by arm and cell."""
    _, cells, _ = cells_of([read_run(path)])
    base, new, _ = draw_pairs(len(cells[0].logs[0.0]), RUNS, np.random.default_rng(0))
    out = []
    for added in sorted(cells[0].logs):
        sides = ((0.0, base), (added, new))
        old, now = (np.stack([c.logs[arm][i] for c in cells], axis=1) for arm, i in sides)
        hertz = tuple(np.stack([c.clocks[arm][i] for c in cells], axis=1) for arm, i in sides)
        in_time = {name: rule(old, now) for name, rule in RULES.items()}
        for name, verdicts in (in_time | by_clock_rule(old, now, hertz)).items():
            shares = {c.key: round(float(share), 3) for c, share in zip(cells, verdicts.mean(axis=0), strict=True)}
            out.append({"added_work": added, "rule": name, "rows": round(float(verdicts.mean()), 4), "by_cell": shares})
    return out


def main() -> int:
    """Print the shares."""
    cases = [(0.936, share) for share in (0.0, 0.05, 0.2, 0.5)] + [(0.947, 0.05), (1.06, 0.05), (1.06, 0.5)]
    document = {
        "other_clock": [
            at_another_clock(lower, reading, slowdown)
            for reading in (0.001, 0.005, 0.03)
            for lower, slowdown in ((0.0, 0.0), (0.0, 0.03), (0.01, 0.0), (0.02, 0.0), (0.04, 0.0))
        ],
        "simulated": [simulated(speed, share, slowdown) for speed, share in cases for slowdown in (0.0, 0.03, 0.05)],
        **({"stored": stored(Path(sys.argv[1]))} if len(sys.argv) > 1 else {}),
    }
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
