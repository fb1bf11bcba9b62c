"""Bursts of several cases in turns, and the benchmark that measures them."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from joulemark.collect.timing import SteadySamples
from joulemark.errors import Unsupported
from joulemark.measure import busy_turns
from joulemark.measure.issue_turns import FEWEST_STEPS, WARM_S, IssueTurns
from joulemark.measure.plan import PROFILE
from joulemark.measure.steady import LEAD_S, unknown_clock
from joulemark.plugin.fixture import Bench
from joulemark.records import Case, KnownTables, converted
from joulemark.tandem.turns import BUSY_TABLE, TABLE
from joulemark.workloads import zoo
from joulemark.workloads.base import Step

from .test_busy_turns import Gpu

BENCH = Path(__file__).parents[2] / "bench_inference" / "bench_tandem.py"


class Bursts:
    """A timer that runs each burst's step once and says what it takes."""

    device = "cuda:0"

    def __init__(self):
        self.fences, self.warm, self.asked = 0, set(), []

    def synchronize(self):
        self.fences += 1

    def burst(self, run, warm_s=0.0):
        self.warm.add(warm_s)
        self.issue_s = run()
        return [self.issue_s, 9.0, 0.0]

    def steady(self, run, stop, step_s):
        """A device that needs twice as long as the host, and half of that until its clock has settled."""
        self.asked.append(step_s)
        lead = int(LEAD_S / step_s) if step_s > self.issue_s else 0
        samples = []
        while not samples or stop(samples) is None:
            samples.append(self.issue_s * (1 if len(samples) < lead else 2))
        assert len(samples) == lead + FEWEST_STEPS
        return SteadySamples(samples, 0.0, 1.0, "enough")


def steps(log, batches=(1, 8, 64)):
    def run(batch):
        return lambda: log.append(batch) or batch * 1e-3

    return [(Case("m", batch_size=batch), Step(run(batch))) for batch in batches]


def test_every_round_holds_each_case_once_in_an_order_of_its_own():
    log, timer = [], Bursts()
    turns = IssueTurns(timer, steps(log), lambda: 1.98e9)
    assert turns.step_s(turns.steps[0][0]) is None
    assert Counter(log) == {1: 2, 8: 2, 64: 2}  # warm
    assert timer.fences == 1
    del log[:]
    for _ in range(8):
        turns.round()
    orders = {tuple(log[at : at + 3]) for at in range(0, 24, 3)}
    assert {tuple(sorted(one)) for one in orders} == {(1, 8, 64)}
    assert len(orders) > 2
    assert [row["round"] for row in turns.rows] == [number for number in range(8) for _ in range(3)]
    assert all(row["issue_s"] == row["batch_size"] * 1e-3 for row in turns.rows)
    assert {row["case_id"] for row in turns.rows} == {case.case_id for case, _ in steps([])}
    assert all(row["step_s"] == 2 * row["issue_s"] for row in turns.rows)
    assert {row["sm_clock_hz"] for row in turns.rows} == {1.98e9}
    assert sorted(timer.asked[:3]) == [1e-3, 8e-3, 64e-3]  # a step is as long as its issue until it has been timed
    assert sorted(timer.asked[3:6]) == [2e-3, 16e-3, 128e-3]
    assert turns.step_s(turns.steps[0][0]) == 2e-3
    assert timer.warm == {WARM_S}
    converted({TABLE: turns.rows}, KnownTables)


def test_what_cannot_be_issued_ahead_is_unsupported():
    with pytest.raises(Unsupported, match="a setup runs"):
        IssueTurns(Bursts(), [(Case("m", batch_size=1), Step(lambda: None, setup=lambda: None))])
    with pytest.raises(Unsupported, match="nothing is issued ahead"):
        IssueTurns(SimpleNamespace(device="cpu"), [])


def test_rows_are_kept_where_the_benchmark_is_timed_and_nowhere_else():
    rows = [{"batch_size": 1}]
    target = SimpleNamespace(uuid=None)
    instruments = SimpleNamespace(target=target, static_power_w=None)
    bench = Bench(Case("m"), instruments, ())
    bench.keep(TABLE, rows)
    assert bench.record().tables == {TABLE: rows}
    profiling = Bench(Case("m"), instruments, (), alone=PROFILE)
    profiling.keep(TABLE, rows)
    assert profiling.measurements == []


