"""The performance model against counts by hand, and against the times of a known GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from joulemark.merged.cost import Candidate, Point, Rates, fit_reached, kind_of, predict, work_of
from joulemark.merged.partition import schedule
from joulemark.merged.sequence import Conv, Sequence

RATES = Rates(
    gpu="a GPU of round numbers",
    multiprocessors=100,
    dram_bytes_per_s=4e12,
    l2_bytes_per_s=1e13,
    l2_bytes=50 * 10**6,
    shared_bytes=200_000,
    flop_per_s={"bf16": 8e14, "fp32": 5e13},
    launch_s=2e-6,
    flag_s=1e-6,
)


def conv(inputs, outputs, kernel=3, groups=1, **more):
    return Conv(inputs, outputs, (kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1), groups, **more)


CHAIN = Sequence((conv(16, 16), conv(16, 16), conv(16, 16), conv(16, 16)))
PADDED = Candidate("padded", "chain", (16, 64), shared=60_000)
UNMERGED = Candidate("unmerged", "library")


def test_unmerged_work_by_hand():
    work = work_of(CHAIN, (1024, 1024), 8, 2, UNMERGED, RATES)
    tensor, weights = 8 * 1024**2 * 16 * 2, 4 * 9 * 16 * 16 * 2
    assert work.dram_bytes == work.l2_bytes == 8 * tensor + weights
    assert work.flops == 8 * 1024**2 * 4 * 2 * 9 * 16 * 16
    assert (work.recompute, work.launches) == (1, 4)


def test_a_small_intermediate_stays_in_the_l2():
    work = work_of(CHAIN, (128, 128), 2, 2, UNMERGED, RATES)
    tensor, weights = 2 * 128**2 * 16 * 2, 4 * 9 * 16 * 16 * 2
    assert work.dram_bytes == 2 * tensor + weights
    assert work.l2_bytes == 8 * tensor + weights
    assert work_of(CHAIN, (128, 128), 2, 2, UNMERGED, RATES, cold=False).dram_bytes == weights


def test_padded_moves_the_ends_alone_and_recomputes():
    work = work_of(CHAIN, (1024, 1024), 8, 2, PADDED, RATES)
    assert work.dram_bytes == 2 * 8 * 1024**2 * 16 * 2 + 4 * 9 * 16 * 16 * 2
    assert work.tiles == 8 * 64 * 16
    together = work_of(CHAIN, (1024, 1024), 8, 2, replace(PADDED, images=3, parts=2), RATES)
    assert together.tiles == 3 * 64 * 16 * 2, "three images are one block's, two blocks share them"
    inner = sum((16 + 2 * k) * (64 + 2 * k) for k in range(4)) / (4 * 16 * 64)
    assert work.recompute == pytest.approx(inner)
    over = work_of(CHAIN, (1025, 1024), 1, 2, PADDED, RATES)
    assert over.recompute == pytest.approx(inner * 65 / 64, rel=1e-2), "a brick over the border is computed whole"


def test_rows_recompute_in_all_dimensions_but_the_first():
    rows = work_of(CHAIN, (512, 512), 1, 2, Candidate("rows", "rows", (512, 64)), RATES)
    assert rows.tiles == 8
    assert rows.recompute == pytest.approx(sum(64 + 2 * k for k in range(4)) / (4 * 64), rel=0.02)


def test_memoized_recomputes_nothing_and_counts_flags_and_live_bricks():
    sequence, size, edge = Sequence(CHAIN.layers[:2]), (96, 96), (16, 16)
    work = work_of(sequence, size, 3, 2, Candidate("memoized", "memoized", edge), RATES)
    plan = schedule(sequence, size, edge)
    assert work.recompute == 1
    needs = sum(len(one.needs) for one in plan.tasks)
    assert work.flags == pytest.approx(3 * needs, rel=0.9)
    assert work.live_bytes == pytest.approx(3 * plan.live_bytes([16, 16, 16], 2), rel=0.6)
    assert work.l2_bytes > 4 * 3 * 96 * 96 * 16 * 2


def test_where_the_roofline_lies():
    assert predict(CHAIN, (1024, 1024), 8, "bf16", PADDED, RATES).bound == "flops"
    padded = predict(Sequence(CHAIN.layers[:2]), (1024, 1024), 8, "bf16", PADDED, RATES)
    assert padded.bound == "dram"
    assert padded.time_s == pytest.approx(padded.work.dram_bytes / 4e12 + 2e-6)
    wide = Sequence((conv(512, 512), conv(512, 512)))
    deep = predict(wide, (56, 56), 64, "bf16", UNMERGED, RATES)
    assert deep.bound == "flops"


def test_merging_wins_with_few_channels_and_loses_with_one_small_image():
    def best(sequence, size, batch, *more):
        return min((UNMERGED, *more), key=lambda one: predict(sequence, size, batch, "bf16", one, RATES).time_s)

    assert best(CHAIN, (1024, 1024), 8, PADDED) == PADDED
    few_rows = Candidate("rows", "rows", (56, 28), shared=100_000)
    assert best(Sequence((conv(64, 64), conv(64, 64))), (56, 56), 1, few_rows) == UNMERGED


def test_what_does_not_fit_has_a_reason_and_no_time():
    large = replace(PADDED, shared=300_000)
    found = predict(CHAIN, (64, 64), 1, "bf16", large, RATES)
    assert found.time_s is None
    assert "300000 B of shared memory" in found.why_not
    alive = predict(CHAIN, (4096, 4096), 8, "bf16", Candidate("memoized", "m", (512, 512), 1000), RATES)
    assert "alive at once" in alive.why_not


def test_shares_are_found_again():
    true = replace(RATES, reached={"library": (0.4, 0.8)})
    shapes = [(16, (512, 512), 8), (256, (56, 56), 64), (64, (224, 224), 16), (512, (28, 28), 64)]
    points = []
    for channels, size, batch in shapes:
        sequence = Sequence((conv(channels, channels),))
        time_s = predict(sequence, size, batch, "bf16", UNMERGED, true).time_s
        points.append(Point(sequence, size, batch, "bf16", UNMERGED, time_s))
    (shares,) = fit_reached(points, RATES).values()
    assert shares == pytest.approx((0.4, 0.8), rel=0.07)


def test_rates_survive_json():
    rates = replace(RATES, reached={"library": (0.4, 0.8)})
    assert Rates.from_json(json.loads(json.dumps(rates.to_json()))) == rates
    with pytest.raises(TypeError):
        Rates.from_json({"gpu": "x"})


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (conv(8, 8), "dense"),
        (conv(8, 16, kernel=1), "pointwise"),
        (conv(8, 8, groups=8), "depthwise"),
        (conv(8, 8, groups=2), "grouped"),
    ],
)
def test_kinds(layer, kind):
    assert kind_of(layer) == kind
