"""The options, read once into a frozen record."""

from __future__ import annotations

import dataclasses

import pytest

from joulemark.errors import ConfigurationError
from joulemark.plugin.options import BenchOptions
from joulemark.plugin.sweep import CPU, SweepMarker, Target, cells, describe


def options(project, *args):
    return BenchOptions.from_pytest_config(project.pytester.parseconfig(*args))


def test_defaults(project):
    read = options(project)
    assert read == dataclasses.replace(
        BenchOptions(), results=project.path / ".joulemark", rootdir=project.path, enabled=False
    )
    assert (read.timeout_s, read.processes, read.isolate) == (900.0, 1, True)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1:16", (1, 2, 4, 8, 16)), ("8,1,8", (1, 8)), ("3:20,1", (1, 3, 6, 12)), ("7:7", (7,)), (" 4 , 2 ", (2, 4))],
)
def test_batch_sizes(project, text, sizes):
    assert options(project, f"--bench-batch-sizes={text}").batch_sizes == sizes


@pytest.mark.parametrize("text", ["0", "-1", "a", "8:4", "1:", ":8", "1.5", "1:2:4"])
def test_batch_sizes_that_cannot_be(project, text):
    with pytest.raises(ConfigurationError, match="--bench-batch-sizes got"):
        options(project, f"--bench-batch-sizes={text}")


@pytest.mark.parametrize("name", ["budget", "timeout", "processes"])
@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "x"])
def test_numbers_that_cannot_be(project, name, text):
    with pytest.raises(ConfigurationError, match=f"--bench-{name} got"):
        options(project, f"--bench-{name}={text}")


def test_half_a_process_cannot_be(project):
    with pytest.raises(ConfigurationError, match=r"--bench-processes got '1\.5'"):
        options(project, "--bench-processes=1.5")


def test_the_command_line_wins_over_the_ini_file(project):
    project.write({"pytest.ini": "[pytest]\nbench_dtypes = bf16,fp16\nbench_timeout = 5\nbench_strict = true\n"})
    read = options(project, "--bench-dtypes=fp32")
    assert (read.dtypes, read.timeout_s, read.strict) == (("fp32",), 5.0, True)
    assert options(project).dtypes == ("bf16", "fp16")


@pytest.mark.parametrize("flag", ["--pdb", "--trace", "--bench-inprocess"])
def test_a_debugger_needs_the_process_itself(project, flag):
    assert options(project, flag).isolate is False


def test_every_option_has_a_name_of_its_own_and_a_line_of_help(project):
    parser = project.pytester.parseconfig()._parser
    (group,) = (one for one in parser._groups if one.name == "joulemark")
    assert len(group.options) > 15
    for option in group.options:
        assert all(name.startswith("--bench") for name in option.names())
        assert option.dest.startswith("joulemark_")
        assert option.attrs()["help"]


GPU = Target("GPU-1", "nvidia-h200", "nvidia-h200", "NVIDIA H200")


def test_a_marker_may_say_something_else_for_the_cpu():
    marker = SweepMarker.read(
        [pytest.mark.bench(batch_sizes=8).mark, pytest.mark.bench(batch_sizes=4, cpu={"dtypes": "fp32"}).mark]
    )
    assert marker.batch_sizes == (8,)
    assert marker.on(GPU).dtypes == ("fp32",)
    assert SweepMarker(dtypes=("bf16",), cpu={"dtypes": "fp32"}).on(GPU).dtypes == ("bf16",)
    assert SweepMarker(dtypes=("bf16",), cpu={"dtypes": "fp32"}).on(CPU).dtypes == ("fp32",)


def test_cells_are_series_with_rising_batches_of_the_phases_that_a_model_has():
    marker = SweepMarker(("lenet5", "gpt2_small"), ("inference", "decode"), (8, 1), ("fp32", "bf16"))
    found = [case for case, _ in cells("bench_x", marker, BenchOptions(), [CPU, GPU], {})]
    assert {(case.workload, case.phase) for case in found} == {("lenet5", "inference"), ("gpt2_small", "decode")}
    assert len(found) == 2 * 2 * 2 * 2
    assert [case.batch_size for case in found] == [1, 8] * 8
    assert {case.layout for case in found if case.workload == "gpt2_small"} == {"contiguous"}
    assert {case.gpu_model for case in found} == {"cpu", "nvidia-h200"}
    assert len({case.case_id for case in found}) == len(found)


