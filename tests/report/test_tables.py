from dataclasses import replace

import pytest

from joulemark import findings
from joulemark.records import Case, Environment, Finding, Table, Value
from joulemark.report import terminal
from joulemark.report.tables import efficiency_of, format_figure, notes_of_missing, summary_line, tables_of_run


def table_of(run):
    (table,) = tables_of_run(run)
    return table


def column(table, title):
    return [row[table.columns.index(title)] for row in table.rows]


def test_rows_hold_figures_in_units_with_their_intervals(make_record, make_run):
    record = make_record(
        figures={"device_time_s": 1.23e-3, "throughput_per_s": 6500.0, "power_w": 512.0, "peak_memory_bytes": 3 * 2**30}
    )
    table = table_of(make_run(record))
    assert table.columns == (
        "workload", "phase", "dtype", "mode", "batch", "device time", "items/s", "power", "peak memory", "outcome",
    )  # fmt: skip
    assert table.rows == (
        ("resnet50", "train", "bf16", "eager", "8", "1.23 ms ±1.0%", "6.5 k", "512 W", "3 GiB", "ok"),
    )
    assert table.numeric == frozenset({4, 5, 6, 7, 8})


def test_what_was_measured_nowhere_has_no_column_but_one_note(make_record, make_run):
    notes = {"energy_per_item_j": "no GPU", "power_w": "no GPU", "sm_clock_hz": "CPU"}
    records = [make_record(batch=n, figures={"host_time_s": 1e-3}, notes=notes) for n in (1, 2)]
    table = table_of(make_run(*records))
    assert "power" not in table.columns
    assert table.notes[:2] == ("not measured: energy/item, power: no GPU", "not measured: SM clock: CPU")


def test_a_figure_missing_in_one_row_is_na_and_named(make_record, make_run):
    whole = make_record(figures={"host_time_s": 1e-3, "power_w": 300.0})
    lacking = make_record(batch=16, figures={"host_time_s": 1e-3}, notes={"power_w": "window too short"})
    table = table_of(make_run(whole, lacking))
    assert column(table, "power") == ["300 W", "n/a"]
    assert table.notes[0] == f"not measured: power of {lacking.case.label}: window too short"


def own_time(record):
    return replace(record, metrics={"host_time_s": record.metrics["device_time_s"]})


def test_out_of_memory_and_failure_are_rows_with_reasons(make_record, make_run):
    records = [
        make_record(figures={"device_time_s": 1e-3}),
        make_record(batch=64, outcome="oom", reason="out of memory: 20 GiB asked", notes={"power_w": "oom"}),
        make_record(batch=128, outcome="oom", reason="out of memory: 40 GiB asked"),
        make_record("vgg16", outcome="failed", reason="killed at its timeout of 60 s"),
        make_record("gpt2", outcome="unsupported", reason="no decode"),
    ]
    table = table_of(make_run(*records))
    assert column(table, "outcome") == ["ok", "OOM [1]", "OOM [1]", "FAILED [2]", "unsupported [3]"]
    assert column(table, "device time") == ["1 ms ±1.0%", "OOM", "OOM", "FAILED", "n/a"]
    assert column(table_of(make_run(*records[1:], own_time(records[0]))), "host time")[0] == "OOM"
    assert table.notes[0] == f"[1] {records[1].case.label} and 1 more: out of memory: 20 GiB asked"
    assert table.notes[1] == f"[2] {records[3].case.label}: FAILED: killed at its timeout of 60 s"
    assert table.notes[2] == f"[3] {records[4].case.label}: not supported: no decode"
    assert not any(note.startswith("not measured") for note in table.notes)


def test_findings_of_one_kind_are_one_note(make_record, make_run):
    def varies(share):
        return Finding("unstable", f"host time varies: {share} of 1.2 ms over 30 samples", "wait", True)

    records = [
        make_record(batch=1, outcome="flagged", findings=(varies("8.1%"),)),
        make_record(batch=2, outcome="flagged", findings=(varies("12%"), Finding("warning", "FutureWarning: old"))),
        make_record(batch=4, findings=(Finding("warning", "UserWarning: other"),)),
    ]
    table = table_of(make_run(*records))
    assert column(table, "outcome") == ["flagged [1]", "flagged [1,2]", "ok [3]"]
    assert table.notes[0] == f"[1] {records[0].case.label} and 1 more: {varies('8.1%').message} (wait)"
    assert len([note for note in table.notes if note.startswith("[")]) == 3


