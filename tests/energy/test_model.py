"""Counters to counts to joules: by hand, with intervals, under a limit, and split."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from joulemark.collect.energy import energy_of
from joulemark.energy import bits, trends, validation
from joulemark.energy.baselines import baselines
from joulemark.energy.calibrate import measure, measure_caches
from joulemark.energy.calibration import Calibration, refit
from joulemark.energy.counters import Counts, Mix, Range, counts_of
from joulemark.energy.fit import with_loss
from joulemark.energy.model import Model, activities_of, voltage
from joulemark.energy.outcome import Measured
from joulemark.energy.plan import plan
from joulemark.energy.split import split
from joulemark.energy.units import UNITS
from joulemark.energy.windows import WindowWriter
from joulemark.errors import ConfigurationError, MeasurementError, UnreadableInput
from joulemark.synthetic_gpu import Noise, SyntheticGpu

ROOT = Path(__file__).parents[2]
SILENT = Noise(window=0.0005, drift_w=0.0, jitter_s=0.0, edge_s=0.0, quantum_j=1e-6)


@pytest.fixture(scope="module")
def gpu():
    return SyntheticGpu(noise=SILENT, limit_w=420.0, beta=0.9, peak_w=400.0)


@pytest.fixture(scope="module")
def calibration(gpu, tmp_path_factory) -> Calibration:
    path = tmp_path_factory.mktemp("model") / "w.jsonl"
    caches = measure_caches(gpu)
    header = {
        "gpu": gpu.facts.name, "gpu_uuid": gpu.facts.uuid, "architecture": "sm_90a", "sms": 132, "mode": "reference",
    }  # fmt: skip
    writer = WindowWriter(path, header)
    measure(gpu, gpu.meter, plan("sm_90a", repeats=1), caches, writer, clock=lambda: 0.0)
    return refit(path)


def exact(**counts: float) -> Counts:
    return Counts({unit: Range.exact(count) for unit, count in counts.items()})


def true_energy(gpu: SyntheticGpu, counts: Counts, time_s: float, activity: float, clock: float = 1.0) -> float:
    core, memory = 0.0, 0.0
    for unit, one in counts.values.items():
        energy = sum(
            level * one.value * gpu.coefficients.get((unit, part), 0.0)
            for part, level in (("static", 1.0), ("control", 1.0), ("datapath", activity))
        )
        if UNITS[unit].group == "hbm":
            memory += energy
        else:
            core += energy * (1.0 if unit == "sm_active" else (1 - gpu.beta * (1 - clock)) ** 2)
    core_w = float(with_loss(np.array(core / time_s), gpu.coefficients["supply", "static"]))
    return time_s * (gpu.coefficients["static", "static"] + core_w) + memory


WORK = exact(
    instruction=2e12, sm_active=132.0, fp32=2e13, logic=5e12, wgmma_bf16=1e14, shared_read=4e12, l1=3e12,
    l2_read=2e12, l2_write=8e11, hbm_read=1.2e12, hbm_write=5e11,
)  # fmt: skip


def test_a_prediction_is_the_sum_of_its_parts_and_right(gpu, calibration):
    prediction = Model(calibration, activity=0.7).predict(WORK, 1.0)
    assert prediction.energy_j == pytest.approx(true_energy(gpu, WORK, 1.0, 0.7), rel=0.01)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.energy_j)
    assert prediction.power_w == prediction.energy_j
    static = prediction.parts["static", "static"] + prediction.parts["sm_active", "static"]
    assert prediction.dynamic_j == pytest.approx(prediction.energy_j - static)
    assert prediction.interval_j[0] < prediction.energy_j < prediction.interval_j[1]


def test_doubt_in_shares_and_activity_widens_the_interval(calibration):
    sure = Model(calibration, activity=0.8).predict(WORK, 1.0)
    unsure = Model(calibration).predict(WORK, 1.0)
    vague = dict(WORK.values) | {"fp32": Range(2e13, 1e13, 3e13)}
    vaguer = Model(calibration).predict(Counts(vague), 1.0)

    def width(prediction):
        return prediction.interval_j[1] - prediction.interval_j[0]

    assert width(sure) < width(unsure) < width(vaguer)


def test_activities_are_those_of_normal_values_where_measured(calibration):
    found = activities_of(calibration)
    assert found["hbm_read"].value == pytest.approx(0.8, abs=0.05)
    assert found["wgmma_bf16"].value == pytest.approx(0.8, abs=0.05)
    assert (found["fp64"].low, found["fp64"].high) == (0.5, 1.0)
    assert set(activities_of(calibration, 0.3).values()) == {Range.exact(0.3)}


def test_activity_in_memory_follows_the_format(calibration):
    bf16 = activities_of(calibration)["hbm_read"].value
    by_hand = 16 * bf16 - 8  # what the exponent adds, in bits
    kept = tuple(row for row in calibration.activities if row["operands"] != "normal_fp32")
    derived = activities_of(dataclasses.replace(calibration, activities=kept), dtype="fp32")
    assert derived["hbm_read"].value == pytest.approx((24 + by_hand) / 32)
    measured = activities_of(calibration, dtype="fp32")["hbm_read"]
    assert measured.value == pytest.approx(0.9, abs=0.05)
    one = tuple(row for row in kept if row["benchmark"] != "hbm_read")
    others = activities_of(dataclasses.replace(calibration, activities=one))["hbm_read"]
    assert others.value == pytest.approx(bf16, abs=0.05)  # as in the other levels, which see the same data
    assert activities_of(calibration, dtype="fp64")["hbm_read"].value > bf16
    assert activities_of(calibration, dtype="int8")["l1"].value == 1
    unchanged = activities_of(calibration, dtype="fp64")["wgmma_bf16"]
    assert unchanged == activities_of(calibration)["wgmma_bf16"]


def test_activity_in_memory_follows_the_bits_that_lie_there(calibration):
    levels = {row["benchmark"]: row["activity"] for row in calibration.activities if row["operands"] == "normal"}
    normal = activities_of(calibration, memory_bits=bits.of_operands("normal"))
    assert normal["hbm_read"].value == pytest.approx(levels["hbm_read"])
    assert normal["l2_read"].value == pytest.approx(levels["l2_read"])
    still = activities_of(calibration, memory_bits=0.0)
    assert still["hbm_read"].value == still["shared_read"].value == 0
    assert still["wgmma_bf16"] == activities_of(calibration)["wgmma_bf16"]  # its operands are no memory's
    row = Measured("one", 1.0, 300.0, COUNTERS, dtype="bf16", memory_bits=0.1)
    few, many = validation.evaluate(calibration, [row, dataclasses.replace(row, memory_bits=0.9)])
    assert few.prediction.energy_j < many.prediction.energy_j
    assert few.to_json()["memory_bits"] == 0.1


def test_under_a_limit_power_is_the_limit_and_time_grows(gpu, calibration):
    model = Model(calibration, activity=1.0)
    work = exact(instruction=2e12, sm_active=132.0, wgmma_bf16=7e14, shared_read=2e12)
    free = model.predict(work, 1.0)
    assert free.power_w > 500
    held = model.under_limit(work, 1.0, 420.0)
    assert held.power_w == pytest.approx(420, rel=1e-3)
    assert 0.5 < held.clock < 1.0
    assert held.time_s == pytest.approx(1.0 / held.clock)
    assert held.energy_j < free.energy_j + 118 * (held.time_s - 1.0)
    truth = true_energy(gpu, work, held.time_s, 1.0, held.clock)
    assert held.energy_j == pytest.approx(truth, rel=0.03)
    assert model.under_limit(work, 1.0, 5000.0).clock == 1.0
    bound_by_memory = model.under_limit(work, 1.0, 420.0, core_share=0.5)
    assert bound_by_memory.time_s < held.time_s * 1.05
    with pytest.raises(MeasurementError, match="no clock"):
        model.under_limit(work, 1.0, 100.0)


def test_starting_from_a_capped_measurement_gives_the_same(calibration):
    model = Model(calibration, activity=1.0)
    work = exact(instruction=2e12, sm_active=132.0, wgmma_bf16=7e14)
    free = model.under_limit(work, 1.0, 420.0)
    again = model.under_limit(work, 1.0 / 0.8, 420.0, clock=0.8)
    assert again.energy_j == pytest.approx(free.energy_j, rel=1e-6)


def test_without_a_law_a_limit_is_refused(calibration):
    lawless = dataclasses.replace(calibration, frequency_law={"beta": None, "reason": "0 capped windows"})
    with pytest.raises(MeasurementError, match="0 capped windows"):
        Model(lawless).under_limit(WORK, 0.5, 300.0)
    assert Model(lawless).predict(WORK, 1.0).energy_j > 0


# Counters to counts


COUNTERS = {
    "instructions": 1e12, "sm_active_cycles": 132 * 1.9e9, "pipe_fma_instructions": 3e11, "pipe_alu_instructions": 2e11,
    "pipe_xu_instructions": 1e10, "pipe_tensor_cycles": 1.1e11, "pipe_tensor_hmma_cycles": 1e11,
    "pipe_tensor_imma_cycles": 0.0, "pipe_fp64_cycles": 0.0, "shared_wavefronts": 3e10, "l1_sectors": 9e10,
    "l2_bytes": 4e12, "dram_read_bytes": 1e12, "dram_write_bytes": 5e11,
}  # fmt: skip


def test_counters_become_counts(calibration):
    counts = counts_of(COUNTERS, 1.0, 1.98e9, calibration, Mix.for_dtype("bf16", "sm_90a")).values
    assert counts["instruction"].value == 1e12
    own = 3e10 - 1e11 * 1024 * 2 * (64 + 256) / (2 * 64 * 256) / 128
    assert counts["memory_access"].value == pytest.approx(0.12 * 9e10 + 0.5 * own)
    assert counts["memory_access"].high == pytest.approx(0.25 * 9e10 + own)
    assert counts["sm_active"].value == pytest.approx(132 * 1.9 / 1.98)
    assert counts["fp32"].value == pytest.approx(0.8 * 3e11 * 32)
    assert counts["logic"].value == 2e11 * 32
    assert counts["wgmma_bf16"].value == pytest.approx(1e11 * 1024)
    assert counts["mma_fp64"].value == pytest.approx(1e10 * 64)
    operands = 1e11 * 1024 * 2 * (64 + 256) / (2 * 64 * 256)  # bytes that wgmma reads, which its energy holds
    assert counts["shared_read"].value + counts["shared_write"].value == pytest.approx(3e10 * 128 - operands)
    assert counts["l1"].value == 9e10 * 32
    assert counts["hbm_read"].value == 1e12
    assert counts["l2_read"].value + counts["l2_write"].value == pytest.approx(4e12)
    assert counts["l2_read"].value >= counts["hbm_read"].value


@pytest.mark.parametrize(("busy", "most"), [(1.0, 1.0), (0.4, 0.6)])
def test_memory_is_in_use_for_as_long_as_sms_are_active(calibration, busy, most):
    counters = COUNTERS | {"sm_active_cycles": busy * 132 * 1.98e9}
    found = counts_of(counters, 1.0, 1.98e9, calibration, Mix()).values["hbm_active"]
    assert (found.low, found.value, found.high) == pytest.approx((0.7 * busy, busy, most))
    sampled = counts_of(counters | {"gpu_busy_s": 0.95 * busy}, 1.0, 1.98e9, calibration, Mix())
    assert sampled.values["hbm_active"] == found
    assert (sampled.busy.low, sampled.busy.value) == pytest.approx((0.95 * busy, 0.95 * busy))
    nothing = {**counters, "dram_read_bytes": 0.0, "dram_write_bytes": 0.0}
    assert "hbm_active" not in counts_of(nothing, 1.0, 1.98e9, calibration, Mix()).values


@pytest.mark.parametrize(("heavy", "integer"), [(0.5, 0.0), (0.75, 0.5), (1.0, 1.0)])
def test_integers_are_told_by_the_pipe_that_alone_multiplies_them(calibration, heavy, integer):
    counters = COUNTERS | {"pipe_fmaheavy_instructions": heavy * 3e11}
    counts = counts_of(counters, 1.0, None, calibration, Mix()).values
    assert counts["fp32"].value == pytest.approx((1 - integer) * 3e11 * 32)
    assert counts["integer"].value == pytest.approx(integer * 3e11 * 32)
    given = Mix(fma={"fp16x2": Range.exact(1.0)}, source="disassembly")
    found = counts_of(counters, 1.0, None, calibration, given)
    assert "fp32" not in found.values
    assert "shares of the FMA pipes are disassembly" in found.notes
    factors = {"fp32": {"pipe_fma_instructions": 0.03125, "pipe_fmaheavy_instructions": 0.6 * 0.03125}}
    measured = dataclasses.replace(calibration, factors=factors)
    counters["pipe_fmaheavy_instructions"] = 0.6 * 3e11
    assert counts_of(counters, 1.0, None, measured, Mix()).values["fp32"].value == pytest.approx(3e11 * 32)


def test_an_l2_that_counts_hbm_traffic_more_than_once_is_corrected(calibration):
    """As seen on an H200: 1.5 bytes of L2 traffic per byte from HBM, one per hit."""
    factors = {"l2_read": {"l2_bytes": 1.0}, "hbm_read": {"l2_bytes": 1.5}, "hbm_write": {"l2_bytes": 2.0}}
    measured = dataclasses.replace(calibration, factors=factors)
    counts = counts_of(COUNTERS, 1.0, None, measured, Mix(l2_read=Range.exact(1.0))).values
    hits = 4e12 - 1.5e12 - 1e12
    assert counts["l2_read"].value == pytest.approx(1e12 + hits)
    assert counts["l2_write"].value == pytest.approx(5e11)


def test_measured_factors_replace_nominal_ones(calibration):
    measured = dataclasses.replace(calibration, factors={"wgmma_bf16": {"pipe_tensor_hmma_cycles": 1 / 900}})
    mix = Mix.for_dtype("bf16", "sm_90a")
    found = counts_of(COUNTERS, 1.0, None, measured, mix)
    assert found.values["wgmma_bf16"].value == pytest.approx(1e11 * 900)
    assert not any("FLOP per cycle of wgmma_bf16" in note for note in found.notes)
    nominal = counts_of(COUNTERS, 1.0, None, calibration, mix)
    assert any("FLOP per cycle of wgmma_bf16 are nominal (1024)" in note for note in nominal.notes)


def test_a_counter_that_is_missing_is_named_and_not_zero(calibration):
    few = {"instructions": 1e12, "dram_read_bytes": 1e12}
    found = counts_of(few, 1.0, None, calibration, Mix())
    assert "shared_read" not in found.values
    assert any(note.startswith("shared_wavefronts was not counted") for note in found.notes)
    assert any("active SMs were not counted" in note for note in found.notes)


@pytest.mark.parametrize(
    ("without", "found", "said"),
    [
        (["", "_hmma", "_imma"], {}, "pipe_tensor_cycles was not counted: what no other counter shows"),
        ([""], {"wgmma_bf16": 6e10 * 1024, "wgmma_int8": 3e10 * 2048}, "pipe_tensor_cycles was not counted"),
        (["_hmma"], {"wgmma_bf16": 8e10 * 1024, "wgmma_int8": 3e10 * 2048}, ""),
        (["_imma"], {"wgmma_bf16": 6e10 * 1024, "mma_fp64": 5e10 * 64}, "pipe_tensor_imma_cycles was not counted"),
        ([], {"wgmma_bf16": 6e10 * 1024, "wgmma_int8": 3e10 * 2048, "mma_fp64": 2e10 * 64}, ""),
    ],
)
def test_tensor_work_that_was_not_counted_is_named_and_no_cycle_counts_twice(calibration, without, found, said):
    every = {"pipe_tensor_cycles": 1.1e11, "pipe_tensor_hmma_cycles": 6e10, "pipe_tensor_imma_cycles": 3e10}
    left = {name for name in every if name not in {f"pipe_tensor{one}_cycles" for one in without}}
    counters = {name: total for name, total in (COUNTERS | every).items() if name not in every or name in left}
    counts = counts_of(counters, 1.0, 1.98e9, calibration, Mix.for_dtype("bf16", "sm_90a"))
    tensor = {unit: one.value for unit, one in counts.values.items() if UNITS[unit].group == "tensor"}
    assert tensor == pytest.approx(found)
    assert any(note.startswith(said) for note in counts.notes)
    assert said or not any("_cycles was not counted" in note for note in counts.notes)


def test_fp64_work_that_was_not_counted_is_named(calibration):
    counters = {name: total for name, total in COUNTERS.items() if name != "pipe_fp64_cycles"}
    notes = counts_of(counters, 1.0, 1.98e9, calibration, Mix.for_dtype("bf16", "sm_90a")).notes
    assert "pipe_fp64_cycles was not counted: FP64 arithmetic costs nothing here" in notes


def test_a_unit_without_an_energy_is_named(calibration):
    found = counts_of(COUNTERS, 1.0, None, calibration, Mix(tensor={"mma_fp8": Range.exact(1.0)}))
    assert any("no energy for mma_fp8" in note for note in found.notes)


def test_mixes_are_read_and_wrong_ones_refused():
    otherwise = Mix.for_dtype("fp16", "sm_80")
    mix = Mix.from_json({"fma": {"fp32": [0.9, 0.8, 1.0]}, "l2_read": 0.5, "source": "disassembly"}, otherwise)
    assert mix.fma == {"fp32": Range(0.9, 0.8, 1.0)}
    assert mix.tensor == {"mma_fp16": Range.exact(1.0)}
    assert (mix.l2_read, mix.source) == (Range.exact(0.5), "disassembly")
    with pytest.raises(UnreadableInput, match="mix of a workload"):
        Mix.from_json({"fma": {"fp32": "most"}}, otherwise)
    for share in (-0.1, 1.5, [0.5, 0.6, 0.7], float("nan")):
        with pytest.raises(UnreadableInput, match="no share"):
            Mix.from_json({"l2_read": share}, otherwise)


# Split


def test_parts_and_residual_sum_to_the_measured_energy(calibration):
    prediction = Model(calibration).predict(WORK, 1.0)
    result = split(calibration, prediction, WORK, 600.0)
    total = sum(energy for parts in result.parts.values() for energy in parts.values())
    assert total + result.residual_j == pytest.approx(600)
    assert result.residual_share == pytest.approx((600 - prediction.energy_j) / 600)
    assert set(result.parts) >= {"static", "issue", "vector", "tensor", "shared", "l1", "l2", "hbm"}
    assert set(result.parts["hbm"]) == {"control", "datapath"}


def test_data_movement_by_both_definitions(calibration):
    prediction = Model(calibration).predict(WORK, 1.0)
    result = split(calibration, prediction, WORK, prediction.energy_j)
    groups = ("shared", "l1", "l2", "hbm")
    movement = sum(sum(result.parts[group].values()) for group in groups)
    assert result.movement_share == pytest.approx(movement / prediction.dynamic_j)
    energies = {
        row["benchmark"]: row["measured_j"] for row in calibration.paths if row["operands"] == "normal"
    }  # fmt: skip
    by_hand = (
        1.2e12 * energies["hbm_read"] + 5e11 * energies["hbm_write"] + 8e11 * energies["l2_read"]
        + 3e11 * energies["l2_write"] + 2e11 * energies["l1_read"] + 4e12 * energies["shared_read"]
    )  # fmt: skip
    assert result.path_share == pytest.approx(by_hand / prediction.dynamic_j)
    assert result.path_share > result.movement_share


def test_energy_below_static_has_no_shares(calibration):
    prediction = Model(calibration).predict(WORK, 1.0)
    result = split(calibration, prediction, WORK, 50.0)
    assert result.movement_share is None
    assert result.path_share is None
    assert "below static energy" in result.notes[-1]


# Trends


def test_published_energies_are_read_and_stand_beside_ours(calibration):
    published = trends.read_published((ROOT / "results" / "published").glob("*.json"))
    assert {one.gpu for one in published} == {"NVIDIA A100", "NVIDIA GH200", "AMD MI250X GCD", "AMD MI300A"}
    a100 = {one.quantity: one for one in published if one.gpu == "NVIDIA A100"}
    assert a100["hbm"].value_j == pytest.approx(13.11e-12)
    assert a100["hbm"].control_j + a100["hbm"].datapath_j == pytest.approx(a100["hbm"].value_j)
    assert a100["load_hbm"].value_j == pytest.approx(2090e-12 / 32)
    rows = {row["quantity"]: row for row in trends.beside(calibration, published)}
    assert len(rows["hbm"]["published"]) == 4
    path = {row["benchmark"]: row["measured_j"] for row in calibration.paths if row["operands"] == "random"}
    assert rows["hbm"]["this_random_j"] == pytest.approx(path["hbm_read"] / 8)
    assert rows["vector_fp64"]["this_random_j"] == pytest.approx(path["fp64"] / 2)
    assert rows["hbm"]["this_zero_j"] < rows["hbm"]["this_random_j"]


def test_what_if_a_part_cost_less(calibration):
    def asked(text):
        models = Model(calibration), Model(calibration, scale=trends.scale_of([text]))
        return trends.what_if(*(model.predict(WORK, 1.0) for model in models))

    result = asked("hbm=0.5")
    prediction = Model(calibration).predict(WORK, 1.0)
    hbm = sum(energy for (unit, _), energy in prediction.parts.items() if UNITS[unit].group == "hbm")
    saved = result.energy_j - result.new_energy_j
    assert saved == pytest.approx(hbm / 2)  # the memory has no part in the loss of the core's supply
    assert asked(f"{result.largest}=0").new_largest != result.largest


def test_what_if_the_limit_were_lower(calibration):
    work = exact(instruction=2e12, sm_active=132.0, wgmma_bf16=4e14)
    result = trends.limited(Model(calibration), work, 1.0, 300.0)
    assert result.new_time_s > result.time_s
    assert result.new_energy_j / result.new_time_s == pytest.approx(300, rel=1e-3)


@pytest.mark.parametrize("text", ["hbm", "hbm=", "hbm=-1", "hbm=nan", "memory=0.5", "=2", "hbm=inf"])
def test_a_wrong_scale_is_refused_with_the_names(text):
    with pytest.raises(ConfigurationError, match="give NAME=FACTOR"):
        trends.scale_of([text])


def test_scales_of_groups_and_units():
    halved = dict.fromkeys(("hbm_active", "hbm_read", "hbm_write"), 0.5)
    assert trends.scale_of(["hbm=0.5", "fp64=2"]) == {**halved, "fp64": 2.0}


# Validation


def measured_rows(gpu: SyntheticGpu, calibration: Calibration) -> list[dict]:
    rows = []
    for i, factor in enumerate((0.2, 0.5, 1.0)):
        counters = {name: total * factor for name, total in COUNTERS.items()}
        counters["pipe_tensor_cycles"] = counters["pipe_tensor_hmma_cycles"]
        counts = counts_of(counters, 1.0, 1.98e9, calibration, Mix.for_dtype("bf16", "sm_90a"))
        rows.append(
            {
                "workload": f"work{i}", "kind": "network" if i else "kernel", "dtype": "bf16", "window_s": 1.0,
                "measured_j": true_energy(gpu, counts, 1.0, 0.8), "counters": counters, "sm_clock_hz": 1.98e9,
                "max_sm_clock_hz": 1.98e9,
            }
        )  # fmt: skip
    return rows


def test_a_validation_recomputes_itself(gpu, calibration, tmp_path):
    source = {
        "schema": "joulemark/energy-measurements/1", "gpu": "Synthetic GPU", "gpu_uuid": gpu.facts.uuid,
        "rows": measured_rows(gpu, calibration),
    }  # fmt: skip
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(source))
    document, rows = validation.read_measurements(path)
    outcomes = validation.evaluate(calibration, rows)
    result = validation.document(calibration, document, outcomes, {})
    assert result["summary"]["uncapped"]["n"] == 3
    assert result["summary"]["uncapped"]["mean_absolute"] < 0.04
    assert result["summary"]["networks"]["n"] == 2
    assert all(row["interval"][0] <= row["measured_j"] <= row["interval"][1] for row in result["rows"])
    assert set(result["summary"]["baselines"]) == {
        "constant power", "a + b SM-active", "tensor + HBM", "instructions + HBM",
    }  # fmt: skip
    assert result["notes"] == []
    path.write_text(json.dumps(result))
    again, rows = validation.read_measurements(path)
    assert validation.document(calibration, again, validation.evaluate(calibration, rows), {}) == result


def test_a_capped_row_is_judged_by_energy_per_item(gpu, calibration):
    work = exact(instruction=2e12, memory_access=0.25 * 2e12, sm_active=132.0, wgmma_bf16=7e14)
    truth = Model(calibration, activity=1.0).under_limit(work, 1.0, 420.0)
    row = Measured(
        "gemm", truth.time_s, truth.energy_j,
        {"instructions": 2e12, "pipe_tensor_cycles": 7e14 / 1024, "sm_active_cycles": 132 * 1.98e9},
        "bf16", sm_clock_hz=1.98e9 * truth.clock, max_sm_clock_hz=1.98e9, capped=True, power_limit_w=420.0,
        activity=1.0,
    )  # fmt: skip
    (outcome,) = validation.evaluate(calibration, [row])
    assert abs(outcome.error) < 0.03
    assert outcome.dynamic_error is None
    assert outcome.prediction.power_w == pytest.approx(420, rel=1e-3)
    unknown = dataclasses.replace(row, power_limit_w=None)
    (outcome,) = validation.evaluate(calibration, [unknown])
    assert outcome.error is None
    assert "power limit is not in the file" in outcome.reason
    assert outcome.to_json()["predicted_j"] is None


def test_a_row_whose_clock_was_locked_is_predicted_at_it(gpu, calibration):
    """No limit held it down, so neither power nor the driver's reasons tell."""
    counts = counts_of(COUNTERS, 1.0, 1.5e9, calibration, Mix.for_dtype("bf16", "sm_90a"))
    measured = true_energy(gpu, counts, 1.0, 0.8, clock=1.5 / 1.98)
    row = Measured("locked", 1.0, measured, COUNTERS, "bf16", sm_clock_hz=1.5e9, max_sm_clock_hz=1.98e9, activity=0.8)
    (outcome,) = validation.evaluate(calibration, [row])
    assert outcome.prediction.clock == pytest.approx(1.5 / 1.98)
    assert abs(outcome.error) < 0.02
    assert Model(calibration, activity=0.8).predict(counts, 1.0).energy_j / measured - 1 > 0.1
    for seen, prolonged in (([0.7, 0.98], False), ([0.8, 0.98], True)):
        law = dict(calibration.frequency_law) | {"clock_range": seen}
        (outcome,) = validation.evaluate(dataclasses.replace(calibration, frequency_law=law), [row])
        assert any("at 0.76 of the highest clock" in one for one in outcome.to_json()["assumptions"]) is prolonged
    without = dataclasses.replace(calibration, frequency_law={"beta": None, "interval": None, "reason": "no window"})
    (outcome,) = validation.evaluate(without, [row])
    assert outcome.error is None
    assert "no law of energy over clock" in outcome.reason
    a_step_below = dataclasses.replace(row, sm_clock_hz=1.965e9)
    (outcome,) = validation.evaluate(without, [a_step_below])
    assert outcome.prediction.clock == 1.0


