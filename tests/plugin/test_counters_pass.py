"""The counters pass behind the door: one process for all cases, and each step down the ladder with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from joulemark.errors import ConfigurationError
from joulemark.metrics import AMOUNTS, COUNTERS, LEVELS
from joulemark.plugin.options import BenchOptions

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schema" / "sweep.schema.json").read_text())
UUID = "GPU-5a3c0000-0000-4000-8000-000000000000"
BENCHES = """
import os
import sys
import time
from pathlib import Path

import pytest

@pytest.mark.parametrize("batch", [1, 2])
def bench_one(bench, batch):
    alone = next((one.split(":")[0] for one in sys.argv if one.startswith(("counters:", "timing:"))), "?")
    with Path("pids").open("a") as file:
        file.write(f"{alone} {os.getpid()} {os.environ.get('LD_PRELOAD')}\\n")
    bench(time.sleep, 0.003)
"""
DIES = """
import os, sys, time

def bench_dies(bench):
    if any(one.startswith("counters:") for one in sys.argv):
        os._exit(7)
    bench(time.sleep, 0.002)
"""
PM = {"rates": {"sm_active": 0.9, "issue_active": 0.25, "pipe_tensor": 0.5}}
BUILDS = """
import json, os, sys, time
import pytest

@pytest.mark.parametrize("batch", [1, 2])
def bench_one(bench, batch):
    kind = next(one.split(":")[0] for one in sys.argv if one.startswith(("counters:", "timing:")))
    end = time.monotonic() + 10  # a build that lasts until counters are being opened, if they are, beside it
    while not os.path.exists("opening") and time.monotonic() < end:
        time.sleep(1e-3)
    with open("built", "a") as file:
        file.write(json.dumps([kind, time.time()]) + "\\n")
    bench(time.sleep, 0.003)
"""
SLOW_TO_OPEN = """
import json, sys, time
import joulemark.testing

sys.modules["torch"] = None
real = joulemark.testing.counters_from_file

def counters_from_file(*args):
    begin = time.time()
    open("opening", "w").close()
    time.sleep(1.5)
    with open("opened", "a") as file:
        file.write(json.dumps([begin, time.time()]) + "\\n")
    return real(*args)

joulemark.testing.counters_from_file = counters_from_file
"""
LOOKS = """
import time
import pytest

@pytest.mark.bench(models=("lenet5",), batch_sizes=(1, 8), first_look={"batch_sizes": 8, "collect": ("counters",)})
def bench_looks(bench, joulemark_case):
    bench(time.sleep, 0.003)
