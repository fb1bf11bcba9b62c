import gzip
import json
from pathlib import Path

import pytest

from joulemark.errors import UnreadableInput
from joulemark.records import Case
from joulemark.report.foreign import read_pytest_benchmark, read_result, read_results
from joulemark.store import find_runs

RUNS = Path(__file__).parents[1] / "data" / "runs"


def saved(tmp_path, *benchmarks, **more):
    path = tmp_path / "saved.json"
    path.write_text(json.dumps({"benchmarks": list(benchmarks), **more}))
    return path


def benchmark(**more):
    one = {"fullname": "t.py::test_a[x]", "params": None, "param": None, "extra_info": {}}
    return {**one, "stats": {"data": [1e-3] * 6}, **more}


def test_cases_are_functions_with_their_parameters():
    run = read_result(RUNS / "baseline.json")
    assert (run.source, run.completed, len(run.records), run.problems) == ("pytest-benchmark", True, 6, ())
    first = run.records[0]
    params = {"model": "resnet50", "batch": 1}
    assert first.case == Case("bench/test_models.py::test_infer", gpu_model="nvidia-h100-80gb-hbm3", params=params)
    value = first.metrics["host_time_s"]
    assert (value.value, value.n, value.unit, value.tier) == (0.004, 5, "s", "host_clock")
    assert first.samples["host_time_s"] == [0.004] * 5
    facts = next(iter(run.environments.values())).facts
    assert (facts["driver"], facts["cuda"], facts["packages"]) == ("550.90.07", "12.8", {"torch": "2.8.0+cu128"})
    assert facts["git"] == {"hash": "9c41d7e0a2b84f66d1f0a35b7e6c9d8240b1e3fa", "dirty": False}


def test_one_round_has_no_interval_and_a_no_op_takes_no_time():
    by_label = {one.nodeid: one.metrics["host_time_s"] for one in read_result(RUNS / "degenerate.json").records}
    assert by_label["bench/test_models.py::test_infer[resnet50-1]"].interval is None
    assert by_label["bench/test_models.py::test_noop"].value == 0.0


def test_addresses_in_ids_are_no_part_of_a_case():
    base, candidate = (read_result(RUNS / f"ids_{side}.json") for side in ("base", "candidate"))
    train = base.records[0]
    assert train.case.params == {"batch": 8, "model": "resnet50"}
    assert [one.code for one in train.findings] == ["unstable_id"]
    assert train.case_id == candidate.records[0].case_id
    assert base.records[1].case_id == candidate.records[1].case_id


def test_a_file_that_names_no_gpu_says_unknown():
    assert {one.case.gpu_model for one in read_result(RUNS / "gpu_not_named.json").records} == {"unknown"}


def test_what_our_plugin_put_into_extra_info_is_a_whole_record(tmp_path):
    case = Case("resnet50", "train", "eager", "bf16", 8, gpu_model="nvidia-h200")
    extra = {
        "case": case.to_json(), "joulemark_case_id": case.case_id, "outcome": "flagged", "gpu_uuid": "GPU-1",
        "device_time_s": 2e-3, "power_w": None, "host_time_s": 1e-3,
    }  # fmt: skip
    (record,) = read_result(saved(tmp_path, benchmark(extra_info=extra))).records
    assert (record.case, record.outcome, record.gpu_uuid) == (case, "flagged", "GPU-1")
    assert record.value("device_time_s") == 2e-3
    assert "power_w" not in record.metrics


def test_without_samples_the_interval_comes_from_the_quartiles(tmp_path):
    stats = {"median": 1e-3, "iqr": 1e-4, "rounds": 25, "ops": None}
    (record,) = read_result(saved(tmp_path, benchmark(stats=stats))).records
    value = record.metrics["host_time_s"]
    assert value.interval == pytest.approx((1e-3 - 1.57e-4 / 5, 1e-3 + 1.57e-4 / 5))
    assert record.samples == {}


