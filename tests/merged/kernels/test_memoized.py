"""Memoized bricks: numerics with few and many blocks at a time, launches that follow one another, refusals."""

from __future__ import annotations

import pytest
import torch

from joulemark.merged.kernels import Description, build, emulate, run
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.memoized import Plan, memoized, unsuited
from tests.merged.every_kernel import crossed, first
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of, input_of, parameters_of, reference_of


@pytest.mark.parametrize("format_", first(3, ["bf16", "tf32", "fp32", "fp16"]))
def test_memoized_chain(format_: Format) -> None:
    kernel = memoized(Description(chain_of([16, 16, 16]), format_), Plan((4, 14), 4, 1, 2, 4))
    assert error_of(kernel, (3, 13, 21), resident=3) < LIMITS[format_]


@pytest.mark.parametrize(("resident", "descending"), crossed([7, 1, 2], [False, True]))
def test_any_number_of_blocks_comes_to_an_end(resident: int, descending: bool) -> None:
    kernel = memoized(Description(chain_of([16] * 5), "bf16"), Plan((4, 14), 2, 1, 2, 4))
    assert error_of(kernel, (3, 30, 31), resident=resident, descending=descending) < LIMITS["bf16"]


def test_residual_of_the_input_and_odd_channels() -> None:
    sequence = chain_of([5, 24, 5], residual=(1, 0), behind=True)
    kernel = memoized(Description(sequence, "fp16"), Plan((4, 14), 4, 1, 1, 5))
    assert error_of(kernel, (2, 9, 17), resident=3) < LIMITS["fp16"]


def test_launches_share_a_scratch_one_after_another(monkeypatch) -> None:
    description = Description(chain_of([16, 16, 16]), "bf16")
    kernel = memoized(description, Plan((4, 14), 4, 1, 2, 4))
    scratch = torch.zeros(kernel.scratch(2, (9, 17)), dtype=torch.uint8)  # type: ignore[misc]
    monkeypatch.setattr(emulate, "scratch_of", lambda *_: scratch)
    for _ in range(3):
        given, x = parameters_of(description), input_of(description, (2, 9, 17))
        y, reference = run(kernel, x, kernel.pack(given)), reference_of(description, given, x)
        assert (y.double() - reference).norm() / reference.norm() < LIMITS["bf16"]


@pytest.mark.parametrize("architecture", first(1, ["sm_90a", "sm_80", "sm_100"]))
def test_builds_without_spills(architecture: str) -> None:
    kernel = memoized(Description(chain_of([32] * 5), "bf16"), Plan((16, 30), 8, 2))
    assert build(kernel, architecture).spilled == 0


def test_refusals() -> None:
    assert "only the input" in str(unsuited(Description(chain_of([16] * 4, residual=(2, 1)), "bf16")))
    assert "3 dimensions" in str(unsuited(Description(chain_of([16] * 3, 3), "bf16")))
    with pytest.raises(ValueError, match="ring of 3"):
        memoized(Description(chain_of([16] * 3), "bf16"), Plan((4, 14), ring=3))
