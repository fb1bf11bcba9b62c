"""PM sampling: passes are packed by what a chip counts together, proved by decoding, and read as shares and counts."""

import subprocess
import sys
import time

import numpy as np
import pytest

from joulemark.collect.cupti_device import Samples, SamplingSettings
from joulemark.collect.pm_metrics import METRICS, Group, metrics_of, plan
from joulemark.collect.pm_sampling import (
    MOST_SAMPLES,
    SWEEP_PACE,
    Pace,
    PmSamplingSource,
    Run,
    prove,
    record_run,
    series_of,
)
from joulemark.counter_series import COUNTERS
from joulemark.errors import CountersBusy, CountersOverflow, CountersUnreadable, NotPermitted
from joulemark.testing import FakePmDevice
from joulemark.utilization.levels import READ

CYCLES = "TPC.TriageCompute.sm__cycles_active"
TENSOR = "TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime"
INSTRUCTIONS = "TPC.TriageCompute.sm__inst_executed_realtime"
SECTORS = "SM_B.TriageCompute.l1tex__t_sectors"
HITS = "SM_B.TriageCompute.l1tex__t_sectors_lookup_hit"
WAVEFRONTS = "SM_A.TriageCompute.l1tex__data_pipe_lsu_wavefronts_mem_shared"
RX = [f"NVLRX.TriageCompute.nvlrx__bytes_packet_{part}_data_user" for part in ("request", "response")]


def device(*names: str, **options) -> FakePmDevice:
    return FakePmDevice(dict.fromkeys(names, 50.0), **options)


def nothing():
    pass


class TestMetrics:
    def test_every_counter_is_canonical_and_given_once(self):
        given = [name for metric in METRICS for name in metric.gives]
        assert len(given) == len(set(given))
        assert set(given) <= set(COUNTERS)

    def test_shares_are_asked_as_shares_of_elapsed_cycles_and_counts_as_sums(self):
        for metric in METRICS:
            for name, ending in metric.gives.items():
                share = ending == ".avg.pct_of_peak_sustained_elapsed"
                assert share == (COUNTERS[name].unit == "1"), name
                assert share or ending.startswith(".sum"), name

    def test_what_is_not_read_is_not_asked_and_only_counts_and_activity_are_in_every_pass(self):
        wanted = {"sm_active", "pipe_tensor", "pipe_tensor_hmma", "instructions", "l1_sectors"}
        found = metrics_of(wanted)
        assert [name for metric in found for name in metric.gives] == [
            "sm_active", "instructions", "pipe_tensor", "pipe_tensor_hmma", "l1_sectors",
        ]  # fmt: skip
        assert {name for metric in found if metric.anchor for name in metric.gives} == {"sm_active", "instructions"}
        assert {name for metric in metrics_of(COUNTERS) for name in metric.gives} == {
            name for metric in METRICS for name in metric.gives
        }

    def test_a_sweep_reads_all_that_its_levels_are_made_of_and_samples_long_windows_less(self):
        one = device(CYCLES, TENSOR, INSTRUCTIONS, SECTORS, HITS, per_pass=3)
        source = PmSamplingSource(one, nothing, SWEEP_PACE, metrics_of(READ))
        assert set(_all_counters(source)) == {
            "sm_active", "issue_active", "instructions", "pipe_tensor", "pipe_tensor_cycles", "l1_sectors",
            "l1_sector_hits",
        }  # fmt: skip
        source.record("pass1", nothing, 0.05)
        assert one.settings.interval == 100_000
        source.record("pass1", nothing, 0.4)
        assert one.settings.interval == 400_000


def _all_counters(source):
    return [name for group in source.groups for name in source.counters(group)]


