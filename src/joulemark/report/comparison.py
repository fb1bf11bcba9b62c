"""What a comparison of two runs is: its rows, its verdict, its exit code and its JSON form."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from joulemark.metrics import find
from joulemark.records import Json
from joulemark.regression.verdicts import VERDICTS, Rule, Verdict

SCHEMA = "joulemark/compare/1"
EXIT_OK, EXIT_REGRESSED, EXIT_INCONCLUSIVE = 0, 1, 3

OUTCOME = "outcome"
"""Stands for a metric where a side ran out of memory, failed or could not be done."""


@dataclass(frozen=True)
class Row:
    """One figure of one case on both sides.

    Args:
        key: the case in words; its GPU model is not part of it where the two sides differ in that, and the
            function that swept it is where several swept the same.
        case_id: of the case, in the new run.
        metric: its name, or ``outcome`` where one side has no figures at all.
        base, new: figures in base units, over several processes their geometric mean, without one that stood apart; or
            the two outcomes; None when not measured.
        unit: of both.
        ratio: new / base; None without two positive figures.
        interval: of the ratio, (lo, hi).
        verdict: see :class:`joulemark.regression.verdicts.Rule`.
        gated: whether the verdict counts for the exit code.
        notes: what a reader must know.
        spread: whether the spread between processes was ``measured`` or ``assumed``; None without a ratio.
        processes: on each side.
        p_value: one-sided, in the direction of the ratio, not corrected for the other rows.
        detectable: smallest worsening that this row's data would show in 95 % of trials, as a fraction.
    """

    key: str
    case_id: str
    metric: str
    base: float | str | None
    new: float | str | None
    unit: str
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: Verdict
    gated: bool = True
    notes: tuple[str, ...] = ()
    spread: Literal["measured", "assumed"] | None = None
    processes: tuple[int, int] | None = None
    p_value: float | None = None
    detectable: float | None = None

    @property
    def worsening(self) -> float:
        """By how much it got worse, as a logarithm; infinite where one side has no figures."""
        if self.metric == OUTCOME:
            return math.inf
        if self.ratio is None:
            return 0.0
        return -math.log(self.ratio) if find(self.metric).better == "higher" else math.log(self.ratio)

    def to_json(self) -> Json:
        return {
            "key": self.key,
            "case_id": self.case_id,
            "metric": self.metric,
            "base": self.base,
            "new": self.new,
            "unit": self.unit,
            "ratio": self.ratio,
            "interval": None if self.interval is None else list(self.interval),
            "verdict": self.verdict,
            "gated": self.gated,
            "spread": self.spread,
            "processes": None if self.processes is None else list(self.processes),
            "p_value": self.p_value,
            "detectable": self.detectable,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    Args:
        base, new: paths of the two files.
        rows: in the order of the new run, then by metric.
        only_in_base, only_in_new: cases that one side does not have.
        compared: number of cases on both sides.
        environment: fact → (base, new), where they differ.
        messages: about the runs as a whole.
        rule: by which the rows were judged.
        between_processes: metric → pooled relative standard deviation of processes, where it was measured.
        simulated: the sides, of ``BASE`` and ``NEW``, that have simulated GPUs.
    """

    base: str
    new: str
    rows: tuple[Row, ...]
    only_in_base: tuple[str, ...]
    only_in_new: tuple[str, ...]
    compared: int
    environment: Mapping[str, tuple[Json, Json]] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    rule: Rule = field(default_factory=Rule)
    between_processes: Mapping[str, float] = field(default_factory=dict)
    simulated: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of the rows that count; ``inconclusive`` where none does: then nothing was compared."""
        found = {row.verdict for row in self.rows if row.gated}
        return next((verdict for verdict in VERDICTS if verdict in found), "inconclusive")

    @property
    def counts(self) -> bool:
        """Whether any row counts."""
        return any(row.gated for row in self.rows)

    @property
    def spread(self) -> Literal["measured", "assumed", "mixed"]:
        """Where the spread between processes comes from, over the rows that have a ratio."""
        sources = {row.spread for row in self.rows if row.spread is not None}
        return "mixed" if len(sources) > 1 else ("measured" if sources == {"measured"} else "assumed")

    def detectable(self) -> dict[str, tuple[float, float]]:
        """Per metric the median and the largest of the smallest detectable worsenings of its rows that count."""
        found: dict[str, list[float]] = defaultdict(list)
        for row in self.rows:
            if row.gated and row.detectable is not None:
                found[row.metric].append(row.detectable)
        return {metric: (sorted(sizes)[len(sizes) // 2], max(sizes)) for metric, sizes in found.items()}

    def geometric_means(self) -> dict[str, float]:
        """Per metric the geometric mean of the ratios of its rows that count and have one."""
        logs: dict[str, list[float]] = defaultdict(list)
        for row in self.rows:
            if row.gated and row.ratio is not None:
                logs[row.metric].append(math.log(row.ratio))
        return {metric: math.exp(sum(values) / len(values)) for metric, values in logs.items()}

    def worst(self) -> Row | None:
        """Of the rows that count the one with the worst verdict and, among these, the largest worsening."""
        counting = [row for row in self.rows if row.gated]
        return min(counting, key=lambda row: (_severity(row.verdict), -row.worsening), default=None)

    def to_json(self) -> Json:
        return {
            "schema": SCHEMA,
            "base": self.base,
            "new": self.new,
            "rows": [row.to_json() for row in self.rows],
            "only_in_new": list(self.only_in_new),
            "only_in_base": list(self.only_in_base),
            "summary": self._summary(),
            "verdict": self.verdict,
            "spread": {
                "value": self.rule.spread,
                "source": self.spread,
                "between_processes": dict(self.between_processes),
            },
            "threshold": self.rule.threshold,
            "min_effect": self.rule.min_effect,
            "false_alarms": {"per_row": self.rule.alpha, "discovery_rate": self.rule.fdr},
            "environment": {name: {"base": pair[0], "new": pair[1]} for name, pair in self.environment.items()},
            "messages": list(self.messages),
        }

    def _summary(self) -> Json:
        counts = Counter(row.verdict for row in self.rows)
        return {
            "compared": self.compared,
            "rows": len(self.rows),
            "not_gated": sum(not row.gated for row in self.rows),
            **{verdict: counts[verdict] for verdict in VERDICTS},
            "only_in_new": len(self.only_in_new),
            "only_in_base": len(self.only_in_base),
            "geometric_mean": self.geometric_means(),
            "detectable": {
                metric: {"median": sizes[0], "worst": sizes[1]} for metric, sizes in self.detectable().items()
            },
        }


def _severity(verdict: Verdict) -> int:
    """A row that improved is no worse than one that stayed the same."""
    return min(VERDICTS.index(verdict), VERDICTS.index("improved"))


def exit_code(comparison: Comparison, fail_on_missing: bool = False) -> int:
    """The exit code of the command line for a comparison.

    Args:
        comparison: of two runs.
        fail_on_missing: whether cases and figures that NEW lacks fail.

    Returns:
        0 nothing worse; 1 regressed, or missing where that fails; 3 inconclusive, or no row counts.
    """
    if comparison.verdict == "regressed":
        return EXIT_REGRESSED
    if fail_on_missing and (comparison.only_in_base or any(_went_missing(row) for row in comparison.rows)):
        return EXIT_REGRESSED
    return EXIT_INCONCLUSIVE if comparison.verdict == "inconclusive" else EXIT_OK


def meaning_of_exit(comparison: Comparison, fail_on_missing: bool = False) -> str:
    """What :func:`exit_code` says of a comparison: ``exit code 1: something is worse``."""
    code = exit_code(comparison, fail_on_missing)
    if code == EXIT_REGRESSED:
        regressed = comparison.verdict == "regressed"
        why = "something is worse" if regressed else "NEW lacks cases or figures of BASE (--fail-on-missing)"
    elif code == EXIT_INCONCLUSIVE:
        why = "it cannot be decided whether something is worse" if comparison.counts else why_nothing_counts(comparison)
    else:
        why = "nothing is worse"
    return f"exit code {code}: {why}"


def why_nothing_counts(comparison: Comparison) -> str:
    """Of a comparison without a row that counts."""
    return "no figure counts" if comparison.compared else "nothing in common"


def _went_missing(row: Row) -> bool:
    return row.metric != OUTCOME and row.new is None
