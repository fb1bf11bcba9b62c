"""The document of counters: its schema, its sums, its nulls and their reasons; and the command."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from joulemark.cli import main
from joulemark.utilization import SCHEMA, exit_code, read_files

DATA = Path(__file__).parents[1] / "data" / "counters"
H200, MIXED = DATA / "ncu_resnet18_b64_fp16_h200.csv", DATA / "mixed_units.txt"
SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "schema" / "counters.schema.json"
REFUSED = (
    "==PROF== Connected to process 9\nhello\n==ERROR== ERR_NVGPUCTRPERM - no permission for GPU performance counters\n"
)


def wide(
    folder: Path, *rows: str, columns: str = "gpu__time_duration.sum,dram__bytes_read.sum", units: str = "us,byte"
) -> Path:
    path = folder / "ncu.csv"
    path.write_text(f"ID,Process ID,Kernel Name,{columns}\n,,,{units}\n" + "".join(f"{row}\n" for row in rows))
    return path


def valid(paths: list[Path]) -> dict[str, Any]:
    document = read_files(paths)
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).validate(document)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    return document


def groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document["totals"], *document["classes"], *document["kernels"]]


def test_schema_is_a_schema_and_documents_follow_it(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA_FILE.read_text()))
    (tmp_path / "refused.txt").write_text(REFUSED)
    for paths in ([H200], [MIXED], [H200, MIXED], [tmp_path / "absent"], [tmp_path / "refused.txt", MIXED]):
        document = valid(paths)
        assert document["schema"] == SCHEMA
        for group in groups(document):
            for key, value in group.items():
                if value is None and key not in ("uses_tensor_cores",):
                    assert "*" in document["notes"] or key in document["notes"] or key in group["notes"], key


def test_totals_of_a_real_export_are_plain_sums() -> None:
    document = valid([H200])
    header, _, *rows = csv.reader(line for line in H200.read_text().splitlines() if line.startswith('"'))

    def column(name: str) -> int:
        return sum(int(row[header.index(name)].replace(",", "")) for row in rows)

    totals = document["totals"]
    assert totals["launches"] == len(rows) == 113
    assert totals["time_s"] == pytest.approx(column("gpu__time_duration.sum") * 1e-9, rel=1e-15)
    assert totals["dram_read_bytes"] == column("dram__bytes_read.sum")
    assert totals["dram_write_bytes"] == column("dram__bytes_write.sum")
    assert totals["l2_bytes"] == column("lts__t_bytes.sum")
    assert totals["l1_bytes"] == column("l1tex__t_bytes.sum")
    assert totals["instructions"] == column("smsp__inst_executed.sum")
    assert totals["tensor_instructions"] == column("sm__inst_executed_pipe_tensor.sum")
    for name, value in totals["counters"].items():
        if name != "gpu__time_duration.sum":
            assert value == column(name)
    for parts in (document["classes"], document["kernels"]):
        for key in ("launches", "dram_read_bytes", "dram_write_bytes", "instructions"):
            assert sum(part[key] for part in parts) == totals[key]
        assert sum(part["time_s"] for part in parts) == pytest.approx(totals["time_s"])
        assert sum(part["time_share"] for part in parts) == pytest.approx(1)
        assert sum(part["no_tensor_time_s"] for part in parts) == pytest.approx(totals["no_tensor_time_s"])
    assert document["files"][0]["gpus"] == ["NVIDIA H200"]


def test_classes_of_a_real_export() -> None:
    document = valid([H200])
    classes = {one["class"]: one for one in document["classes"]}
    assert {name: one["launches"] for name, one in classes.items()} == {
        "tensor_gemm": 20, "normalization": 40, "elementwise": 25, "reduction": 2, "copy": 24, "gemm": 1, "other": 1,
    }  # fmt: skip
    assert document["totals"]["no_tensor_source"] == "counters"
    assert classes["tensor_gemm"]["no_tensor_time_s"] == 0
    # The time outside tensor-core kernels, and the mean tensor activity, weighted by time.
    assert document["totals"]["no_tensor_time_s"] / document["totals"]["time_s"] == pytest.approx(0.6234, abs=1e-4)
    weighted = sum(one["time_share"] * one["tensor_active_fraction"] for one in document["classes"])
    assert document["totals"]["tensor_active_fraction"] == pytest.approx(weighted)


def test_launches_of_one_kernel_add_up_and_units_are_base_units() -> None:
    document = valid([MIXED])
    gemm = next(one for one in document["kernels"] if one["name"] == "gemm_f16_tn_128x64")
    assert (gemm["launches"], gemm["time_s"], gemm["dram_read_bytes"]) == (2, 1.251984e-3, 5.125e8)
    assert document["units"]["dram__bytes.sum.per_second"] == "B/s"
    rows = document["files"][0]["rows"]
    assert [row["id"] for row in rows] == [0, 1, 2]
    assert rows[1]["counters"]["sm__throughput.avg.pct_of_peak_sustained_elapsed"] is None


def test_a_part_of_a_sum_is_no_sum(tmp_path: Path) -> None:
    document = valid([wide(tmp_path, "0,7,a,10,100", "1,7,a,10,n/a", "2,7,b,n/a,50")])
    kernels = {one["name"]: one for one in document["kernels"]}
    assert (kernels["a"]["time_s"], kernels["a"]["dram_read_bytes"]) == (2e-5, None)
    assert kernels["a"]["notes"]["dram_read_bytes"] == "not available for 1 of 2 launches"
    assert kernels["a"]["counters"]["dram__bytes_read.sum"] is None
    assert (kernels["b"]["time_s"], kernels["b"]["dram_read_bytes"]) == (None, 50)
    assert document["totals"]["time_s"] is None


def test_issue_slots_from_cycles_of_sub_partitions(tmp_path: Path) -> None:
    columns = "gpu__time_duration.sum,smsp__inst_executed.sum,sm__cycles_elapsed.sum"
    document = valid([wide(tmp_path, "0,7,a,10,100,50", "1,7,a,30,100,100", columns=columns, units="us,inst,cycle")])
    assert document["totals"]["issue_slot_fraction"] == pytest.approx((10 * 0.5 + 30 * 0.25) / 40)


def test_a_name_that_the_counters_overrule(tmp_path: Path) -> None:
    columns = "gpu__time_duration.sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
    document = valid([wide(tmp_path, "0,7,gemm_f16,10,0", columns=columns, units="us,%")])
    (kernel,) = document["kernels"]
    assert (kernel["class"], kernel["class_source"], kernel["uses_tensor_cores"]) == ("gemm", "counters", False)
    assert kernel["no_tensor_time_s"] == 1e-5


def test_states_and_exit_codes(tmp_path: Path) -> None:
    refused, cut = tmp_path / "refused.txt", tmp_path / "cut.txt"
    refused.write_text(REFUSED)
    cut.write_text(MIXED.read_text()[:-40])
    document = valid([refused, cut, tmp_path / "absent", MIXED])
    assert [entry["status"] for entry in document["files"]] == ["no_permission", "damaged", "unreadable", "ok"]
    assert (document["files"][0]["launches"], document["files"][0]["rows"]) == (None, None)
    assert "no permission (ERR_NVGPUCTRPERM)" in document["files"][0]["error"]
    assert document["totals"]["launches"] == 6
    assert [exit_code(read_files([path])) for path in (refused, cut, MIXED)] == [2, 3, 0]
    nothing = valid([refused])
    assert nothing["totals"]["time_s"] is None
    assert nothing["notes"] == {"*": "no launch was read"}


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["counters", str(MIXED), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out, parse_constant=pytest.fail)["schema"], err) == (SCHEMA, "")
    assert main(["counters", str(MIXED)]) == 0
    assert "1.252 ms" in capsys.readouterr().out
    refused = tmp_path / "refused.txt"
    refused.write_text(REFUSED)
    assert main(["counters", str(refused), "--format", "markdown"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("joulemark: error: no permission (ERR_NVGPUCTRPERM)")
    assert len(err.splitlines()) == 1
    assert main(["counters", "--help"]) == 0
    assert "example" in capsys.readouterr().out


def test_the_command_imports_no_torch() -> None:
    script = "import sys; from joulemark.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "counters", str(MIXED), "--json"], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
