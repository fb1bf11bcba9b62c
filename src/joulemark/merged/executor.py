"""``merge``: a model whose sequences of convolutions run brick by brick."""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any, Literal

from torch import Tensor, fx, nn

from joulemark.merged.automatic import merge_automatically
from joulemark.merged.bricks import Parameters, run_memoized, run_padded, run_plain
from joulemark.merged.cost import Rates
from joulemark.merged.families import Family
from joulemark.merged.graph import Segment, find_segments
from joulemark.merged.merged_model import Decision, MergedModel, nothing_in, traced_or_reason, untraced
from joulemark.merged.sequence import Sequence, Shape
from joulemark.merged.setting import DEPTH

Strategy = Literal["auto", "kernels", "padded", "memoized"]
_STRATEGIES = ("auto", "kernels", "padded", "memoized")
_EDGE = 16
BUDGET_S = 55.0


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
    depth: int = DEPTH,
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
        depth: most layers that ``auto`` and ``kernels`` execute as one; with 1 every layer stays alone, on its best
            path: what sequences gain is told by comparing the two.

    Raises:
        ValueError: an unknown strategy, or an edge or a depth below 1.
        TypeError: what is no module, or example inputs that are neither a tensor nor a tuple.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"merge got strategy={strategy!r}: give one of {', '.join(_STRATEGIES)}")
    if min((edge,) if isinstance(edge, int) else edge) < 1:
        raise ValueError(f"merge got edge={edge}: a brick holds at least one position")
    if depth < 1:
        raise ValueError(f"merge got depth={depth}: one layer at least is executed as one")
    if not isinstance(model, nn.Module):
        raise TypeError(f"merge got a {type(model).__name__}: give a torch.nn.Module")
    if not isinstance(example_inputs, (Tensor, tuple, list)):
        got = type(example_inputs).__name__
        raise TypeError(
            f"merge got example_inputs of {got}: give a tensor, or a tuple in the order of forward's arguments"
        )
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if strategy in ("auto", "kernels"):
        forced = strategy == "kernels"
        measured = False if forced else measure
        return merge_automatically(model, inputs, rates, families, measured, budget_s, forced, depth)
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
