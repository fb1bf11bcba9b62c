"""From Measurements to the Record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from joulemark.measure.assemble import assemble, join
from joulemark.records import Case, Conditions, Finding, Measurement, Record, Value

CASE = Case("resnet50", "inference", "eager", "fp32", 8)


def record(measurements, outcome="ok", **more):
    return assemble(CASE, measurements, run_id="r", environment_id="e", outcome=outcome, **more)


def latency(value=0.002, process=0, samples=(0.002,) * 8, **more):
    return Measurement(
        "latency", {"host_time_s": Value(value, "s", n=len(samples))}, {"host_time_s": list(samples)},
        process=process, **more,
    )  # fmt: skip


def test_figures_that_nobody_measured_are_null_with_a_reason():
    made = record([latency(missing={"device_time_s": "no clock"})])
    assert made.outcome == "ok"
    assert made.metrics["device_time_s"] == Value(None, "s")
    assert made.notes["device_time_s"] == "no clock"
    for name, value in made.metrics.items():
        assert (value.value is None) == (name in made.notes)
    assert {"power_w", "energy_per_item_j", "peak_memory_bytes", "throughput_per_s"} <= set(made.notes)
    assert Record.from_json(made.to_json()) == made


@pytest.mark.parametrize("outcome", ["oom", "failed", "unsupported"])
def test_without_any_measurement_the_outcome_is_the_reason(outcome):
    made = record([], outcome, reason="why")
    assert made.outcome == outcome
    assert set(made.notes.values()) == {"why"}
    assert all(value.value is None for value in made.metrics.values())
    assert made.samples == {}


def test_a_figure_of_one_pass_outweighs_the_gap_of_another():
    late = Measurement("steady", {"device_time_s": Value(0.001, "s")})
    made = record([latency(missing={"device_time_s": "side streams"}), late])
    assert made.value("device_time_s") == 0.001
    assert "device_time_s" not in made.notes


def test_several_processes_give_the_median_of_their_figures():
    made = record([latency(value, process) for process, value in enumerate((0.002, 0.009, 0.003))])
    value = made.metrics["host_time_s"]
    assert (value.value, value.n, value.interval) == (0.003, 3, (0.002, 0.009))
    assert value.confidence == pytest.approx(0.75)
    assert [one["host_time_s"] for one in made.processes] == [0.002, 0.009, 0.003]
    assert len(made.samples["host_time_s"]) == 24


def test_the_process_of_each_sample_and_the_clock_of_each_process_are_kept():
    def power(process, clock):
        return Measurement("power", {"power_w": Value(1.0, "W")}, conditions=Conditions(clock), process=process)

    made = record(
        [
            latency(0.001, 0, (0.001, 0.002)),
            latency(0.004, 1, (0.004,) * 3),
            power(0, 1.9e9),
            power(1, 1.8e9),
            Measurement("steady", samples={"device_time_s": [0.5]}, process=1),
        ]
    )
    assert made.samples_by_process("host_time_s") == [[0.001, 0.002], [0.004] * 3]
    assert made.samples_by_process("device_time_s") == [[], [0.5]]
    assert [one["sm_clock_hz"] for one in made.processes] == [1.9e9, 1.8e9]
    assert made.value("sm_clock_hz") == pytest.approx(1.85e9)
    assert Record.from_json(made.to_json()) == made


def test_samples_of_an_older_file_are_told_apart_where_one_process_took_them():
    made = record([latency(), latency(process=1)])
    older = replace(made, sample_counts={})
    assert older.samples_by_process("host_time_s") is None
    assert replace(older, processes=made.processes[:1]).samples_by_process("host_time_s") == [[0.002] * 16]


def test_a_figure_that_no_process_has_stays_null():
    gap = Measurement("power", {"power_w": Value(None, "W")}, process=1)
    made = record([latency(), gap, latency(process=1), Measurement("power", {"power_w": Value(None, "W")})])
    assert made.metrics["power_w"].value is None


def test_a_figure_that_one_process_lacks_is_that_of_the_others():
    made = record([latency(), latency(process=1), Measurement("power", {"power_w": Value(250.0, "W")}, process=1)])
    assert made.metrics["power_w"].value == 250.0
    assert made.metrics["power_w"].n == 1


def test_a_finding_that_flags_flags_the_record_and_each_is_kept_once():
    flag, remark = Finding("hot", "90 degC", flags=True), Finding("odd", "so what")
    made = record([latency(findings=(remark,)), latency(process=1, findings=(remark,))], findings=[flag, flag])
    assert made.outcome == "flagged"
    assert made.findings == (flag, remark)
    assert record([latency(findings=(remark,))]).outcome == "ok"
    assert record([latency()], "failed", reason="x", findings=[flag]).outcome == "failed"


def test_unstable_samples_flag_a_record():
    made = record([latency(samples=(0.001, 0.003) * 5)])
    assert made.outcome == "flagged"
    assert [one.code for one in made.findings] == ["unstable"]


def test_conditions_and_dynamic_energy():
    conditions = Conditions(1.98e9, 3.2e9, 1.98e9, 60.0, {}, 12)
    power = Measurement(
        "power",
        {"power_w": Value(400.0, "W", n=5), "energy_per_item_j": Value(2.0, "J", n=5)},
        conditions=conditions,
        windows_utc=((1.0, 2.0), (2.0, 3.5)),
    )
    made = record([latency(), power], static_power_w=100.0, window_utc=(0.5, 4.0))
    assert made.value("sm_clock_hz") == 1.98e9
    assert made.value("temperature_c") == 60.0
    assert made.value("dynamic_energy_per_item_j") == pytest.approx(1.5)
    assert made.measured_windows_utc == ((1.0, 2.0), (2.0, 3.5))
    assert made.conditions == conditions
    assert record([latency(), power]).value("dynamic_energy_per_item_j") is None


def test_a_step_that_draws_less_than_the_idle_board_has_no_dynamic_energy():
    """Its clocks were lower than when the board was weighed: energy below nothing is none."""
    power = Measurement("power", {"power_w": Value(90.0, "W"), "energy_per_item_j": Value(2.0, "J")})
    made = record([latency(), power], static_power_w=120.0)
    assert made.metrics["dynamic_energy_per_item_j"].value is None
    assert made.notes["dynamic_energy_per_item_j"].startswith("the step drew 90.0 W")


def test_conditions_are_those_of_all_processes():
    """The third one was throttled: the record says so, whichever process came first."""

    def power(process, clock_hz, temperature_c, reasons):
        conditions = Conditions(clock_hz, 3.2e9, 1.98e9, temperature_c, reasons, 20)
        return Measurement("power", {"power_w": Value(1.0, "W")}, conditions=conditions, process=process)

    hot = power(2, 1.5e9, 88.0, {"thermal": 0.9, "power_cap": 0.1})
    passes = [power(0, 1.98e9, 60.0, {}), power(1, 1.97e9, 62.0, {"idle": 0.3}), hot]
    made = record([latency(), latency(process=1), latency(process=2), *passes])
    assert made.conditions.sm_clock_hz == 1.97e9
    assert made.conditions.temperature_c == 88.0
    assert made.conditions.n == 60
    assert made.conditions.reasons == pytest.approx({"thermal": 0.3, "power_cap": 0.1 / 3, "idle": 0.1})
    assert made.outcome == "flagged"
    assert [one.code for one in made.findings] == ["throttled"]
    rounds = [record([latency(), replace(one, process=0)]) for one in passes]
    assert join(rounds).conditions == made.conditions


def exposed(step, busy):
    steady = Measurement("steady", {"device_time_s": step})
    profiled = Measurement("profiler", {"gpu_busy_s": busy})
    return record([latency(), steady, profiled])


def test_the_unprofiled_step_minus_the_busy_time_is_exposed():
    made = exposed(
        Value(5e-3, "s", (4.9e-3, 5.2e-3), 0.95, 80, "cuda_events"),
        Value(1e-3, "s", (0.9e-3, 1.3e-3), 0.98, 10, "torch_profiler"),
    )
    value = made.metrics["exposed_overhead_unprofiled_s"]
    assert value.value == pytest.approx(4e-3)
    assert value.interval == pytest.approx((3.6e-3, 4.3e-3))
    assert value.confidence == pytest.approx(0.93)
    assert (value.n, value.tier) == (10, "cuda_events - torch_profiler")
    assert made.outcome == "ok"


def test_one_of_its_parts_alone_leaves_it_out():
    for step, busy in ((Value(5e-3, "s"), Value(None, "s")), (Value(None, "s"), Value(1e-3, "s"))):
        assert "exposed_overhead_unprofiled_s" not in exposed(step, busy).metrics
    assert exposed(Value(5e-3, "s"), Value(1e-3, "s")).metrics["exposed_overhead_unprofiled_s"].interval is None


@pytest.mark.parametrize(("busy", "outcome"), [(5.05e-3, "ok"), (5.2e-3, "flagged")])
def test_a_device_that_works_longer_than_the_step_lasts_is_flagged(busy, outcome):
    """5 ms ± 0.2 % and busy ± 0.2 %: 1 % more is what two processes may differ by, 4 % is not."""
    around = [Value(one, "s", (0.998 * one, 1.002 * one), 0.95, 50) for one in (5e-3, busy)]
    made = exposed(*around)
    assert made.outcome == outcome
    assert [one.code for one in made.findings] == ["busy_exceeds_step"] * (outcome == "flagged")


def test_tables_of_all_passes_come_onto_the_record():
    measured = [
        Measurement("a", tables={"levels": [{"level": "x"}]}),
        Measurement("b", tables={"levels": [{"level": "y"}]}),
    ]
    record = assemble(Case("f"), measured, run_id="r", environment_id="e", outcome="ok")
    assert record.tables == {"levels": [{"level": "x"}, {"level": "y"}]}
