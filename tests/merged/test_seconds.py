"""Seconds of kernels: fitted to measured ones, told by counts, and what they rank."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest

from joulemark.merged.cost import predict
from joulemark.merged.families import Problem, known_families, offers
from joulemark.merged.kernels import Description, memoized, wide
from joulemark.merged.kernels import chain as chains
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.seconds import DRAM, Fitted, cheapest, dram_bytes, fitted, seconds_of, time_of
from joulemark.merged.sequence import Conv, Sequence
from joulemark.merged.trials import worth_measuring
from joulemark.merged_bench.judge import timed_of
from joulemark.merged_bench.refit import Timed, errors_of, fit, latest, main, points_of, predicted_s, table
from tests.merged.fakes import RATES

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
PROBES = [RESULTS / name for name in ("merged-probe.json", "merged-variants.json", "merged-blocks.json")]
SCHEMA = json.loads((RESULTS.parents[1] / "docs" / "schema" / "merged-model.schema.json").read_text(encoding="utf-8"))
CHAIN = Sequence((Conv(16, 16, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu"),) * 2)


_COUNTED = ("chain", "stream", "stream_warpgroup", "memoized", "wide")


def points(wrong: float = 1.0) -> list[Timed]:
    """Kernels of three blocks that take 2 s a product and 3 s a round; ``wrong`` slows one of the last block's down."""
    made = []
    for block, each in (("a", 10.0), ("b", 20.0), ("c", 40.0)):
        for rounds in (1.0, 2.0, 5.0):
            time_s = 2 * each + 3 * rounds
            slow = wrong if (block, rounds) == ("c", 1.0) else 1.0
            made.append(Timed(block, "f", f"r{rounds}", {"product": each, "round": rounds}, time_s * slow, 0))
    return made


def test_a_fit_finds_the_seconds_of_each_term():
    seconds = fit(points())
    assert seconds["f"] == {"product": pytest.approx(2, rel=1e-3), "round": pytest.approx(3, rel=1e-3)}
    assert predicted_s(Timed("d", "f", "x", {"product": 1, "round": 1, "new": 5}, 1.0, 0), seconds) == pytest.approx(5)


def test_a_term_that_explains_nothing_is_left_out():
    more = [Timed(p.block, "f", p.name, {**p.counts, "none": 1 / p.time_s}, p.time_s, 0) for p in points()]
    assert set(fit(more)["f"]) == {"product", "round"}


def test_a_kernel_counts_less_the_farther_it_is_from_the_best_of_its_block():
    """Seconds s of two kernels of one count that take 1 and 2: Σ (wᵢ (1 − s / tᵢ))² with w = 1 and 1 / 4."""
    seconds = fit([Timed("a", "f", name, {"product": 1.0}, time_s, 0) for name, time_s in (("x", 1.0), ("y", 2.0))])
    assert seconds["f"]["product"] == pytest.approx((1 + 1 / 32) / (1 + 1 / 64), rel=1e-3)


def test_what_goes_through_dram_moves_beside_all_else():
    seconds = {"product": 2.0, DRAM: 0.5}
    assert time_of({"product": 3.0, "new": 9.0}, seconds) == 6.0
    assert time_of({"product": 3.0, DRAM: 12.0}, seconds) == pytest.approx(6 * 2**0.25)
    assert time_of({"product": 3.0, DRAM: 200.0}, seconds) == pytest.approx(100, rel=1e-4)
    given = [{"product": each, DRAM: moved} for each in (1.0, 2.0, 4.0, 8.0) for moved in (1.0, 8.0, 20.0, 60.0)]
    made = fit([Timed(str(n), "f", "k", one, time_of(one, seconds), 0) for n, one in enumerate(given)])
    assert made["f"] == {term: pytest.approx(value, rel=0.02) for term, value in seconds.items()}


def test_tensors_that_the_l2_keeps_do_not_go_through_dram():
    description = Description(CHAIN, "bf16")
    assert dram_bytes(description, (512, 512), 1) == 0
    assert dram_bytes(description, (1024, 1024), 8) == 2 * 8 * 1024**2 * 16 * 2
    reduced = Sequence((replace(CHAIN.layers[0], stride=(2, 2)),))
    assert dram_bytes(Description(reduced, "bf16"), (1024, 1024), 1) == 1024**2 * 16 * 2  # the output is kept