@pytest.fixture
def module():
    spec = importlib.util.spec_from_file_location("bench_tandem", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stand_in():
    """For the fixture ``bench``; what it keeps is in ``kept``."""
    kept = {}
    return SimpleNamespace(
        device="cuda:0",
        target=SimpleNamespace(slug="nvidia-h200"),
        instruments=SimpleNamespace(timer=Bursts(), clock=unknown_clock),
        quick=True,
        pedantic=lambda run, rounds, warmup_rounds, **_: [run() for _ in range(rounds + warmup_rounds)],
        kept=kept,
        keep=kept.__setitem__,
    )


@pytest.mark.parametrize("model", ["lenet5", "bert_base"])
def test_the_benchmark_issues_the_cases_of_the_sweep(model, module, stand_in, monkeypatch):
    built = []

    def build(case, device):
        built.append(case)
        return Step(lambda: 1e-3)

    monkeypatch.setattr(zoo, "find", lambda name: SimpleNamespace(build=build))
    module.bench_issue_in_turns(stand_in, model)
    (mark,) = [one for one in module.bench_tandem.pytestmark if one.name == "bench"]
    sizes = mark.kwargs["batch_sizes"]
    assert [case.batch_size for case in built] == list(sizes.get(model, sizes["*"]))
    layout = "channels_last-" if model == "lenet5" else ""
    assert built[0].label == f"{model}-inference-bf16-eager-b1-{layout}nvidia-h200"
    assert {(case.mode, case.benchmark, case.input) for case in built} == {("eager", "bench_tandem", "device")}
    assert len(stand_in.kept[TABLE]) == 8 * len(built)
    assert {row["round"] for row in stand_in.kept[TABLE]} == set(range(1, 9))
    stand_in.device = "cpu"
    with pytest.raises(pytest.skip.Exception, match="nothing is issued ahead"):
        module.bench_issue_in_turns(stand_in, model)


def test_the_benchmark_profiles_all_models_behind_the_rounds_of_all(module, stand_in, monkeypatch):
    """One item after another, as they are collected; the profiler's item is the last."""
    (models,) = [mark.args[1] for mark in module.bench_issue_in_turns.pytestmark if mark.name == "parametrize"]
    assert models[-1] == "profiled"
    order = []

    class Profiler(Gpu):
        def record(self, run, *args):
            order.append("profiled")
            return super().record(run, *args)

    gpu = Profiler()

    def build(case, device):
        run = gpu.runs(case.batch_size)
        return Step(lambda: run() or order.append(case.workload) or 1e-3)

    monkeypatch.setattr(zoo, "find", lambda name: SimpleNamespace(build=build))
    monkeypatch.setattr(busy_turns, "TorchProfiler", lambda: gpu)
    with pytest.raises(pytest.skip.Exception, match="timed in turns in this process"):
        module.bench_issue_in_turns(stand_in, "profiled")
    timed = []
    for model in models:
        module.bench_issue_in_turns(stand_in, model)
        timed += stand_in.kept.pop(TABLE, [])
    first = order.index("profiled")
    assert set(order[:first]) == set(models[:-1])  # each of them has had its rounds
    rows = [row for row in stand_in.kept[BUSY_TABLE] if not row["replayed"]]
    assert {row["case_id"] for row in rows} == {row["case_id"] for row in timed}
    assert len(rows) == len(timed) / 8
    assert all(row["busy_s"] for row in rows)


def test_rounds_are_kept_though_every_recording_fails(module, stand_in, monkeypatch):
    class Broken:
        def record(self, *_):
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr(zoo, "find", lambda name: SimpleNamespace(build=lambda case, device: Step(lambda: 1e-3)))
    monkeypatch.setattr(busy_turns, "TorchProfiler", Broken)
    for model in ("lenet5", "profiled"):
        module.bench_issue_in_turns(stand_in, model)
    assert len(stand_in.kept[TABLE]) == 8 * len(stand_in.kept[BUSY_TABLE])
    assert {row["reason"] for row in stand_in.kept[BUSY_TABLE]} == {"RuntimeError: CUPTI_ERROR_NOT_INITIALIZED"}