class TestPlan:
    def test_what_fits_stands_in_one_pass(self):
        planned = plan(device(CYCLES, TENSOR, WAVEFRONTS))
        assert len(planned.groups) == 1
        assert "shared_wavefronts" in planned.groups[0].counters

    def test_what_excludes_each_other_takes_two_passes_that_share_the_anchors(self):
        first, second = plan(device(CYCLES, TENSOR, WAVEFRONTS, SECTORS, exclusive=((WAVEFRONTS, SECTORS),))).groups
        assert ("shared_wavefronts" in first.counters, "l1_sectors" in first.counters) == (True, False)
        assert ("shared_wavefronts" in second.counters, "l1_sectors" in second.counters) == (False, True)
        for group in (first, second):
            assert {"sm_active", "pipe_tensor"} <= set(group.counters)

    def test_a_narrow_chip_takes_more_passes_and_loses_nothing(self):
        planned = plan(device(CYCLES, TENSOR, INSTRUCTIONS, SECTORS, HITS, per_pass=2))
        given = {name for group in planned.groups for name in group.counters}
        assert {"pipe_tensor", "issue_active", "l1_sectors", "l1_sector_hits"} <= given
        assert all(len(group.metrics) <= 2 and "sm_active" in group.counters for group in planned.groups)

    def test_an_older_name_is_used_where_the_chip_has_no_better(self):
        (group,) = plan(device("sm__cycles_active", "dram__throughput")).groups
        assert group.raw()["dram_throughput"] == "dram__throughput.avg.pct_of_peak_sustained_elapsed"

    def test_an_older_name_is_used_where_the_better_cannot_be_counted_at_all(self):
        (group,) = plan(device(CYCLES, "sm__cycles_active", TENSOR, exclusive=((CYCLES, CYCLES),))).groups
        assert group.raw()["sm_active_cycles"] == "sm__cycles_active.sum"

    def test_a_set_of_metrics_is_left_for_the_open_one_where_it_lacks_some(self):
        one = device(CYCLES, TENSOR, "sm__cycles_active", "dram__bytes_read")
        one.sets = {"TriageCompute": {CYCLES, TENSOR}, None: {"sm__cycles_active", "dram__bytes_read"}}
        first, second = plan(one).groups
        assert (first.metric_set, second.metric_set) == ("TriageCompute", None)
        assert "pipe_tensor" in first.counters
        assert second.raw()["dram_read_bytes"] == "dram__bytes_read.sum"
        assert second.raw()["sm_active_cycles"] == "sm__cycles_active.sum"

    def test_an_unknown_chip_says_what_it_lacks(self):
        planned = plan(device(CYCLES, chip="XY100"))
        assert planned.missing["pipe_tensor"] == "CUPTI 13.0.1 knows no such metric on XY100"
        assert "sm_active" not in planned.missing

    def test_what_fits_into_no_pass_says_so(self):
        planned = plan(device(CYCLES, TENSOR, exclusive=((CYCLES, TENSOR),)))
        assert planned.missing["pipe_tensor"] == "GH100 counts it in no single pass"

    def test_counters_of_two_names_need_both(self):
        assert "nvlink_rx_bytes" in plan(device(CYCLES, RX[0])).missing
        (group,) = plan(device(CYCLES, *RX)).groups
        assert group.raw()["nvlink_rx_bytes"] == f"{RX[0]}.sum+{RX[1]}.sum"