def test_blocks_beside_each_other_are_as_many_as_registers_and_shared_memory_admit():
    """Two layers of 32 channels in 4 warps of 160 registers: 3 blocks where they take 74 KiB, 2 where they take 82."""

    def beside(height: int) -> float:
        layer = Conv(32, 32, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
        made = chains.chain(Description(Sequence((layer, layer)), "bf16"), chains.Plan((height, 28), 4, 2))
        assert made.counts is not None
        found = made.counts((224, 224), 64, Device())
        return found["chunk"] / found["chunk_bare"]

    assert (beside(14), beside(16)) == (pytest.approx(3), pytest.approx(2))


def test_errors_are_of_blocks_that_were_not_fitted():
    right, wrong = errors_of(points()), errors_of(points(wrong=3.0))
    assert right["good_choices"] == 1
    assert right["families"]["f"]["spread"] == pytest.approx(1, abs=1e-3)
    choice = next(one for one in wrong["blocks"] if one["block"] == "c")
    assert choice["chosen"] == "r1.0"
    assert choice["cost"] == pytest.approx(3 * 83 / 86, abs=2e-3)
    assert choice["cost_of_three"] == 1
    assert (choice["tried"], choice["cost_of_tried"]) == (3, 1)
    assert wrong["good_choices"] == pytest.approx(2 / 3)


def test_one_block_alone_is_fitted_and_says_that_nothing_predicts_it(tmp_path, capsys):
    known = {"candidate": {"family": "f", "shared": 5}, "path": "f/k", "layers": [{}], "size": [8], "measured_s": 3.0}
    rows = [{"subject": "s", "rivals": {"padded": {"candidates": [{**known, "counts": {"round": 1.0}}]}}}]
    (tmp_path / "blocks.json").write_text(json.dumps({"gpu": "g", "rows": rows}))
    assert main([str(tmp_path / "blocks.json"), "--out", str(tmp_path / "model.json")]) == 0
    made = json.loads((tmp_path / "model.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(made)
    assert made["seconds"] == {"f": {"round": 3.0}}
    assert made["errors"]["good_choices"] is made["errors"]["good_of_tried"] is None
    assert "one block alone was measured" in capsys.readouterr().out
    assert errors_of([])["blocks"] == []


def test_padded_and_memoized_bricks_are_compared_where_both_were_measured():
    def timed(block: str, size: float, family: str, time_s: float, name: str = "k") -> Timed:
        return Timed(block, family, name, {"product": size}, time_s, 0)

    found = [timed("a", 1.0, "chain", 2.0), timed("b", 2.0, "chain", 4.0), timed("c", 3.0, "chain", 6.0)]
    found += [timed("a", 1.0, "memoized", 1.0), timed("b", 2.0, "memoized", 2.0), timed("c", 3.0, "memoized", 6.6)]
    found += [timed("e", 4.0, "chain", 8.0), timed("e", 4.0, "memoized", 4.0)]  # with the others enough for its own
    errors = errors_of([*found, timed("c", 3.0, "memoized", 3.0, "3 x k"), timed("d", 1.0, "chain", 2.0)])
    told = {one["block"]: one["memoized_over_padded"] for one in errors["blocks"]}
    assert told["a"]["measured"] == 0.5
    assert told["a"]["predicted"] < 1
    assert told["c"]["measured"] == 1.1  # and not by what takes three launches
    assert told["d"] is None
    assert errors["right_schedules"] == pytest.approx(3 / 4)
    assert "told in 3 of 4; memoized faster than padded: a (0.500 of its time), b (0.500" in table(errors)


def test_of_several_files_the_last_that_measured_a_kernel_tells_its_time():
    old = [Timed("a", "f", "x", {}, 1.0, 0), Timed("a", "g", "x", {}, 2.0, 0)]
    new = [Timed("a", "g", "x", {}, 3.0, 0), Timed("b", "g", "x", {}, 4.0, 0)]
    assert [one.time_s for one in latest([old, new])] == [1.0, 3.0, 4.0]
    assert [one.time_s for one in latest([new, old])] == [2.0, 4.0, 1.0]


def test_what_is_measured_are_two_of_a_family_and_more_that_are_told_to_be_as_fast():
    told = [("a", 1.0, True), ("a", 1.0, True), ("b", 1.02, True), ("a", 1.03, True), ("a", 1.05, True)]
    told += [
        ("a", 1.06, True),
        ("a", 1.07, True),
        ("a", 1.08, True),
        ("b", 1.5, True),
        ("b", 1.6, True),
        ("c", 1.7, True),
    ]
    assert worth_measuring(told) == [0, 3, 4, 5, 6, 2, 8, 10]  # 1 is 0's twin
    assert worth_measuring(told[:4]) == [0, 3, 1, 2]
    bare = [(family, time_s, False) for family, time_s, _ in told]
    assert worth_measuring(bare) == [0, 1, 2, 8, 10]
    assert worth_measuring(bare, most=12) == [0, 1, 3, 4, 2, 8, 9, 10]
    assert worth_measuring([("a", None, False)] * 3) == [0, 1, 2]
    assert worth_measuring([]) == []


def test_the_committed_seconds_are_those_of_the_committed_probes(tmp_path, capsys):
    out = tmp_path / "model.json"
    assert main([*map(str, PROBES), "--out", str(out)]) == 0
    made, committed = json.loads(out.read_text()), fitted()
    assert (made["gpu"], made["origin"], made["derived"]) == (committed.gpu, committed.origin, committed.derived)
    # Not term by term: what all kernels of a family count alike (a store of `wide` is 16 chunks) is split as it comes.
    points = latest([points_of(json.loads(path.read_text())) for path in PROBES])
    assert len(points) > 1000
    for one in points:
        told = predicted_s(one, made["seconds"])
        assert told == pytest.approx(predicted_s(one, committed.seconds), rel=1e-3, nan_ok=True), one.name
    stored = json.loads((RESULTS / "merged-model.json").read_text())
    for name in ("good_choices", "good_of_three", "good_of_tried", "right_schedules"):
        assert made["errors"][name] == pytest.approx(stored["errors"][name])
    assert made["errors"]["good_choices"] >= 0.8
    assert min(made["errors"]["good_of_three"], made["errors"]["good_of_tried"]) >= 0.95
    assert made["errors"]["right_schedules"] >= 0.9
    duels = [one["memoized_over_padded"] for one in made["errors"]["blocks"]]
    assert {one["measured"] < 1 for one in duels if one is not None} == {True, False}  # each wins somewhere
    assert "within 5 % of the best" in capsys.readouterr().out


def test_derived_seconds_fill_what_was_not_measured(tmp_path, monkeypatch):
    derived = {"f": {"round": 9.0, "new": 1.0}, "d": {"x": 2.0}}
    made = Fitted("g", "", {"f": {"round": 3.0}}, {"b": "f"}, derived)
    assert made.of("f") == {"round": 3.0, "new": 1.0}
    assert (made.of("b"), made.of("d"), made.of("none")) == ({"round": 3.0}, {"x": 2.0}, None)
    measured = replace(made, seconds={**made.seconds, "b": {"round": 4.0}})
    assert measured.of("b") == {"round": 4.0}  # its own as soon as it has any
    monkeypatch.setattr("joulemark.merged_bench.refit.fitted", lambda: made)
    known = {"candidate": {"family": "f", "shared": 5}, "path": "f/k", "layers": [{}], "size": [8], "measured_s": 3.0}
    rival = {"candidates": [{**known, "counts": {"round": 1.0, "new": 0.0}}]}
    rows = [{"subject": name, "rivals": {"padded": rival}} for name in "st"]
    (tmp_path / "blocks.json").write_text(json.dumps({"gpu": "g", "rows": rows}))
    assert main([str(tmp_path / "blocks.json"), "--out", str(tmp_path / "model.json")]) == 0
    assert json.loads((tmp_path / "model.json").read_text())["derived"] == {"f": {"new": 1.0}, "d": {"x": 2.0}}


def test_candidates_of_a_benchmark_bring_their_counts_along():
    given = {"layers": [{}, {}], "size": [8, 9], "candidate": {"family": "f", "shared": 5}, "path": "f/k"}
    known = [{**given, "counts": {"round": 2.0}, "measured_s": 3.0}]
    known += [{**given, "path": "f/n", "counts": None, "measured_s": 1.0}]
    (one,) = points_of({"rows": [{"subject": "s", "rivals": {"padded": {"candidates": known}, "eager": {}}}]})
    assert one == Timed("s/2x8x9", "f", "k", {"round": 2.0}, 3.0, 5)


def test_what_adds_a_tensor_is_not_taken_for_the_same_layers_without():
    """An older document tells both alike, so neither counts; no family counts what is added."""
    given = {"layers": [{}], "size": [8], "candidate": {"family": "f", "shared": 5}, "path": "f/k", "counts": {"x": 1}}
    alone, added = ({**given, "measured_s": 3.0}, {**given, "measured_s": 9.0})

    def times(*candidates):
        rivals = {"padded": {"candidates": candidates}, "rows": {"candidates": candidates[:1]}}
        return [one.time_s for one in points_of({"rows": [{"subject": "s", "rivals": rivals}]})]

    assert times({**alone, "adds": False}, {**added, "adds": True}) == [3.0]
    assert times(alone) == [3.0]  # two rivals tell it
    assert timed_of({"rivals": {"padded": {"candidates": [alone, added]}}}) == []
    assert timed_of({"rivals": {"padded": {"candidates": [alone, {**added, "measured_s": None}]}}}) == []


def test_a_candidate_whose_plan_is_told_is_counted_as_this_version_counts():
    """And it is the same block as that of a probe with the same layers, whatever either is called."""
    (offer,) = [one for one in offers(known_families(), Problem(Description(CHAIN, "bf16"), (256, 256), 8, Device()))
                if one.path.startswith("chain/")][:1]  # fmt: skip
    layers = [asdict(one) for one in CHAIN.layers]
    given = {"layers": layers, "size": [256, 256], "batch": 8, "form": "bf16", "path": offer.path, "measured_s": 3.0}
    given |= {"candidate": {"family": "chain", "shared": 5}, "counts": {"old": 1.0}, "plan": offer.kernel.plan}
    given = json.loads(json.dumps(given))
    (one,) = points_of({"rows": [{"subject": "s", "rivals": {"padded": {"candidates": [given]}}}]})
    assert offer.kernel.counts is not None
    assert one.counts == offer.kernel.counts((256, 256), 8, Device())
    kernel = {"family": "chain", "plan": given["plan"], "time_s": 4.0}
    flat = {"in": 16, "out": 16, "kernel": 3, "activation": "relu"}
    block = {"name": "p", "layers": [flat] * 2, "size": [256, 256], "batch": 8, "format": "bf16", "kernels": [kernel]}
    probe = points_of({"blocks": [block]})
    assert [(point.block, point.time_s) for point in latest([probe, [one]])] == [("p", 3.0)]


def test_a_launch_costs_all_families_the_same():
    short = [Timed(str(n), "short", "k", {"launch": 1.0, "product": n}, 2.0 + n, 0) for n in (1.0, 2.0)]
    long = [Timed(str(n), "long", "k", {"launch": 1.0, "product": n}, 2.0 + 4.0 * n, 0) for n in (1e3, 2e3)]
    seconds = fit([*short, *long])
    assert seconds["short"]["launch"] == seconds["long"]["launch"] == pytest.approx(2.0, rel=1e-3)
    assert seconds["long"]["product"] == pytest.approx(4.0, rel=1e-3)


def test_a_family_borrows_until_enough_blocks_were_measured():
    streams = [Timed(str(n), "stream", "k", {"product": n}, 2.0 * n, 0) for n in (1.0, 2.0)]
    planes = [Timed(str(n), "planes", "k", {"product": n}, 3.0 * n, 0) for n in (1.0, 2.0, 3.0)]
    two, three = fit([*streams, *planes[:2]]), fit([*streams, *planes])
    assert "planes" not in two
    assert predicted_s(planes[0], two) == pytest.approx(2.0)
    assert predicted_s(planes[0], three) == pytest.approx(3.0)


def test_a_file_that_is_no_probe_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text('{"boxes": []}')
    assert main([str(path)]) == 2
    assert "merged-probe.json" in capsys.readouterr().err


def test_every_measured_kernel_can_be_made_and_counted():
    found = latest(points_of(json.loads(one.read_text(encoding="utf-8"))) for one in PROBES)
    assert {one.family for one in found} >= set(fitted().seconds)
    assert all(value >= 0 for one in found for value in one.counts.values())


def test_what_memoized_bricks_wait_for_is_counted_by_hand():
    """Images of 64 × 28 in bricks of 8 × 14: 8 rows of 2, of a ring of five rows two beside the three that are read."""

    def counts(layers: int, lanes: int = 1):
        description = Description(Sequence(CHAIN.layers[:1] * layers), "bf16")
        plan = memoized.Plan((8, 14), warps=4, blocks=1, lanes=lanes)
        made = memoized.memoized(description, plan)
        assert made.counts is not None
        return made.counts((64, 28), 4, Device())

    assert counts(1)["round"] == pytest.approx(max(1, 4 * 16 / 16))  # a lane's image at a time, and all of its bricks
    assert counts(2)["round"] == pytest.approx(2 * 4 * 16 / (2 * 2 * 2))  # 2 columns, 2 layers, 2 rows of each
    assert counts(2, lanes=4)["round"] == pytest.approx(2 * 4 * 16 / 32)
    # 9 taps, 1 step, 2 tiles, 4 warps, for each of the tasks that one multiprocessor has.
    assert counts(2)["weight_load"] == pytest.approx(4 * 16 / 8 * 2 * 9 * 2 * 4)


def test_fragments_that_padded_bricks_read_are_counted_by_hand():
    """A brick of 32 × 30 for each multiprocessor: two strips of 16 columns, 34 rows for three columns of taps."""

    def counted(channels: int, warps: int, blocks: int) -> float:
        layer = Conv(channels, channels, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
        made = chains.chain(Description(Sequence((layer,)), "bf16"), chains.Plan((32, 30), warps, blocks))
        assert made.counts is not None
        return made.counts((32, 30), 132, Device())["fragment"]

    assert counted(16, warps=2, blocks=1) == 34 * 2 * 3  # a step of 16 channels, and a warp makes all 16 of it
    assert counted(16, warps=4, blocks=1) == (34 + 2) * 2 * 3  # two segments of rows, each with its own halo
    assert counted(32, warps=4, blocks=1) == 34 * 2 * 3 * 2 * 2  # two steps, for 16 channels each
    assert counted(32, warps=8, blocks=2) == 34 * 2 * 3 * 2 * 4  # for 8 each: fewer registers


def test_groups_of_rows_of_wide_kernels_are_counted_by_hand():
    """Two layers of 64 channels, 128 × 120 pixels: four bands of 28 columns of 32, one block of 32 groups of 4 rows."""
    layer = Conv(64, 64, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
    made = wide.wide(Description(Sequence((layer, layer)), "bf16"), wide.Plan(32, 4, 32))
    assert made.counts is not None
    found = made.counts((128, 112), 1, Device())
    assert found["step"] == 32 + 4
    assert found["product"] == 36 * 2 * (3 * 3 * 4) * 128
    assert (found["store"], found["round"], found["launch"]) == (36 * 128, 1, 1)
    assert found["chunk"] == 36 * 128 * (64 + 64) / 8
    assert made.counts((128, 112), 34, Device())["round"] == 2  # 136 bands


def test_what_does_not_fit_is_left_out_and_kinds_are_mixed():
    def counts(plan: tuple[str, float]) -> dict[str, float]:
        if plan[1] < 0:
            raise ValueError("too small")
        return {"product": plan[1]}

    plans = [("a", 3.0), ("a", 1.0), ("a", -1.0), ("a", 2.0), ("b", 9.0)]
    assert cheapest("chain", plans, counts, 9, lambda one: one[0]) == [("a", 1.0), ("a", 2.0), ("b", 9.0)]
    with pytest.raises(KeyError, match="nothing"):
        cheapest("nothing", plans, counts, 1)
    assert seconds_of("nothing", {"round": 1.0}) is None


def test_padded_chains_of_64_channels_keep_their_weights():
    layer = Conv(64, 64, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu")
    description = Description(Sequence((layer, layer)), "bf16")
    plans = chains.candidates(description, (56, 56), 64, Device())
    assert plans
    assert all("RESIDENT = false" not in chains.chain(description, plan).source for plan in plans)


@pytest.mark.parametrize("gpu", [fitted().gpu, None])
def test_counts_tell_the_time_on_the_gpu_that_was_measured(gpu):
    found = offers(known_families(), Problem(Description(CHAIN, "bf16"), (256, 256), 8, Device(), gpu))
    rates = replace(RATES, l2_bytes=2**30, shared_bytes=2**20)
    for one in found:
        prediction = predict(CHAIN, (256, 256), 8, "bf16", one.candidate, rates)
        counted = gpu is not None and one.candidate.family in _COUNTED
        assert (prediction.bound == "counts") == counted
        if counted:
            assert prediction.time_s == one.candidate.counted_s > 0
