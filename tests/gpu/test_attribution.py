"""Counters of each kernel by one command on a small model. Needs a CUDA device whose counters may be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from joulemark.attribution.document import TOTALS_AGREE  # noqa: E402
from joulemark.attribution.stored import check, folder_beside  # noqa: E402
from joulemark.cli import main  # noqa: E402

ROOT = Path(__file__).parents[2]
CASE = ("--bench-models", "resnet18", "--bench-batch-sizes", "128", "--bench-dtypes", "bf16", "--bench-modes", "eager")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The file that one command leaves; skips where the counters are refused, with the reason."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "pytest", "--bench", "bench_training/bench_zoo.py::bench_training", *CASE]
    command += ["--bench-collect", "attribution", "--bench-results", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    (file,) = folder.rglob("sweep-*.jsonl")
    record = record_of(file)
    if "attributed_fraction" in record["notes"]:
        pytest.skip(record["notes"]["attributed_fraction"])
    return file


def record_of(file):
    return next(line for line in map(json.loads, file.read_text().splitlines()) if line["kind"] == "record")


def test_a_training_step_is_attributed_and_its_totals_are_the_runs(results, capsys):
    record = record_of(results)
    (path,) = folder_beside(results).iterdir()
    document = json.loads(path.read_text())
    check(document)
    assert path.stem == record["case_id"]
    assert document["roofline"] is not None
    off = {name: one["ratio"] for name, one in document["counters"].items() if one["ratio"] is not None}
    assert {"pipe_tensor", "dram_read_bytes", "dram_write_bytes"} <= set(off)
    assert all(abs(ratio - 1) <= TOTALS_AGREE for ratio in off.values()), off
    rows = record["tables"]["attribution"]
    assert any(row["uses_tensor_cores"] and row["tensor_active_fraction"] > 0.03 for row in rows)
    assert record["metrics"]["attributed_fraction"]["value"] > 0.5
    assert main(["attribution", str(results)]) == 0
    assert document["label"] in capsys.readouterr().out
