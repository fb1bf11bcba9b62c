"""Kernels for fronts of inverted residuals, emulated, against float64; their builds; where EfficientNet has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchvision import models

from joulemark.merged.graph import find_chains, range_segment, trace
from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.expand_depthwise import Plan, candidates, expand_depthwise, unsuited
from joulemark.merged.sequence import Activation, Conv, Sequence
from joulemark.merged.squeeze import replace_excitations
from tests.merged.every_kernel import crossed, first
from tests.merged.test_kernels_inverted_residual import error_of, pointwise

EFFICIENTNET_B0 = {
    # (input, hidden channels, window, stride, size of the input)
    "2.0": (16, 96, 3, 2, 112),
    "2.1": (24, 144, 3, 1, 56),
    "3.0": (24, 144, 5, 2, 56),
    "3.1": (40, 240, 5, 1, 28),
    "4.0": (40, 240, 3, 2, 28),
    "4.1": (80, 480, 3, 1, 14),
    "5.0": (80, 480, 5, 1, 14),
    "5.1": (112, 672, 5, 1, 14),
    "6.0": (112, 672, 5, 2, 14),
    "6.1": (192, 1152, 5, 1, 7),
    "7.0": (192, 1152, 3, 1, 7),
}
LIMITS: dict[Format, float] = {"bf16": 1e-2, "fp16": 2e-3}


def front(inputs: int, hidden: int, window: int, stride: int = 1, activation: Activation = "silu") -> Sequence:
    half = window // 2
    shape = ((window, window), (stride, stride), (half, half), (1, 1))
    return Sequence((pointwise(inputs, hidden, activation), Conv(hidden, hidden, *shape, hidden, activation)))


CASES = {
    "5×5, groups": (front(16, 104, 5), Plan(4, 28, 2, groups=2), (2, 7, 31)),
    "5×5, stride 2, narrow, parts": (front(24, 104, 5, 2), Plan(4, 7, 2, narrow=True, parts=2), (3, 8, 15)),
    "3×3, stride 2, one buffer": (front(24, 72, 3, 2), Plan(4, 14, 1, buffers=1), (1, 9, 17)),
    "3×3, narrow, shared loads": (
        front(96, 40, 3, 1, "relu6"),
        Plan(4, 7, 1, narrow=True, together=3),
        (3, 7, 9),
    ),
    "5×5, one pixel": (front(16, 32, 5), Plan(2, 8, 1), (1, 1, 1)),
    "5×5, seven rows": (front(8, 32, 5, 1, "none"), Plan(7, 14, 7), (1, 15, 17)),
    "3×3, parts and groups": (front(16, 136, 3, 1, "relu"), Plan(4, 14, 4, groups=2, parts=2), (5, 5, 9)),
    "5×5, stride 2, wide": (front(80, 32, 5, 2), Plan(4, 14, 2, together=2), (3, 9, 17)),
}
TELLING = 4
"""Cases that are always tested: together they go through every branch of the kernel's text."""


@pytest.mark.parametrize("case", first(TELLING, CASES))
@pytest.mark.parametrize("format_", first(1, LIMITS))
def test_against_float64(case: str, format_: Format) -> None:
    torch.manual_seed(len(case))
    sequence, plan, shape = CASES[case]
    assert error_of(expand_depthwise(Description(sequence, format_), plan), shape) < LIMITS[format_]


def test_any_order_of_warps_without_biases_in_fp16() -> None:
    torch.manual_seed(3)
    sequence, plan, shape = CASES["5×5, groups"]
    kernel = expand_depthwise(Description(sequence, "fp16"), plan)
    assert error_of(kernel, shape, descending=True, bias=False) < LIMITS["fp16"]


@pytest.mark.parametrize(
    ("name", "architecture"),
    crossed(
        first(2, sorted(EFFICIENTNET_B0, key=["3.1", "6.0"].__contains__, reverse=True)), ["sm_90a", "sm_80", "sm_100"]
    ),
)
@pytest.mark.parametrize("batch", first(1, [128, 32, 1]))
def test_efficientnet_has_plans_that_build_without_spills(name: str, architecture: str, batch: int) -> None:
    inputs, hidden, window, stride, size = EFFICIENTNET_B0[name]
    description = Description(front(inputs, hidden, window, stride), "bf16")
    device = Device(108, 164 * 1024, 163 * 1024) if architecture == "sm_80" else Device()
    most = 2 if architecture == "sm_90a" else 6  # whose registers the ranking was made with
    promising = candidates(description, (size, size), batch, device, limit=most)
    kernels = [expand_depthwise(description, plan) for plan in promising]
    assert all(one.shared <= device.block_shared for one in kernels)
    built = (build(one, architecture) for one in kernels)
    assert any((made.spilled, made.stack) == (0, 0) for made in built)


