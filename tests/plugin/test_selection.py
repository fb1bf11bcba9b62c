"""What ``pytest --bench`` collects, wherever it is started and whatever else is on the command line."""

from __future__ import annotations

import os
import tempfile

import pytest

from joulemark.store import read_run

BENCH = "def bench_sum(bench):\n    bench(sum, [1, 2])\n"
TWO = "import pytest\n\n@pytest.mark.parametrize('n', [10, 20])\ndef bench_sum(bench, n):\n    bench(sum, range(n))\n"
PLAIN = "def test_plain():\n    assert True\n"


def test_without_a_path_the_bench_folders_of_the_root_are_taken(project):
    project.write(
        {
            "pytest.ini": "[pytest]\ntestpaths = tests\n",
            "bench_one/bench_a.py": BENCH,
            "bench_two/bench_b.py": BENCH,
            "tests/test_a.py": PLAIN,
            "elsewhere/bench_c.py": BENCH,
        }
    )
    (project.path / "elsewhere").joinpath("sub").mkdir()
    os.chdir(project.path / "elsewhere" / "sub")
    result = project.bench("--collect-only", "-q")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["bench_one/bench_a.py::bench_sum", "bench_two/bench_b.py::bench_sum"])
    result.stdout.no_fnmatch_line("*elsewhere*")
    result.stdout.no_fnmatch_line("*test_plain*")


def test_without_bench_folders_the_invocation_folder_is_taken_and_plain_tests_are_deselected(project):
    project.write({"bench_a.py": BENCH, "test_a.py": PLAIN, "test_b.py": BENCH.replace("bench_sum", "test_sum")})
    project.bench()
    assert project.outcomes == {"passed": 2, "deselected": 1}
    assert {one["outcome"] for one in project.records.values()} <= {"ok", "flagged"}
    assert set(project.records) == {"bench_sum", "test_sum"}
    assert project.end["completed"] is True
    assert project.files[0].parent == project.path / ".joulemark" / "cpu"
    assert (project.path / ".joulemark" / ".gitignore").read_text().endswith("*\n")


def test_a_path_wins_over_the_bench_folders_and_a_results_folder_is_used(project):
    project.write({"bench_one/bench_a.py": BENCH, "other/bench_b.py": TWO, "results/README.md": ""})
    project.bench("other")
    assert project.outcomes == {"passed": 2}
    assert set(project.records) == {"bench_sum[10]", "bench_sum[20]"}
    assert project.files[0].parent == project.path / "results" / "cpu"
    assert project.records["bench_sum[10]"]["case"]["params"] == {"n": 10}


def test_from_a_parent_folder(project):
    project.write({"inner/pytest.ini": "[pytest]\n", "inner/bench_one/bench_a.py": BENCH, "inner/bench_x.py": BENCH})
    project.bench("inner/bench_one")
    assert project.outcomes == {"passed": 1}
    assert project.records["bench_sum"]["nodeid"] == "bench_one/bench_a.py::bench_sum"
    assert (project.path / "inner" / ".joulemark").is_dir()


def test_a_foreign_project_with_its_own_model_option(project):
    project.write(
        {
            "conftest.py": """
import pytest

def pytest_addoption(parser):
    parser.addoption("--model", default="none")

@pytest.fixture(scope="session")
def model(request):
    return request.config.getoption("--model")
""",
            "bench_own.py": """
def bench_model(bench, model):
    assert model == "tiny"
    bench(len, model)
""",
        }
    )
    project.bench("--model", "tiny")
    assert project.outcomes == {"passed": 1}
    assert project.records["bench_model"]["metrics"]["host_time_s"]["value"] > 0


