"""What a subject cannot take less than on a GPU of known rates: the roofline of what merging could still save."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx.passes.shape_prop import ShapeProp

from joulemark.merged.cost import Candidate, Rates, predict
from joulemark.merged.graph import find_chains, range_segment, trace
from joulemark.merged.linears import as_convolutions
from joulemark.merged.paths import format_of
from joulemark.merged.trying import told


def floors_or_reason(model: nn.Module, x: Tensor, rates: Rates | None) -> dict[str, float] | str:
    """Seconds per call that the rates allow, or why they are not known. Takes the memory of a call of the model.

    Returns:
        ``flops_s``: the convolutions' FLOPs at the measured rate of large products; ``ends_s``: input, output and
        weights through DRAM once, everything between them on chip; ``layers_s``: the roofline of every convolution,
        linear layers over an image's positions among them, with what follows it as one kernel, tensors that do not fit
        into the L2 through DRAM, no launches counted. A reason where the device has no rates, for a number format
        without kernels, and for a model that cannot be traced or does not fit into memory.
    """
    if rates is None:
        return "no rates of this device are known"
    form = format_of(x)
    if form is None or form not in rates.flop_per_s:
        return f"no rates for numbers of {x.dtype}"
    try:
        with torch.no_grad():
            graph = trace(model, (x,))
            as_convolutions(graph)
            ShapeProp(graph).propagate(x)
            out = model(x)
    except Exception as error:  # torch.fx raises whatever the model's own code does with a proxy
        return told(error)[:300]
    bare = replace(rates, reached={}, launch_s=0.0)
    flops, layers_s = 0.0, 0.0
    for unit in (unit for chain in find_chains(graph)[0] for unit in chain):
        segment = range_segment([unit])
        assert segment is not None
        whole = predict(
            segment.sequence, segment.size, segment.batch, form, Candidate("unmerged", "ideal"), bare, False
        )
        flops += whole.work.flops
        layers_s += max(
            whole.work.dram_bytes / rates.dram_bytes_per_s,
            whole.work.l2_bytes / rates.l2_bytes_per_s,
            whole.work.flops / rates.flop_per_s[form],
        )
    weights = sum(one.nbytes for one in model.parameters())
    ends = x.nbytes + (out.nbytes if isinstance(out, Tensor) else 0) + weights
    return {"flops_s": flops / rates.flop_per_s[form], "ends_s": ends / rates.dram_bytes_per_s, "layers_s": layers_s}