class TestProof:
    def test_a_group_that_decodes_is_kept_whole(self):
        one = device(CYCLES, TENSOR)
        (group,) = plan(one).groups
        assert prove(one, group, nothing) == ([group], {})
        assert one.open == 0

    def test_a_metric_that_spoils_the_decoding_is_found_and_the_rest_kept(self):
        one = device(CYCLES, TENSOR, INSTRUCTIONS, SECTORS, HITS, undecodable=frozenset({HITS}))
        source = PmSamplingSource(one, nothing)
        assert "999" in source.missing["l1_sector_hits"]
        given = {name for group in source.groups for name in source.counters(group)}
        assert {"pipe_tensor", "issue_active", "l1_sectors"} <= given
        assert "l1_sector_hits" not in given
        assert one.open == 0

    def test_an_anchor_that_does_not_decode_ends_it(self):
        with pytest.raises(CountersUnreadable, match="no group of counters decodes"):
            PmSamplingSource(device(CYCLES, TENSOR, undecodable=frozenset({CYCLES})), nothing)

    def test_zeros_while_the_gpu_works_prove_nothing(self):
        idle = FakePmDevice({CYCLES: 50.0, TENSOR: 50.0})
        idle.zeros = frozenset({f"{CYCLES}.sum", f"{CYCLES}.avg.pct_of_peak_sustained_elapsed"})
        with pytest.raises(CountersUnreadable, match="the SMs read 0 in all 49 samples"):
            PmSamplingSource(idle, nothing)

    def test_no_sample_proves_nothing(self):
        with pytest.raises(CountersUnreadable, match="decoded no sample"):
            PmSamplingSource(device(CYCLES, samples=0), nothing)

    @pytest.mark.parametrize("refusal", [NotPermitted("no"), CountersBusy("held")])
    def test_a_refusal_of_the_device_is_not_halved(self, refusal):
        one = device(CYCLES, TENSOR, refuses=refusal)
        with pytest.raises(type(refusal)):
            PmSamplingSource(one, nothing)
        assert one.sampled == []

    def test_a_chip_without_any_metric_is_refused(self):
        with pytest.raises(CountersUnreadable, match="plans no pass"):
            PmSamplingSource(device(), nothing)


