"""From the instruments that were asked for to passes that do not disturb each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from joulemark.errors import ConfigurationError

INSTRUMENTS = ("timing", "power", "profiler", "counters", "attribution")
"""What ``--bench-collect`` takes in this version."""


@dataclass(frozen=True)
class Pass:
    """One run over a case with one set of instruments.

    Args:
        name: ``latency``, ``steady``, ``issue``, ``power``, ``cold``, ``graph``, ``profiler``, ``counters`` or
            ``attribution``.
        budget_s: wall time of its samples.
        min_samples: never fewer.
        target: relative half-width of the interval at which it may stop early.
    """

    name: str
    budget_s: float
    min_samples: int = 5
    target: float = 0.005


@dataclass(frozen=True)
class Plan:
    """The passes of a case in the order in which they run, the riskiest (graph capture) last."""

    passes: tuple[Pass, ...]

    @property
    def nominal_s(self) -> float:
        """Sum of the budgets, in seconds."""
        return sum(one.budget_s for one in self.passes)

    def find(self, name: str) -> Pass | None:
        """The pass of this name."""
        return next((one for one in self.passes if one.name == name), None)

    def visits(self, stretches: int) -> list[Pass]:
        """The passes in the order in which they run, the steady one as often as it has stretches.

        Its stretches are spread: the first has its place, the others follow the later passes, the last ones first.
        Nothing follows the graph's capture.

        Args:
            stretches: of the steady pass.
        """
        steady = self.find("steady")
        if steady is None or stretches < 2:
            return list(self.passes)
        place = self.passes.index(steady)
        between = [one for one in self.passes[place + 1 :] if one.name != "graph"]
        graph = [one for one in self.passes[place + 1 :] if one.name == "graph"]
        followed = between[max(0, len(between) - stretches + 1) :]
        spread = [each for one in between for each in ((one, steady) if one in followed else (one,))]
        rest = [steady] * (stretches - 1 - len(followed))
        return [*self.passes[: place + 1], *spread, *rest, *graph]

    def only(self, names: Collection[str]) -> Plan:
        """The passes of these names."""
        return Plan(tuple(one for one in self.passes if one.name in names))

    def scaled(self, seconds: float) -> Plan:
        """The same passes in about ``seconds`` instead: a quarter of their time at least, five times it at most.

        Power keeps its time as long as the others can give: a shorter energy window would be flagged. Where there is
        more time, the others get it, to spend until their figures are precise.
        """
        power = sum(one.budget_s for one in self.passes if one.name == "power")
        others = self.nominal_s - power
        if others and seconds >= power + others / 4:
            factors = {"power": 1.0}
            rest = min(5.0, (seconds - power) / others)
        else:
            factors = {}
            rest = min(1.0, max(0.25, seconds / self.nominal_s)) if self.passes else 1.0
        return Plan(tuple(replace(one, budget_s=one.budget_s * factors.get(one.name, rest)) for one in self.passes))


_FULL = {
    "latency": Pass("latency", 0.35),
    "steady": Pass("steady", 0.4),
    "issue": Pass("issue", 0.1, min_samples=9),
    "power": Pass("power", 2.4),
    "cold": Pass("cold", 0.08, min_samples=3, target=0.01),
    "graph": Pass("graph", 0.15, target=0.01),
}
_QUICK = {"latency": 0.1, "steady": 0.1, "issue": 0.025, "power": 1.3, "cold": 0.03, "graph": 0.05}
_BY_INSTRUMENT = {"timing": ("latency", "steady", "issue", "cold", "graph"), "power": ("power",)}

PROFILE = Plan((Pass("profiler", 0.5, min_samples=3),))
COUNT = Plan((Pass("counters", 0.2, min_samples=1),))
ATTRIBUTE = Plan((Pass("attribution", 20.0, min_samples=9),))
"""Its samples are windows: of nine, intervals are without their ends. No window is begun behind its budget."""
ALONE = {"profiler": PROFILE, "counters": COUNT, "attribution": ATTRIBUTE}
"""Instrument → the plan of a process of its own.

After a profiler session a process may stay slower, and a process that holds the counters must not time: nothing else
runs in it.
"""
_ALONE_QUICK = {"attribution": Plan((Pass("attribution", 8.0, min_samples=3),))}

PROFILE_OF_RANKS = Plan((Pass("profiler", 1.0, min_samples=8),))
"""Enough steps to tell a rank that comes last every time from chance."""


def plan_alone(instrument: str | None, quick: bool = False) -> Plan | None:
    """The plan of a process that is for one instrument alone; None for any other process."""
    if instrument is None:
        return None
    return _ALONE_QUICK.get(instrument, ALONE[instrument]) if quick else ALONE[instrument]


def plan_for(instruments: Collection[str], on_gpu: bool, has_power: bool, quick: bool = False) -> Plan:
    """The passes for a set of instruments on a kind of device.

    Raises:
        ConfigurationError: an instrument that does not exist.
    """
    unknown = [name for name in instruments if name not in INSTRUMENTS]
    if unknown:
        raise ConfigurationError(
            f"there is no instrument {unknown[0]!r}", f"--bench-collect takes {', '.join(INSTRUMENTS)}"
        )
    names = {name for instrument in instruments for name in _BY_INSTRUMENT.get(instrument, ())} | {"latency"}
    if not on_gpu:
        names -= {"cold", "graph", "steady", "issue"}
    if not has_power:
        names -= {"power"}
    chosen = [_FULL[name] for name in _FULL if name in names]
    if quick:
        chosen = [replace(one, budget_s=_QUICK[one.name], target=max(one.target, 0.01)) for one in chosen]
    return Plan(tuple(chosen))
