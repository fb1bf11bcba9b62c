"""A device's memory: how much of it is free once nothing is held for nobody, and whether it ran out."""

from __future__ import annotations

import gc

import torch

_SAID = ("out of memory", "_ERROR_OUT_OF_MEMORY", "_STATUS_ALLOC_FAILED")
"""By torch and Triton; by CUDA's driver, as kernels of ours tell it; by cuDNN and cuBLAS."""


def says_out_of_memory(text: str) -> bool:
    """Whether what was said of an error is that a device's memory ran out.

    Of texts, which is what trials and variants keep. The harness asks of exceptions of any framework, by
    ``collect.timing.is_out_of_memory``; merging imports nothing of it.
    """
    return any(one in text for one in _SAID)


def give_back(device: torch.device) -> None:
    """Let go of models that only hold each other, and have torch give back the blocks that nobody uses."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """What a GPU has free after that, others that use it counted; 0 where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    give_back(device)
    return int(torch.cuda.mem_get_info(device)[0])
