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

    for channels, kernel, stride, dilation in ((5, 3, 1, 1), (72, 5, 2, 1), (8, 7, 1, 1), (12, 3, 1, 2), (3, 3, 2, 1)):
        padding = dilation * (kernel - 1) // 2
        layer = Conv(channels, channels, *((one,) * 2 for one in (kernel, stride, padding, dilation)), groups=channels,
                     activation="silu")  # fmt: skip
        sequence = Sequence((layer,))
        x = torch.randn(2, channels, 11, 21).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(channels, 1, kernel, kernel), torch.randn(channels)
        out = torch.empty(2, channels, *sequence.sizes((11, 21))[-1]).contiguous(memory_format=torch.channels_last)
        added = torch.randn_like(out)
        expected = run_plain(sequence, [Parameters(weight.double(), bias.double())], x.double(), added.double())
        got = depthwise(layer, x, taps_of(weight), bias, added, out)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_epilogues():
    run_interpreted("check_epilogues")


def test_depthwise_convolutions():
    run_interpreted("check_depthwise")
