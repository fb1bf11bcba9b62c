"""The benchmarks of merged execution: instruments, rows, files that are resumed, and the judge of the model."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import runpy
import signal
import time
import weakref
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import jsonschema
import pytest

torch = pytest.importorskip("torch")

from joulemark.collect.power import PowerSampler  # noqa: E402
from joulemark.errors import ConfigurationError  # noqa: E402
from joulemark.merged import cache, trials  # noqa: E402
from joulemark.merged.cost import Candidate, predict  # noqa: E402
from joulemark.merged.sequence import Conv, Sequence  # noqa: E402
from joulemark.merged.setting import DEPTH  # noqa: E402
from joulemark.merged_bench import command, rivals  # noqa: E402
from joulemark.merged_bench.document import Document  # noqa: E402
from joulemark.merged_bench.gains import (  # noqa: E402
    gains_of,
    group_gains,
    line_of,
    over_best,
    replayed_over_burst,
    with_gains,
)  # fmt: skip
from joulemark.merged_bench.judge import judge, measured_of  # noqa: E402
from joulemark.merged_bench.measure import _perform, _steady, measure_all, measure_subject  # noqa: E402
from joulemark.merged_bench.options import Options  # noqa: E402
from joulemark.merged_bench.prebuild import wanted, wanted_by_merge  # noqa: E402
from joulemark.merged_bench.prepare import step_of  # noqa: E402
from joulemark.merged_bench.remarks import remarks  # noqa: E402
from joulemark.merged_bench.rows import measured_in  # noqa: E402
from joulemark.merged_bench.stage import Act, Poisoned, Stage  # noqa: E402
from joulemark.merged_bench.subjects import BLOCKS, NETWORKS, Subject, network  # noqa: E402
from tests.merged.fakes import RATES, fake_capture  # noqa: E402

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "schema" / "merged.schema.json").read_text(encoding="utf-8"))
QUICK = Options("fp32", ("eager", "fused", "jit", "merged", "own_unmerged"), rounds=2, sustain_s=0.02, tiny=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


def block(name):
    return next(one for one in BLOCKS if one.name.startswith(name))


def test_a_row_says_what_was_measured_and_why_the_rest_is_missing():
    row = measure_subject(block("bottleneck"), Stage("cpu"), QUICK)
    assert set(row["rivals"]) == {*QUICK.names, "compile", "xla", "tensorrt"}
    assert row["rivals"]["xla"] == {"missing": {"all": "not asked for (--rivals, --without)"}}
    assert row["tiny"]
    for name in ("eager", "jit", "merged"):
        one = row["rivals"][name]
        assert one["burst_s"] > 0
        assert one["sustained_s"] > 0
        assert one["relative_error"] < 1e-5
        assert one["missing"]["energy_j"] == "no power sensor was asked for"
        assert "dram_read_bytes" in one["missing"]
    assert "need a GPU" in row["rivals"]["fused"]["missing"]["all"]
    assert row["gains"]["best_rival"] in ("eager", "jit")
    assert row["gains"]["burst"] > 0
    assert row["gains"]["energy"] is None
    assert row["rivals"]["merged"]["explain"]
    assert datetime.fromisoformat(row["measured"]["at"]) <= datetime.now(UTC)
    assert len(row["measured"]["merged_code"]) == 32
    assert (row["measured"]["commit"] is None) is ("commit" in row["measured"]["missing"])


@pytest.mark.parametrize("subject", BLOCKS, ids=lambda one: one.name)
def test_every_block_runs(subject):
    step, items = step_of(subject, "eager", "cpu")
    assert step().shape[0] == items == subject.tiny[0]


def test_blocks_have_unique_names_and_all_groups_that_are_judged():
    assert len({one.name for one in BLOCKS}) == len(BLOCKS)
    assert {"chain-16", "chain-32", "inverted", "inverted-s2", "bottleneck", "chain3d-16"} <= {
        one.group for one in BLOCKS
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_zoos(name):
    subject = network(name, 3)
    assert subject.shape[0] == 3
    assert subject.name == f"{name}-b3"


def test_a_file_is_valid_and_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "merged.json"
    facts = {"gpu": "cpu", "gpu_uuid": None, "driver": None, "software": {}}
    options = replace(QUICK, names=("eager", "merged"))
    document = Document(path, "blocks", facts)
    said: list[str] = []
    late = replace(options, ends_s=time.perf_counter())
    assert not measure_all(BLOCKS[:2], document, Stage("cpu"), late, said.append)
    assert said == []
    assert measure_all(BLOCKS[:2], document, Stage("cpu"), options, said.append)
    content = json.loads(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(content)
    assert [row["subject"] for row in content["rows"]] == [one.name for one in BLOCKS[:2]]
    again = Document(path, "blocks", facts)
    assert not any(again.lacks(one, "fp32", tiny=True) for one in BLOCKS[:2])
    assert again.lacks(BLOCKS[0], "bf16", tiny=True)
    with pytest.raises(ConfigurationError, match="no document of merged networks"):
        Document(path, "networks", facts)


def test_no_subject_begins_when_time_is_up(tmp_path):
    """Neither when it was up before, nor when what a row takes to be measured is longer than what is left."""
    document, begun = Document(tmp_path / "m.json", "blocks", {"gpu": "cpu"}), []
    for left_s in (-4.0, 0.9 * QUICK.measuring_s):
        late = replace(QUICK, ends_s=time.perf_counter() + left_s)
        assert not measure_all(BLOCKS, document, Stage("cpu"), late, begun.append)
    assert (document.content["rows"], begun) == ([], [])


def test_a_row_in_which_nothing_was_measured_is_not_kept_and_the_next_subject_does_not_begin(tmp_path, monkeypatch):
    """Time is up while the first rival is built: no row, and no guess from it for what the next one takes."""
    monkeypatch.setitem(rivals.RIVALS, "jit", lambda task: time.sleep(60.0))
    document, said = Document(tmp_path / "m.json", "blocks", {"gpu": "cpu"}), []
    options = replace(QUICK, names=("jit", "eager"), sustain_best=0, steady_unmerged=False)
    short = replace(options, ends_s=time.perf_counter() + options.measuring_s + 0.5)
    assert not measure_all([block("residual"), block("chain-2x16")], document, Stage("cpu"), short, said.append)
    assert document.content["rows"] == []
    assert document.content["failed"] == {}
    assert [one for one in said if not one.startswith(" ")] == ["residual-16-512-b16"]


def test_a_subject_of_which_every_rival_fails_is_kept_with_the_reason_of_one(tmp_path):
    document, only = Document(tmp_path / "m.json", "blocks", {"gpu": "cpu"}), replace(QUICK, names=("fused",))
    assert measure_all([block("residual")], document, Stage("cpu"), only, lambda _: None)
    assert document.content["rows"] == []
    assert "fused: cuDNN's fused convolutions need a GPU" in document.content["failed"]["residual-16-512-b16"]


def block_row(name, group="chain-16", burst_s: float | None = 1e-3, **more):
    found = {"merged": {} if burst_s is None else {"burst_s": burst_s}}
    return {"subject": name, "group": group, "dtype": "bf16", "took_s": 20.0, "rivals": found, **more}


def test_rows_that_are_empty_cut_or_asked_for_again_are_measured(tmp_path):
    path, names = tmp_path / "m.json", [one.name for one in BLOCKS[:4]]
    rows = [
        block_row(names[0]),
        block_row(names[1], cut=True),
        block_row(names[2], burst_s=None, cut=True),
        block_row(names[3]),
    ]
    path.write_text(json.dumps({"schema": SCHEMA["properties"]["schema"]["const"], "kind": "blocks", "gpu": "cpu",
                                "rows": rows, "failed": {}}))  # fmt: skip
    assert command.main("blocks", lambda _: BLOCKS, rivals.EVERY, ["--out", str(path), "--again", names[3]]) == 0
    document = Document(path, "blocks", {"gpu": "cpu"})
    assert [one["subject"] for one in document.content["rows"]] == [names[0], names[1], names[3]]
    assert [document.lacks(one, "bf16") for one in BLOCKS[:4]] == [False, True, True, True]
    document.add(block_row(names[3], cut=True, gains={}))  # keeps what is there
    assert document.content["rows"][-1] == block_row(names[3], again=True)
    document.add(block_row(names[3], burst_s=2e-3))
    assert not document.lacks(BLOCKS[3], "bf16")
    assert len(document.content["rows"]) == 3


@pytest.mark.parametrize(("name", "why"), [("nothing", "holds no row of 'nothing'"), (None, "is not there")])
def test_what_is_not_there_cannot_be_measured_again(name, why, tmp_path, capsys):
    path = tmp_path / "m.json"
    if name is not None:
        path.write_text('{"rows": []}')
    arguments = ["--out", str(path), "--again", name or "chain"]
    assert command.main("blocks", lambda _: BLOCKS, rivals.EVERY, arguments) == 2
    assert why in capsys.readouterr().err


def test_schedules_by_themselves_are_for_those_that_are_named():
    options = Options(by_schedule=frozenset(("chain-16", BLOCKS[0].name)))
    assert options.of(BLOCKS[0]).names == options.of(block("chain-2x16")).names == rivals.EVERY
    assert set(rivals.EVERY) - set(options.of(block("residual")).names) == {"memoized", "rows", "bricks"}
    assert Options().of(block("residual")).names == rivals.EVERY


def test_a_subject_may_take_as_long_as_others_of_its_kind_and_a_shorter_one_goes_before(tmp_path):
    document = Document(tmp_path / "m.json", "blocks", {"gpu": "cpu"})
    stride2, chain = block("inverted-16-96-24-s2"), block("chain-2x16")
    assert document.expected_s(chain) == 0
    took_s = {"inverted-s2": 72.0, "inverted": 60.0, "chain-16": 20.0, "bottleneck": 40.0}
    document.content["rows"] += [block_row(name, name, took_s=one) for name, one in took_s.items()]
    document.content["rows"] += [block_row("late", "inverted", took_s=1.0, cut=True)]
    assert (document.expected_s(stride2), document.expected_s(chain)) == (60.0, 20.0)
    assert document.expected_s(block("residual")) == 20.0
    begun: list[str] = []
    options = replace(QUICK, names=("eager",), ends_s=time.perf_counter() + 65.0)  # the first one takes 20 s longer
    assert not measure_all([stride2, chain], document, Stage("cpu"), options, begun.append)
    assert chain.name in begun
    assert stride2.name not in begun


def test_counters_that_a_stage_asks_for_are_its_figures_and_the_sms_activity(monkeypatch):
    from types import SimpleNamespace

    from joulemark.collect import counters

    asked = {}
    gpu = SimpleNamespace(gpu=SimpleNamespace(name="NVIDIA H200", uuid="GPU-1"))
    monkeypatch.setattr(command, "probe_gpus", lambda _: SimpleNamespace(visible=[gpu], driver="580", problem=None))
    monkeypatch.setattr(command, "open_power", lambda _: None)
    monkeypatch.setattr(command, "Stage", lambda *told: told)
    monkeypatch.setattr(counters, "open_counters", lambda *_, **more: asked.update(more) or counters.Ladder(None))
    command._stage(SimpleNamespace(device="cuda:0", no_counters=False))
    assert set(asked["wanted"]) == {
        "sm_active_cycles", "dram_read_bytes", "dram_write_bytes", "l2_bytes", "l1_sectors",
    }  # fmt: skip
    assert asked["pace"].interval_for(0.25) == pytest.approx(5e-4)


def test_a_subject_that_cannot_be_built_is_kept_with_its_reason(tmp_path):
    def broken():
        raise ConfigurationError("no such network", "choose another")

    subject = Subject("broken", "none", broken, (1,), (1, 1, 2, 2))
    document = Document(tmp_path / "m.json", "blocks", {"gpu": "cpu"})
    assert measure_all([subject], document, Stage("cpu"), QUICK, lambda _: None)
    assert "no such network" in document.content["failed"]["broken"]


def test_a_rival_that_fails_costs_itself_alone(monkeypatch):
    def fail(task):
        raise ValueError("first line\nsecond")

    monkeypatch.setitem(rivals.RIVALS, "jit", fail)
    row = measure_subject(block("residual"), Stage("cpu"), replace(QUICK, names=("eager", "jit", "merged")))
    assert row["rivals"]["jit"] == {"missing": {"all": "ValueError: first line"}}
    assert row["gains"]["best_rival"] == "eager"
    assert "against eager" in line_of(row)


@pytest.mark.parametrize(
    ("most_s", "calls", "kept", "why"),
    [
        (90.0, 2, True, None),
        (90.0, 2, False, "a second merge did not take the plan from the disk (it was planned anew)"),
        (-1.0, 1, True, "merging took 0 s, more than the -1 s up to which there is time for a second"),
    ],
)
def test_merging_is_timed_again_only_where_it_was_quick_and_else_says_why_not(monkeypatch, most_s, calls, kept, why):
    from joulemark.merged.merged_model import MergedModel

    made = []

    def merge(model, x, budget_s, depth=DEPTH):
        assert depth == DEPTH, "both times the plan that a user gets"
        made.append(MergedModel(model, [], cached=kept and bool(made), spent_s={"tracing": 1.0 + len(made)}))
        return made[-1]

    monkeypatch.setattr(rivals, "merge", merge)
    monkeypatch.setattr(rivals, "_AGAIN_S", most_s)
    facts = rivals.build("merged", rivals.Task(torch.nn.ReLU(), torch.ones(1))).facts
    assert len(made) == calls
    assert (facts["merge_cached_s"] is None) == (why is not None)
    assert facts.get("merge_cached_missing") == why
    assert facts["merge_spent_s"] == {"tracing": 1.0}
    assert facts["merge_cached_spent_s"] == (None if why is not None else {"tracing": 2.0})


def test_merging_again_finds_the_memory_of_a_new_process(monkeypatch):
    """The first one's graph is gone before what nobody uses is given back."""
    from joulemark.merged import replay
    from joulemark.merged.merged_model import MergedModel

    model, order, graphs = torch.nn.ReLU(), [], []

    def merge(model, x, budget_s, depth=DEPTH):
        assert depth == DEPTH, "both times the plan that a user gets"
        order.append("merge")
        made = replay.Replayed(model, (x,))
        graphs.append(weakref.ref(made._graph))
        return MergedModel(made, [], cached=len(order) > 1)

    monkeypatch.setattr(replay, "capture", fake_capture)
    monkeypatch.setattr(rivals, "merge", merge)
    monkeypatch.setattr(rivals, "give_back", lambda _: order.append("gone" if graphs[0]() is None else "held"))
    built = rivals.build("merged", rivals.Task(model, torch.ones(1)))
    assert order == ["merge", "gone", "merge"]
    assert built.call.inner is model


