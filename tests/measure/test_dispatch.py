"""Handing cases to seats: order, losses, late answers and giving up, over a cluster that follows a script."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from joulemark.measure.dispatch import MOST_ATTEMPTS, Answer, Dispatcher, Event, Job, Seat

A, B, C = (Seat(key, f"GPU-{key}", model, "node") for key, model in (("a", "h100"), ("b", "h100"), ("c", "a100")))


def jobs(count, where="h100", first=0):
    return [Job(f"bench_it.py::bench[{n}]", f"case{n}", where) for n in range(first, first + count)]


class Scripted:
    """Seats that come at once and answer in order; ``trouble`` may answer otherwise.

    Args:
        seats: that come before anything else.
        trouble: asked with (seat, job, attempt): events instead of the answer, or None.
    """

    def __init__(self, *seats, trouble=lambda seat, job, attempt: None):
        self.events = deque([[Event(seat) for seat in seats]] if seats else [])
        self.trouble = trouble
        self.started = []

    def start(self, seat, job, attempt):
        self.started.append((seat.key, job.case_id, attempt))
        events = self.trouble(seat, job, attempt)
        self.events.append([Event(seat, job, attempt, {"by": seat.key})] if events is None else events)

    def wait(self):
        return self.events.popleft() if self.events else []


def answers_of(executor, wanted, refuse=lambda job: None):
    dispatcher = Dispatcher(executor, wanted, refuse)
    return dispatcher, [answer for together in dispatcher.run() for answer in together]


def test_every_job_is_answered_once_in_its_order_on_a_gpu_of_its_model():
    executor = Scripted(A, B, C)
    wanted = [*jobs(5), *jobs(2, "a100", 5)]
    _, answers = answers_of(executor, wanted)
    assert Counter(one.job for one in answers) == Counter(wanted)
    assert [case for key, case, _ in executor.started if key in "ab"] == [f"case{n}" for n in range(5)]
    assert {case for key, case, _ in executor.started if key == "c"} == {"case5", "case6"}
    assert all(one.attempt == 1 and one.reply == {"by": one.seat.key} for one in answers)


def test_a_job_for_one_gpu_waits_for_that_gpu():
    executor = Scripted(A, B)
    answers_of(executor, [*jobs(1, "GPU-b"), *jobs(1, "GPU-a", 1)])
    assert sorted(executor.started) == [("a", "case1", 1), ("b", "case0", 1)]


def test_as_many_jobs_are_under_way_as_there_are_seats():
    executor = Scripted(A, B)
    most = 0
    for _ in Dispatcher(executor, jobs(50)).run():
        most = max(most, sum(len(batch) for batch in executor.events))
    assert most == 2


def test_the_job_of_a_lost_seat_is_measured_first_on_another():
    def trouble(seat, job, attempt):
        return [Event(seat, lost="node died")] if seat == B else None

    executor = Scripted(A, B, trouble=trouble)
    _, answers = answers_of(executor, jobs(4))
    assert Counter(one.job.case_id for one in answers) == Counter(f"case{n}" for n in range(4))
    assert executor.started == [
        ("a", "case0", 1),
        ("b", "case1", 1),
        ("a", "case2", 1),
        ("a", "case1", 2),
        ("a", "case3", 1),
    ]
    assert {one.job.case_id: one.attempt for one in answers}["case1"] == 2


def test_of_two_answers_for_one_case_the_first_counts():
    """A node that was taken for dead answers after its case was given to another."""
    late = []

    def trouble(seat, job, attempt):
        if seat == B:
            late.append(Event(seat, job, attempt, {"by": "the dead"}))
            return [Event(seat, lost="no heartbeat")]
        return [*late, Event(seat, job, attempt, {"by": seat.key})] if attempt == 2 else None

    dispatcher, answers = answers_of(Scripted(A, B, trouble=trouble), jobs(3))
    assert Counter(one.job.case_id for one in answers) == Counter(["case0", "case1", "case2"])
    assert {one.job.case_id: one.reply["by"] for one in answers}["case1"] == "the dead"
    assert dispatcher.dropped == 1


def test_a_late_answer_spares_the_case_that_still_waits():
    def trouble(seat, job, attempt):
        if seat == B:
            return [Event(seat, lost="no heartbeat"), Event(seat, job, attempt, {"by": "the dead"})]
        return None

    executor = Scripted(A, B, trouble=trouble)
    dispatcher, answers = answers_of(executor, jobs(3))
    assert Counter(one.job.case_id for one in answers) == Counter(["case0", "case1", "case2"])
    assert [case for _, case, _ in executor.started].count("case1") == 1
    assert dispatcher.dropped == 0


def test_a_case_that_takes_every_node_down_is_given_up():
    names = [Seat(f"s{n}", f"GPU-{n}", "h100", "node") for n in range(5)]

    def trouble(seat, job, attempt):
        return [Event(seat, lost="node died")] if job.case_id == "case0" else None

    executor = Scripted(*names, trouble=trouble)
    _, answers = answers_of(executor, jobs(6))
    (bad,) = [one for one in answers if one.reply is None]
    assert bad.job.case_id == "case0"
    assert bad.reason == f"lost with its node in each of {MOST_ATTEMPTS} attempts (node died)"
    assert len(answers) == 6


@pytest.mark.parametrize("seats", [(), (C,)])
def test_what_no_seat_is_left_for_says_so(seats):
    _, answers = answers_of(Scripted(*seats), [*jobs(2), *jobs(1, "a100", 2)] if seats else jobs(2))
    lost = [one for one in answers if one.reply is None]
    assert [one.job.case_id for one in lost] == ["case0", "case1"]
    assert lost[0].reason == "no node with the GPU h100 is left in the cluster"
    assert len(answers) == len(seats) + 2


def test_a_job_may_be_refused_when_its_turn_comes():
    executor = Scripted(A)
    seen = []

    def refuse(job):
        seen.append(len(executor.started))
        return {} if job.case_id in ("case1", "case2") else None

    _, answers = answers_of(executor, jobs(4), refuse)
    assert [case for _, case, _ in executor.started] == ["case0", "case3"]
    assert Answer(jobs(2)[1], 1, {}, None) in answers
    assert len(answers) == 4
    assert seen == [0, 1, 1, 1]
