"""Activations in bricks as a rival of channels-last: a chain whose input and output lie in memory brick by brick."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from joulemark.errors import Unsupported
from joulemark.merged.builds import build_all
from joulemark.merged.cost import predict
from joulemark.merged.families import Family, Offer, Problem, limits_of, offers
from joulemark.merged.graph import Segment, find_chains, range_segment, trace
from joulemark.merged.kernels import Description, Kernel, run
from joulemark.merged.kernels.chain import Plan, chain, unsuited
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.layouts import from_bricks, to_bricks
from joulemark.merged.paths import format_of
from joulemark.merged.rates import rates_of
from joulemark.merged.sequence import Shape
from joulemark.merged.stopwatch import race

LAYOUTS: tuple[Shape, ...] = ((8, 8), (16, 16), (8, 32))


def fastest(model: torch.nn.Module, x: Tensor, most: int) -> tuple[Kernel, Tensor, dict[str, float]]:
    """The fastest padded kernel over bricks, its packed weights, and the seconds of the best of each layout.

    Args:
        most: kernels that are measured, the best predicted of each layout first.

    Raises:
        Unsupported: the model is no single chain that kernels execute so, or its size no whole number of bricks.
    """
    segment, form = _only_segment(model, x)
    why = unsuited(Description(segment.sequence, form))
    if why is not None:
        raise Unsupported(f"no kernel over bricks: {why}")
    size = tuple(x.shape[2:])
    layouts = [one for one in LAYOUTS if not any(n % e for n, e in zip(size, one, strict=True))]
    if not layouts:
        raise Unsupported(f"{size} is no whole number of any of the bricks {LAYOUTS}")
    best: dict[str, tuple[float, Kernel]] = {}
    packed: dict[str, Tensor] = {}
    for layout in layouts:
        kernels = _promising(segment, form, layout, x)[: -(-most // len(layouts))]
        build_all(kernels, x.device)
        given = to_bricks(x, layout)
        for kernel in kernels:
            packed[kernel.name] = kernel.pack(list(segment.parameters)).to(x.device)
        calls = {one.name: partial(run, one, given, packed[one.name]) for one in kernels}
        times = race(calls, x.device)
        name = min(times, key=times.__getitem__)
        found = next(one for one in kernels if one.name == name)
        best["x".join(map(str, layout))] = (times[name], found)
    _, kernel = min(best.values(), key=lambda one: one[0])
    return kernel, packed[kernel.name], {layout: seconds for layout, (seconds, _) in best.items()}


def _only_segment(model: torch.nn.Module, x: Tensor) -> tuple[Segment, Format]:
    chains, _ = find_chains(trace(model, (x,)))
    segment = range_segment(chains[0]) if len(chains) == 1 else None
    form = format_of(x)
    if segment is None or segment.adds is not None or segment.sequence.dimensions != 2 or form is None:
        raise Unsupported("the block is no single chain in two dimensions")
    return segment, form


def _promising(segment: Segment, form: Format, layout: Shape, x: Tensor) -> list[Kernel]:
    """Kernels over a layout, the best predicted first."""
    rates = rates_of(torch.device("cuda", torch.cuda.current_device()))
    problem = Problem(Description(segment.sequence, form), segment.size, len(x), limits_of(rates), rates.gpu)
    family = Family("chain", "padded", lambda _: _kernels(problem.description, layout))

    def predicted(one: Offer) -> float:
        time_s = predict(segment.sequence, segment.size, len(x), form, one.candidate, rates).time_s
        return float("inf") if time_s is None else time_s

    return [one.kernel for one in sorted(offers([family], problem), key=predicted)]


def _kernels(description: Description, layout: Shape) -> Iterator[Kernel]:
    halo = 2 * len(description.sequence.layers)
    for rows, width, (warps, blocks) in product((8, 16, 24, 32), (32, 48, 64), ((4, 2), (8, 1), (8, 2), (16, 1))):
        try:
            yield chain(description, Plan((rows, width - halo), warps, blocks, layout))
        except ValueError:
            continue


__all__ = ["LAYOUTS", "fastest", "from_bricks", "to_bricks"]
