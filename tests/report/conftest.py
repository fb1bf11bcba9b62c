import pytest

from joulemark.records import Case, Environment, Record, Run, Value

ENVIRONMENT = Environment({"driver": "580.65.06", "gpus": [], "host": {"name": "a"}})


@pytest.fixture
def make_record():
    """Builds a record: figures by metric name in base units, each with an interval of ±1 % unless it is None."""

    def make(workload="resnet50", batch=8, outcome="ok", figures=None, half=0.01, gpu="nvidia-h200", **more):
        case = more.pop("case", None) or Case(
            workload, "train", "eager", "bf16", batch, "contiguous", "device", gpu, params=more.pop("params", {})
        )
        units = {"power_w": "W", "energy_per_item_j": "J", "peak_memory_bytes": "B", "throughput_per_s": "1/s"}
        metrics = {
            name: Value(
                number,
                units.get(name, "s"),
                None if number is None or half is None else (number * (1 - half), number * (1 + half)),
                n=20,
                tier="host_clock",
            )
            for name, number in (figures or {}).items()
        }
        return Record(case, "ab" * 16, outcome, ENVIRONMENT.environment_id, metrics=metrics, **more)

    return make


@pytest.fixture
def make_run():
    """Builds a complete run of some records."""

    def make(*records, path="run.jsonl", environment=ENVIRONMENT, **more):
        return Run(
            path,
            "ab" * 16,
            {environment.environment_id: environment},
            tuple(records),
            **{"completed": True, "wall_s": 60.0, "measured_s": 42.0, **more},
        )

    return make


@pytest.fixture(scope="session")
def energy_document(tmp_path_factory):
    """Builds a document of ``joulemark energy`` for named workloads, by the energy model of a synthetic GPU.

    Its energies are made up; ``dram`` multiplies what the workloads move to and from memory.
    """
    from joulemark.energy import validation
    from joulemark.energy.calibrate import measure, measure_caches
    from joulemark.energy.calibration import refit
    from joulemark.energy.outcome import Measured
    from joulemark.energy.plan import plan
    from joulemark.energy.windows import WindowWriter
    from joulemark.synthetic_gpu import SyntheticGpu

    gpu = SyntheticGpu(seed=1)
    caches = measure_caches(gpu)
    header = {"gpu": gpu.facts.name, "gpu_uuid": gpu.facts.uuid, "architecture": "sm_90a", "sms": gpu.facts.sms,
              "mode": "quick", "caches": caches.to_json()}  # fmt: skip
    path = tmp_path_factory.mktemp("energy") / "windows.jsonl"
    measure(gpu, gpu.meter, plan("sm_90a", True), caches, WindowWriter(path, header), clock=lambda: 0.0)
    calibration = refit(path)

    def make(*names, dram=1.0, gpu_name="NVIDIA H200"):
        counters = {
            "instructions": 1e12, "sm_active_cycles": 132 * 1.9e9, "pipe_fma_instructions": 1e11,
            "pipe_alu_instructions": 1e11, "pipe_xu_instructions": 1e9, "pipe_tensor_cycles": 1e11,
            "pipe_tensor_hmma_cycles": 1e11, "shared_wavefronts": 1e10, "l1_sectors": 3e10, "l2_bytes": 2e12,
            "dram_read_bytes": 8e11 * dram, "dram_write_bytes": 3e11 * dram,
        }  # fmt: skip
        rows = [
            Measured(name, 1.0, 420.0, counters, dtype="bf16", kind="network", sm_clock_hz=1.98e9,
                                max_sm_clock_hz=1.98e9)
            for name in names
        ]  # fmt: skip
        source = {"gpu": gpu_name, "gpu_uuid": gpu.facts.uuid}
        return validation.document(
            calibration, source, validation.evaluate(calibration, rows), {"what_if": [], "trends": None}
        )

    return make
