"""Kernels for inverted residuals with the products of warpgroups, emulated, against float64; and their builds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import Description, KernelError, build
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.inverted_residual_warpgroup import (
    Plan,
    candidates,
    halves_unsuited,
    inverted_residual_warpgroup,
    unsuited,
)
from joulemark.merged.sequence import Activation, Sequence
from tests.merged.every_kernel import first
from tests.merged.test_kernels_inverted_residual import MOBILENET_V2, error_of, sequence_of

CASES: dict[str, tuple[Sequence, Format, Plan, tuple[int, int, int]]] = {
    "cluster of groups, images, odd batch": (
        sequence_of(32, 96, 32),
        "bf16",
        Plan(7, 7, 1, 16, images=2, split=3, narrow=True, groups=2, early=True),
        (3, 7, 7),
    ),
    "halves in a cluster, stride 2, half a step of channels": (
        sequence_of(24, 64, 40, 2),
        "bf16",
        Plan(4, 7, 2, 32, split=2, narrow=True, halves=True),
        (2, 9, 15),
    ),
    "ahead, bricks between bricks, silu": (
        sequence_of(8, 48, 8, activation="silu"),
        "fp16",
        Plan(3, 16, 1, 16, ahead=True),
        (2, 8, 19),
    ),
    "halves in wide tiles, groups in one block": (
        sequence_of(16, 80, 16),
        "bf16",
        Plan(4, 14, 1, 16, groups=3, halves=True),
        (1, 5, 14),
    ),
    "cluster, stride 2": (sequence_of(24, 64, 40, 2), "bf16", Plan(4, 7, 2, 32, split=2, narrow=True), (2, 9, 15)),
    "cluster of 4, images": (sequence_of(32, 80, 32), "bf16", Plan(7, 7, 1, 16, 2, 4, narrow=True), (3, 7, 7)),
    "halves, stride 2, wide": (sequence_of(24, 64, 40, 2), "bf16", Plan(4, 14, 2, 16, halves=True), (2, 15, 29)),
    "halves in fp16": (sequence_of(8, 48, 8), "fp16", Plan(3, 16, 1, 16, halves=True), (2, 8, 19)),
    "two tiles": (sequence_of(16, 64, 24), "bf16", Plan(8, 14, 2, 32), (1, 10, 14)),
    "ahead, one chunk": (sequence_of(16, 32, 8), "bf16", Plan(4, 8, 1, 32, ahead=True), (2, 9, 9)),
    "more than 256 channels": (sequence_of(16, 32, 320), "bf16", Plan(4, 14, 1, 32), (1, 4, 9)),
    "one pixel": (sequence_of(16, 32, 16), "bf16", Plan(4, 8, 1, 32), (1, 1, 1)),
}
"""The first four together go through every branch of the kernel's text."""


@pytest.mark.parametrize("case", first(4, CASES))
def test_against_float64(case: str) -> None:
    sequence, form, plan, shape = CASES[case]
    description = Description(sequence, form)
    kernel = inverted_residual_warpgroup(description, plan)
    for descending in (False, True):  # copies land late in the one, at once in the other
        assert error_of(kernel, shape, descending=descending, resident=1) < (1e-2 if form == "bf16" else 2e-3)


