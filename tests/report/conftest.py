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
