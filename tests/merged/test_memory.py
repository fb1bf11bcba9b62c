"""A device's memory: what says that it ran out, and that what nobody uses is given back before it is counted."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from joulemark.merged import memory

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("loading expand_depthwise: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("launching a kernel with 9 blocks: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", False),
        ("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory.", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("out of resource: shared memory, Required: 262144", False),
        ("operation not permitted when stream is capturing", False),
    ],
)
def test_what_says_that_memory_ran_out(text, says):
    assert memory.says_out_of_memory(text) is says


def test_what_only_holds_itself_is_gone_before_torchs_blocks_are_given_back_and_counted(monkeypatch):
    lost = nn.Linear(1, 1)
    lost.itself = [lost]
    here, seen = weakref.ref(lost), []
    del lost
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(here()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 + len(seen), 100))
    assert memory.free_bytes(GPU) == 41
    assert seen == [None]


def test_a_cpu_is_asked_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("a GPU's"))
    assert memory.free_bytes(torch.device("cpu")) == 0
    memory.give_back(torch.device("cpu"))