def unstable_record(make_record, batch, wide):
    """A record whose host time has an interquartile range of ``wide`` over its median."""
    samples = {"host_time_s": [1e-3 * (1 + wide * (n - 4) / 4) for n in range(9)]}
    record = make_record(batch=batch, figures={"host_time_s": 1e-3}, samples=samples, outcome="flagged")
    return replace(record, findings=findings.findings_of(record))


def test_many_unstable_cases_are_one_line(make_record, make_run):
    records = [unstable_record(make_record, 2**n, 0.1 * (n + 1)) for n in range(3)]
    table = table_of(make_run(*records, make_record(batch=64, figures={"host_time_s": 1e-3})))
    remedy = records[0].findings[0].remedy
    assert table.notes[0] == (
        f"[1] 3 of 4 cases: host time varies by 10.0% to 30.0% (interquartile range over median): {remedy}"
    )
    assert column(table, "outcome") == ["flagged [1]"] * 3 + ["ok"]


def test_what_a_cpus_machine_lacks_is_one_line(make_record, make_run):
    notes = {"device_time_s": "no CUDA clock", "power_w": "no RAPL", "temperature_c": "no instrument"}
    asked = {"energy_per_item_j": "power was not asked for (--bench-collect power)"}
    records = [make_record(gpu="cpu", batch=n, figures={"host_time_s": 1e-3}, notes=notes | asked) for n in (1, 2)]
    assert table_of(make_run(*records)).notes[:2] == (
        "not measured on this CPU: device time, power, temp. (joulemark env says why)",
        "not measured: energy/item: power was not asked for (--bench-collect power)",
    )
    assert "not measured: power: no RAPL" in notes_of_missing(records)


def test_the_summary_counts_outcomes_and_says_the_efficiency(make_record, make_run):
    run = make_run(make_record(), make_record(batch=9, outcome="oom"))
    assert summary_line(run) == "2 cases: 1 ok, 1 oom; measured 42.0 s of 60.0 s (70%)"
    cut = make_run(make_record(), completed=False, reason="interrupted", wall_s=None, measured_s=None)
    assert summary_line(cut) == "1 case: 1 ok; INCOMPLETE (interrupted)"
    assert efficiency_of(cut) is None
    assert efficiency_of(make_run(wall_s=0.0, measured_s=0.0)) is None
    assert efficiency_of(make_run(wall_s=5e-324, measured_s=7.5)) is None
    assert efficiency_of(make_run(wall_s=60.0, measured_s=-1.0)) is None


def test_an_empty_run_with_problems_is_still_reported(make_run):
    table = table_of(make_run(problems=("line 3: not JSON",), completed=False))
    assert table.rows == ()
    assert table.notes == ("file: line 3: not JSON", "0 cases; measured 42.0 s of 60.0 s (70%); INCOMPLETE")


def test_axes_have_columns_where_they_vary(make_record, make_run):
    records = [
        make_record(params={"tag": "007"}),
        make_record(params={"tag": "1e3"}, gpu="cpu"),
        make_record(case=Case("gemm", layout="channels_last", input="loader", world_size=2, params={"tag": None})),
        make_record(case=Case("gemm", layout="contiguous", input="device", params={"tag": "x"})),
    ]
    table = tables_of_run(make_run(*records))[0]
    assert column(table, "tag") == ["007", "1e3", "None", "x"]
    assert column(table, "gpu") == ["nvidia-h200", "cpu", "cpu", "cpu"]
    assert column(table, "layout") == ["contiguous", "contiguous", "channels_last", "contiguous"]
    assert column(table, "input") == ["device", "device", "loader", "device"]
    assert column(table, "gpus") == ["1", "1", "2", "1"]


def test_a_layout_that_each_workload_has_but_one_of_has_no_column(make_record, make_run):
    records = [
        make_record(case=Case("cnn", layout="channels_last")),
        make_record(case=Case("text", layout="contiguous")),
    ]
    assert "layout" not in table_of(make_run(*records)).columns


