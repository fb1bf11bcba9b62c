"""From which batch on the device works as long as the host needs to issue its work: the crossover, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from joulemark.metrics import batch_text
from joulemark.records import Finding, Json

Verdict = Literal["crossover", "below", "above", "too_few_batches"]
Floats = npt.NDArray[np.float64]

ASSUMED_SPREAD = 0.02
"""Relative standard deviation of a time that was measured once."""
_FARTHEST_LOG = 300.0
"""Of a drawn time in s: Student's tails reach beyond what a number holds where the host's levels scatter wildly."""
_FEWEST_FOR_SCATTER = 4
"""Batches that leave two degrees of freedom beside the straight line."""


@dataclass(frozen=True)
class Point:
    """Device time and host issue time at one batch size, in s, as repeated steps gave them.

    Args:
        batch: samples per step.
        device_s, host_s: at least one each.
    """

    batch: float
    device_s: Sequence[float]
    host_s: Sequence[float]


@dataclass(frozen=True)
class Crossover:
    """The smallest batch at which the device's time per step reaches the host's issue time.

    Args:
        verdict: ``crossover``; ``below`` when the smallest batch is past it; ``above`` when the largest does not
            reach it; ``too_few_batches`` with fewer than two.
        batch: interpolated between measured batches; None unless the verdict is ``crossover``.
        interval: (lo, hi) of it; None without one.
        open_below, open_above: the interval ends at the smallest (largest) batch because nothing lies beyond it.
        confidence: of the interval.
        support: share of the bootstrap draws that come to the same verdict; None without draws.
        smallest_batch, largest_batch: that were measured; None without any.
        findings: what the reader must know.
    """

    verdict: Verdict
    batch: float | None = None
    interval: tuple[float, float] | None = None
    open_below: bool = False
    open_above: bool = False
    confidence: float = 0.95
    support: float | None = None
    smallest_batch: float | None = None
    largest_batch: float | None = None
    findings: tuple[Finding, ...] = ()

    def describe(self) -> str:
        """The verdict in words: ``48 [45, 52]``, ``not reached (above 256)``."""
        if self.verdict == "too_few_batches":
            return "not known (fewer than two batch sizes)"
        if self.verdict == "below":
            return f"at or below {batch_text(self.smallest_batch)}"
        if self.verdict == "above":
            return f"not reached (above {batch_text(self.largest_batch)})"
        lo, hi = self.interval or (None, None)
        below, above = "≤ " if self.open_below else "", "≥ " if self.open_above else ""
        return f"{batch_text(self.batch)} [{below}{batch_text(lo)}, {above}{batch_text(hi)}]"

    def to_json(self) -> dict[str, Json]:
        """Strict JSON; batch sizes in samples per step."""
        interval = None if self.interval is None else list(self.interval)
        findings = [one.to_json() for one in self.findings]
        return {**asdict(self), "interval": interval, "findings": findings, "text": self.describe()}


def find_crossover(points: Sequence[Point], *, confidence: float = 0.95, draws: int = 2000, seed: int = 0) -> Crossover:
    """Where device time and host issue time per step cross over the batch size.

    The definition is that of Delestrac et al. (*Demystifying the TensorFlow Eager Execution of Deep Learning
    Inference on a CPU-GPU Tandem*, DSD 2022): kernels hide the framework from the batch on at which they take as
    long as the host needs to issue them. Medians of the repeated steps are interpolated, log time over log batch.

    The interval is of percentiles of a bootstrap (Efron and Tibshirani, *An Introduction to the Bootstrap*, chapter
    13) with three sources of doubt: the steps are drawn again; the host's level at each batch moves by its scatter
    around a straight line (issuing hardly depends on the batch, so what it scatters from cell to cell is noise,
    with Student's correction for its few degrees of freedom); and each draw is interpolated both ways, log time over
    log batch and time over batch, of which the farther counts.

    Args:
        points: in any order, one per batch size.
        confidence: of the interval.
        draws: of the bootstrap.
        seed: of the bootstrap: the same points always give the same answer.

    Raises:
        ValueError: a batch size stands twice or is not positive, or a time is not a positive number.
    """
    usable = _checked(points)
    smallest, largest = (usable[0].batch, usable[-1].batch) if usable else (None, None)
    if len(usable) < 2:
        return Crossover("too_few_batches", confidence=confidence, smallest_batch=smallest, largest_batch=largest)
    batch = np.array([one.batch for one in usable], dtype=float)
    device = np.log([[np.median(one.device_s) for one in usable]])
    host = np.log([[np.median(one.host_s) for one in usable]])
    estimate = float(_crossings(batch, device, host)[0])
    near, far = _drawn(usable, batch, host[0], draws, seed)
    verdict = _verdict(estimate)
    agree = _agreement(near, verdict)
    found = Crossover(
        verdict,
        confidence=confidence,
        support=agree,
        smallest_batch=smallest,
        largest_batch=largest,
        findings=_again(batch, device[0] - host[0]),
    )
    if verdict != "crossover":
        return found
    lo, hi = _interval(near, far, confidence)
    interval = (float(min(max(lo, batch[0]), estimate)), float(max(min(hi, batch[-1]), estimate)))
    return replace(
        found, batch=estimate, interval=interval, open_below=bool(lo < batch[0]), open_above=bool(hi > batch[-1])
    )


def _checked(points: Sequence[Point]) -> list[Point]:
    batches = [one.batch for one in points]
    if len(set(batches)) < len(batches) or any(not 0 < batch < math.inf for batch in batches):
        raise ValueError(f"batch sizes must be positive and different, got {sorted(batches)}")
    for one in points:
        for times in (one.device_s, one.host_s):
            if not len(times) or not all(0 < value < math.inf for value in times):
                raise ValueError(f"batch {one.batch:g} needs positive times of the device and of the host")
    return sorted(points, key=lambda one: one.batch)


def _verdict(batch: float) -> Verdict:
    return "below" if batch == 0 else "above" if math.isinf(batch) else "crossover"


def _agreement(batches: Floats, verdict: Verdict) -> float:
    same = {"below": batches == 0, "above": np.isinf(batches), "crossover": (batches > 0) & np.isfinite(batches)}
    return float(same[verdict].mean())


def _crossings(batch: Floats, device: Floats, host: Floats) -> Floats:
    """First crossing of each row, log time over log batch; 0 where the smallest batch is past it, +inf without any.

    Args:
        batch: ascending, shape (n,).
        device, host: log times, shape (rows, n).
    """
    return np.exp(_first_zero(np.log(batch), device - host, -math.inf))


def _linear_crossings(batch: Floats, device: Floats, host: Floats) -> Floats:
    """The same with time over batch: exact for a device time of a constant and a share per sample."""
    return _first_zero(batch, np.exp(device) - np.exp(host), 0.0)


def _first_zero(x: Floats, gap: Floats, at_first: float) -> Floats:
    """Where each row first reaches zero from below; ``at_first`` where it begins there, +inf where it never does."""
    reached = gap >= 0
    after = np.argmax(reached, axis=1)
    before = np.maximum(after - 1, 0)
    rows = np.arange(gap.shape[0])
    low, high = gap[rows, before], gap[rows, after]
    share = -low / np.where(high > low, high - low, 1.0)
    crossing = x[before] + np.clip(share, 0, 1) * (x[after] - x[before])
    found: Floats = np.where(reached.any(axis=1), np.where(after == 0, at_first, crossing), math.inf)
    return found


def _drawn(points: Sequence[Point], batch: Floats, host: Floats, draws: int, seed: int) -> tuple[Floats, Floats]:
    """Crossings of the bootstrap draws, the nearer and the farther of both interpolations."""
    rng = np.random.default_rng(seed)
    devices = np.stack([_medians(one.device_s, draws, rng) for one in points], axis=1)
    hosts = np.stack([_medians(one.host_s, draws, rng) for one in points], axis=1)
    deviation, freedom = _scatter(batch, host)
    if freedom:
        student = np.sqrt(freedom / rng.chisquare(freedom, (draws, 1)))
        moved = hosts + deviation * student * rng.standard_normal(hosts.shape)
        hosts = np.clip(moved, -_FARTHEST_LOG, _FARTHEST_LOG)
    both = np.stack([_crossings(batch, devices, hosts), _linear_crossings(batch, devices, hosts)])
    return both.min(axis=0), both.max(axis=0)


def _medians(samples: Sequence[float], draws: int, rng: np.random.Generator) -> Floats:
    """Log medians of resampled steps; one step alone has the assumed spread.

    A median of n draws with replacement is drawn at once: uniform order statistics are Beta-distributed (David and
    Nagaraja, *Order Statistics*, section 2.3), and each names the sample in whose n-th of the unit interval it falls.
    Drawing n of n shows the spread of the median too small by (n-1)/n.
    """
    logs = np.sort(np.log(np.asarray(samples, dtype=float)))
    n = logs.size
    if n == 1:
        assumed: Floats = logs + ASSUMED_SPREAD * rng.standard_normal(draws)
        return assumed
    rank = (n + 1) // 2
    lower = rng.beta(rank, n - rank + 1, draws)
    upper = lower if n % 2 else 1 - (1 - lower) * rng.random(draws) ** (1 / (n - rank))
    below, above = (logs[np.minimum((one * n).astype(np.intp), n - 1)] for one in (lower, upper))
    middle = float(np.median(logs))
    drawn: Floats = middle + ((below + above) / 2 - middle) * math.sqrt(n / (n - 1))
    return drawn


def _scatter(batch: Floats, host: Floats) -> tuple[float, int]:
    """Standard deviation of log host levels around a straight line in log batch, and its degrees of freedom."""
    if batch.size < _FEWEST_FOR_SCATTER:
        return 0.0, 0
    line = np.stack([np.ones_like(batch), np.log(batch)], axis=1)
    rest = host - line @ np.linalg.lstsq(line, host, rcond=None)[0]
    freedom = batch.size - 2
    return math.sqrt(float(rest @ rest) / freedom), freedom


def _interval(near: Floats, far: Floats, confidence: float) -> tuple[float, float]:
    """Percentiles of what may be infinite: order statistics, no interpolation between them."""
    lo = np.quantile(near, (1 - confidence) / 2, method="lower")
    hi = np.quantile(far, (1 + confidence) / 2, method="higher")
    return float(lo), float(hi)


def _again(batch: Floats, gap: Floats) -> tuple[Finding, ...]:
    """A host that takes longer than the device again past the crossover."""
    first = int(np.argmax(gap >= 0))
    later = [batch[index] for index in range(first + 1, batch.size) if gap[first] >= 0 and gap[index] < 0]
    if not later:
        return ()
    listed = ", ".join(batch_text(float(one)) for one in later)
    message = f"past the crossover the host takes longer than the device again at batch {listed}"
    return (Finding("crosses_again", message, "measure again: the host's time varies between the batches"),)
