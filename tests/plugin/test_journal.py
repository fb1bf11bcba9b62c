"""What a journal stores of several devices."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from joulemark.device.gpu import Inventory
from joulemark.plugin.journal import Journal, Seen
from joulemark.plugin.options import BenchOptions
from joulemark.plugin.schedule import Planned
from joulemark.plugin.sweep import Target
from joulemark.records import Case, Record
from joulemark.store import read_run


def target(name):
    return Target(f"GPU-{name}", "nvidia-h200", "nvidia-h200", "NVIDIA H200")


@pytest.fixture
def journal(tmp_path, monkeypatch):
    config = SimpleNamespace(rootpath=tmp_path, invocation_params=SimpleNamespace(args=("--bench",)))
    return Journal(config, BenchOptions(), Inventory(), tmp_path / "run.jsonl", "ab" * 16)


def record(name, gpu):
    return Record(Case(name), "", "ok", "", gpu_uuid=f"GPU-{gpu}")


def test_a_device_has_the_environment_of_its_own_measuring_process(journal):
    greeting = {"facts": {"device_uuid": "GPU-a", "baselines": {"static_power_w": {"value": 90.0}}}}
    idle = {"idle_power_w": {"value": 70.0}}
    journal.keep(record("first", "a"), Seen(target("a"), greeting | {"power": "nvml_energy_counter"}, idle))
    journal.keep(record("second", "b"), Seen(target("b"), {"facts": {"device_uuid": "GPU-b"}, "no_power": "off"}))
    journal.keep(record("third", "a"), Seen(target("a"), {"facts": {"device_uuid": "another start"}}))
    journal.close(True, None)
    run = read_run(journal.path)
    of = {one.case.workload: run.environments[one.environment_id] for one in run.records}
    assert of["first"].facts["device_uuid"] == "GPU-a"
    assert of["first"].facts["baselines"] == {"static_power_w": {"value": 90.0}, "idle_power_w": {"value": 70.0}}
    assert of["first"].tiers["energy"] == "nvml_energy_counter"
    assert of["second"].facts["device_uuid"] == "GPU-b"
    assert of["second"].tiers["energy"] is None
    assert of["second"].notes["energy"] == "off"
    assert of["third"] == of["first"]
    assert {one.run_id for one in run.records} == {"ab" * 16}
    assert run.completed


def test_a_case_that_failed_before_the_greeting_does_not_take_it_from_the_next(journal):
    journal.keep(record("failed", "a"), Seen(target("a")))
    journal.keep(record("fine", "a"), Seen(target("a"), {"facts": {"device_uuid": "GPU-a"}}))
    journal.keep(record("failed again", "a"), Seen(target("a")))
    run = read_run(journal.path)
    facts = [run.environments[one.environment_id].facts.get("device_uuid") for one in run.records]
    assert facts == [None, "GPU-a", "GPU-a"]
    assert set(run.environments) == set(journal.environments)


def test_cases_that_two_functions_sweep_go_by_different_names(journal):
    cases = [
        Case("lenet5", benchmark="bench_a"),
        Case("lenet5", benchmark="bench_b"),
        Case("vgg16", benchmark="bench_a"),
    ]
    journal.expect([Planned(str(i), "cpu", case) for i, case in enumerate(cases)] + [Planned("wrong", "cpu", None)])
    assert journal.total == 4
    said = []
    for case in cases:
        journal.records.append(Record(case, "", "unsupported", "", reason="no GPU"))
        said.append(journal.status(journal.records[-1]).partition("] ")[2].rpartition(": ")[0])
    assert said[0].startswith("bench_a:lenet5")
    assert said[1].startswith("bench_b:lenet5")
    assert said[2].startswith("vgg16")


def test_a_reason_not_to_measure_is_said_once(journal):
    journal.total = 3
    said = []
    for name in ("first", "second", "third"):
        reason = "no GPU" if name != "third" else "no compiler"
        journal.records.append(Record(Case(name), "", "unsupported", "", reason=reason))
        said.append(journal.status(journal.records[-1]))
    assert said[0].endswith("no GPU [unsupported]")
    assert said[1].endswith("as case 1 [unsupported]")
    assert said[2].endswith("no compiler [unsupported]")


def test_tables_stand_in_the_order_of_the_items_and_not_of_their_ends(journal):
    for name in ("c", "a", "b"):
        journal.keep(replace(record(name, "a"), nodeid=f"bench_x.py::{name}"), Seen(target("a")))
    journal.close(True, None)
    plan = [Planned(f"bench_x.py::{name}", "nvidia-h200", None) for name in "abc"]
    for resumed in (None, read_run(journal.path)):
        run = journal.whole_run(plan, resumed)
        assert [one.case.workload for one in run.records] == ["a", "b", "c"]
    assert [one.case.workload for one in read_run(journal.path).records] == ["c", "a", "b"]
