"""Chains by wgmma, emulated: channels, odd sizes, activations, residuals, refusals."""

from __future__ import annotations

import pytest

from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.wide import REGISTERS, Plan, unsuited, wide
from tests.merged.every_kernel import crossed, first
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of
from tests.merged.kernels.machine_code import products_of_warpgroups

CHAINS = [
    ([32] * 4, Plan(32, 2, 2)),
    ([64] * 3, Plan(64, 2, 2)),
    ([16] * 3, Plan(64, 1, 2)),
    ([64] * 3, Plan(32, 4, 64)),
    ([32] * 3, Plan(32, 2, 2)),
]


@pytest.mark.parametrize(("case", "descending"), crossed(first(3, CHAINS), [False, True]))
def test_chains(case: tuple[list[int], Plan], descending: bool) -> None:
    channels, plan = case
    kernel = wide(Description(chain_of(channels), "bf16"), plan)
    assert error_of(kernel, (2, 17, 40), resident=2, descending=descending) < LIMITS["bf16"]


@pytest.mark.parametrize("activation", first(1, ["relu6", "none"]))
def test_channels_are_padded(activation: str) -> None:
    kernel = wide(Description(chain_of([40, 56, 36], activation=activation), "fp16"), Plan(32, 3))
    assert error_of(kernel, (1, 7, 30)) < LIMITS["fp16"]


def test_residuals() -> None:
    kernel = wide(Description(chain_of([64] * 3, residual=(1, 0)), "bf16"), Plan(32, 3, 1))
    assert error_of(kernel, (1, 5, 9)) < LIMITS["bf16"]
    kernel = wide(Description(chain_of([32] * 3, activation="leaky", behind=True), "bf16", adds=True), Plan(32, 2, 1))
    assert error_of(kernel, (1, 5, 9)) < LIMITS["bf16"]


@pytest.mark.parametrize(("channels", "plan"), first(2, [([16] * 3, Plan(64, 1, 1)), ([32] * 4, Plan(32, 2, 1))]))
def test_rows_that_nobody_brought_reach_no_output(channels: list[int], plan: Plan) -> None:
    kernel = wide(Description(chain_of(channels, activation="none"), "bf16"), plan)
    assert error_of(kernel, (1, 8, 20), resident=9) < LIMITS["bf16"]  # one brick for each block, most amid the image


@pytest.mark.parametrize(
    ("channels", "plan"),
    first(
        3,
        [
            ([64] * 3, Plan(64, 2)),
            ([64] * 3, Plan(32, 4)),
            ([32] * 4, Plan(32, 2)),
            ([32] * 3, Plan(32, 4)),
            ([16] * 3, Plan(64, 2)),
        ],
    ),
)
def test_builds_without_spills_and_within_the_registers_that_change_hands(channels: list[int], plan: Plan) -> None:
    kernel = wide(Description(chain_of(channels), "bf16"), plan)
    made = build(kernel, "sm_90a")
    assert (made.spilled, made.stack) == (0, 0)
    few, many = REGISTERS[len(channels) - 1]
    # setmaxnreg waits for ever where what some give back is less than what others ask for.
    assert 128 * few + (kernel.block - 128) * many <= made.registers * kernel.block


def test_products_of_a_group_run_without_a_wait_between_them() -> None:
    kernel = wide(Description(chain_of([32] * 3), "bf16"), Plan(32, 4))
    assert products_of_warpgroups(kernel) == (2 * 24, 2)  # two layers; four rows, three columns of taps, two steps


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (Description(chain_of([64] * 4), "bf16"), "3 layers"),
        (Description(chain_of([32] * 5), "bf16"), "4 layers"),
        (Description(chain_of([64] * 3), "tf32"), "tf32"),
        (Description(chain_of([16] * 3, residual=(0, 0)), "bf16"), "residual"),
    ],
)
def test_refusals(description: Description, said: str) -> None:
    assert said in str(unsuited(description))
    with pytest.raises(ValueError, match=said):
        wide(description, Plan())


@pytest.mark.parametrize(
    ("plan", "said"), [(Plan(48, 2), "32 or 64"), (Plan(64, 3), "at most 128"), (Plan(32, 1), "lower than the halo")]
)
def test_plans_that_do_not_fit(plan: Plan, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wide(Description(chain_of([64] * 3), "bf16"), plan)


def test_weights_and_sums_that_take_too_many_registers_are_refused() -> None:
    with pytest.raises(ValueError, match="168 registers, 160 are there"):
        wide(Description(chain_of([32] * 4), "bf16"), Plan(32, 3))