def test_k_and_last_failed(project):
    project.write(
        {
            "bench_a.py": """
import pathlib
import pytest

@pytest.mark.parametrize("n", [1, 2, 3])
def bench_some(bench, n):
    assert n != 2 or pathlib.Path("mended").exists()
    bench(abs, n)
"""
        }
    )
    project.bench("-k", "2 or 3")
    assert project.outcomes == {"passed": 1, "failed": 1, "deselected": 1}
    assert {name: one["outcome"] for name, one in project.records.items()}["bench_some[2]"] == "failed"
    assert project.end["completed"] is True
    project.files[0].unlink()
    project.write({"mended": ""})
    project.bench("--lf")
    assert project.outcomes == {"passed": 1}
    assert set(project.records) == {"bench_some[2]"}


def test_options_of_the_cache_do_not_reach_the_child(project):
    project.write({"pytest.ini": "[pytest]\naddopts = --ff --nf\n", "bench_a.py": BENCH})
    result = project.bench("--cache-clear", "--sw-skip", "-xq")
    assert result.ret == 0
    assert set(project.records) == {"bench_sum"}


def test_collect_only_starts_no_child_and_leaves_no_file(project, monkeypatch):
    from joulemark.measure.worker import Worker

    def refuse(self):
        raise AssertionError("a child was started")

    monkeypatch.setattr(Worker, "ensure_started", refuse)
    project.write({"bench_a.py": TWO})
    result = project.bench("--collect-only", "-q")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["bench_a.py::bench_sum[[]10[]]", "bench_a.py::bench_sum[[]20[]]"])
    assert project.files == []
    assert not (project.path / ".joulemark").exists()


def test_cells_of_the_zoo_are_items_without_importing_torch(project):
    project.write(
        {"bench_a.py": "def bench_forward(bench, workload):\n    bench.step(workload)\n", "no_torch.py": NO_TORCH}
    )
    result = project.pytest(
        "--bench", "--bench-gpus", "cpu", "--collect-only", "-q", "-k", "not b8-", "-p", "no_torch",
        "--bench-models", "lenet5,resnet50", "--bench-batch-sizes", "1:16", "--bench-dtypes", "fp32,bf16",
    )  # fmt: skip
    assert result.ret == 0
    listed = [line for line in result.outlines if "::" in line]
    assert len(listed) == 2 * 4 * 2
    assert "bench_a.py::bench_forward[lenet5-inference-bf16-eager-b1-channels_last-cpu]" in listed


NO_TORCH = """
import sys

def pytest_unconfigure():
    assert "torch" not in sys.modules
"""


def test_cases_beside_those_of_the_named_models_are_counted(project):
    text = "def bench_one(bench, workload):\n    bench.step(workload)\n\ndef bench_two(bench):\n    bench(abs, 1)\n"
    project.write({"bench_a.py": text})
    result = project.bench("--collect-only", "--bench-models=lenet5")
    result.stdout.fnmatch_lines(
        ["--bench-models: 1 of 4 cases are of no model that it names, and run too: bench_a.py 1 (name files *"]
    )
    result = project.bench("--collect-only", "--bench-models=lenet5", "bench_a.py::bench_one")
    result.stdout.no_fnmatch_line("--bench-models:*")


