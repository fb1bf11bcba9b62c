"""From effects with their standard errors to verdicts, with the false alarms over all rows under control (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Verdict = Literal["improved", "same", "regressed", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("regressed", "inconclusive", "improved", "same")
"""The worst first."""


_LARGEST_LOG = 700.0
"""Of a change that can be told as a number: an interval that does not hold its own figure asks for more."""


@dataclass(frozen=True)
class Rule:
    """What counts as worse, and how seldom the gate may be wrong.

    A row is ``regressed`` when its worsening is *established* (its one-sided p-value passes the procedure below)
    and *matters* (the estimate is at least ``min_effect``). With a spread that was measured between processes,
    established means: against no change at all. With an assumed spread nothing in the data bears the assumption
    out, so the worsening must be established against ``threshold`` itself. ``improved`` mirrors this. A row that is
    neither is ``inconclusive`` when its interval reaches beyond ``threshold`` on the worse side, and else ``same``:
    a worsening beyond the threshold is excluded.

    So a small slowdown is found when the data shows it, and the threshold says what must not stay unseen. A test
    against the threshold alone would find a slowdown of its own size half of the time.

    Multiplicity: the procedure of Benjamini and Hochberg at ``fdr`` over all rows that count, with each critical
    value capped at ``alpha``. Without any true change every rejection is false, so the false discovery rate is the
    chance of a false alarm in the whole run: at most ``fdr``, however many rows it has. When many rows have truly
    changed, the bare procedure grows lenient towards the others (up to ``fdr`` each); the cap keeps every
    unchanged row at ``alpha``, half of the 1 % that is promised: the other half is for what the model does not
    know (variances that are estimated, tails). A family-wise procedure (Holm) would cost power where it matters
    most: a new driver slows many rows at once. The cap leaves the step-up rule valid, since its critical values
    stay below the linear ones (Blanchard and Roquain, *Two simple sufficient conditions for FDR control*,
    Electronic Journal of Statistics 2, 2008); rows of one run are positively dependent, which the procedure
    tolerates (Benjamini and Yekutieli, Annals of Statistics 29, 2001).

    Args:
        threshold: the worsening that must not stay unseen, as a fraction.
        spread: what two runs of the same thing are assumed to differ by (95 %) where it was not measured.
        min_effect: smallest worsening that is called one, however certain.
        fdr: false discovery rate over the rows that count.
        alpha: largest chance of a false alarm in one row.
        confidence: of the intervals.
        power: chance at which an effect counts as detectable.
        family: number of rows that will be judged, where they are judged one by one as they end; None judges all
            rows that are given together.
    """

    threshold: float = 0.05
    spread: float = 0.02
    min_effect: float = 0.01
    fdr: float = 0.05
    alpha: float = 0.005
    confidence: float = 0.95
    power: float = 0.95
    family: int | None = None


@dataclass(frozen=True)
class Effect:
    """A change on the logarithmic scale, positive where the metric got worse.

    Args:
        log_ratio: logarithm of new / base, its sign turned where higher is better.
        below, above: standard errors of its lower and upper side.
        df: degrees of freedom of the standard errors; infinite for an assumed spread.
        assumed: whether the spread between processes was assumed.
    """

    log_ratio: float
    below: float
    above: float
    df: float = math.inf
    assumed: bool = False

    def interval(self, confidence: float) -> tuple[float, float]:
        """Of ``log_ratio``."""
        t = quantile(0.5 + confidence / 2, self.df)
        return self.log_ratio - t * self.below, self.log_ratio + t * self.above

    def p_worse(self, rule: Rule) -> float:
        """One-sided p-value of "not worse" (of "not worse than the threshold" with an assumed spread)."""
        return tail(self.log_ratio - self.null(rule), self.below, self.df)

    def p_better(self, rule: Rule) -> float:
        """One-sided p-value of "not better"."""
        return tail(-self.log_ratio - self.null(rule), self.above, self.df)

    def null(self, rule: Rule) -> float:
        """The change that has to be exceeded for certain, on the log scale."""
        return math.log1p(rule.threshold) if self.assumed else 0.0


@dataclass(frozen=True)
class Judged:
    """The verdict of one row.

    Args:
        verdict: see :class:`Rule`.
        interval: of the log ratio, positive is worse.
        p_value: one-sided, in the direction of the estimate, not corrected for the other rows.
        detectable: smallest worsening that would be found in this row with probability ``rule.power``, as a
            fraction.
    """

    verdict: Verdict
    interval: tuple[float, float]
    p_value: float
    detectable: float


def quantile(p: float, df: float) -> float:
    """Of Student's distribution; of the normal one for infinite ``df``."""
    return float(special.ndtri(p) if math.isinf(df) else special.stdtrit(df, p))


