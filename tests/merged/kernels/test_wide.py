"""Chains by wgmma, emulated: channels, odd sizes, activations, residuals, refusals."""

from __future__ import annotations

import pytest

from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.wide import Plan, unsuited, wide
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("channels", "plan"),
    [
        ([64] * 3, Plan(32, 4, 64)),
        ([64] * 3, Plan(64, 2, 2)),
        ([32] * 3, Plan(32, 2, 2)),
        ([32] * 4, Plan(32, 2, 2)),
        ([16] * 3, Plan(64, 1, 2)),
    ],
)
def test_chains(channels: list[int], plan: Plan, descending: bool) -> None:
    kernel = wide(Description(chain_of(channels), "bf16"), plan)
    assert error_of(kernel, (2, 17, 40), resident=2, descending=descending) < LIMITS["bf16"]


@pytest.mark.parametrize("activation", ["none", "relu6"])
def test_channels_are_padded(activation: str) -> None:
    kernel = wide(Description(chain_of([40, 56, 36], activation=activation), "fp16"), Plan(32, 3))
    assert error_of(kernel, (1, 7, 30)) < LIMITS["fp16"]


def test_residuals() -> None:
    kernel = wide(Description(chain_of([64] * 3, residual=(1, 0)), "bf16"), Plan(32, 3, 1))
    assert error_of(kernel, (1, 5, 9)) < LIMITS["bf16"]
    kernel = wide(Description(chain_of([32] * 3), "bf16", adds=True), Plan(32, 2, 1))
    assert error_of(kernel, (1, 5, 9)) < LIMITS["bf16"]


@pytest.mark.parametrize(
    ("channels", "plan"), [(64, Plan(32, 3)), (32, Plan(32, 4)), (32, Plan(64, 2)), (16, Plan(64, 2))]
)
def test_builds_without_spills(channels: int, plan: Plan) -> None:
    assert build(wide(Description(chain_of([channels] * 3), "bf16"), plan), "sm_90a").spilled == 0


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
