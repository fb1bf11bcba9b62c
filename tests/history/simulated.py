"""A store of many runs whose true changes are known."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from joulemark.records import Case, Environment, Record, Value

DRIVERS = ("570.86.10", "575.51.03", "580.159.04")
STARTED = 1.70e9
DAY = 86400.0


def levels(
    rng: np.random.Generator,
    rows: int,
    runs: int,
    shifts: Sequence[tuple[int, float, float]] = (),
    own: float = 0.015,
    common: float = 0.005,
) -> np.ndarray:
    """Times in s, rows × runs: noise of each row, of each run as a whole, and now and then a bad run or figure.

    Args:
        rng: of the noise.
        rows, runs: how many.
        shifts: (run, ratio, share of the rows): from that run on these rows change by that ratio.
        own: relative standard deviation of a row from run to run.
        common: relative standard deviation that all rows of a run share.
    """
    logs = np.log(rng.uniform(1e-4, 1e-1, (rows, 1))) + own * rng.standard_normal((rows, runs))
    logs += common * rng.standard_normal(runs)
    logs += 0.3 * (rng.random((rows, runs)) < 0.01) + 0.1 * (rng.random(runs) < 0.01)
    for at, ratio, share in shifts:
        logs[: round(share * rows), at:] += np.log(ratio)
    return np.exp(logs)


def drivers_by_run(runs: int, updates: Sequence[int]) -> list[str]:
    """The driver of each run when it is updated at these runs."""
    return [DRIVERS[sum(at <= run for at in updates)] for run in range(runs)]


def write_store(folder: Path, times: np.ndarray, drivers: Sequence[str], simulated: Collection[int] = ()) -> None:
    """One file of JSON lines per run, as the store writes them.

    Args:
        folder: made if need be.
        times: device times in s, rows × runs.
        drivers: of the runs.
        simulated: the runs whose GPUs are simulated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cases = [Case(f"model{row // 8:03d}", "train", "eager", "bf16", 2 ** (row % 8), gpu_model="nvidia-h200")
             for row in range(times.shape[0])]  # fmt: skip
    kinds = [(driver, run in simulated) for run, driver in enumerate(drivers)]
    environments = {
        (driver, fake): Environment({"driver": driver, "packages": {"torch": "2.14.0"}, "simulated": fake})
        for driver, fake in set(kinds)
    }
    templates = {kind: [_template(case, one) for case in cases] for kind, one in environments.items()}
    for run, kind in enumerate(kinds):
        run_id = f"{run:032x}"
        environment = environments[kind].to_json(run_id, STARTED + run * DAY)
        end = {"kind": "end", "schema": environment["schema"], "run_id": run_id, "wall_s": 60.0, "measured_s": 40.0,
               "completed": True, "reason": None}  # fmt: skip
        lines = [json.dumps(environment)]
        lines += [
            line % (run_id, time, time * 0.99, time * 1.01, 1 / time)
            for line, time in zip(templates[kind], times[:, run].tolist(), strict=True)
        ]
        lines.append(json.dumps(end))
        (folder / f"sweep-{run:05d}.jsonl").write_text("\n".join(lines) + "\n")


def _template(case: Case, environment: Environment) -> str:
    """A line of a result file with places for the run, the time, its interval and the throughput."""
    figures = {"device_time_s": Value(0.25, "s", (0.125, 0.375), n=20), "throughput_per_s": Value(0.5, "1/s")}
    line = json.dumps(Record(case, "@run", "ok", environment.environment_id, metrics=figures).to_json())
    assert "%" not in line
    for mark, place in (
        ('"@run"', '"%s"'),
        ("0.25,", "%.9g,"),
        ("0.125,", "%.9g,"),
        ("0.375]", "%.9g]"),
        ("0.5,", "%.9g,"),
    ):
        assert line.count(mark) == 1
        line = line.replace(mark, place)
    return line
