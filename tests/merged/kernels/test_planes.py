"""Streamed planes: numerics when emulated, builds, refusals."""

from __future__ import annotations

import pytest

from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.planes import Plan, planes, unsuited
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of


@pytest.mark.parametrize("format_", ["bf16", "fp16", "tf32"])
def test_formats(format_: Format) -> None:
    kernel = planes(Description(chain_of([16] * 3, 3), format_), Plan((4, 4, 12)))
    assert error_of(kernel, (2, 9, 7, 17)) < LIMITS[format_]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("resident", [1, 3])
def test_bricks_follow_one_another(resident: int, descending: bool) -> None:
    kernel = planes(Description(chain_of([16] * 4, 3), "bf16"), Plan((3, 4, 10), 2))
    assert error_of(kernel, (2, 7, 7, 11), resident=resident, descending=descending) < LIMITS["bf16"]


def test_odd_channels_and_activations() -> None:
    description = Description(chain_of([3, 8, 24, 5], 3, "relu6"), "fp16")
    assert error_of(planes(description, Plan((16, 4, 10), 3)), (1, 6, 5, 9)) < LIMITS["fp16"]


def test_residual_from_outside() -> None:
    description = Description(chain_of([16] * 3, 3), "bf16", adds=True)
    assert error_of(planes(description, Plan((4, 4, 12))), (1, 5, 6, 7)) < LIMITS["bf16"]


@pytest.mark.parametrize("channels", [[16] * 3, [16] * 4, [8] * 3])
def test_builds_without_spills(channels: list[int]) -> None:
    assert build(planes(Description(chain_of(channels, 3), "bf16"), Plan((26, 10, 26))), "sm_90a").spilled == 0


def test_refusals() -> None:
    assert "2 dimensions" in str(unsuited(Description(chain_of([16] * 3), "bf16")))
    assert "residual" in str(unsuited(Description(chain_of([16] * 3, 3, residual=(1, 0)), "bf16")))
    with pytest.raises(ValueError, match="shared memory"):
        planes(Description(chain_of([16] * 3, 3), "bf16"), Plan((4, 32, 60)))
    with pytest.raises(ValueError, match="three numbers"):
        planes(Description(chain_of([16] * 3, 3), "bf16"), Plan((4, 4)))
