"""The measurement of what counters cost: its order, its estimate, what it would tell on a known host's scatter."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

from joulemark.errors import CountersOverflow, DeviceError

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "tests" / "gpu")  # scripts of this folder import each other by their names
    import cost_simulation as simulation
    import counters_cost as script
    from paired import FEWEST, estimate, evened, order, ratios, steady_estimate, steady_ratios

SCHEMA = json.loads((ROOT / "docs" / "schema" / "counters-cost.schema.json").read_text(encoding="utf-8"))


def test_drifts_cancel_and_a_cost_stays():
    on = np.array(list(islice(order(), 64)))
    assert on.sum() == 32
    drift = np.exp(0.01 * np.arange(64))
    assert ratios(0.02 * drift * np.where(on, 1.03, 1)) == pytest.approx([0.03] * 16)
    # What a place among four does falls on both sides alike: the first stretch of four is 20 % slower here.
    assert estimate(ratios(np.where(np.arange(64) % 4 == 0, 1.2, 1.0))).cost == pytest.approx(0, abs=0.01)


def test_the_estimate_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    found = [estimate(0.01 + 0.05 * rng.standard_t(3, 40)) for _ in range(200)]
    held = np.mean([one.interval[0] <= 0.01 <= one.interval[1] for one in found])
    assert 0.91 <= held <= 0.99
    assert estimate([0.01] * 5).interval is None
    assert estimate([0.01] * 5).verdict(0.02) == "not told"
    assert (estimate([0.01] * 9).verdict(0.02), estimate([0.03] * 9).verdict(0.02)) == ("held", "missed")
    with pytest.raises(ValueError, match="no four"):
        estimate([])


def test_on_the_scatter_of_a_slow_host_forty_seconds_tell_one_percent():
    cells = simulation.scatters(ROOT / "results" / "nvidia-h200")
    assert cells["resnet50 b8"].slow[0] > 0.1
    both = [cells["resnet50 b8"], cells["bert_base b8"]]
    half, held = simulation.widths(both, 40, simulation.SWITCH_S / simulation.RUNS, draws=20)
    assert half < 0.01
    assert held >= 0.85
    assert simulation.widths([cells["resnet50 b256"]], 4, simulation.SWITCH_S, draws=20)[0] < 0.002


def two_states(rng, cost, scatter, stretches=320):
    """Seconds of stretches of 60 ms, and of a probe, on a host that is 1.7 times as slow for half a second in turns."""
    now, slow, change, found, before = 0.0, False, rng.exponential(0.5), [], None
    for on in islice(order(), stretches):
        now, before = now + (0.15 if on else 0.03) * (on != before), on
        begin, left = now, 0.06
        while left > 0:
            while now >= change:
                slow, change = not slow, change + rng.exponential(0.5)
            factor = 1.7 if slow else 1.0
            done = min(left, (change - now) / factor)
            now, left = max(now + done * factor, np.nextafter(now, np.inf)), left - done
        wall_s = (now - begin) * (1 + cost * on) * np.exp(scatter * rng.standard_normal())
        found.append((wall_s, 1e-3 * ((now - begin) / 0.06) ** 0.8 * np.exp(0.02 * rng.standard_normal())))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.04])
def test_on_a_host_of_two_states_fours_of_one_state_tell_a_cost_without_bias(cost):
    rng = np.random.default_rng(3)
    runs = [two_states(rng, cost, 0.04) for _ in range(40)]
    every = [estimate(ratios(wall_s)) for wall_s, _ in runs]
    steady = [estimate(steady_ratios(wall_s)) for wall_s, _ in runs]
    even = [estimate(steady_ratios(evened(*one)[0])) for one in runs]
    for found in (steady, even):
        assert np.mean([one.cost for one in found]) == pytest.approx(cost, abs=0.004)
        assert np.mean([one.interval[0] <= cost <= one.interval[1] for one in found]) >= 0.9
    widths = [np.median([one.half_width for one in found]) for found in (every, steady, even)]
    assert widths[1] < 0.6 * widths[0]
    assert widths[2] < 0.8 * widths[1], "a probe of the host's speed evens the fours in which it changes"


def test_choosing_fours_takes_no_cost_away_where_their_scatter_is_wide():
    """Stretches that scatter by 7 % within a state: fours with a cost pass the bound the less often."""
    rng = np.random.default_rng(3)
    runs = [evened(*two_states(rng, 0.04, 0.07))[0] for _ in range(30)]
    chosen = [estimate(steady_ratios(one)) for one in runs]
    assert np.mean([one.cost for one in chosen]) < 0.03
    assert np.mean([one.interval[0] <= 0.04 <= one.interval[1] for one in chosen]) < 0.8
    found = [steady_estimate([one], step=0.004) for one in runs]
    assert np.mean([one.cost for one in found]) == pytest.approx(0.04, abs=0.004)
    told = [one.interval for one in found if one.interval is not None]
    assert len(told) >= 28
    assert np.mean([low <= 0.04 <= high for low, high in told]) >= 0.9


def test_what_one_state_of_the_host_saw_says_no_more_than_it_can():
    calm = [1.01 if on else 1.0 for on in islice(order(), 32)]
    restless = [1.0, 2.0, 1.0, 1.0] * 8
    assert steady_estimate([calm]) == estimate(ratios(calm)), "nothing is left out"
    assert steady_estimate([restless]) is None
    both = steady_estimate([calm, restless])
    assert (both.quads, both.interval) == (8, (pytest.approx(0.0095), pytest.approx(0.0105)))
    few = steady_estimate([calm[:20], restless])
    assert (few.quads, few.interval, few.verdict(0.02)) == (5, None, "not told")


class Device:
    """Samplers that see the runs they are started for; of several runs the first alone, where they are deaf.

    Others refuse a second start, or cannot be decoded.
    """

    chip = "GH100"

    def __init__(self, deaf=False, refuses=False, unreadable=False):
        self.deaf, self.refuses, self.unreadable = deaf, refuses, unreadable
        self.on, self.made, self.open, self.settings = False, 0, 0, []

    def sampler(self, metrics, metric_set, settings):
        self.made += 1
        self.open += 1
        self.settings.append(settings)
        runs = []

        def start():
            if self.refuses and runs:
                raise DeviceError("cuptiPmSamplingStart answered CUPTI_ERROR_INVALID_OPERATION (7)")
            self.on = True
            runs.append([time.perf_counter()])

        def stop():
            self.on = False
            runs[-1].append(time.perf_counter())

        def close():
            self.open -= 1

        def read():
            if self.unreadable:
                raise CountersOverflow("cuptiPmSamplingDecodeData answered CUPTI_ERROR_OUT_OF_MEMORY (8)")
            seen = runs[:1] if self.deaf else runs
            ends = np.concatenate([np.linspace(begin, end, 50) for begin, end in seen]) * 1e9
            return SimpleNamespace(start=ends[:-1].astype(np.int64), end=ends[1:].astype(np.int64))

        return SimpleNamespace(start=start, stop=stop, read=read, close=close)


def beside(device):
    group = SimpleNamespace(full_names=tuple, metric_set=None)
    return script.Beside(device, [group])


@pytest.mark.parametrize(
    ("device", "runs"),
    [
        (Device(), script.RUNS),
        (Device(deaf=True), 1),
        (Device(refuses=True), 1),
        (Device(unreadable=True), 1),
    ],
    ids=["bears", "deaf", "refuses", "unreadable"],
)
def test_a_sampler_that_does_not_bear_several_runs_is_made_for_every_run(device, runs):
    one = beside(device)
    one.try_restarts(lambda: time.sleep(0.002))
    assert one.runs == runs
    assert one.covered == []
    assert device.open == 0


def test_a_sampler_is_started_for_as_many_runs_as_it_has_room_for():
    device = Device()
    one = beside(device)
    one.runs = script.RUNS
    for expected_s, holds in ((0.01, script.RUNS), (0.12, 2), (0.2, 1), (0.6, 1)):
        before = device.made
        for number in range(holds):
            assert device.made - before == min(number, 1)
            with one.sampling(expected_s):
                pass
        assert (device.made, device.open) == (before + 1, 0)
    for expected_s, holds, settings in zip((0.12, 0.2, 0.6), (2, 1, 1), device.settings[1:], strict=True):
        samples = 1.25 * holds * expected_s / (settings.interval * 1e-9)
        assert samples < settings.image_samples, "a host that is a quarter slower than expected fills no image"


def test_each_cell_has_a_proof_and_one_that_cannot_be_decoded_is_no_end():
    device = Device()
    one = beside(device)
    one.runs = 1
    for cell in range(2):
        one.begin()
        for _ in range(2):
            with one.sampling(0.01):
                time.sleep(0.001)
        assert len(one.covered) == 1, cell
    device.unreadable = True
    one.begin()
    with one.sampling(0.01):
        time.sleep(0.001)
    assert one.covered == [0.0]


def test_stretches_are_sampled_where_the_order_says_so():
    device = Device()
    one = beside(device)
    seen, following = [], islice(order(), 1, None)

    class Stretches:
        steps, step_s = 1, 0.001

        cold = True

        def lead(self):
            assert not seen or device.on != seen[-1], "once after each change"
            self.cold = False

        def time(self):
            assert not self.cold, "a sampler was made in between: the first step on either side is not timed"
            seen.append(device.on)
            self.cold = next(following) != device.on
            return (1.01 if device.on else 1.0), 0.5, 1e-3

    found = script.alternate(Stretches(), one, time.monotonic() + 60, lambda found: len(found) >= 64)
    assert seen == list(islice(order(), len(seen)))
    wall, gpu = script.estimates(found)
    assert wall.cost == pytest.approx(0.01)
    assert gpu.cost == 0
    assert 0 < device.made < sum(seen)
    one.close()
    assert all(share > script.COVERED for share in one.covered)


def test_a_slow_step_has_an_interval_however_short_its_time():
    slow = SimpleNamespace(steps=1, step_s=0.1, lead=lambda: None, time=lambda: (0.1, 0.1, 1e-3))
    found = script.alternate(slow, beside(Device()), time.monotonic() - 1, lambda found: False)
    wall, _ = script.estimates(found)
    assert wall.interval is not None
    assert wall.quads == FEWEST


def row(model, mode, step_s, cost, verdict=None):
    times = [step_s * (1 + cost * on) for on in islice(order(), 32)]
    found = script.judged(
        {
            "workload": model,
            "batch_size": 8,
            "mode": mode,
            "steps_per_stretch": 1,
            "step_s": step_s,
            "spent_s": 1.0,
            "covered": [0.99],
            "wall_s": times,
            "device_s": times,
            "probe_s": [1e-3] * len(times),
        }
    )
    return {**found, "verdict": verdict or found["verdict"]}


def test_cells_that_wait_for_their_host_are_judged_together():
    rows = [row("a", "graph", 0.005, 0.0), row("a", "eager", 0.02, 0.01, "not told"), row("b", "eager", 0.05, 0.0)]
    found = json.loads(json.dumps(script.document(rows, 3)))
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["host_bound"]["cells"] == ["a b8"]
    assert found["host_bound"]["cost"] == pytest.approx(0.01)
    assert found["host_bound"]["steady"]["quads"] == 8
    assert script.exit_code(found) == 0
    for changed, code in (("missed", 1), ("not told", 4), ("samples lost", 4)):
        assert script.exit_code(script.document([*rows[:2], {**rows[2], "verdict": changed}], 3)) == code
    assert script.exit_code(script.document([{**one, "verdict": "samples lost"} for one in rows], 3)) == 4
    assert script.document(rows[2:], 1)["host_bound"] is None


def test_cells_of_several_files_are_judged_together(tmp_path, capsys):
    rows = [row("a", "graph", 0.005, 0.0), row("a", "eager", 0.02, 0.01), row("a", "eager", 0.03, 0.03)]
    files = []
    for number, kept in enumerate((rows[:2], rows[2:])):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(script.document([{**one, "verdict": "missed"} for one in kept], 1)))
    assert script.again(tmp_path / "out", files) == 4
    found = json.loads((tmp_path / "out" / "counters-cost.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert [one["verdict"] for one in found["cells"]] == ["held", "held", "missed"]
    assert [(one["runs"], one["step_s"], one["wall"]["quads"], one["verdict"]) for one in found["joined"]] == [
        (2, 0.03, 16, "not told")
    ]
    assert found["host_bound"]["cells"] == ["a b8"]
    said = capsys.readouterr().out
    assert "a b8 eager, 2 runs: 30.0 ms, wall +2.00% [+1.00%, +3.00%] of 16" in said
    assert "a b8 together: +2.00% [+1.00%, +3.00%] of 16" in said
    assert script.again(tmp_path / "out", [files[0], tmp_path / "out" / "counters-cost.json"]) == 2, "counted twice"


@pytest.mark.parametrize("text", [None, "", "[]", '{"cells": [{"workload": "a"}]}'])
def test_a_file_without_stretches_is_told_and_nothing_is_written(text, tmp_path, capsys):
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    assert script.again(tmp_path / "out", [file]) == 2
    assert capsys.readouterr().err.startswith(f"{file} holds no stretches (")
    assert not (tmp_path / "out").exists()


def test_of_a_cell_in_several_runs_the_joint_verdict_counts():
    alone = [row("a", "eager", 0.02, 0.0, "not told"), row("a", "eager", 0.02, 0.01)]
    assert script.exit_code(script.document(alone, 1)) == 0
    assert script.exit_code(script.document(alone[:1], 1)) == 4
    lost = [{**alone[0], "verdict": "samples lost"}, alone[1]]
    assert script.document(lost, 1)["joined"][0]["verdict"] == "samples lost"
    assert script.exit_code(script.document(lost, 1)) == 4


RUNS = [f"counters-cost-{name}.json" for name in ("probed", "stretches")]
NAMES = {"resnet50": "ResNet-50", "gpt2_small": "GPT-2-small-sized", "bert_base": "BERT-base-sized"}


@pytest.fixture(scope="module")
def committed():
    folder = ROOT / "results" / "nvidia-h200"
    return [json.loads((folder / name).read_text(encoding="utf-8")) for name in RUNS]


@pytest.fixture(scope="module")
def together(committed):
    rows = [script.judged(cell) for one in committed for cell in one["cells"]]
    return script.document(rows, committed[0]["runs_per_sampler"])


def test_committed_stretches_give_the_committed_verdicts(committed, together):
    stored = [cell for one in committed for cell in one["cells"]]
    for today, one in zip(together["cells"], stored, strict=True):
        assert_alike(today, one)
    for one in committed:
        assert one["joined"] == []
        assert_alike(script.document(one["cells"], 1)["host_bound"], one["host_bound"])
    assert [script.exit_code(one) for one in (*committed, together)] == [0, 4, 0]


@pytest.mark.parametrize("cost", [0.02, 0.05])
def test_of_a_cost_added_to_committed_stretches_choosing_fours_alone_loses_a_fifth_to_a_quarter(committed, cost):
    found = {}
    for added in (0.0, cost):
        fours = []
        for row in script.host_bound(committed[0]["cells"]):
            longer = [one * (1 + added * on) for one, on in zip(row["wall_s"], order(), strict=False)]
            fours.append(steady_ratios(evened(longer, row["probe_s"])[0]))
        found[added] = estimate(np.concatenate(fours)).cost
    assert 0.2 <= 1 - (found[cost] - found[0.0]) / cost <= 0.25


def assert_alike(one, other):
    """Verdict and figures, but for rounding: that may move an end by one of the costs that are asked for."""
    assert one["verdict"] == other["verdict"]
    for name in ("wall", "device", "steady"):
        for key in ("cost", "median", "interval"):
            assert one.get(name, one)[key] == pytest.approx(other.get(name, other)[key], abs=6e-4)


def test_the_docs_say_what_the_committed_stretches_say(committed, together):
    text = (ROOT / "docs" / "counters.md").read_text(encoding="utf-8")
    told = [line for line in text.splitlines() if line.startswith("| ") and line.endswith(("held |", "not told |"))]
    joined = {script.named(row): row for row in together["joined"]}
    waiting = {script.named(row) for row in script.host_bound(committed[0]["cells"])}
    expected = []
    for row in committed[0]["cells"]:
        how = ", as a graph" if row["mode"] == "graph" else ", waits for its host" * (script.named(row) in waiting)
        name = f"{NAMES[row['workload']]}, batch {row['batch_size']}{how}"
        expected.append(in_table(name, f"{np.median(row['wall_s']) * 1e3:.0f} ms", row, joined[script.named(row)]))
    expected.append(in_table("the two that wait, together", "", committed[0]["host_bound"], together["host_bound"]))
    assert told == expected


def in_table(name, step, alone, both):
    """A row: by one run, by both, their verdicts."""
    said = []
    for one in (alone, both):
        low, high = one["steady"]["interval"]
        said.append(f"{one['steady']['cost'] * 100:+.2f} % [{low * 100:+.2f}, {high * 100:+.2f}]")
    return f"| {name} | {step} | {said[0]} | {said[1]} | {alone['verdict']}, {both['verdict']} |"