def test_an_output_that_is_not_finite_has_no_error_and_the_row_can_be_written(monkeypatch):
    monkeypatch.setitem(rivals.RIVALS, "jit", lambda task: lambda x: task.model(x) * float("nan"))
    row = measure_subject(block("residual"), Stage("cpu"), replace(QUICK, names=("jit", "merged")))
    assert row["rivals"]["jit"]["relative_error"] is None
    assert "not finite" in row["rivals"]["jit"]["missing"]["relative_error"]
    assert row["rivals"]["merged"]["relative_error"] < 1e-2
    json.dumps(row, allow_nan=False)


class Source:
    """Counts a kilobyte for each call."""

    tier, groups = "pm_sampling", ("none of it", "first", "second")

    def __init__(self, calls):
        self.calls = calls

    def counters(self, group):
        return ({"first": "dram_read_bytes", "second": "l1_sectors"}.get(group, "sm_cycles"),)

    def record(self, group, run, expected_s=None):
        assert group != "none of it"  # that takes time and tells nothing
        import numpy as np

        from joulemark.counter_series import CounterSeries

        before = self.calls[0]
        run()
        name = {"first": "dram_read_bytes", "second": "l1_sectors"}[group]
        values = {name: np.array([1024.0 * (self.calls[0] - before)])}
        return CounterSeries("pm_sampling", group, np.zeros(1), np.ones(1), values, {name: "B"})


