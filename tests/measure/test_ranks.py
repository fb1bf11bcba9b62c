"""Ranks that measure together: their environment, their deaths, and the figures of the whole."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.measure import rank_group
from joulemark.measure.communication import communication_measurement, measurement_of
from joulemark.measure.pace import Alone, InStep
from joulemark.measure.plan import Pass
from joulemark.measure.rank_group import RankGroup, rank_environment, trace_of_rank
from joulemark.measure.ranks import join_answers
from joulemark.measure.scaling import with_efficiency
from joulemark.metrics import COMMUNICATION
from joulemark.records import Case, Conditions, Finding, Measurement, Record, Value
from joulemark.trace.communication import RankCommunication, across

CHILD = """
import json, os, socket, sys, time

answers = open(sys.argv[-1].split(":", 1)[1], "a")
connection = socket.socket(fileno=int(os.environ["JOULEMARK_WORKER_FD"]))
rank = int(os.environ["RANK"])

def say(message):
    connection.sendall(json.dumps(message).encode() + b"\\n")

say({"hello": {"rank": rank}})
for line in connection.makefile("r"):
    request = json.loads(line)
    if request.get("stop"):
        break
    what = request["nodeid"]
    outcome, reason = "ok", None
    if what == "rank 1 dies" and rank == 1:
        os._exit(5)
    if what == "rank 1 dies" and rank == 0:
        outcome, reason = "failed", "Connection closed by peer"
    if what == "rank 1 fails" and rank == 1:
        outcome, reason = "oom", "out of memory"
    elif what in ("hang", "rank 1 fails"):
        time.sleep(600)
    if what == "no":
        outcome, reason = "unsupported", "no such phase"
    answers.write(json.dumps({
        "nodeid": what, "outcome": outcome, "reason": reason, "measurements": [], "findings": [],
        "window_utc": [rank, 10 + rank], "trace": request["trace"], "pid": os.getpid(),
        "rendezvous": os.environ["JOULEMARK_RENDEZVOUS"],
    }) + "\\n")
    answers.flush()
    say({"done": what})