class TestRecord:
    def test_per_cent_becomes_a_share_and_a_sum_stays(self):
        series = PmSamplingSource(device(CYCLES, TENSOR), nothing).record("pass1", nothing)
        assert series.mean("pipe_tensor") == pytest.approx(0.5)
        assert series.total("pipe_tensor_cycles") == pytest.approx(49 * 50.0)
        assert series.units["sm_cycles"] == "cycle"
        assert series.raw["pipe_tensor"] == f"{TENSOR}.avg.pct_of_peak_sustained_elapsed"

    def test_times_are_seconds_of_unix_time_and_the_run_is_found_in_them(self):
        before = time.time()
        series = PmSamplingSource(device(CYCLES), nothing).record("pass1", nothing)
        assert series.clock == "unix"
        assert series.start_s[0] == 0
        assert series.duration_s == pytest.approx(np.full(49, 100e-6))
        assert series.source["first_tick"] / 1e9 == pytest.approx(before, abs=0.1)
        assert series.source["run_begin_s"] <= series.source["run_end_s"]
        assert series.source["run_end_s"] == pytest.approx(series.end_s[-1], abs=0.05)
        assert series.source["library"] == "CUPTI 13.0.1"

    def test_the_stale_beginning_of_the_first_sample_is_no_work(self):
        series = PmSamplingSource(device(CYCLES, stale_first=True), nothing).record("pass1", nothing)
        assert len(series) == 49
        assert series.duration_s.max() < 1e-3
        assert len(PmSamplingSource(device(CYCLES, stale_first=False), nothing).record("pass1", nothing)) == 50

    def test_a_last_sample_without_a_time_is_left_out(self):
        group = Group("pass1", ((METRICS[0], CYCLES),))
        start, end = np.array([100, 200, 300, 100]), np.array([200, 300, 400, 100])
        series = series_of(device(CYCLES), group, Run(Samples(start, end, np.ones((4, 3))), 1e-7, True, 3e-7, 0, 400))
        assert len(series) == 3

    def test_another_origin_is_said(self):
        series = PmSamplingSource(device(CYCLES, wall_clock=False), nothing).record("pass1", nothing)
        assert series.clock == "pm_timestamp"

    def test_another_rate_is_seen_from_the_interval_and_undone(self):
        series = PmSamplingSource(device(CYCLES, ticks_per_ns=2.09), nothing).record("pass1", nothing)
        assert series.clock == "pm_timestamp"
        assert series.source["ticks_per_s"] == pytest.approx(2.09e9)
        assert series.duration_s == pytest.approx(np.full(49, 100e-6))

    def test_the_rate_is_that_of_all_samples_where_single_ones_differ_by_the_devices_timer(self):
        one = device(CYCLES, ticks_per_ns=2.1, timer_ns=32, samples=2001)
        series = PmSamplingSource(one, nothing, Pace(interval_s=10e-6)).record("pass1", nothing)
        assert set(np.round(series.duration_s * 1e9)) == {9984, 10016}
        assert series.source["ticks_per_s"] == pytest.approx(2.1e9, rel=1e-5)

    def test_cycles_of_the_system_clock_are_no_interval_to_compare_with(self):
        series = PmSamplingSource(device("sm__cycles_active", chip="GA100"), nothing).record("pass1", nothing)
        assert series.source["ticks_per_s"] == 1e9

    def test_two_names_are_added(self):
        source = PmSamplingSource(device(CYCLES, *RX), nothing)
        assert source.record("pass1", nothing).total("nvlink_rx_bytes") == pytest.approx(2 * 49 * 50.0)

    def test_every_record_has_a_sampler_of_its_own(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        before = len(one.sampled)
        source.record("pass1", nothing)
        source.record("pass1", nothing)
        assert len(one.sampled) == before + 2
        assert one.open == 0

    def test_what_the_work_raises_passes_through_and_gives_the_counters_back(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        with pytest.raises(ZeroDivisionError):
            source.record("pass1", lambda: 1 / 0)
        assert one.open == 0

    def test_a_count_that_is_not_believed_is_missing_with_its_reason(self):
        source = PmSamplingSource(device(CYCLES, "TPC.TriageCompute.tpc__warps_active_realtime"), nothing)
        assert "does not count resident warps" in source.missing["warps_active"]
        assert "warps_active" not in source.counters("pass1")

    def test_the_missing_have_their_reasons(self):
        series = PmSamplingSource(device(CYCLES), nothing).record("pass1", nothing)
        assert "knows no such metric" in series.missing["l1_sectors"]

    def test_no_number_is_no_answer(self):
        source = PmSamplingSource(one := device(CYCLES, TENSOR), nothing)
        one.metrics = {CYCLES: 50.0, TENSOR: float("nan")}
        with pytest.raises(CountersUnreadable, match="no number for pipe_tensor"):
            source.record("pass1", nothing)

    def test_time_that_goes_back_is_no_answer(self):
        group = Group("pass1", ((METRICS[0], CYCLES),))
        samples = Samples(np.array([5, 3, 6]), np.array([6, 4, 7]), np.ones((3, 3)))
        with pytest.raises(CountersUnreadable, match="do not go forward"):
            series_of(device(CYCLES), group, Run(samples, 1e-4, True, 1.0, 0, 10**9))


class TestLongRuns:
    def test_a_run_of_known_length_is_sampled_no_more_than_needed(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        source.record("pass1", nothing, expected_s=10.0)
        assert one.settings.interval == round(10.0 / MOST_SAMPLES * 1e9)
        assert Pace().interval_for(None) == Pace().interval_for(1e-3) == 100e-6

    def test_a_run_that_overflows_is_run_again_at_a_longer_interval(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        one.run_s, one.holds = 1.0, 5000
        runs = []
        series = source.record("pass1", lambda: runs.append(1))
        assert len(runs) == 2
        assert series.source["interval_s"] == pytest.approx(400e-6)
        assert series.duration_s == pytest.approx(np.full(len(series), 400e-6))
        assert one.open == 0

    def test_buffers_are_no_larger_than_the_run_needs(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        most = SamplingSettings()
        one.run_s = 0.06
        assert len(source.record("pass1", nothing, expected_s=0.06).at_work())
        assert 600 < one.settings.image_samples < most.image_samples / 2
        assert 600 * 25_000 < one.settings.buffer_bytes < most.buffer_bytes / 2
        source.record("pass1", nothing, expected_s=10.0)
        assert MOST_SAMPLES < one.settings.image_samples <= most.image_samples
        assert one.settings.buffer_bytes <= most.buffer_bytes

    def test_a_run_that_fills_the_buffers_of_its_size_is_run_again_in_the_largest_at_the_same_interval(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        one.run_s, runs = 0.15, []
        series = source.record("pass1", lambda: runs.append(1), expected_s=0.02)
        assert len(runs) == 2
        assert one.settings == SamplingSettings()
        assert series.source["interval_s"] == pytest.approx(100e-6)

    def test_samples_of_a_part_of_the_run_are_no_answer(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        one.run_s = 0.2
        with pytest.raises(CountersUnreadable, match=r"cover 0.2 s of a run of 0.3\d* s: run for less time"):
            source.record("pass1", lambda: time.sleep(0.3))

    def test_a_flagged_overflow_is_no_whole_answer_either(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        one.flags_overflow = 2
        assert source.record("pass1", nothing).source["interval_s"] == pytest.approx(1600e-6)

    def test_what_overflows_for_ever_is_told(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        one.holds = 10
        with pytest.raises(CountersOverflow, match="ran full 3 times"):
            source.record("pass1", nothing)
        assert one.open == 0

    def test_the_next_pass_begins_where_the_last_run_left_off(self):
        one = device(CYCLES)
        source = PmSamplingSource(one, nothing)
        one.run_s = 0.6
        source.record("pass1", lambda: time.sleep(0.5))
        source.record("pass1", nothing)
        assert one.settings.interval >= 0.5 / MOST_SAMPLES * 1e9


class TestSettings:
    def test_hopper_samples_by_time(self):
        assert (Pace().settings("GH100", 100e-6).interval, Pace().settings("GH100", 100e-6).by_time) == (100_000, True)

    @pytest.mark.parametrize("chip", ["GA100", "TU102"])
    def test_ga100_and_turing_sample_by_cycles(self, chip):
        settings = Pace().settings(chip, 100e-6)
        assert (settings.interval, settings.by_time) == (160_000, False)

    def test_a_sampler_runs_exactly_around_the_work(self):
        one = device(CYCLES)
        seen = []
        real = one.sampler
        one.sampler = lambda *given: seen.append(real(*given)) or seen[-1]
        record_run(one, plan(one).groups[0], lambda: seen.append(seen[0].running), 1e-4)
        assert seen[1] is True
        assert seen[0].running is False


CHILD = """
import sys
from joulemark.collect.cupti import load_library
from joulemark.collect.cupti_device import CuptiDevice
from joulemark.collect.pm_metrics import METRICS, metrics_of, plan
from joulemark.utilization.levels import READ
try:
    cupti = load_library()
except Exception as error:
    sys.exit(f"SKIP {error}")
device = CuptiDevice.__new__(CuptiDevice)
device._cupti, device.library, device.chip, device._availability = cupti, cupti.version, sys.argv[1], None
for metrics in (METRICS, metrics_of(READ)):
    planned = plan(device, metrics)
    for group in planned.groups:
        print(*group.counters)
    print("missing", *planned.missing)
"""


@pytest.mark.parametrize(("chip", "passes", "lacks", "kept"), [("GH100", 3, 0, 0.55), ("GA100", 4, 9, 0.65)])
def test_the_installed_libcupti_plans_real_chips_without_a_gpu(chip, passes, lacks, kept):
    """A process of its own: libcupti may not start without a driver, and some releases crash then."""
    child = subprocess.run([sys.executable, "-c", CHILD, chip], capture_output=True, text=True, check=False)
    if child.returncode < 0 or "SKIP" in child.stderr:
        pytest.skip(f"the installed libcupti needs a driver: {child.stderr[-200:]}")
    assert child.returncode == 0, child.stderr
    lines = [line.split() for line in child.stdout.splitlines()]
    end = next(place for place, line in enumerate(lines) if line[0] == "missing")
    groups, missing = lines[:end], lines[end]
    assert len(groups) == passes
    assert len(missing) - 1 == lacks
    assert all("sm_active" in group for group in groups)
    assert {"issue_active", "pipe_tensor", "dram_throughput", "l1_sectors"} <= {name for one in groups for name in one}
    cut = lines[end + 1 : -1]  # what a sweep reads needs no more passes, and fewer evaluations
    assert len(cut) <= passes
    assert sum(map(len, cut)) < kept * sum(map(len, groups))
