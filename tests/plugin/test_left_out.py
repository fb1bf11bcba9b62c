"""Cases that a sweep does without: those that need a GPU where there is none, and those that nobody asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from joulemark.plugin.left_out import chooses
from joulemark.plugin.sweep import SweepMarker
from joulemark.records import Case

GPU_ONLY = """
    import pytest

    @pytest.mark.bench(needs_gpu="which launch CUDA kernels")
    @pytest.mark.parametrize("n", range(40))
    def bench_kernel(bench, n):
        if bench.device == "cpu":
            pytest.skip("kernels run on CUDA GPUs")

    @pytest.mark.bench(needs_gpu="which copies to a GPU")
    def bench_copy(bench):
        bench(int)
"""
PLAIN = "def bench_plain(bench): bench(int)"
DAYS = """
@pytest.mark.bench(campaign="which take days")
@pytest.mark.parametrize("n", range(5))
def bench_days(bench, n):
    assert n != 2
    bench(int)
"""
SWEPT = f"""
import pytest

@pytest.mark.bench(
    models=("lenet5", "resnet18"), batch_sizes=(1, 2, 4, 8), first_look={{"models": "lenet5", "batch_sizes": (1, 8)}}
)
def bench_grid(bench, workload):
    bench.step(workload)

{DAYS}"""
UNNAMED = "left out: 11 of 14 cases, unless asked for (by a path, an id, -k or -m; --bench-all takes all)"
NOT_NAMED = "bench_c.py: 6 cases, further cells of its grid; 5 cases, which take days"
LINE = "bench_a.py: 40 cases, which launch CUDA kernels; 1 case, which copies to a GPU"


@pytest.fixture
def gpus(project):
    project.pytester.makepyfile(bench_a=GPU_ONLY, bench_b=PLAIN)
    return project


def test_a_sweep_without_a_gpu_names_them_in_a_line_per_file_and_measures_the_others(gpus):
    result = gpus.bench()
    assert result.ret == 0
    assert gpus.outcomes == {"passed": 1, "deselected": 41}
    lines = [line.strip() for line in result.outlines]
    first = lines.index("left out: these cases need a GPU (--bench-all lists them)")
    assert lines[first + 1] == LINE
    assert sum("bench_kernel" in line or "kernels" in line for line in lines) == 1
    assert list(gpus.records) == ["bench_plain"]
    assert gpus.end["completed"]
    assert gpus.lines[0]["notes"]["left_out"] == f"no GPU; {LINE}"


def test_a_case_that_is_asked_for_has_its_typed_record(gpus):
    result = gpus.bench("bench_a.py::bench_kernel[3]", "bench_b.py")
    assert result.ret == 0
    assert gpus.records["bench_kernel[3]"]["outcome"] == "unsupported"
    assert gpus.records["bench_kernel[3]"]["reason"] == "kernels run on CUDA GPUs"
    assert "left_out" not in gpus.lines[0]["notes"]


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        (("--bench-all",), 42),
        (("-k", "kernel"), 40),
        (("-m", "bench"), 41),
        (("bench_a.py::bench_kernel",), 40),
        (("bench_b.py",), 1),
    ],
)
def test_what_is_asked_for_is_kept(gpus, arguments, selected):
    result = gpus.bench("--collect-only", *arguments)
    assert "left out" not in result.stdout.str()
    assert sum("<Function" in line for line in result.outlines) == selected


def test_a_file_of_nothing_else_says_so_and_exits_5(gpus):
    result = gpus.bench("bench_a.py")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines([f"*{LINE}", "joulemark: nothing was measured: its 41 cases need a GPU; --bench-all *"])
    assert not gpus.files


def test_with_a_gpu_nothing_is_left_out(gpus, monkeypatch):
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(Path(__file__).parents[1] / "data/nvml/steady_300w.json"))
    result = gpus.pytester.runpytest_inprocess("--bench", "--collect-only")
    assert "left out" not in result.stdout.str()
    assert sum("<Function" in line for line in result.outlines) == 42


def test_reasons_are_words_and_are_escaped(project):
    marked = '@pytest.mark.bench(needs_gpu="a\\x1b[31m")'
    project.pytester.makepyfile(bench_a=f"import pytest\n{marked}\ndef bench_a(bench): 0")
    assert "\x1b[31m" not in project.bench("--collect-only").stdout.str()


@pytest.fixture
def swept(project):
    project.pytester.makepyfile(bench_c=SWEPT, bench_d=PLAIN)
    return project


def listed(result):
    return [line.strip()[len("<Function ") : -1] for line in result.outlines if "<Function" in line]


def test_a_sweep_that_names_nothing_is_a_first_look(swept):
    result = swept.bench("--collect-only")
    grid = [f"bench_grid[lenet5-inference-fp32-eager-b{batch}-channels_last-cpu]" for batch in (1, 8)]
    assert listed(result) == [*grid, "bench_plain"]
    result.stdout.fnmatch_lines(["*14 items / 11 deselected / 3 selected", UNNAMED, f"  {NOT_NAMED}"])


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        (("--bench-all",), 14),
        (("bench_c.py",), 13),
        ((".",), 14),
        (("bench_c.py::bench_days",), 5),
        (("-k", "days or plain"), 6),
        (("-m", "bench"), 13),
        (("-k", "not plain"), 2),
        (("-m", "not slow"), 3),
        (("--bench-models=lenet5",), 5),
        (("--bench-dtypes=bf16",), 9),
        (("--bench-quick", "--bench-budget=60", "--bench-collect=timing"), 3),
    ],
)
def test_what_is_named_is_whole_and_campaigns_want_a_name(swept, arguments, selected):
    assert len(listed(swept.bench("--collect-only", *arguments))) == selected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("", False),
        ("days", True),
        ("not days", False),
        ("resnet50 and not b64", True),
        ("not (slow or days)", False),
        ("bench(campaign='x')", True),
        ("and and", True),
    ],
)
def test_an_expression_chooses_where_it_does_not_fit_everything_else(expression, expected):
    assert chooses(expression) is expected


def test_axes_for_the_cpu_are_taken_whole_and_by_a_gpu_the_first_look(project, monkeypatch):
    text = SWEPT.replace("batch_sizes=(1, 2, 4, 8),", 'batch_sizes=(1, 2, 4, 8), cpu={"batch_sizes": (2, 4)},')
    project.pytester.makepyfile(bench_c=text)
    assert len(listed(project.bench("--collect-only"))) == 4
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(Path(__file__).parents[1] / "data/nvml/steady_300w.json"))
    result = project.pytester.runpytest_inprocess("--bench", "--collect-only")
    assert [name.split("-")[4] for name in listed(result)] == ["b1", "b8"]


@pytest.mark.parametrize(
    ("gpu_model", "batch", "cpu", "taken", "collected"),
    [
        ("nvidia-h200", 8, None, True, ("counters",)),
        ("nvidia-h200", 4, None, False, ()),
        ("cpu", 8, None, True, ("counters",)),
        ("cpu", 4, {"batch_sizes": (4,)}, True, ()),
    ],
)
def test_a_first_look_says_nothing_of_the_axes_for_a_cpu(gpu_model, batch, cpu, taken, collected):
    marker = SweepMarker(first_look={"batch_sizes": 8, "collect": "counters"}, cpu=cpu)
    case = Case("lenet5", "inference", batch_size=batch, gpu_model=gpu_model)
    assert marker.takes_first(case) is taken
    assert marker.first_instruments(case) == collected


def test_what_failed_last_and_what_a_resumed_file_holds_was_asked_for(swept):
    swept.bench("bench_c.py::bench_days[2]", "bench_c.py::bench_days[3]")
    assert swept.outcomes == {"passed": 1, "failed": 1}
    (campaign,) = swept.files
    assert listed(swept.bench("--collect-only", "--lf")) == ["bench_days[2]"]
    result = swept.bench("--collect-only", "--bench-resume", str(campaign))
    assert len(listed(result)) == 14
    assert "left out" not in result.stdout.str()


def test_a_first_look_is_resumed_as_one_and_its_file_says_what_it_left_out(swept):
    swept.pytester.makepyfile(bench_c=f"import pytest\n{DAYS}")
    assert swept.bench().ret == 0
    assert list(swept.records) == ["bench_plain"]
    assert swept.lines[0]["notes"]["left_out"] == "not named; bench_c.py: 5 cases, which take days"
    assert listed(swept.bench("--collect-only", "--bench-resume", str(swept.files[0]))) == ["bench_plain"]


def test_campaigns_alone_say_so_and_exit_5(swept):
    swept.path.joinpath("bench_d.py").unlink()
    swept.pytester.makepyfile(bench_c=f"import pytest\n{DAYS}")
    result = swept.bench()
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["joulemark: nothing was measured: all cases are left out, *; --bench-all takes them"])
