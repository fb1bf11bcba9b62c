"""A figure of a record from the samples that it sums up."""

from __future__ import annotations

from collections.abc import Sequence

from joulemark.metrics import find
from joulemark.records import Value
from joulemark.stats import summarize


def value_of(samples: Sequence[float], metric: str, tier: str | None) -> Value:
    """The median of samples, with its interval, as a figure of a record.

    Args:
        samples: in the metric's unit.
        metric: its name.
        tier: of the instrument.
    """
    summary = summarize(samples)
    return Value(summary.median, find(metric).unit, summary.interval, summary.confidence, summary.n, tier)
