"""Sweeps over several GPUs, simulated: each row is its own GPU's, and under no other name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from joulemark.collect.power import open_power
from joulemark.plugin.instruments import settling_s

SCENARIO = Path(__file__).parents[1] / "data" / "nvml" / "four_unlike_gpus.json"
UUIDS = [one["uuid"] for one in json.loads(SCENARIO.read_text())["gpus"]]
FILES = {
    # Without torch there is no device clock, but NVML's sensors answer.
    "conftest.py": "import sys\nsys.modules['torch'] = None\n",
    "bench_a.py": """
import os
import time

def bench_sleep(bench):
    assert bench.target.uuid == os.environ["CUDA_VISIBLE_DEVICES"]
    bench(time.sleep, 0.002)
""",
}


@pytest.fixture
def gpus(project, monkeypatch):
    """A project on a machine with an L4 (40 W), two H100 (310 W, 520 W) and an A100 (150 W)."""
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(SCENARIO))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    project.write(FILES)
    return project


def run(project, *args):
    return project.pytester.runpytest_inprocess("--bench", "--bench-quick", *args)


def test_every_gpu_has_its_own_rows_and_its_own_power(gpus):
    result = gpus.pytest("--bench", "--bench-quick", f"--bench-gpus={UUIDS[1]},{UUIDS[2]}", "--benchmark-json=out.json")
    assert result.ret == 0
    records = [one for one in gpus.lines if one["kind"] == "record"]
    assert [one["gpu_uuid"] for one in records] == UUIDS[1:3]
    assert [one["metrics"]["power_w"]["value"] for one in records] == pytest.approx([310, 520], rel=0.03)
    assert [one["case"]["gpu_model"] for one in records] == [
        "nvidia-h100-80gb-hbm3-a1b21111",
        "nvidia-h100-80gb-hbm3-a1b22222",
    ]
    assert len({one["case_id"] for one in records}) == 2
    assert all("torch is not installed" in one["notes"]["device_time_s"] for one in records)
    assert gpus.lines[0]["facts"]["simulated"] is True
    assert gpus.lines[0]["tiers"]["timing"] == "host_clock"
    result.stdout.fnmatch_lines(
        [
            f"*NVIDIA H100 80GB HBM3 ({UUIDS[1]}): driver 570.124.06, SM clock up to*power limit*ECC*",
            "*these GPUs are simulated*",
            "*power: nvml_energy_counter beside the workload*",
        ]
    )
    stored = json.loads((gpus.path / "out.json").read_text())
    assert stored["machine_info"]["joulemark"]["driver"] == "570.124.06"
    assert [one["extra_info"]["gpu_uuid"] for one in stored["benchmarks"]] == UUIDS[1:3]


def test_one_of_each_model_and_no_uuid_where_it_is_not_wanted(gpus):
    result = run(gpus, "--bench-anonymize", "--bench-collect=timing", "--bench-gpus=all")
    assert result.ret == 0
    text = gpus.files[0].read_text()
    assert not any(part in text for uuid in UUIDS for part in (uuid, uuid.split("-")[1]))
    shown = [one["gpu_uuid"] for one in gpus.lines if one["kind"] == "record"]
    assert len(set(shown)) == 4
    assert all(one.startswith("GPU-") for one in shown)
    gpus.files[0].unlink()
    result = run(gpus, "--collect-only", "-q")
    listed = [line for line in result.outlines if "::" in line]
    assert listed == [
        "bench_a.py::bench_sleep[nvidia-l4]",
        "bench_a.py::bench_sleep[nvidia-h100-80gb-hbm3]",
        "bench_a.py::bench_sleep[nvidia-a100-sxm4-80gb]",
    ]


def test_a_hidden_machine_measures_the_cpu_and_says_so(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run(gpus, "--collect-only")
    result.stdout.fnmatch_lines(["*CPU: no GPU is measured (CUDA_VISIBLE_DEVICES hides all)"])


def test_numbers_over_unlike_gpus_are_doubted_and_uuids_are_not(gpus, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    result = gpus.pytest("--bench", "--bench-quick", "--bench-collect=timing", "--bench-gpus=all")
    assert result.ret == 0
    assert not any(f["code"] == "gpu_unverified" for one in gpus.lines for f in one.get("findings", ()))
    gpus.files[0].unlink()
    gpus.pytest("--bench", "--bench-quick", "--bench-collect=timing", "--bench-gpus=1")
    (record,) = [one for one in gpus.lines if one["kind"] == "record"]
    assert record["outcome"] == "flagged"
    assert "gpu_unverified" in {one["code"] for one in record["findings"]}


def test_a_gpu_that_others_use_flags_what_is_measured_on_it(gpus, tmp_path, monkeypatch):
    """Its power and its counters are theirs too."""
    scenario = json.loads(SCENARIO.read_text())
    scenario["gpus"][1]["processes"] = [4711, 4712]
    path = tmp_path / "shared.json"
    path.write_text(json.dumps(scenario))
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
    arguments = ("--bench", "--bench-quick", "--bench-collect=timing", f"--bench-gpus={UUIDS[1]},{UUIDS[3]}")
    assert gpus.pytest(*arguments).ret == 0
    shared, alone = [one for one in gpus.lines if one["kind"] == "record"]
    (found,) = [one for one in shared["findings"] if one["code"] == "gpu_shared"]
    assert "2 other processes held a context" in found["message"]
    assert "pid 4711, 4712" in found["message"]
    assert shared["outcome"] == "flagged"
    assert not any(one["code"] == "gpu_shared" for one in alone["findings"])
    gpus.files[0].unlink()
    assert run(gpus, "--bench-inprocess", "--bench-collect=timing", f"--bench-gpus={UUIDS[1]}").ret == 0
    (record,) = [one for one in gpus.lines if one["kind"] == "record"]
    assert "gpu_shared" in [one["code"] for one in record["findings"]]


def test_one_process_measures_one_gpu(gpus):
    result = run(gpus, "--bench-inprocess", f"--bench-gpus={UUIDS[1]},{UUIDS[2]}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*2 GPUs, and one process measures one: choose one of them*"])
    assert gpus.files == []
    listed = [line for line in run(gpus, "--bench-inprocess", "--collect-only", "-q").outlines if "::" in line]
    assert listed == ["bench_a.py::bench_sleep"]


@pytest.mark.parametrize("mask", [None, "2,0"])
def test_a_session_in_process_gives_the_mask_back(gpus, monkeypatch, mask):
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    run(gpus, "--bench-inprocess")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == mask


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("init_driver_library_mismatch", "version mismatch (NVML error 18)"),
        ("init_library_not_found", "Shared Library Not Found (NVML error 12)"),
        ("init_driver_not_loaded", "Driver Not Loaded (NVML error 9)"),
        ("init_blocked_by_os", "blocked by the operating system (NVML error 17)"),
        ("init_unknown", "Unknown Error (NVML error 999)"),
    ],
)
def test_energy_is_missing_for_the_reason_that_nvml_gave(project, monkeypatch, scenario, said):
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(SCENARIO.with_name(f"{scenario}.json")))
    # The CPU's own energy counters must not answer in the GPU's place.
    hidden = "import pathlib\nimport joulemark.collect.rapl\njoulemark.collect.rapl.POWERCAP = pathlib.Path('none')\n"
    needs = "import pytest\n@pytest.mark.bench(requires=('power',))\ndef bench_need(bench):\n    bench(abs, 1)\n"
    one = "def bench_one(bench):\n    bench(abs, 1)\n"
    project.write({"conftest.py": hidden, "bench_a.py": one, "bench_b.py": needs})
    assert project.pytest("--bench", "--bench-quick").ret == 0
    one, need = project.records["bench_one"], project.records["bench_need"]
    assert one["metrics"]["host_time_s"]["value"] > 0
    assert one["metrics"]["energy_per_item_j"]["value"] is None
    assert said in one["notes"]["energy_per_item_j"]
    assert said in one["notes"]["power_w"]
    assert need["outcome"] == "unsupported"
    assert said in need["reason"]


def test_the_tier_of_energy_is_the_sensor_that_answers(gpus, monkeypatch):
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(SCENARIO.with_name("missing_sensors.json")))
    gpus.write({"bench_a.py": "import time\n\ndef bench_sleep(bench):\n    bench(time.sleep, 0.002)\n"})
    tiers = []
    for number in range(3):
        assert gpus.pytest("--bench", "--bench-quick", f"--bench-gpus={number}").ret == 0
        tiers.append(gpus.lines[0]["tiers"]["energy"])
        gpus.files[0].unlink()
    assert tiers == ["nvml_power_integral", None, "nvml_energy_counter"]


def test_an_idle_board_is_weighed_when_a_mean_over_a_second_no_longer_holds_the_load(monkeypatch):
    """The first GPU has neither a counter nor instant power; the third has a counter."""
    path = SCENARIO.with_name("missing_sensors.json")
    monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
    first, _, third = (one["uuid"] for one in json.loads(path.read_text())["gpus"])
    with open_power(first) as averaged, open_power(third) as counted:
        assert settling_s(averaged) > 1.0
        assert settling_s(counted) < 0.5
