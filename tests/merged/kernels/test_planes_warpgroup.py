"""Volumes by wgmma, emulated: depths, channels, odd sizes, residuals, builds, refusals."""

from __future__ import annotations

import pytest

from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.planes_warpgroup import Plan, candidates, planes_warpgroup, unsuited
from tests.merged.every_kernel import crossed, first
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of
from tests.merged.kernels.machine_code import products_of_warpgroups

CHAINS = [
    ([16] * 3, Plan(1, 2, 3), (2, 5, 7, 17)),
    ([32] * 2, Plan(2, 1, 4), (1, 4, 17, 9)),
    ([16] * 4, Plan(1, 2, 2, 1, 3, 2), (1, 3, 5, 13)),
]


@pytest.mark.parametrize(("case", "descending"), crossed(first(1, CHAINS), [False, True]))
def test_chains(case: tuple[list[int], Plan, tuple[int, ...]], descending: bool) -> None:
    channels, plan, shape = case
    kernel = planes_warpgroup(Description(chain_of(channels, 3, activation="none"), "bf16"), plan)
    assert error_of(kernel, shape, resident=2, descending=descending) < LIMITS["bf16"]


def test_channels_are_padded_and_differ_and_the_input_is_added() -> None:
    description = Description(chain_of([5, 24, 5], 3, "relu6", residual=(1, 0)), "fp16")
    assert error_of(planes_warpgroup(description, Plan(1, 1, 4)), (1, 5, 4, 7)) < LIMITS["fp16"]


@pytest.mark.parametrize(("channels", "layers"), first(1, [(16, 2), (16, 1), (32, 1)]))
def test_best_candidates_build_without_spills(channels: int, layers: int) -> None:
    description = Description(chain_of([channels] * (layers + 1), 3), "bf16")
    kernel = planes_warpgroup(description, candidates(description, (128,) * 3, 1, Device())[0])
    made = build(kernel, "sm_90a")
    assert (made.spilled, made.stack) == (0, 0)
    # Of each layer the text holds five planes: nine taps, a product for each 16 channels, and one wait.
    assert products_of_warpgroups(kernel) == (layers * 5 * 9 * channels // 16, layers * 5)


def test_refusals() -> None:
    assert "2 dimensions" in str(unsuited(Description(chain_of([16] * 3), "bf16")))
    assert "tf32" in str(unsuited(Description(chain_of([16] * 3, 3), "tf32")))
    description = Description(chain_of([16] * 3, 3), "bf16")
    for plan, said in (
        (Plan(2, 3), "registers"),
        (Plan(1, 1, 8, 1, 1), "rings of two planes"),
        (Plan(1, 2, 8, 1, 40), "bytes of shared memory"),
    ):
        with pytest.raises(ValueError, match=said):
            planes_warpgroup(description, plan)
