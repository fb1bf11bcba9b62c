"""A family of kernels that run anywhere: padded bricks in torch's operators behind the kernels' interface."""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch

from joulemark.merged.bricks import Parameters, run_padded, run_plain
from joulemark.merged.cost import Rates
from joulemark.merged.families import Family
from joulemark.merged.kernels import Kernel

RATES = Rates(
    gpu="a GPU of round numbers",
    multiprocessors=4,
    dram_bytes_per_s=1e9,
    l2_bytes_per_s=1e12,
    l2_bytes=10_000,
    shared_bytes=200_000,
    flop_per_s=dict.fromkeys(("bf16", "fp16", "tf32", "fp32"), 1e15),
    launch_s=1e-6,
    flag_s=1e-6,
)
"""Of a GPU whose memory is so slow that whatever is merged wins."""


def packed(parameters: list[Parameters]) -> torch.Tensor:
    held = io.BytesIO()
    torch.save([(one.weight, one.bias) for one in parameters], held)
    return torch.frombuffer(bytearray(held.getvalue()), dtype=torch.uint8)


@dataclass(frozen=True)
class FakeKernel(Kernel):
    """Padded bricks; ``wrong`` makes its output wrong."""

    wrong: bool = False

    def run(self, x, weights, residual=None, out=None):
        self.check(x, residual)
        held = torch.load(io.BytesIO(weights.numpy().tobytes()))
        parameters = [Parameters(*one) for one in held]
        sequence = self.description.sequence
        if residual is None:
            y = run_padded(sequence, parameters, x, self.edge)
        else:
            y = run_plain(sequence, parameters, x, residual)
        return (y + 1 if self.wrong else y).contiguous(memory_format=torch.channels_last)


def fake_family(most=3, wrong=False, name="fake", edges=(4, 16), pack=packed):
    """Kernels for up to ``most`` layers in two dimensions."""

    def kernels(problem):
        description = problem.description
        layers = description.sequence.layers
        if not 2 <= len(layers) <= most or description.sequence.dimensions != 2:
            return
        for edge in ((one, one) for one in edges):
            label = f"fake_{description}_{edge[0]}"
            yield FakeKernel(label, description, label, 128, 1024, edge, pack, wrong=wrong)

    return Family(name, "padded", kernels)
