"""Puts what was chosen into a graph: one module in the place of each range."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import fx

from joulemark.merged import cache
from joulemark.merged.branches import SECONDS
from joulemark.merged.families import offers
from joulemark.merged.graph import Segment, find_chains, range_segment
from joulemark.merged.kernels import Kernel, KernelError
from joulemark.merged.paths import LIBRARY, Executed, fuses, kind_of_path
from joulemark.merged.setting import Setting, problem_of
from joulemark.merged.trials import Choice, unit_names


def fused_by_cudnn(graph: fx.GraphModule) -> list[Choice]:
    """Every convolution that ends in a ReLU by cuDNN's fused kernels, the others as torch has them."""
    choices = []
    for unit in (unit for chain in find_chains(graph)[0] for unit in chain):
        segment = range_segment([unit])
        assert segment is not None
        path = "fused" if fuses(segment.sequence.layers[0]) else "library"
        choices.append(Choice(unit_names([unit]), segment.name, path, "unmerged", None, None, None, None, "asked for"))
    return choices


def kernel_of(choice: Choice, segment: Segment, setting: Setting) -> Kernel | None:
    """The kernel that a choice names; None for a library's path.

    Raises:
        KernelError: no family offers it any more.
    """
    if kind_of_path(choice.path) in LIBRARY:
        return None
    assert setting.form is not None
    named = [one for one in setting.families if one.name == choice.path.partition("/")[0]]
    for offer in offers(named, problem_of(segment, setting, setting.form)):
        if offer.path == choice.path:
            return offer.kernel
    raise KernelError(f"{choice.path} is offered no more: clear the cache at {cache.folder()}")


def rewrite(graph: fx.GraphModule, choices: Iterable[Choice], setting: Setting) -> None:
    """Put one module in the place of each range that was chosen; what its kernel cannot hold is left, and told of."""
    chains, _ = find_chains(graph)
    units = {one.convolution.name: one for chain in chains for one in chain}
    # All before the first is replaced: a unit remembers the nodes that it adds.
    segments = [(choice, range_segment([units[name] for name in choice.units])) for choice in choices]
    replaced: dict[fx.Node, fx.Node] = {}
    for number, (choice, segment) in enumerate(segments):
        assert segment is not None, f"{choice.name} is no range of this graph"
        adds = segment.adds
        kernel = kernel_of(choice, segment, setting)
        try:
            module = Executed(segment.sequence, segment.parameters, choice.path, adds is not None, kernel)
        except KernelError as error:
            warnings.warn(f"{choice.name} runs in torch's operators: {error}", stacklevel=2)
            continue
        name = f"executed_{number}"
        graph.add_submodule(name, module)
        last = segment.nodes[-1]
        arguments = [segment.source] if adds is None else [segment.source, adds]
        gate = {} if segment.gate is None else {"gate": replaced.get(segment.gate, segment.gate)}
        with graph.graph.inserting_after(last):
            new = graph.graph.call_module(name, tuple(replaced.get(one, one) for one in arguments), gate)
        last.replace_all_uses_with(new)
        replaced[last] = new
        new.meta = {**last.meta, SECONDS: choice.time_s}
        for node in reversed(segment.nodes):
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
