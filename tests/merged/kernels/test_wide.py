"""Two wide layers by wgmma, emulated: odd sizes, both group heights, activations, residuals, refusals."""

from __future__ import annotations

import pytest

from fixtures.chains import LIMITS, chain_of, error_of
from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.wide import Plan, unsuited, wide


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("descending", [False, True])
def test_two_layers(rows: int, descending: bool) -> None:
    kernel = wide(Description(chain_of([64] * 3), "bf16"), Plan(rows, 2))
    assert error_of(kernel, (2, 17, 40), resident=2, descending=descending) < LIMITS["bf16"]


@pytest.mark.parametrize("activation", ["none", "relu6"])
def test_channels_are_padded(activation: str) -> None:
    kernel = wide(Description(chain_of([40, 56, 36], activation=activation), "fp16"), Plan(4, 64))
    assert error_of(kernel, (1, 7, 30)) < LIMITS["fp16"]


def test_residuals() -> None:
    kernel = wide(Description(chain_of([64] * 3, residual=(1, 0)), "bf16"), Plan(3, 1))
    assert error_of(kernel, (1, 5, 9)) < LIMITS["bf16"]
    kernel = wide(Description(chain_of([64] * 3), "bf16", adds=True), Plan(4, 1))
    assert error_of(kernel, (1, 5, 9)) < LIMITS["bf16"]


def test_builds_without_spills() -> None:
    assert build(wide(Description(chain_of([64] * 3), "bf16"), Plan(3, 75)), "sm_90a").spilled == 0


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (Description(chain_of([64] * 4), "bf16"), "3 layers"),
        (Description(chain_of([64] * 3), "tf32"), "tf32"),
        (Description(chain_of([16] * 3), "bf16"), "16 channels"),
    ],
)
def test_refusals(description: Description, said: str) -> None:
    assert said in str(unsuited(description))
    with pytest.raises(ValueError, match=said):
        wide(description, Plan())
