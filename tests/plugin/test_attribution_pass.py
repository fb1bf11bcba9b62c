"""The attribution pass behind the door: option, process, document beside the results, command, table."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from joulemark.cli import main
from joulemark.errors import ConfigurationError
from joulemark.metrics import ATTRIBUTION
from joulemark.plugin.instruments import open_attributing
from joulemark.plugin.options import BenchOptions
from joulemark.plugin.sweep import CPU, Target
from joulemark.testing.counters import REFUSALS

DOCS = Path(__file__).parents[2] / "docs" / "schema"
SCHEMA = json.loads((DOCS / "sweep.schema.json").read_text())
DOCUMENT = json.loads((DOCS / "attribution.schema.json").read_text())
UUID = "GPU-5a3c0000-0000-4000-8000-000000000000"
BENCHES = """
import os
import sys
import time
from pathlib import Path

import pytest

@pytest.mark.parametrize("batch", [2, 10])
def bench_one(bench, batch):
    alone = next((one.split(":")[0] for one in sys.argv if one.startswith(("attribution:", "timing:"))), "?")
    with Path("pids").open("a") as file:
        file.write(f"{alone} {os.getpid()}\\n")
    bench(time.sleep, 0.002)
"""
NO_TORCH = """
# It takes seconds to load, and there is no device for it. SciPy does not bear None in its place.
import importlib.machinery
import sys

if "--bench-worker" in sys.argv:
    finder = importlib.machinery.PathFinder
    found = finder.find_spec
    finder.find_spec = lambda name, *more: None if name == "torch" else found(name, *more)
else:
    sys.modules["torch"] = None
