"""Windows that cannot be: damaged lines are left out and named, and no traceback or wrong energy comes of them."""

from __future__ import annotations

import json
from functools import partial

import pytest

from joulemark.cli import main
from joulemark.energy.calibrate import measure, measure_caches
from joulemark.energy.calibration import refit
from joulemark.energy.plan import plan
from joulemark.energy.windows import WindowWriter, read_windows
from joulemark.errors import ConfigurationError, MeasurementError, UnreadableInput
from joulemark.synthetic_gpu import SyntheticGpu

HEADER = {"gpu": "G", "gpu_uuid": "GPU-1", "architecture": "sm_90a", "sms": 132, "mode": "quick", "joulemark": "0"}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Of a header and of 30 windows."""
    path, gpu = tmp_path_factory.mktemp("whole") / "w.jsonl", SyntheticGpu()
    points = [one for one in plan("sm_90a", quick=True) if one.benchmark in ("fp32", "integer", "idle", "logic")]
    measure(gpu, gpu.meter, points, measure_caches(gpu), WindowWriter(path, HEADER), clock=lambda: 0.0)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def stored(tmp_path):
    """Lines → the file that holds them."""

    def write(lines, tail=b""):
        path = tmp_path / "w.jsonl"
        path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + tail)
        return path

    return write


def busy(lines):
    return next(i for i, line in enumerate(lines) if line.get("benchmark") == "fp32")


@pytest.mark.parametrize(
    "change",
    [
        {"window_s": 0},
        {"window_s": float("nan")},
        {"window_s": -1.0},
        {"iterations": float("inf")},
        {"iterations": 10**400},
        {"launches": 1e300},
        {"blocks": -1},
        {"counts": {}},
        {"counts": []},
        {"counts": {"instruction": -1.0}},
        {"utc": "yesterday"},
        {"benchmark": ["fp32"]},
        {"operands": 3},
        {"edges": [[0.0, 0.0, 0.001], [0.0, 1.0, 0.001]]},
        {"edges": [[0.1 * i, 1e9 * i, 0.001] for i in range(12)]},
        {"states": [[0.0, ["fast", None, None, None, None]]]},
        {"tiers": "nvml"},
    ],
    ids=str,
)
def test_a_line_that_cannot_be_is_left_out_and_named(lines, stored, change):
    at = busy(lines)
    file = read_windows(stored([*lines[:at], lines[at] | change, *lines[at + 1 :]]))
    assert file.damaged == (at + 1,)
    assert len(file.windows) == len(lines) - 2


def test_what_was_cut_within_a_letter_costs_that_line_only(lines, stored):
    whole = read_windows(stored(lines))
    failed = {"kind": "failed", "benchmark": "fp64", "reason": "line\u2028separator"}
    tail = json.dumps(failed, ensure_ascii=False).encode() + b"\n" + '{"kind": "failed", "reason": "é'.encode()[:-1]
    file = read_windows(stored(lines, tail))
    assert (file.done, file.failed) == (whole.done, {"fp64": failed["reason"]})
    assert file.damaged == (len(lines) + 2,)


@pytest.mark.parametrize("fact", [{"architecture": 90}, {"sms": 0}, {"sms": None}, {"caches": {}}, {"gpu": 1e999}])
def test_a_header_that_cannot_be_is_refused(lines, stored, fact):
    with pytest.raises(UnreadableInput, match="header"):
        read_windows(stored([lines[0] | fact, *lines[1:]]))


def test_no_calibration_is_written_that_could_not_be_read(lines, stored):
    header = {name: value for name, value in lines[0].items() if name != "sms"}
    with pytest.raises(UnreadableInput, match="which GPU"):
        refit(stored([header, *lines[1:]]))


def test_windows_of_a_later_suite_are_left_out(lines, stored):
    foreign = lines[busy(lines)] | {"benchmark": "fp4_tile", "counts": {"fp4": 1e12, "instruction": 1.0}}
    path = stored([*lines, foreign])
    assert refit(path).windows[-1]["left_out"] == "the suite has no such benchmark"
    assert refit(path).coefficients == refit(stored(lines)).coefficients


def test_what_ended_a_window_early_stays_known(lines, stored):
    at = busy(lines)
    file = read_windows(stored([*lines[:at], lines[at] | {"problem": "the GPU fell off the bus"}, *lines[at + 1 :]]))
    assert file.windows[at - 1].power_w is None
    assert (
        file.windows[at - 1].to_json()["problem"] == file.windows[at - 1].reading.reason == "the GPU fell off the bus"
    )


def test_damaged_lines_are_named_in_the_calibration(lines, stored):
    assert any(note.endswith(f"left out: {len(lines) + 1}") for note in refit(stored(lines, b"{\n")).notes)
    with pytest.raises(UnreadableInput, match="1 damaged"):
        refit(stored(lines[:1], b"{\n"))


def test_equal_powers_fit_static_power_and_no_loss(lines, stored):
    idle = next(line for line in lines if line.get("benchmark") == "idle")
    calibration = refit(stored([lines[0], *({**idle, "repeat": number} for number in range(6))]))
    assert calibration.value("static") == pytest.approx(118.0, rel=0.05)
    assert calibration.value("supply") == 0
    assert calibration.goodness["condition_number"] is None
    assert calibration.goodness["r2_dynamic"] is None


def test_a_counter_that_stood_still_is_no_board_without_power(lines, stored):
    still = [{**line, "edges": [[t, 0.0, u] for t, _, u in line["edges"]]} for line in lines[1:]]
    with pytest.raises(MeasurementError, match="0 W, which no board draws"):
        refit(stored([lines[0], *still]))


def test_a_disk_that_refuses_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="choose another place"):
        WindowWriter(tmp_path / "file" / "w.jsonl", HEADER)
    writer = WindowWriter(tmp_path / "w.jsonl", HEADER)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("joulemark.energy.windows.os.fsync", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        writer.fail("fp32", "why")


def test_an_interrupt_loses_the_window_at_hand_alone(tmp_path):
    gpu, path = SyntheticGpu(), tmp_path / "w.jsonl"
    points, caches = plan("sm_90a", quick=True)[:4], measure_caches(gpu)
    run = partial(measure, gpu, gpu.meter, points, caches, clock=lambda: 0.0)

    def interrupt(progress, _):
        if progress.measured == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(WindowWriter(path, HEADER), tell=interrupt)
    assert run(WindowWriter(path, HEADER)).measured == 2
    assert read_windows(path).done == {point.key for point in points}
    assert not read_windows(path).failed


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 10_000, b'{"schema": "joulemark/calibration-windows/9"}']
)
def test_the_command_says_it_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "w\u00e9\x1b[31m.jsonl"
    path.write_bytes(content)
    assert main(["calibrate", "--refit", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "\x1b" in err) == ("", 1, False)
