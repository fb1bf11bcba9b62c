"""Chains of few channels by wgmma, emulated: depths, channels, formats, odd sizes, residuals, builds, refusals."""

from __future__ import annotations

import pytest
import torch

from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.stream_warpgroup import Plan, candidates, stream_warpgroup, swizzled, unsuited
from joulemark.merged.sequence import Shape
from tests.merged.every_kernel import crossed, first
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of
from tests.merged.kernels.machine_code import products_of_warpgroups

CHAINS: list[tuple[list[int], Plan, Shape]] = [
    ([32] * 3, Plan(1, 5), (2, 9, 66)),
    ([16] * 5, Plan(1, 4, 1, 3, 2), (1, 6, 60)),
    ([32] * 2, Plan(2, 8), (1, 5, 70)),
    ([32] * 4, Plan(1, 2, 1, 2, 2), (3, 3, 20)),
]


@pytest.mark.parametrize(("case", "descending"), crossed(first(2, CHAINS), [False, True]))
def test_chains(case: tuple[list[int], Plan, Shape], descending: bool) -> None:
    channels, plan, shape = case
    kernel = stream_warpgroup(Description(chain_of(channels, activation="none"), "bf16"), plan)
    assert error_of(kernel, shape, resident=2, descending=descending) < LIMITS["bf16"]


def test_channels_are_padded_and_differ_and_a_residual_comes_from_outside() -> None:
    description = Description(chain_of([3, 24, 5], activation="relu6"), "fp16", adds=True)
    assert error_of(stream_warpgroup(description, Plan(1, 4)), (1, 5, 13)) < LIMITS["fp16"]


def test_the_input_is_added() -> None:
    description = Description(chain_of([16] * 3, activation="leaky", residual=(1, 0), behind=True), "bf16")
    assert error_of(stream_warpgroup(description, Plan(1, 4)), (1, 5, 9)) < LIMITS["bf16"]


@pytest.mark.parametrize("row", [32, 64])
def test_rows_of_weights_lie_as_the_descriptor_says(row: int) -> None:
    """By the definition: byte address a of a matrix without swizzle lies at a, its bits 4-6 changed by bits 7-9."""
    rows = torch.arange(24 * row // 2, dtype=torch.int16).view(24, row // 2)
    address = torch.arange(0, 24 * row, 2)
    there = address ^ ((address >> 7 & (row // 16 - 1)) << 4)
    assert torch.equal(swizzled(rows).flatten()[there // 2], rows.flatten())


@pytest.mark.parametrize(
    ("channels", "size", "batch"),
    first(2, [([32] * 3, 512, 16), ([32] * 2, 512, 16), ([32] * 5, 512, 16), ([16] * 5, 1024, 8)]),
)
def test_best_candidates_build_without_spills(channels: list[int], size: int, batch: int) -> None:
    description = Description(chain_of(channels), "bf16")
    kernel = stream_warpgroup(description, candidates(description, (size, size), batch, Device())[0])
    assert kernel.shared <= Device().block_shared
    made = build(kernel, "sm_90a")
    assert (made.spilled, made.stack) == (0, 0)


def test_products_of_a_row_run_without_a_wait_between_them() -> None:
    kernel = stream_warpgroup(Description(chain_of([32] * 3), "bf16"), Plan(2, 64, 1, 12))
    # Two layers; the text holds five rows of each: two that begin a brick, three that repeat; six products in each.
    assert products_of_warpgroups(kernel) == (2 * 5 * 6, 2 * 5)


def test_candidates_of_32_channels_keep_enough_warpgroups_at_work() -> None:
    description = Description(chain_of([32] * 3), "bf16")
    plans = candidates(description, (512, 512), 16, Device())
    assert max(plan.tiles * plan.blocks for plan in plans) * 2 >= 4
    assert len({(plan.tiles, plan.blocks) for plan in plans}) >= 3


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (Description(chain_of([32] * 6), "bf16"), "5 layers"),
        (Description(chain_of([16] * 3, 3), "bf16"), "3 dimensions"),
        (Description(chain_of([32] * 3), "tf32"), "tf32"),
        (Description(chain_of([32, 40, 32]), "bf16"), "40 channels"),
        (Description(chain_of([16] * 4, residual=(1, 0)), "bf16"), "residual"),
    ],
)
def test_refusals(description: Description, said: str) -> None:
    assert said in str(unsuited(description))
    with pytest.raises(ValueError, match=said):
        stream_warpgroup(description, Plan())


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(3), "leave a thread 72 registers"),
        (Plan(1, 64, 2), "side by side"),
        (Plan(1, 64, 1, 64), "bytes of shared memory"),
        (Plan(1, 64, 1, 8, 1), "rings of two rows"),
    ],
)
def test_plans_that_do_not_fit(plan: Plan, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stream_warpgroup(Description(chain_of([32] * 3), "bf16"), plan)