def test_a_graph_keeps_what_it_reads():
    """A replay knows addresses alone: weights and inputs that nothing else holds were given back beneath it."""

    class Graphs:
        def capture(self, run):
            run()
            return lambda: None

    class Weights:
        def __call__(self, x):
            return x

    class Input:
        pass

    stage = Stage("cpu")
    stage.device, stage.timer = "cuda:0", Graphs()
    call, x = Weights(), Input()
    held = weakref.ref(call), weakref.ref(x)
    act = stage.act("bricks", call, [x])
    del call, x
    gc.collect()
    assert act.graphed
    assert all(one() is not None for one in held)
    del act
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_bytes_are_per_call_and_sectors_are_32_bytes():
    calls = [0]

    def call(_):
        calls[0] += 1

    stage = Stage("cpu", counters=Source(calls))
    act = stage.act("x", call, [None, None, None])
    stage.count([act])
    assert act.figures["dram_read_bytes"] == 1024
    assert act.figures["l1_bytes"] == 1024 * 32
    assert "does not count l2_bytes" in act.missing["l2_bytes"]


class Meter:
    """A board of 200 W whose counter moves every 10 ms."""

    name, energy_tier, power_tier, update_s, power_is_instant = "meter", "nvml_energy_counter", "none", 0.011, True

    def open(self):
        pass

    def close(self):
        pass

    def read_energy_j(self):
        import time

        return 200 * (time.perf_counter() // 0.01 * 0.01)

    def read_power_w(self):
        return 200.0

    def read_conditions(self):
        return None


def test_energy_per_call_is_power_times_the_sustained_time():
    stage = Stage("cpu", power=PowerSampler(Meter()))
    act = stage.act("x", lambda _: time.sleep(0.002), [None])
    stage.sustained([act], 1.0)
    assert act.figures["power_w"] == pytest.approx(200, rel=0.1)
    assert act.figures["energy_j"] == pytest.approx(act.figures["power_w"] * act.figures["sustained_s"])
    assert act.figures["sustained_s"] == pytest.approx(0.002, rel=0.8)


def test_steady_windows_are_for_ours_and_the_fastest():
    acts = [Act(name, lambda: None, 1, False) for name in ("eager", "padded", "merged", "jit", "own_unmerged")]
    for act, seconds in zip(acts, (2.0, 0.5, 0.5, 1.0, 0.7), strict=True):
        act.figures["burst_s"] = seconds
    assert [one.name for one in _steady(acts, 1)] == ["merged", "jit", "own_unmerged"]
    assert [one.name for one in _steady(acts, 1, unmerged=False)] == ["merged", "jit"]
    assert _steady(acts, None) == acts
    assert _steady(acts, None, unmerged=False) == acts[:-1]


def test_bytes_of_our_unmerged_kernels_are_counted_though_they_get_no_steady_window(monkeypatch):
    monkeypatch.setattr(Stage, "sustained", lambda self, acts, *_: [one.figures.update(sustained_s=1) for one in acts])
    stage = Stage("cpu", counters=Source([0]))
    acts = [stage.act(name, lambda _: None, [None]) for name in ("jit", "merged", "own_unmerged")]
    _, spent = _perform(stage, acts, replace(QUICK, rounds=2, sustain_s=1.0, sustain_best=1, steady_unmerged=False))
    assert set(spent) == {"bursts", "sustained", "counted"}
    assert [one.name for one in acts if "sustained_s" in one.figures] == ["jit", "merged"]
    assert acts[2].missing["energy_j"] == "for the fastest alone was time"
    assert all("dram_read_bytes" in one.figures for one in acts)


def test_bytes_of_cudnn_are_counted_however_slow_it_is_and_of_no_other_rival_that_is(monkeypatch):
    monkeypatch.setattr(Stage, "_timed", lambda self, act: {"jit": 1.0, "merged": 0.5}.get(act.name, 2.0))
    stage = Stage("cpu", counters=Source([0]))
    acts = [stage.act(name, lambda _: None, [None]) for name in ("eager", "fused", "jit", "merged")]
    _perform(stage, acts, replace(QUICK, rounds=2, sustain_s=0.0, sustain_best=1))
    assert [one.name for one in acts if "dram_read_bytes" in one.figures] == ["eager", "jit", "merged"]
    assert acts[1].missing["dram_read_bytes"] == "for the fastest alone was time"


def test_subjects_are_chosen_ordered_and_shared():
    names = [one.name for one in command.chosen_of(BLOCKS, first="chain3d-16,bottleneck-256-64-56-b1")]
    assert names[:2] == ["chain3d-2x16-64-b8", "bottleneck-256-64-56-b1"]
    assert names[2:4] == [one.name for one in BLOCKS[:2]]
    halves = [[one.name for one in command.chosen_of(BLOCKS, only="chain", share=f"{n}/2")] for n in (1, 2)]
    assert sorted(itertools.chain(*halves)) == sorted(one.name for one in BLOCKS if "chain" in one.name)
    for wrong in ({"first": "no-such"}, {"share": "3/2"}, {"share": "0/1"}, {"share": "half"}):
        with pytest.raises(ConfigurationError, match=r"no-such|3/2|0/1|half"):
            command.chosen_of(BLOCKS, **wrong)


def test_kernels_are_built_before_the_gpu_is_held(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JOULEMARK_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(trials, "_MOST", 2)
    arguments = ["--out", "x.json", "--build", "sm_90a", "--kernels", "2", "--only", "inverted-32-32-16"]
    assert command.main("blocks", lambda _: BLOCKS, rivals.EVERY, arguments) == 0
    said = capsys.readouterr().out
    assert "inverted-32-32-16-s1-112-b64: 2 kernels" in said
    assert "2 kernels built" in said
    assert len(list((tmp_path / "kernels").glob("*.cubin"))) == 2


def test_what_is_built_is_what_a_schedule_would_try():
    names = {one.name.partition("_")[0] for one in wanted(block("chain-2x16-1024"), "bf16", 2)}
    assert names == {"chain", "stream", "memoized", "wide"}


def test_a_row_of_tiny_shapes_is_none_for_whom_shapes_matter(tmp_path):
    """It is measured over, and never in the place of a row of the real shapes."""
    path, one = tmp_path / "m.json", BLOCKS[0]
    document = Document(path, "blocks", {"gpu": "cpu"})
    document.add(block_row(one.name, tiny=True))
    assert (document.lacks(one, "bf16"), document.lacks(one, "bf16", tiny=True)) == (True, False)
    assert (measured_in(path, "bf16"), measured_in(path, "bf16", tiny=True)) == (set(), {one.name})
    document.add(block_row(one.name))
    assert (document.lacks(one, "bf16"), document.lacks(one, "bf16", tiny=True)) == (False, False)


def test_what_is_built_for_a_network_is_what_merging_would_try():
    kernels = wanted_by_merge(block("inverted-16-96-16"), "bf16")
    families = Counter(
        (one.name.partition("_2d_")[0], "_wg_" in one.name) for one in kernels
    )  # of warps, of warpgroups
    assert all(2 <= count <= trials._MOST for count in families.values())
    whole = "inverted_residual"
    assert set(families) == {(whole, False), (whole, True), ("expand_depthwise", False)}


def test_turns_change_who_begins():
    order: list[str] = []
    stage = Stage("cpu")
    acts = [Act(name, lambda name=name: order.append(name), 1, False) for name in "abc"]
    stage.bursts(stage.standing(acts), 3)
    assert order == ["a", "b", "c", "a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_bursts_end_with_a_turn_when_time_is_up_but_have_an_interval():
    """However late it is, everyone has as many, and the median an interval."""
    stage = Stage("cpu")
    acts = [stage.act(name, lambda _: None, [None]) for name in ("merged", "eager")]
    assert stage.bursts(acts, 20, ends_s=time.perf_counter() - 1.0) == 6
    assert all(len(act.figures["burst_interval_s"]) == 2 for act in acts)
    assert stage.bursts(acts, 4, ends_s=time.perf_counter() - 1.0) == 4
    assert stage.bursts(acts, 9, ends_s=time.perf_counter() + 60.0) == 9
    slow = [stage.act("slow", lambda _: time.sleep(0.02), [None]), *acts]
    begin = time.perf_counter()
    assert 6 <= stage.bursts(slow, 1000, ends_s=begin + 0.4) <= 20


def test_the_gain_is_over_the_best_rival():
    figures = {"merged": {"burst_s": 1.0}, "a": {"burst_s": 3.0}, "b": {"burst_s": 2.0}, "c": {}}
    assert over_best(figures, "merged", ["a", "b", "c"], "burst_s") == 2.0
    assert over_best(figures, "merged", ["c"], "burst_s") is None


def test_the_gain_over_wholes_without_merging_is_of_what_merge_itself_timed():
    times = {"graph": 2.0, "folded graph": 9.0, "folded compiled graph": 3.0, "compiled graph": 1.0}
    merged = {"burst_s": 2.0, "device_times": times, "captured": "compiled graph"}
    gains = gains_of({"merged": merged, "compile": {"burst_s": 5.0}})
    assert (gains["burst"], gains["over_unmerged_variants"], gains["missing"]) == (2.5, 1.5, {})
    assert gains_of({"merged": {**merged, "device_times": {"fused graph": 4.0}}})["over_unmerged_variants"] == 2.0
    assert replayed_over_burst({"merged": merged}) == 0.5
    for lacking, why in (
        ({"burst_s": None}, "no time of bursts"),
        ({"device_times": {"graph": 2.0}}, "timed no graph"),
    ):
        gains = gains_of({"merged": {**merged, **lacking}})
        assert gains["over_unmerged_variants"] is None
        assert why in gains["missing"]["over_unmerged_variants"]


def moved(dram, l2=None):
    return {"burst_s": 1.0, "dram_read_bytes": 0.75 * dram, "dram_write_bytes": 0.25 * dram, "l2_bytes": l2}


@pytest.mark.parametrize(
    ("mine", "theirs", "gain"),
    [
        (moved(2e6), moved(4e6, 100e6), 2.0),
        (moved(2e6), moved(4e6), 2.0),  # nothing is known of the L2
        (moved(0.5e3), moved(0.3e6, 120e6), None),
        (moved(0.5e3), moved(8.4e6, 120e6), 7.0),  # merged's bytes are nearly none: a ratio would be any number
        (moved(0.0), moved(8.4e6, 120e6), 7.0),
        (moved(0.0), moved(8e6), None),
    ],
)
def test_a_gain_in_dram_bytes_needs_bytes(mine, theirs, gain):
    gains = gains_of({"merged": mine, "compile": theirs, "eager": moved(9e9, 9e9), "padded": moved(1.0, 1.0)})
    assert gains["dram_bytes"] == (None if gain is None else pytest.approx(gain))
    assert ("dram_bytes" in gains["missing"]) == (gain is None)
    if gain is None:
        told = "merged 0.0005; compile moves 120 MB through the L2" if theirs["l2_bytes"] else "DRAM, merged 0"
        assert gains["missing"]["dram_bytes"].endswith(told)


def test_gains_of_a_file_are_counted_anew_and_what_lies_in_the_l2_is_told():
    old = {
        "subject": "unet-b1",
        "rivals": {"merged": moved(5e3), "compile": moved(4e5, 2e8)},
        "gains": {"dram_bytes": 80},
    }
    document = with_gains({"gpu": "G", "failed": {}, "rows": [old]})
    assert document["rows"][0]["gains"]["dram_bytes"] is None
    assert any(one.endswith("where the rival moves less there is no gain: unet-b1.") for one in remarks(document))
    assert not any("DRAM" in one for one in remarks({"gpu": "G", "failed": {}, "rows": [{**old, "gains": {}}]}))


def conv(channels, **more):
    return Conv(channels, channels, (3, 3), (1, 1), (1, 1), (1, 1), activation="relu", **more)


def fake_document(wrong=1.0):
    """Measured times that are the model's own with known shares, but for one candidate."""
    true = replace(RATES, reached={"library/dense": (0.5, 0.6), "chain": (0.4, 0.7)})
    rows = []
    for number, (channels, edge) in enumerate(((16, 128), (32, 64), (64, 64), (16, 256), (48, 96))):
        found = []
        for layers in (1, 2):
            sequence = Sequence((conv(channels),) * layers)
            options = [Candidate("unmerged", "library/dense")] if layers == 1 else []
            options += [Candidate("padded", "chain", (16, width), 40_000, 256) for width in (16, 64)]
            for one in options:
                time_s = predict(sequence, (edge, edge), 8, "bf16", one, true, cold=False).time_s
                found.append(
                    {
                        "layers": [vars(layer) for layer in sequence.layers],
                        "size": [edge, edge],
                        "batch": 8,
                        "form": "bf16",
                        "candidate": {**vars(one), "edge": None if one.edge is None else list(one.edge)},
                        "path": str(one),
                        "predicted_s": None,
                        "measured_s": time_s * (wrong if one.family == "chain" and layers == 2 and number == 0 else 1),
                        "problem": None,
                    }
                )
        rows.append({"subject": f"s{number}", "rivals": {"padded": {"candidates": found}, "eager": {}}})
    return {"rates": RATES.to_json(), "rows": rows}


def test_a_model_that_is_right_is_found_right():
    verdict = judge(fake_document())
    assert verdict["good_choices"] == 1
    assert all(one["spread"] < 1.15 for one in verdict["errors"].values())
    assert {one["best_how"] for one in verdict["choices"]} <= {"padded", "unmerged"}
    assert len(measured_of(fake_document())) == 5 * 5


def test_a_model_that_is_wrong_is_found_wrong():
    verdict = judge(fake_document(wrong=30.0))
    assert verdict["good_choices"] < 1
    assert max(one["cost"] for one in verdict["choices"]) > 2


def test_without_rates_or_candidates_there_is_no_verdict():
    assert judge({"rates": None, "rows": []}) is None
    assert judge({"rates": RATES.to_json(), "rows": []}) is None
    assert judge({**fake_document(), "rates": {**RATES.to_json(), "l2_bytes_per_s": -2.2e12}}) is None


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rounds", "0"],
        ["--turns", "-1"],
        ["--kernels", "x"],
        ["--limit", "nan"],
        ["--rival-limit", "inf"],
        ["--rivals", ""],
        ["--only", "nothing of that name"],
    ],
    ids=lambda one: one[0],
)
def test_the_command_refuses_what_would_measure_nothing(tmp_path, capsys, wrong):
    path = tmp_path / "blocks.json"
    try:
        code = command.main("blocks", lambda _: BLOCKS, rivals.EVERY, ["--out", str(path), "--device", "cpu", *wrong])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "error: " in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("text", ["", '{"rows": ', "[]", '{"schema": 1}'], ids=["empty", "half", "list", "no rows"])
def test_a_file_that_holds_no_rows_is_refused_and_stays(tmp_path, capsys, text):
    path = tmp_path / "blocks.json"
    path.write_text(text)
    arguments = ["--out", str(path), "--device", "cpu", "--tiny", "--limit", "5"]
    assert command.main("blocks", lambda _: BLOCKS, rivals.EVERY, arguments) == 2
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == text


def test_an_out_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "blocks.json"):
        arguments = ["--out", str(path), "--device", "cpu", "--tiny", "--limit", "5"]
        assert command.main("blocks", lambda _: BLOCKS, rivals.EVERY, arguments) == 2
        assert "cannot be written" in capsys.readouterr().err