def test_counts_grow_with_the_window_and_parts_share_the_chunks() -> None:
    plan = Plan(14, 14, 2)
    small, large = (expand_depthwise(Description(front(80, 480, window), "bf16"), plan).counts for window in (3, 5))
    assert small is not None
    assert large is not None
    of_3, of_5 = (one((14, 14), 132, Device()) for one in (small, large))
    assert of_5["depthwise_tile"] == pytest.approx(of_3["depthwise_tile"] * 13 / 5)  # products of a tile
    assert of_3["depthwise_tile"] == 15 * 4 * 14  # one block per multiprocessor: chunks, octets, tiles
    parted = expand_depthwise(Description(front(80, 480, 3), "bf16"), replace(plan, parts=3)).counts
    assert parted is not None
    shared = parted((14, 14), 44, Device())
    assert shared["depthwise_tile"] == pytest.approx(of_3["depthwise_tile"] / 3)


def test_rows_outside_of_the_image_are_not_expanded() -> None:
    """A brick that is the whole image of 14² has 18 rows of 18 pixels: of 21 tiles two lie above it and three below."""
    counts = expand_depthwise(Description(front(16, 32, 5), "bf16"), Plan(14, 14, 2)).counts
    assert counts is not None
    each = counts((14, 14), 132, Device())["expand_tile"]
    assert each == pytest.approx(16)
    halves = expand_depthwise(Description(front(16, 32, 5), "bf16"), Plan(7, 14, 1)).counts
    assert halves is not None
    whole = halves((14, 14), 66, Device())["expand_tile"]
    assert whole == pytest.approx(14 * (1 - 4 / (2 * 13)))  # 13 tiles of 11 rows for 7 warps in two turns


def test_a_plan_that_does_not_fit_is_refused() -> None:
    description = Description(front(16, 96, 5), "bf16")
    with pytest.raises(ValueError, match="no whole number of 4 tiles"):
        expand_depthwise(description, Plan(6, 16, 4))
    with pytest.raises(ValueError, match="have no chunk each: 3 chunks"):
        expand_depthwise(description, Plan(4, 16, 4, groups=2, parts=2))
    with pytest.raises(ValueError, match="tiles to expand: at most"):
        expand_depthwise(description, Plan(56, 16, 28))


SQUARE = front(16, 96, 5).layers[1]


@pytest.mark.parametrize(
    ("sequence", "format_", "adds", "why"),
    [
        (front(16, 96, 5), "fp32", False, "in fp32"),
        (front(12, 96, 5), "bf16", False, "multiples of 8"),
        (front(16, 100, 5), "bf16", False, "multiples of 8"),
        (front(16, 96, 5, activation="gelu"), "bf16", False, "activations are"),
        (front(16, 96, 7), "bf16", False, "3×3 or 5×5"),
        (front(16, 96, 5, 3), "bf16", False, "3×3 or 5×5"),
        (Sequence((pointwise(16, 96, "silu"), replace(SQUARE, padding=(0, 0)))), "bf16", False, "3×3 or 5×5"),
        (Sequence((pointwise(16, 96, "silu"), replace(SQUARE, groups=48))), "bf16", False, "3×3 or 5×5"),
        (Sequence((pointwise(16, 96, "silu"),)), "bf16", False, "two layers"),
        (front(16, 96, 5), "bf16", True, "adds nothing"),
        (Sequence((pointwise(16, 96, "silu"), replace(SQUARE, residual=1))), "bf16", False, "adds nothing"),
    ],
)
def test_what_it_is_not_made_for(sequence: Sequence, format_: Format, adds: bool, why: str) -> None:
    description = Description(sequence, format_, adds)
    assert why in (unsuited(description) or "")
    for refused in (
        lambda: expand_depthwise(description, Plan(4, 16, 4)),
        lambda: candidates(description, (9, 9), 1, Device()),
    ):
        with pytest.raises(ValueError, match="cannot be merged as the front of an inverted residual"):
            refused()


def test_every_block_of_efficientnet_that_expands_has_a_front() -> None:
    """All MBConvs but the first, whose depthwise reads the stem: two layers in front of each excitation."""
    with torch.device("meta"):
        graph = trace(models.efficientnet_b0(weights=None).bfloat16(), (torch.empty(1, 3, 224, 224).bfloat16(),))
    replace_excitations(graph)
    chains, _ = find_chains(graph)
    pairs = [chain[n : n + 2] for chain in chains for n in range(len(chain) - 1)]
    segments = [segment for pair in pairs if (segment := range_segment(pair)) is not None]
    fronts = [one for one in segments if unsuited(Description(one.sequence, "bf16")) is None]
    shapes = {(*(one.sequence.channels(n) for n in (0, 1)), *one.sequence.layers[1].kernel[:1]) for one in fronts}
    assert len(fronts) == 15
    assert shapes == {shape[:3] for shape in EFFICIENTNET_B0.values()}
