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

import msgspec
import torch
from torch import nn

VARIABLE = "JOULEMARK_MERGED_CACHE"
_VERSION = 2
"""Of the entries' meaning: another one is another key."""


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
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
