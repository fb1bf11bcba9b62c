"""Runs a whole rewritten model: launch by launch, compiled around its segments, or replayed from a CUDA graph."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf, isfinite, isnan
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from joulemark.merged.plan import TOLERANCE, Setting
from joulemark.merged.questions import relative_error
from joulemark.merged.stopwatch import race

_WARM_UP = 3
_WHOLE = 5
"""A whole model may differ from another execution of it by so many times what one segment may: each has errors."""
_AS_THE_MODEL = 2.0
"""And by so many times what the model itself differs from wider numbers: two executions as good as it differ by √2."""
_EQUAL = 1.01
"""Times this close count as equal."""
_HOPEFUL = 1.3
"""Variants that take longer than the fastest by this factor at their first turn have no further one."""
_RACE_S = 0.4
"""Of a variant in the race."""


class Replayed(nn.Module):
    """A module replayed from a CUDA graph for inputs like its example; launched as it is for all others.

    Inputs are copied to the graph's own and outputs are copies: no call sees what another one left.

    Args:
        inner: what is captured.
        example: inputs on the device.
        pool: of memory that graphs share which never run at the same time; None for one of its own.
    """

    def __init__(self, inner: nn.Module, example: tuple[Tensor, ...], pool: Any = None) -> None:
        super().__init__()
        self.inner = inner
        self._signature = _signature(example)
        with torch.cuda.device(example[0].device), torch.no_grad():
            self._inputs = tuple(one.clone(memory_format=torch.preserve_format) for one in example)
            side = _capturing_stream(example[0].device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    inner(*self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self._graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool, side, capture_error_mode="thread_local"):
                self._outputs = inner(*self._inputs)

    def forward(self, *inputs: Tensor) -> Any:
        """The module's output."""
        foreign = self._graph is None or _signature(inputs) != self._signature
        if foreign or torch.cuda.is_current_stream_capturing():
            return self.inner(*inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return pytree.tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, self._outputs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Replayed:
        """Weights move: the graph, which knows their old places, is dropped."""
        self._graph, self._inputs, self._outputs = None, (), None
        moved: Replayed = super()._apply(fn, recurse)
        return moved


@cache
def _capturing_stream(device: torch.device) -> Any:
    """One for all graphs of a device: what a pool has free is given to the stream alone that it was made for."""
    return torch.cuda.Stream(device)


def _signature(inputs: tuple[Tensor, ...]) -> tuple[object, ...]:
    return tuple((one.shape, one.dtype, one.device) for one in inputs)


@dataclass
class Referee:
    """Measures whole variants of a model against each other and keeps the fastest that is right.

    Args:
        setting: device and deadline.
        example: inputs.
        expected: the model's own output.
        widened: its output in wider numbers, for models that amplify rounding errors; None where there is none.
        times: variant → seconds per call as a user calls it; host included.
        problems: variant → why it is out.
        cost_s: variant → seconds until it could be called.
    """

    setting: Setting
    example: tuple[Tensor, ...]
    expected: Any
    widened: Callable[[], Any] | None = None
    times: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    cost_s: dict[str, float] = field(default_factory=dict)
    _modules: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def pool(self) -> Any:
        """Memory that the graphs of all variants share: of a large model it holds one set of activations, not five."""
        return torch.cuda.graph_pool_handle()

    def try_(self, name: str, build: Callable[[], nn.Module]) -> nn.Module | None:
        """Build a variant and call it once; None, with the reason kept, where that fails or its output is wrong."""
        begin = time.monotonic()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Compilers warn of their own deprecated calls and of what else could be set: no reason to lose a
                # variant where a user's filters turn warnings into errors.
                warnings.simplefilter("ignore")
                module = build()
                out = module(*self.example)
                self._check(out)
        except Exception as error:  # a compiler raises anything; the variant is one of several
            said = str(error).strip().splitlines()
            self.problems[name] = f"{type(error).__name__}: {said[0] if said else ''}"[:300]
            return None
        finally:
            self.cost_s[name] = time.monotonic() - begin
        self._modules[name] = module
        return module

    def _check(self, out: Any) -> None:
        error = _worst_error(out, self.expected)
        if error <= self._limit or error <= self.allowed:
            return
        raise ArithmeticError(f"its output is wrong: relative error {error:.2g}, {self.allowed:.2g} is allowed")

    @property
    def _limit(self) -> float:
        return 1e-9 if self.setting.form is None else _WHOLE * TOLERANCE[self.setting.form]

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

    def judge(self) -> str:
        """Time the variants in turns; the name of the fastest, or of one as good that needs no compiler.

        Raises:
            RuntimeError: no variant works.
        """
        if not self._modules:
            raise RuntimeError(f"no variant of the model works: {self.problems}")
        if len(self._modules) > 1:
            self.times.update(_race_calls(self._modules, self.example, self.setting.device))
        best = min(self.times.values(), default=0.0)
        good = [name for name in self._modules if self.times.get(name, 0.0) <= _EQUAL * best]
        # What no compiler has to make again is ready sooner next time.
        return min(good, key=lambda name: ("compiled" in name, self.times.get(name, 0.0)))

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


def _race_calls(
    modules: Mapping[str, nn.Module], example: tuple[Tensor, ...], device: torch.device, rounds: int = 9
) -> dict[str, float]:
    """Median seconds per call, calls back to back as a user's loop has them, in turns.

    The slow ones leave after a turn; the longer a call, the fewer there are.
    """
    with torch.no_grad():
        if device.type != "cuda":
            return race({name: _call(one, example) for name, one in modules.items()}, device, rounds)
        first = {name: _back_to_back(module, example, 2) for name, module in modules.items()}
        best = min(first.values())
        times: dict[str, list[float]] = {name: [] for name, one in first.items() if one <= _HOPEFUL * best}
        calls = max(1, min(4, round(_RACE_S / rounds / best)))
        for _ in range(max(3, min(rounds, round(_RACE_S / calls / best)))):
            for name, found in times.items():
                found.append(_back_to_back(modules[name], example, calls))
    return first | {name: median(found) for name, found in times.items()}


def _back_to_back(module: nn.Module, example: tuple[Tensor, ...], calls: int) -> float:
    """Seconds per call on the host's clock from an idle device to an idle device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        module(*example)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def _call(module: nn.Module, example: tuple[Tensor, ...]) -> Callable[[], object]:
    return lambda: module(*example)
