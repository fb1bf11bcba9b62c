"""Many plans at once: columns say what single numbers say, and rank what single plans would."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product

import numpy as np
import pytest

from joulemark.merged.kernels import Description, expand_depthwise, inverted_residual, inverted_residual_warpgroup
from joulemark.merged.kernels.columns import BLOCK, combined, crossed, each, kept, larger, length, row, smaller, where
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.seconds import _shortlist, cheapest, cheapest_of
from joulemark.merged.sequence import Activation, Conv, Sequence

FAMILIES = {
    module.__name__.rpartition(".")[2]: module
    for module in (expand_depthwise, inverted_residual, inverted_residual_warpgroup)
}


def inverted(channels: int, hidden: int, window: int, stride: int, activation: Activation) -> tuple[Conv, ...]:
    """An inverted residual's layers; it adds its input where it can."""
    point = ((1, 1), (1, 1), (0, 0), (1, 1))
    taps = ((window,) * 2, (stride,) * 2, (window // 2,) * 2, (1, 1))
    return (
        Conv(channels, hidden, *point, activation=activation),
        Conv(hidden, hidden, *taps, hidden, activation),
        Conv(hidden, channels, *point, residual=0 if stride == 1 else None),
    )


CASES = {
    "several images": ("inverted_residual_warpgroup", inverted(160, 960, 3, 1, "relu6"), 7, 64),
    "a large map": ("inverted_residual_warpgroup", inverted(16, 96, 3, 2, "relu6"), 112, 2),
    "no halves": ("inverted_residual_warpgroup", inverted(32, 192, 3, 1, "silu"), 29, 1),
    "weights in registers": ("inverted_residual", inverted(24, 144, 3, 2, "relu6"), 56, 32),
    "weights shared": ("inverted_residual", inverted(96, 576, 3, 1, "silu"), 14, 8),
    "no expansion": (
        "inverted_residual",
        inverted(32, 32, 3, 1, "relu")[1:2] + inverted(32, 32, 3, 2, "none")[2:],
        30,
        4,
    ),
    "5×5": ("expand_depthwise", inverted(40, 240, 5, 2, "silu")[:2], 28, 32),
    "3×3": ("expand_depthwise", inverted(80, 480, 3, 1, "silu")[:2], 14, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_plans_in_columns_are_ranked_as_each_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, layers, size, batch = CASES[case]
    module, alone = FAMILIES[of], []
    problem = (Description(Sequence(layers), "bf16"), (size, size), batch, Device())
    ranked = module.candidates(*problem)

    def one_by_one(family, blocks, made, counts, limit, kind):
        for block in blocks:
            told = {name: each(column, block) for name, column in counts(made(block)).items()}
            for number in range(length(block)):
                alone.append(made(row(block, number)))
                assert counts(alone[-1]) == {name: column[number] for name, column in told.items()}
        return cheapest(family, alone, counts, limit, kind)

    monkeypatch.setattr(module, "cheapest_of", one_by_one)
    assert ranked == module.candidates(*problem)
    assert len({one.plan for one in alone}) == len(alone) > len(ranked) > 0
    assert {type(value) for plan in ranked for value in asdict(plan).values()} == {int, bool}
    assert all(getattr(module, of)(problem[0], one.plan).block >= 64 for one in alone[::50])


def test_ranking_counts_few_plans_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of plans take a second or more where each is worked out alone."""
    of, layers, size, batch = CASES["weights in registers"]
    counted: list[int] = []
    count = inverted_residual._Geometry.counts

    def counts(self, *where):
        counted.append(np.size(self.plan.height))
        return count(self, *where)

    monkeypatch.setattr(inverted_residual._Geometry, "counts", counts)
    FAMILIES[of].candidates(Description(Sequence(layers), "bf16"), (size, size), batch, Device())
    assert sum(counted) > 1000
    assert len(counted) < 100
    assert max(counted) <= BLOCK


def test_numbers_stay_numbers_and_columns_go_row_by_row() -> None:
    column = np.array([1, 5, 3])
    assert (larger(2, 4, 3), smaller(2.5, 4), where(True, 1, 2), where(0, 1, 2)) == (4, 2.5, 1, 2)
    assert type(larger(2, 4)) is type(smaller(2, 4)) is type(where(True, 1, 2)) is int
    assert larger(2, column, 4).tolist() == [4, 5, 4]
    assert smaller(column, 3).tolist() == [1, 3, 3]
    assert where(column > 2, column, 0).tolist() == [0, 5, 3]


def test_combinations_come_in_the_order_of_a_product_in_small_blocks() -> None:
    axes = {"width": range(40), "narrow": (False, True), "tiles": (1, 2, 4)}
    further = {"chunk": range(7), "split": (1, 2)}
    blocks = list(crossed(combined(**axes), **further))
    rows = [tuple(row(block, number).values()) for block in blocks for number in range(length(block))]
    assert rows == list(product(*axes.values(), *further.values()))
    assert type(rows[0][1]) is bool
    assert max(map(length, blocks)) <= BLOCK
    chosen = list(kept(blocks, lambda rows: rows["chunk"] == 3))
    assert [one for block in chosen for one in each(block["width"], block)] == [one[0] for one in rows if one[3] == 3]
    assert len(chosen) == 1
    assert each(7, chosen[0]) == [7] * length(chosen[0])


def test_nothing_comes_of_no_sizes() -> None:
    assert list(kept(crossed(combined(width=(), tiles=(1, 2)), chunk=(1,)), lambda rows: rows["tiles"] > 0)) == []


def test_who_is_as_fast_but_for_rounding_is_shortlisted() -> None:
    times = [3.0, 1.0, 1.0 + 1e-12, 1.0 + 2e-12, 2.0, 3.0 + 1e-12, 4.0]
    # Two of a kind at most are kept: the third "a" may be one of them, the fourth is not.
    assert _shortlist(times, "baaaabb", 3) == [1, 2, 3, 0, 5]
    assert _shortlist(times, "baaaabb", 9) == [1, 2, 3, 0, 5]
    assert _shortlist(times, "abcdefg", 2) == [1, 2, 3]


def test_no_plans_are_ranked_to_none() -> None:
    assert cheapest_of("inverted_residual", [], dict, dict, 3, lambda _: ()) == []
    with pytest.raises(KeyError, match="no seconds for nothing"):
        cheapest_of("nothing", [], dict, dict, 3, lambda _: ())


@pytest.mark.parametrize(("height", "stride", "size"), [(4, 1, 16), (5, 1, 16), (16, 1, 16), (3, 2, 16), (4, 2, 30)])
def test_rows_inside_are_those_of_each_brick(height: int, stride: int, size: int) -> None:
    plan = inverted_residual_warpgroup.Plan(height, 8, 1)
    geometry = inverted_residual_warpgroup._Geometry(16, 96, 16, stride, False, plan)
    tops = range(0, size // stride, height)
    # A brick reads from a row above it (in the padding of the first) to one below it (in that of the last).
    inside = [len(set(range(stride * top - 1, stride * (top + height - 1) + 2)) & set(range(size))) for top in tops]
    told = [rows for many, rows in geometry.rows_inside((size // stride, 8)) for _ in range(many)]
    assert told == inside