def test_simple_models_are_the_best_of_their_form_on_random_operands(calibration):
    used = [row for row in calibration.windows if row["left_out"] is None and "/zero/" not in row["key"]]
    used += [row for row in calibration.windows if row["left_out"] is None and not set(row["rates"]) - {"sm_active"}]

    def error(model):
        return np.mean([abs(model.power_w(row["rates"], calibration) / row["power_w"] - 1) for row in used])

    found = {one.name: one for one in baselines(calibration)}
    for name, one in found.items():
        assert len(one.coefficients) == {"constant power": 1, "a + b SM-active": 2}.get(name, 3)
        assert min(one.coefficients) >= 0
        for i, coefficient in enumerate(one.coefficients):
            for factor in (0.98, 1.02):
                other = [*one.coefficients[:i], factor * coefficient, *one.coefficients[i + 1 :]]
                assert error(one) <= error(dataclasses.replace(one, coefficients=tuple(other))) + 1e-9
    assert error(found["instructions + HBM"]) < 0.8 * error(found["constant power"])


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "other"},
        {"rows": [{}]},
        {"rows": None},
        {"rows": [{"workload": "w", "window_s": 0, "measured_j": 1, "counters": {}}]},
    ],
)
def test_what_holds_no_measured_workloads_is_refused(tmp_path, change):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"schema": validation.MEASUREMENTS_SCHEMA, "rows": [], **change}))
    with pytest.raises(UnreadableInput, match="no measured workloads"):
        validation.read_measurements(path)


