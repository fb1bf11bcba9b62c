"""Kernels for inverted residuals, emulated, against float64; and their builds for three generations of GPUs."""

from __future__ import annotations

import pytest
import torch

from joulemark.merged.bricks import Parameters, run_plain
from joulemark.merged.kernels import Description, Kernel, build, emulate
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.inverted_residual import Plan, candidates, inverted_residual, unsuited
from joulemark.merged.sequence import Activation, Conv, Sequence
from tests.merged.every_kernel import crossed, first

MOBILENET_V2 = {
    # (input, hidden, output channels, stride, size of the input)
    "first": (32, 32, 16, 1, 112),
    "16-24": (16, 96, 24, 2, 112),
    "24": (24, 144, 24, 1, 56),
    "24-32": (24, 144, 32, 2, 56),
    "32": (32, 192, 32, 1, 28),
    "32-64": (32, 192, 64, 2, 28),
    "64": (64, 384, 64, 1, 14),
    "64-96": (64, 384, 96, 1, 14),
    "96": (96, 576, 96, 1, 14),
    "96-160": (96, 576, 160, 2, 14),
    "160": (160, 960, 160, 1, 7),
    "160-320": (160, 960, 320, 1, 7),
}


def pointwise(inputs: int, outputs: int, activation: Activation, residual: int | None = None) -> Conv:
    return Conv(inputs, outputs, (1, 1), (1, 1), (0, 0), (1, 1), 1, activation, residual)


def sequence_of(inputs: int, hidden: int, outputs: int, stride: int = 1, activation: Activation = "relu6") -> Sequence:
    expansion = [pointwise(inputs, hidden, activation)] if hidden != inputs else []
    depthwise = Conv(hidden, hidden, (3, 3), (stride, stride), (1, 1), (1, 1), hidden, activation)
    added = 0 if stride == 1 and inputs == outputs else None
    return Sequence((*expansion, depthwise, pointwise(hidden, outputs, "none", added)))


