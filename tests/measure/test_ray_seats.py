"""GPUs of a cluster as seats, over a stand-in for ray that runs each call when it is waited for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from joulemark.device.gpu import Gpu
from joulemark.errors import ConfigurationError, Unsupported
from joulemark.measure import ray_cluster
from joulemark.measure.dispatch import Job
from joulemark.measure.ray_cluster import RayCluster
from joulemark.measure.station import StationPlan

PLAN = StationPlan((), "timing", "/")


class RayError(Exception):
    pass


class Call:
    """A call under way; its result, or the error that ends it."""

    def __init__(self, handle, result):
        self.handle, self.result = handle, result


class FakeRay(ModuleType):
    """What joulemark calls of ray.

    Args:
        nodes: node id → list of what each of its stations says of itself; an exception ends that station's actor.
    """

    def __init__(self, nodes, unreachable=None):
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.told = {node: list(stations) for node, stations in nodes.items()}
        self.unreachable = unreachable
        self.killed, self.options, self.late, self.closing, self.closed = [], [], [], [], False

    def init(self, address, **_):
        if self.unreachable:
            raise ConnectionError(self.unreachable)

    def shutdown(self):
        self.closed = True

    def nodes(self):
        gpus = {node: {"GPU": float(len(told)), "CPU": 4.0} if told else {} for node, told in self.told.items()}
        return [{"NodeID": node, "Alive": True, "Resources": resources} for node, resources in gpus.items()]

    def remote(self, cls):
        return SimpleNamespace(options=self._options)

    def _options(self, **options):
        self.options.append(options)
        told = self.told[options["scheduling_strategy"]].pop(0)
        handle = SimpleNamespace()
        handle.describe = SimpleNamespace(remote=lambda: Call(handle, told))
        handle.measure = SimpleNamespace(remote=lambda *given: Call(handle, handle.answer(*given)))
        handle.close = SimpleNamespace(remote=lambda: Call(handle, self.closing.append(told["gpu"]["uuid"])))
        handle.answer = lambda *given: {"given": given}
        handle.told = told
        return SimpleNamespace(remote=lambda plan: handle)

    def wait(self, refs, num_returns, timeout=None):
        ready = [ref for ref in refs if ref not in self.late]
        return ready, [ref for ref in refs if ref in self.late]

    def get(self, ref):
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result

    def kill(self, handle):
        self.killed.append(handle)


def station(uuid, name="NVIDIA H100", **more):
    gpu = None if uuid is None else vars(Gpu(uuid, name))
    base = {"gpu": gpu, "no_gpu": "no driver", "simulated": False, "driver": "580.1", "cuda_driver": 13000}
    return {**base, "node": "host", "problem": None, **more}


@pytest.fixture
def connect(monkeypatch):
    """A cluster over a stand-in with these nodes."""
    monkeypatch.setattr(ray_cluster, "FIRST_SEATS_S", 0.0)

    def make(nodes, **more):
        ray = FakeRay(nodes, **more)
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = lambda node, soft: node
        for name, module in {"ray": ray, "ray.util": ModuleType("ray.util"), strategies.__name__: strategies}.items():
            monkeypatch.setitem(sys.modules, name, module)
        return RayCluster("auto", PLAN), ray

    return make


def seats_of(cluster):
    return {event.seat.uuid: event.seat for event in cluster.wait()}


def test_every_gpu_of_every_node_is_held_by_an_actor_of_its_own(connect):
    cluster, ray = connect(
        {"n1": [station("GPU-a"), station("GPU-b")], "n2": [station("GPU-c", "NVIDIA A100")], "n3": []}
    )
    inventory = cluster.inventory()
    assert [(one.gpu.uuid, one.gpu.slug) for one in inventory.visible] == [
        ("GPU-a", "nvidia-h100"), ("GPU-b", "nvidia-h100"), ("GPU-c", "nvidia-a100"),
    ]  # fmt: skip
    assert all(one["num_gpus"] == 1 and one["max_restarts"] == 0 for one in ray.options)
    assert [one["scheduling_strategy"] for one in ray.options] == ["n1", "n1", "n2"]
    assert (cluster.seats, inventory.driver) == (3, "580.1")
    assert {seat.model for seat in seats_of(cluster).values()} == {"nvidia-h100", "nvidia-a100"}


def test_a_job_is_measured_on_its_seat_with_its_variables(connect):
    cluster, _ = connect({"n1": [station("GPU-a")]})
    cluster.inventory()
    cluster.variables = lambda seat: {"CUDA_VISIBLE_DEVICES": seat.uuid}
    cluster.budget_s = lambda: 2.0
    (seat,) = seats_of(cluster).values()
    job = Job("bench_it.py::bench", "case", "nvidia-h100")
    cluster.start(seat, job, 1)
    (event,) = cluster.wait()
    assert event.reply == {"given": (job.nodeid, {"CUDA_VISIBLE_DEVICES": "GPU-a"}, 2.0)}
    assert (event.job, event.attempt, event.lost) == (job, 1, None)
    assert list(cluster.wait()) == []  # nothing is on its way


def test_an_actor_that_dies_is_a_lost_seat(connect):
    cluster, ray = connect({"n1": [station("GPU-a")]})
    cluster.inventory()
    (seat,) = seats_of(cluster).values()
    cluster._actors[seat.key].answer = lambda *given: RayError("\nThe actor is unavailable\nmore")
    cluster.start(seat, Job("x", "case", "nvidia-h100"), 1)
    (event,) = cluster.wait()
    assert (event.seat, event.lost, event.reply) == (seat, "The actor is unavailable", None)
    assert (cluster.seats, len(ray.killed)) == (0, 1)


def test_gpus_that_the_sweep_does_not_use_are_let_go_now_and_later(connect):
    cluster, ray = connect({"n1": [station("GPU-a"), station("GPU-b"), station("GPU-c"), station("GPU-d")]})
    ray.late += [
        ref for ref, (handle, _) in cluster._arriving.items() if handle.told["gpu"]["uuid"] in ("GPU-c", "GPU-d")
    ]
    cluster.inventory()
    cluster.keep(lambda seat: seat.uuid in ("GPU-b", "GPU-d"))
    assert [handle.told["gpu"]["uuid"] for handle in ray.killed] == ["GPU-a"]
    assert set(seats_of(cluster)) == {"GPU-b"}
    ray.late.clear()
    assert set(seats_of(cluster)) == {"GPU-d"}
    assert [handle.told["gpu"]["uuid"] for handle in ray.killed] == ["GPU-a", "GPU-c"]
    cluster.close()
    assert ray.closing == ["GPU-b", "GPU-d"]  # their measuring processes end in order
    assert len(ray.killed) == 4
    assert ray.closed


def test_after_an_interrupt_nothing_is_waited_for(connect):
    cluster, ray = connect({"n1": [station("GPU-a")]})
    cluster.inventory()
    cluster.close(at_once=True)
    assert (ray.closing, len(ray.killed), ray.closed) == ([], 1, True)


def test_a_node_without_the_project_is_told_and_the_others_measure(connect):
    lacking = station("GPU-a", problem="there is no folder /project")
    cluster, _ = connect({"n1": [lacking], "n2": [station("GPU-b")], "n3": [RayError("out of disk")]})
    assert [gpu.uuid for gpu in cluster.inventory().gpus] == ["GPU-b"]
    assert "there is no folder /project" in cluster.problems[0]
    assert cluster.problems[1] == "out of disk"


def test_a_node_without_a_driver_measures_its_cpu(connect):
    cluster, _ = connect({"n1": [station(None)]})
    assert cluster.inventory().visible == ()
    assert cluster.no_gpu == "no driver"
    assert [seat.model for seat in seats_of(cluster).values()] == ["cpu"]


def test_clusters_that_cannot_be_used_say_why(connect, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"no Ray cluster answers at auto \(Could not find any"):
        connect({}, unreachable="Could not find any running Ray instance\nmore")
    with pytest.raises(ConfigurationError, match=r"no node .* offers a GPU"):
        connect({"n1": []})
    cluster, _ = connect({"n1": [station("GPU-a", problem="there is no folder /project")]})
    with pytest.raises(ConfigurationError, match=r"no GPU of the cluster could be had .* there is no folder /project"):
        cluster.inventory()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unsupported, match="pip install 'joulemark\\[ray\\]'"):
        RayCluster("auto", PLAN)