def test_an_idle_board_before_the_workload_is_its_static_power(calibration):
    at = calibration.value("static")
    row = Measured("one", 2.0, 900.0, COUNTERS, "bf16", sm_clock_hz=1.98e9)
    plain, shifted = (
        validation.evaluate(calibration, [dataclasses.replace(row, idle_w=idle)])[0].prediction
        for idle in (None, at + 10.0)
    )
    assert shifted.energy_j - plain.energy_j == pytest.approx(2.0 * 10.0)
    assert shifted.dynamic_j == pytest.approx(plain.dynamic_j)
    assert shifted.interval_j[0] - plain.interval_j[0] == pytest.approx(2.0 * 10.0)
    assert validation.static_offset_w(calibration, at) == pytest.approx(0.0)
    idle = [one["power_w"] for one in calibration.windows if one["key"].startswith("idle/")]
    assert len(idle) > 5
    assert at == pytest.approx(np.median(idle), abs=1.0)


def test_static_power_that_steps_between_processes_is_weighed_away(gpu, calibration):
    """As on an H200 whose torch process drew 10 W more: weighed before the work, the prediction is right again."""
    loaded = dataclasses.replace(gpu, coefficients={**gpu.coefficients, ("static", "static"): 118.0 + 10.0})
    few = {name: 0.2 * total for name, total in COUNTERS.items()}
    counts = counts_of(few, 1.0, 1.98e9, calibration, Mix.for_dtype("bf16", "sm_90a"))
    ran, power = loaded.meter(lambda: loaded.run(None, 0.0, 1.0))
    idle_w = energy_of(power, ran.start, ran.end).power_w.value
    measured = true_energy(loaded, counts, 1.0, 0.8)
    row = Measured("low", 1.0, measured, few, "bf16", sm_clock_hz=1.98e9, activity=0.8)
    blind, weighed = (
        validation.evaluate(calibration, [dataclasses.replace(row, idle_w=idle)])[0] for idle in (None, idle_w)
    )
    assert blind.error * measured == pytest.approx(-10.0, abs=1.5)
    assert abs(weighed.error) < 0.01
    assert abs(weighed.dynamic_error) < 0.02