"""
GEMM, ADD = "sm90_xmma_gemm_bf16bf16", "vectorized_elementwise_kernel"
PM = {
    "rates": {"sm_active": 0.9},
    "kernels": [
        {
            "name": GEMM,
            "length_s": 110e-6,
            "rates": {"pipe_tensor": 0.6, "dram_read_bytes": 1e12},
            "module": "Linear_0",
        },
        {"name": ADD, "length_s": 70e-6, "rates": {"pipe_tensor": 0.0, "dram_read_bytes": 2e12}},
    ],
}


@pytest.fixture
def on_gpu(project, monkeypatch):
    """Writes a machine with one simulated GPU whose counters and kernels are given."""

    def write(pm_sampling, bench=BENCHES):
        gpu = {"name": "NVIDIA H200", "uuid": UUID, "pci": "00000000:1B:00.0", "counters": {"pm_sampling": pm_sampling}}
        project.write({"gpu.json": json.dumps({"gpus": [gpu]}), "bench_it.py": bench, "conftest.py": NO_TORCH})
        monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(project.path / "gpu.json"))
        return project

    return write


def run(project, *args, collect="timing,attribution"):
    quick = ("--bench", "--bench-quick")
    return project.pytester.runpytest_inprocess(*quick, f"--bench-collect={collect}", *args)


def values(record):
    return {name: one["value"] for name, one in record["metrics"].items()}


def test_from_the_option_to_the_tables_of_the_command(on_gpu, capsys):
    project = on_gpu(PM)
    result = run(project, "--bench-report", "page.md", "--bench-keep-traces", collect="attribution")
    assert result.ret == 0
    (file,) = project.files
    result.stdout.fnmatch_lines(
        [
            "*attribution: PM sampling and the profiler at once, in a process of its own for each case*",
            f"*which kernels do the work: joulemark attribution {file}*",
        ]
    )
    documents = {one.stem: json.loads(one.read_text()) for one in file.with_name(f"{file.stem}-attribution").iterdir()}
    records = project.records
    assert set(documents) == {record["case_id"] for record in records.values()}
    for record in records.values():
        jsonschema.validate(record, SCHEMA)
        jsonschema.Draft202012Validator(DOCUMENT).validate(documents[record["case_id"]])
        assert values(record)["attributed_fraction"] == pytest.approx(1.0)
        overhead = record["metrics"]["attribution_overhead"]
        assert overhead["n"] == len(record["samples"]["attribution_step_s"]) == 3
        assert overhead["confidence"] < 0.95  # three windows give no more
        rows = {row["class"]: row for row in record["tables"]["attribution"]}
        assert rows["tensor_gemm"]["dram_read_bytes"] == pytest.approx(110e6, rel=0.04)
        assert rows["elementwise"]["dram_read_bytes"] == pytest.approx(140e6, rel=0.04)
        assert rows["elementwise"]["dram_write_bytes"] is None  # nothing counted it
    seen = [line.split() for line in (project.path / "pids").read_text().splitlines()]
    assert [kind for kind, _ in seen] == ["timing", "attribution"] * 2
    assert len({pid for kind, pid in seen if kind == "attribution"}) == 2  # a process keeps no session of the profiler
    assert "GEMM and convolution on tensor cores 61 %" in (project.path / "page.md").read_text()

    capsys.readouterr()
    for source in (file, file.parent):
        assert main(["attribution", str(source)]) == 0
        shown = capsys.readouterr().out
        first, second = (shown.index(f"bench_one-b{batch}-") for batch in (2, 10))
        assert first < second
        assert GEMM in shown
    assert main(["attribution", str(file), "--json"]) == 2
    assert "--json takes one attribution, and 2 were found" in capsys.readouterr().err
    assert main(["report", str(file), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert all(one["label"] in shown for one in documents.values())
    name, document = next(iter(documents.items()))
    kept = file.with_name(f"{file.stem}-traces") / f"{name}-attribution"
    assert main(["attribution", str(kept), "--json"]) == 0  # analysed anew
    assert json.loads(capsys.readouterr().out) == document


def test_a_refusal_is_on_the_record_with_its_remedy_and_the_rest_is_measured(on_gpu, capsys):
    project = on_gpu("permission")
    assert run(project, "-k", "bench_one and 2").ret == 0
    (record,) = project.records.values()
    assert values(record)["host_time_s"] > 0
    for name in ATTRIBUTION:
        assert record["metrics"][name]["value"] is None
        assert "NVreg_RestrictProfilingToAdminUsers" in record["notes"][name]
    (file,) = project.files
    assert not file.with_name(f"{file.stem}-attribution").exists()
    capsys.readouterr()
    assert main(["attribution", str(file)]) == 2
    assert "no attribution stands beside" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("unsupported", "pm_sampling: this GPU has no such counters"),
        ("library", "no libcupti is installed: "),
        ("busy", "HARDWARE_BUSY"),
        ({"rates": {}}, "PM sampling of this simulated GPU knows no kernels: see joulemark.testing"),
    ],
)
def test_each_reason_is_said_with_what_would_help(on_gpu, refusal, said):
    on_gpu(refusal)
    opened = open_attributing(Target(UUID, "gpu0", "nvidia-h200", "NVIDIA H200"), "cpu", "", None)
    assert opened.bench is None
    assert said in opened.why
    known = REFUSALS.get(refusal) if isinstance(refusal, str) else None
    assert known is None or opened.why.endswith(known.remedy)


def test_without_a_gpu_or_torch_for_it_none_is_tried(monkeypatch):
    monkeypatch.delenv("JOULEMARK_FAKE_GPUS", raising=False)
    assert open_attributing(CPU, "cpu", "", None).why == "attribution: a CPU has no GPU counters"
    gpu = Target(UUID, "gpu0", "nvidia-h200", "NVIDIA H200")
    assert (
        open_attributing(gpu, "cpu", "torch sees no CUDA device", None).why == "attribution: torch sees no CUDA device"
    )


def test_in_one_process_it_says_what_it_needs(on_gpu):
    project = on_gpu(PM)
    run(project, "--bench-inprocess", "-k", "bench_one and 2")
    (record,) = project.records.values()
    assert "--bench-inprocess" in record["notes"]["attribution_overhead"]


def test_without_the_option_nothing_of_it_is_there(on_gpu):
    project = on_gpu(PM)
    result = run(project, "-k", "bench_one and 2", collect="timing")
    assert result.ret == 0
    assert "attribution" not in result.stdout.str()
    (record,) = project.records.values()
    assert not {*ATTRIBUTION} & {*record["metrics"], *record["notes"]}
    assert record["tables"] == {}
    assert [line.split()[0] for line in (project.path / "pids").read_text().splitlines()] == ["timing"]
    assert [one.name for one in project.files[0].parent.iterdir()] == [project.files[0].name]


def test_on_a_cluster_it_is_refused(project):
    config = project.pytester.parseconfig("--bench-cluster", "ray", "--bench-collect", "attribution")
    with pytest.raises(ConfigurationError, match="on the node, without --bench-cluster"):
        BenchOptions.from_pytest_config(config)
