import json
from dataclasses import replace

import pytest

from joulemark.collect import rapl
from joulemark.device.gpu import Gpu, GpuState, Inventory, VisibleGpu, probe_gpus
from joulemark.device.nvml import MemoryFaults, Process
from joulemark.environment import anonymous, gather, package_versions, preflight, tiers_of
from joulemark.errors import GpuLost, NvmlUnavailable
from joulemark.records import canonical_json

UUID = "GPU-5b1f0c2e-0000-4a10-9000-0000000000a1"
H200 = Gpu(UUID, "NVIDIA H200", "00000000:1B:00.0", 10**11, driver="580.65.06")
ONE = Inventory((H200,), (VisibleGpu(H200, 0, True, "the only GPU here"),), driver="580.65.06", cuda_driver="13.0")
NONE = Inventory(problem=NvmlUnavailable("NVML did not start", "install the driver", cause="library_not_found"))
IDLE = GpuState((), 0.0, 0, 75.0, 3.45e8, 2.6e9, 31.0, frozenset({"idle"}))


@pytest.fixture
def fake_gpus(tmp_path, monkeypatch):
    """Puts one simulated GPU of the given sensors in NVML's place."""

    def use(**gpu):
        path = tmp_path / "gpus.json"
        gpu = {"name": "NVIDIA H200", "uuid": UUID, "pci": "00000000:1B:00.0", "power_mw": 75000, **gpu}
        path.write_text(json.dumps({"driver": "580.65.06", "gpus": [gpu]}))
        monkeypatch.setenv("JOULEMARK_FAKE_GPUS", str(path))
        return probe_gpus({})

    return use


def test_facts_are_strict_json_and_name_the_gpus(tmp_path):
    facts = gather(ONE, tmp_path, framework={"cuda": "13.0", "baselines": {"idle": 75.0}}, options=["--bench"]).facts
    assert json.loads(canonical_json(facts)) == facts
    assert facts["gpus"][0]["model"] == "nvidia-h200"
    assert (facts["driver"], facts["cuda"], facts["cudnn"]) == ("580.65.06", "13.0", None)
    assert facts["options"] == ["--bench"]
    assert facts["host"]["cores"] >= 1
    assert facts["git"] is None


def test_anonymized_facts_hold_no_host_path_or_uuid(tmp_path):
    plain = gather(ONE, tmp_path)
    framework = {"cupti": f"{tmp_path}/libcupti.so"}
    options = ["--bench-models", f"{tmp_path}/model.py:Net", f"--bench-gpus={UUID}"]
    facts = gather(ONE, tmp_path, anonymize=True, framework=framework, options=options).facts
    text = canonical_json(facts)
    assert str(tmp_path) not in text
    assert UUID not in text
    assert facts["host"]["name"] is None
    assert facts["host"]["os"] == plain.facts["host"]["os"]
    assert facts["gpus"][0]["uuid"] == anonymous(UUID)
    assert facts["options"] == ["--bench-models", "<path>:Net", f"--bench-gpus={anonymous(UUID)}"]


def test_an_anonymous_uuid_is_stable_and_tells_gpus_apart():
    assert anonymous(UUID) == anonymous(UUID)
    assert anonymous(UUID) != anonymous(UUID[:-1] + "2")
    assert anonymous(UUID).startswith("GPU-")


def test_tiers_in_use_win_over_those_found_out(tmp_path):
    found = gather(ONE, tmp_path, tiers={"timing": "cuda_events", "energy": None}, notes={"energy": "no counter"})
    assert found.tiers == {"counters": None, "timing": "cuda_events", "energy": None}
    assert found.notes["energy"] == "no counter"
    assert found.notes["counters"].startswith("not tried: pytest --bench --bench-collect counters")


def test_missing_packages_are_none():
    assert package_versions(["pytest", "no-such-distribution"])["no-such-distribution"] is None
    assert package_versions(["pytest"])["pytest"] == pytest.__version__


def test_tiers_without_a_gpu_say_why(tmp_path, monkeypatch):
    monkeypatch.setattr(rapl, "POWERCAP", tmp_path)
    tiers, notes = tiers_of(NONE)
    assert tiers == {"timing": "host_clock", "energy": None, "counters": None}
    assert "NVML did not start" in notes["timing"]
    assert "no RAPL package" in notes["energy"]


@pytest.mark.parametrize(
    ("inventory", "says"),
    [
        (NONE, "no GPU: NVML did not start: install the driver; "),
        (Inventory(), "no GPU: NVML lists none: look whether nvidia-smi -L lists one"),
        (Inventory((H200,)), "no GPU visible (CUDA_VISIBLE_DEVICES=None): unset it; "),
    ],
)
def test_counters_without_a_gpu_say_why_there_are_none_and_what_to_do(monkeypatch, inventory, says):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    note = tiers_of(inventory)[1]["counters"]
    assert note.startswith(says)
    assert note.endswith("read without a GPU: joulemark counters, attribution, report")


