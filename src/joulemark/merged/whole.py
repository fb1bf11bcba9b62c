"""Measures whole variants of a model against each other and keeps those that are fastest, called and captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from joulemark.merged.kernels.description import Format
from joulemark.merged.memory import says_out_of_memory
from joulemark.merged.questions import relative_error
from joulemark.merged.replay import Replayed
from joulemark.merged.setting import TOLERANCE, Setting
from joulemark.merged.spent import Spent
from joulemark.merged.stopwatch import race_calls, race_replays
from joulemark.merged.trying import told

_WHOLE = 5
"""A whole model may differ from another execution of it by so many times what one segment may: each has errors."""
_AS_THE_MODEL = 2.0
"""And by so many times what the model itself differs from wider numbers: two executions as good as it differ by √2."""
_EQUAL = 1.01
"""Times this close count as equal."""


@dataclass(frozen=True)
class Verdict:
    """Which variants run.

    Args:
        calls: the fastest as a user calls it.
        captured: whose launches are the fastest on the device, for who captures them into a CUDA graph; None where no
            graph was measured.
    """

    calls: str
    captured: str | None = None


@dataclass
class Referee:
    """Measures whole variants of a model against each other and keeps the fastest that is right.

    Args:
        setting: device and deadline.
        example: inputs that no variant changes.
        expected: the model's own output; None where what runs was right with these weights before: not checked again.
        widened: its output in wider numbers, for models that amplify rounding errors; None where there is none.
        narrowest: format of the narrowest numbers that the model holds: its input may have wider ones, of no format.
        times: variant → seconds per call as a user calls it; host included.
        device_times: graph → seconds of its replay on the device, without copies of inputs and outputs.
        problems: variant → why it is out.
        wrong: variants whose output was wrong on the model's own values.
        short: variants for which memory ran out.
        spent: where seconds of first calls are counted, with the check of what they give.
    """

    setting: Setting
    example: tuple[Any, ...]
    expected: Any
    widened: Callable[[], Any] | None = None
    narrowest: Format | None = None
    times: dict[str, float] = field(default_factory=dict)
    device_times: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)
    spent: Spent = field(default_factory=Spent)
    _modules: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def pool(self) -> Any:
        """Memory that the graphs of all variants share: of a large model it holds one set of activations, not five."""
        return torch.cuda.graph_pool_handle()

    @cached_property
    def forked_pool(self) -> Any:
        """Memory of the graphs with several streams: a pool keeps what each stream has had, whoever else uses it."""
        return torch.cuda.graph_pool_handle()

    def try_(self, name: str, build: Callable[[], nn.Module]) -> nn.Module | None:
        """Build a variant and call it once; None, with the reason kept, where that fails or its output is wrong."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Compilers warn of their own deprecated calls and of what else could be set: no reason to lose a
                # variant where a user's filters turn warnings into errors.
                warnings.simplefilter("ignore")
                module = build()
                with self.spent.on(f"first call of {name}"):
                    self._check(name, module(*self.example))
        except Exception as error:  # a compiler raises anything; the variant is one of several
            self.problems[name] = told(error)[:300]
            if says_out_of_memory(str(error)):
                self.short.add(name)
            return None
        self._modules[name] = module
        return module

    def _check(self, name: str, out: Any) -> None:
        if self.expected is None:
            return
        error = _worst_error(out, self.expected)
        if error <= self._limit or error <= self.allowed:
            return
        self.wrong.add(name)
        raise ArithmeticError(f"its output is wrong: relative error {error:.2g}, {self.allowed:.2g} is allowed")

    @property
    def of_values(self) -> bool:
        """Whether values decided which variants are right: with others of the same shapes it may be others."""
        return bool(self.wrong) or not all(
            bool(one.isfinite().all()) for one in pytree.tree_leaves(self.expected) if isinstance(one, Tensor)
        )

    @property
    def _limit(self) -> float:
        form = self.setting.form or self.narrowest
        return 1e-9 if form is None else _WHOLE * TOLERANCE[form]

    @cached_property
    def allowed(self) -> float:
        """How far a variant may be from the model's own output; wider numbers are asked only when needed."""
        if self.widened is None:
            return self._limit
        try:
            own = _worst_error(self.expected, self.widened())
        except Exception:  # not every model runs in another format, nor has room for it
            return self._limit
        return max(self._limit, _AS_THE_MODEL * own) if isfinite(own) else self._limit

    def judge(self) -> Verdict:
        """Time the variants in turns; the fastest, or of those as good one that needs no compiler.

        All graphs cost the host the same, so that their calls differ by its noise alone: the one that is fastest on the
        device stands for them among the variants that are called without one.

        Raises:
            RuntimeError: no variant works.
        """
        if not self._modules:
            raise RuntimeError(f"no variant of the model works: {self.problems}")
        graphs = {name: one for name, one in self._modules.items() if isinstance(one, Replayed)}
        self.device_times.update(race_replays({name: one.replay for name, one in graphs.items()}, self.setting.device))
        captured = _fastest(self.device_times) if graphs else None
        calls = {name: one for name, one in self._modules.items() if name == captured or name not in graphs}
        if len(calls) == 1:
            return Verdict(next(iter(calls)), captured)
        with torch.no_grad():
            asked = {name: _call(one, self.example) for name, one in calls.items()}
            self.times.update(race_calls(asked, self.setting.device))
        return Verdict(_fastest(self.times), captured)

    def known(self, name: str) -> nn.Module | None:
        """A variant that works, or None."""
        return self._modules.get(name)

    def module(self, name: str) -> nn.Module:
        """A variant that works.

        Raises:
            KeyError: it does not.
        """
        return self._modules[name]


def _worst_error(out: Any, expected: Any) -> float:
    """The largest relative error among the tensors of an output; NaN is infinite, but where the model has it too."""
    errors = [0.0]
    for one, other in zip(pytree.tree_leaves(out), pytree.tree_leaves(expected), strict=True):
        if isinstance(other, Tensor) and other.is_floating_point() and not other.norm().isnan():
            error = relative_error(one, other)
            errors.append(inf if isnan(error) else error)
    return max(errors)


def _fastest(times: Mapping[str, float]) -> str:
    """The least of times, or one as good.

    Rather of what no compiler has to make again, it is ready sooner next time; then of what forks into no branches, it
    holds less memory.
    """
    least = min(times.values())
    good = [name for name, seconds in times.items() if seconds <= _EQUAL * least]
    return min(good, key=lambda name: ("compiled" in name, "branches" in name, times[name]))


def _call(module: nn.Module, example: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: module(*example)
