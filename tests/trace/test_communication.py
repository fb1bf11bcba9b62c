"""Communication of ranks against pairs of traces drawn by hand, whose figures are worked out beside them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from joulemark.cli import main
from joulemark.trace.analyse import analyse
from joulemark.trace.communication import across, rank_communication, straggler_of

STEPS = 6
MICRO = 1e-6


def gpu_rank(writer, rank, computes, collectives):
    """Six equal iterations of 1 ms with kernels at these times (µs): computation on stream 7, collectives behind."""
    writer.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
    correlation = 1000 * rank
    for step in range(STEPS):
        base = 1000 * step
        writer.mark(f"joulemark.iteration#{step}", base, 900)
        for index, (begin, end) in enumerate(computes):
            correlation += 1
            writer.launched(base + 10 + 6 * index, base + begin, end - begin, correlation, name="gemm")
        for index, (begin, end) in enumerate(collectives):
            correlation += 1
            writer.launched(
                base + 50 + 6 * index, base + begin, end - begin, correlation,
                name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", stream=20 + index,
            )  # fmt: skip
    path = writer.save(f"rank{rank}.json")
    writer.events.clear()
    return path


@pytest.fixture
def pair(writer):
    """Rank 1 computes for longer and comes last.

    Rank 0: collectives 300-600 and 500-700, so 400 µs; of them computation covers 300-400 and 600-650: 250 exposed.
    Rank 1: a collective 500-700, 200 µs; computation covers 500-600: 100 exposed.
    """
    return [
        gpu_rank(writer, 0, [(100, 400), (600, 650)], [(300, 600), (500, 700)]),
        gpu_rank(writer, 1, [(100, 600)], [(500, 700)]),
    ]


def test_exposed_communication_of_a_pair_of_gpu_traces(pair):
    first, second = (rank_communication(analyse(path), place) for place, path in enumerate(pair))
    assert (first.rank, first.source, first.collectives) == (0, "device", 2 * STEPS)
    assert first.communication_s == pytest.approx([400 * MICRO] * STEPS)
    assert first.exposed_s == pytest.approx([250 * MICRO] * STEPS)
    assert first.compute_s == pytest.approx([350 * MICRO] * STEPS)
    assert first.overlap_fraction == pytest.approx(150 / 400)
    assert (second.rank, second.collectives) == (1, STEPS)
    assert second.communication_s == pytest.approx([200 * MICRO] * STEPS)
    assert second.exposed_s == pytest.approx([100 * MICRO] * STEPS)


def test_both_ranks_together_name_the_one_that_comes_last(pair):
    # Given in the wrong order: a trace tells its own rank.
    seen = across([rank_communication(analyse(path), place) for place, path in enumerate(reversed(pair))])
    assert [one.rank for one in seen.ranks] == [0, 1]
    assert seen.communication_s == pytest.approx([300 * MICRO] * STEPS)
    assert seen.exposed_s == pytest.approx([175 * MICRO] * STEPS)
    assert seen.overlap_s == pytest.approx([1 - 175 / 300] * STEPS)
    assert seen.wait_s == pytest.approx([200 * MICRO] * STEPS)
    assert (seen.straggler.rank, seen.straggler.last_in, seen.straggler.iterations) == (1, STEPS, STEPS)


def test_on_a_host_gloos_threads_communicate_and_operators_compute(writer):
    """The collective lasts from 310 to 600 µs; an operator covers 350-450. Handing over (c10d) is no computation."""
    for step in range(3):
        base = 1000 * step
        writer.mark(f"joulemark.iteration#{step}", base, 900)
        writer.operator("aten::mm", base + 100, 200)
        writer.operator("c10d::allreduce_", base + 300, 20)
        writer.complete("user_annotation", "gloo:all_reduce", base + 310, 290, tid=2)
        writer.operator("aten::mm", base + 350, 100)
    found = rank_communication(analyse(writer.save()), 3)
    assert (found.rank, found.source, found.collectives) == (3, "host", 3)
    assert found.communication_s == pytest.approx([290 * MICRO] * 3)
    assert found.exposed_s == pytest.approx([190 * MICRO] * 3)
    assert found.compute_s == pytest.approx([300 * MICRO] * 3)


def test_a_collective_is_split_between_the_iterations_that_it_spans(writer):
    for step in range(2):
        writer.mark(f"joulemark.iteration#{step}", 1000 * step, 1000)
        writer.operator("aten::mm", 1000 * step + 10, 20)
    writer.complete("user_annotation", "gloo:all_reduce", 900, 250, tid=2)
    found = rank_communication(analyse(writer.save()), 0)
    assert found.communication_s == pytest.approx([100 * MICRO, 150 * MICRO])
    assert found.exposed_s == pytest.approx([100 * MICRO, 130 * MICRO])


def test_a_trace_without_iterations_tells_nothing(writer):
    writer.operator("aten::mm", 0, 10)
    assert rank_communication(analyse(writer.save()), 0) is None


@pytest.mark.parametrize(
    ("spent", "named"),
    [
        ([(2.0, 1.0)] * 6, (1, 6)),
        ([(2.0, 1.0)] * 5, None),  # five in a row happen to one of two equal ranks in 1 of 16 runs
        ([(2.0, 1.0)] * 5 + [(1.0, 2.0)] * 5, None),
        ([(1.0, 1.0)] * 20, None),
        ([(3.0, 2.0, 2.5, 1.0)] * 4, (3, 4)),
        ([(3.0,)] * 20, None),
        ([], None),
    ],
)
def test_a_straggler_is_named_only_beyond_chance(spent, named):
    ranks = range(len(spent[0])) if spent else range(2)
    found = straggler_of(ranks, spent)
    assert (None if found is None else (found.rank, found.last_in)) == named


def test_ranks_on_different_kinds_of_device_are_refused(pair, writer):
    gpu = rank_communication(analyse(pair[0]), 0)
    writer.header.clear()
    writer.mark("joulemark.iteration#0", 0, 10)
    host = rank_communication(analyse(writer.save("host.json")), 1)
    with pytest.raises(ValueError, match="one kind of device"):
        across([gpu, host])


def test_the_command_tells_the_same_of_the_ranks_of_one_run(pair, capsys):
    assert main(["trace", "--ranks", "--json", *map(str, pair)]) == 0
    document = json.loads(capsys.readouterr().out)
    schema = Path(__file__).parents[2] / "docs" / "schema" / "ranks.schema.json"
    jsonschema.validate(document, json.loads(schema.read_text()))
    assert document["exposed_communication_s"] == pytest.approx(175 * MICRO)
    assert document["straggler"] == {"rank": 1, "last_in": STEPS}
    assert [one["exposed_communication_s"] for one in document["ranks"]] == pytest.approx([250 * MICRO, 100 * MICRO])
    assert main(["trace", "--ranks", *map(str, pair)]) == 0
    shown = capsys.readouterr().out
    assert "straggler: rank 1 comes last in 6 of 6 iterations" in shown
    assert "250 µs" in shown


def test_the_command_refuses_what_are_no_ranks(pair, writer, capsys):
    assert main(["trace", "--ranks", str(pair[0])]) == 2
    assert "give the trace of every rank" in capsys.readouterr().err
    writer.operator("aten::mm", 0, 10)
    assert main(["trace", "--ranks", str(pair[0]), str(writer.save("none.json"))]) == 2
    assert "holds no iterations" in capsys.readouterr().err