def test_a_row_without_counters_has_a_reason_and_no_prediction(calibration):
    (outcome,) = validation.evaluate(calibration, [Measured("one", 1.0, 200.0, {})])
    assert outcome.error is None
    assert outcome.reason == "its counters were not measured"
    assert outcome.to_json()["notes"] == {"prediction": outcome.reason}


def test_memory_instructions_are_at_most_those_of_no_arithmetic_pipe(calibration):
    arithmetic = COUNTERS | {"pipe_fma_instructions": 7.85e11}
    counts = counts_of(arithmetic, 1.0, 1.98e9, calibration, Mix()).values
    assert counts["memory_access"].value == pytest.approx(5e9)
    assert counts["memory_access"].low <= counts["memory_access"].value == counts["memory_access"].high


def test_a_counter_that_saw_nothing_of_the_microbenchmarks_is_taken_as_not_counted(calibration):
    mix, dead = Mix.for_dtype("fp32", "sm_90a"), COUNTERS | {"pipe_lsu_instructions": 0.0}
    factors = {"l1": {"pipe_lsu_instructions": 0.0}, "fp32": {"pipe_lsu_instructions": 0.0}}
    found = counts_of(dead, 1.0, 1.98e9, dataclasses.replace(calibration, factors=factors), mix)
    without = counts_of(COUNTERS, 1.0, 1.98e9, calibration, mix)
    assert found.values["memory_access"] == without.values["memory_access"]
    assert any("pipe_lsu_instructions saw nothing" in note for note in found.notes)
    sees = {**factors, "l1": {"pipe_lsu_instructions": 1 / 512}}
    trusted = counts_of(dead, 1.0, 1.98e9, dataclasses.replace(calibration, factors=sees), mix)
    assert "memory_access" not in trusted.values


