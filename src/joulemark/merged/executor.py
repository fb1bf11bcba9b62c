"""``merge``: a model whose sequences of convolutions run brick by brick."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence as List
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from joulemark.merged.bricks import Parameters, run_memoized, run_padded, run_plain
from joulemark.merged.cost import Rates
from joulemark.merged.families import Family
from joulemark.merged.graph import Segment, find_segments, told, trace
from joulemark.merged.in_place import NotMergeable
from joulemark.merged.paths import cudnn_tuning
from joulemark.merged.sequence import Sequence, Shape

Strategy = Literal["auto", "kernels", "padded", "memoized"]
_STRATEGIES = ("auto", "kernels", "padded", "memoized")
_EDGE = 16
BUDGET_S = 50.0


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


class MergedSequence(nn.Module):
    """A sequence of convolutions executed by one of the schedules in torch's own operators.

    Args:
        how: ``plain``, ``padded`` or ``memoized``.
        edge: of the bricks, per dimension.
    """

    def __init__(self, sequence: Sequence, parameters: List[Parameters], how: str, edge: Shape) -> None:
        super().__init__()
        self.sequence, self.how, self.edge = sequence, how, edge
        for number, given in enumerate(parameters):
            self.register_buffer(f"weight_{number}", given.weight)
            self.register_buffer(f"bias_{number}", given.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The sequence's output for x [batch, channels, *size]."""
        layers = range(len(self.sequence.layers))
        given = [Parameters(getattr(self, f"weight_{n}"), getattr(self, f"bias_{n}")) for n in layers]
        if self.how == "padded":
            return run_padded(self.sequence, given, x, self.edge)
        if self.how == "memoized":
            return run_memoized(self.sequence, given, x, self.edge)
        return run_plain(self.sequence, given, x)


class MergedModel(nn.Module):
    """A model after :func:`merge`; an ordinary module for inference.

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
        tuned: whether cuDNN picks its algorithms by trial; else as the user has set it.
        captured: variant whose launches a CUDA graph of the user's captures, the fastest on the device; None where none
            was measured: it captures what is called.
        device_times: variant that is a graph → measured seconds of its replay on the device.
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
    ) -> None:
        super().__init__()
        self.inner = inner
        self.decisions = tuple(decisions)
        self.variant, self.times, self.problems = variant, dict(times or {}), dict(problems or {})
        self.took_s, self.cached, self.failed, self.tuned = took_s, cached, failed, tuned
        self.captured, self.device_times = captured, dict(device_times or {})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's output."""
        if named:
            inputs = self._in_order(inputs, named)
        with cudnn_tuning(True) if self.tuned else nullcontext():
            return self.inner(*inputs)

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


