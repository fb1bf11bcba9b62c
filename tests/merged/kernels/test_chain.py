"""Chains in padded bricks and streamed rows: numerics, builds for three architectures, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from joulemark.merged.bricks import Parameters
from joulemark.merged.kernels import Description, build, memoized, planes, run, stream_warpgroup
from joulemark.merged.kernels import chain as chains
from joulemark.merged.kernels import stream as streams
from joulemark.merged.kernels.chain import Plan, chain
from joulemark.merged.kernels.description import Format
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.fragments import round_tf32
from joulemark.merged.kernels.layouts import from_bricks, to_bricks
from joulemark.merged.kernels.stream import stream
from tests.merged.every_kernel import crossed, first, rare
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of, input_of, parameters_of, reference_of

ARCHITECTURES = ("sm_90a", "sm_80", "sm_100")
FORMATS: tuple[Format, ...] = ("bf16", "fp16", "tf32", "fp32")


PADDED = [
    ([16, 16, 16], (2, 13, 21), Plan((8, 12), 4, 1)),
    ([3, 24, 5], (1, 9, 11), Plan((4, 12), 4, 1)),
    ([16, 16], (1, 5, 40), Plan((4, 30), 4, 1)),
]


@pytest.mark.parametrize(("format_", "case"), crossed(FORMATS, PADDED))
def test_padded_chain(format_: Format, case: tuple[list[int], tuple[int, ...], Plan]) -> None:
    channels, shape, plan = case
    kernel = chain(Description(chain_of(channels), format_), plan)
    assert error_of(kernel, shape) < LIMITS[format_]


@pytest.mark.parametrize("format_", first(2, ["bf16", "fp32", "tf32", "fp16"]))
def test_padded_volume(format_: Format) -> None:
    kernel = chain(Description(chain_of([16, 16, 16], 3), format_), Plan((2, 4, 12), 4, 1))
    assert error_of(kernel, (1, 3, 6, 13)) < LIMITS[format_]


@rare
@pytest.mark.parametrize("activation", ["none", "relu6"])
def test_activations(activation: str) -> None:
    description = Description(chain_of([8, 8, 8], activation=activation), "bf16")
    assert error_of(chain(description, Plan((4, 12), 2, 1)), (1, 6, 12)) < LIMITS["bf16"]


@pytest.mark.parametrize(
    ("channels", "residual"),
    first(1, [([16] * 4, (2, 1)), ([16] * 3, (1, 0)), ([16] * 4, (2, 0)), ([16] * 4, (1, 1))]),
)
def test_residuals_inside(channels: list[int], residual: tuple[int, int]) -> None:
    description = Description(chain_of(channels, residual=residual), "fp16")
    assert error_of(chain(description, Plan((6, 10), 2, 1)), (1, 11, 13)) < LIMITS["fp16"]
    description = Description(chain_of(channels, activation="leaky", residual=residual, behind=True), "fp16")
    assert error_of(stream(description, streams.Plan(32, 6)), (2, 11, 13)) < LIMITS["fp16"]


@pytest.mark.parametrize("format_", first(1, ["bf16", "tf32"]))
def test_residual_from_outside(format_: Format) -> None:
    description = Description(chain_of([16, 16]), format_, adds=True)
    assert error_of(chain(description, Plan((6, 14), 2, 1)), (1, 11, 13)) < LIMITS[format_]
    assert error_of(stream(description, streams.Plan(16, 6)), (2, 11, 13)) < LIMITS[format_]


@pytest.mark.parametrize(("format_", "channels"), first(1, [("bf16", [32, 64]), ("fp32", [8, 8]), ("tf32", [8, 8])]))
def test_what_darknet_adds_behind_its_activation(format_: Format, channels: list[int]) -> None:
    description = Description(chain_of(channels, activation="leaky", behind=True), format_, adds=True)
    assert error_of(chain(description, Plan((4, 14), 8, 1)), (1, 6, 13)) < LIMITS[format_]
    if format_ == "bf16":
        made = build(chain(description, chains.candidates(description, (112, 112), 32, Device())[0]), "sm_90a")
        assert (made.spilled, made.stack) == (0, 0)


@pytest.mark.parametrize("depth", first(1, [6, 4, 1]))
def test_depths(depth: int) -> None:
    description = Description(chain_of([16] * (depth + 1)), "bf16")
    assert error_of(chain(description, Plan((4, 4), 4, 1)), (1, 7, 9)) < LIMITS["bf16"]
    assert error_of(stream(description, streams.Plan(16, 5)), (1, 7, 9)) < LIMITS["bf16"]


@pytest.mark.parametrize("channels", first(1, [[40, 8, 56], [64, 64, 64]]))
def test_wide_channels(channels: list[int]) -> None:
    assert error_of(chain(Description(chain_of(channels), "bf16"), Plan((4, 12), 8, 1)), (1, 6, 13)) < LIMITS["bf16"]


def test_weights_that_do_not_fit_into_registers() -> None:
    kernel = chain(Description(chain_of([64, 64]), "bf16"), Plan((4, 14), 8, 4))
    assert "RESIDENT = false" in kernel.source
    assert error_of(kernel, (1, 6, 13)) < LIMITS["bf16"]


@pytest.mark.parametrize(("format_", "descending"), crossed(FORMATS, [False, True]))
def test_streamed_chain(format_: Format, descending: bool) -> None:
    kernel = stream(Description(chain_of([16, 16, 16]), format_), streams.Plan(32, 6))
    assert error_of(kernel, (2, 13, 41), resident=3, descending=descending) < LIMITS[format_]


@rare
@pytest.mark.parametrize("rings", [(4, 2), (8, 4), (32, 8)])
def test_rings_of_any_length(rings: tuple[int, int]) -> None:
    kernel = stream(Description(chain_of([3, 24, 5]), "bf16"), streams.Plan(16, 7, 1, *rings))
    assert error_of(kernel, (2, 15, 13)) < LIMITS["bf16"]


@pytest.mark.parametrize("layout", first(1, [(4, 8), (8, 16)]))
def test_activations_in_bricks(layout: tuple[int, int]) -> None:
    description = Description(chain_of([16, 16, 16]), "bf16")
    kernel = chain(description, Plan((6, 12), 4, 1, layout))
    given, x = parameters_of(description), input_of(description, (2, 16, 32))
    y = from_bricks(run(kernel, to_bricks(x, layout), kernel.pack(given)))
    reference = reference_of(description, given, x)
    assert (y.double() - reference).norm() / reference.norm() < LIMITS["bf16"]
    with pytest.raises(ValueError, match="takes bricks"):
        run(kernel, x, kernel.pack(given))


def test_bricks_and_back() -> None:
    x = torch.randn(2, 3, 8, 12)
    assert to_bricks(x, (4, 6)).shape == (2, 2, 2, 4, 6, 3)
    assert torch.equal(to_bricks(x, (4, 6))[1, 1, 0], x[1, :, 4:8, :6].permute(1, 2, 0))
    assert torch.equal(from_bricks(to_bricks(x, (2, 4))), x)
    with pytest.raises(ValueError, match="no whole number"):
        to_bricks(x, (3, 6))


@rare
def test_a_brick_of_one_row() -> None:
    description = Description(chain_of([16, 16]), "bf16")
    assert error_of(stream(description, streams.Plan(16, 4)), (1, 5, 9)) < LIMITS["bf16"]
    assert error_of(chain(description, Plan((4, 14), 2, 1)), (1, 1, 1)) < LIMITS["bf16"]


def test_tf32_rounds_ties_away_from_zero() -> None:
    x = torch.tensor([1 + 2**-11, -(1 + 2**-11), 1 + 2**-12, 3.0])
    assert round_tf32(x).tolist() == [1 + 2**-10, -(1 + 2**-10), 1.0, 3.0]


def test_missing_bias_is_zero() -> None:
    description = Description(chain_of([8, 8]), "fp32")
    given = [Parameters(parameters_of(description)[0].weight, None)]
    x = input_of(description, (1, 5, 6))
    kernel = chain(description, Plan((4, 14), 2, 1))
    torch.testing.assert_close(
        run(kernel, x, kernel.pack(given)).double(), reference_of(description, given, x), rtol=1e-4, atol=1e-5
    )


MAIN = [
    chain(Description(chain_of([16] * 5), "bf16"), Plan((16, 56), 8, 2)),
    stream(Description(chain_of([16] * 3), "bf16"), streams.Plan(64, 128, 2)),
    chain(Description(chain_of([16] * 3), "fp32"), Plan((16, 28), 8, 1)),
    chain(Description(chain_of([32] * 3), "bf16"), Plan((16, 28), 8, 2)),
    chain(Description(chain_of([64] * 3), "fp16"), Plan((14, 28), 8, 1)),
    chain(Description(chain_of([16] * 3), "tf32"), Plan((16, 28), 8, 2)),
    chain(Description(chain_of([16] * 3, 3), "bf16"), Plan((4, 8, 28), 8, 1)),
    stream(Description(chain_of([16] * 5), "bf16"), streams.Plan(64, 171)),
    stream(Description(chain_of([32] * 3), "bf16"), streams.Plan(48, 128)),
    stream(Description(chain_of([16] * 3), "tf32"), streams.Plan(64, 128)),
]


@pytest.mark.parametrize(
    ("kernel", "architecture"),
    crossed(first(5, MAIN), ARCHITECTURES),
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_main_shapes_build_without_spills(kernel, architecture: str) -> None:
    made = build(kernel, architecture)
    assert made.spilled == 0
    assert made.registers * kernel.block <= 65536


@pytest.mark.parametrize(
    ("sequence", "said"),
    [
        (chain_of([16, 128]), "at most 64"),
        (chain_of([4] * 8), "7 layers"),
        (chain_of([16, 16], activation="gelu"), "activation gelu"),
        (chain_of([16, 16], dimensions=1), "kernel"),
    ],
)
def test_what_there_is_no_kernel_for(sequence, said: str) -> None:
    description = Description(sequence, "bf16")
    assert said in str(chains.unsuited(description))
    with pytest.raises(ValueError, match=said):
        chain(description, Plan((8, 8)))


def test_volumes_are_not_streamed() -> None:
    assert "3 dimensions" in str(streams.unsuited(Description(chain_of([16, 16], 3), "bf16")))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: chain(d, Plan((64, 112))), "shared memory"),
        (lambda d: chain(d, Plan((8,))), "give 2 numbers"),
        (lambda d: chain(d, Plan((8, 12), layout=(6, 8))), "powers of two"),
        (lambda d: stream(d, streams.Plan(40)), "multiple of 16"),
        (lambda d: stream(d, streams.Plan(320)), "do not fit into registers"),
    ],
)
def test_plans_that_do_not_fit(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(Description(chain_of([16] * 3), "bf16"))


def test_a_plan_rounds_its_width_up() -> None:
    kernel = chain(Description(chain_of([16] * 3), "bf16"), Plan((8, 9)))
    assert kernel.edge == (8, 12)
    assert kernel.bricks((17, 13)) == (3, 2)
    assert math.prod(kernel.bricks((17, 13))) * 2 == kernel.blocks(2, (17, 13), 132)


A100 = Device(108, 164 * 1024, 163 * 1024)


@pytest.mark.parametrize(
    ("family", "dimensions"),
    [(chains, 2), (streams, 2), (memoized, 2), (planes, 3), (stream_warpgroup, 2), (chains, 3)],
)
def test_candidates_find_room_on_the_device(family, dimensions: int) -> None:
    description = Description(chain_of([32 if dimensions == 2 else 16] * 3, dimensions), "bf16")
    plans = family.candidates(description, (128,) * dimensions, 4, A100)
    make = getattr(family, family.__name__.rpartition(".")[2])
    assert plans
    assert all(make(description, plan).shared <= A100.block_shared for plan in plans)