def test_the_processor_counts_its_energy_where_the_kernel_shows_it(tmp_path, monkeypatch):
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "1"), ("max_energy_range_uj", "100")):
        (package / name).write_text(text)
    monkeypatch.setattr(rapl, "POWERCAP", tmp_path)
    tiers, notes = tiers_of(NONE)
    assert tiers["energy"] == "rapl"
    assert "of the CPU only" in notes["energy"]


@pytest.mark.parametrize(
    ("sensors", "tier", "note"),
    [
        ({"energy": {"counter_from_power": True}}, "nvml_energy_counter", None),
        ({"energy": {"error": 3}}, "nvml_power_integral", "integrated from power readings"),
        ({"energy": {"error": 3}, "power_mw": {"error": 3}}, None, "Not Supported"),
    ],
)
def test_the_energy_tier_is_the_best_sensor_that_answers(fake_gpus, sensors, tier, note):
    tiers, notes = tiers_of(fake_gpus(**sensors))
    assert tiers["energy"] == tier
    assert note is None or note in notes["energy"]


def test_an_idle_gpu_passes_the_preflight():
    found = preflight(ONE, {UUID: IDLE}, own_pid=1)
    assert (found.refusals, found.doubts) == ((), ())


def state(**changes):
    return GpuState(**{**IDLE.__dict__, **changes})


@pytest.mark.parametrize(
    ("current", "says"),
    [
        (state(processes=(Process(7, 5), Process(1, 5))), "shared: 1 other process(es) hold a context (pid 7)"),
        (state(utilization=0.4), "busy: utilization 40%"),
        (
            state(reasons=frozenset({"thermal", "idle"}), temperature_c=90.0),
            "throttled: thermal (SM clock 345 MHz, 90 °C)",
        ),
        (GpuLost("GPU is lost", "reboot"), "GPU is lost: reboot"),
        (state(memory_used_bytes=10**10), "shared: 9.31 GiB of its memory in use by processes that cannot be seen"),
        (state(temperature_c=88.0, slowdown_margin_k=2.0), "hot: 88 °C, 2 K before it slows down"),
        (state(faults=MemoryFaults(3, False, False)), "faulty memory: 3 uncorrected errors"),
        (state(faults=MemoryFaults(0, True, False)), "faulty memory: bad rows wait to be replaced: reset the GPU"),
        (state(faults=MemoryFaults(0, False, True)), "faulty memory: a bad row has no spare left"),
    ],
)
def test_a_gpu_that_is_not_fit_is_refused_with_its_reason(current, says):
    found = preflight(ONE, {UUID: current}, own_pid=1)
    assert len(found.refusals) == 1
    assert says in found.refusals[0]
    assert UUID in found.refusals[0]


@pytest.mark.parametrize(
    "current",
    [
        state(memory_used_bytes=10**9),
        state(slowdown_margin_k=40.0),
        state(faults=MemoryFaults(0, False, False)),
        state(processes=(Process(1, 10**10),), memory_used_bytes=10**9),
    ],
)
def test_a_driver_that_reserves_memory_and_a_cool_gpu_pass(current):
    assert preflight(ONE, {UUID: current}, own_pid=1).refusals == ()


@pytest.mark.parametrize(
    ("gpu", "current", "says"),
    [
        ({"persistence": False}, IDLE, "persistence mode is off"),
        ({}, state(graphics_processes=(Process(7, None),)), "1 process(es) draw with it (pid 7)"),
        ({}, state(reasons=frozenset({"application_clocks"})), "clocks are set by hand"),
        ({"power_limit_w": 500.0, "default_power_limit_w": 700.0}, IDLE, "power limit is 500 W, as delivered 700 W"),
    ],
)
def test_what_moves_figures_is_noted_and_no_refusal(gpu, current, says):
    board = replace(H200, **gpu)
    found = preflight(
        replace(ONE, visible=(VisibleGpu(board, 0, True, "the only GPU here"),)), {UUID: current}, own_pid=1
    )
    assert (found.refusals, found.doubts) == ((), ())
    (note,) = found.notes
    assert says in note
    assert UUID in note


def test_what_cannot_be_read_is_a_doubt_and_no_refusal():
    unknown = state(processes=None, utilization=None, reasons=None)
    found = preflight(ONE, {UUID: unknown}, own_pid=1)
    assert found.refusals == ()
    assert len(found.doubts) == 3


def test_no_gpu_and_none_visible_are_refused():
    assert "install the driver" in preflight(NONE, {}, 1).refusals[0]
    assert "none" in preflight(Inventory(), {}, 1).refusals[0]
    assert "CUDA_VISIBLE_DEVICES" in preflight(Inventory((H200,)), {}, 1).refusals[0]


def test_mig_instances_share_a_board():
    parts = [Gpu(f"MIG-{n}", "NVIDIA H200 MIG", parent_uuid=UUID) for n in (1, 2)]
    visible = (VisibleGpu(parts[0], 0, False, "a guess"),)
    found = preflight(Inventory((H200, *parts), visible), {"MIG-1": IDLE}, 1)
    assert "2 MIG instances" in found.refusals[0]
    assert "a guess" in found.doubts[0]
