from __future__ import annotations

import numpy as np
import pytest

from joulemark.records import Case, Environment, Record, Run, Value

ENVIRONMENT = Environment({"driver": "580.65.06", "gpus": []})


@pytest.fixture
def make_processes():
    """Builds a run of cells that were measured in many processes, plain and with added work."""

    def make(
        cells=8,
        processes=24,
        arms=(0.0,),
        between=0.004,
        within=0.002,
        samples=9,
        seed=0,
        metric="device_time_s",
        fast=(),
        reading=None,
    ):
        """``fast``: (cell, process) that run 6 % faster; ``reading``: (cell, process, added work) → SM clock in Hz."""
        rng = np.random.default_rng(seed)
        records = []
        for cell in range(cells):
            for added in arms:
                level = 1e-3 * (cell + 1) * (1 + added) * np.exp(rng.normal(0, between, processes))
                level *= [0.94 if (cell, one) in fast else 1.0 for one in range(processes)]
                hertz = None if reading is None else [float(reading(cell, one, added)) for one in range(processes)]
                drawn = [one * np.exp(rng.normal(0, within, samples)) for one in level]
                medians = [float(np.median(one)) for one in drawn]
                records.append(
                    Record(
                        Case(f"cell{cell}", gpu_model="nvidia-h200", params={"added_work": added} if added else {}),
                        "r",
                        "ok",
                        ENVIRONMENT.environment_id,
                        metrics={metric: Value(float(np.median(medians)), "s", n=processes)},
                        samples={metric: [float(x) for one in drawn for x in one]},
                        processes=tuple(
                            {metric: one} | ({} if hertz is None else {"steady_sm_clock_hz": hertz[i]})
                            for i, one in enumerate(medians)
                        ),
                        sample_counts={metric: (samples,) * processes},
                    )
                )
        return Run("aa.jsonl", "r", {ENVIRONMENT.environment_id: ENVIRONMENT}, tuple(records), True)

    return make