def test_requests_are_counted_or_assumed_from_sectors(calibration):
    mix = Mix.for_dtype("fp32", "sm_90a")
    assumed = counts_of(COUNTERS, 1.0, 1.98e9, calibration, mix).values
    assert assumed["l1_request"].low < assumed["l1_request"].value < assumed["l1_request"].high
    sectors = (assumed["l2_read"].value + assumed["l2_write"].value) / 32
    assert assumed["l2_request"].low == pytest.approx(0.25 * sectors)
    more = {"pipe_lsu_instructions": 5e10, "l1_requests": 2e10, "l2_requests": 9e10, "l2_write_sectors": 4e10}
    counted = counts_of(COUNTERS | more, 1.0, 1.98e9, calibration, mix).values
    assert counted["memory_access"] == Range.exact(5e10)
    assert counted["l1_request"] == Range.exact(2e10)
    assert counted["l2_request"] == Range.exact(9e10)
    assert counted["l2_write"].value == pytest.approx(4e10 * 32)
    assert counted["l2_read"].value == pytest.approx(4e12 - 4e10 * 32)
    factors = {
        "l2_read": {"l2_requests": 1 / 128}, "hbm_read": {"l2_requests": 1.5 / 128, "l2_bytes": 1.0},
        "l2_request": {"l2_requests": 1.1},
    }  # fmt: skip
    measured = dataclasses.replace(calibration, factors=factors)
    less = counts_of(COUNTERS | more, 1.0, 1.98e9, measured, mix).values["l2_request"].value
    assert less == pytest.approx((9e10 - 0.5 / 128 * 1e12) / 1.1)


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ({"fmaa": {}}, "'fmaa' is none of"),
        ({"fma": {"fp32": 1, "integer": 1}}, "add up to 2"),
        ({"fma": {"fp64": 0.5}}, "'fp64' is none of"),
        ({"tensor": {"hbm_read": 1.0}}, "'hbm_read' is none of"),
        ({"tensor": {"mma_bf16": float("nan")}}, "is no share"),
        ({"int8": [1]}, "see docs"),
        ({"shared_read": [0.5, 0.6, 0.7]}, "is no share"),
    ],
    ids=str,
)
def test_a_mix_that_cannot_be_is_refused_by_the_name_of_its_workload(calibration, mix, words):
    row = Measured("odd", 1.0, 300.0, COUNTERS, mix=mix)
    with pytest.raises(UnreadableInput, match=f"^odd: .*{words}"):
        validation.evaluate(calibration, [row])


