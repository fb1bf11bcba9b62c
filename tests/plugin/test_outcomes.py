"""Every outcome of a case: in the file, in the table, in JUnit and in the exit status."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest


def outcomes(project):
    return {name: one["outcome"].replace("flagged", "ok") for name, one in project.records.items()}


def junit(project):
    """Properties of the test cases of junit.xml, by the case's name."""
    return {
        case.get("name"): {one.get("name"): one.get("value") for one in case.iter("property")}
        for case in ElementTree.parse(project.path / "junit.xml").iter("testcase")
    }


def test_a_batch_that_does_not_fit_ends_its_series_only(project):
    project.copy("oom_sweep")
    result = project.bench("--junitxml=junit.xml", "--bench-report=sweep.json", "--bench-report=sweep.html")
    assert result.ret == 0
    assert outcomes(project) == {
        "test_sweep[1]": "ok",
        "test_sweep[8]": "ok",
        "test_sweep[64]": "oom",
        "test_sweep[128]": "oom",
        "test_sweep[16]": "ok",
        "test_sweep[4]": "ok",
    }
    measured = [one for one in project.records.values() if one["outcome"] != "oom"]
    assert all(one["metrics"]["host_time_s"]["value"] > 0 for one in measured)
    too_big = project.records["test_sweep[128]"]
    assert too_big["reason"] == "not tried: batch 64 of this series did not fit"
    assert too_big["metrics"]["host_time_s"]["value"] is None
    assert "did not fit" in too_big["notes"]["host_time_s"]
    assert project.end["completed"] is True
    result.stdout.fnmatch_lines(["*test_sweep*64*n/a*OOM*", "*not tried: batch 64*"])
    assert '"oom"' in (project.path / "sweep.json").read_text()
    page = (project.path / "sweep.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "not tried: batch 64 of this series did not fit" in page
    said = list(junit(project).values())
    assert [one["outcome"].replace("flagged", "ok") for one in said] == ["ok", "ok", "oom", "oom", "ok", "ok"]
    for one, record in zip(said, project.records.values(), strict=True):
        figure = record["metrics"]["host_time_s"]
        assert one["case_id"] == record["case_id"]
        assert one["gpu_model"] == "cpu"
        if record["outcome"] == "oom":
            assert one["reason"] == record["reason"]
            assert "host_time_s" not in one
        else:
            assert float(one["host_time_s"]) == figure["value"]
            assert [float(one[f"host_time_s_{end}"]) for end in ("lo", "hi")] == figure["interval"]
            assert "energy_per_item_j" not in one or record["metrics"]["energy_per_item_j"]["value"] is not None


MIXED = """
import sys
import warnings
import pytest
from joulemark.errors import Unsupported

class OutOfMemoryError(RuntimeError):
    pass

@pytest.mark.parametrize("batch", [1, 2])
def bench_memory(bench, batch):
    ballast = bytearray(300 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    def run():
        if batch == 1:
            raise MemoryError
    bench(run)

def bench_small(bench):
    bench(abs, 1)

def bench_oom_later(bench):
    bench(abs, 1)
    try:
        raise OutOfMemoryError("no room")
    except OutOfMemoryError as error:
        raise ValueError("wrapped") from error

def bench_raises(bench):
    print("said before it failed")
    bench(int, "x")

def bench_skips(bench):
    pytest.skip("no tensor cores")

def bench_unsupported(bench):
    raise Unsupported("fp8 needs sm_89", "choose bf16")

def bench_never(bench):
    pass

def bench_asserts(bench):
    assert bench(abs, -1) == 2

def bench_warns(bench):
    def run():
        warnings.warn("torch.jit is deprecated", DeprecationWarning)
    bench(run)

@pytest.fixture
def falls():
    yield
    raise OSError("teardown")

def bench_teardown(bench, falls):
    bench(abs, 1)

@pytest.mark.skip(reason="of its own")
def bench_marked(bench):
    bench(abs, 1)

@pytest.mark.xfail(strict=True)
def bench_expected(bench):
    bench(int, "x")

def bench_twice(bench):
    bench(abs, 1)
    bench(abs, 1)

def bench_exits(bench):
    sys.exit(3)

def bench_no_rounds(bench):
    bench.pedantic(abs, (1,), rounds=0)

class TestGroup:
    def bench_method(self, bench):
        bench(abs, 1)
"""


def test_each_outcome_where_warnings_are_errors(project):
    project.write({"bench_a.py": MIXED, "pytest.ini": "[pytest]\nfilterwarnings = error\n"})
    result = project.bench()
    assert result.ret == 1
    assert outcomes(project) == {
        "bench_memory[1]": "oom",
        "bench_memory[2]": "oom",
        "bench_small": "ok",
        "bench_oom_later": "oom",
        "bench_raises": "failed",
        "bench_skips": "unsupported",
        "bench_unsupported": "unsupported",
        "bench_never": "failed",
        "bench_asserts": "failed",
        "bench_warns": "ok",
        "bench_teardown": "failed",
        "bench_expected": "failed",
        "bench_twice": "failed",
        "bench_exits": "failed",
        "bench_no_rounds": "failed",
        "bench_method": "ok",
    }
    records = project.records
    # The big case before it is gone from memory, although its exception held it.
    assert records["bench_small"]["metrics"]["peak_memory_bytes"]["value"] < 200 << 20
    assert records["bench_raises"]["reason"].startswith("ValueError: invalid literal")
    assert records["bench_skips"]["reason"] == "no tensor cores"
    assert records["bench_unsupported"]["reason"] == "fp8 needs sm_89: choose bf16"
    assert "never measured" in records["bench_never"]["reason"]
    assert records["bench_asserts"]["metrics"]["host_time_s"]["value"] > 0
    assert records["bench_teardown"]["reason"] == "OSError: teardown"
    assert [one["code"] for one in records["bench_warns"]["findings"] if one["code"] == "warning"] == ["warning"]
    assert "used twice" in records["bench_twice"]["reason"]
    assert "rounds=0" in records["bench_no_rounds"]["reason"]
    assert records["bench_method"]["case"]["workload"] == "bench_a.TestGroup.bench_method"
    for one in records.values():
        assert all(name in one["notes"] for name, value in one["metrics"].items() if value["value"] is None)
    assert project.end["completed"] is True
    result.stdout.fnmatch_lines(["*said before it failed*"])
    result.stdout.fnmatch_lines(["*bench_a.py:*ValueError*"])
    result.stdout.fnmatch_lines(["*torch.jit is deprecated*"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_strict_fails_what_is_out_of_memory_or_flagged(project):
    project.write(
        {
            "bench_a.py": """
import time
def bench_oom(bench):
    raise MemoryError

def bench_unsteady(bench):
    pauses = iter([0.001, 0.003] * 5000)
    bench.pedantic(lambda: time.sleep(next(pauses)), rounds=20)
"""
        }
    )
    result = project.bench("--bench-strict")
    assert result.ret == 1
    assert {one["outcome"] for one in project.records.values()} == {"oom", "flagged"}
    result.stdout.fnmatch_lines(["*--bench-strict: oom: out of memory", "*--bench-strict: flagged: *varies*"])


def test_a_run_that_measured_nothing_says_so_and_exits_5(project):
    project.write({"bench_a.py": "import pytest\n\ndef bench_x(bench):\n    pytest.skip('not here')\n"})
    result = project.bench()
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*not here*"])
    result = project.bench("-k", "nothing_so")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["joulemark: nothing was measured: no case fits -k 'nothing_so'; *--collect-only*"])
    (project.path / "bench_a.py").write_text("")
    result = project.bench()
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["joulemark: nothing was measured: no function that takes the fixture bench *"])


def test_a_slow_first_call_per_shape_stays_out_of_the_samples(project):
    project.copy("compile_like")
    project.bench("-k", "not 256 and not 512")
    assert project.outcomes["passed"] == 8
    rounds = []
    for one in project.records.values():
        samples = one["samples"]["host_time_s"]
        rounds.append(len(samples))
        assert max(samples) < 0.1
        assert 0.002 <= one["metrics"]["host_time_s"]["value"] < 0.004
        assert one["metrics"]["warmup_s"]["value"] > 0.3
    assert len(rounds) == 8
    assert min(rounds) >= 10
    assert max(rounds) <= 5 * min(rounds)


def test_a_sweep_whose_file_cannot_be_written_ends_at_once(project):
    taken = "import pathlib\n\ndef pytest_collection_finish():\n    pathlib.Path('results').write_text('a file')\n"
    project.write({"bench_a.py": MIXED, "conftest.py": taken})
    result = project.bench("--bench-results=results", "-k", "small or raises")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert "cannot write the result file" in text
    assert "--bench-results" in text
    assert "--bench-resume" not in text  # there is no file to go on with
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    assert "bench_raises" not in text


def test_control_codes_of_a_failure_do_not_reach_the_terminal(project):
    project.write({"bench_a.py": "def bench_x(bench):\n    raise ValueError('a\\x1b[31mb')\n"})
    result = project.bench()
    assert result.ret == 1
    assert "\x1b[31mb" not in result.stdout.str()
    assert r"ValueError: a\x1b[31mb" in result.stdout.str()


def test_junit_names_what_was_found(project):
    warns = "import warnings\n\ndef bench_one(bench):\n    bench(warnings.warn, 'slow path')\n"
    project.write({"bench_one.py": warns})
    assert project.bench("--junitxml=junit.xml").ret == 0
    (said,) = junit(project).values()
    (record,) = project.records.values()
    assert "warning" in {one["code"] for one in record["findings"]}
    assert said["findings"].split() == list(dict.fromkeys(one["code"] for one in record["findings"]))
    assert {name for name, one in record["metrics"].items() if one["value"] is not None} <= said.keys()
    assert not {name for name, one in record["metrics"].items() if one["value"] is None} & said.keys()


def test_a_failure_expected_in_the_body_is_no_failure(project):
    project.write({"bench_a.py": "import pytest\n\ndef bench_one(bench):\n    pytest.xfail('not yet | on this GPU')\n"})
    result = project.bench()
    assert result.parseoutcomes() == {"xfailed": 1}
    assert project.records["bench_one"]["outcome"] == "unsupported"
    assert project.records["bench_one"]["reason"] == "not yet | on this GPU"


def test_a_step_of_half_an_item_is_refused(project):
    project.write({"bench_a.py": "def bench_one(bench):\n    bench.step(lambda: 1, items=2.5)\n"})
    assert project.bench().ret == 1
    assert project.records["bench_one"]["reason"].endswith("items=2.5: a step processes a whole number of items")


def test_a_folder_that_cannot_hold_results_is_named_before_anything_is_measured(project):
    project.write({"bench_a.py": "def bench_one(bench):\n    bench(abs, 1)\n", "taken": "a file"})
    result = project.bench("--bench-results=taken/deeper")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*results cannot be stored in */taken/deeper/cpu: */taken is no folder*"])


def test_a_file_that_cannot_be_collected_is_why_nothing_was_measured(project):
    project.write({"bench_a.py": "import nothing_of_this_name\n"})
    result = project.bench()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["joulemark: nothing was measured: a file cannot be collected, as the errors *"])


def test_an_interrupt_before_anything_was_measured_says_so(project):
    project.write({"bench_a.py": "def bench_a(bench):\n    raise KeyboardInterrupt\n"})
    result = project.pytest("--bench", "--bench-gpus=cpu", "--bench-inprocess")
    assert result.ret == 2
    result.stdout.fnmatch_lines(["joulemark: nothing was measured: interrupted before the first case was done"])


def test_a_report_that_cannot_be_written_costs_nothing_else(project):
    """Its place is fine when the session begins, and is a folder when it ends."""
    late = "import pathlib\n\ndef bench_late(bench):\n    pathlib.Path('a.md').mkdir()\n    bench(abs, 1)\n"
    project.write({"bench_late.py": late})
    result = project.bench("--bench-inprocess", "--bench-report=a.md", "--bench-report=b.md")
    assert result.ret == 4
    result.stdout.fnmatch_lines(["*bench_late*", "joulemark: *a.md is a folder*", "report: *b.md", "records: *.jsonl"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert "bench_late" in (project.path / "b.md").read_text()
    assert project.end["completed"] is True
