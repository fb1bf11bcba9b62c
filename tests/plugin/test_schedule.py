"""Which case goes to which worker, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from joulemark.plugin.schedule import Expected, LongestFirst, Planned, expectations, longest_first, recent_runs
from joulemark.records import Case, Environment, Record, Run, Value
from joulemark.store import RunWriter


def case(name, batch=None, model="nvidia-h200"):
    return Case(name, batch_size=batch, gpu_model=model)


def planned(*names, slug="nvidia-h200"):
    return [Planned(f"bench_a.py::{name}", slug, case(name, model=slug)) for name in names]


class Node:
    """A worker that notes what it is sent."""

    def __init__(self, name, slug="nvidia-h200"):
        self.gateway = SimpleNamespace(id=name)
        self.slug = slug
        self.sent: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices):
        assert not self.shutting_down
        self.sent.extend(indices)

    def shutdown(self):
        self.shutting_down = True


def scheduler(nodes, plan, seconds):
    expected = {one.case.case_id: Expected(s, None) for one, s in zip(plan, seconds, strict=True)}
    made = LongestFirst(
        None, len(nodes), lambda node: node.slug, lambda: plan, lambda items: longest_first(items, expected, 1.0)
    )
    for node in nodes:
        assert not made.collection_is_completed
        made.add_node(node)
        made.add_node_collection(node, [one.nodeid for one in plan])
    assert made.collection_is_completed
    made.schedule()
    return made


def test_known_cases_by_their_time_and_unknown_ones_by_their_batch():
    plan = [
        Planned("short", "m", case("short")),
        Planned("small", "m", case("unknown", 1)),
        Planned("large", "m", case("unknown", 64)),
        Planned("odd", "m", None),
        Planned("long", "m", case("long")),
    ]
    expected = {case("short").case_id: Expected(0.5, None), case("long").case_id: Expected(9.0, None)}
    assert [plan[i].nodeid for i in longest_first(plan, expected, 2.0)] == ["long", "large", "small", "odd", "short"]


def test_the_longest_goes_first_and_every_worker_knows_its_next_item():
    nodes = [Node("gw0"), Node("gw1")]
    made = scheduler(nodes, planned("a", "b", "c", "d", "e"), [1, 2, 3, 4, 5])
    assert [node.sent for node in nodes] == [[4, 1], [3, 2]]  # 5 and 2 s against 4 and 3 s
    assert not made.tests_finished
    made.mark_test_complete(nodes[1], 3)
    assert nodes[1].sent == [3, 2, 0]
    made.mark_test_complete(nodes[0], 4)
    assert nodes[0].shutting_down
    made.mark_test_complete(nodes[1], 2)
    assert nodes[1].shutting_down
    assert made.tests_finished
    assert made.has_pending


def test_fewer_items_than_workers_leave_some_without_one():
    nodes = [Node("gw0"), Node("gw1"), Node("gw2")]
    made = scheduler(nodes, planned("a", "b"), [1, 2])
    assert sorted(node.sent for node in nodes) == [[], [0], [1]]
    assert all(node.shutting_down for node in nodes)
    assert made.tests_finished


def test_an_item_goes_to_a_gpu_of_its_model_only():
    nodes = [Node("gw0", "nvidia-h200"), Node("gw1", "nvidia-l4")]
    plan = [*planned("a", "b", slug="nvidia-l4"), *planned("c", "d", "e", slug="nvidia-h200")]
    made = scheduler(nodes, plan, [1, 2, 3, 4, 5])
    made.mark_test_complete(nodes[0], 4)
    assert nodes[0].sent == [4, 3, 2]
    assert nodes[1].sent == [1, 0]


def test_a_worker_that_dies_loses_the_item_that_it_was_at_and_no_other():
    nodes = [Node("gw0"), Node("gw1")]
    plan = planned("a", "b", "c", "d", "e", "f")
    made = scheduler(nodes, plan, [6, 5, 4, 3, 2, 1])
    assert nodes[0].sent == [0, 3]
    assert made.remove_node(nodes[0]) == plan[0].nodeid
    assert nodes[1].sent == [1, 2]
    made.mark_test_complete(nodes[1], 1)
    assert nodes[1].sent == [1, 2, 3]  # what it had not begun is the longest again
    new = Node("gw2")
    made.add_node(new)
    made.add_node_collection(new, [one.nodeid for one in plan])
    made.schedule()
    assert new.sent == [4, 5]
    assert made.remove_node(nodes[1]) == plan[2].nodeid
    made.mark_test_complete(new, 4)
    assert new.sent == [4, 5, 3]


def test_a_worker_that_dies_after_all_were_sent_home_leaves_its_items_to_its_replacement():
    nodes = [Node("gw0"), Node("gw1")]
    plan = planned("a", "b", "c")
    made = scheduler(nodes, plan, [3, 2, 1])
    assert [node.sent for node in nodes] == [[0], [1, 2]]
    assert made.remove_node(nodes[1]) == plan[1].nodeid
    assert not made.tests_finished
    new = Node("gw2")
    made.add_node(new)
    made.add_node_collection(new, [one.nodeid for one in plan])
    made.schedule()
    assert new.sent == [2]
    assert new.shutting_down


def test_workers_that_collect_other_items_are_refused():
    made = LongestFirst(None, 2, lambda node: node.slug, list, lambda items: [])
    for name in ("gw0", "gw1"):
        made.add_node(Node(name))
    first, second = made.nodes
    made.add_node_collection(first, ["a", "b"])
    with pytest.raises(pytest.UsageError, match="c differs"):
        made.add_node_collection(second, ["a", "c"])


def test_what_cases_took_is_read_from_the_newest_files(tmp_path):
    def store(stamp, seconds, watts, outcome="ok"):
        environment = Environment({})
        path = tmp_path / "nvidia-h200" / f"sweep-{stamp}-abcdef.jsonl"
        record = Record(
            case("a"),
            "run",
            outcome,
            environment.environment_id,
            metrics={"power_w": Value(watts, "W")},
            window_utc=(100.0, 100.0 + seconds),
        )
        with RunWriter(path, "run", environment, 1.0) as writer:
            writer.write(record)

    store("20260101T000000Z", 5.0, 500.0)
    store("20260102T000000Z", 4.0, 400.0)
    store("20260103T000000Z", 3.0, 300.0, "failed")
    (tmp_path / "nvidia-h200" / "sweep-20260104T000000Z-abcdef.jsonl").write_text("not a result\n")
    assert expectations(recent_runs(tmp_path)) == {case("a").case_id: Expected(4.0, 400.0)}
    assert expectations([Run("", "", {}, (), completed=True)]) == {}