def test_ini_twins(project):
    project.write(
        {
            "pytest.ini": "[pytest]\nbench_results = kept\nbench_quick = true\nbench_collect = timing\n"
            "bench_gpus = cpu\nbench_report = sweep.json,sweep.md\n",
            "bench_a.py": BENCH,
        }
    )
    result = project._last = project.pytester.runpytest_inprocess("--bench")
    assert project.outcomes == {"passed": 1}
    result.stdout.fnmatch_lines(["*power: off (--bench-collect)", "*quick: short passes*"])
    assert project.files[0].parent == project.path / "kept" / "cpu"
    assert (project.path / "sweep.json").read_text().startswith("{")
    assert "bench_a.bench_sum" in (project.path / "sweep.md").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--bench-batch-sizes", "0"), "*--bench-batch-sizes got '0'*1,8,64*"),
        (("--bench-batch-sizes", "²"), "*--bench-batch-sizes got '²'*1,8,64*"),
        (("--bench-dtypes", "fp8"), "*--bench-dtypes got 'fp8'*fp32, tf32, bf16, fp16*"),
        (("--bench-timeout", "soon"), "*--bench-timeout got 'soon'*positive number*"),
        (("--bench-report", "sweep.docx"), "*sweep.docx*"),
        (("--bench-resume", "nothing.jsonl"), "*nothing.jsonl*check the path*"),
        (("--bench-gpus", "h900"), "*h900*"),
        (("--bench-models", "lenet5,resnet51"), "--bench-models: *'resnet51': did you mean resnet50 *"),
        (("--bench-models", "not.there:build"), "--bench-models: *there is no module 'not.there'*"),
        (("--bench-models", "json.tool:built"), "--bench-models: *json.tool has no attribute 'built'*"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(project, args, said):
    project.write({"bench_a.py": "raise AssertionError('collected')\n"})
    result = project.bench(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    assert project.files == []


@pytest.mark.parametrize("options", [(), ("--bench-inprocess",)])
def test_a_model_that_cannot_be_imported_is_refused_though_no_benchmark_takes_one(project, options):
    project.write({"bench_a.py": BENCH, "half.py": "raise RuntimeError('half written')\n\ndef make(): pass\n"})
    result = project.bench("--bench-models", "half:make", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = result.stderr.str() + result.stdout.str()
    assert "--bench-models: 'half:make': importing half raised RuntimeError: half written: fix it" in told
    assert "Traceback" not in told
    assert project.files == []


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("modles=('lenet5',)", "*got the argument 'modles'*it takes*models*"),
        ("models=('lenet6',)", "*lenet6*"),
        ("'lenet5'", "*got 'lenet5'*keyword arguments only*"),
        ("first_look={'batch': 1}", "*got first_look with 'batch'*it takes*batch_sizes*"),
    ],
)
def test_a_wrong_marker_names_the_benchmark(project, marker, said):
    project.write(
        {"bench_a.py": f"import pytest\n\n@pytest.mark.bench({marker})\ndef bench_x(bench, workload):\n    pass\n"}
    )
    result = project.bench()
    assert result.ret in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    result.stdout.fnmatch_lines([said])
    assert "bench_a.py::bench_x" in result.stdout.str()
    assert "sweep.py:" not in result.stdout.str()  # a message, not a traceback


def test_a_benchmark_under_a_name_that_is_not_collected_is_named_at_the_end(project):
    project.write({"bench_a.py": BENCH + "\n\ndef measure_other(bench):\n    bench(abs, 1)\n"})
    result = project.bench()
    assert project.outcomes == {"passed": 1}
    result.stdout.fnmatch_lines(["joulemark: bench_a.py::measure_other takes bench but its name is not collected*"])


def test_benchmarks_in_a_class_are_collected(project):
    project.write({"bench_a.py": "class BenchSum:\n    def bench_one(self, bench):\n        bench(sum, [1, 2])\n"})
    assert project.bench("--bench-collect=timing").ret == 0
    assert [one["case"]["workload"] for one in project.records.values()] == ["bench_a.BenchSum.bench_one"]


def test_own_name_patterns_are_respected(project):
    project.write(
        {
            "pytest.ini": "[pytest]\npython_functions = *_perf\n",
            "bench_a.py": "def sum_perf(bench):\n    bench(sum, [1])\n",
        }
    )
    result = project.bench()
    assert project.outcomes == {"passed": 1}
    result.stdout.no_fnmatch_line("*not collected*")


def test_ids_that_hold_an_address_are_refused_with_the_remedy(project):
    project.write(
        {
            "bench_a.py": """
import pytest

@pytest.mark.parametrize("f", [1, 2], ids=lambda n: f"{object()!r}"[1:-1])
def bench_f(bench, f):
    bench(abs, f)

def bench_good(bench):
    bench(abs, 1)
"""
        }
    )
    result = project.bench()
    assert project.outcomes == {"passed": 1, "failed": 2}
    result.stdout.fnmatch_lines(["*holds a memory address: give the parameters ids: pytest.param(*"])
    assert set(project.records) == {"bench_good"}


def test_equal_names_in_two_files_are_two_cases_and_equal_files_in_two_folders_are_refused(project):
    project.write({"one/bench_a.py": BENCH, "one/bench_b.py": BENCH, "two/bench_a.py": BENCH})
    result = project.bench("--import-mode=importlib")
    assert project.outcomes == {"passed": 2, "failed": 1}
    result.stdout.fnmatch_lines(["*is the case of one/bench_a.py::bench_sum already: rename one*"])
    records = [one for one in project.lines if one["kind"] == "record"]
    assert [one["case"]["workload"] for one in records] == ["bench_a.bench_sum", "bench_b.bench_sum"]
    assert len({one["case_id"] for one in records}) == 2


def test_parameters_that_json_cannot_hold_go_by_their_ids(project):
    project.write(
        {
            "bench_a.py": """
import pytest

@pytest.mark.parametrize("x", [float("inf"), float("nan"), (1, 2), None, True, "a/b"])
def bench_x(bench, x):
    bench(repr, x)
"""
        }
    )
    project.bench()
    assert project.outcomes == {"passed": 6}
    assert [one["case"]["params"]["x"] for one in project.records.values()] == ["inf", "nan", "x2", None, True, "a/b"]


def test_a_switch_named_batch_is_a_parameter_and_no_batch_size(project):
    project.write(
        {
            "bench_a.py": "import pytest\n"
            "@pytest.mark.parametrize('batch', [True, False, 4])\n"
            "def bench_one(bench, batch):\n    bench(sum, range(9))\n"
        }
    )
    assert project.bench("--bench-collect=timing").ret == 0
    cases = [one.case for one in read_run(project.files[0]).records]
    assert [(one.batch_size, dict(one.params)) for one in cases] == [
        (None, {"batch": True}),
        (None, {"batch": False}),
        (4, {}),
    ]


def test_an_id_that_the_child_does_not_have_is_said(project):
    project.write(
        {
            "bench_a.py": """
import os
import pytest

@pytest.mark.parametrize("n", [1], ids=[f"process{os.getpid()}"])
def bench_n(bench, n):
    bench(abs, n)
"""
        }
    )
    result = project.bench()
    assert project.outcomes == {"failed": 1}
    result.stdout.fnmatch_lines(["*its id differs between processes*"])
    assert next(iter(project.records.values()))["outcome"] == "failed"


def test_a_results_folder_that_comes_to_be_moves_no_root(project, tmp_path_factory):
    """pytest takes an option's value for a path as soon as it exists: a second child would find another root."""
    project.write({"tox.ini": "[pytest]\n", "bench_a/bench_a.py": DIES})
    results = tmp_path_factory.mktemp("elsewhere") / "results"
    result = project.pytester.runpytest_subprocess("--bench", "--bench-gpus=cpu", "--bench-results", str(results))
    assert result.parseoutcomes().get("failed") == 1, result.outlines
    records = {record.nodeid: record for file in results.rglob("*.jsonl") for record in read_run(file).records}
    assert [one.outcome != "failed" for one in records.values()] == [False, True]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no folder that shares only / with the project's")
def test_a_root_that_is_an_options_value_is_refused(project):
    project.write({"bench_a.py": DIES})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
        result = project.pytester.runpytest_subprocess("--bench", "--bench-gpus=cpu", "--bench-results", there)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*for the root of this project*--bench-results=DIR*"])


DIES = """
import os

def bench_dies(bench):
    bench(abs, 1)
    os._exit(3)

def bench_then(bench):
    bench(abs, 1)
"""