def parameters_of(description: Description, bias: bool = True) -> list[Parameters]:
    made = []
    for layer in description.sequence.layers:
        shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
        weight = torch.randn(shape) * (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        given = torch.randn(layer.out_channels) * 0.1 if bias else None
        made.append(Parameters(weight.to(description.dtype), given))
    return made


def error_of(kernel: Kernel, shape: tuple[int, int, int], *, bias: bool = True, **more: bool | int) -> float:
    """Relative, of the emulated kernel, on fresh random numbers, against float64."""
    description = kernel.description
    parameters = parameters_of(description, bias)
    x = torch.randn(shape[0], description.sequence.channels(0), *shape[1:]).to(description.dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    y = emulate.run(kernel, x, kernel.pack(parameters), **more)  # type: ignore[arg-type]
    exact = [Parameters(one.weight.double(), None if one.bias is None else one.bias.double()) for one in parameters]
    expected = run_plain(description.sequence, exact, x.double())
    assert y.shape == expected.shape
    return float((y.double() - expected).norm() / expected.norm())


def relative_error(description: Description, plan: Plan, shape: tuple[int, int, int], **more: bool | int) -> float:
    return error_of(inverted_residual(description, plan), shape, **more)  # type: ignore[arg-type]


CASES = {
    "one strip": (sequence_of(16, 32, 16), Plan(4, 14, 4), (1, 5, 9)),
    "groups": (sequence_of(16, 96, 16), Plan(4, 28, 4, groups=2), (2, 7, 31)),
    "stride 2": (sequence_of(16, 32, 24, 2), Plan(4, 14, 2), (1, 9, 17)),
    "stride 2, even": (sequence_of(16, 32, 8, 2), Plan(4, 16, 1), (1, 10, 18)),
    "stride 2, narrow": (sequence_of(16, 32, 24, 2), Plan(4, 7, 2, narrow=True), (3, 8, 14)),
    "narrow, groups": (sequence_of(16, 64, 16), Plan(8, 7, 2, narrow=True, groups=2), (3, 7, 7)),
    "no expansion": (sequence_of(32, 32, 16), Plan(4, 14, 2), (1, 9, 17)),
    "no expansion, stride 2": (sequence_of(24, 24, 16, 2), Plan(4, 14, 2), (1, 9, 17)),
    "shared loads": (sequence_of(96, 64, 96), Plan(2, 14, 1, together=2), (1, 3, 14)),
    "parts": (sequence_of(32, 64, 32), Plan(4, 14, 2, parts=2), (2, 5, 15)),
    "parts, groups": (sequence_of(32, 64, 64, 2), Plan(2, 7, 1, narrow=True, parts=4, groups=2), (3, 7, 7)),
    "ahead, three share loads": (sequence_of(80, 40, 16), Plan(4, 14, 2, together=3, ahead=True), (2, 5, 15)),
    "seven rows, hidden no multiple of 32": (sequence_of(24, 40, 24), Plan(7, 14, 7, buffers=1), (1, 14, 17)),
    "ahead, no expansion": (sequence_of(24, 24, 16), Plan(4, 14, 2, ahead=True), (3, 7, 17)),
    "one pixel": (sequence_of(16, 32, 16), Plan(2, 8, 1), (1, 1, 1)),
}


TELLING = [
    "groups",
    "stride 2, narrow",
    "ahead, three share loads",
    "ahead, no expansion",
    "parts, groups",
    "seven rows, hidden no multiple of 32",
]
"""What is always tested: together they go through every branch of the kernel's text."""


@pytest.mark.parametrize("case", first(len(TELLING), [*TELLING, *(one for one in CASES if one not in TELLING)]))
def test_against_float64(case: str) -> None:
    torch.manual_seed(len(case))
    sequence, plan, shape = CASES[case]
    assert relative_error(Description(sequence, "bf16"), plan, shape) < 1e-2
    if plan.ahead:
        assert relative_error(Description(sequence, "bf16"), plan, shape, descending=True, resident=1) < 1e-2


@pytest.mark.parametrize("activation", first(1, ["silu", "none", "relu"]))
def test_activations_in_fp16(activation: Activation) -> None:
    description = Description(sequence_of(16, 32, 16, activation=activation), "fp16")
    assert relative_error(description, Plan(4, 12, 2), (2, 5, 13)) < 2e-3


def test_any_order_of_warps_without_biases() -> None:
    sequence, plan, shape = CASES["groups"]
    assert relative_error(Description(sequence, "bf16"), plan, shape, descending=True, bias=False) < 1e-2


@pytest.mark.parametrize(
    ("name", "architecture"),
    crossed(
        first(3, sorted(MOBILENET_V2, key=["24-32", "160-320", "32"].__contains__, reverse=True)),
        ["sm_90a", "sm_80", "sm_100"],
    ),
)
def test_mobilenet_has_plans_that_build_without_spills(name: str, architecture: str) -> None:
    inputs, hidden, outputs, stride, size = MOBILENET_V2[name]
    description = Description(sequence_of(inputs, hidden, outputs, stride), "bf16")
    device = Device(108, 164 * 1024, 163 * 1024) if architecture == "sm_80" else Device()
    promising = candidates(description, (size, size), 64, device, limit=6)
    built = (build(inverted_residual(description, plan), architecture) for plan in promising)
    assert any((made.spilled, made.stack) == (0, 0) for made in built)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    description = Description(sequence_of(16, 96, 16), "bf16")
    with pytest.raises(ValueError, match="no whole number of 4 tiles"):
        inverted_residual(description, Plan(6, 16, 4))
    with pytest.raises(ValueError, match="do not split into 4 parts"):
        inverted_residual(description, Plan(4, 16, 4, parts=4))
    with pytest.raises(ValueError, match="brought ahead"):
        inverted_residual(Description(sequence_of(8, 32, 64), "bf16"), Plan(4, 16, 4, ahead=True))


@pytest.mark.parametrize(
    ("sequence", "format_", "why"),
    [
        (sequence_of(16, 96, 16), "fp32", "in fp32"),
        (sequence_of(12, 96, 16), "bf16", "multiples of 8"),
        (sequence_of(16, 96, 16, activation="gelu"), "bf16", "activations are"),
        (sequence_of(16, 96, 16, 3), "bf16", "depthwise 3×3"),
        (Sequence((pointwise(16, 16, "relu"),)), "bf16", "two or three layers"),
    ],
)
def test_what_it_is_not_made_for(sequence: Sequence, format_: Format, why: str) -> None:
    description = Description(sequence, format_)
    assert why in (unsuited(description) or "")
    with pytest.raises(ValueError, match="cannot be merged as an inverted residual"):
        inverted_residual(description, Plan(4, 16, 4))
