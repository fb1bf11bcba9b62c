"""``merge``: a model whose sequences of convolutions run brick by brick."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, fx, nn

from joulemark.merged.bricks import Parameters, run_memoized, run_padded, run_plain
from joulemark.merged.graph import Segment, find_segments, trace
from joulemark.merged.sequence import Sequence, Shape

Strategy = Literal["auto", "padded", "memoized"]
_STRATEGIES = ("auto", "padded", "memoized")
_EDGE = 16


@dataclass(frozen=True)
class Decision:
    """What became of one segment or convolution.

    Args:
        name: as the model calls it.
        how: ``padded``, ``memoized``, or ``plain`` for what is not merged.
        why: in one clause.
        edge: of the bricks; None where there are none.
    """

    name: str
    how: str
    why: str
    edge: Shape | None = None

    def __str__(self) -> str:
        bricks = "" if self.edge is None else f", bricks of {'×'.join(str(e) for e in self.edge)}"
        return f"{self.name}: {self.how}{bricks} ({self.why})"


class MergedSequence(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A sequence of convolutions executed by one of the schedules.

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


class MergedModel(nn.Module):  # type: ignore[misc]
    """A model after :func:`merge`; an ordinary module for inference.

    Args:
        inner: what runs.
        decisions: per segment, and per convolution that is in none.
    """

    def __init__(self, inner: nn.Module, decisions: List[Decision]) -> None:
        super().__init__()
        self.inner = inner
        self.decisions = tuple(decisions)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The model's output."""
        return self.inner(*inputs)

    def explain(self) -> str:
        """What was merged and how, what was not and why, a line each."""
        return "\n".join(str(one) for one in self.decisions)


def merge(
    model: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    strategy: Strategy = "auto",
    edge: int | Shape = _EDGE,
) -> MergedModel:
    """A copy of a model for inference in which sequences of convolutions run brick by brick.

    Batch norms are folded first. With torch's own operators per brick, as here, the schedules are exact and slow: they
    are the reference of the kernels. ``auto`` therefore merges nothing yet and says so. A model that torch.fx cannot
    trace comes back as it is, with the reason.

    Args:
        model: in evaluation mode or not; it is not changed.
        example_inputs: of the shapes that it will get (the batch may differ later).
        strategy: ``padded`` recomputes halos, ``memoized`` keeps every brick of an intermediate until it is read.
        edge: positions of a brick per dimension, one number or one for each dimension.

    Raises:
        ValueError: an unknown strategy, or an edge below 1.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"merge got strategy={strategy!r}: give one of {', '.join(_STRATEGIES)}")
    if min((edge,) if isinstance(edge, int) else edge) < 1:
        raise ValueError(f"merge got edge={edge}: a brick holds at least one position")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    try:
        graph = trace(model, inputs)
    except Exception as error:  # torch.fx raises whatever the model's own code does with a proxy
        said = str(error).strip().splitlines()
        why = f"torch.fx cannot trace it: {type(error).__name__}: {said[0] if said else ''}"
        return MergedModel(model, [Decision(type(model).__name__, "plain", why)])
    segments, left = find_segments(graph)
    replaced: dict[fx.Node, fx.Node] = {}
    decisions = [_replace(graph, number, one, strategy, edge, replaced) for number, one in enumerate(segments)]
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    decisions += [Decision(name, "plain", why) for name, why in left.items()]
    return MergedModel(graph, decisions or [Decision(type(model).__name__, "plain", "it holds no convolution")])


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
    if strategy == "auto":
        return Decision(segment.name, "plain", "no kernel for this device yet; per-brick operators are slower")
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
