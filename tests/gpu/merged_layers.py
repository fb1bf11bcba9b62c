"""What single layers take on a GPU by every path that there is for them: first, depthwise and pointwise convolutions.

    python tests/gpu/merged_layers.py OUT.json [--only REGEX] [--batches 1,32,128]

Layers are those of the networks, in bf16; paths, their check against fp32 and their turns are those of ``merge`` itself
(:mod:`joulemark.merged.measuring`), every kernel that a family offers among them. Excitations are timed as a whole.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joulemark.merged.builds import build_all
from joulemark.merged.families import known_families
from joulemark.merged.graph import find_chains, range_segment, trace
from joulemark.merged.measuring import measure
from joulemark.merged.paths import cudnn_tuning
from joulemark.merged.rates import rates_of
from joulemark.merged.setting import Setting
from joulemark.merged.stopwatch import race
from joulemark.merged.trials import candidates_of, promising
from joulemark.merged_bench.provenance import measured_now

SCHEMA = "joulemark/merged-layers/1"
EVERY = 50
"""Kernels of a family that are measured, at most."""
EXCITED = ((32, 8, 112), (96, 4, 56), (144, 6, 56), (240, 10, 28), (480, 20, 14), (672, 28, 14), (1152, 48, 7))
"""Channels, squeezed channels and edge of EfficientNet-B0's excitations."""


@dataclass(frozen=True)
class Layer:
    """A convolution and what follows it; ``size`` of its input, ``like`` a kind and a network."""

    like: str
    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    size: tuple[int, ...]
    activation: Callable[[], nn.Module] | None = None

    def module(self) -> nn.Module:
        """The layer, in evaluation mode; a depthwise one where inputs and outputs are the same and taps are several."""
        made = nn.Conv2d if len(self.kernel) == 2 else nn.Conv3d
        groups = self.inputs if self.inputs == self.outputs and self.kernel[-1] > 1 else 1
        padding = tuple(one // 2 for one in self.kernel)
        convolution = made(self.inputs, self.outputs, self.kernel, self.stride, padding, groups=groups)
        return nn.Sequential(convolution, *([] if self.activation is None else [self.activation()])).eval()


def _flat(like: str, inputs: int, outputs: int, kernel: int, stride: int, edge: int, activation: Any) -> Layer:
    return Layer(like, inputs, outputs, (kernel,) * 2, (stride,) * 2, (edge,) * 2, activation)


LAYERS = (
    _flat("first, ResNet-50", 3, 64, 7, 2, 224, nn.ReLU),
    Layer("first, 3-D ResNet-34", 3, 64, (7, 7, 7), (1, 2, 2), (16, 112, 112), nn.ReLU),
    Layer("first, DeepCAM", 16, 64, (7, 7), (2, 2), (768, 1152), nn.ReLU),
    _flat("first, DRN-26", 3, 16, 7, 1, 224, nn.ReLU),
    _flat("first, DarkNet-53", 3, 32, 3, 1, 256, lambda: nn.LeakyReLU(0.1)),
    _flat("first, MobileNetV2", 3, 32, 3, 2, 224, nn.ReLU6),
    _flat("first, EfficientNet-B0", 3, 32, 3, 2, 224, nn.SiLU),
    _flat("first, VGG-16", 3, 64, 3, 1, 224, nn.ReLU),
    *(
        _flat("depthwise", channels, channels, kernel, stride, edge, nn.SiLU)
        for channels, kernel, stride, edge in (
            (32, 3, 1, 112), (96, 3, 2, 112), (144, 3, 1, 56), (240, 5, 1, 28), (480, 3, 1, 14), (672, 5, 1, 14),
            (1152, 5, 1, 7),
        )
    ),
    *(_flat("depthwise", channels, channels, 3, *more, nn.ReLU6) for channels, *more in ((960, 1, 7), (576, 2, 14))),
    *(
        _flat("pointwise, ConvNeXt-T", channels, 4 * channels, 1, 1, edge, nn.GELU)
        for channels, edge in ((96, 56), (192, 28), (384, 14), (768, 7))
    ),
    *(
        _flat("shortcut, ResNet-50", channels, 2 * channels, 1, 2, edge, None)
        for channels, edge in ((256, 56), (512, 28), (1024, 14))
    ),
)  # fmt: skip


def row_of(layer: Layer, batch: int, device: torch.device) -> dict[str, Any]:
    """All paths of a layer."""
    memory = torch.channels_last if len(layer.size) == 2 else torch.channels_last_3d
    x = torch.randn(batch, layer.inputs, *layer.size, device=device).bfloat16().contiguous(memory_format=memory)
    graph = trace(layer.module().to(device, torch.bfloat16), (x,))
    segment = range_segment(find_chains(graph)[0][0])
    assert segment is not None
    on_gpu = device.type == "cuda"
    setting = Setting(device, "bf16", rates_of(device) if on_gpu else None, known_families() if on_gpu else (), True)
    trials = promising(candidates_of(segment, setting), inf, EVERY, forced=True)
    if kernels := [one.kernel for one in trials if one.kernel]:
        build_all(kernels, device)
    with cudnn_tuning(True):
        measure(segment, trials, setting)
    paths = [{"path": one.path, "time_s": one.measured_s, "problem": one.problem} for one in trials]
    what = f"{layer.inputs}→{layer.outputs} {'x'.join(map(str, layer.kernel))}/{'x'.join(map(str, layer.stride))}"
    shape = {"batch": batch, "size": list(layer.size), "format": "bf16"}
    return {"like": layer.like, "layer": what, **shape, "paths": paths}


def excitation(channels: int, squeezed: int, edge: int, batch: int, device: torch.device) -> dict[str, Any]:
    """One squeeze-and-excitation, both of its kernels, up to the gate."""
    from joulemark.merged.excitation import squeeze_and_excite

    def weights(outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = torch.randn(squeezed, channels, device=device), torch.randn(outputs, device=device)
        return weight.bfloat16(), bias.bfloat16()

    x = torch.randn(batch, channels, edge, edge, device=device).bfloat16().to(memory_format=torch.channels_last)
    first, second = weights(squeezed), weights(channels)
    taken = race({"own": lambda: squeeze_and_excite(x, first, second, "silu", False)}, device)["own"]
    shape = {"batch": batch, "size": [edge, edge], "format": "bf16"}
    path = {"path": "excitation", "time_s": taken, "problem": None}
    return {"like": "excitation", "layer": f"{channels}, {squeezed} squeezed", **shape, "paths": [path]}


def rows(only: str, batches: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Of all layers whose kind and channels match."""
    for batch in batches:
        for layer in LAYERS:
            if re.search(only, f"{layer.like} {layer.inputs}→{layer.outputs}"):
                yield row_of(layer, batch, device)
        for channels, squeezed, edge in EXCITED:
            if re.search(only, f"excitation {channels}"):
                yield excitation(channels, squeezed, edge, batch, device)


def main() -> int:
    """All rows, written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="layers whose kind and channels match")
    parser.add_argument("--batches", default="1,32,128")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    facts = {"schema": SCHEMA, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    document: dict[str, Any] = {**facts, "measured": measured_now(), "rows": []}
    for row in rows(options.only, [int(one) for one in options.batches.split(",")], device):
        document["rows"].append(row)
        options.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        known = sorted((one["time_s"], one["path"]) for one in row["paths"] if one["time_s"] is not None)
        said = ", ".join(f"{path} {seconds * 1e6:.1f}" for seconds, path in known[:6])
        print(f"{row['like']} {row['layer']} batch {row['batch']}: {said} µs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