def test_each_benchmark_has_its_table_and_the_last_all_notes(make_record, make_run):
    def case(benchmark, **more):
        return make_record(case=Case("lenet5", benchmark=benchmark, **more), outcome=more.pop("outcome", "ok"))

    skipped = make_record(case=Case("gpt2", benchmark="bench_c"), outcome="unsupported", reason="no decode")
    own = [make_record(case=Case(name, params={"size": 4}), figures={"host_time_s": 1e-3}) for name in ("copy", "gemm")]
    tables = tables_of_run(make_run(case("bench_a"), case("bench_b", batch_size=2), skipped, *own))
    assert [table.title.rpartition(" | ")[2] for table in tables] == ["bench_a", "bench_b", "by size"]
    assert [table.columns[:2] for table in tables] == [
        ("workload", "outcome"),
        ("workload", "batch"),
        ("workload", "size"),
    ]
    assert [len(table.notes) for table in tables] == [0, 0, 2]
    assert tables[-1].notes[0] == "[1] gpt2-cpu: not supported: no decode"


@pytest.mark.parametrize("simulated", [True, False])
def test_a_run_on_simulated_gpus_says_so_above_its_table(make_record, make_run, simulated):
    run = make_run(make_record(), environment=Environment({"driver": "580.0", "simulated": simulated}))
    assert ("simulated GPUs" in tables_of_run(run)[0].title) == simulated


def test_notes_of_several_reasons_stay_apart(make_record):
    records = [
        make_record(batch=1, notes={"power_w": "a"}),
        make_record(batch=2, notes={"power_w": "b"}),
    ]
    assert notes_of_missing(records) == [
        f"not measured: power of {records[0].case.label}: a",
        f"not measured: power of {records[1].case.label}: b",
    ]


def sweep(make_record, make_run):
    wild = Finding("unstable", "device time varies: interquartile range 8.1% of the median 2 ms", "wait", True)
    rows = [
        make_record(
            batch=n,
            figures={
                "device_time_s": 1e-3 * n,
                "host_time_s": 1.1e-3 * n,
                "throughput_per_s": 1000.0,
                "energy_per_item_j": 0.3,
                "power_w": 300.0,
                "peak_memory_bytes": 2.0**30 * n,
            },
            outcome="flagged" if n == 2 else "ok",
            findings=(wild,) if n == 2 else (),
            notes={"temperature_c": "the GPU has no sensor"},
        )
        for n in (1, 2, 4)
    ]
    return make_run(*rows, make_record(batch=8, outcome="oom", reason="out of memory"))


@pytest.mark.parametrize("width", [160, 80, 40])
def test_the_table_of_a_sweep_in_a_terminal(make_record, make_run, snapshot, width):
    text = terminal.render([table_of(sweep(make_record, make_run))], width)
    assert text == snapshot


def test_levels_of_the_chip_have_a_table_of_their_own_where_they_were_read(make_record, make_run):
    plain = make_record(figures={"device_time_s": 1e-3})
    counted = make_record(batch=16, figures={"device_time_s": 1e-3, "tensor_active_fraction": 0.25}, half=None)
    times, levels = tables_of_run(make_run(plain, counted))
    assert "tensor pipe" not in times.columns
    assert levels.title.endswith("shares of peak over a step")
    shares = [row[levels.columns.index("tensor pipe")] for row in levels.rows]
    assert shares == ["n/a", "250 ms"]  # by the unit of this maker
    assert "issue slots" not in levels.columns
    assert levels.notes
    assert len(tables_of_run(make_run(plain))) == 1


@pytest.mark.parametrize(("half", "shown"), [(0.004, "±0.4%"), (0.996, "±99.6%"), (118.1421, "±11814%")])
def test_a_wide_interval_has_no_decimals(half, shown):
    value = Value(768e-6, "s", (768e-6 * (1 - half), 768e-6 * (1 + half)))
    assert format_figure(value) == f"768 µs {shown}"


def test_one_long_name_does_not_cut_others_that_have_room():
    names = ["resnet50-inference-bf16-eager-b128-channels_last-nvidia-h200", "x-" * 70]
    table = Table(("case", "time"), tuple((name, "1 ms") for name in names), frozenset({1}))
    text = terminal.render([table], 100)
    assert names[0] in text
    assert max(map(len, text.splitlines())) <= 100