def test_what_a_mix_leaves_out_is_said(calibration):
    part = Mix.from_json({"fma": {"fp32": 0.6}, "tensor": {"mma_bf16": 0.5}}, Mix())
    notes = counts_of(COUNTERS, 1.0, None, calibration, part).notes
    assert any(note.startswith("the mix names 60% of the FMA pipes") for note in notes)
    assert any(note.startswith("the mix names 50% of pipe_tensor_hmma_cycles") for note in notes)


def test_a_counter_that_saw_nothing_of_its_unit_divides_nothing(calibration):
    names = ("pipe_tensor_hmma_cycles", "pipe_fp64_cycles", "l2_bytes", "l2_requests", "l2_write_sectors")
    dead = {unit: dict.fromkeys(names, 0.0) for unit in ("wgmma_int8", "fp64", "l2_read", "l2_write", "l2_request")}
    measured, mix = dataclasses.replace(calibration, factors=dead), Mix(tensor={"wgmma_int8": Range.exact(1.0)})
    counters = COUNTERS | {"pipe_fp64_cycles": 1e9, "l2_requests": 1e9, "l2_write_sectors": 1e9, "l1_requests": 1e9}
    found, nominal = (counts_of(counters, 1.0, None, one, mix) for one in (measured, calibration))
    for unit in ("fp64", "l2_read", "l2_write", "l2_request", "wgmma_int8"):
        assert found.values[unit] == nominal.values[unit]
    assert any("saw nothing of wgmma_int8" in note for note in found.notes)