def test_an_interrupt_ends_the_command_in_words(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure_all", interrupted)
    arguments = ["--out", str(tmp_path / "blocks.json"), "--device", "cpu", "--tiny", "--limit", "5"]
    assert command.main("blocks", lambda _: BLOCKS, rivals.EVERY, arguments) == 130
    assert "rows that are done are kept" in capsys.readouterr().err


@pytest.mark.parametrize(("told", "code"), [("--rounds 7 --limit 12\n", 0), ("", 3)], ids=["goes on", "ends"])
def test_a_command_that_waits_is_ready_before_it_is_told_the_rest(tmp_path, monkeypatch, told, code):
    built, ran = [], []

    def failing(name):
        built.append(name)
        raise RuntimeError("what its row will tell")

    subjects = [replace(one, build=partial(failing, one.name)) for one in BLOCKS[:2]]
    out = tmp_path / "blocks.json"
    out.write_text(json.dumps({"rows": [block_row(subjects[0].name)]}))
    monkeypatch.setattr("sys.stdin", io.StringIO(told))
    monkeypatch.setattr(command, "_run", lambda kind, chosen, args: ran.append((kind, chosen, args)) or 0)
    arguments = ["--out", str(out), "--device", "cpu", "--tiny", "--dtype", "bf16", "--limit", "5", "--wait"]
    assert command.main("blocks", lambda _: subjects, rivals.EVERY, arguments) == code
    assert built == [subjects[1].name]  # the first that the file lacks
    assert [(args.rounds, args.limit) for _, _, args in ran] == ([(7, 12.0)] if told else [])


def test_the_command_refuses_an_unknown_rival(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "x.json"), "--rivals", "eagre", "--device", "cpu"]
    assert command.main("blocks", lambda _: BLOCKS, rivals.EVERY, arguments) == 2
    assert "no rival is called 'eagre'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "more"),
    [("bench_merged_micro", ["--only", "chain-2x16"]), ("bench_merged", ["--network", "unet", "--batches", "2"])],
)
def test_the_scripts_measure_on_a_cpu(script, more, tmp_path, capsys):
    module = runpy.run_path(str(ROOT / "bench_inference" / f"{script}.py"))
    out = tmp_path / "out.json"
    arguments = ["--out", str(out), "--device", "cpu", "--tiny", "--dtype", "fp32", "--rivals", "eager,merged",
                 "--rounds", "1", "--sustain", "0.01", *more]  # fmt: skip
    assert module["main"](arguments) == 0
    content = json.loads(out.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(content)
    assert len(content["rows"]) == 1
    said = capsys.readouterr().out
    assert "merged" in said
    name = content["rows"][0]["subject"]
    test = "Only a test of the command, tiny shapes on a CPU: no figure is of use and no bar asked for"
    assert f"{test}: {name}.\n" in said
    assert runpy.run_path(str(ROOT / "bench_inference" / "bench_merged.py"))["main"](["table", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"- {test}: {name}.\n" in said
    assert f"- Rivals that were not asked for: fused, jit, compile, xla, tensorrt of {name}.\n" in said
    assert not [word for word in ("GPU", "is asked for", "BrickDL", "reached", "missed", "0 of 0") if word in said]


def network_row(name, merged, batch=32, dram=None, **rival):
    timed = {
        key: {"burst_s": value, "build_s": 9.0, "missing": {}} for key, value in {"merged": merged, **rival}.items()
    }
    for key, value in (dram or {}).items():
        timed[key] |= {"dram_read_bytes": value, "dram_write_bytes": 0}
    row = {"subject": f"{name}-b{batch}", "group": name, "shape": [batch, 3, 8, 8], "dtype": "bf16", "took_s": 1.0}
    return {**row, "calls_per_round": 2, "rivals": timed, "gains": gains_of(timed), "floors": None}


def network_document(*rows, **more):
    facts = {"schema": "joulemark.merged/1", "kind": "networks", "gpu": "NVIDIA H200", "gpu_uuid": "GPU-1"}
    software = {"driver": "580", "software": {"torch": "2"}, "rates": None, "model": None, "failed": {}}
    return {**facts, **software, "rows": list(rows), **more}


def test_what_sequences_gain_is_measured_beside_every_layer_alone():
    options = replace(QUICK, names=("eager", "merged", "layerwise"))
    row = measure_subject(block("bottleneck"), Stage("cpu"), options)
    both = [row["rivals"][name] for name in ("merged", "layerwise")]
    assert [one["merged_layers"] for one in both] == [0, 0], "no kernels of ours run on a CPU"
    assert all(one["merge_s"] > 0 for one in both)
    assert row["gains"]["over_layerwise"] == pytest.approx(both[1]["burst_s"] / both[0]["burst_s"])
    assert row["gains"]["best_rival"] == "eager"


def test_where_merging_every_layer_alone_failed_no_gain_of_sequences_is_told(monkeypatch):
    merge = rivals.merge

    def scarce(model, x, budget_s, depth=DEPTH):
        made = merge(model, x, budget_s=budget_s, depth=depth)
        made.failed = "merging it failed: OutOfMemoryError: CUDA out of memory" if depth == 1 else None
        return made

    monkeypatch.setattr(rivals, "merge", scarce)
    row = measure_subject(block("chain-2x16"), Stage("cpu"), replace(QUICK, names=("merged", "layerwise")))
    assert row["rivals"]["layerwise"]["missing"]["all"].startswith("merging it failed: OutOfMemoryError")
    assert row["gains"]["over_layerwise"] is None


def test_the_table_of_sequences_is_of_rows_measured_both_ways_and_there_without_any_no_table():
    from joulemark.merged_bench.sequences import sequences_table

    rows = [network_row("unet", 1e-3, layerwise=1.5e-3), network_row("vgg16", 1e-3, layerwise=6e-3)]
    rows[0]["rivals"]["merged"] |= {"merged_ranges": 4, "merged_layers": 9}
    table = sequences_table(network_document(network_row("drn_26", 1e-3, eager=2e-3), *rows))
    assert table.rows == (
        ("unet-b32", "4", "9", "1.5 ms", "1 ms", "1.50 ×"),
        ("vgg16-b32", "–", "–", "6 ms", "1 ms", "6.00 ×"),
        ("geometric mean, batch 32, of 2", "", "", "", "", "3.00 ×"),
    )
    assert len(set(table.columns)) == len(table.columns) == len(table.rows[0])
    assert sequences_table(network_document(network_row("drn_26", 1e-3, eager=2e-3))) is None


def test_a_row_without_time_for_every_layer_alone_is_whole(monkeypatch):
    monkeypatch.setitem(rivals.RIVALS, "layerwise", lambda task: time.sleep(60.0))
    options = replace(QUICK, names=("eager", "merged", "layerwise"), sustain_best=0, steady_unmerged=False)
    ends_s = time.perf_counter() + options.measuring_s + 3.0
    row = measure_subject(block("chain-2x16"), Stage("cpu"), replace(options, ends_s=ends_s))
    assert "burst_s" not in row["rivals"]["layerwise"]
    assert row["gains"]["burst"] > 0
    assert not row["cut"]


def test_the_published_table_stands_beside_ours(tmp_path, capsys):
    from joulemark.merged_bench.published import BRICKDL, beside_brickdl

    first = network_row("resnet50", 1.0, eager=2.0, jit=1.25, dram={"merged": 8, "eager": 10})
    document = network_document(network_row("vgg16", 2.0, eager=4.0), first, network_row("unet", 1.0))
    one, two = beside_brickdl(document)
    assert (one["brickdl"], one["cudnn"], one["torchscript"], one["xla"]) == (0.85, 0.5, 0.8, None)
    assert two["cudnn"] == 0.5
    (tmp_path / "merged.json").write_text(json.dumps(document))
    script = runpy.run_path(str(ROOT / "bench_inference" / "bench_merged.py"))
    assert script["main"](["table", str(tmp_path / "merged.json")]) == 0
    said = capsys.readouterr().out
    assert "| resnet50-b32 | 0.850 | 0.500 | 0.800 | – | – | 0.800 |" in said
    assert "| geometric mean, batch 32, of 2 | 0.891 | 0.500 | 0.800 (1) | – | – | 0.800 (1) |" in said
    assert "| BrickDL's, over its seven | 0.88" in said
    mean = 1.0
    for value in BRICKDL.values():
        mean *= value ** (-1 / len(BRICKDL))
    assert mean == pytest.approx(1.137, abs=0.005), "the published geometric mean"


def test_means_beside_the_published_ones_are_of_one_batch_each():
    from joulemark.merged_bench.published import brickdl_table

    rows = [network_row("resnet50", 1.0, 32, eager=2.0), network_row("resnet50", 1.0, 128, eager=4.0)]
    rows += [network_row("vgg16", 1.0, 32, eager=8.0), network_row("vgg16", 1.0, 1, eager=1.0) | {"tiny": True}]
    table = brickdl_table(network_document(*rows))
    means = {row[0]: row[1:3] for row in table.rows if row[0].startswith("geometric mean")}
    assert means == {
        "geometric mean, batch 32, of 2": (f"{(0.85 * 0.933) ** 0.5:.3f}", "0.250"),
        "geometric mean, batch 128, of 1": ("0.850", "0.250"),
    }


def test_tables_say_which_rivals_were_not_asked_for_in_rows_of_either_age():
    from joulemark.merged_bench.blocks import gains_table as of_blocks
    from joulemark.merged_bench.networks import gains_table

    every = dict.fromkeys(rivals.USERS, 2.0)
    rows = [network_row(name, 1.0, **every) for name in ("unet", "vgg16", "drn_26")]
    del rows[0]["rivals"]["xla"]
    rows[1]["rivals"]["xla"] = {"missing": {"all": rivals.NOT_ASKED}}
    rows[2]["rivals"]["xla"] = {"missing": {"all": "JAX is not installed"}}
    for table in (gains_table, of_blocks):
        told = [one for one in table(network_document(*rows)).notes if "asked for:" in one]
        assert told == ["Rivals that were not asked for: xla of unet-b32, vgg16-b32."]
    rows[0]["rivals"]["compile"] = {"missing": {"all": rivals.NOT_ASKED}}
    assert not any("tunes" in one for one in gains_table(network_document(rows[0])).notes)


def test_tiny_shapes_on_a_gpu_are_a_test_and_stand_beside_rows_that_are_judged():
    from joulemark.merged_bench.blocks import gains_table as of_blocks
    from joulemark.merged_bench.networks import gains_table

    tiny, whole = network_row("unet", 1.0, eager=3.0) | {"tiny": True}, network_row("vgg16", 1.0, eager=2.0)
    document = network_document(*(one | {"group": "chain-16"} for one in (tiny, whole)))
    said = "Only a test of the command, tiny shapes: no figure is of use and no bar asked for: unet-b32."
    networks, blocks = gains_table(document), of_blocks(document)
    told = {row[0]: row[-1] for row in networks.rows if "-b" in row[0]}
    assert told == {"unet-b32": "–", "vgg16-b32": "0.98×: reached"}
    assert said in networks.notes
    assert said in blocks.notes
    assert networks.rows[-1][:5] == ("geometric mean, batch 32, of 1", "", "", "", "2.00 ×")
    assert any(one.startswith("chain-16 (1 blocks), ") and "burst 2.00×" in one for one in blocks.notes)


def test_the_table_of_gains_says_what_was_asked_for_and_what_was_reached():
    from joulemark.merged_bench.networks import gains_table

    rows = [
        network_row("mobilenet_v2", 1.0, eager=2.0, compile=1.5),
        network_row("unet", 1.0, eager=0.99),
        network_row("vgg16", 1.0, 1, eager=0.5),
        network_row("drn_26", None),
    ]
    table = gains_table(network_document(*rows, failed={"deepcam-b128": "out of memory"}))
    cells = {row[0]: row for row in table.rows}
    assert cells["mobilenet_v2-b32"][2:5] == ("compile", "1.5 s", "1.50 ×")
    assert cells["mobilenet_v2-b32"][-1] == "1.7×: missed by 0.2"
    assert cells["unet-b32"][-1] == "0.98×: reached"
    assert cells["vgg16-b1"][-1] == "0.98×: missed by 0.48"
    assert cells["drn_26-b32"][-1] == "0.98×: not measured"
    assert cells["geometric mean, batch 1, of 1"][4:] == ("0.50 ×", "–", "–", "", "–", "–", "")
    assert cells["geometric mean, batch 32, of 3"][4] == "1.22 × (2)"
    assert cells["geometric mean, batch 32, of 3"][-1] == "1.25× over 11: 3 are there"
    assert not any("over unmerged" in note for note in table.notes)
    assert "deepcam-b128: out of memory" in table.notes
    assert not any("time was up" in note for note in table.notes)
    cut = gains_table(network_document({**rows[1], "cut": True}))
    assert "unet-b32: time was up before all rivals were built." in cut.notes


def test_every_column_of_the_tables_of_merged_execution_says_what_it_is_of_and_figures_have_prefixes():
    from joulemark.merged_bench import blocks, networks

    row = network_row("unet", 51.6e-3, compile=61.5e-3)
    row["rivals"]["merged"] |= {"energy_j": 32 * 1.14, "merge_s": 38.7, "merge_cached_s": 2.76, "peak_bytes": 2**30}
    row["floors"] = {"layers_s": 25.8e-3}
    document = network_document(row)
    gains, costs = networks.gains_table(document), networks.costs_table(document)
    for table in (gains, costs, blocks.gains_table(document)):
        assert len(set(table.columns)) == len(table.columns)
        assert not {"gain", "its time", "merge"} & set(table.columns)
        assert not any("e+" in cell for one in table.rows for cell in one)
    assert gains.rows[0][gains.columns.index("energy/sample")] == "1.14 J"
    assert costs.rows == (("unet-b32", "38.7 s", "2.76 s", "9 s", "1 GiB", "50%"),)
    assert networks.gains_table(document | {"rows": []}).notes[0] == "No network was measured yet."


@pytest.mark.parametrize(("least", "said"), [(1.25, "reached"), (1.2496, "missed by 0.0004")])
def test_the_mean_over_all_networks_is_held_against_its_bar(least, said):
    from joulemark.merged_bench.networks import gains_table

    rows = [network_row(f"network_{n}", 1.0, eager=least) for n in range(11)]
    assert gains_table(network_document(*rows)).rows[-1][-1] == f"1.25×: {said}"


def test_the_table_of_gains_says_where_the_best_rival_was_found_without_a_tuning_compiler():
    from joulemark.merged_bench.networks import gains_table

    rows = [network_row("unet", 1.0, eager=0.99, compile=1.2), network_row("vgg16", 1.0, eager=1.5)]
    rows[1]["rivals"]["compile"] = {"missing": {"all": "it was not built within 60 s"}}
    told = [one for one in gains_table(network_document(*rows)).notes if "tunes" in one]
    assert told == ["vgg16-b32: no compiler that tunes among the rivals: it was not built within 60 s."]


def test_the_table_of_gains_says_what_a_whole_without_merging_takes_and_of_which_code_rows_are():
    from joulemark.merged_bench.networks import gains_table

    rows = [network_row("unet", 1.0, compile=3.0), network_row("vgg16", 2.0, compile=3.0)]
    rows[0]["rivals"]["merged"] |= {"device_times": {"graph": 0.9, "folded compiled graph": 1.5}, "captured": "graph"}
    rows[1]["rivals"]["merged"] |= {"device_times": {"fused graph": 5.0}, "captured": None}
    known = {"joulemark": "1.2", "commit": "0123456789", "dirty": True, "merged_code": "abcdefghij", "missing": {}}
    rows[1]["measured"] = {"at": "2026-11-30T15:00:00+00:00", **known}
    del rows[0]["gains"]["over_unmerged_variants"]  # as in older files
    table = gains_table(with_gains(network_document(*rows)))
    at = table.columns.index("gain over unmerged")
    assert [row[at] for row in table.rows] == ["1.50 ×", "2.50 ×", f"{(1.5 * 2.5) ** 0.5:.2f} ×"]
    assert any("merged itself takes 0.90 to 0.90 of its burst" in note for note in table.notes)
    assert "gain over unmerged without a compiled one, which was not built: vgg16-b32." in table.notes
    assert table.notes[-2:] == (
        "Measured at an unknown time by unknown code: unet-b32.",
        "Measured 2026-11-30 by joulemark 1.2 (commit 01234567, changed; merged abcdefgh): vgg16-b32.",
    )


def test_the_tables_of_blocks_hold_gains_beside_bars_and_schedules_side_by_side(tmp_path, capsys):
    first = network_row("chain-4x16-1024", 1e-3, eager=5e-3, compile=4e-3, padded=2e-3, rows=1.5e-3, own_unmerged=3e-3)
    second = network_row("chain-2x16-1024", 1e-3, compile=1e-3, dram={"merged": 2e6, "compile": 8e6})
    first["rivals"]["merged"]["explain"] = ["0 … 2: rows, bricks of 9×8 by stream/stream_2d (measured)", "the whole: x"]
    third = network_row("chain-2x64-56", 2e-3, eager=2e-3, padded=1e-3, rows=3e-3)
    third["rivals"]["merged"]["explain"] = [
        "the whole model: plain (measured faster)",
        *first["rivals"]["merged"]["explain"],
    ]
    third["rivals"]["merged"]["variant"] = "folded graph"
    rows = [*(one | {"group": "chain-16"} for one in (first, second)), third | {"group": "chain-64", "cut": True}]
    (tmp_path / "blocks.json").write_text(json.dumps(network_document(*rows, kind="blocks", failed={"a": "no"})))
    script = runpy.run_path(str(ROOT / "bench_inference" / "bench_merged.py"))
    assert script["main"](["table", str(tmp_path / "blocks.json")]) == 0
    said = capsys.readouterr().out
    assert "| chain-4x16-1024-b32 | 1 ms | 3 ms | compile | 4 ms | 4.00 × |" in said
    assert "| chain-2x16-1024-b32 | 1 ms | – | compile | 1 ms | 1.00 × | – | – | – | 1.91 MiB | 4.00 × |" in said
    assert "chain-16 (2 blocks), geometric means: burst 2.00×, dram_bytes 4.00× (1); 3× is asked for." in said
    assert "a: no" in said
    assert "chain-2x64-56-b32: time was up before all rivals were built." in said
    schedules = said.partition("Schedules")[2]
    assert "| chain-4x16-1024-b32 | 2 ms | – | 1.5 ms | – | 3 ms | rows | 1 ms | 0 … 2: rows by stream |" in schedules
    assert "| padded | 2 ms | nothing merged: folded graph |" in schedules
    assert "chain-2x16" not in schedules
    assert "merged takes at most 5% longer than the fastest of them in 1 of 2 blocks." in schedules


def test_files_of_several_gpus_become_one_and_others_are_refused(tmp_path, capsys):
    rows = [network_row("unet", 1.0, eager=2.0), network_row("vgg16", 1.0, eager=2.0)]
    parts = [network_document(row, gpu_uuid=f"GPU-{n}") for n, row in enumerate(rows)]
    paths = [tmp_path / f"{n}.json" for n in range(3)]
    for path, part in zip(paths, [*parts, network_document(driver="570")], strict=True):
        path.write_text(json.dumps(part))
    script = runpy.run_path(str(ROOT / "bench_inference" / "bench_merged.py"))
    out = tmp_path / "out.json"
    assert script["main"](["join", str(out), *map(str, paths[:2])]) == 0
    whole = json.loads(out.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(whole)
    assert [row["gpu_uuid"] for row in whole["rows"]] == ["GPU-0", "GPU-1"]
    assert all(row["measured"]["commit"] is None and row["measured"]["missing"]["all"] for row in whole["rows"])
    assert whole["gpu_uuid"] is None
    paths[1].write_text(json.dumps(network_document(*rows, gpu_uuid="GPU-1") | {"rows": [rows[0] | {"again": True}]}))
    for order in (paths[:2], paths[1::-1]):  # what was measured again, in whichever file
        assert script["main"](["join", str(out), *map(str, order)]) == 0
        assert "again" not in json.loads(out.read_text())["rows"][0]
    assert script["main"](["join", str(out), *map(str, paths)]) == 2
    assert "files 1 and 3 differ in driver" in capsys.readouterr().err
    paths[1].write_text(json.dumps(network_document(*rows) | {"rows": [None]}))
    assert script["main"](["join", str(out), *map(str, paths[:2])]) == 2
    assert capsys.readouterr().err.startswith(f"error: {paths[1]} is no document of merged execution")


@pytest.mark.parametrize("works", [True, False])
def test_a_compiler_that_does_not_tune_stands_in_for_one_that_was_not_built(monkeypatch, works):
    def tuned(task):
        if not works:
            raise RuntimeError("no")
        return task.model

    monkeypatch.setitem(rivals.RIVALS, "compile", tuned)
    monkeypatch.setitem(rivals.RIVALS, "compile_default", lambda task: task.model)
    options = replace(QUICK, names=("eager", "compile", "compile_default"), sustain_s=0.0)
    found = measure_subject(block("chain-2x16"), Stage("cpu"), options)["rivals"]
    assert ("burst_s" in found["compile_default"]) is not works
    assert ("burst_s" in found["compile"]) is works
    if works:
        assert found["compile_default"]["missing"]["all"] == "compile was built, the same compiler with tuning"


def test_a_rival_that_takes_too_long_costs_itself_alone(monkeypatch):
    def stubborn(task):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    monkeypatch.setitem(rivals.RIVALS, "compile", stubborn)
    # Nothing that imports for the first time: what the signal interrupts there is half there for all tests after it.
    options = replace(QUICK, names=("compile", "eager"), rival_s=0.3)
    row = measure_subject(block("residual"), Stage("cpu"), options)
    assert row["rivals"]["compile"] == {"missing": {"all": "it was not built within 0.3 s"}}
    assert row["gains"]["best_rival"] == "eager"


def test_a_row_that_time_cuts_short_is_written_and_measured_again_where_there_is_more(tmp_path, monkeypatch):
    """A rival overruns the time of the run: those before it have their figures, those behind it none."""

    def endless(task):
        time.sleep(60.0)

    monkeypatch.setitem(rivals.RIVALS, "compile", endless)
    options = replace(QUICK, names=("merged", "eager", "compile", "jit"), sustain_best=0, steady_unmerged=False)
    subject, document = block("residual"), Document(tmp_path / "m.json", "blocks", {"gpu": "cpu", "gpu_uuid": None})
    measure_subject(subject, Stage("cpu"), replace(options, names=("merged",)))  # what is imported at first use
    short = replace(options, ends_s=time.perf_counter() + options.measuring_s + 1.0)
    assert not measure_all([subject], document, Stage("cpu"), short, lambda _: None)
    (row,) = document.content["rows"]
    jsonschema.Draft202012Validator({**SCHEMA, **SCHEMA["$defs"]["row"]}).validate(row)
    assert row["cut"]
    assert row["gains"]["burst"] > 0
    assert row["rivals"]["compile"]["missing"]["all"].startswith("it was not built within")
    assert row["rivals"]["jit"]["missing"]["all"].startswith("no time left after")
    assert document.lacks(subject, "fp32", tiny=True)
    monkeypatch.setitem(rivals.RIVALS, "compile", rivals.RIVALS["eager"])
    assert measure_all([subject], document, Stage("cpu"), options, lambda _: None)
    (row,) = document.content["rows"]
    assert not row["cut"]
    assert all(row["rivals"][name]["burst_s"] > 0 for name in options.names)
    assert not document.lacks(subject, "fp32", tiny=True)


def test_a_rival_that_fails_in_its_rounds_costs_itself_alone(monkeypatch):
    class Late(torch.nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.relu(x)

    monkeypatch.setitem(rivals.RIVALS, "jit", lambda task: Late())
    row = measure_subject(block("residual"), Stage("cpu"), replace(QUICK, names=("eager", "jit", "merged")))
    assert row["rivals"]["jit"] == {"missing": {"all": "out of memory: CUDA out of memory"}}
    assert row["rivals"]["merged"]["burst_s"] > 0


def test_what_ends_the_process_twice_is_left_out_the_third_time(tmp_path, monkeypatch):
    """The process dies while a rival is built; the file knows, though no row was written."""
    path, facts = tmp_path / "m.json", {"gpu": "cpu", "gpu_uuid": None, "driver": None, "software": {}}

    def deadly(task):
        raise KeyboardInterrupt

    monkeypatch.setitem(rivals.RIVALS, "jit", deadly)
    options = replace(QUICK, names=("eager", "jit", "merged"))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measure_all([block("residual")], Document(path, "blocks", facts), Stage("cpu"), options, lambda _: None)
    document = Document(path, "blocks", facts)
    assert measure_all([block("residual")], document, Stage("cpu"), options, lambda _: None)
    content = json.loads(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(content)
    found = content["rows"][0]["rivals"]
    assert found["jit"] == {"missing": {"all": "2 times its process ended while it was built"}}
    assert found["merged"]["burst_s"] > 0
    assert content["failed"] == {}


def test_a_rival_that_leaves_cuda_unusable_in_its_rounds_is_left_out_the_next_time(tmp_path, monkeypatch):
    path, facts = tmp_path / "m.json", {"gpu": "cpu", "gpu_uuid": None, "driver": None, "software": {}}

    def astray(task):
        calls = itertools.count()

        def call(x):
            if next(calls) > 1:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return task.model(x)

        return call

    monkeypatch.setitem(rivals.RIVALS, "jit", astray)
    options = replace(QUICK, names=("eager", "jit", "merged"))
    given = ([block("residual")], Stage("cpu"), options, lambda _: None)
    with pytest.raises(Poisoned, match="jit left CUDA unusable: CUDA error: an illegal memory access"):
        measure_all(given[0], Document(path, "blocks", facts), *given[1:])
    document = Document(path, "blocks", facts | {"gpu_uuid": "GPU-of-the-next-machine"})
    assert measure_all(given[0], document, *given[1:])
    content = json.loads(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(content)
    (row,) = content["rows"]
    assert "illegal memory access" in row["rivals"]["jit"]["missing"]["all"]
    assert row["rivals"]["merged"]["burst_s"] > 0
    assert row["gpu_uuid"] == "GPU-of-the-next-machine"
    assert set(row["spent_s"]) == {"built", "bursts", "sustained", "counted"}
    assert sum(row["spent_s"].values()) <= row["took_s"]
    assert row["bursts"] == options.rounds
    assert content["failed"] == {}


def test_a_process_that_is_asked_to_end_while_it_builds_counts_no_attempt(tmp_path, monkeypatch):
    monkeypatch.setitem(rivals.RIVALS, "jit", lambda task: os.kill(os.getpid(), signal.SIGTERM))
    out, before = tmp_path / "m.json", signal.getsignal(signal.SIGTERM)
    arguments = ["--out", str(out), "--device", "cpu", "--tiny", "--dtype", "fp32", "--rivals", "jit"]
    with pytest.raises(SystemExit) as ended:
        command.main("blocks", lambda _: [block("residual")], rivals.EVERY, arguments)
    assert ended.value.code == 3
    assert signal.getsignal(signal.SIGTERM) is before
    content = json.loads(out.read_text())
    assert (content["rows"], content["failed"]) == ([], {})


def test_a_process_that_ends_in_the_rounds_is_no_attempt_of_the_last_rival(tmp_path, monkeypatch):
    path, facts = tmp_path / "m.json", {"gpu": "cpu", "gpu_uuid": None, "driver": None, "software": {}}

    def deadly(self, acts, rounds, ends_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "bursts", deadly)
    options = replace(QUICK, names=("eager",))
    with pytest.raises(KeyboardInterrupt):
        measure_all([block("residual")], Document(path, "blocks", facts), Stage("cpu"), options, lambda _: None)
    assert json.loads(path.read_text())["failed"] == {}


def test_a_subject_without_memory_is_kept_with_its_reason_and_the_next_one_follows(tmp_path):
    def large():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    subjects = [Subject("large", "none", large, (1,), (1, 1, 2, 2)), block("residual")]
    document = Document(tmp_path / "m.json", "blocks", {"gpu": "cpu"})
    assert measure_all(subjects, document, Stage("cpu"), replace(QUICK, names=("eager",)), lambda _: None)
    assert document.content["failed"] == {"large": "out of memory: CUDA out of memory. Tried to allocate 1 TiB"}
    assert len(document.content["rows"]) == 1


def test_a_network_is_built_once_for_all_batch_sizes():
    first, second = network("mobilenet_v2", 1).build(), network("mobilenet_v2", 32).build()
    assert first is second


def test_floors_or_reason_a_chain_by_hand():
    from joulemark.merged_bench.floors import floors_or_reason

    subject = block("chain-2x16")
    x = torch.randn(2, 16, 64, 64)
    model = subject.build().eval()
    floors = floors_or_reason(model, x, RATES)
    flops = 2 * 2 * 64 * 64 * 2 * 9 * 16 * 16
    weights = 2 * (9 * 16 * 16 + 16) * 4
    assert floors["flops_s"] == pytest.approx(flops / 1e15)
    assert floors["ends_s"] == pytest.approx((2 * x.nbytes + weights) / 1e9)
    # The L2 of these rates holds nothing: every tensor goes through DRAM.
    assert floors["layers_s"] == pytest.approx((4 * x.nbytes + 2 * 9 * 16 * 16 * 4) / 1e9)
    assert floors_or_reason(model.double(), x.double(), RATES) == "no rates for numbers of torch.float64"
    assert floors_or_reason(model, x, None) == "no rates of this device are known"


def test_a_floor_or_a_cached_figure_that_is_not_known_has_its_reason_in_the_row_and_under_the_table():
    from joulemark.merged_bench.floors import floors_or_reason
    from joulemark.merged_bench.networks import costs_table

    class TooLarge(torch.nn.Module):
        def forward(self, x):
            if not isinstance(x, torch.fx.Proxy):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 13.50 GiB.")
            return x + 1

    why = floors_or_reason(TooLarge(), torch.zeros(1, 3, 8, 8), RATES)
    assert why.startswith("OutOfMemoryError: CUDA out of memory")
    measured = measure_subject(block("bottleneck"), Stage("cpu"), replace(QUICK, names=("eager", "merged")))
    assert measured["floors"] is None
    assert measured["floors_missing"] == "no rates of this device are known"
    known = network_row("unet", 1.0, eager=1.2) | {"floors": {"layers_s": 0.5}}
    rows = [network_row(one, 1.0, eager=1.2) for one in ("vgg16", "deepcam", "drn_26")]
    rows[0]["floors_missing"] = rows[1]["floors_missing"] = why
    told = [one for one in costs_table(network_document(known, *rows)).notes if one.startswith("No layers' floor")]
    assert told == [
        f"No layers' floor of deepcam-b32, vgg16-b32: {why}",
        "No layers' floor of drn_26-b32: no reason was kept.",
    ]
    rows[0]["rivals"]["merged"] |= {"merge_s": 99.0, "merge_cached_s": None, "merge_cached_missing": "no time"}
    rows[1]["rivals"]["merged"] |= {"merge_s": 9.0, "merge_cached_s": None}
    known["rivals"]["merged"] |= {"merge_s": 9.0, "merge_cached_s": 1.0}
    told = [one for one in costs_table(network_document(known, *rows)).notes if one.startswith("No cached figure")]
    assert told == [
        "No cached figure of deepcam-b32: no reason was kept.",
        "No cached figure of vgg16-b32: no time.",
    ]


def test_a_floor_leaves_the_device_alone_for_merging_is_timed_behind_it(monkeypatch):
    from joulemark.merged_bench.floors import floors_or_reason

    convolve, on, model = torch.nn.Conv2d._conv_forward, set(), torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1)).eval()

    def watched(module, x, *weights):
        on.add(x.device.type)
        return convolve(module, x, *weights)

    monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", watched)
    assert floors_or_reason(model, torch.zeros(1, 3, 8, 8), RATES)["layers_s"] > 0
    assert on <= {"meta"}
    assert {one.device.type for one in model.parameters()} == {"cpu"}


def test_a_floor_counts_linear_layers_over_the_positions_of_an_image():
    from joulemark.merged_bench.floors import floors_or_reason

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.spatial, self.mix = torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Linear(16, 64)

        def forward(self, x):
            return self.mix(self.spatial(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    floors = floors_or_reason(Mixed().eval(), torch.randn(2, 16, 8, 8), RATES)
    assert floors["flops_s"] == pytest.approx(2 * 2 * 8 * 8 * (9 * 16 * 16 + 16 * 64) / 1e15)


def test_gains_of_a_group_are_geometric_means():
    nothing = {"sustained": None, "energy": None, "dram_bytes": None}
    rows = [{"group": "a", "gains": {"burst": gain, **nothing}} for gain in (2.0, 8.0)]
    assert group_gains(rows) == {"a": {"rows": 2.0, "burst": pytest.approx(4.0)}}
