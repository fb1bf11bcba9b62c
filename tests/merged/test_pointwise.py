"""The Triton kernels, interpreted on the CPU, against torch in float64."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ACTIVATIONS = ("none", "relu", "relu6", "silu", "gelu", "leaky", "hardswish")


def run_interpreted(what):
    """Triton reads the switch when kernels are defined: a process of its own."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    code = f"import runpy; runpy.run_path({__file__!r})['{what}']()"
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([_SOURCE, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


_SOURCE = str(Path(__file__).parents[2] / "src")


def check_epilogues():
    from joulemark.merged.bricks import ACTIVATIONS as REFERENCE
    from joulemark.merged.pointwise import epilogue

    for activation, biased, added in itertools.product(ACTIVATIONS, (True, False), (True, False)):
        y, z = (torch.randn(2, 5, 7, 9).contiguous(memory_format=torch.channels_last) * 4 for _ in range(2))
        bias = torch.randn(5) if biased else None
        expected = y.double() + (bias.double()[:, None, None] if biased else 0) + (z.double() if added else 0)
        out = epilogue(y.clone(memory_format=torch.preserve_format), bias, z if added else None, activation)
        torch.testing.assert_close(out.double(), REFERENCE[activation](expected), rtol=1e-5, atol=1e-5)


def check_depthwise():
    from joulemark.merged.bricks import Parameters, run_plain
    from joulemark.merged.pointwise import depthwise, taps_of
    from joulemark.merged.sequence import Conv, Sequence

    shapes = ((5, 3, 1, 1, 2), (72, 5, 2, 1, 2), (8, 7, 1, 1, 2), (12, 3, 1, 2, 1), (3, 3, 2, 1, 2), (8, 3, 2, 1, 1))
    for channels, kernel, stride, dilation, lines in shapes:
        padding = dilation * (kernel - 1) // 2
        layer = Conv(channels, channels, *((one,) * 2 for one in (kernel, stride, padding, dilation)), groups=channels,
                     activation="silu")  # fmt: skip
        sequence = Sequence((layer,))
        x = torch.randn(2, channels, 11, 21).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(channels, 1, kernel, kernel), torch.randn(channels)
        out = torch.empty(2, channels, *sequence.sizes((11, 21))[-1]).contiguous(memory_format=torch.channels_last)
        out.fill_(float("nan"))
        added = torch.randn_like(out)
        expected = run_plain(sequence, [Parameters(weight.double(), bias.double())], x.double(), added.double())
        got = depthwise(layer, x, taps_of(weight), bias, added, out, lines)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def check_products():
    from joulemark.merged.bricks import ACTIVATIONS as REFERENCE
    from joulemark.merged.pointwise import product

    for inputs, outputs, gated, added, biased, activation, tile in (
        (24, 40, True, True, True, "none", (64, 64)),
        (5, 70, False, False, False, "silu", (16, 32)),
        (96, 16, True, False, True, "relu6", (32, 16)),
        (130, 33, False, True, True, "relu", (64, 16)),
    ):
        x = torch.randn(3, inputs, 7, 9).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(outputs, inputs, 1, 1), torch.randn(outputs) if biased else None
        gate = torch.rand(3, inputs, 1, 1) if gated else None
        out = torch.full((3, outputs, 7, 9), float("nan")).contiguous(memory_format=torch.channels_last)
        residual = torch.randn_like(out) if added else None
        y = (x if gate is None else x * gate).double()
        y = torch.nn.functional.conv2d(y, weight.double(), None if bias is None else bias.double())
        expected = REFERENCE[activation](y if residual is None else y + residual.double())
        got = product(x, weight, bias, residual, gate, out, activation, tile)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def check_excitations():
    from joulemark.merged.bricks import ACTIVATIONS as REFERENCE
    from joulemark.merged.pointwise import squeeze_and_excite

    sizes = ((3, 40, 10, (9, 7), False), (1, 300, 5, (30, 31), True), (2, 7, 3, (1, 1), False))
    for batch, channels, squeezed, size, hard in sizes:
        x = torch.randn(batch, channels, *size).contiguous(memory_format=torch.channels_last)
        first = torch.randn(squeezed, channels, 1, 1) / 4, torch.randn(squeezed)
        second = torch.randn(channels, squeezed, 1, 1) / 4, torch.randn(channels)
        wide = [one.double() for one in (*first, *second)]
        hidden = REFERENCE["silu"](torch.nn.functional.conv2d(x.double().mean((2, 3), keepdim=True), *wide[:2]))
        gate = torch.nn.functional.conv2d(hidden, *wide[2:])
        expected = torch.nn.functional.hardsigmoid(gate) if hard else torch.sigmoid(gate)
        got = squeeze_and_excite(x, first, second, "silu", hard)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_epilogues():
    run_interpreted("check_epilogues")


def test_depthwise_convolutions():
    run_interpreted("check_depthwise")


def test_pointwise_convolutions():
    run_interpreted("check_products")


def test_squeeze_and_excitation():
    run_interpreted("check_excitations")


def test_tiles_are_no_larger_than_what_they_cover():
    pytest.importorskip("triton")
    from joulemark.merged.pointwise import tiles_for

    assert tiles_for(1 << 20, 1280) == ((128, 128), (64, 64))
    assert tiles_for(49, 1280) == ((64, 128), (64, 64))
    assert tiles_for(1 << 20, 24) == ((128, 32), (64, 32))
    assert tiles_for(49, 24) == ((64, 32),)
