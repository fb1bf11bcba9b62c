"""What ``merge`` gives: a module that says what became of each part; and the model as it is, with the reason."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence as List
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import fx, nn

from joulemark.merged.graph import trace
from joulemark.merged.in_place import NotMergeable
from joulemark.merged.paths import cudnn_tuning
from joulemark.merged.sequence import Shape
from joulemark.merged.trying import told


@dataclass(frozen=True)
class Decision:
    """What became of one segment or convolution.

    Args:
        name: as the model calls it.
        how: ``padded``, ``memoized``, ``rows``, ``unmerged`` on a library's path, ``plain`` for what was left, or
            ``refused`` for a kernel that was wrong or failed.
        why: in one clause.
        edge: of the bricks; None where there are none.
        path: what executes it (:mod:`joulemark.merged.paths`); None for torch's own operators.
        predicted_s, measured_s: of one call; None where not known.
        apart_s: its layers one by one.
    """

    name: str
    how: str
    why: str
    edge: Shape | None = None
    path: str | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    apart_s: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.told()}"

    def told(self) -> str:
        """The same without its name."""
        bricks = "" if self.edge is None else f", bricks of {'×'.join(str(e) for e in self.edge)}"
        path = "" if self.path is None else f" by {self.path}"
        times = [
            f"{word} {seconds * 1e3:.4g} ms"
            for word, seconds in (
                ("predicted", self.predicted_s),
                ("measured", self.measured_s),
                ("its layers one by one", self.apart_s),
            )
            if seconds is not None
        ]
        known = self.measured_s if self.measured_s is not None else self.predicted_s
        if known and self.apart_s is not None:
            times.append(f"gain {self.apart_s / known:.2f}×")
        return f"{self.how}{bricks}{path} ({'; '.join([self.why, *times])})"


class MergedModel(nn.Module):
    """A model after :func:`merge`; an ordinary module for inference.

    It stays in evaluation mode, as a part of a model that is trained too: ``train()`` changes nothing. What
    :func:`torch.compile` or :func:`torch.export.export` make of it runs under the settings of cuDNN that it finds.

    Args:
        inner: what runs.
        decisions: per segment, and per convolution that is in none.
        variant: how the whole runs: ``launches``, ``graph``, ``compiled``, ``compiled graph`` and what else the referee
            has tried.
        times: variant → measured seconds per call; empty where nothing was measured.
        problems: variant → why it is out.
        took_s: by :func:`merge`.
        cached: whether the plan came from the disk.
        failed: why the model runs as it is; None where there was a plan for it.
        tuned: whether cuDNN picks its algorithms by trial when it is called; else as the user has set it.
        captured: variant whose launches a CUDA graph of the user's captures, the fastest on the device; None where none
            was measured: it captures what is called.
        device_times: variant that is a graph → measured seconds of its replay on the device.
        spent_s: part of merging, variants of the whole and their first calls also → its seconds; together what it took.
    """

    def __init__(
        self,
        inner: nn.Module,
        decisions: List[Decision],
        variant: str = "launches",
        times: dict[str, float] | None = None,
        problems: dict[str, str] | None = None,
        took_s: float | None = None,
        cached: bool = False,
        failed: str | None = None,
        tuned: bool = True,
        captured: str | None = None,
        device_times: dict[str, float] | None = None,
        spent_s: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.training = inner, failed is not None and inner.training
        self.decisions = tuple(decisions)
        self.variant, self.times, self.problems = variant, dict(times or {}), dict(problems or {})
        self.took_s, self.cached, self.failed, self.tuned = took_s, cached, failed, tuned
        self.captured, self.device_times, self.spent_s = captured, dict(device_times or {}), dict(spent_s or {})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's output."""
        if named:
            inputs = self._in_order(inputs, named)
        tuned = self.tuned and not torch.compiler.is_compiling()  # no trace can hold a setting
        with cudnn_tuning(True) if tuned else nullcontext():
            return self.inner(*inputs)

    def train(self, mode: bool = True) -> MergedModel:
        """Stay in evaluation mode, whatever ``mode``.

        A model that could not be copied and is its user's own, in training mode perhaps, is left as it is by
        ``train()`` and put into evaluation mode by ``eval()``.
        """
        return self if mode else super().train(False)

    def _in_order(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All inputs by position: what replays a graph knows no names.

        Raises:
            TypeError: the model's ``forward`` takes no such input.
        """
        of = next((one for one in self.inner.modules() if isinstance(one, fx.GraphModule)), self.inner)
        bound = inspect.signature(of.forward).bind(*inputs, **named)
        bound.apply_defaults()
        return bound.args

    def explain(self) -> str:
        """What was merged and how, what was not and why, a line each; then what was measured of the whole.

        Neighbours that are left as they are for one reason have a line together.
        """
        groups = groupby(self.decisions, key=lambda one: one.told() if one.how == "plain" else str(one))
        lines = [_line(list(group)) for _, group in groups]
        if self.times:
            lines.append(f"the whole: {self.variant} (measured per call: {_milliseconds(self.times)})")
        if self.device_times:
            told = f"as {self.captured} launches it (measured on the device: {_milliseconds(self.device_times)})"
            lines.append(f"the whole, captured into a CUDA graph of yours: {told}")
        lines += [f"the whole: not {name} ({why})" for name, why in self.problems.items()]
        return "\n".join(_printable(one) for one in lines)


def _milliseconds(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.4g} ms" for name, seconds in times.items())


def _printable(line: str) -> str:
    """A line whose names cannot end it or command a terminal."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)


def _line(alike: List[Decision]) -> str:
    """One line for decisions that differ in their names alone."""
    first, more, last = alike[0], len(alike) - 1, alike[-1]
    return f"{first.name} and {more} more, to {last.name}: {first.told()}" if more else str(first)


def traced_or_reason(model: nn.Module, inputs: tuple[Any, ...], on_disk: bool = False) -> fx.GraphModule | str:
    """The model as a graph, or why torch.fx cannot make one; ``on_disk`` as :func:`trace` takes it."""
    if isinstance(model, MergedModel):
        return "it is merged already"
    try:
        return trace(model, inputs, on_disk)
    except NotMergeable as error:
        return str(error)
    except Exception as error:  # torch.fx raises whatever the model's own code does with a proxy
        return f"torch.fx cannot trace it: {told(error)}{_place(error)}"


def _place(error: Exception) -> str:
    """The model's own line at which an error left it, as `` (net.py:12, in forward)``; empty where it has none."""
    others = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    own = [one for one in extract_tb(error.__traceback__) if not one.filename.startswith((*others, "<"))]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name})" if own else ""


def untraced(model: nn.Module, why: str) -> MergedModel:
    """The model as it is, with the reason; a copy in evaluation mode of one that trains."""
    if any(one.training for one in model.modules()) and not isinstance(model, MergedModel):
        with suppress(Exception), torch.inference_mode(False):  # what cannot be copied stays the model itself
            model = copy.deepcopy(model).eval()
    return MergedModel(model, [Decision(type(model).__name__, "plain", why)], failed=why)


def nothing_in(model: nn.Module) -> Decision:
    """That a model holds no convolution that is known here: functions and subclasses are not, nor what has hooks."""
    why = "none of its layers is torch's own Conv1d, Conv2d or Conv3d without hooks"
    return Decision(type(model).__name__, "plain", why)
