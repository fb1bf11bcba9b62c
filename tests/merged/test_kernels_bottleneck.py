"""Kernels for bottlenecks, emulated, against float64; and their builds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from joulemark.merged.bricks import Parameters, run_plain
from joulemark.merged.kernels import Description, build, emulate
from joulemark.merged.kernels import bottleneck_warpgroup as warpgroups
from joulemark.merged.kernels.bottleneck import Plan, bottleneck, candidates, unsuited
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.sequence import Activation, Conv, Sequence
from tests.merged.every_kernel import first
from tests.merged.kernels.machine_code import products_of_warpgroups


def pointwise(inputs: int, outputs: int, activation: Activation, residual: int | None = None) -> Conv:
    return Conv(inputs, outputs, (1, 1), (1, 1), (0, 0), (1, 1), 1, activation, residual)


def sequence_of(channels: int, middle: int, activation: Activation = "relu", added: bool = True) -> Sequence:
    inner = Conv(middle, middle, (3, 3), (1, 1), (1, 1), (1, 1), 1, activation)
    last = pointwise(middle, channels, activation, 0 if added else None)
    return Sequence((pointwise(channels, middle, activation), inner, last))


def projected(inputs: int, outputs: int, activation: Activation = "relu") -> Sequence:
    """With a pointwise convolution of the input added, a part of the last layer."""
    *before, _ = sequence_of(inputs, 64, activation).layers
    return Sequence((*before, replace(pointwise(64 + inputs, outputs, activation), joined=0)))


def relative_error(
    description: Description, plan: Plan | warpgroups.Plan, shape: tuple[int, int, int], **more: bool | int
) -> float:
    """Of the emulated kernel, on fresh random numbers, against float64."""
    make = bottleneck if isinstance(plan, Plan) else warpgroups.bottleneck_warpgroup
    kernel, parameters = make(description, plan), []  # type: ignore[arg-type]
    for layer in description.sequence.layers:
        scale = (2 / (layer.in_channels * layer.kernel[0] * layer.kernel[1])) ** 0.5
        weight = torch.randn(layer.out_channels, layer.in_channels, *layer.kernel) * scale
        parameters.append(Parameters(weight.to(description.dtype), torch.randn(layer.out_channels) * 0.1))
    x = torch.randn(shape[0], description.sequence.channels(0), *shape[1:]).to(description.dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    y = emulate.run(kernel, x, kernel.pack(parameters), **more)  # type: ignore[arg-type]
    exact = [Parameters(one.weight.double(), one.bias.double()) for one in parameters if one.bias is not None]
    expected = run_plain(description.sequence, exact, x.double())
    return float((y.double() - expected).norm() / expected.norm())


CASES = {
    "two groups": (sequence_of(64, 32), Plan(4, 14, 2), (1, 5, 17)),
    "narrow": (sequence_of(64, 32), Plan(4, 8, 1, groups=1, narrow=True, together=1), (3, 7, 9)),
    "more groups than bricks": (sequence_of(32, 32), Plan(4, 16, 4, groups=3), (1, 4, 5)),
    "no residual": (sequence_of(64, 32, added=False), Plan(2, 14, 1, groups=1), (2, 3, 15)),
    "warpgroups": (sequence_of(64, 64), warpgroups.Plan(4, 14, 1, 1), (1, 5, 17)),
    "warpgroups share a brick": (sequence_of(128, 64, "silu"), warpgroups.Plan(4, 28, 2, 2), (3, 5, 30)),
    "warpgroups, no residual": (sequence_of(64, 64, added=False), warpgroups.Plan(2, 16, 2, 1), (2, 3, 15)),
    "projected": (projected(64, 256), warpgroups.Plan(4, 14, 1, 1), (1, 5, 17)),
    "projected, shared": (projected(96, 128, "silu"), warpgroups.Plan(4, 28, 2, 2), (3, 5, 30)),
    "warpgroups without a brick": (projected(64, 64), warpgroups.Plan(2, 16, 2, 1), (1, 2, 15)),
    "64 inside": (sequence_of(128, 64), Plan(4, 16, 4, groups=3), (3, 9, 18)),
}


TELLING = ["two groups", "narrow", "no residual", "projected", "warpgroups share a brick"]
TELLING += ["warpgroups, no residual", "warpgroups without a brick"]


@pytest.mark.parametrize("case", first(len(TELLING), [*TELLING, *(one for one in CASES if one not in TELLING)]))
def test_against_float64(case: str) -> None:
    torch.manual_seed(len(case))
    sequence, plan, shape = CASES[case]
    assert relative_error(Description(sequence, "bf16"), plan, shape) < 1e-2


@pytest.mark.parametrize("activation", first(1, ["silu", "none", "relu6"]))
def test_activations_in_fp16(activation: Activation) -> None:
    description = Description(sequence_of(32, 32, activation), "fp16")
    assert relative_error(description, Plan(4, 16, 2), (2, 5, 9), descending=True) < 2e-3


@pytest.mark.parametrize("resident", [1, 3])
def test_any_number_of_blocks(resident: int) -> None:
    description = Description(sequence_of(32, 32), "bf16")
    assert relative_error(description, Plan(2, 8, 1, groups=2, narrow=True), (2, 7, 9), resident=resident) < 1e-2


@pytest.mark.parametrize(
    ("architecture", "plan"),
    first(
        2,
        [
            ("sm_80", Plan(4, 14, 1, groups=1)),
            ("sm_90a", Plan(8, 28, 4, groups=2, together=2)),
            ("sm_100", Plan(8, 28, 4, groups=2, together=2)),
        ],
    ),
)
def test_resnet_builds_without_spills(architecture: str, plan: Plan) -> None:
    kernel = bottleneck(Description(sequence_of(256, 64), "bf16"), plan)
    assert kernel.shared <= (163 if architecture == "sm_80" else 227) * 1024
    made = build(kernel, architecture)
    assert (made.spilled, made.stack) == (0, 0)


def test_products_of_warpgroups_build_for_hopper_alone() -> None:
    kernel = warpgroups.bottleneck_warpgroup(Description(sequence_of(256, 64), "bf16"), warpgroups.Plan(8, 28))
    assert (kernel.least, kernel.only) == (90, 90)
    made = build(kernel, "sm_90a")
    assert (made.spilled, made.stack) == (0, 0)
    # Of the reduction's 16 each second is waited for, whose registers are wanted; else the last: of the 3×3's 36, of 4.
    assert products_of_warpgroups(kernel) == (16 + 36 + 4, 8 + 1 + 1)
    with pytest.raises(ValueError, match="64 channels inside"):
        warpgroups.bottleneck_warpgroup(Description(sequence_of(256, 32), "bf16"), warpgroups.Plan(8, 28))


def test_resnets_first_bottleneck_builds_without_spills() -> None:
    description = Description(projected(64, 256), "bf16")
    plan = warpgroups.candidates(description, (56, 56), 32, Device())[0]
    kernel = warpgroups.bottleneck_warpgroup(description, plan)
    made = build(kernel, "sm_90a")
    assert (made.spilled, made.stack, made.serialized) == (0, 0, False)
    # The reduction's 4, the 3×3's 36, and 4 + 4 for 64 channels of the sum.
    assert products_of_warpgroups(kernel)[0] == 4 + 36 + 8


@pytest.mark.parametrize("device", [Device(), Device(108, 164 * 1024, 163 * 1024)])
def test_candidates_fit_the_device(device: Device) -> None:
    description = Description(sequence_of(256, 64), "bf16")
    plans = candidates(description, (56, 56), 64, device)
    assert plans
    for plan in plans:
        kernel = bottleneck(description, plan)
        assert kernel.shared <= device.block_shared
        assert kernel.edge[0] * kernel.edge[1] * 4 <= 56 * 56
    assert any(build(bottleneck(description, plan), "sm_80").spilled == 0 for plan in plans[:3])


def test_candidates_of_warpgroups_fill_the_device_at_batch_1() -> None:
    description = Description(sequence_of(256, 64), "bf16")
    many, one = (warpgroups.candidates(description, (56, 56), batch, Device())[0] for batch in (64, 1))
    assert one.height * one.width < many.height * many.width
    assert warpgroups.bottleneck_warpgroup(description, one).blocks(1, (56, 56), 132) > 50


def test_a_plan_that_does_not_fit_is_refused() -> None:
    description = Description(sequence_of(256, 64), "bf16")
    with pytest.raises(ValueError, match="no whole number of 4 tiles"):
        bottleneck(description, Plan(6, 16, 4))
    with pytest.raises(ValueError, match="bytes of shared memory"):
        bottleneck(description, Plan(8, 56, 4))


@pytest.mark.parametrize(
    ("sequence", "format_", "why"),
    [
        (sequence_of(64, 32), "tf32", "in tf32"),
        (sequence_of(512, 128), "bf16", "more than shared memory holds"),
        (sequence_of(64, 16), "bf16", "multiples of 32"),
        (projected(64, 256), "bf16", "only"),
        (sequence_of(64, 32, "gelu"), "bf16", "activations are"),
        (Sequence((pointwise(64, 32, "relu"), pointwise(32, 64, "relu"))), "bf16", "three layers"),
    ],
)
def test_what_it_is_not_made_for(sequence: Sequence, format_: Format, why: str) -> None:
    description = Description(sequence, format_)
    assert why in (unsuited(description) or "")
    with pytest.raises(ValueError, match="cannot be merged as a bottleneck"):
        bottleneck(description, Plan(4, 16, 4))