@pytest.mark.parametrize(
    ("layer", "weight", "bias", "said"),
    [
        (1, 1e-6, 0.0, "its depthwise's are 0.0"),
        (1, 2e4, 0.0, "its depthwise may sum up to"),
        (1, 1.0, 1e5, "its depthwise may sum up to"),
        (2, 1e-9, 0.0, "its projection's are 1 off"),
        (2, 1e6, 0.0, "its projection's are inf off"),
        (2, float("nan"), 0.0, "its projection's are nan off"),
        (0, 1e-9, 1e9, None),
        (2, 1.0, 1e9, None),
    ],
)
def test_halves_hold_no_weights_that_fp16_loses(layer: int, weight: float, bias: float, said: str | None) -> None:
    sequence = sequence_of(16, 32, 16)
    kernel = inverted_residual_warpgroup(Description(sequence), Plan(4, 8, 1, 32, narrow=True, halves=True))
    given = [
        Parameters(
            torch.empty(one.out_channels, one.in_channels // one.groups, *one.kernel).uniform_(0.5, 1).bfloat16(), None
        )
        for one in sequence.layers
    ]
    old = given[layer].weight
    given[layer] = Parameters(old * weight, torch.full((len(old),), bias).bfloat16())
    if said is None:
        kernel.pack(given)
        return
    with pytest.raises(KernelError, match=said):
        kernel.pack(given)


@pytest.mark.parametrize("name", first(2, sorted(MOBILENET_V2, key=["160-320", "64"].__contains__, reverse=True)))
def test_mobilenet_builds_without_spills_and_without_waits_between_products(name: str) -> None:
    inputs, hidden, outputs, stride, size = MOBILENET_V2[name]
    if hidden == inputs:
        pytest.skip("it has no expansion")
    description = Description(sequence_of(inputs, hidden, outputs, stride), "bf16")
    plan, *_ = candidates(description, (size, size), 64, Device(), limit=1)
    kernel = inverted_residual_warpgroup(description, plan)
    assert (kernel.least, kernel.only) == (90, 90)
    made = build(kernel, "sm_90a")
    assert (made.spilled, made.stack, made.serialized) == (0, 0, False)


def test_three_groups_of_small_maps_build_without_spills() -> None:
    plan = Plan(7, 7, 1, 32, split=2, narrow=True, groups=3, halves=True)
    made = build(inverted_residual_warpgroup(Description(sequence_of(160, 960, 160), "bf16"), plan), "sm_90a")
    assert (made.spilled, made.stack, made.serialized) == (0, 0, False)
    assert made.registers * 3 * 128 <= Device().registers


def test_small_maps_read_their_weights_seldom() -> None:
    description = Description(sequence_of(160, 960, 160), "bf16")
    for batch in (64, 1):
        plans = candidates(description, (7, 7), batch, Device(), limit=4)
        assert plans[0].split > 1
        for plan in plans:
            kernel = inverted_residual_warpgroup(description, plan)
            assert kernel.shared <= Device().block_shared
            rows = kernel.blocks(batch, (7, 7), 132) / (-(-batch // plan.images) * plan.split)
            assert rows == -(-7 // plan.height)


def test_a_round_more_is_counted_where_clusters_do_not_fit_into_groups_of_multiprocessors() -> None:
    """Of an H200, 64 images of 7×7 in pairs: 128 blocks in clusters of 4 took twice as long as in clusters of 2."""
    assert [Device().clusters(size) for size in (1, 2, 3, 4, 5, 8)] == [132, 66, 42, 31, 23, 15]
    assert Device(108).clusters(4) == 27  # of another device nothing is known
    description = Description(sequence_of(160, 960, 160), "bf16")

    def rounds(split: int, images: int) -> float:
        kernel = inverted_residual_warpgroup(description, Plan(7, 7, 1, 32, images, split, 1, True))
        assert kernel.counts is not None
        return kernel.counts((7, 7), 64, Device())["round"]

    assert [rounds(2, 1), rounds(2, 2), rounds(4, 2), rounds(4, 1), rounds(8, 2)] == [1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(7, 7, 1, 40), "multiple of 16"),
        (Plan(7, 7, 1, 64, split=4), "hidden channels over 4 blocks"),
        (Plan(7, 7, 1, 16, split=9, narrow=True), "1 to 8"),
        (Plan(28, 64, 1), "at most 32"),
        (Plan(7, 7, 1, 32, split=2, ahead=True), "brought ahead"),
        (Plan(7, 7, 1, 32, ahead=True, groups=2), "brought ahead"),
        (Plan(7, 7, 1, 32, split=2, narrow=True, groups=2), "for 2 groups"),
        (Plan(7, 7, 1, 16, narrow=True, groups=5), "1 to 4"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        inverted_residual_warpgroup(Description(sequence_of(16, 96, 16), "bf16"), plan)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
@pytest.mark.parametrize("activations", [("silu", "silu"), ("relu", "relu"), ("relu", "relu6"), ("relu6", "none")])
def test_halves_take_bounded_activations_alone(activations: tuple[Activation, Activation], form: Format) -> None:
    """fp16 ends at 65504, which nine taps of 7,282 exceed on the way to a sum that may be small."""
    layers = sequence_of(160, 960, 160).layers
    hidden = [replace(one, activation=activation) for one, activation in zip(layers, activations, strict=False)]
    unbounded = Description(Sequence((*hidden, layers[2])), form)
    with pytest.raises(ValueError, match="relu6"):
        inverted_residual_warpgroup(unbounded, Plan(7, 7, 1, 32, split=2, narrow=True, halves=True))
    assert halves_unsuited(Description(Sequence(layers), form)) is None


def test_no_halves_are_offered_for_silu_in_fp16() -> None:
    silu = Description(sequence_of(160, 960, 160, activation="silu"), "fp16")
    assert not any(plan.halves for plan in candidates(silu, (7, 7), 64, Device()))


def test_halves_are_offered_beside_tensor_cores_and_groups() -> None:
    plans = candidates(Description(sequence_of(160, 960, 160), "bf16"), (7, 7), 64, Device())
    kinds = {(plan.groups, plan.halves) for plan in plans if plan.split == 2}
    assert kinds >= {(1, True), (2, True), (3, True), (3, False)}
    assert all(plan.early for plan in plans)  # at most two blocks of each are on a multiprocessor
    many = candidates(Description(sequence_of(32, 192, 32), "bf16"), (56, 56), 64, Device())
    assert not any(plan.early for plan in many)


def test_groups_shorten_what_waits_in_turn_and_multiply_as_much() -> None:
    description = Description(sequence_of(160, 960, 160), "bf16")

    def counts(groups: int, halves: bool) -> dict[str, float]:
        kernel = inverted_residual_warpgroup(
            description, Plan(7, 7, 1, 32, 1, 2, 1, True, groups=groups, halves=halves)
        )
        assert kernel.counts is not None
        return dict(kernel.counts((7, 7), 64, Device()))

    one, three, half = counts(1, False), counts(3, False), counts(3, True)
    assert three["step_in_turn"] == one["step_in_turn"] / 3
    assert (three["product"], three["depthwise_octet"]) == (one["product"], one["depthwise_octet"])
    assert (half["depthwise_octet"], half["half_load"]) == (0, 60 * 4 * (10 + 4 * 3))  # octets, warps, taps and pixels


@pytest.mark.parametrize(
    ("sequence", "form", "why"),
    [
        (sequence_of(16, 96, 16), "fp32", "in fp32"),
        (sequence_of(32, 32, 16), "bf16", "without an expansion"),
        (sequence_of(16, 96, 264), "bf16", "products of one size"),
    ],
)
def test_what_it_is_not_made_for(sequence: Sequence, form: Format, why: str) -> None:
    assert why in (unsuited(Description(sequence, form)) or "")
    with pytest.raises(ValueError, match="cannot be merged as an inverted residual"):
        inverted_residual_warpgroup(Description(sequence, form), Plan(4, 16, 1))