def tail(excess: float, error: float, df: float) -> float:
    """P(T > excess / error); an error of zero leaves no doubt."""
    if error <= 0:
        return 0.0 if excess > 0 else 1.0
    return float(special.ndtr(-excess / error) if math.isinf(df) else special.stdtr(df, -excess / error))


def critical_values(rows: int, rule: Rule) -> NDArray[np.float64]:
    """Ascending critical values for ``rows`` sorted p-values: see :class:`Rule`."""
    if rule.family is not None:
        return np.full(rows, min(rule.alpha, rule.fdr / max(rule.family, rows, 1)))
    return np.minimum(rule.fdr * np.arange(1, rows + 1) / max(rows, 1), rule.alpha)


def established(p_values: ArrayLike, rule: Rule) -> NDArray[np.bool_]:
    """Which p-values the step-up procedure rejects.

    Args:
        p_values: (…, rows); leading axes are separate runs.
        rule: with the rates to keep.

    Source: Benjamini and Hochberg, *Controlling the false discovery rate*, Journal of the Royal Statistical Society B
    57 (1995), with each critical value capped.
    """
    p = np.asarray(p_values, dtype=float)
    rows = p.shape[-1]
    if rows == 0:
        return np.zeros(p.shape, dtype=bool)
    critical = critical_values(rows, rule)
    passes = np.sort(p, axis=-1) <= critical
    last = rows - 1 - np.argmax(passes[..., ::-1], axis=-1)
    limit = np.where(passes.any(axis=-1), critical[last], -1.0)
    return np.asarray(p <= limit[..., None])


def judge(effects: Sequence[Sequence[Effect]], rule: Rule, gated: Sequence[bool] | None = None) -> list[Judged]:
    """Verdicts of the rows of one comparison.

    Args:
        effects: per row one or more effects between which the truth lies (time, and time in clock cycles, where the
            clock moved); a verdict then holds for all of them.
        rule: what counts.
        gated: rows that count. The others are judged as a family of their own and cannot cost these power.
    """
    counted = np.ones(len(effects), dtype=bool) if gated is None else np.asarray(gated, dtype=bool)
    worse = _established_apart([max(one.p_worse(rule) for one in row) for row in effects], counted, rule)
    better = _established_apart([max(one.p_better(rule) for one in row) for row in effects], counted, rule)
    size = int(counted.sum())
    return [
        _judged(row, rule, bool(worse[i]), bool(better[i]), size if counted[i] else len(effects) - size)
        for i, row in enumerate(effects)
    ]


def _established_apart(p_values: list[float], counted: NDArray[np.bool_], rule: Rule) -> NDArray[np.bool_]:
    p = np.asarray(p_values, dtype=float)
    out = np.zeros(len(p), dtype=bool)
    for group in (counted, ~counted):
        out[group] = established(p[group], rule)
    return out


def _judged(row: Sequence[Effect], rule: Rule, is_worse: bool, is_better: bool, rows: int) -> Judged:
    intervals = [one.interval(rule.confidence) for one in row]
    low, high = min(lo for lo, _ in intervals), max(hi for _, hi in intervals)
    matters = math.log1p(rule.min_effect)
    verdict: Verdict = "same"
    if is_worse and min(one.log_ratio for one in row) >= matters:
        verdict = "regressed"
    elif is_better and max(one.log_ratio for one in row) <= -matters:
        verdict = "improved"
    elif high > math.log1p(rule.threshold):
        verdict = "inconclusive"
    p_value = min(max(one.p_worse(rule) for one in row), max(one.p_better(rule) for one in row))
    return Judged(verdict, (low, high), p_value, max(detectable(one, rule, rows) for one in row))


def detectable(effect: Effect, rule: Rule, rows: int) -> float:
    """Smallest worsening found with probability ``rule.power`` when it is the only one among ``rows``, as a fraction.

    By the noncentral t distribution (Cohen, *Statistical Power Analysis*, 1988), at the first and strictest critical
    value; the estimate must also reach ``rule.min_effect``.
    """
    critical = quantile(1 - float(critical_values(max(rows, 1), rule)[0]), effect.df)
    normal = quantile(rule.power, math.inf)
    # Beyond 300 degrees of freedom the two distributions agree to four digits, and the series converges slowly.
    by_test = (
        critical + normal if effect.df > 300 else float(special.nctdtrinc(effect.df, 1 - rule.power, critical))
    ) * effect.below
    by_size = math.log1p(rule.min_effect) + normal * effect.below
    return math.expm1(min(max(effect.null(rule) + by_test, by_size), _LARGEST_LOG))
