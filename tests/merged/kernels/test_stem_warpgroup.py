"""First layers by wgmma, emulated: odd sizes, cut lines, volumes, activations; builds and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from joulemark.merged.kernels import Description, build
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.stem_warpgroup import Plan, candidates, stem_warpgroup, unsuited
from joulemark.merged.sequence import Conv, Sequence, Shape
from tests.merged.every_kernel import crossed, first
from tests.merged.kernels.chain_cases import LIMITS, chain_of, error_of
from tests.merged.kernels.machine_code import products_of_warpgroups


def layer(inputs: int, outputs: int, kernel: Shape, activation: str = "relu", **more: Shape) -> Conv:
    given = {"stride": (1, 2, 2)[-len(kernel) :], "padding": tuple(taps // 2 for taps in kernel), **more}
    return Conv(inputs, outputs, kernel, dilation=(1,) * len(kernel), activation=activation, **given)  # type: ignore[arg-type]


def described(one: Conv, format_: str = "bf16") -> Description:
    return Description(Sequence((one,)), format_)  # type: ignore[arg-type]


LAYERS: list[tuple[Conv, str, Plan, Shape]] = [
    # Odd lines of which tiles hang over the border, in several turns; more bricks than blocks.
    (layer(3, 64, (7, 7)), "bf16", Plan(16, 2, 1, 2), (2, 21, 73)),
    # Planes of taps outside of the volume, weights with each plane, two lines in a product.
    (layer(3, 40, (7, 7, 7), "none"), "fp16", Plan(8, 1, 2, 1, 3), (1, 3, 14, 16)),
    # Four channels, an even window with an even padding, other strides, channels that are no whole pieces.
    (layer(4, 20, (4, 8), "leaky", stride=(3, 2), padding=(0, 2)), "bf16", Plan(24, 2, 1), (2, 17, 42)),
    # Two neighbouring outputs of stride 1 as one, lines of odd lengths.
    (layer(3, 16, (7, 7), stride=(1, 1)), "bf16", Plan(16, 2, 2, 2), (2, 9, 69)),
    (layer(3, 56, (3, 3), stride=(1, 1)), "bf16", Plan(16, 2, 1), (2, 5, 45)),
    # Octets of channels apart.
    (layer(16, 64, (7, 7)), "bf16", Plan(16, 2, 2), (2, 13, 37)),
    (layer(16, 24, (2, 3, 4), "relu6", padding=(1, 1, 1)), "fp16", Plan(16, 2, 1), (1, 3, 9, 30)),
    (layer(3, 32, (3, 3), "leaky", stride=(1, 1)), "fp16", Plan(24, 2, 1), (1, 5, 50)),
    (layer(4, 8, (3, 3, 3), "none", stride=(2, 1, 1)), "bf16", Plan(16, 1, 2), (2, 5, 6, 31)),
    (layer(3, 32, (3, 3), "silu"), "fp16", Plan(16, 1, 2, 1, 2, 2), (1, 9, 62)),
    (layer(1, 24, (2, 5), "hardswish"), "bf16", Plan(16, 2, 1), (1, 9, 40)),
    (layer(2, 16, (3, 3, 3), "relu6"), "bf16", Plan(16, 1, 3), (2, 4, 9, 30)),
]


@pytest.mark.parametrize(("case", "descending"), crossed(first(6, LAYERS), [False, True]))
def test_first_layers(case: tuple[Conv, str, Plan, Shape], descending: bool) -> None:
    one, format_, plan, shape = case
    kernel = stem_warpgroup(described(one, format_), plan)
    assert error_of(kernel, shape, resident=2, descending=descending) < LIMITS[format_]


@pytest.mark.parametrize(
    ("one", "size"),
    first(
        2,
        [
            (layer(3, 64, (7, 7)), (224, 224)),
            (layer(3, 64, (7, 7, 7)), (16, 112, 112)),
            (layer(3, 32, (3, 3), "silu"), (224, 224)),
        ],
    ),
)
def test_best_candidates_build_without_spills(one: Conv, size: Shape) -> None:
    kernel = stem_warpgroup(described(one), candidates(described(one), size, 32, Device())[0])
    assert kernel.shared <= Device().block_shared
    made = build(kernel, "sm_90a")
    assert (made.spilled, made.stack, made.serialized) == (0, 0, False)


def test_products_of_a_plane_of_taps_run_without_a_wait_between_them() -> None:
    kernel = stem_warpgroup(described(layer(3, 64, (7, 7))), Plan(56, 2, 2))
    assert products_of_warpgroups(kernel) == (7 * 2, 1)


def test_names_tell_layers_of_the_same_channels_apart() -> None:
    base = layer(3, 64, (7, 7))
    others = [replace(base, kernel=(5, 5)), replace(base, padding=(2, 2)), replace(base, activation="none")]
    assert len({stem_warpgroup(described(one), Plan(16)).name for one in (base, *others)}) == 4


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (described(layer(3, 64, (7, 7), stride=(2, 3))), "stride 2 in them"),
        (described(layer(3, 16, (7, 8), stride=(1, 1))), "to 7, stride 1"),
        (described(layer(3, 72, (7, 7), stride=(1, 1))), "64 in one"),
        (described(layer(3, 20, (7, 7), stride=(1, 1))), "whole eights"),
        (described(layer(16, 16, (7, 7), stride=(1, 1))), "up to 4, whole eights"),
        (described(layer(3, 64, (9, 9))), "2 to 8 taps"),
        (described(layer(3, 64, (7, 7), padding=(7, 3))), "less than the taps"),
        (described(layer(8, 64, (7, 7))), "up to 4, or 16"),
        (described(layer(3, 136, (7, 7))), "128 in one"),
        (described(layer(3, 64, (7, 7), "gelu")), "gelu"),
        (described(layer(3, 64, (7, 7)), "tf32"), "tf32"),
        (replace(described(layer(3, 64, (7, 7))), adds=True), "added"),
        (Description(chain_of([3, 16, 16]), "bf16"), "2 layers"),
    ],
)
def test_refusals(description: Description, said: str) -> None:
    assert said in str(unsuited(description))
    with pytest.raises(ValueError, match=said):
        stem_warpgroup(description, Plan(16))


@pytest.mark.parametrize(
    ("kernel", "plan", "said"),
    [
        ((7, 7), Plan(12), "in eights"),
        ((7, 7), Plan(128, 2, 2), "264 columns"),
        ((7, 7), Plan(16, 2, 1, 1, 1), "two slots"),
        ((7, 7), Plan(112, 4, 2), "232 columns|registers"),
        ((7, 7), Plan(112, 2, 1, 12, 3), "shared memory"),
        ((7, 7, 7), Plan(16, 2, 1, 2), "planes of taps"),
    ],
)
def test_plans_that_do_not_fit(kernel: Shape, plan: Plan, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stem_warpgroup(described(layer(3, 64, kernel)), plan)
