"""The Triton kernels, interpreted on the CPU, against torch in float64."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ACTIVATIONS = ("none", "relu", "relu6", "silu", "gelu", "leaky", "hardswish")


def run_interpreted(*checks):
    """Triton reads the switch when kernels are defined: a process of its own, one for all checks."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    code = f"import runpy; there = runpy.run_path({__file__!r}); [there[name]() for name in {checks!r}]"
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([_SOURCE, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


_SOURCE = str(Path(__file__).parents[2] / "src")


def check_epilogues():
    from joulemark.merged.bricks import ACTIVATIONS as REFERENCE
    from joulemark.merged.pointwise import epilogue
    from joulemark.merged.sequence import Conv

    for activation, biased, adds in itertools.product(ACTIVATIONS, (True, False), ("nothing", "before", "behind")):
        if (activation, adds) == ("none", "behind"):
            continue
        layer = Conv(5, 5, (1, 1), (1, 1), (0, 0), (1, 1), activation=activation, adds_behind=adds == "behind")
        y, z = (torch.randn(2, 5, 7, 9).contiguous(memory_format=torch.channels_last) * 4 for _ in range(2))
        bias, added = torch.randn(5) if biased else None, None if adds == "nothing" else z
        expected = y.double() + (bias.double()[:, None, None] if biased else 0)
        expected = REFERENCE[activation](expected + z.double() if adds == "before" else expected)
        expected = expected + z.double() if adds == "behind" else expected
        out = epilogue(layer, y.clone(memory_format=torch.preserve_format), bias, added)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for (dtype, tolerance), activation in itertools.product(FORMATS.items(), ACTIVATIONS):  # pieces of eight channels
        layer = Conv(24, 24, (1, 1), (1, 1), (0, 0), (1, 1), activation=activation)
        y, added = (torch.randn(2, 24, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(2))
        bias = torch.randn(24).to(dtype)
        expected = REFERENCE[activation](y.double() + bias.double()[:, None, None] + added.double())
        torch.testing.assert_close(epilogue(layer, y, bias, added).double(), expected, rtol=tolerance, atol=tolerance)


def check_gelus():
    """All numbers of 16 bits: what is rounded is far closer than rounding, which gives the same or a neighbour."""
    from joulemark.merged.pointwise import NUMBERS, _epilogue

    for dtype in (torch.float16, torch.bfloat16):
        numbers = torch.arange(1 << 16).to(torch.int16).view(dtype)
        exact = numbers.double() * torch.special.erfc(-numbers.double() / 2**0.5) / 2
        wide = numbers.float()  # what is added, nothing, says the format
        long = dtype == torch.bfloat16
        _epilogue[(32,)](wide, wide, numbers, 8192, 8, 8, False, "nothing", NUMBERS["gelu"], 256, long)
        assert bool(wide[numbers.isnan()].isnan().all())
        assert float(wide[numbers == torch.inf]) == torch.inf
        off, finite = (wide.double() - exact).abs(), numbers.isfinite()
        for start, end, relative, absolute in (
            (-torch.inf, -6.5, 0.0, 2.7e-10),
            (-6.5, -4.75, 9e-4, 0.0),
            (-4.75, torch.inf, 3e-5, 1e-44),  # of fp32's subnormal numbers, 1.4e-45 apart
        ):
            inside = finite & (numbers >= start) & (numbers < end)
            assert bool((off <= relative * exact.abs() + absolute)[inside].all())
        steps = steps_between(wide.to(dtype), exact.to(dtype))[finite & (numbers >= -6.5)]
        assert int(steps.max()) <= 1
        assert float((steps > 0).double().mean()) < 0.02


def steps_between(left, right):
    """How many numbers of 16 bits two lie apart; zeros of both signs are one."""
    places = (one.view(torch.int16).int() for one in (left, right))
    first, second = (torch.where(one < 0, -(one & 0x7FFF), one) for one in places)
    return (first - second).abs()


def check_what_is_not_finite():
    """What is no number stays none; infinities become what torch makes of them, and -inf by a GELU its limit."""
    from joulemark.merged.bricks import ACTIVATIONS as REFERENCE
    from joulemark.merged.excitation import squeeze_and_excite
    from joulemark.merged.pointwise import epilogue
    from joulemark.merged.sequence import Conv

    nan, inf = torch.nan, torch.inf
    for activation, dtype in itertools.product(ACTIVATIONS, (torch.float32, torch.float16, torch.bfloat16)):
        layer = Conv(8, 8, (1, 1), (1, 1), (0, 0), (1, 1), activation=activation)
        y = torch.tensor([nan, inf, -inf, 1.0, -0.0, 7.0, -8.0, nan]).to(dtype)[None, :, None, None]
        expected = REFERENCE[activation](y)
        if activation == "gelu":  # torch's on a CPU makes no number of either infinity
            expected[0, 1], expected[0, 2] = inf, nan if dtype == torch.float32 else 0.0
        got = epilogue(layer, y.clone(), None, None)
        torch.testing.assert_close(got, expected, rtol=FORMATS[dtype], atol=1e-6, equal_nan=True)
    x = torch.ones(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    x[0, 1, 1, 1], x[1, 0, 0, 0], x[2, 2, 1, 0] = inf, -inf, nan
    first, second = (torch.full((5, 3), 0.5), torch.zeros(5)), (torch.full((5, 3), 0.25), torch.zeros(3))
    for hard in (False, True):
        hidden = (x.mean((2, 3)) @ first[0].t()).relu()
        gate = (hidden @ second[0])[:, :, None, None]
        expected = torch.nn.functional.hardsigmoid(gate) if hard else gate.sigmoid()
        got = squeeze_and_excite(x, first, second, "relu", hard)
        torch.testing.assert_close(got, expected, equal_nan=True)


def check_depthwise():
    from joulemark.merged.bricks import Parameters, run_plain
    from joulemark.merged.pointwise import depthwise, taps_of
    from joulemark.merged.sequence import Conv, Sequence

    wide = (2, 32)
    for channels, kernel, stride, dilation, strip, size in (
        (5, 3, 1, 1, (2, 16), (5, 19)),
        (72, 5, 2, 1, (2, 16), (5, 9)),  # what is added is added behind the activation
        (8, 7, 1, 1, wide, (3, 19)),
        (12, 3, 1, 2, (1, 16), (3, 19)),
        (3, 3, 2, 1, wide, (6, 19)),
        (8, 3, 2, 1, (1, 16), (5, 37)),
    ):
        padding = dilation * (kernel - 1) // 2
        layer = Conv(channels, channels, *((one,) * 2 for one in (kernel, stride, padding, dilation)), groups=channels,
                     activation="silu", adds_behind=channels == 72)  # fmt: skip
        sequence = Sequence((layer,))
        x = torch.randn(2, channels, *size).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(channels, 1, kernel, kernel), torch.randn(channels)
        out = torch.empty(2, channels, *sequence.sizes(size)[-1]).contiguous(memory_format=torch.channels_last)
        out.fill_(float("nan"))
        added = torch.randn_like(out)
        expected = run_plain(sequence, [Parameters(weight.double(), bias.double())], x.double(), added.double())
        got = depthwise(layer, x, taps_of(weight), bias, added, out, strip)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def check_products():
    from joulemark.merged.bricks import Parameters, run_plain
    from joulemark.merged.pointwise import product
    from joulemark.merged.sequence import Conv, Sequence

    for inputs, outputs, gated, adds, biased, activation, tile in (
        (64, 2, False, None, True, "none", (64, 16)),
        (24, 40, True, "before", True, "none", (64, 64)),
        (5, 70, False, None, False, "silu", (16, 32)),
        (96, 16, True, None, True, "relu6", (32, 16)),
        (130, 33, False, "before", True, "relu", (64, 16)),
        (16, 20, True, "behind", True, "leaky", (64, 32)),
        (48, 24, False, None, True, "gelu", (16, 32)),  # three steps of 16 channels
    ):
        layer = Conv(inputs, outputs, (1, 1), (1, 1), (0, 0), (1, 1), 1, activation, adds_behind=adds == "behind")
        x = torch.randn(3, inputs, 7, 9).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(outputs, inputs, 1, 1), torch.randn(outputs) if biased else None
        gate = torch.rand(3, inputs, 1, 1) if gated else None
        out = torch.full((3, outputs, 7, 9), float("nan")).contiguous(memory_format=torch.channels_last)
        residual = torch.randn_like(out) if adds else None
        y = (x if gate is None else x * gate).double()
        given = Parameters(weight.double(), None if bias is None else bias.double())
        expected = run_plain(Sequence((layer,)), [given], y, None if residual is None else residual.double())
        room, place = room_for(out, outputs % 8)
        for where in (out, place):
            got = product(layer, x, weight, bias, residual, gate, where, tile)
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
        assert_empty_around(room, place)


def check_gathered():
    from joulemark.merged.bricks import Parameters, run_plain
    from joulemark.merged.gather import gathered, gathers
    from joulemark.merged.sequence import Conv, Sequence

    for inputs, outputs, kernel, stride, padding, dilation, activation, tile in (
        (3, 24, (3, 3), (2, 2), (1, 1), (1, 1), "silu", (16, 32)),
        (1, 5, (5, 7), (1, 1), (0, 0), (1, 1), "none", (32, 16)),
        (4, 40, (3, 2), (1, 3), (2, 1), (2, 1), "relu", (16, 16)),
    ):
        layer = Conv(
            inputs, outputs, kernel, stride, padding, dilation, activation=activation, adds_behind=activation == "silu"
        )
        assert gathers(layer)
        sequence = Sequence((layer,))
        x = torch.randn(2, inputs, 11, 14).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(outputs, inputs, *kernel), torch.randn(outputs)
        out = torch.full((2, outputs, *sequence.sizes((11, 14))[-1]), float("nan"))
        out = out.contiguous(memory_format=torch.channels_last)
        added = torch.randn_like(out)
        expected = run_plain(sequence, [Parameters(weight.double(), bias.double())], x.double(), added.double())
        arranged = weight.contiguous(memory_format=torch.channels_last)
        got = gathered(layer, x, arranged, bias, added, out, tile)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    assert not gathers(Conv(8, 8, (3, 3), (1, 1), (1, 1), (1, 1)))
    assert not gathers(Conv(8, 8, (1, 1), (1, 1), (0, 0), (1, 1)))


FORMATS = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of results → what rounding them once, and intermediate ones in fp32, makes of them at most."""


def normed_case(channels, kernel, stride, norm, activation, size, dtype, groups=None, outputs=None, behind=False):
    """A layer, its parameters, an input, what is added to it, and what comes of it in float64."""
    from joulemark.merged.bricks import Parameters, run_plain
    from joulemark.merged.sequence import Conv, Sequence

    outputs = outputs or channels
    layer = Conv(channels, outputs, *((one,) * 2 for one in (kernel, stride, kernel // 2, 1)),
                 groups=groups or channels, activation=activation, norm=norm, adds_behind=behind)  # fmt: skip
    sequence, last = Sequence((layer,)), torch.channels_last
    x = (torch.randn(2, channels, *size) + 1).to(dtype).contiguous(memory_format=last)
    weight = torch.randn(outputs, channels // layer.groups, kernel, kernel).to(dtype)
    bias, affine = (2 * torch.randn(outputs)).to(dtype), torch.randn(2, outputs).to(dtype)
    out_size = sequence.sizes(size)[-1]
    added = torch.randn(2, outputs, *out_size).to(dtype).contiguous(memory_format=last)
    wide = Parameters(weight.double(), bias.double(), None if norm is None else affine.double())
    given = Parameters(weight, bias, None if norm is None else affine)
    return layer, given, x, added, lambda added: run_plain(sequence, [wide], x.double(), added)


def check_slides():
    from joulemark.merged.paths import _bias_of
    from joulemark.merged.pointwise import taps_of
    from joulemark.merged.sliding import depthwise, slides

    for channels, kernel, stride, norm, activation, size, dtype, strip, adds in (
        (40, 7, 1, 1e-6, "none", (8, 3), torch.bfloat16, (7, 4), False),  # in three parts, the last one not full
        (5, 3, 1, 1e-6, "none", (4, 9), torch.float16, (4, 8), False),
        (24, 5, 2, 1e-2, "gelu", (7, 9), torch.float32, (2, 4), True),
        (70, 7, 1, None, "silu", (4, 5), torch.float32, (4, 8), True),  # two programs' channels
        (66, 3, 2, None, "relu6", (9, 10), torch.bfloat16, (4, 8), False),
        (40, 5, 1, None, "silu", (5, 3), torch.float16, (5, 4), True),
        (8, 2, 5, None, "relu", (16, 11), torch.float16, (3, 4), False),  # lines that no output wants
    ):
        case = normed_case(channels, kernel, stride, norm, activation, size, dtype, behind=activation == "gelu")
        layer, given, x, added, expected = case
        assert slides(layer)
        out = torch.full_like(added, float("nan"))
        got = depthwise(layer, x, taps_of(given.weight), _bias_of(given), added if adds else None, out, strip)
        wanted = expected(added.double() if adds else None)
        torch.testing.assert_close(got.double(), wanted, rtol=FORMATS[dtype], atol=FORMATS[dtype])


def check_norms():
    from joulemark.merged.bricks import finished
    from joulemark.merged.gather import gathered, gathers, tiles_of
    from joulemark.merged.normalize import normalized
    from joulemark.merged.norms import channel_norm
    from joulemark.merged.paths import _bias_of
    from joulemark.merged.sequence import Conv

    for channels, dtype, eps, activation, biased, adds in (
        (3, torch.float32, 1e-5, None, False, None),
        (40, torch.bfloat16, 1e-6, None, False, None),
        (96, torch.float16, 0.5, "relu", True, "before"),
        (130, torch.float32, 1e-6, "gelu", True, None),
        (20, torch.float32, 1e-6, "leaky", True, "behind"),
    ):
        shape = (channels, channels, (1, 1), (1, 1), (0, 0), (1, 1))
        layer = activation and Conv(*shape, activation=activation, norm=eps, adds_behind=adds == "behind")
        x = (torch.randn(2, channels, 3, 5) * 3 + 2).to(dtype).contiguous(memory_format=torch.channels_last)
        bias, affine, added = torch.randn(channels).to(dtype), torch.randn(2, channels).to(dtype), torch.randn_like(x)
        y = x.double() + (bias.double()[:, None, None] if biased else 0)
        expected = channel_norm(y, affine.double(), eps)
        expected = finished(layer, expected, added.double() if adds else None) if layer else expected
        out = torch.full_like(x, float("nan"))
        got = normalized(x, bias if biased else None, affine, eps, out, layer, added if adds else None)
        torch.testing.assert_close(got.double(), expected, rtol=FORMATS[dtype], atol=FORMATS[dtype])
    for outputs, activation, adds in ((20, "none", False), (70, "silu", True)):
        layer, given, x, added, expected = normed_case(3, 4, 4, 1e-6, activation, (7, 9), torch.float32, 1, outputs)
        assert gathers(layer)
        weight = given.weight.contiguous(memory_format=torch.channels_last)
        out = torch.full_like(added, float("nan"))
        got = gathered(layer, x, weight, _bias_of(given), added if adds else None, out, tiles_of(layer)[0])
        wanted = expected(added.double() if adds else None)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def check_stems():
    from joulemark.merged.bricks import Parameters, run_plain
    from joulemark.merged.sequence import Conv, Sequence
    from joulemark.merged.stem import has_rows, rows_of, stem

    for inputs, outputs, kernel, stride, padding, size, activation, tile in (
        (3, 24, (7, 7), (2, 2), (3, 3), (13, 18), "relu", (32, 16)),
        (4, 5, (5, 8), (1, 3), (0, 2), (9, 21), "none", (16, 16)),
        (2, 40, (3, 5, 7), (1, 2, 2), (1, 2, 3), (3, 7, 9), "leaky", (16, 32)),
        (3, 16, (3, 3, 3), (2, 1, 1), (1, 1, 1), (5, 6, 7), "silu", (16, 16)),
        (1, 8, (4, 4), (4, 4), (0, 0), (8, 13), "gelu", (16, 16)),
    ):
        ones = (1,) * len(kernel)
        layer = Conv(inputs, outputs, kernel, stride, padding, ones, activation=activation)
        assert has_rows(layer)
        sequence = Sequence((layer,))
        memory = {2: torch.channels_last, 3: torch.channels_last_3d}[len(kernel)]
        x = torch.randn(2, inputs, *size).contiguous(memory_format=memory)
        weight, bias = torch.randn(outputs, inputs, *kernel), torch.randn(outputs)
        for given in (bias, None) if inputs == 3 else (bias,):
            expected = run_plain(
                sequence, [Parameters(weight.double(), None if given is None else given.double())], x.double()
            )
            out = torch.full(expected.shape, float("nan")).contiguous(memory_format=memory)
            got = stem(layer, x, rows_of(weight), given, out, tile)
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    for inputs, kernel, dilation in ((8, (7, 7), 1), (3, (3, 1), 1), (3, (7, 9), 1), (3, (7, 7), 2), (3, (97,), 1)):
        ones = (1,) * len(kernel)
        assert not has_rows(Conv(inputs, 8, kernel, ones, (0,) * len(kernel), tuple(dilation * one for one in ones)))


def check_poolings():
    from joulemark.merged.pooling import Pooling
    from joulemark.merged.windows import pooled

    for channels, size, kernel, stride, padding in (
        (8, (9, 14), (3, 3), (2, 2), (1, 1)),
        (70, (6, 5), (2, 2), (2, 2), (0, 0)),
        (16, (7, 5), (2, 2), (2, 2), (0, 0)),
        (3, (5, 7), (3, 2), (1, 1), (1, 0)),
        (5, (4, 6, 5), (3, 2, 3), (2, 1, 2), (1, 1, 0)),
    ):
        memory = {2: torch.channels_last, 3: torch.channels_last_3d}[len(size)]
        x = torch.randn(2, channels, *size).contiguous(memory_format=memory)
        for largest, counted in ((True, True), (False, True), (False, False)):
            module = Pooling(largest, kernel, stride, padding, counted)
            got = pooled(x, largest, kernel, stride, padding, counted)
            assert got.is_contiguous(memory_format=memory)
            torch.testing.assert_close(got, module.in_operators(x), rtol=1e-5, atol=1e-6)
            room, place = room_for(got, 5)
            assert pooled(x, largest, kernel, stride, padding, counted, place) is place
            assert torch.equal(place, got)
            assert_empty_around(room, place)
            if module.keeps:
                room, place = room_for(x, 8, 1)
                assert torch.equal(pooled(x, largest, kernel, stride, padding, counted, None, place), got)
                assert torch.equal(place, x)
                assert_empty_around(room, place)


def room_for(like, before, behind=3):
    """Not-a-numbers with room for a tensor among their channels, and that place."""
    shape = (like.shape[0], before + like.shape[1] + behind, *like.shape[2:])
    memory = {4: torch.channels_last, 5: torch.channels_last_3d}[like.dim()]
    room = torch.empty(shape, dtype=like.dtype, memory_format=memory).fill_(float("nan"))
    return room, room.narrow(1, before, like.shape[1])


def assert_empty_around(room, place):
    assert int(room.isnan().sum()) == room.numel() - place.numel()


def check_spreads():
    from joulemark.merged.bricks import ACTIVATIONS as REFERENCE
    from joulemark.merged.spread import arranged, spread, tiles_for
    from joulemark.merged.upsampling import _OPERATORS

    for inputs, outputs, window, batch, size, activation, biased, dtype, tile in (
        (24, 16, (2, 2), 2, (5, 7), "none", True, torch.float32, (64, 64)),
        (5, 7, (2, 3), 1, (1, 3), "relu", False, torch.float32, (128, 16)),
        (40, 33, (2, 2), 1, (3, 3), "silu", True, torch.float16, (64, 64)),
        (16, 8, (2, 1, 3), 2, (2, 3, 2), "none", True, torch.float16, (64, 64)),
        (3, 70, (3, 3), 1, (7, 9), "leaky", True, torch.float32, (128, 256)),
    ):
        memory = {2: torch.channels_last, 3: torch.channels_last_3d}[len(size)]
        x = torch.randn(batch, inputs, *size).to(dtype).contiguous(memory_format=memory)
        weight = (torch.randn(inputs, outputs, *window) / inputs**0.5).to(dtype)
        bias = torch.randn(outputs).to(dtype) if biased else None
        wide = (weight.double(), None if bias is None else bias.double())
        expected = REFERENCE[activation](_OPERATORS[len(size)](x.double(), *wide, window))
        alone = torch.full(expected.shape, float("nan"), dtype=dtype).contiguous(memory_format=memory)
        room, place = room_for(alone, 8, 16)
        for out in (alone, place):
            got = spread(x, arranged(weight), bias, window, out, activation, tile)
            torch.testing.assert_close(got.double(), expected, rtol=FORMATS[dtype], atol=FORMATS[dtype])
        assert_empty_around(room, place)
    assert tiles_for(1 << 20, 256) == ((128, 128), (128, 256), (64, 64))
    assert tiles_for(49, 12) == ((64, 16),)


def check_copies():
    from joulemark.merged.copies import copied

    for channels, size, dtype in (
        ((8, 40, 16, 64), (3, 5), torch.float16),
        ((3, 70), (4, 2, 3), torch.float32),
        ((5,), (1, 1), torch.bfloat16),
    ):
        memory = {2: torch.channels_last, 3: torch.channels_last_3d}[len(size)]
        parts = [torch.randn(2, one, *size).to(dtype).contiguous(memory_format=memory) for one in channels]
        room, whole = room_for(torch.cat(parts, 1), 8, 8)
        copied(list(zip(parts, whole.split(channels, 1), strict=True)))
        assert torch.equal(whole, torch.cat(parts, 1))
        assert_empty_around(room, whole)


def check_joined_networks():
    """By the kernels themselves, where there is a GPU: skips and windows beside each other, an encoder's odd sizes."""
    from joulemark.merged import writers
    from joulemark.merged.fitting import fitted, without_needless_paddings
    from joulemark.merged.graph import find_chains, trace
    from joulemark.merged.joining import Joined, flatten_concatenations, join
    from joulemark.merged.pooling import replace_poolings
    from joulemark.merged.rewrite import rewrite
    from joulemark.merged.seams import keep_channels_last, weights_channels_last
    from joulemark.merged.setting import Setting
    from joulemark.merged.trials import Choice, unit_names
    from joulemark.merged.upsampling import replace_upsamplings
    from joulemark.workloads.networks import Branches, UNet

    writers.on_gpu = lambda x: True
    setting = Setting(torch.device("cpu"), "tf32", None, (), False)
    pools = torch.nn.MaxPool2d(3, 2), torch.nn.AvgPool2d(3, 2)
    inner = Branches(torch.nn.Conv2d(5, 3, 3, 2), pools[1])
    nested = Branches(pools[0], inner, torch.nn.Conv2d(5, 8, 3, 2, bias=False))
    pointwise = torch.nn.Sequential(torch.nn.Conv2d(5, 8, 1), torch.nn.ReLU())
    all_, some = "2 of 2 parts written in place", "1 of 2 parts written in place"
    for model, shape, others, told, fits in (
        (UNet(width=3), (1, 3, 16, 32), [(2, 3, 16, 16), (1, 3, 21, 17)], 4 * [all_], 4),
        (UNet(width=2), (1, 3, 24, 17), [(1, 3, 16, 16)], [some, all_, all_, some], 2),  # 3 and 17 are odd
        (Branches(torch.nn.AvgPool2d(3, 1, 1), pointwise), (2, 5, 4, 7), [(1, 5, 3, 3)], [all_], 0),
        (nested, (2, 5, 9, 13), [(1, 5, 10, 8)], ["2 of 4 parts written in place"], 0),
    ):
        model = model.eval()
        images = [torch.randn(one).contiguous(memory_format=torch.channels_last) for one in (shape, *others)]
        with torch.no_grad():
            expected = [model(x) for x in images]
            graph = trace(model, (images[0],))
            flatten_concatenations(graph)
            without_needless_paddings(graph)
            replace_poolings(graph, torch.device("cpu"), torch.float32)
            keep_channels_last(weights_channels_last(graph), (images[0],))
            assert all(one.path.startswith("spread") for one in replace_upsamplings(graph, setting))
            units = (one for chain in find_chains(graph)[0] for one in chain)
            tiles = ("", "tiles 16x16", "unmerged", None, None, None, None, "asked for")
            mine = [one for one in units if one.convolution.target == "branches.1.0" and one.activation == "relu"]
            rewrite(graph, [Choice(unit_names([one]), *tiles) for one in mine], setting)
            found = join(graph, setting)
            assert [one.how for one in found] == told
            for x, wanted in zip(images, expected, strict=True):
                torch.testing.assert_close(graph(x), wanted, rtol=1e-4, atol=1e-4)
        assert sum(isinstance(one, Joined) for one in graph.modules()) == len(found)
        assert sum(node.target is fitted for node in graph.graph.nodes) == fits


def check_excitations():
    from joulemark.merged.bricks import ACTIVATIONS as REFERENCE
    from joulemark.merged.excitation import squeeze_and_excite

    sizes = (
        (3, 40, 10, (9, 7), False),
        (2, 7, 3, (1, 1), False),
        (1, 700, 40, (3, 2), True),
        (1, 76, 70, (33, 34), False),  # squeezed channels in two turns; 36 pieces of each, 32 at a time
    )
    for batch, channels, squeezed, size, hard in sizes:
        x = torch.randn(batch, channels, *size).contiguous(memory_format=torch.channels_last)
        first = torch.randn(squeezed, channels) / 4, torch.randn(squeezed)
        second = torch.randn(squeezed, channels) / 4, torch.randn(channels)
        wide = [one.double() for one in (*first, *second)]
        hidden = REFERENCE["silu"](x.double().mean((2, 3)) @ wide[0].t() + wide[1])
        gate = (hidden @ wide[2] + wide[3])[:, :, None, None]
        expected = torch.nn.functional.hardsigmoid(gate) if hard else torch.sigmoid(gate)
        got = squeeze_and_excite(x, first, second, "silu", hard)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_every_kernel_gives_what_torch_gives():
    run_interpreted(
        "check_epilogues",
        "check_gelus",
        "check_what_is_not_finite",
        "check_depthwise",
        "check_slides",
        "check_norms",
        "check_products",
        "check_gathered",
        "check_stems",
        "check_poolings",
        "check_spreads",
        "check_copies",
        "check_joined_networks",
        "check_excitations",
    )


class Compiled:
    """Stands for a kernel: what launches it compiles it for a GPU that need not be there, 9.0."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, None

    def __getitem__(self, grid):
        assert all(one >= 1 for one in grid)
        return self.launch

    def launch(self, *given, **options):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
        signature, constants, aligned = {}, {}, {}
        for number, (one, value) in enumerate(zip(self.kernel.params, given, strict=True)):
            kind = types[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            signature[one.name] = "constexpr" if one.is_constexpr else kind
            if one.is_constexpr:
                constants[(number,)] = value
            if isinstance(value, torch.Tensor):
                aligned[(number,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, aligned)
        self.made = importlib.import_module("triton").compile(source, GPUTarget("cuda", 90, 32), options=options)


def test_pointwise_kernels_move_sixteen_bytes_at_a_time(monkeypatch, tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    from joulemark.merged import pointwise
    from joulemark.merged.sequence import Conv

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    after, product = Compiled(pointwise._epilogue), Compiled(pointwise._product)
    monkeypatch.setattr(pointwise, "_epilogue", after)
    monkeypatch.setattr(pointwise, "_product", product)
    layer = Conv(96, 384, (1, 1), (1, 1), (0, 0), (1, 1), activation="gelu")
    zeros = (torch.zeros(2, one, 8, 8, dtype=torch.bfloat16) for one in (96, 384))
    x, y = (one.contiguous(memory_format=torch.channels_last) for one in zeros)
    weight = torch.zeros(384, 96, 1, 1, dtype=torch.bfloat16)
    pointwise.epilogue(layer, y, weight[:, 0, 0, 0], y)
    pointwise.product(layer, x, weight, weight[:, 0, 0, 0], y, None, y, (128, 128))
    texts = [one.made.asm["ptx"] for one in (after, product)]
    moved = [re.findall(r"(ld|st)\.global(\S*)", one) for one in texts]
    assert set(moved[0]) == {("ld", ".v4.b32"), ("st", ".v4.b32")}
    assert {form for way, form in moved[1] if way == "st"} == {".v4.b32"}
    assert "rem.s64" not in texts[0]
    assert "wgmma.mma_async" in texts[1]
    assert all("selp.f32" not in one for one in texts)  # an exact error function selects between two polynomials


def test_kernels_with_norms_compile_for_a_gpu(monkeypatch, tmp_path):
    """What the interpreter takes, a compiler need not."""
    pytest.importorskip("triton.backends.nvidia")
    from joulemark.merged import gather, normalize, sliding
    from joulemark.merged.paths import _bias_of
    from joulemark.merged.pointwise import taps_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = [Compiled(one) for one in (sliding._slide, normalize._normalize, gather._gathered)]
    for module, one in zip((sliding, normalize, gather), kernels, strict=True):
        monkeypatch.setattr(module, one.kernel.fn.__name__, one)
    layer, given, x, added, _ = normed_case(96, 3, 1, 1e-6, "gelu", (8, 8), torch.bfloat16, behind=True)
    sliding.depthwise(layer, x, taps_of(given.weight), _bias_of(given), added, added, (2, 8))
    normalize.normalized(x, given.bias, given.affine, 1e-6, added, layer, added)
    layer, given, x, added, _ = normed_case(3, 3, 2, 1e-6, "none", (8, 8), torch.bfloat16, 1, 96)
    gather.gathered(layer, x, given.weight, _bias_of(given), added, added, gather.tiles_of(layer)[0])
    assert all(one.made.asm["cubin"] for one in kernels)


def test_kernels_that_write_beside_others_compile_for_a_gpu(monkeypatch, tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    from joulemark.merged import copies, spread, windows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = [Compiled(one) for one in (windows._windows, copies._copies, spread._spread)]
    for module, one in zip((windows, copies, spread), kernels, strict=True):
        monkeypatch.setattr(module, one.kernel.fn.__name__, one)
    x = torch.zeros(2, 8, 4, 6, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    _, place = room_for(x, 16)
    windows.pooled(x, True, (3, 3), (2, 2), (1, 1), True, None, place)
    copies.copied([(x, place)])
    weight, out = torch.zeros(4, 8, 8, dtype=torch.bfloat16), torch.zeros(2, 8, 8, 12, dtype=torch.bfloat16)
    spread.spread(x, weight, weight[0, 0], (2, 2), out, "relu", (64, 64))
    assert all(one.made.asm["cubin"] for one in kernels)


def test_an_excitation_compiles_for_a_gpu(monkeypatch, tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    from joulemark.merged import excitation

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = [Compiled(one) for one in (excitation._pool, excitation._excite)]
    for one in kernels:
        monkeypatch.setattr(excitation, one.kernel.fn.__name__, one)
    x = torch.zeros(2, 72, 4, 6, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.zeros(5, 72, dtype=torch.bfloat16), torch.zeros(72, dtype=torch.bfloat16)
    assert excitation.squeeze_and_excite(x, (weight, bias[:5]), (weight, bias), "silu", False).shape == (2, 72, 1, 1)
    assert all(one.made.asm["cubin"] for one in kernels)


def test_pooling_is_cut_into_as_many_programs_as_run_at_once():
    pytest.importorskip("triton")
    from joulemark.merged.excitation import _POOLED, split_for

    shapes = [(32, 8, 112**2), (96, 4, 56**2), (240, 10, 28**2), (480, 20, 14**2), (672, 28, 49), (1152, 48, 49)]
    for batch, (channels, squeezed, pixels) in itertools.product((1, 32, 128), shapes):
        split = split_for(batch, channels, squeezed, pixels)
        blocks, loads = batch * -(-channels // 64), -(-pixels // 128)
        assert split.parts == 1 or split.parts * blocks <= _POOLED
        turns = -(-loads // split.parts)  # of the loop: one less takes more programs than run at once
        assert turns == 1 or -(-loads // (turns - 1)) * blocks > _POOLED
        assert split.parts == 1 or -(-loads // (split.parts - 1)) > turns
    assert split_for(1, 32, 8, 112**2).parts == 98
    assert split_for(32, 1152, 48, 49) == (1, 64, 64, 2)
    assert split_for(128, 7, 300, 1) == (1, 64, 16, 2)


def test_tiles_are_no_larger_than_what_they_cover():
    pytest.importorskip("triton")
    from joulemark.merged.pointwise import _depth, tiles_for

    assert [_depth(one, 2) for one in (8, 40, 64, 96, 144, 384)] == [16, 64, 64, 32, 64, 64]
    assert [_depth(one, 4) for one in (8, 24, 40, 48, 96)] == [16, 32, 32, 16, 32]
    assert tiles_for(1 << 20, 1280) == ((128, 128), (64, 128), (64, 64))
    assert tiles_for(1 << 20, 192) == ((128, 128), (128, 64), (64, 64))
    assert tiles_for(49, 1280) == ((64, 128), (64, 64))
    assert tiles_for(1 << 20, 24) == ((128, 32), (64, 32))
    assert tiles_for(49, 24) == ((64, 32),)


def test_strips_fit_the_line_and_two_lines_need_taps_without_dilation():
    pytest.importorskip("triton")
    from joulemark.merged.pointwise import strips_for
    from joulemark.merged.sequence import Conv

    layers = [Conv(8, 8, (3, 3), (1, 1), (1, 1), (dilation,) * 2, 8) for dilation in (1, 2)]
    assert strips_for(layers[0], 112) == ((2, 32), (2, 16), (1, 16))
    assert strips_for(layers[0], 14) == ((2, 16), (1, 16))
    assert strips_for(layers[1], 56) == ((1, 32), (1, 16))


def test_windows_over_an_image_without_a_batch_stay_torchs():
    from joulemark.merged.graph import trace
    from joulemark.merged.pooling import replace_poolings

    model, x = torch.nn.Sequential(torch.nn.MaxPool2d(2)), torch.randn(1, 3, 9, 9)
    assert list(replace_poolings(trace(model, (x,)), x.device, x.dtype)) == ["0"]
    alone = trace(model, (x[0],))
    assert replace_poolings(alone, x.device, x.dtype) == {}
    assert torch.equal(alone(x[0]), model(x[0]))
