"""What was measured once is kept on disk: rates of a GPU, choices for segments, plans of whole models.

A key is the hash of all that an entry depends on; an entry that cannot be read is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
from torch import Tensor, fx, nn

VARIABLE = "JOULEMARK_MERGED_CACHE"
_VERSION = 3
"""Of the entries' meaning: another one is another key."""
_AT_ONCE = 1 << 22
"""Numbers of a tensor that are hashed at once."""
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number of 64 bits (of the golden ratio's): its multiples by places differ in all of them."""
_MIXING = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Factors of splitmix64's mixing (Steele et al., *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014)."""
_MIXED_BITS = 31
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def folder() -> Path:
    """$JOULEMARK_MERGED_CACHE, or the user's cache folder."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "joulemark" / "merged"


def key_of(*parts: object) -> str:
    """A key from what an entry depends on; versions of torch, CUDA and cuDNN are added."""
    versions = (torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), _VERSION)
    text = "\0".join(repr(one) for one in (*versions, *parts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@cache
def code_key(part: str = "") -> str:
    """A hash of this package's texts, or of those of one of its folders."""
    whole = hashlib.sha256()
    for path in sorted((Path(__file__).parent / part).rglob("*")):
        if path.suffix in (".py", ".cuh", ".hpp", ".json"):
            whole.update(path.read_bytes())
    return whole.hexdigest()[:32]


def device_key(device: torch.device) -> str:
    """What a measured time depends on: the GPU's name and its multiprocessors, or that it is a CPU."""
    if device.type != "cuda":
        return str(device.type)
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.multi_processor_count} {properties.total_memory >> 30}"


def model_key(model: nn.Module) -> str:
    """A hash of a model's structure and of the shapes and formats of its weights; their values do not decide times."""
    lines = [f"{name} {type(one).__qualname__} {one.extra_repr()}" for name, one in model.named_modules()]
    lines += [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in model.state_dict().items()]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def graph_key(graph: fx.GraphModule) -> str:
    """A hash of a traced model's text, and of which modules have hooks: models of one structure may differ in these."""
    changed = [name for name, module in graph.named_modules() if is_changed(module)]
    return hashlib.sha256(f"{graph.graph}\n{changed}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def is_changed(module: nn.Module) -> bool:
    """Whether hooks, or a function in the place of its own, have a module do more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def values_key(model: nn.Module) -> str:
    """A hash of the values of a model's weights, bit for bit; they are read where they lie, on a GPU in milliseconds.

    Of each tensor the sum of its numbers is hashed, each mixed with its place: two models that differ have one hash by
    chance alone.

    Raises:
        RuntimeError: a weight has no bits of its own, as what is sparse, quantized or of another class, or memory ran
            out.
    """
    told: list[str] = []
    sums: dict[torch.device, list[Tensor]] = {}
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if one.is_quantized or type(one) not in (Tensor, nn.Parameter):  # torch dies of the former's view as words
            raise RuntimeError(f"{name} has no bits of its own")
        told.append(f"{name} {tuple(one.shape)} {one.dtype}")
        bits = torch.view_as_real(one.detach()) if one.is_complex() else one.detach()
        words = bits.contiguous().view(_WORDS[bits.dtype.itemsize]).flatten()
        sums.setdefault(one.device, []).extend(map(_sum_by_place, words.split(_AT_ONCE)))
    told += [repr(torch.stack(some).tolist()) for some in sums.values()]
    return hashlib.sha256("\n".join(told).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _sum_by_place(words: Tensor) -> Tensor:
    """Numbers are mixed before they are added: of sums that are linear in them many a permutation has the same."""
    mixed = torch.arange(1, len(words) + 1, device=words.device, dtype=torch.int64).mul_(_SPREAD).add_(words)
    for factor in _MIXING:
        mixed.bitwise_xor_(mixed >> _MIXED_BITS).mul_(factor)
    return mixed.bitwise_xor_(mixed >> _MIXED_BITS).sum()


def read(kind: str, key: str, of: Any = Any) -> Any:
    """An entry of a type, or None where there is none, or one that is broken or of another type."""
    path = folder() / f"{kind}-{key}.json"
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), of)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return None


def write(kind: str, key: str, value: Any) -> None:
    """Keep an entry; where the folder cannot be written it is measured again next time."""
    path = folder() / f"{kind}-{key}.json"
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")  # processes of two containers may have one number
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
