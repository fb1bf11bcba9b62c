"""Padded and memoized bricks against the same layers one by one, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joulemark.merged.bricks import Parameters, run_memoized, run_padded, run_plain
from joulemark.merged.partition import bricks_of, positions_needed, recompute_factor, regions, schedule
from joulemark.merged.sequence import Conv, Sequence


def conv(inputs, outputs, kernel=3, d=2, stride=1, padding=None, dilation=1, **more):
    padding = dilation * (kernel - 1) // 2 if padding is None else padding
    return Conv(inputs, outputs, *((one,) * d for one in (kernel, stride, padding, dilation)), **more)


def weights_of(sequence, seed):
    torch.manual_seed(seed)
    return [
        Parameters(
            torch.randn(one.out_channels, one.in_channels // one.groups, *one.kernel, dtype=torch.float64),
            torch.randn(one.out_channels, dtype=torch.float64),
        )
        for one in sequence.layers
    ]


def check(sequence, size, edge, batch=2, seed=0):
    parameters = weights_of(sequence, seed)
    x = torch.randn(batch, sequence.layers[0].in_channels, *size, dtype=torch.float64)
    expected = run_plain(sequence, parameters, x)
    scale = expected.abs().max()
    for run in (run_padded, run_memoized):
        assert (run(sequence, parameters, x, edge) - expected).abs().max() <= 1e-12 * scale


SEQUENCES = {
    "chain of 3x3": Sequence((conv(3, 4, activation="relu"), conv(4, 4, activation="relu"), conv(4, 2))),
    "residual pair": Sequence((conv(4, 4, activation="relu"), conv(4, 4, activation="relu", residual=0))),
    "residuals behind activations": Sequence(
        (
            conv(4, 4, activation="leaky", residual=0, adds_behind=True),
            conv(4, 2, kernel=1, activation="relu"),
            conv(2, 4, activation="silu", residual=1, adds_behind=True),
        )
    ),
    "bottleneck": Sequence(
        (
            conv(6, 2, kernel=1, activation="relu"),
            conv(2, 2, activation="relu"),
            conv(2, 6, kernel=1, activation="relu", residual=0),
        )
    ),
    "projected bottleneck": Sequence(
        (
            conv(3, 2, kernel=1, activation="relu"),
            conv(2, 2, activation="relu"),
            replace(conv(5, 6, kernel=1, activation="relu"), joined=0),
        )
    ),
    "joined in the middle": Sequence(
        (conv(3, 2, activation="relu"), conv(2, 2), replace(conv(4, 3, kernel=1), joined=1), conv(3, 2, residual=2))
    ),
    "inverted residual, stride 2": Sequence(
        (
            conv(2, 12, kernel=1, activation="relu6"),
            conv(12, 12, stride=2, groups=12, activation="relu6"),
            conv(12, 3, kernel=1),
        )
    ),
    "dilated, without padding": Sequence((conv(2, 3, dilation=2, padding=0), conv(3, 2, kernel=2, padding=1))),
    "inner residual": Sequence((conv(2, 3, activation="silu"), conv(3, 3), conv(3, 3, residual=1, activation="gelu"))),
    "three dimensions": Sequence((conv(2, 3, d=3, activation="relu"), conv(3, 2, d=3))),
    "one dimension, stride 3": Sequence((conv(2, 3, d=1, stride=3), conv(3, 2, kernel=5, d=1))),
}


@pytest.mark.parametrize("edge", [1, 3, 4, 64])
@pytest.mark.parametrize("name", SEQUENCES)
def test_bricks_give_what_layers_give(name, edge):
    sequence = SEQUENCES[name]
    d = sequence.dimensions
    size = (13, 9, 7)[:d]
    if edge == 1 and d == 3:
        size = (4, 3, 3)
    check(sequence, size, (edge,) * d)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=3
    ),
    st.tuples(st.integers(8, 17), st.integers(8, 17)),
    st.tuples(st.integers(2, 9), st.integers(2, 9)),
)
@settings(max_examples=40, deadline=None)
def test_any_geometry(geometry, size, edge):
    sequence = Sequence(tuple(conv(2, 2, kernel=k, stride=s, padding=p, dilation=d) for k, s, p, d in geometry))
    try:
        sequence.sizes(size)
    except ValueError:
        return
    check(sequence, size, edge, batch=1)


def test_the_halo_of_an_inner_brick_is_that_of_the_formula():
    layers, edge, d = 3, 8, 2
    sequence = Sequence((conv(1, 1),) * layers)
    sizes = list(sequence.sizes((64, 64)))
    inner = next(one for one in bricks_of(sizes[-1], (edge,) * d) if min(one.low) > 16)
    boxes = regions(sequence, sizes, inner)
    got = sum(one.positions for one in boxes[1:]) / (layers * edge**d)
    assert got == sum((edge + 2 * (layers - number)) ** d for number in range(1, layers + 1)) / (layers * edge**d)
    assert got == pytest.approx(1.6, abs=0.01)


def test_recompute_is_one_for_one_layer_and_falls_with_the_brick():
    assert recompute_factor(Sequence((conv(1, 1),)), (30, 30), (8, 8)) == 1
    factors = [recompute_factor(Sequence((conv(1, 1),) * 3), (64, 64), (edge, edge)) for edge in (4, 8, 16, 64)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == 1


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_schedule_makes_each_brick_once_after_all_that_it_needs(name):
    sequence = SEQUENCES[name]
    size = (13, 9, 7)[: sequence.dimensions]
    plan = schedule(sequence, size, (4,) * sequence.dimensions)
    assert len({(one.tensor, one.brick) for one in plan.tasks}) == len(plan.tasks)
    assert all(need < number for number, task in enumerate(plan.tasks) for need in task.needs)
    final = len(sequence.layers)
    sizes = sequence.sizes(size)
    assert sum(one.box.positions for one in plan.tasks if one.tensor == final) == torch.Size(sizes[-1]).numel()
    channels = [sequence.channels(one) for one in range(final + 1)]
    whole = sum(torch.Size(sizes[one]).numel() * channels[one] for one in range(1, final)) * 2
    assert 0 < plan.live_bytes(channels, 2) <= whole


def test_fewer_bricks_are_alive_than_the_intermediate_holds():
    sequence = Sequence((conv(1, 1), conv(1, 1)))
    plan = schedule(sequence, (64, 64), (8, 8))
    assert plan.live_bytes([1, 1, 1], 2) < 64 * 64 * 2 / 2


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((), "at least one layer"),
        ((conv(1, 2), conv(3, 1)), "gives 2 channels, layer 1 takes 3"),
        ((conv(1, 1, residual=1),), "not there yet"),
        ((conv(1, 1), conv(1, 1, d=3)), "different numbers of dimensions"),
        ((conv(1, 1, activation="relu", adds_behind=True), conv(1, 1)), "layer 0 adds nothing behind"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers, said):
    with pytest.raises(ValueError, match=said):
        Sequence(layers)


def test_before_and_behind_no_activation_are_one():
    with pytest.raises(ValueError, match="leave adds_behind False"):
        conv(1, 1, residual=0, adds_behind=True)


def test_what_comes_from_outside_is_added_where_the_last_layer_says():
    x, added, one = (
        torch.full((1, 1, 2, 2), -3.0),
        torch.full((1, 1, 2, 2), 2.0),
        [Parameters(torch.ones(1, 1, 1, 1), None)],
    )
    for behind, expected in ((False, 0.0), (True, 2.0)):
        out = run_plain(Sequence((conv(1, 1, kernel=1, activation="relu", adds_behind=behind),)), one, x, added)
        assert torch.equal(out, torch.full_like(x, expected))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="another shape"):
        Sequence((conv(2, 2, stride=2, residual=0),)).sizes((8, 8))
    with pytest.raises(ValueError, match="nothing behind layer 0"):
        Sequence((conv(1, 1, kernel=5, padding=0),)).sizes((3, 9))


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("edge", [3, 4])
def test_positions_by_dimension_are_those_of_all_bricks(name, edge):
    sequence = SEQUENCES[name]
    size = (13, 9, 7)[: sequence.dimensions]
    sizes, edges = list(sequence.sizes(size)), (edge,) * sequence.dimensions
    boxes = [regions(sequence, sizes, brick) for brick in bricks_of(sizes[-1], edges)]
    summed = [sum(one[tensor].positions for one in boxes) for tensor in range(len(sizes))]
    assert positions_needed(sequence, size, edges) == summed
