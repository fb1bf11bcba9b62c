"""Cases that need a GPU, in a sweep without one."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    result = gpus.pytester.runpytest_inprocess("--bench", "--bench-quick", "--collect-only")
    assert "left out" not in result.stdout.str()
    assert sum("<Function" in line for line in result.outlines) == 42


def test_reasons_are_words_and_are_escaped(project):
    marked = '@pytest.mark.bench(needs_gpu="a\\x1b[31m")'
    project.pytester.makepyfile(bench_a=f"import pytest\n{marked}\ndef bench_a(bench): 0")
    assert "\x1b[31m" not in project.bench("--collect-only").stdout.str()
