import pytest

from joulemark import findings
from joulemark.records import Case, Conditions, Record, Value

STEADY = [1.0e-3, 1.01e-3, 0.99e-3, 1.0e-3, 1.0e-3]
WILD = [1.0e-3, 1.3e-3, 0.8e-3, 1.2e-3, 0.7e-3]


def value(number):
    return Value(number, "s", n=5)


def codes(found):
    return [one.code for one in found]


def test_a_wild_device_time_is_unstable_with_its_figures():
    (found,) = findings.unstable({"device_time_s": value(1e-3)}, {"device_time_s": WILD})
    assert found.code == "unstable"
    assert found.flags
    assert found.message == "device time varies: interquartile range 40.0% of the median 1 ms over 5 samples"
    assert found.remedy


@pytest.mark.parametrize(
    ("metrics", "samples", "expected"),
    [
        ({"device_time_s": value(1e-3)}, {"device_time_s": STEADY, "host_time_s": WILD}, []),
        ({"device_time_s": Value(None, "s")}, {"host_time_s": WILD}, ["unstable"]),
        ({}, {"host_time_s": WILD}, ["unstable"]),
        ({"device_time_s": value(1e-3)}, {"device_time_s": WILD[:4]}, []),
        ({"device_time_s": value(0.0)}, {"device_time_s": [0.0] * 9}, []),
        ({}, {}, []),
    ],
)
def test_stability_is_judged_on_the_device_and_else_on_the_host(metrics, samples, expected):
    assert codes(findings.unstable(metrics, samples)) == expected


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ({}, []),
        ({"thermal": 0.05}, []),
        ({"thermal": 0.06}, ["throttled"]),
        ({"hw_slowdown": 1.0, "power_brake": 1.0}, ["throttled"]),
        ({"power_cap": 0.05}, []),
        ({"power_cap": 0.4}, ["power_capped"]),
        ({"power_cap": 0.4, "thermal": 0.4}, ["throttled", "power_capped"]),
        ({"idle": 1.0, "application_clocks": 1.0}, []),
    ],
)
def test_clock_event_reasons_flag_beyond_a_share(reasons, expected):
    found = findings.throttled(Conditions(1.5e9, 1e9, 1.98e9, 84.0, reasons, 20))
    assert codes(found) == expected
    assert all(one.flags and one.remedy and "1.5 GHz of 1.98 GHz" in one.message for one in found)


def test_no_conditions_no_findings():
    assert findings.throttled(None) == []
    assert findings.cold_clocks(None) == []


@pytest.mark.parametrize(
    ("clock", "highest", "reasons", "expected"),
    [
        (1.0e9, 1.98e9, {}, ["cold_clocks"]),
        (1.0e9, 1.98e9, {"idle": 1.0}, ["cold_clocks"]),
        (1.0e9, 1.98e9, {"power_cap": 0.5}, []),
        (1.0e9, 1.98e9, {"application_clocks": 1.0}, []),
        (1.79e9, 1.98e9, {}, []),
        (None, 1.98e9, {}, []),
        (1.0e9, None, {}, []),
    ],
)
def test_a_low_clock_without_a_reason_is_cold(clock, highest, reasons, expected):
    assert codes(findings.cold_clocks(Conditions(clock, None, highest, None, reasons, 9))) == expected


@pytest.mark.parametrize(
    ("plain", "graph", "expected"),
    [(1e-3, 0.4e-3, ["host_bound"]), (1e-3, 0.5e-3, []), (1e-3, None, []), (None, 1e-3, []), (0.0, 0.0, [])],
)
def test_a_step_that_shrinks_in_a_graph_waits_for_its_launches(plain, graph, expected):
    found = findings.host_bound({"device_time_s": value(plain), "device_time_graph_s": value(graph)})
    assert codes(found) == expected
    assert not any(one.flags for one in found)


@pytest.mark.parametrize(
    ("slowdown", "says"), [(0.25, "25% longer"), (-0.25, "25% shorter"), (0.1, None), (None, None)]
)
def test_a_sampler_that_disturbs_is_told(slowdown, says):
    found = findings.sampler_disturbs({"sampler_slowdown": Value(slowdown, "1")})
    assert codes(found) == (["power_step_time"] if says else [])
    assert says is None or says in found[0].message


@pytest.mark.parametrize(
    ("cost", "interval", "graph", "code", "says"),
    [
        (0.282, (0.171, 0.393), 0.4e-3, "counters_cost_untold", "+28.2% [+17.1%, +39.3%]: the step waits for its"),
        (0.002, (0.001, 0.003), 0.4e-3, "counters_cost_untold", "+0.2% [+0.1%, +0.3%]: the step waits for its"),
        (-0.070, (-0.093, 0.005), 0.9e-3, "counters_cost_untold", "[-9.3%, +0.5%]: its windows differ by more"),
        (0.06, (0.05, 0.07), None, "counters_step_time", "took 6% longer"),
        (-0.06, (-0.07, -0.05), 0.9e-3, "counters_step_time", "took 6% shorter"),
        (0.06, None, None, "counters_step_time", "took 6% longer"),
        (0.02, (0.001, 0.04), 0.9e-3, None, None),
        (None, None, 0.4e-3, None, None),
    ],
)
def test_a_cost_of_counting_that_few_windows_cannot_tell_is_said_not_to_be_told(cost, interval, graph, code, says):
    times = {"device_time_s": value(1e-3), "device_time_graph_s": value(graph)}
    found = findings.counters_cost({**times, "counters_overhead": Value(cost, "1", interval, n=2)})
    assert codes(found) == ([code] if code else [])
    assert not any(one.flags for one in found)
    assert says is None or says in found[0].message


def test_all_rules_see_a_record():
    record = Record(
        Case("lenet5"),
        "run",
        "ok",
        "env",
        metrics={
            "device_time_s": value(1e-3),
            "device_time_graph_s": value(1e-4),
            "counters_overhead": Value(0.3, "1", (0.2, 0.4), n=2),
        },
        samples={"device_time_s": WILD},
        conditions=Conditions(1e9, None, 2e9, 50.0, {"thermal": 1.0}, 4),
    )
    assert codes(findings.findings_of(record)) == ["unstable", "throttled", "host_bound", "counters_cost_untold"]


def test_a_warning_becomes_a_finding_on_one_line():
    found = findings.from_warning("FutureWarning", "torch.jit\n   is going away")
    assert (found.code, found.message, found.flags) == ("warning", "FutureWarning: torch.jit is going away", False)
