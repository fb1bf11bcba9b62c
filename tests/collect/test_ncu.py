"""Nsight Compute on one case: the command, the file it leaves, and a typed reason for each way to fail."""

import os
import sys
import time
from pathlib import Path

import pytest

from joulemark.collect import ncu as collector
from joulemark.collect.ncu import find_ncu, run_ncu
from joulemark.errors import (
    CaseTimeout,
    CountersBusy,
    CountersUnavailable,
    CountersUnreadable,
    NotPermitted,
    NotSupported,
)
from joulemark.utilization.ncu_csv import read_export

ROWS = """"ID","Process ID","Kernel Name","Device","gpu__time_duration.sum","dram__bytes_read.sum"
"","","","","ns","byte"
"0","1","gemm","0","1,024","2,048"
"""


@pytest.fixture
def fake_ncu(tmp_path):
    """Writes an ``ncu`` that behaves as told: what goes into its log, on its output, and how it exits."""

    def make(log: str | None = ROWS, output: str = "", code: int = 0, does: str = "") -> str:
        path = tmp_path / "ncu"
        path.write_text(
            f"#!{sys.executable}\nimport sys, subprocess, time\nfrom pathlib import Path\n"
            f"log, text = {log!r}, {output!r}\n"
            "where = Path(sys.argv[sys.argv.index('--log-file') + 1])\n"
            f"{does}\n"
            "if log is not None: where.write_text('==PROF== Connected\\n' + log)\n"
            f"print(text)\nsys.exit({code})\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


def profile(ncu: str, tmp_path: Path, **options):
    return run_ncu(["python", "step.py"], tmp_path / "out.csv", **{"timeout_s": 20.0, "ncu": ncu} | options)


def test_what_it_leaves_is_read_by_the_reader(fake_ncu, tmp_path):
    found = profile(fake_ncu(), tmp_path)
    (launch,) = read_export(found.csv).launches
    assert launch.value("dram__bytes_read.sum") == 2048
    assert launch.value("gpu__time_duration.sum") == pytest.approx(1.024e-6)
    assert found.caches == "kept"
    assert found.wall_s > 0


def test_the_case_runs_as_it_is_and_nothing_distorts_it(fake_ncu, tmp_path):
    command = profile(fake_ncu(), tmp_path).command
    assert command[-2:] == ("python", "step.py")
    for option, value in (("--clock-control", "none"), ("--cache-control", "none"), ("--profile-from-start", "off")):
        assert command[command.index(option) + 1] == value
    assert command[command.index("--print-units") + 1] == "base"


def test_only_named_functions_are_profiled_on_request(fake_ncu, tmp_path):
    assert "--kernel-name" not in profile(fake_ncu(), tmp_path).command
    command = profile(fake_ncu(), tmp_path, functions=("gemm_a", "b$1")).command
    assert command[command.index("--kernel-name") + 1] == r"regex:^(gemm_a|b\$1)$"
    assert command[command.index("--kernel-name-base") + 1] == "function"
    assert command.index("--kernel-name") < command.index("--log-file")


def test_caches_are_flushed_on_request(fake_ncu, tmp_path):
    found = profile(fake_ncu(), tmp_path, flush_caches=True)
    assert found.command[found.command.index("--cache-control") + 1] == "all"
    assert found.caches == "flushed"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", NotPermitted),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", CountersBusy),
        ("==ERROR== Profiling is not supported on device 0", NotSupported),
        ("==WARNING== No kernels were profiled.", CountersUnreadable),
    ],
)
@pytest.mark.parametrize("stream", ["log", "output"])
@pytest.mark.parametrize("code", [0, 1])
def test_every_cause_has_its_type_and_its_remedy(fake_ncu, tmp_path, said, kind, stream, code):
    with pytest.raises(kind) as caught:
        profile(fake_ncu(**{"log": None, stream: said}, code=code), tmp_path)
    assert type(caught.value) is kind
    assert caught.value.remedy


def test_an_unknown_failure_tells_its_exit_code_and_ncus_words(fake_ncu, tmp_path):
    with pytest.raises(CountersUnreadable, match=r"exit code 9 .* bad option"):
        profile(fake_ncu(log=None, output="==ERROR== bad option", code=9), tmp_path)


def test_an_old_file_is_no_result(fake_ncu, tmp_path):
    (tmp_path / "out.csv").write_text(ROWS)
    with pytest.raises(CountersUnreadable):
        profile(fake_ncu(log=None), tmp_path)


def test_a_hang_is_killed_with_its_children(fake_ncu, tmp_path):
    mark = tmp_path / "pid"
    does = f"child = subprocess.Popen(['sleep', '60']); Path({str(mark)!r}).write_text(str(child.pid)); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(CaseTimeout, match=r"killed after 1\.5 s"):
        profile(fake_ncu(does=does), tmp_path, timeout_s=1.5)
    assert time.monotonic() - began < 10
    assert not running(int(mark.read_text()))


def running(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def test_no_nsight_compute_is_told_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "_PLACES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CountersUnavailable, match="not installed") as caught:
        find_ncu()
    assert "install Nsight Compute" in caught.value.remedy


def test_a_named_one_that_is_not_there_is_not_replaced(fake_ncu, tmp_path, monkeypatch):
    fake_ncu()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_ncu() == tmp_path / "ncu"
    with pytest.raises(CountersUnavailable, match="nowhere/ncu"):
        find_ncu("nowhere/ncu")


def test_the_newest_of_the_usual_places_is_found(tmp_path, monkeypatch):
    for version in ("2024.1", "2025.3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    monkeypatch.setattr(collector, "_PLACES", (f"{tmp_path}/*/ncu",))
    monkeypatch.setenv("PATH", "")
    assert find_ncu() == tmp_path / "2025.3" / "ncu"


def test_the_profiled_region_holds_the_work_and_ends_whatever_happens(monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    with collector.profiled_region():
        seen.append("work")
    assert seen == ["synchronize", "start", "work", "synchronize", "stop"]
    with pytest.raises(RuntimeError), collector.profiled_region():
        raise RuntimeError("CUDA error")
    assert seen[-1] == "stop"
