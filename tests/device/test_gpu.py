"""Which GPU is which: CUDA's numbering resolved to UUIDs, never by position alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from joulemark.device.gpu import (
    Gpu,
    Inventory,
    VisibleGpu,
    driver_of_kernel,
    gpu_state,
    list_gpus,
    probe_gpus,
    select_gpus,
    visible_gpus,
)
from joulemark.device.nvml import FAKE_GPUS, Nvml
from joulemark.errors import ConfigurationError, GpuLost, NvmlUnavailable
from joulemark.testing import FakeGpu, FakeNvml, backend_of

DATA = Path(__file__).parents[1] / "data" / "nvml"
L4 = "GPU-a1b20000-0a0a-4b4b-8c8c-000000000100"
H100_A = "GPU-a1b21111-0a0a-4b4b-8c8c-000000000101"
H100_B = "GPU-a1b22222-0a0a-4b4b-8c8c-000000000102"
A100 = "GPU-a1b23333-0a0a-4b4b-8c8c-000000000103"
BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def scenario(name: str) -> FakeNvml:
    return backend_of(json.loads((DATA / name).read_text(encoding="utf-8")))


@pytest.fixture
def unlike() -> list[Gpu]:
    with Nvml(scenario("four_unlike_gpus.json")) as nvml:
        return list_gpus(nvml)


@pytest.fixture
def alike() -> list[Gpu]:
    return [Gpu(f"GPU-{i}000", "NVIDIA H200", f"00000000:{i}B:00.0", 10, nvml_index=i) for i in range(4)]


def uuids(rows: list[VisibleGpu]) -> list[str]:
    assert [row.ordinal for row in rows] == list(range(len(rows)))
    return [row.gpu.uuid for row in rows]


def test_facts_are_listed_in_si_units(unlike: list[Gpu]) -> None:
    first = unlike[0]
    assert (first.uuid, first.name, first.slug) == (L4, "NVIDIA L4", "nvidia-l4")
    assert (first.driver, first.pci_bus_id, first.nvml_index) == ("570.124.06", "00000000:1B:00.0", 0)
    assert (first.power_limit_w, first.max_sm_clock_hz, first.memory_bytes) == (700, 1.98e9, 80 * 2**30)
    assert (first.mig, first.parent_uuid) == (False, None)
    assert unlike[1].slug == "nvidia-h100-80gb-hbm3"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [L4, H100_A, H100_B, A100]),
        ("", []),
        ("-1", []),
        ("2,0", [H100_B, L4]),
        ("3", [A100]),
        (" 3 , 1 ", [A100, H100_A]),
        ("1,-1,2", [H100_A]),
        ("0,9,1", [L4]),
        ("9,0", []),
        ("1,x,2", [H100_A]),
        ("1,,2", [H100_A]),
        ("2gpu,0", [H100_B, L4]),
        ("1,1", []),
        ("0,2,0", []),
        (f"{H100_B},{L4}", [H100_B, L4]),
        ("GPU-a1b22,GPU-a1b20", [H100_B, L4]),
        ("GPU-a1b2", []),
        ("GPU-a1b23,GPU-a1b2,GPU-a1b20", [A100]),
        ("GPU-a1b23,GPU-ffff", [A100]),
        ("GPU-a1b23,0", [A100]),
        ("GPU-a1b23,GPU-a1b2333", []),
        ("0,GPU-a1b23", [L4]),
        ("NoDevFiles", []),
    ],
)
def test_the_mask_is_read_as_cuda_reads_it(unlike: list[Gpu], mask: str | None, expected: list[str]) -> None:
    environ = BUS_ORDER if mask is None else {**BUS_ORDER, "CUDA_VISIBLE_DEVICES": mask}
    rows = visible_gpus(unlike, environ)
    assert uuids(rows) == expected
    assert all(row.verified for row in rows)


def test_bus_order_is_by_bus_id_and_not_by_nvmls_index(unlike: list[Gpu]) -> None:
    shuffled = [unlike[2], unlike[0], unlike[3], unlike[1]]
    assert uuids(visible_gpus(shuffled, BUS_ORDER)) == [L4, H100_A, H100_B, A100]


def test_ordinals_over_unlike_gpus_are_told_by_the_framework(unlike: list[Gpu]) -> None:
    asked: list[object] = []

    def probe(environ: object) -> list[str]:
        asked.append(environ)
        return [A100.removeprefix("GPU-"), L4]

    environ = {"CUDA_VISIBLE_DEVICES": "1,3"}
    rows = visible_gpus(unlike, environ, probe)
    assert uuids(rows) == [A100, L4]
    assert all(row.verified and "framework" in row.why for row in rows)
    assert asked == [environ]


@pytest.mark.parametrize("environ", [{"CUDA_VISIBLE_DEVICES": "1,3"}, {"CUDA_VISIBLE_DEVICES": "0"}, {}])
@pytest.mark.parametrize("answer", ["nobody", None, [], ["GPU-ffff", "GPU-eeee"]])
def test_without_an_answer_rows_are_marked(unlike: list[Gpu], environ: dict[str, str], answer: object) -> None:
    probe = None if answer == "nobody" else lambda _: answer
    rows = visible_gpus(unlike, environ, probe)
    assert rows
    assert not any(row.verified for row in rows)
    assert all("CUDA_DEVICE_ORDER" in row.why for row in rows)


def test_fastest_first_is_as_uncertain_as_unset(unlike: list[Gpu]) -> None:
    rows = visible_gpus(unlike, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "0"})
    assert [row.verified for row in rows] == [False]


def test_no_one_is_asked_where_nothing_is_in_doubt(unlike: list[Gpu], alike: list[Gpu]) -> None:
    def probe(environ: object) -> list[str]:
        pytest.fail("asked for nothing")

    assert uuids(visible_gpus(alike, {}, probe)) == [gpu.uuid for gpu in alike]
    assert uuids(visible_gpus(alike[:1], {"CUDA_VISIBLE_DEVICES": "0"}, probe)) == ["GPU-0000"]
    assert uuids(visible_gpus(unlike, {"CUDA_VISIBLE_DEVICES": ""}, probe)) == []
    assert uuids(visible_gpus(unlike, {"CUDA_VISIBLE_DEVICES": L4}, probe)) == [L4]
    assert visible_gpus([], {}, probe) == []


def test_a_mask_over_like_gpus_is_in_doubt_too(alike: list[Gpu]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2"}
    assert [row.verified for row in visible_gpus(alike, environ)] == [False]
    assert uuids(visible_gpus(alike, environ, lambda _: ["GPU-2000"])) == ["GPU-2000"]


MIG_A, MIG_B = "MIG-11112222-0000", "MIG-11113333-0000"


@pytest.fixture
def partitioned() -> list[Gpu]:
    plain = FakeGpu(uuid="GPU-bbbb", pci_bus_id="00000000:2B:00.0")
    split = FakeGpu(uuid="GPU-aaaa", mig=(MIG_A, MIG_B))
    with Nvml(FakeNvml([split, plain])) as nvml:
        return list_gpus(nvml)


def test_mig_instances_are_listed_under_their_board(partitioned: list[Gpu]) -> None:
    assert [gpu.uuid for gpu in partitioned] == ["GPU-aaaa", MIG_A, MIG_B, "GPU-bbbb"]
    assert partitioned[0].mig
    assert partitioned[1].parent_uuid == "GPU-aaaa"
    assert partitioned[1].pci_bus_id == partitioned[0].pci_bus_id
    assert partitioned[1].power_limit_w is None


def test_a_mig_instance_is_named_by_uuid_or_prefix(partitioned: list[Gpu]) -> None:
    for mask in (MIG_A, "MIG-11112"):
        rows = visible_gpus(partitioned, {"CUDA_VISIBLE_DEVICES": mask})
        assert (uuids(rows), rows[0].verified) == ([MIG_A], True)
    assert visible_gpus(partitioned, {"CUDA_VISIBLE_DEVICES": "MIG-1111"}) == []


def test_ordinals_beside_mig_are_in_doubt(partitioned: list[Gpu]) -> None:
    rows = visible_gpus(partitioned, {**BUS_ORDER, "CUDA_VISIBLE_DEVICES": "0"})
    assert (rows[0].verified, "MIG" in rows[0].why) == (False, True)
    assert uuids(visible_gpus(partitioned, BUS_ORDER, lambda _: [MIG_B])) == [MIG_B]


def test_the_boards_uuid_means_its_lone_instance() -> None:
    split = FakeGpu(uuid="GPU-aaaa", mig=(MIG_A,))
    with Nvml(FakeNvml([split])) as nvml:
        gpus = list_gpus(nvml)
    rows = visible_gpus(gpus, {}, lambda _: ["aaaa"])
    assert (uuids(rows), rows[0].verified) == ([MIG_A], True)


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    backend = FakeNvml([FakeGpu(uuid="GPU-1", lost_after_calls=0), FakeGpu(uuid="GPU-2")])
    assert [gpu.uuid for gpu in probe_gpus(BUS_ORDER, backend=backend).gpus] == ["GPU-2"]


@pytest.mark.parametrize("path", sorted(DATA.glob("init_*.json")), ids=lambda path: path.stem)
def test_a_missing_nvml_is_a_finding_of_the_inventory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joulemark.device.gpu.PROC_DRIVER", path.with_name("nowhere"))
    backend = scenario(path.name)
    inventory = probe_gpus({}, backend=backend)
    assert isinstance(inventory.problem, NvmlUnavailable)
    assert inventory.problem.cause == path.stem.removeprefix("init_")
    assert (inventory.gpus, inventory.visible, inventory.driver) == ((), (), None)
    assert ("nvmlShutdown", "") not in backend.log


def test_the_kernel_tells_the_driver_where_nvml_does_not(tmp_path: Path) -> None:
    told = tmp_path / "version"
    for line, version in [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 01:59:00 UTC 2025", "570.124.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build", "580.159.03"),
        ("something else", None),
    ]:
        told.write_text(f"{line}\nGCC version:  gcc version 13.2.0\n", encoding="utf-8")
        assert driver_of_kernel(told) == version
    assert driver_of_kernel(tmp_path / "none") is None


def test_the_inventory_knows_that_its_gpus_are_simulated() -> None:
    inventory = probe_gpus(BUS_ORDER, backend=scenario("four_unlike_gpus.json"))
    assert isinstance(inventory, Inventory)
    assert inventory.simulated
    assert (inventory.driver, inventory.cuda_driver) == ("570.124.06", "13.0")
    assert inventory.by_uuid(L4.upper().replace("GPU-", "")) == inventory.gpus[0]
    assert inventory.by_uuid("GPU-0") is None


def test_a_scenario_file_reaches_child_processes() -> None:
    code = (
        "import os; from joulemark.device.gpu import probe_gpus; "
        "print([v.gpu.uuid for v in probe_gpus(os.environ).visible])"
    )
    environ = {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        FAKE_GPUS: str(DATA / "four_unlike_gpus.json"),
        "CUDA_VISIBLE_DEVICES": "2,0",
        **BUS_ORDER,
    }
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([H100_B, L4])


def test_the_state_tells_who_is_on_a_gpu() -> None:
    gpu = FakeGpu(processes=(7,), reasons=frozenset({"power_cap"}), errors={"memory_clock": 3}, power_w=400)
    with Nvml(FakeNvml([gpu])) as nvml:
        state = gpu_state(nvml, gpu.uuid)
    assert state.processes is not None
    assert [one.pid for one in state.processes] == [7]
    assert (state.utilization, state.power_w, state.memory_clock_hz) == (0.5, 400, None)
    assert state.reasons == {"power_cap"}
    gone = FakeGpu(lost_after_calls=0)
    with Nvml(FakeNvml([gone])) as nvml, pytest.raises(GpuLost):
        gpu_state(nvml, gone.uuid)


@pytest.fixture
def visible(unlike: list[Gpu]) -> list[VisibleGpu]:
    return visible_gpus(unlike, BUS_ORDER)


@pytest.mark.parametrize(
    ("wanted", "ordinals"),
    [
        ("auto", [0, 1, 3]),
        ("all", [0, 1, 2, 3]),
        ("cpu", []),
        ("none", []),
        ("2", [2]),
        ("3, 0", [3, 0]),
        ("1,1", [1]),
        ("GPU-a1b22", [2]),
        ("nvidia-a100-sxm4-80gb", [3]),
        ("NVIDIA L4,2", [0, 2]),
        ("nvidia-h100-80gb-hbm3", [1]),
    ],
)
def test_gpus_are_selected_by_name(visible: list[VisibleGpu], wanted: str, ordinals: list[int]) -> None:
    assert [row.ordinal for row in select_gpus(visible, wanted)] == ordinals


@pytest.mark.parametrize("wanted", ["7", "GPU-a1b2", "GPU-0000", "nvidia-b200", "cpu,0", "", ","])
def test_a_selection_that_fits_nothing_lists_what_is_here(visible: list[VisibleGpu], wanted: str) -> None:
    with pytest.raises(ConfigurationError, match="nvidia-l4 GPU-a1b20000") as caught:
        select_gpus(visible, wanted)
    assert "--bench-gpus" in str(caught.value)


def test_without_gpus_auto_is_none_and_a_name_is_an_error() -> None:
    assert select_gpus([], "auto") == select_gpus([], "all") == []
    with pytest.raises(ConfigurationError, match="CUDA shows no GPU"):
        select_gpus([], "0")


def test_auto_prefers_a_gpu_of_certain_identity(alike: list[Gpu]) -> None:
    rows = [VisibleGpu(alike[0], 0, False, "guess"), VisibleGpu(alike[1], 1, True, "told")]
    assert [row.ordinal for row in select_gpus(rows, "auto")] == [1]
