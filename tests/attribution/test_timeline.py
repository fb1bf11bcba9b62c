"""Windows, steps, places and beacons from a trace; kernels that share a rate."""

from __future__ import annotations

import numpy as np
import pytest

from joulemark.attribution import units
from joulemark.attribution.recording import TRACE
from joulemark.attribution.timeline import read_timeline, with_modules
from joulemark.errors import UnreadableInput

from .conftest import ADD, GEMM, LAUNCH_S, STEP, SUM, TINY


def test_a_written_trace_gives_back_the_run(run, tmp_path):
    one = run(windows=2)
    one.write(tmp_path)
    found = read_timeline(tmp_path / TRACE)
    assert found.steps == 30
    assert list(np.bincount(found.window_of_step)) == [15, 15]
    assert len(found.launches) == 30 * len(STEP)
    assert sorted(found.place_name(place) for place in range(len(found.places))) == sorted(k.name for k in STEP)
    assert {number: (one.before, len(one.start_s)) for number, one in found.beacons.items()} == {0: (6, 12), 1: (6, 12)}
    operators = dict(zip(map(found.place_name, range(9)), found.operator, strict=True))
    assert operators == {k.name: k.operator for k in (GEMM, ADD, SUM, TINY)}
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
    with pytest.raises(UnreadableInput):
        read_timeline(tmp_path / TRACE)


def test_modules_of_another_step_are_refused(run, tmp_path):
    one = run()
    one.write(tmp_path)
    timeline = read_timeline(tmp_path / TRACE)
    with pytest.raises(UnreadableInput, match="no module's forward call"):
        with_modules(timeline, tmp_path / TRACE)


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