"""
GPM = {"rates": {"sm_active": 0.8, "pipe_tensor": 0.4}}


@pytest.fixture
def on_gpu(project, monkeypatch):
    """Writes a machine with one simulated GPU whose counters are given."""

    def write(counters, bench=BENCHES):
        gpu = {"name": "NVIDIA H200", "uuid": UUID, "pci": "00000000:1B:00.0", "counters": counters}
        hidden = "import sys\nsys.modules['torch'] = None\n"  # it takes seconds to load, and there is no device for it
        project.write({"gpu.json": json.dumps({"gpus": [gpu]}), "bench_it.py": bench, "conftest.py": hidden})
        monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(project.path / "gpu.json"))
        return project

    return write


def run(project, *args):
    quick = ("--bench", "--bench-quick")
    return project.pytester.runpytest_inprocess(*quick, "--bench-collect=timing,counters", *args)


def values(record):
    return {name: one["value"] for name, one in record["metrics"].items()}


def test_one_process_counts_all_cases_and_times_none(on_gpu):
    project = on_gpu({"pm_sampling": PM, "gpm": GPM})
    result = run(project)
    assert result.ret == 0
    records = project.records
    assert len(records) == 2
    for record in records.values():
        jsonschema.validate(record, SCHEMA)
        assert values(record)["issue_slot_fraction"] == pytest.approx(0.25)
        assert record["metrics"]["sm_active_fraction"]["tier"] == "pm_sampling"
        assert record["metrics"]["sm_active_fraction"]["value"] == pytest.approx(0.9)
        assert {row["phase"] for row in record["tables"]["levels"]} == {"step"}
        assert record["notes"]["l2_fraction"] == "pm_sampling does not count it"
        assert set(COUNTERS) <= set(record["metrics"])
    first = project.lines[0]
    assert first["tiers"]["counters"] == "pm_sampling"
    assert "counters" not in first["notes"]
    seen = [line.split()[:2] for line in (project.path / "pids").read_text().splitlines()]
    assert [kind for kind, _ in seen] == ["timing", "counters", "timing", "counters"]
    assert len({pid for kind, pid in seen if kind == "counters"}) == 1
    assert len({pid for _, pid in seen}) == 2
    result.stdout.fnmatch_lines(["*counters: PM sampling, else NVML's GPM, in a process of their own*"])


@pytest.mark.parametrize(("given", "collected"), [((), True), (("--bench-collect=timing",), False)])
def test_a_first_look_collects_what_its_marker_says_unless_instruments_are_given(on_gpu, given, collected):
    project = on_gpu({"pm_sampling": PM}, LOOKS)
    arguments = ("--bench", "--bench-quick", *given)
    assert project.pytester.runpytest_inprocess(*arguments).ret == 0
    (record,) = project.records.values()
    assert record["case"]["batch_size"] == 8
    assert (values(record).get("issue_slot_fraction") is not None) is collected


def test_it_opens_beside_the_first_build_and_before_anything_is_timed(on_gpu):
    project = on_gpu({"pm_sampling": PM}, BUILDS)
    project.write({"conftest.py": SLOW_TO_OPEN})
    assert run(project).ret == 0
    (opening,) = [json.loads(line) for line in (project.path / "opened").read_text().splitlines()]
    built = [json.loads(line) for line in (project.path / "built").read_text().splitlines()]
    assert [kind for kind, _ in built] == ["timing", "counters"] * 2
    assert opening[0] < built[0][1] < opening[1]
    windows = [window for one in project.records.values() for window in one["measured_windows_utc"]]
    assert min(begin for begin, _ in windows) > opening[1]
    assert all(values(record)["sm_active_fraction"] == pytest.approx(0.9) for record in project.records.values())


def test_a_process_that_dies_while_it_opens_is_started_again_and_says_why(on_gpu):
    project = on_gpu({"pm_sampling": PM}, BUILDS)
    project.write({"conftest.py": SLOW_TO_OPEN.replace("time.sleep(1.5)", "import os; os._exit(9)")})
    assert run(project, "-k", "bench_one and 1").ret == 0
    (record,) = project.records.values()
    assert values(record)["host_time_s"] > 0
    assert "did not start (exit status 9)" in record["notes"]["sm_active_fraction"]


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("permission", "INSUFFICIENT_PRIVILEGES"),
        ("unsupported", "no such counters"),
        ("library", "no libcupti is installed"),
        ("busy", "HARDWARE_BUSY"),
    ],
)
def test_one_step_down_gives_gpms_columns_and_says_why(on_gpu, refusal, said):
    project = on_gpu({"pm_sampling": refusal, "gpm": GPM})
    result = run(project, "-k", "bench_one and 1")
    assert result.ret == 0
    (record,) = project.records.values()
    assert record["metrics"]["tensor_active_fraction"]["value"] == pytest.approx(0.4)
    assert record["metrics"]["tensor_active_fraction"]["tier"] == "gpm"
    assert record["metrics"]["issue_slot_fraction"]["value"] is None
    assert said in record["notes"]["issue_slot_fraction"]
    assert project.lines[0]["tiers"]["counters"] == "gpm"
    assert said in project.lines[0]["notes"]["counters"]
    assert "".join(said.split()) in "".join(result.stdout.str().split())


def test_at_the_foot_of_the_ladder_every_reason_is_there_and_the_rest_is_measured(on_gpu):
    project = on_gpu({"pm_sampling": "permission", "gpm": "unsupported"})
    result = run(project, "-k", "bench_one and 1")
    assert result.ret == 0
    (record,) = project.records.values()
    assert values(record)["host_time_s"] > 0
    for name in (*LEVELS, *AMOUNTS):
        assert record["metrics"][name]["value"] is None
        assert "pm_sampling: " in record["notes"][name]
        assert "gpm: this GPU has no such counters" in record["notes"][name]
    assert "NVreg_RestrictProfilingToAdminUsers" in record["notes"]["sm_active_fraction"]  # the remedy
    assert project.lines[0]["tiers"]["counters"] is None
    assert "no such counters" in project.lines[0]["notes"]["counters"]


def test_its_death_costs_its_own_figures_alone(on_gpu):
    project = on_gpu({"pm_sampling": PM}, DIES)
    run(project)
    record = project.records["bench_dies"]
    assert record["outcome"] in ("ok", "flagged")
    assert values(record)["host_time_s"] > 0
    assert "exit status 7" in record["notes"]["sm_active_fraction"]


def test_without_a_gpu_it_says_so(project):
    project.write({"bench_it.py": BENCHES})
    project.bench("--bench-collect=timing,counters", "-k", "bench_one and 1")
    (record,) = project.records.values()
    assert record["notes"]["sm_active_fraction"] == "counters: a CPU has no GPU counters"


def test_in_one_process_it_says_what_it_needs(on_gpu):
    project = on_gpu({"pm_sampling": PM})
    run(project, "--bench-inprocess", "-k", "bench_one and 1")
    (record,) = project.records.values()
    assert "--bench-inprocess" in record["notes"]["sm_active_fraction"]


def test_a_libcupti_of_ones_own_is_loaded_by_the_counting_process_alone(on_gpu):
    maps = Path("/proc/self/maps").read_text().split()
    libraries = [one for one in maps if one.startswith("/") and Path(one).name.startswith(("libm.so", "libm-"))]
    if not libraries:
        pytest.skip("no shared library that any process could load is at hand")
    project = on_gpu({"pm_sampling": PM})
    folder = project.path / "cupti"
    folder.mkdir()
    (folder / "libcupti.so.13").symlink_to(libraries[0])
    result = run(project, "--bench-cupti", "cupti", "-k", "bench_one and 1")
    assert result.ret == 0
    told = dict(line.split()[::2] for line in (project.path / "pids").read_text().splitlines())
    assert told == {"timing": "None", "counters": str(folder / "libcupti.so.13")}


@pytest.mark.parametrize("given", ["nowhere/libcupti.so", "."])
def test_a_libcupti_that_is_not_there_is_refused(project, given):
    config = project.pytester.parseconfig("--bench-cupti", given)
    with pytest.raises(ConfigurationError, match="where no libcupti is: pip install"):
        BenchOptions.from_pytest_config(config)


def test_a_path_that_the_loader_would_split_is_refused(project):
    project.write({"a b/libcupti.so.13": ""})
    config = project.pytester.parseconfig("--bench-cupti", "a b")
    with pytest.raises(ConfigurationError, match="no blank and no colon"):
        BenchOptions.from_pytest_config(config)
