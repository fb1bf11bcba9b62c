"""What runs anywhere: padded bricks in torch's operators behind the kernels' interface, and a GPU that is simulated."""

from __future__ import annotations

import io
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as pytree

from joulemark.merged.automatic import _Automatic
from joulemark.merged.bricks import Parameters, run_padded, run_plain
from joulemark.merged.cost import Rates
from joulemark.merged.families import Family
from joulemark.merged.kernels import Kernel, emulate
from joulemark.merged.merged_model import traced_or_reason
from joulemark.merged.paths import Executed
from joulemark.merged.setting import Setting

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

    def padded(self, x, weights, residual=None):
        self.check(x, residual)
        held = torch.load(io.BytesIO(weights.numpy().tobytes()))
        parameters = [Parameters(*one) for one in held]
        sequence = self.description.sequence
        if residual is None:
            y = run_padded(sequence, parameters, x, self.edge)
        else:
            y = run_plain(sequence, parameters, x, residual)
        return (y + 1 if self.wrong else y).contiguous(memory_format=torch.channels_last)


def run_fakes(monkeypatch):
    """Have them run where others are emulated."""
    emulated = emulate.run

    def run(kernel, *given, **more):
        return kernel.padded(*given) if isinstance(kernel, FakeKernel) else emulated(kernel, *given, **more)

    monkeypatch.setattr(emulate, "run", run)


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


class Residual(nn.Module):
    """A pair with a residual from inside, one from outside, and a fork."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.c, self.d, self.side = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 12, 3, 2, 1), nn.Conv2d(8, 12, 1, 2)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.b(torch.relu(self.a(x))) + x)
        return torch.relu(self.d(torch.relu(self.c(x))) + self.side(x)).mean((2, 3))


class Pair(nn.Module):
    """Two convolutions that are merged."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.a(x))))


def image():
    torch.manual_seed(0)
    return torch.randn(2, 3, 17, 19)


def pair_and_input():
    torch.manual_seed(1)
    return Pair().eval(), image()


def model_and_input(batch=2):
    torch.manual_seed(0)
    return Residual().eval(), torch.randn(batch, 3, 33, 29)


def executed(merged):
    return [one for one in merged.modules() if isinstance(one, Executed)]


class Wrapped(nn.Module):
    """Stands for a module that was compiled."""

    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def ready_for(self, *inputs):
        pass

    def program(self, *inputs):
        return None

    def runs(self, program, *inputs):
        return False

    def forward(self, *inputs):
        return self.inner(*inputs)


class FakeGraph:
    """Replays a call as a CUDA graph does: from inputs and into outputs that stay where they are."""

    def __init__(self, inner, inputs):
        self.inner, self.inputs, self.outputs = inner, inputs, inner(*inputs)
        self.replays = 0

    def replay(self):
        self.replays += 1
        new = self.inner(*self.inputs)
        for mine, one in zip(pytree.tree_leaves(self.outputs), pytree.tree_leaves(new), strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(one)


def fake_capture(inner, inputs, pool):
    graph = FakeGraph(inner, inputs)
    return graph, graph.outputs


class AtOnce:
    """Streams of a device that does everything as soon as it is asked."""

    def on(self, stream):
        return nullcontext()

    def record(self, stream):
        return None

    def wait(self, stream, event):
        pass


@dataclass
class Simulated:
    """Times of a simulated GPU, as called and on the device, 1 s where none is given; what was measured of it.

    ``capturing``: whether its current stream is being captured.
    """

    times: dict[str, float] = field(default_factory=dict)
    on_device: dict[str, float] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)
    replayed: list[str] = field(default_factory=list)
    capturing: bool = False

    def race_calls(self, calls, _):
        self.called.extend(calls)
        return {name: self.times.get(name, 1.0) for name in calls}

    def race_replays(self, replays, _):
        self.replayed.extend(replays)
        return {name: self.on_device.get(name, 1.0) for name in replays}


def merged_there(model, *inputs, budget_s=1000.0, spent_s=0.0):
    """What ``merge`` does on a GPU once it knows the device."""
    graph = traced_or_reason(model, inputs)
    setting = Setting(torch.device("cuda"), "fp32", RATES, (fake_family(),), True)
    with torch.no_grad():
        return _Automatic(model, graph, inputs, setting, time.monotonic() - spent_s, budget_s).merged()