def merge(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...],
    strategy: Strategy = "auto",
    edge: int | Shape = _EDGE,
    *,
    rates: Rates | None = None,
    families: tuple[Family, ...] | None = None,
    measure: bool | None = None,
    budget_s: float = BUDGET_S,
) -> MergedModel:
    """A copy of a model for inference in which sequences of convolutions run brick by brick.

    Batch norms are folded first. ``auto`` chooses for each sequence by the performance model and one measured pass, and
    runs what is not merged on the best path measured for it; the whole is then measured against its rivals, and what
    comes back runs the fastest of them when it is called, and the one that is fastest on the device when it is captured
    into a CUDA graph. What was measured is kept on disk (:mod:`joulemark.merged.cache`). ``kernels`` measures no times:
    whatever kernels of ours can execute they do, several layers at once by the one that is predicted best, even where
    the layers one by one would be faster; what is wrong on random inputs is refused, and said to be. ``padded`` and
    ``memoized`` execute every sequence by that schedule in torch's own operators: exact and slow, the reference of
    kernels. A model that torch.fx cannot trace comes back as it is, with the reason.

    Args:
        model: in evaluation mode or not; it is not changed. Later changes of its weights do not reach the copy.
        example_inputs: of the shapes that it will get (the batch may differ later: it then runs launch by launch);
            numbers and None may stand beside tensors.
        strategy: see above.
        edge: positions of a brick per dimension, one number or one for each dimension; for ``padded`` and
            ``memoized``.
        rates: of the device, for the performance model; None measures those of a GPU once.
        families: kernels to choose from; None for all that there are for a GPU, none for a CPU.
        measure: whether candidates are timed; None for on a GPU; not for ``kernels``.
        budget_s: after which nothing further is measured or compiled.

    Raises:
        ValueError: an unknown strategy, or an edge below 1.
        TypeError: what is no module, or example inputs that are neither a tensor nor a tuple.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"merge got strategy={strategy!r}: give one of {', '.join(_STRATEGIES)}")
    if min((edge,) if isinstance(edge, int) else edge) < 1:
        raise ValueError(f"merge got edge={edge}: a brick holds at least one position")
    if not isinstance(model, nn.Module):
        raise TypeError(f"merge got a {type(model).__name__}: give a torch.nn.Module")
    if not isinstance(example_inputs, (Tensor, tuple, list)):
        got = type(example_inputs).__name__
        raise TypeError(
            f"merge got example_inputs of {got}: give a tensor, or a tuple in the order of forward's arguments"
        )
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if strategy in ("auto", "kernels"):
        from joulemark.merged.automatic import merge_automatically

        forced = strategy == "kernels"
        return merge_automatically(model, inputs, rates, families, False if forced else measure, budget_s, forced)
    graph = traced_or_reason(model, inputs)
    if isinstance(graph, str):
        return untraced(model, graph)
    segments, left = find_segments(graph)
    replaced: dict[fx.Node, fx.Node] = {}
    decisions = [_replace(graph, number, one, strategy, edge, replaced) for number, one in enumerate(segments)]
    graph.delete_all_unused_submodules()
    graph.recompile()
    decisions += [Decision(name, "plain", why) for name, why in left.items()]
    return MergedModel(graph, decisions or [nothing_in(model)])


def traced_or_reason(model: nn.Module, inputs: tuple[Any, ...]) -> fx.GraphModule | str:
    """The model as a graph, or why torch.fx cannot make one."""
    if isinstance(model, MergedModel):
        return "it is merged already"
    try:
        return trace(model, inputs)
    except NotMergeable as error:
        return str(error)
    except Exception as error:  # torch.fx raises whatever the model's own code does with a proxy
        return f"torch.fx cannot trace it: {told(error)}"


def untraced(model: nn.Module, why: str) -> MergedModel:
    """The model as it is, with the reason; a copy in evaluation mode of one that trains."""
    if any(one.training for one in model.modules()):
        with suppress(Exception), torch.inference_mode(False):  # what cannot be copied stays the model itself
            model = copy.deepcopy(model).eval()
    return MergedModel(model, [Decision(type(model).__name__, "plain", why)], failed=why)


def nothing_in(model: nn.Module) -> Decision:
    """That a model holds no convolution."""
    return Decision(type(model).__name__, "plain", "it holds no convolution")


def _replace(
    graph: fx.GraphModule,
    number: int,
    segment: Segment,
    strategy: Strategy,
    edge: int | Shape,
    replaced: dict[fx.Node, fx.Node],
) -> Decision:
    """Put one module in the place of a segment's nodes.

    Args:
        replaced: last node of each segment so far → what stands in its place, another segment's input perhaps.
    """
    dimensions = segment.sequence.dimensions
    edges = (edge,) * dimensions if isinstance(edge, int) else edge
    if len(edges) != dimensions:
        return Decision(segment.name, "plain", f"edge={edge} has not the {dimensions} dimensions of its tensors")
    name = f"merged_{number}"
    graph.add_submodule(name, MergedSequence(segment.sequence, segment.parameters, strategy, edges))
    last = segment.nodes[-1]
    with graph.graph.inserting_after(last):
        replacement = graph.graph.call_module(name, (replaced.get(segment.source, segment.source),))
    last.replace_all_uses_with(replacement)
    replaced[last] = replacement
    replacement.meta = dict(last.meta)
    for node in reversed(segment.nodes):
        graph.graph.erase_node(node)
    return Decision(segment.name, strategy, "asked for", edges)
