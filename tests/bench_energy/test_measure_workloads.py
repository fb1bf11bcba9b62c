"""The script that measures workloads, with a simulated GPU's sensors and counters beside work on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

pytest.importorskip("torch", exc_type=ImportError)

from bench_energy import measure_workloads
from bench_energy.held_out import ADDED, FIRST
from bench_energy.splits import SPLITS
from joulemark.energy import workload_windows

SCHEMA = Path(__file__).parents[2] / "docs" / "schema" / "energy-measurements.schema.json"
UUID = "GPU-5a3c0000-0000-4000-8000-000000000000"


class Recorder:
    groups = ("a",)

    def record(self, group, run, expected_s=None):
        run()
        return SimpleNamespace(units={"instructions": "inst"}, total=lambda name: 1e6)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    scenario = {
        "gpus": [
            {"name": "NVIDIA H200", "uuid": UUID, "pci": "0", "power_mw": 200000, "power_instant_mw": 200000,
             "energy": {"counter_from_power": True, "period_s": 0.02}}
        ]
    }  # fmt: skip
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps(scenario))
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ladder = SimpleNamespace(tier="fake", refused={}, source=Recorder(), close=lambda: None)
    for name, seconds in {"_IDLE_SETTLE_S": 0.02, "_IDLE_S": 0.25, "_SETTLE_S": 0.02}.items():
        monkeypatch.setattr(workload_windows, name, seconds)
    monkeypatch.setattr(measure_workloads, "COOL_S", 0.0)
    monkeypatch.setattr("joulemark.collect.counters.open_counters", lambda uuid, device, memory_requests: ladder)
    return tmp_path / "out" / "measured.json"


def run(out, *more):
    return measure_workloads.main(
        ["--out", str(out), "--device", "cpu", "--list", "held_out", "--window", "0.25", *more]
    )


def test_rows_are_valid_and_gone_on_with(machine, capsys):
    assert run(machine, "--only", "copy-l2") == 0
    document = json.loads(machine.read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    (row,) = document["rows"]
    assert row["measured_j"] / row["window_s"] == pytest.approx(200, rel=0.05)
    assert row["counters"]["instructions"] > 0
    assert run(machine, "--only", "triad") == 0
    assert [row["workload"] for row in json.loads(machine.read_text())["rows"]] == ["copy-l2", "triad-fp64"]
    capsys.readouterr()
    assert run(machine, "--only", "copy-l2") == 0
    assert "0 workloads" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:of_mine.mlp brings no loss")
def test_models_of_ones_own(machine, tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text(
        "import torch\ndef mlp():\n    return torch.nn.Linear(8, 8), lambda batch_size: torch.randn(batch_size, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    cells = ("--models", "of_mine:mlp,lenet5", "--dtype", "fp32", "--phase", "train", "--batch-sizes", "2,4")
    assert run(machine, *cells) == 0
    document = json.loads(machine.read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert document["failed"] == {}
    assert [(row["workload"], row["batch_size"]) for row in document["rows"]] == [
        (f"{model}-train-fp32-b{size}", size) for model in ("of_mine:mlp", "lenet5") for size in (2, 4)
    ]
    assert all(row["counters"]["instructions"] > 0 for row in document["rows"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--models", "resnet51"), "did you mean resnet50"),
        (("--models", "no_such_module:mlp"), "there is no module 'no_such_module'"),
        (("--models", "lenet5", "--phase", "decode"), "lenet5 has no phase 'decode': it has inference, train"),
    ],
)
def test_models_that_there_are_not(machine, capsys, words, says):
    assert run(machine, *words) == 2
    assert says in capsys.readouterr().err
    assert not machine.exists()


def test_batch_sizes_are_positive(machine, capsys):
    with pytest.raises(SystemExit):
        run(machine, "--models", "lenet5", "--batch-sizes", "8,0")
    assert "'0' is no batch size; give positive numbers" in capsys.readouterr().err


def test_a_workload_that_fails_costs_itself_only(machine, monkeypatch):
    def refuse(device, tiny):
        raise RuntimeError("out of memory")

    broken = measure_workloads.HeldOut("broken", "hpc", "fp32", refuse)
    copy = next(one for one in measure_workloads.LISTS["held_out"] if one.name == "copy")
    monkeypatch.setitem(measure_workloads.LISTS, "held_out", (broken, copy))
    assert run(machine) == 0
    document = json.loads(machine.read_text())
    assert document["failed"] == {"broken": "energy: RuntimeError: out of memory"}
    assert [row["workload"] for row in document["rows"]] == ["copy"]


def test_time_that_is_up(machine):
    assert run(machine, "--limit", "3") == 3
    assert not machine.exists()


def test_energy_of_all_comes_before_any_counter(machine, monkeypatch):
    """A process that has sampled counters draws more: its idle board is weighed before and after."""
    order = []
    for name in ("weigh", "count"):
        kept = getattr(measure_workloads.Bench, name)
        note = lambda self, one, document, kept=kept, name=name: order.append(name) or kept(self, one, document)  # noqa: E731
        monkeypatch.setattr(measure_workloads.Bench, name, note)
    assert run(machine, "--only", "fft") == 0
    assert len(order) >= 4
    assert order == sorted(order, reverse=True)
    idle = json.loads(machine.read_text())["idle"]
    assert idle["before_counters_w"] == pytest.approx(200, rel=0.05)
    assert idle["after_counters_w"] == pytest.approx(200, rel=0.05)


def test_the_idle_board_is_weighed_now_and_then(machine, monkeypatch):
    weighed = []
    kept = measure_workloads.weigh_idle
    monkeypatch.setattr(measure_workloads, "weigh_idle", lambda meter: weighed.append(1) or kept(meter))
    monkeypatch.setattr(measure_workloads, "IDLE_EVERY", 2)
    assert run(machine, "--only", "fft", "--energy-only") == 0
    rows = json.loads(machine.read_text())["rows"]
    assert (len(rows), len(weighed)) == (3, 2)
    assert rows[0]["idle_w"] == rows[1]["idle_w"]
    assert all(row["idle_w"] == pytest.approx(200, rel=0.05) for row in rows)
    assert all("idle_temperature_c" in row for row in rows)


def test_both_held_out_lists_take_turns():
    order = [one.name for one in measure_workloads.LISTS["held_out"]]
    for part in (FIRST, ADDED):
        names = [one.name for one in part]
        assert [name for name in order if name in set(names)] == names
        half = len(set(names) & set(order[: len(order) // 2]))
        assert half == pytest.approx(len(names) / 2, abs=1)
    assert len(order) == len(FIRST) + len(ADDED)


def test_counters_that_time_left_out_come_later(machine):
    assert run(machine, "--only", "copy", "--energy-only") == 0
    rows = json.loads(machine.read_text())["rows"]
    assert rows
    assert not any(row["counters"] for row in rows)
    assert run(machine, "--only", "copy") == 0
    again = json.loads(machine.read_text())["rows"]
    assert [row["measured_j"] for row in again] == [row["measured_j"] for row in rows]
    assert all(row["counters"]["instructions"] > 0 for row in again)


def test_counters_that_fail_leave_the_energy(machine, monkeypatch):
    def refuse(row, stepper, counting):
        raise RuntimeError("no counters today")

    monkeypatch.setattr(measure_workloads, "with_counters", refuse)
    assert run(machine, "--only", "triad") == 0
    document = json.loads(machine.read_text())
    assert document["failed"] == {"triad-fp64": "counters: RuntimeError: no counters today"}
    assert document["rows"][0]["counters"] == {}


def test_another_gpus_file_is_not_mixed(machine, capsys):
    machine.parent.mkdir()
    text = json.dumps({"schema": "joulemark/energy-measurements/1", "gpu_uuid": "GPU-2", "rows": []})
    machine.write_text(text)
    assert run(machine) == 2
    assert "another GPU" in capsys.readouterr().err
    assert machine.read_text() == text


def test_without_a_gpu(tmp_path, monkeypatch, capsys):
    path = tmp_path / "none.json"
    path.write_text('{"gpus": []}')
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
    assert run(tmp_path / "x.json") == 2
    assert "no GPU is visible" in capsys.readouterr().err


def test_splits_hold_resnet50_training_over_batch_sizes():
    sizes = {(one.dtype, one.batch_size) for one in SPLITS if one.name.startswith("resnet50-train")}
    assert {dtype for dtype, _ in sizes} == {"bf16", "fp32"}
    assert len(sizes) >= 10
    assert len({one.name for one in SPLITS}) == len(SPLITS)
    SPLITS[0].build("cpu", True)()
