"""Bursts of several cases in turns, and the benchmark that measures them."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from joulemark.collect.timing import SteadySamples
from joulemark.errors import Unsupported
from joulemark.measure.issue_turns import FEWEST_STEPS, WARM_S, IssueTurns
from joulemark.measure.plan import PROFILE
from joulemark.plugin.fixture import Bench
from joulemark.records import Case, KnownTables, converted
from joulemark.tandem.turns import TABLE
from joulemark.workloads import zoo
from joulemark.workloads.base import Step

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
        return [run(), 9.0, 0.0]

    def steady(self, run, stop, step_s):
        """Two looks: none yet, then enough."""
        self.asked.append(step_s)
        samples = [step_s]
        assert stop(samples) is None
        samples += [2 * step_s] * FEWEST_STEPS
        assert stop(samples)
        return SteadySamples(samples, 0.0, 1.0, "enough")


def steps(log, batches=(1, 8, 64)):
    def run(batch):
        return lambda: log.append(batch) or batch * 1e-3

    return [(Case("m", batch_size=batch), Step(run(batch))) for batch in batches]


def test_every_round_holds_each_case_once_in_an_order_of_its_own():
    log, timer = [], Bursts()
    turns = IssueTurns(timer, steps(log))
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


@pytest.mark.parametrize("model", ["lenet5", "bert_base"])
def test_the_benchmark_issues_the_cases_of_the_sweep(model, monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_tandem", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = []

    def build(case, device):
        built.append(case)
        return Step(lambda: 1e-3)

    monkeypatch.setattr(zoo, "find", lambda name: SimpleNamespace(build=build))
    kept = {}
    bench = SimpleNamespace(
        device="cuda:0",
        target=SimpleNamespace(slug="nvidia-h200"),
        instruments=SimpleNamespace(timer=Bursts()),
        quick=True,
        pedantic=lambda run, rounds, warmup_rounds, **_: [run() for _ in range(rounds + warmup_rounds)],
        keep=kept.__setitem__,
    )
    module.bench_issue_in_turns(bench, model)
    (mark,) = [one for one in module.bench_tandem.pytestmark if one.name == "bench"]
    sizes = mark.kwargs["batch_sizes"]
    assert [case.batch_size for case in built] == list(sizes.get(model, sizes["*"]))
    layout = "channels_last-" if model == "lenet5" else ""
    assert built[0].label == f"{model}-inference-bf16-eager-b1-{layout}nvidia-h200"
    assert {(case.mode, case.benchmark, case.input) for case in built} == {("eager", "bench_tandem", "device")}
    assert len(kept[TABLE]) == 8 * len(built)
    assert {row["round"] for row in kept[TABLE]} == set(range(1, 9))
    bench.device = "cpu"
    with pytest.raises(pytest.skip.Exception, match="nothing is issued ahead"):
        module.bench_issue_in_turns(bench, model)
