"""One process profiles many cases, and is replaced where its recordings do not reconcile."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from joulemark.errors import CaseTimeout, WorkerDied
from joulemark.metrics import PROFILER
from joulemark.plugin.profiling import ProfilingProcess
from joulemark.plugin.sweep import CPU, Target
from joulemark.records import Finding, Measurement

LOST = Finding("kernels_and_launches_differ", "1 kernel for 2 launches", flags=True)


def answer(*findings, outcome="ok", **more):
    measured = [Measurement("profiler", findings=findings).to_json()] if outcome == "ok" else []
    return {"outcome": outcome, "reason": "why", "measurements": measured, "findings": [], **more}


@dataclass
class Script:
    """Workers that answer by their number and the number of the case in them."""

    answers: dict[tuple[int, int], object] = field(default_factory=dict)
    log: list[tuple[object, ...]] = field(default_factory=list)
    started: int = 0

    def start(self, target):
        self.started += 1
        return ScriptedWorker(self, self.started)


@dataclass
class ScriptedWorker:
    script: Script
    number: int
    asked: int = 0

    def ask(self, nodeid, next_nodeid, timeout_s, **request):
        self.asked += 1
        self.script.log.append((self.number, nodeid, timeout_s, request["trace"]))
        reply = self.script.answers.get((self.number, self.asked), answer())
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self):
        self.script.log.append((self.number, "closed"))

    kill = close


def profiled(script, *nodeids, targets=()):
    process = ProfilingProcess(script.start)
    where = targets or (CPU,) * len(nodeids)
    return [process.profile(one, target, 9.0, None) for one, target in zip(nodeids, where, strict=True)]


def test_one_process_profiles_all_cases():
    script = Script()
    profiled(script, "a", "b", "c")
    assert script.log == [(1, "a", 9.0, None), (1, "b", 9.0, None), (1, "c", 9.0, None)]


def test_a_recording_that_does_not_reconcile_is_made_again_in_a_fresh_process():
    script = Script({(1, 2): answer(LOST)})
    _, second, _ = profiled(script, "a", "b", "c")
    assert [one[:2] for one in script.log] == [(1, "a"), (1, "b"), (1, "closed"), (2, "b"), (2, "c")]
    assert second["measurements"][0]["findings"] == []


def test_what_a_fresh_process_shows_too_replaces_no_process_again():
    script = Script({(1, 2): answer(LOST), (2, 1): answer(LOST), (2, 2): answer(LOST)})
    replies = profiled(script, "a", "b", "c")
    assert script.started == 2
    assert [len(one["measurements"][0]["findings"]) for one in replies] == [0, 1, 1]


def test_the_first_recording_of_a_process_has_no_session_before_it_to_blame():
    script = Script({(1, 1): answer(LOST)})
    assert profiled(script, "a", "b")[0]["measurements"][0]["findings"] == [LOST.to_json()]
    assert script.started == 1


def test_a_note_that_does_not_flag_is_no_loss():
    script = Script({(1, 2): answer(Finding("note", "seen"))})
    profiled(script, "a", "b")
    assert script.started == 1


@pytest.mark.parametrize("death", [WorkerDied("ended"), answer(outcome="failed", poisoned=True)])
def test_a_process_that_died_after_earlier_cases_gets_a_second_chance(death):
    script = Script({(1, 2): death})
    replies = profiled(script, "a", "b", "c")
    assert [one[:2] for one in script.log if one[1] != "closed"] == [(1, "a"), (1, "b"), (2, "b"), (2, "c")]
    assert [one["outcome"] for one in replies] == ["ok"] * 3


def test_a_time_out_is_not_waited_for_twice():
    script = Script({(1, 2): CaseTimeout("killed at its timeout of 9 s", "raise --bench-timeout")})
    _, second, _ = profiled(script, "a", "b", "c")
    assert [one[:2] for one in script.log if one[1] != "closed"] == [(1, "a"), (1, "b"), (2, "c")]
    assert second["measurements"][0]["missing"] == dict.fromkeys(
        PROFILER, "the profiler pass ended failed: killed at its timeout of 9 s"
    )


def test_another_gpu_has_another_process():
    script = Script()
    other = Target("GPU-1", "nvidia-h200", "nvidia-h200", "NVIDIA H200")
    profiled(script, "a", "b", "c", targets=(CPU, other, other))
    assert [one[:2] for one in script.log] == [(1, "a"), (1, "closed"), (2, "b"), (2, "c")]
