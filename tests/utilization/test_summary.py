"""The utilization document of runs whose curves are known, and its tables, plot and command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from joulemark.attribution.document import document_of as attribution_of
from joulemark.cli import main
from joulemark.records import Case, Environment, Finding, Record, Run, Value
from joulemark.report import formats, utilization_view
from joulemark.store import RunWriter, read_run
from joulemark.synthetic_run import SyntheticKernel, SyntheticRun
from joulemark.utilization.summary import PUBLISHED, SCHEMA, document_of

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((ROOT / "docs" / "schema" / "utilization.schema.json").read_text(encoding="utf-8"))
)
ENVIRONMENT = Environment({"gpus": []}, {"counters": "pm_sampling"})
PM = "pm_sampling"
CURVE = {8: 1000.0, 16: 1900.0, 32: 3400.0, 64: 4000.0, 128: 4050.0, 256: 4060.0}
"""Items per second: the knee is at 64."""


def record(batch, rate, mode="eager", outcome="ok", level=0.4, name="resnet50", **more):
    step = batch / rate if rate else None
    values = {
        "device_time_s": step,
        "throughput_per_s": rate,
        "peak_memory_bytes": 1e9 + 1e7 * batch,
        "tensor_active_fraction": level,
        "issue_slot_fraction": 0.3,
        "sm_active_fraction": 0.8,
        "step_flops": 1e10 * batch,
        "peak_flop_per_s": 8e14,
        **more,
    }
    busy = 0.9 * step if step else 0.0
    classes = [
        {"class": "tensor_gemm", "uses_tensor_cores": True, "source": "name", "time_s": busy / 3, "launches": 1},
        {"class": "elementwise", "uses_tensor_cores": False, "source": "name", "time_s": 2 * busy / 3, "launches": 1},
    ]
    timeline = {"steps": 3, "plain_s": step, "profiled_s": step, "busy_s": busy, "kernel_time_s": busy}
    levels = [
        {"tier": tier, "phase": phase, "level": "tensor_active_fraction", "value": value, "passes": 1}
        for tier, phase, value in (
            ("pm_sampling", "step", level),
            ("pm_sampling", "forward", 0.5),
            ("gpm", "step", 0.41),
        )
    ]
    metrics = {key: Value(value, "1", tier="pm_sampling") for key, value in values.items() if value is not None}
    case = Case(
        name, "train", mode, "bf16", batch, "channels_last", "device", "nvidia-h200", benchmark="bench_training"
    )
    measured = outcome == "ok"
    return Record(
        case,
        "r",
        outcome,
        ENVIRONMENT.environment_id,
        None if measured else "out of memory",
        metrics=metrics if measured else {},
        tables={"kernel_classes": classes, "timeline": [timeline], "levels": levels} if measured else {},
        notes={key: "no such counter" for key, value in values.items() if value is None},
    )


def run(records, name="sweep-1.jsonl"):
    return Run(name, name, {ENVIRONMENT.environment_id: ENVIRONMENT}, tuple(records), True, 60.0)


def rendered(runs, form="terminal"):
    return formats.render(utilization_view.tables(document_of(runs)), form)


def levels_of(one):
    return next(table for table in utilization_view.tables(document_of([one])) if table.title.endswith(": levels"))


def series(*runs):
    document = document_of(runs)
    VALIDATOR.validate(document)
    json.dumps(document, allow_nan=False)
    return document["series"]


def test_a_plateau_with_its_means_beside_the_published_ones():
    (one,) = series(run(record(batch, rate, level=0.2 if batch < 64 else 0.4) for batch, rate in CURVE.items()))
    assert one["throughput_plateau"]["verdict"] == "plateau"
    assert 32 < one["throughput_plateau"]["knee"] <= 64
    assert one["at_plateau"]["batch_sizes"] == [64, 128, 256]
    assert one["at_plateau"]["tensor_active_fraction"] == pytest.approx(0.4)
    assert one["at_plateau"]["issue_slot_fraction"] == pytest.approx(0.3)
    assert one["at_plateau"]["no_tensor_share"] == pytest.approx(0.6)
    assert one["level_plateaus"]["sm_active_fraction"]["verdict"] == "plateau"
    assert (PUBLISHED["tensor_active_fraction"], PUBLISHED["issue_slot_fraction"]) == (0.052, 0.5)
    assert "DATE 2024" in PUBLISHED["source"]


def test_batches_without_a_waterfall_are_named_together():
    bare = [replace(record(batch, rate), tables={}) for batch, rate in CURVE.items()]
    text = rendered([run(bare)], "markdown")
    (line,) = (one for one in text.splitlines() if "no waterfall" in one)
    assert f"for batch {', '.join(map(str, CURVE))}: " in line


def test_a_pipe_that_is_never_used_has_no_plateau():
    (one,) = series(run(record(batch, rate, fp64_active_fraction=0.0) for batch, rate in CURVE.items()))
    assert "fp64_active_fraction" not in one["level_plateaus"]
    assert one["cells"][0]["levels"]["fp64_active_fraction"] == 0


def test_a_cell_holds_its_waterfall_phases_and_both_instruments():
    (one,) = series(run(record(batch, rate) for batch, rate in CURVE.items()))
    cell = one["cells"][0]
    assert sum(bar["share"] for bar in cell["waterfall"]["bars"]) == pytest.approx(1)
    assert cell["phases"] == {"forward": {"tensor_active_fraction": 0.5}}
    assert cell["tiers_beside"][0] == {"level": "tensor_active_fraction", "pm_sampling": 0.4, "gpm": 0.41}
    assert cell["tiers"]["tensor_active_fraction"] == "pm_sampling"
    assert cell["class_shares"] == pytest.approx({"elementwise": 0.6, "tensor_gemm": 0.3})
    assert cell["step_s"] == {"timing": pytest.approx(0.008), "profiler": pytest.approx(0.008), "counters": None}


def test_elasticity_of_throughput_to_memory():
    (one,) = series(run([record(8, 1000.0), record(16, 2000.0, peak_memory_bytes=2.16e9)]))
    (found,) = one["elasticity"]
    assert found["value"] == pytest.approx(1.0)
    (one,) = series(run([record(8, 1000.0), record(16, 2000.0, peak_memory_bytes=1.08e9)]))
    assert one["elasticity"][0]["value"] is None
    (one,) = series(run([record(8, 1000.0), record(16, 2000.0, peak_memory_bytes=-1.0)]))
    assert one["elasticity"][0]["value"] is None


def test_elasticity_to_memory_that_hardly_grows_is_not_shown():
    def shown(second_bytes):
        table = levels_of(run([record(8, 1000.0), record(16, 2000.0, peak_memory_bytes=second_bytes)]))
        return table.rows[1][table.columns.index("elasticity")]

    assert shown(2.16e9) == "1"
    assert shown(1.081e9) == "n/a"


def test_a_cost_of_counting_that_a_sweep_cannot_tell_is_not_told():
    costs = [record(batch, 100.0 * batch, counters_overhead=cost) for batch, cost in ((8, 0.28), (16, 0.01), (32, 0.2))]
    for number, code in ((0, "host_bound"), (2, "counters_cost_untold")):
        costs[number] = replace(costs[number], findings=(Finding(code, "message"),))
    notes = levels_of(run(costs)).notes
    assert "beside the counters steps change by +1.0% to +1.0%" in notes
    assert "a few windows do not tell what counting costs at batch 8, 32" in notes


def test_an_out_of_memory_limits_and_is_no_cell():
    (one,) = series(run([*(record(b, 100.0 * b) for b in (8, 16, 32, 64)), record(128, 0.0, outcome="oom")]))
    assert one["did_not_fit"] == 128
    assert one["batch_sizes"] == [8, 16, 32, 64]
    assert one["throughput_plateau"]["text"] == "not reached (largest batch 64, limited by memory)"
    assert one["at_plateau"]["reached"] is False
    assert one["at_plateau"]["batch_sizes"] == [64]


def test_of_two_runs_a_plateau_is_one_runs_and_a_cell_the_best_equipped():
    counted = run([replace(record(b, r), run_id="counted") for b, r in CURVE.items()])
    bare = [replace(record(b, r / 2), run_id="bare", tables={}) for b, r in {4: 500.0, **CURVE}.items() if b < 256]
    (alone,) = series(counted)
    for given in ((counted, run(bare)), (run(bare), counted)):
        (one,) = series(*given)
        assert one["throughput_plateau"] == alone["throughput_plateau"]
        assert one["level_plateaus"] == alone["level_plateaus"]
        assert one["batch_sizes"] == [4, *CURVE]
        assert one["cells"][1:] == alone["cells"]


def test_a_compiled_series_takes_the_flop_of_the_eager_one():
    both = [record(8, 1000.0), record(8, 1200.0, "compile", step_flops=None)]
    eager, compiled = series(run(both))
    assert compiled["mode"] == "compile"
    assert compiled["cells"][0]["waterfall"]["bars"][0]["time_s"] == eager["cells"][0]["waterfall"]["bars"][0]["time_s"]


def test_what_was_not_measured_has_its_reason():
    (one,) = series(run([record(8, 1000.0, issue_slot_fraction=None)]))
    assert one["at_plateau"]["issue_slot_fraction"] is None
    assert one["at_plateau"]["notes"]["issue_slot_fraction"] == "no such counter"
    bare = Record(record(8, 1.0).case, "r", "ok", "e", metrics={"throughput_per_s": Value(5.0, "1/s")})
    (one,) = series(run([bare]))
    assert "not timed on the device" in one["cells"][0]["notes"]["waterfall"]
    assert one["at_plateau"]["notes"]["no_tensor_share"].startswith("not collected")


def test_inference_and_functions_are_no_training_series():
    other = Record(Case("resnet50", "inference", "eager", "bf16", 8), "r", "ok", "e")
    assert series(run([other, Record(Case("bench.f"), "r", "ok", "e")])) == []


def test_tables_show_names_harmless():
    text = rendered([run([record(8, 1000.0, name="<b>\x1b[31mx")])], "markdown")
    assert "\x1b" not in text
    assert "<b>" not in text
    terminal = rendered([run(record(b, r) for b, r in CURVE.items())])
    assert re.search(r"throughput +from \d", terminal)
    assert "published, at most" in terminal
    assert "unexplained" in terminal
    assert "60.0 %" in terminal


def test_series_that_only_gpu_or_benchmark_tell_apart_have_titles_of_their_own():
    one = record(8, 1000.0)
    others = [replace(one.case, **change) for change in ({"gpu_model": "nvidia-l4"}, {"benchmark": "mine"})]
    found = rendered([run([one, *(replace(one, case=case) for case in others)])], "markdown")
    titles = [line for line in found.splitlines() if line.endswith(": levels")]
    assert len(set(titles)) == 3


@pytest.fixture
def stored(tmp_path):
    """A result file of the curve."""
    path = tmp_path / "sweep-1.jsonl"
    with_file = RunWriter(path, "r", ENVIRONMENT, 0.0)
    for batch, rate in CURVE.items():
        with_file.write(record(batch, rate))
    with_file.end(completed=True, wall_s=1.0, measured_s=0.5, reason=None)
    with_file.close()
    return path


def test_the_command_prints_writes_and_draws(stored, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["utilization", str(stored), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(document)
    assert document["schema"] == SCHEMA
    assert document["runs"][0]["file"] == "sweep-1.jsonl"
    assert "made of sweep-1.jsonl" in next(iter(utilization_view.tables(document))).notes
    out, plot = tmp_path / "utilization.json", tmp_path / "plot.svg"
    assert main(["utilization", str(stored), "--out", str(out), "--plot", str(plot)]) == 0
    assert json.loads(out.read_text()) == document
    assert plot.read_text().startswith("<?xml")


def test_wrong_use_is_one_clear_line(stored, tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, said in (
        ([str(stored), "--out", str(tmp_path / "u.txt")], "utilization document"),
        ([str(stored), "--out", str(tmp_path / "other.json")], "is not"),
        ([str(stored), "--plot", str(tmp_path / "u.txt")], "--plot got"),
        ([str(empty)], "no training over batch sizes"),
    ):
        assert main(["utilization", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error


def test_an_export_of_nsight_compute_joins_its_case(stored, tmp_path, capsys):
    export = ROOT / "tests" / "data" / "counters" / "ncu_resnet18_b64_fp16_h200.csv"
    assert main(["utilization", str(stored), "--json", "--counters", f"b64-channels={export}"]) == 0
    cells = json.loads(capsys.readouterr().out)["series"][0]["cells"]
    assert {cell["batch_size"]: cell["per_kernel"] is not None for cell in cells}[64]
    assert sum(cell["per_kernel"] is not None for cell in cells) == 1
    for given, said in (
        ("b64", "it takes CASE=FILE"),
        (f"resnet50={export}", "which 6 of "),
        (f"b64-channels={tmp_path / 'nowhere.csv'}", "nowhere.csv"),
    ):
        assert main(["utilization", str(stored), "--counters", given]) == 2
        assert said in capsys.readouterr().err


def test_an_attribution_of_pm_samples_joins_its_case_too(tmp_path, capsys):
    add = {
        "name": "elementwise_kernel",
        "class": "elementwise",
        "uses_tensor_cores": False,
        "time_s": 4e-3,
        "launches": 2,
    }
    one = record(64, 4000.0)
    one = replace(one, tables={**one.tables, "kernels": [add]})
    with RunWriter(tmp_path / "sweep.jsonl", "r" * 32, ENVIRONMENT, 1.7e9) as out:
        out.write(one)
        out.end(completed=True, wall_s=1.0, measured_s=1.0)
    known = SyntheticRun([SyntheticKernel("elementwise_kernel", 100e-6, {"pipe_tensor": 0.0, "dram_throughput": 0.75})])
    file = tmp_path / "a.json"
    file.write_text(json.dumps(attribution_of(*known.recorded())))
    command = ["utilization", str(tmp_path / "sweep.jsonl"), "--counters", f"b64-channels={file}"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(document)
    joined = document["series"][0]["cells"][0]["per_kernel"]
    launched = 100 / 100.3  # the simulator's profiler records kernels 0.3 µs longer than they work
    bound = joined["dram_bound"]["no_matrix_kernels"]
    assert bound == {"time_s": pytest.approx(4e-3 * 0.75 * launched, rel=0.03), "seen": 1.0}
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"DRAM at its peak needs 18\.[6-8] % of the step for the bytes under 'no tensor core'", shown)


def test_a_run_on_simulated_gpus_is_marked(stored):
    run = read_run(stored)
    assert "simulated" not in document_of([run])["runs"][0]
    fake = replace(run, environments={key: Environment({"simulated": True}) for key in run.environments})
    document = document_of([fake])
    VALIDATOR.validate(document)
    assert document["runs"][0]["simulated"] is True
    notes = next(iter(utilization_view.tables(document))).notes
    assert any(note.startswith("made of sweep-1.jsonl (simulated GPUs)") for note in notes)
