"""A subject's model and inputs in their number format, and a rival of it: built, checked and captured."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from joulemark.collect.timing import first_line, is_out_of_memory, is_poisoned
from joulemark.errors import Unsupported
from joulemark.merged.paths import cudnn_tuning
from joulemark.merged.questions import relative_error
from joulemark.merged_bench import rivals
from joulemark.merged_bench.limits import TooLong, within
from joulemark.merged_bench.options import Options
from joulemark.merged_bench.stage import Act, Poisoned, Stage
from joulemark.merged_bench.subjects import Shape, Subject

_ROTATED_BYTES = 300 * 2**20
_CHECKED = 2
"""Images whose output is compared with an fp32 reference."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


def inputs_of(shape: Shape, options: Options, device: str) -> list[Tensor]:
    """Random inputs that together exceed the L2, channels-last."""
    dtype = _DTYPES[options.dtype]
    size = 2 * dtype.itemsize
    for one in shape:
        size *= one
    count = max(1, min(options.most_inputs, -(-_ROTATED_BYTES // size))) if not options.tiny else 2
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    return [torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout) for _ in range(count)]


def weighted(subject: Subject) -> nn.Module:
    """The subject's model in fp32 on the CPU, with the same random weights whenever it is built."""
    torch.manual_seed(1)
    return subject.build().eval()


def arranged(model: nn.Module, dtype: str, device: str) -> nn.Module:
    """A copy in its number format, channels-last, on the device."""
    made = copy.deepcopy(model).to(device=device, dtype=_DTYPES[dtype]).requires_grad_(False)
    dimensions = {one.dim() for one in made.parameters()}
    layout = torch.channels_last_3d if 5 in dimensions else torch.channels_last
    arranged: nn.Module = made.to(memory_format=layout)
    return arranged


def reference_of(model: nn.Module, x: Tensor, device: str) -> Tensor | None:
    """The output in fp32 of the model with weights and input as rounded to the number format."""
    rounded = copy.deepcopy(model).to(device=device, dtype=x.dtype).float()
    with torch.no_grad(), cudnn_tuning(False):  # only its output counts, and each shape's trials take cuDNN time
        out = rounded(x[:_CHECKED].float())
    return out if isinstance(out, Tensor) else None


def prepare(
    name: str, task: rivals.Task, xs: Sequence[Tensor], expected: Tensor | None, stage: Stage, limit_s: float
) -> tuple[dict[str, Any], Act | None]:
    """A rival built, checked and captured, or why it is not."""
    on_gpu = stage.device.startswith("cuda")
    before = _allocated(on_gpu)
    try:
        with within(limit_s):
            built = rivals.build(name, task)
        _allocated(on_gpu)
        with torch.no_grad():
            out = built.call(*built.inputs(xs[:1]))
            out = out if built.restore is None else built.restore(out)
        error = None if expected is None else _error(out, expected)
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
        del out
        act = stage.act(name, built.call, built.inputs(xs), built.wait)
    except Unsupported as reason:
        return {"missing": {"all": str(reason)}}, None
    except TooLong:
        return {"missing": {"all": f"it was not built within {limit_s:.3g} s"}}, None
    except Exception as reason:  # a compiler or CUDA may raise anything; one rival of many is lost
        if is_poisoned(reason):
            raise Poisoned(name, first_line(reason)) from reason
        what = "out of memory" if is_out_of_memory(reason) else type(reason).__name__
        return {"missing": {"all": f"{what}: {first_line(reason)}"[:400]}}, None
    missing = {}
    if error is not None and not isfinite(error):  # which JSON cannot say
        error, missing["relative_error"] = None, "its output, or the reference, is not finite"
    row = {"build_s": built.build_s, "relative_error": error, "peak_bytes": peak, "missing": missing, **built.facts}
    return row, act


def _allocated(on_gpu: bool) -> int:
    """Bytes that tensors hold, once nothing is left of what was given up; the peak is counted from here."""
    if not on_gpu:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _error(out: Any, expected: Tensor) -> float | None:
    first = out[0] if isinstance(out, (tuple, list)) else out
    return relative_error(first[:_CHECKED], expected) if isinstance(first, Tensor) else None


def step_of(subject: Subject, rival: str, device: str, dtype: str = "bf16") -> tuple[Callable[[], object], int]:
    """One rival's step over rotating inputs, for a benchmark of its own, and the images of a step; tiny on a CPU.

    Raises:
        Unsupported: the rival is not for this subject or device.
    """
    options = Options(dtype, tiny=device == "cpu")
    torch.manual_seed(1)
    xs = inputs_of(subject.tiny if options.tiny else subject.shape, options, device)
    built = rivals.build(rival, rivals.Task(arranged(subject.build().eval(), dtype, device), xs[0]))
    turns = itertools.cycle(built.inputs(xs))

    def run() -> object:
        with torch.no_grad():
            return built.call(next(turns))

    return run, len(xs[0])
