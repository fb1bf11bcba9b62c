"""Does a host that changes its speed spoil the comparison of issue times over batches? Simulated, two designs.

Run: ``python tests/oracle/issue_turns.py [--draws 200]``. The host switches between two speeds; how much slower the
slow one is differs from stay to stay. Steps scatter around the host's speed, and reference work feels it less or more
than they do. In the sweep's design each batch has 0.1 s of its own, 2.5 s behind the one before, and the reference
timed beside it; in turns every batch has a burst in each of 24 rounds. Printed per mean stay: how often all batches are
within ±10 % of their median, where issuing takes the same time for all, and where it takes 15 % longer for the largest.

The figures are those of an H200's host (``results/nvidia-h200/sweep-20261129T190033Z-c4e7f3.jsonl``, eager): device
times and issue times of two models, slow stays by the factors that their issue times had there (ResNet-50 1.5 to 1.9, a
BERT-base-sized encoder 1.6 to 2.1), single steps within 4.5 % of the host's speed, stays of some 50 ms to some seconds,
slow for two fifths of the time. Nothing was recorded there of the reference work.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from joulemark.measure.issue_turns import ROUNDS
from joulemark.tandem.document import EVEN
from joulemark.tandem.turns import levels, within_rounds

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
STAYS_S = ((0.06, 0.04), (0.25, 0.17), (1.0, 0.7), (4.0, 3.0), (0.7, 1.4))
"""Mean stays at the fast and at the slow speed."""
SCATTER, REFERENCE_SCATTER, REFERENCE_S, FENCE_S = 0.045, 0.06, 0.25e-3, 0.2e-3
FELT = (0.6, 1.1)
"""By which power of the steps' slow-down the reference work is slowed: LeNet-5's steps were by 1.25 to 1.6 there."""
CELL_S, BETWEEN_S, BURST, LONGEST_S = 0.1, 2.5, 3, 60.0
DRIFT = 0.15
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """A model: issue time in s, device time in s of each batch, and how much slower slow stays are."""

    issue_s: float
    device_s: tuple[float, ...]
    slower: tuple[float, float]


RESNET = Model(4e-3, (0.76e-3, 0.88e-3, 1.06e-3, 1.46e-3, 2.39e-3, 4.3e-3, 8.25e-3, 16e-3), (1.5, 1.9))
BERT = Model(3e-3, (0.48e-3, 0.57e-3, 0.72e-3, 1.1e-3, 1.9e-3, 3.5e-3, 6.7e-3, 13.6e-3), (1.6, 2.1))


@dataclass
class Host:
    """A host at work: ``now`` goes on as it issues and waits."""

    slower: tuple[float, float]
    stays_s: tuple[float, float]
    rng: np.random.Generator
    now: float = 0.0
    _ends: list[float] = field(default_factory=list)
    _speeds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        slow, end = bool(self.rng.random() < self.stays_s[1] / sum(self.stays_s)), 0.0
        while end < LONGEST_S:
            end += float(self.rng.exponential(self.stays_s[slow]))
            self._ends.append(end)
            self._speeds.append(float(np.log(self.rng.uniform(*self.slower))) if slow else 0.0)
            slow = not slow

    def issues(self, seconds: float, scatter: float = SCATTER, felt: float = 1.0) -> float:
        """Issue work that takes so long at the fast speed; what it took."""
        speed = self._speeds[int(np.searchsorted(self._ends, self.now, "right"))]
        took = seconds * float(np.exp(felt * speed + scatter * self.rng.standard_normal()))
        self.now += took
        return took

    def burst(self, issue_s: float, device_s: float) -> list[float]:
        """One step and three that are timed; then the device ends them."""
        begun = self.now
        took = [self.issues(issue_s) for _ in range(1 + BURST)]
        self.now = max(self.now, begun + (1 + BURST) * device_s)
        return took[1:]


def in_turns(model: Model, grows: Sequence[float], stays_s: tuple[float, float], seed: int) -> Floats:
    """Deviations of the batches that were issued in turns."""
    host, order = Host(model.slower, stays_s, np.random.default_rng(seed)), random.Random(seed)
    times = np.zeros((ROUNDS, len(BATCHES)))
    for number in range(ROUNDS):
        for place in order.sample(range(len(BATCHES)), len(BATCHES)):
            times[number, place] = sorted(host.burst(model.issue_s * grows[place], model.device_s[place]))[BURST // 2]
            host.now += FENCE_S
    return levels(within_rounds(times))


def one_by_one(model: Model, grows: Sequence[float], stays_s: tuple[float, float], seed: int) -> Floats:
    """Deviations of the batches that had a time of their own, at one speed by the reference timed beside each burst."""
    rng = np.random.default_rng(seed)
    host, felt = Host(model.slower, stays_s, rng), float(rng.uniform(*FELT))
    levels = []
    for device_s, more in zip(model.device_s, grows, strict=True):
        host.now += BETWEEN_S
        end, ratios = host.now + CELL_S, []
        while host.now < end or len(ratios) < 9:
            before = host.issues(REFERENCE_S, REFERENCE_SCATTER, felt)
            took = host.burst(model.issue_s * more, device_s)
            beside = (before + host.issues(REFERENCE_S, REFERENCE_SCATTER, felt)) / 2
            ratios += [one / beside for one in took]
        levels.append(float(np.median(ratios)))
    return np.array(levels) / float(np.median(levels)) - 1


def within(deviations: Floats) -> bool:
    """Whether all batches are even."""
    return bool(np.abs(deviations).max() <= EVEN)


def share(design: object, model: Model, stays_s: tuple[float, float], draws: int, drift: float = 0.0) -> float:
    """How often a design finds all batches even, where the largest takes longer by so much."""
    grows = [1.0] * (len(BATCHES) - 1) + [1.0 + drift]
    return sum(within(design(model, grows, stays_s, seed)) for seed in range(draws)) / draws  # type: ignore[operator]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    draws = parser.parse_args().draws
    print("stays fast, slow (s)   model    found even: one by one, in turns   with 15 % more: one by one, in turns")
    for stays_s in STAYS_S:
        for name, model in (("ResNet", RESNET), ("BERT", BERT)):
            told = [share(one, model, stays_s, draws, more) for more in (0.0, DRIFT) for one in (one_by_one, in_turns)]
            cells = "   ".join(f"{one:6.1%}" for one in told)
            print(f"{stays_s[0]:5.2f} {stays_s[1]:5.2f}          {name:7}  {cells}", flush=True)


if __name__ == "__main__":
    main()