def test_batch_sizes_may_differ_by_model():
    marker = SweepMarker.read(
        [pytest.mark.bench(models=("lenet5", "resnet18"), batch_sizes={"lenet5": (4096, 1), "*": (2,)}).mark]
    )
    found = [(case.workload, case.batch_size) for case, _ in cells("bench_x", marker, BenchOptions(), [GPU], {})]
    assert found == [("lenet5", 1), ("lenet5", 4096), ("resnet18", 2)]
    asked = cells("bench_x", marker, BenchOptions(models=("vgg16", "lenet5"), batch_sizes=(8,)), [GPU], {})
    assert [case.batch_size for case, _ in asked] == [8, 8]
    with pytest.raises(ConfigurationError, match="no batch_sizes for 'resnet18'"):
        cells("bench_x", SweepMarker(("resnet18",), batch_sizes={"lenet5": (1,)}), BenchOptions(), [GPU], {})


def test_options_win_over_the_marker():
    asked = BenchOptions(models=("resnet18",), batch_sizes=(2,), dtypes=("fp16",), modes=("graph",), inputs=("pinned",))
    ((case, target),) = cells("bench_x", SweepMarker(("lenet5",)), asked, [GPU], {})
    assert (case.workload, case.batch_size, case.dtype, case.mode, case.input) == (
        "resnet18", 2, "fp16", "graph", "pinned",
    )  # fmt: skip
    assert target is GPU


def test_a_model_that_does_not_exist():
    with pytest.raises(ConfigurationError, match="resnet51"):
        describe("resnet51", {})


def test_a_slow_first_case_does_not_starve_the_next_ones():
    from types import SimpleNamespace

    from joulemark.plugin.budget import Budget
    from joulemark.records import Case, Record

    def record(total_s, measured_s):
        return Record(Case("w"), "r", "ok", "e", window_utc=(0.0, total_s), measured_windows_utc=((0.0, measured_s),))

    sink = SimpleNamespace(records=[record(11.0, 3.0), *(record(4.0, 3.0) for _ in range(4))])
    assert Budget(None, sink).overhead_s() == 1.0
    sink.records = [record(11.0, 3.0)]
    assert Budget(None, sink).overhead_s() == 1.0


def test_the_baseline_has_an_ini_twin(project):
    project.pytester.makeini("[pytest]\nbench_baseline = latest\n")
    assert options(project).baseline == "latest"
    assert options(project, "--bench-baseline=old.jsonl").baseline == "old.jsonl"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--bench-cluster=slurm"], "it takes ray, or ray://host:port"),
        (["--bench-cluster=ray://"], "it takes ray, or ray://host:port"),
        (["--bench-cluster=ray", "--bench-world-size=1,2"], "ranks of one case share a host"),
        (["--bench-cluster=ray", "--bench-keep-traces"], "leave one of the two out"),
        (["--bench-cluster=ray", "--bench-inprocess"], "leave one of the two out"),
    ],
)
def test_what_a_cluster_does_not_go_with(project, args, said):
    with pytest.raises(ConfigurationError, match="--bench-cluster got") as caught:
        BenchOptions.from_pytest_config(project.pytester.parseconfig(*args))
    assert said in str(caught.value)


def test_a_cluster_is_the_parents_business(project):
    def read(*args):
        return BenchOptions.from_pytest_config(project.pytester.parseconfig(*args)).cluster

    assert read("--bench-cluster=ray") == "auto"
    assert read("--bench-cluster=ray://head:10001") == "ray://head:10001"
    assert read("--bench-cluster=ray", "--bench-worker=timing:answers") is None
    assert read() is None
