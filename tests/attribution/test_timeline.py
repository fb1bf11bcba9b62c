"""Windows, steps, places and beacons from a trace; kernels that share a rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from joulemark.attribution import units
from joulemark.attribution.clock import fit_clock
from joulemark.attribution.recording import HOST, RecordedWindow, read_recording
from joulemark.attribution.timeline import read_timeline, with_host
from joulemark.errors import UnreadableInput
from joulemark.synthetic_run import write_trace

from .conftest import ADD, GEMM, LAUNCH_S, STEP, SUM, TINY


def test_a_written_trace_gives_back_the_run(run, tmp_path):
    one = run(windows=2)
    one.write(tmp_path)
    found = read_timeline(tmp_path, read_recording(tmp_path))
    assert found.steps == 30
    assert list(np.bincount(found.window_of_step)) == [15, 15]
    assert len(found.launches) == 30 * len(STEP)
    assert sorted(found.place_name(place) for place in range(len(found.places))) == sorted(k.name for k in STEP)
    assert {number: (one.before, len(one.start_s)) for number, one in found.beacons.items()} == {0: (6, 12), 1: (6, 12)}
    assert (found.operator, found.module, found.findings, found.refused) == ([], [], (), {})
    assert found.of_window(1).step.min() == 15
    assert found.launches.length_s.sum() / 30 == pytest.approx(sum(k.length_s + LAUNCH_S for k in STEP), rel=0.01)


def test_places_are_counted_within_a_step(run):
    one = run()
    timeline = one.timeline(*[[x] for x in one.window(0)[1:]])
    names = [timeline.place_name(place) for place in range(len(timeline.places))]
    nth = [number for _, number in timeline.places]
    assert nth == [names[:place].count(name) for place, name in enumerate(names)]


def test_a_trace_without_steps_is_refused(run, tmp_path):
    run(windows=0).write(tmp_path)
    with pytest.raises(UnreadableInput, match="no window of steps"):
        read_timeline(tmp_path, read_recording(tmp_path))


def events_of(one, number=0):
    _, launches, beacons = one.window(number)
    return one.device_events(launches, beacons)


def written(one, folder, events, steps=15):
    """The first window of a recording whose trace holds some events."""
    one.write(folder)
    write_trace(folder / "window-0.json.gz", events)
    window = RecordedWindow(0, "steps", "pass1", steps, own_trace=True)
    recording = read_recording(folder)
    return type(recording)(**{**vars(recording), "windows": (window, *recording.windows[1:])})


def test_of_a_window_that_ran_again_the_last_run_counts(run, tmp_path):
    one = run()
    first, last = one.window(0), one.window(3)
    events = one.device_events(*first[1:]) + one.device_events(*last[1:])
    found = read_timeline(tmp_path, written(one, tmp_path, events))
    assert found.steps == 15
    origin = found.launches.start_s[0] - last[1].start_s[0]
    assert found.launches.end_s == pytest.approx(last[1].end_s + origin, abs=1e-9)
    assert found.beacons[0].start_s == pytest.approx(last[2].start_s + origin, abs=1e-9)


def without(one, folder, lost):
    """The timeline of two windows, the first of which has lost some of its kernels that spin."""
    events = events_of(one)
    spins = [event for event in events if event["cat"] == "kernel" and "spin" in event["name"]]
    gone = lost(spins)
    recording = written(one, folder, [event for event in events if all(event is not other for other in gone)])
    return read_timeline(folder, recording)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (lambda spins: [min(spins, key=lambda event: event["dur"])], "shows 15 marks of 15 steps"),
        (lambda spins: [event for event in spins if event["dur"] < 20], "shows 0 marks of 15 steps"),
        (lambda spins: spins[-6:], "0 beacons before and 0 behind"),
    ],
    ids=["a mark", "all marks", "an end"],
)
def test_a_window_without_all_marks_or_beacons_is_left_out(run, tmp_path, lost, said):
    found = without(run(windows=2), tmp_path, lost)
    assert (found.steps, list(found.beacons)) == (15, [1])
    assert said in found.refused[0]


def test_a_window_whose_first_beacon_was_lost_is_mapped_by_the_others(run, tmp_path):
    one = run()
    series, launches, beacons = one.window(0)
    events = one.device_events(launches, beacons)
    first = next(event for event in events if event["cat"] == "kernel")
    found = read_timeline(tmp_path, written(one, tmp_path, [event for event in events if event is not first]))
    assert (found.steps, found.refused) == (15, {})
    assert (found.beacons[0].before, len(found.beacons[0].start_s)) == (5, 11)
    assert [finding.code for finding in found.findings] == ["launches_without_kernels"]
    clock = fit_clock(series, found.beacons[0])
    assert clock.beacons == 11
    assert clock.uncertainty_s < 0.2e-6


def test_steps_that_lack_a_kernel_are_told(run, tmp_path):
    one = run()
    events = events_of(one)
    tiny = next(event for event in events if event["name"] == TINY.name)
    launch = next(event for event in events if event["args"] == {"correlation": tiny["args"]["correlation"]})
    recording = written(one, tmp_path, [event for event in events if event not in (tiny, launch)])
    (finding,) = read_timeline(tmp_path, recording).findings
    assert finding.code == "attribution_steps_differ"
    assert finding.message.startswith("1 kernels")


def test_operators_and_modules_are_those_of_the_same_places(run, tmp_path):
    one = run([replace(kernel, module="Block_1" if kernel is GEMM else None) for kernel in STEP])
    one.write(tmp_path)
    write_trace(tmp_path / HOST, one.host_events(one.window(5, 2)[1]))
    found = with_host(read_timeline(tmp_path, read_recording(tmp_path)), tmp_path / HOST)
    told = {found.place_name(place): (found.operator[place], found.module[place]) for place in range(len(STEP))}
    outside = "outside any module's forward"
    expected = {kernel.name: (kernel.operator, outside) for kernel in (ADD, SUM, TINY)}
    assert told == {GEMM.name: (GEMM.operator, "Block_1"), **expected}


def test_operators_of_another_step_are_refused(run, tmp_path):
    run().write(tmp_path)
    timeline = read_timeline(tmp_path, read_recording(tmp_path))
    other = run([replace(GEMM, name="another"), *STEP[1:]])
    write_trace(tmp_path / HOST, other.host_events(other.window(0, 2)[1]))
    with pytest.raises(UnreadableInput, match=r"1 of 9 kernels of the step are not in host\.json"):
        with_host(timeline, tmp_path / HOST)


def grouped(one, sample_s=20e-6, **options):
    timeline = one.timeline(*[[x] for x in one.window(0)[1:]])
    return units.group(timeline, sample_s, **options)


def test_long_kernels_have_a_rate_each_and_short_ones_share(run):
    found = grouped(run())
    levels = [found.units[unit].level for unit in found.of_place]
    assert levels == ["place", "place", "kernel", "place", "kernel", "place", "pool", "kernel", "place"]
    shared = found.units[int(found.of_place[2])]
    assert shared.label == SUM.name
    assert shared.launches == 3
    assert shared.time_s == pytest.approx(3 * (SUM.length_s + LAUNCH_S), rel=0.02)
    assert sum(one.time_s for one in found.units) == pytest.approx(sum(k.length_s + LAUNCH_S for k in STEP), rel=0.01)


def test_longer_samples_pool_more_and_a_finer_grouping_less(run):
    coarse = {one.level for one in grouped(run(), 200e-6).units}
    assert coarse == {"kernel", "pool"}
    assert len(grouped(run(), finer=True).units) > len(grouped(run()).units)
