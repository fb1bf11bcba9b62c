"""What the measuring process does between cases."""

from __future__ import annotations

import importlib
import importlib.util
import queue
import socket
import sys
from types import SimpleNamespace

import pytest

from joulemark.plugin.child import _may_open, _reset_compiler

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.parametrize(("compiled", "resets"), [(0, 0), (3, 1), (None, 1)])
def test_the_compiler_forgets_only_what_it_has_compiled(monkeypatch, compiled, resets):
    done = []
    frames = SimpleNamespace() if compiled is None else SimpleNamespace(FRAME_COUNTER=compiled)
    compiler = SimpleNamespace(convert_frame=frames, reset=lambda: done.append(1))
    monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
    _reset_compiler()
    assert len(done) == resets


@needs_torch
def test_torch_says_what_it_has_compiled():
    import torch

    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    frames = sys.modules["torch._dynamo"].convert_frame
    assert frames.FRAME_COUNTER > 0
    _reset_compiler()
    assert frames.FRAME_COUNTER == 0


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'torchvision'"), RuntimeError("operator torchvision::nms does not exist")]
)
def test_a_library_that_does_not_import_ends_no_process_of_counters(monkeypatch, error):
    def broken(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", broken)
    here, there = socket.socketpair()
    for word, may in (({}, True), ({"stop": True}, False)):
        requests = queue.Queue()
        requests.put(word)
        assert _may_open(here, requests) is may
    assert there.recv(100).startswith(b"{")
    here.close()
    there.close()