@pytest.mark.parametrize("clock", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize(("slope", "curvature"), [(-0.3, 0.0), (0.0, 0.0), (1.4, 1e300), (-1.0, 3.0)])
def test_a_voltage_that_would_rise_as_the_clock_falls_stays(clock, slope, curvature):
    assert voltage(clock, slope, curvature) == pytest.approx(1.0)


def test_draws_of_a_law_near_none_keep_the_voltage(calibration):
    law = {"beta": 0.01, "interval": [-0.2, 0.22], "curvature": 0.0, "covariance": None, "reason": None}
    flat = Model(dataclasses.replace(calibration, frequency_law=law), activity=0.7)
    low, high = flat.predict(WORK, 1.0, clock=0.8).interval_j
    at_top = flat.predict(WORK, 1.0).energy_j
    assert 0.9 * at_top < low < high < 1.1 * at_top


def test_a_capped_row_without_a_law_costs_the_others_nothing(calibration):
    without = dataclasses.replace(calibration, frequency_law={"beta": None, "interval": None, "reason": "no window"})
    free = Measured("free", 1.0, 300.0, COUNTERS)
    held = dataclasses.replace(
        free, workload="held", capped=True, power_limit_w=9e9, sm_clock_hz=1.5e9, max_sm_clock_hz=1.98e9
    )
    first, second = validation.evaluate(without, [free, held])
    assert first.prediction is not None
    assert second.prediction is None
    assert "no law of energy over clock" in second.reason


def test_a_prediction_beyond_all_numbers_is_a_reason(calibration):
    row = Measured("vast", 1.0, 300.0, COUNTERS | {"instructions": 1e300})
    assert "beyond all numbers" in validation.evaluate(calibration, [row])[0].reason


def _broken(document, change):
    one, two = document["coefficients"][:2]
    law = {"beta": 1.4, "interval": [1.3, 1.5], "reason": None}
    if change == "no static power":
        document["coefficients"] = document["coefficients"][1:]
        document["draws"] = [row[1:] for row in document["draws"]]
    elif change == "stands there twice":
        document["coefficients"][1] = one
    elif change == "is no part of that unit":
        document["coefficients"][1] = {**two, "part": "datapath"}
    elif change == "no covariance that can be":
        document["frequency_law"] = {**law, "covariance": [[0.01, 0.5], [0.5, 0.01]]}
    elif change == "no interval that can be":
        document["bursts"] = {"share": 0.2, "interval": [0.4, 0.1]}
    elif change == "curvature":
        document["frequency_law"] = {**law, "curvature": -2.0}
    elif change == "clock_range":
        document["frequency_law"] = {**law, "clock_range": ["0.8", "1.0"]}
    elif change == "value":
        document["coefficients"][0] = {**one, "value": 1e999}
    else:
        document["gpu"] = {**document["gpu"], "sms": 0}
    return document


@pytest.mark.parametrize(
    "change",
    [
        "no static power", "stands there twice", "is no part of that unit", "no covariance that can be", "curvature",
        "no interval that can be", "clock_range", "value", "sms",
    ],
)  # fmt: skip
def test_a_calibration_that_cannot_be_is_refused(calibration, change):
    document = calibration.to_json()
    Calibration.from_json(document)
    with pytest.raises(ValueError, match=change):
        Calibration.from_json(_broken(document, change))


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": 1e999},
        {"driver": {}},
        {"measured_utc": [1]},
        {"rows": [{"memory_bits": 2.1}]},
        {"rows": [{"memory_bits": -1}]},
    ],
    ids=str,
)
def test_measurements_that_cannot_be_are_refused(tmp_path, change):
    path = tmp_path / "m.json"
    row = {"workload": "one", "window_s": 1.0, "measured_j": 300.0, "counters": COUNTERS}
    rows = [row | more for more in change.pop("rows", [{"memory_bits": 2.0}])]
    path.write_text(json.dumps({"schema": validation.MEASUREMENTS_SCHEMA, "rows": rows} | change))
    with pytest.raises(UnreadableInput, match=r"\$\.(gpu|driver|measured_utc|memory_bits)"):
        validation.read_measurements(path)


def test_workloads_of_a_simulated_gpu_are_marked(calibration):
    for source, marked in (({}, False), ({"simulated": True}, True)):
        found = validation.document(calibration, source, [], {})
        assert found.get("simulated", False) is marked
        assert any(note.startswith("measured on simulated GPUs") for note in found["notes"]) is marked