"""


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Two ranks of the small child above."""
    monkeypatch.setattr(rank_group, "GRACE_S", 0.3)
    (tmp_path / "child").mkdir()
    (tmp_path / "child" / "pytest.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "child")}
    one = RankGroup([], "timing", tmp_path, environment, tmp_path, 2)
    yield one
    one.kill()


def test_all_ranks_are_asked_and_answer_as_one(group):
    first = group.ask("a", None, 20, trace="/somewhere/case.json.gz")
    assert first["trace"] == "/somewhere/case-rank0.json.gz"
    assert first["window_utc"] == [0, 11]
    assert group.hello == {"rank": 0}
    second = group.ask("b", None, 20)
    assert (second["pid"], second["trace"]) == (first["pid"], None)
    group.close()
    assert not Path(f"/proc/{first['pid']}").exists()


def test_a_rank_that_dies_is_named_and_ends_the_others(group):
    pid = group.ask("a", None, 20)["pid"]
    with pytest.raises(WorkerDied, match=r"rank 1 of 2: the measuring process ended without an answer \(exit status 5"):
        group.ask("rank 1 dies", None, 20)
    assert not Path(f"/proc/{pid}").exists()
    assert group.ask("b", None, 20)["pid"] != pid


def test_a_rank_that_fails_is_named_while_the_others_hang(group):
    rendezvous = group.ask("a", None, 20)["rendezvous"]
    begin = time.monotonic()
    answer = group.ask("rank 1 fails", None, 60)
    assert time.monotonic() - begin < 10
    assert (answer["outcome"], answer["reason"]) == ("oom", "rank 1 of 2: out of memory")
    assert group.ask("b", None, 20)["rendezvous"] != rendezvous  # a file that is used twice would join dead ranks


def test_the_timeout_kills_all_ranks(group):
    pid = group.ask("a", None, 20)["pid"]
    with pytest.raises(CaseTimeout, match=r"^killed at its timeout of 0.5 s"):
        group.ask("hang", None, 0.5)
    assert not Path(f"/proc/{pid}").exists()


def test_what_all_ranks_say_names_none(group):
    assert group.ask("no", None, 20)["reason"] == "no such phase"


def test_each_rank_sees_its_own_gpu_first_and_the_others_behind_it(tmp_path):
    base = {"CUDA_VISIBLE_DEVICES": "GPU-a", "NCCL_SOCKET_IFNAME": "eth0"}
    second = rank_environment(base, 1, ("GPU-a", "GPU-b", "GPU-c"), 3, tmp_path / "meet")
    assert second["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a,GPU-c"
    assert (second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("1", "1", "3")
    assert (second["NCCL_NVLS_ENABLE"], second["NCCL_SOCKET_IFNAME"]) == ("0", "eth0")
    on_cpu = rank_environment({}, 0, (), 2, tmp_path / "meet")
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert int(on_cpu["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 0, ("GPU-a",), 2, tmp_path)["OMP_NUM_THREADS"] == "7"


def test_the_rank_stands_before_the_suffix():
    assert trace_of_rank(Path("/a/case.json.gz"), 3) == Path("/a/case-rank3.json.gz")


def answer(*measurements, **more):
    base = {"nodeid": "a", "outcome": "ok", "reason": None, "findings": [], "window_utc": [0.0, 1.0]}
    return {**base, "measurements": [one.to_json() for one in measurements], **more}


def steady(times, items=32):
    middle = sorted(times)[len(times) // 2]
    values = {
        "device_time_s": Value(middle, "s", None, n=len(times), tier="cuda_events"),
        "throughput_per_s": Value(items / middle, "1/s", None, n=len(times), tier="cuda_events"),
    }
    return Measurement("steady", values, {"device_time_s": list(times)})


def joined(*answers):
    reply = join_answers(answers)
    return {one["name"]: Measurement.from_json(one) for one in reply["measurements"]}, reply


def test_a_step_lasts_until_its_last_rank_and_items_add():
    found, _ = joined(answer(steady([0.010, 0.012, 0.011])), answer(steady([0.011, 0.010, 0.013])))
    one = found["steady"]
    assert one.samples["device_time_s"] == [0.011, 0.012, 0.013]
    assert one.samples["rank0_device_time_s"] == [0.010, 0.012, 0.011]
    assert one.samples["rank1_device_time_s"] == [0.011, 0.010, 0.013]
    assert one.values["device_time_s"].value == 0.012
    assert one.values["device_time_s"].interval == (0.011, 0.013)
    assert one.values["throughput_per_s"].value == pytest.approx(64 / 0.012)
    assert one.values["throughput_per_s"].interval == pytest.approx((64 / 0.013, 64 / 0.011))


def power(watts, joules, conditions=None):
    values = {
        "power_w": Value(watts, "W", (watts - 10, watts + 10), n=8, tier="nvml_energy_counter"),
        "energy_per_item_j": Value(joules, "J", (joules * 0.9, joules * 1.1), n=8, tier="nvml_energy_counter"),
    }
    return Measurement("power", values, {"energy_j": [watts], "energy_window_s": [1.0]}, conditions=conditions)


def test_power_adds_over_the_boards_and_energy_is_of_all_items():
    # 500 W and 600 W for 0.1 s per step of 10 items each: 110 J for 20 items.
    found, reply = joined(answer(power(500, 5.0), static_power_w=120.0), answer(power(600, 6.0), static_power_w=130.0))
    one = found["power"]
    assert (one.values["power_w"].value, one.values["power_w"].interval) == (1100, (1080, 1120))
    assert one.values["energy_per_item_j"].value == pytest.approx(5.5)
    assert one.values["energy_per_item_j"].interval == pytest.approx((4.95, 6.05))
    names = [f"rank{rank}_{name}" for rank in (0, 1) for name in ("energy_j", "energy_window_s")]
    assert one.samples == dict(zip(names, ([500], [1.0], [600], [1.0]), strict=True))
    assert reply["static_power_w"] == 250.0


def test_a_board_that_is_not_measured_leaves_no_energy_of_the_whole():
    lacking = Measurement("power", missing={"power_w": "no counter", "energy_per_item_j": "no counter"})
    found, reply = joined(answer(power(500, 5.0), static_power_w=1.0), answer(lacking, static_power_w=None))
    shared, _ = joined(answer(power(80, 4.0)), answer(lacking))
    assert found["power"].values["energy_per_item_j"].value == pytest.approx(2.5)
    assert shared["power"].values["power_w"].value == 80
    assert reply["static_power_w"] is None
    other, _ = joined(answer(lacking), answer(power(500, 5.0)))
    assert other["power"].values == {}
    assert other["power"].missing["power_w"] == "rank 0: no counter"


def test_a_rank_whose_clocks_fell_is_named():
    hot = Conditions(1.2e9, max_sm_clock_hz=1.98e9, reasons={"thermal": 1.0}, n=20)
    found, _ = joined(answer(power(500, 5.0)), answer(power(600, 6.0, hot)))
    assert found["power"].findings[0].message.startswith("rank 1: ")


def test_the_largest_peak_of_memory_counts():
    ranks = [answer(Measurement("latency", {"peak_memory_bytes": Value(float(peak), "B")})) for peak in (100, 300, 200)]
    assert joined(*ranks)[0]["latency"].values["peak_memory_bytes"].value == 300


def test_findings_of_several_ranks_stand_once():
    same = Finding("warning", "deprecated").to_json()
    _, reply = joined(answer(findings=[same]), answer(findings=[same, Finding("x", "y").to_json()]))
    assert [one["code"] for one in reply["findings"]] == ["warning", "x"]


def record(world_size, throughput, outcome="ok", gpu="nvidia-h200"):
    metrics = {} if throughput is None else {"throughput_per_s": throughput}
    return Record(Case("resnet50", gpu_model=gpu, world_size=world_size), "r", outcome, "e", metrics=metrics)


def test_efficiency_is_throughput_over_n_times_that_of_one():
    one = record(1, Value(1000.0, "1/s", (990.0, 1010.0), n=30))
    found = with_efficiency(record(4, Value(3600.0, "1/s", (3500.0, 3700.0), n=20)), one)
    value = found.metrics["scaling_efficiency"]
    assert value.value == pytest.approx(0.9)
    assert value.interval == pytest.approx((3500 / 4040, 3700 / 3960))
    assert found.findings == ()


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (None, "no row of one rank"),
        (record(1, Value(1.0, "1/s"), "failed"), "ended failed"),
        (record(1, None), "throughput was not measured"),
    ],
)
def test_without_a_row_of_one_rank_the_reason_stands_in_the_notes(one, why):
    found = with_efficiency(record(2, Value(2.0, "1/s")), one)
    assert found.metrics["scaling_efficiency"].value is None
    assert why in found.notes["scaling_efficiency"]


def test_on_a_cpu_the_efficiency_is_qualified_and_a_failure_has_none():
    base = record(1, Value(1.0, "1/s"), gpu="cpu")
    assert with_efficiency(record(2, Value(1.0, "1/s"), gpu="cpu"), base).findings[0].code == "ranks_share_cores"
    assert "scaling_efficiency" not in with_efficiency(record(2, None, "failed"), base).metrics


def rank(number, spent, exposed):
    return RankCommunication(number, "device", spent, exposed, [0.01] * len(spent), 6)


def test_communication_of_all_ranks_as_a_measurement():
    found = measurement_of(across([rank(0, [4e-3] * 8, [2e-3] * 8), rank(1, [2e-3] * 8, [1e-3] * 8)]))
    assert {name: value.value for name, value in found.values.items()} == pytest.approx(
        {
            "communication_s": 3e-3,
            "exposed_communication_s": 1.5e-3,
            "overlap_fraction": 0.5,
            "straggler_wait_s": 2e-3,
            "straggler_rank": 1.0,
        }
    )
    assert found.samples["rank1_exposed_communication_s"] == [1e-3] * 8
    assert re.search(r"rank 1 .* 8 of 8 .* 2 ms", found.findings[0].message)


def test_without_collectives_every_figure_has_its_reason():
    found = measurement_of(across([rank(0, [0.0] * 3, [0.0] * 3), rank(1, [0.0] * 3, [0.0] * 3)]))
    assert found.values == {}
    assert set(found.missing) == set(COMMUNICATION)
    lost = communication_measurement([Path("/nonexistent/rank0.json")])
    assert "rank 0 left no trace" in lost.missing["communication_s"]


def test_ranks_take_the_steps_that_fit_by_rank_zeros_clock():
    told = []
    pace = InStep(lambda value: told.append(value) or 0.02)
    assert pace.agree(0.5) == 0.02
    assert told == [0.5]
    assert pace.stop(Pass("steady", 0.4, min_samples=5), 0.02)([0.0] * 19) is None
    assert pace.stop(Pass("steady", 0.4, min_samples=5), 0.02)([0.0] * 20)
    assert pace.stop(Pass("steady", 0.4, min_samples=5), 10.0)([0.0] * 5)
    assert pace.steps(2.4, 0.01) == 240
    assert Alone().steps(2.4, 0.01) is None
    assert Alone().agree(0.5) == 0.5
