"""The machine of a run as a key."""

from __future__ import annotations

import pytest

from joulemark.history.runs import setup_of
from joulemark.records import Case, Environment, Record, Run
from joulemark.regression.machines import differences, machine_of, set_up_differently

GPU = {
    "uuid": "GPU-1", "name": "NVIDIA H200", "vbios": "96.00", "power_limit_w": 700.0, "max_sm_clock_hz": 1.98e9,
    "ecc": True, "mig": False, "persistence": True, "nvml_index": 0, "pci_bus_id": "00:06.0",
}  # fmt: skip


def run(gpus=(GPU,), uuid="GPU-1", **facts):
    environment = Environment({"host": {"name": "a"}, "gpus": list(gpus), **facts})
    record = Record(Case("x", gpu_model="nvidia-h200"), "r", "ok", environment.environment_id, gpu_uuid=uuid)
    return Run("f", "r", {environment.environment_id: environment}, (record,), True)


def test_another_node_of_the_same_kind_is_the_same_machine():
    other = {**GPU, "uuid": "GPU-2", "nvml_index": 3, "pci_bus_id": "00:07.0"}
    assert differences(run(), run([other], "GPU-2")) == {}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"power_limit_w": 500.0}, "power_limit_w"),
        ({"max_sm_clock_hz": 1.7e9}, "max_sm_clock_hz"),
        ({"ecc": False}, "ecc"),
        ({"mig": True}, "mig"),
        ({"persistence": False}, "persistence"),
    ],
)
def test_a_gpu_that_is_set_up_differently_is_said(change, name):
    found = differences(run(), run([{**GPU, **change}]))
    assert list(found) == [name]
    assert name in set_up_differently(found)


def test_versions_are_axes_and_the_driver_is_the_first():
    old = run(driver="550.90.07", cuda="12.8", cudnn=91002, packages={"torch": "2.8.0"}, git={"hash": "a"})
    new = run(driver="1000.10", cuda="13.0", cudnn=91100, packages={"torch": "2.9.0"}, git={"hash": "b", "dirty": True})
    found = differences(old, new)
    assert list(found) == ["driver", "cuda", "cudnn", "torch", "commit"]
    assert found["driver"] == ("550.90.07", "1000.10")
    assert found["commit"] == ("a", "b (dirty)")
    assert set_up_differently(found) is None


def test_only_gpus_that_were_measured_on_count():
    idle = {**GPU, "uuid": "GPU-9", "power_limit_w": 300.0}
    assert differences(run(), run([GPU, idle])) == {}
    assert machine_of(run([GPU, idle], uuid=None))["power_limit_w"] == "300.0, 700.0"


def test_what_a_side_does_not_know_is_no_difference_of_set_up():
    found = differences(run(), run([]))
    assert found["power_limit_w"] == (700.0, None)
    assert set_up_differently(found) is None


def test_history_and_comparison_see_one_machine():
    idle = {**GPU, "uuid": "GPU-9", "power_limit_w": 300.0}
    one = run([GPU, idle, None, {"uuid": []}], git={"hash": "b", "dirty": True}, packages={"torch": "2"})
    seen, machine = setup_of(*one.environments.values(), {"GPU-1"}), machine_of(one)
    assert seen == {name: str(value) for name, value in machine.items()} | {"host": "a"}
    assert seen["power_limit_w"] == "700.0"
