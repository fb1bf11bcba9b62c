"""Ways of doing one thing in a graph, checked against torch's own and timed in turns; the times are kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from joulemark.merged import cache
from joulemark.merged.memory import says_out_of_memory
from joulemark.merged.questions import ends, relative_error
from joulemark.merged.seams import FORMATS
from joulemark.merged.setting import TOLERANCE, Setting
from joulemark.merged.stopwatch import race
from joulemark.merged.trying import told

Call = Callable[[], Tensor | tuple[Tensor, ...]]
_NO_MEMORY = "out of memory when it was measured"
_KEPT = dict[str, tuple[float | None, str | None]]
"""What the disk keeps: way → seconds and problem."""


@dataclass(frozen=True)
class Settled:
    """What is known of the ways.

    Args:
        first: the one that needs no check.
        best: the one to take.
        times: → measured seconds; empty where nothing was measured.
        problems: → why it is out.
    """

    first: str
    best: str
    times: dict[str, float]
    problems: dict[str, str]

    @property
    def why(self) -> str:
        """In one clause, why the best one is it."""
        others = {name: seconds for name, seconds in self.times.items() if name != self.best}
        if others:
            name = min(others, key=others.__getitem__)
            return f"{name} takes {others[name] * 1e3:.4g} ms"
        return next(iter(self.problems.values()), "not measured")


def settle(what: tuple[object, ...], ways: Mapping[str, Call], setting: Setting, least: float = 1.0) -> Settled:
    """Which way to take: the fastest that is right; where nothing is measured, the first other one that is right.

    Args:
        what: they depend on; texts of this package, device and versions are added.
        ways: calls by name, torch's own first.
        setting: of which a way has to keep the tolerance.
        least: share of the first one's time that another one may take at most.
    """
    first = next(iter(ways))
    key = cache.key_of("alternatives", cache.code_key(), cache.device_key(setting.device), setting.form, *what)
    kept = cache.read("alternatives", key, _KEPT) if setting.measured else None
    if kept is None or set(kept) != set(ways):
        if setting.measured and not setting.in_time:
            return Settled(first, first, {}, {"time": "no time to measure it"})
        kept = _tried(ways, setting)
        if setting.measured and _NO_MEMORY not in [why for _, why in kept.values()]:
            cache.write("alternatives", key, kept)
    times = {name: seconds for name, (seconds, _) in kept.items() if seconds is not None}
    problems = {name: why for name, (_, why) in kept.items() if why is not None}
    right = [name for name in ways if name not in problems]
    if setting.measured:
        good = {name: seconds * (1.0 if name == first else 1.0 / least) for name, seconds in times.items()}
        return Settled(first, min(good, key=good.__getitem__, default=first), times, problems)
    return Settled(first, next((name for name in right if name != first), first), {}, problems)


def _tried(ways: Mapping[str, Call], setting: Setting) -> _KEPT:
    """Run each way once, and what is right in turns."""
    first = next(iter(ways))
    problems: dict[str, str] = {}
    times: dict[str, float] = {}
    try:
        with torch.no_grad():
            expected = [ends(one).clone() for one in _all_of(ways[first]())]
            for name, call in ways.items():
                why = None if name == first else _problem(call, expected, setting)
                if why is not None:
                    problems[name] = why
            if setting.measured:
                times = race({name: call for name, call in ways.items() if name not in problems}, setting.device)
    except RuntimeError as error:
        if not says_out_of_memory(str(error)):
            raise
        # Beside what else the process holds.
        problems = {name: _NO_MEMORY for name in ways if name != first}
    return {name: (times.get(name), problems.get(name)) for name in ways}


def _all_of(given: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given,) if isinstance(given, Tensor) else given


def _problem(call: Call, expected: List[Tensor], setting: Setting) -> str | None:
    """What is wrong with a way; None where it is right."""
    limit = TOLERANCE[setting.form] if setting.form is not None else 1e-9
    try:
        made = [ends(one) for one in _all_of(call())]
        errors = [relative_error(one, wanted) for one, wanted in zip(made, expected, strict=True)]
    except Exception as error:  # a compiler of kernels raises anything; the way is one of several
        if says_out_of_memory(str(error)):
            raise
        return told(error)[:200]
    wrong = [one for one in errors if not one <= limit]
    return f"its output is wrong: relative error {wrong[0]:.2g}, {limit:g} is allowed" if wrong else None


def like(node: fx.Node, device: torch.device) -> Tensor:
    """A random tensor of a node's shape and format, images channels-last."""
    meta = node.meta["tensor_meta"]
    made = torch.randn(tuple(meta.shape), device=device).to(meta.dtype)
    return made.contiguous(memory_format=FORMATS.get(made.dim(), torch.contiguous_format))
