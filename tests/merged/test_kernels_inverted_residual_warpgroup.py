"""Kernels for inverted residuals with the products of warpgroups, emulated, against float64; and their builds."""

from __future__ import annotations

import pytest

from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.inverted_residual_warpgroup import (
    Plan,
    candidates,
    inverted_residual_warpgroup,
    unsuited,
)
from joulemark.merged.sequence import Sequence
from tests.merged.every_kernel import first
from tests.merged.test_kernels_inverted_residual import MOBILENET_V2, error_of, sequence_of

CASES: dict[str, tuple[Sequence, Format, Plan, tuple[int, int, int]]] = {
    "cluster, images, odd batch": (
        sequence_of(32, 80, 32),
        "bf16",
        Plan(7, 7, 1, 16, images=2, split=4, narrow=True),
        (3, 7, 7),
    ),
    "cluster, stride 2, half a step of channels": (
        sequence_of(24, 64, 40, 2),
        "bf16",
        Plan(4, 7, 2, 32, split=2, narrow=True),
        (2, 9, 15),
    ),
    "ahead, bricks between bricks, silu": (
        sequence_of(8, 48, 8, activation="silu"),
        "fp16",
        Plan(3, 16, 1, 16, ahead=True),
        (2, 8, 19),
    ),
    "two tiles": (sequence_of(16, 64, 24), "bf16", Plan(8, 14, 2, 32), (1, 10, 14)),
    "ahead, one chunk": (sequence_of(16, 32, 8), "bf16", Plan(4, 8, 1, 32, ahead=True), (2, 9, 9)),
    "more than 256 channels": (sequence_of(16, 32, 320), "bf16", Plan(4, 14, 1, 32), (1, 4, 9)),
    "one pixel": (sequence_of(16, 32, 16), "bf16", Plan(4, 8, 1, 32), (1, 1, 1)),
}
"""The first three together go through every branch of the kernel's text."""


@pytest.mark.parametrize("case", first(3, CASES))
def test_against_float64(case: str) -> None:
    sequence, form, plan, shape = CASES[case]
    description = Description(sequence, form)
    kernel = inverted_residual_warpgroup(description, plan)
    for descending in (False, True):  # copies land late in the one, at once in the other
        assert error_of(kernel, shape, descending=descending, resident=1) < (1e-2 if form == "bf16" else 2e-3)


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
    assert [Device().clusters(size) for size in (1, 2, 4, 8)] == [132, 66, 31, 15]
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
        (Plan(28, 64, 1), "at most 32"),
        (Plan(7, 7, 1, 32, split=2, ahead=True), "brought ahead"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        inverted_residual_warpgroup(Description(sequence_of(16, 96, 16), "bf16"), plan)


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
