"""What tests of merged execution share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from joulemark.merged import cache  # noqa: E402
from tests.merged.fakes import Simulated, Wrapped, fake_capture, run_fakes  # noqa: E402


@pytest.fixture(autouse=True)
def fakes_run(monkeypatch):
    """Fake kernels run, in the place of an emulation."""
    run_fakes(monkeypatch)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A folder of the test's own for what the disk keeps."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def given_times(monkeypatch):
    """Nothing is timed, where what a time is does not matter: each candidate takes 1 ms."""
    from joulemark.merged import measuring, whole

    for module, name in ((measuring, "race"), (whole, "race_calls")):
        monkeypatch.setattr(module, name, lambda calls, _: dict.fromkeys(calls, 1e-3))


@pytest.fixture
def simulated_gpu(monkeypatch, own_cache):
    """Every branch that a GPU takes, on a CPU: captures and compilers are stand-ins, times are given."""
    from joulemark.merged import alternatives, automatic, builds, joining, measuring, questions, replay, whole

    simulated = Simulated()
    monkeypatch.setattr(cache, "device_key", lambda device: "a simulated GPU")
    example = questions.example
    monkeypatch.setattr(
        questions, "example", lambda segment, _, dtype, batch=None: example(segment, torch.device("cpu"), dtype, batch)
    )
    like = alternatives.like
    monkeypatch.setattr(joining, "like", lambda node, _: like(node, torch.device("cpu")))
    for module in (alternatives, measuring):
        monkeypatch.setattr(module, "race", lambda calls, _: dict.fromkeys(calls, 1e-3))
    monkeypatch.setattr(builds, "compiler_for", lambda _: lambda kernel: None)
    monkeypatch.setattr(automatic, "learn", lambda *_: None)
    monkeypatch.setattr(replay, "capture", fake_capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: simulated.capturing)
    monkeypatch.setattr(automatic, "start_compiler", lambda: None)
    monkeypatch.setattr(automatic, "Compiled", lambda inner, mode: Wrapped(inner, mode))
    monkeypatch.setattr(whole, "race_calls", simulated.race_calls)
    monkeypatch.setattr(whole, "race_replays", simulated.race_replays)
    monkeypatch.setattr(whole.Referee, "pool", None)
    monkeypatch.setattr(whole.Referee, "forked_pool", None)
    return simulated