@pytest.mark.parametrize(
    ("stats", "expected"),
    [({"median": None}, None), ({"data": []}, None), ({"data": ["a"], "median": 2.0, "rounds": 1}, 2.0)],
)
def test_missing_times_are_null(tmp_path, stats, expected):
    (record,) = read_result(saved(tmp_path, benchmark(stats=stats))).records
    assert record.value("host_time_s") == expected
    assert (expected is None) == ("host_time_s" in record.notes)


def test_a_benchmark_that_is_none_is_named(tmp_path):
    run = read_result(saved(tmp_path, benchmark(), 5, {"stats": {}}, benchmark(stats=None)))
    assert len(run.records) == 2
    assert [problem.partition(":")[0] for problem in run.problems] == ["benchmark 2", "benchmark 3"]
    assert not run.completed


def test_parameters_that_are_lists_keep_their_value(tmp_path):
    (record,) = read_result(saved(tmp_path, benchmark(params={"shape": [1, 2], "x": None}))).records
    assert record.case.params == {"shape": "[1,2]", "x": None}


def test_an_id_without_parameters_tells_cases_apart(tmp_path):
    run = read_result(saved(tmp_path, benchmark(param="x"), benchmark(fullname="t.py::test_a[y]", param="y")))
    assert len({one.case_id for one in run.records}) == 2


def test_nan_and_infinity_in_old_files_are_read(tmp_path):
    path = saved(tmp_path, benchmark())
    path.write_text(path.read_text().replace('"params": null', '"params": {"x": NaN, "y": Infinity}'))
    assert read_result(path).records[0].case.params == {"x": None, "y": None}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("0002_empty_20260902_100500.json", "is empty"),
        ("0003_cut_20260903_100500.json", "is cut or is not JSON"),
        ("0005_list_20260905_100500.json", "holds a JSON list"),
        ("0006_nobench_20260906_100500.json", "no list of benchmarks"),
    ],
)
def test_damaged_files_are_refused_by_name(name, says):
    with pytest.raises(UnreadableInput, match=name) as caught:
        read_pytest_benchmark(RUNS / "store" / name)
    assert says in str(caught.value)


def test_a_store_lists_its_good_runs_newest_first_and_names_the_bad():
    listing = find_runs(RUNS / "store", suffixes=(".json",), read=read_result)
    assert [Path(run.path).name[:4] for run in listing.runs] == ["0004", "0001"]
    assert [run.records[0].value("host_time_s") for run in listing.runs] == pytest.approx([0.0084, 0.008])
    assert len(listing.unusable) == 4


def test_folders_and_files_are_read_alike():
    runs, unusable = read_results([RUNS / "store", RUNS / "baseline.json"])
    assert [Path(run.path).name for run in runs][2] == "baseline.json"
    assert len(unusable) == 4


def test_a_folder_or_nothing_is_no_result(tmp_path):
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UnreadableInput):
            read_result(path)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(UnreadableInput, match="cannot read"):
        read_result(path)


@pytest.mark.parametrize(
    ("name", "content", "command"),
    [
        ("trace.json", b'{"schemaVersion": 1, "traceEvents": []}', "joulemark trace"),
        ("trace.json.gz", gzip.compress(b'{"traceEvents": []}'), "joulemark trace"),
        ("ncu.csv", b'"ID","Process ID","Kernel Name"\n', "joulemark counters"),
    ],
    ids=["trace", "zipped", "ncu"],
)
def test_what_another_command_reads_is_sent_there(tmp_path, name, content, command):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnreadableInput) as caught:
        read_result(path)
    assert str(caught.value).endswith(f"is read by {command} {path}")


@pytest.mark.parametrize("content", ["null", "3", "0.5", "true", '"text"', "[]"])
def test_json_that_is_no_document_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UnreadableInput, match=r"holds a JSON (null|number|truth value|string|list), not a result"):
        read_result(path)
