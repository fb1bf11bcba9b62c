"""A measured workload, and what the model says of it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from joulemark.records import Amount, Json, Positive, Share

if TYPE_CHECKING:
    from joulemark.energy.counters import Counts
    from joulemark.energy.model import Prediction
    from joulemark.energy.split import Split


@dataclass(frozen=True)
class Measured:
    """A workload as measured over one window.

    Args:
        workload: its name.
        window_s: length of the window.
        measured_j: energy over it.
        counters: canonical name → total over it.
        dtype, batch_size, kind: of the workload; ``kind`` is ``network`` for training and inference of a model.
        items: processed in the window; None where nothing is counted.
        sm_clock_hz, max_sm_clock_hz: median and highest SM clock.
        capped: whether the power limit held the clocks down, at ``power_limit_w``.
        core_share: share of its time that follows the SM clock; None takes what HBM leaves of it.
        mix: shares that are known, see :meth:`joulemark.energy.counters.Mix.from_json`.
        activity: of its operands, where known.
        memory_bits: toggling of what it holds in memory, where it was looked at (:mod:`joulemark.energy.bits`): 0
            where no bit differs from sector to sector, 2 where all do.
        idle_w: power of the idle board just before, where it was measured: its static power.
    """

    workload: str
    window_s: Amount
    measured_j: Amount
    counters: Mapping[str, Amount]
    dtype: str | None = None
    batch_size: Positive | None = None
    kind: str | None = None
    items: Amount | None = None
    sm_clock_hz: Amount | None = None
    max_sm_clock_hz: Amount | None = None
    capped: bool = False
    power_limit_w: Amount | None = None
    core_share: Share | None = None
    mix: Mapping[str, Json] = field(default_factory=dict)
    activity: Amount | None = None
    memory_bits: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    idle_w: Amount | None = None

    @property
    def clock(self) -> float:
        """SM clock over its highest; 1 where it was not read."""
        if not self.sm_clock_hz or not self.max_sm_clock_hz:
            return 1.0
        return min(self.sm_clock_hz / self.max_sm_clock_hz, 1.0)


@dataclass(frozen=True)
class Outcome:
    """A workload with what the model says of it.

    Args:
        measured: as measured.
        prediction: of the model; under the limit for a capped one.
        split: of the measured energy.
        counts: that the counters gave.
        baselines: simple model → predicted energy in J.
        reason: why there is no prediction; the others are None then.
    """

    measured: Measured
    prediction: Prediction | None
    split: Split | None
    counts: Counts | None
    baselines: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def error(self) -> float | None:
        """Signed relative error of energy: per item for a capped workload, whose length is predicted too."""
        if self.prediction is None:
            return None
        return self.prediction.energy_j / self.measured.measured_j - 1

    @property
    def dynamic_error(self) -> float | None:
        """Signed relative error of dynamic energy; None for a capped workload."""
        if self.prediction is None or self.measured.capped:
            return None
        static = self.prediction.energy_j - self.prediction.dynamic_j
        measured = self.measured.measured_j - static
        return self.prediction.dynamic_j / measured - 1 if measured > 0 else None

    def to_json(self) -> dict[str, Json]:
        one, seen = self.prediction, self.measured
        static = None if one is None else one.energy_j - one.dynamic_j
        return {
            "workload": seen.workload, "kind": seen.kind, "dtype": seen.dtype, "batch_size": seen.batch_size,
            "items": seen.items, "window_s": seen.window_s, "capped": seen.capped,
            "power_limit_w": seen.power_limit_w, "core_share": seen.core_share,
            "sm_clock_hz": seen.sm_clock_hz, "max_sm_clock_hz": seen.max_sm_clock_hz,
            "mix": dict(seen.mix), "activity": seen.activity,
            "memory_bits": seen.memory_bits, "idle_w": seen.idle_w, "counters": dict(seen.counters),
            "measured_j": seen.measured_j,
            "predicted_j": None if one is None else one.energy_j,
            "interval": None if one is None else list(one.interval_j),
            "dynamic_measured_j": None if static is None or seen.capped else seen.measured_j - static,
            "dynamic_predicted_j": None if one is None or seen.capped else one.dynamic_j,
            "predicted_clock": None if one is None else one.clock,
            "error": self.error, "dynamic_error": self.dynamic_error,
            "baselines_j": dict(self.baselines),
            "split": None if self.split is None else self.split.to_json(),
            "notes": {"prediction": self.reason} if self.reason else {},
            "assumptions": [] if self.counts is None else list(self.counts.notes),
        }  # fmt: skip
