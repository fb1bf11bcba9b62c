"""The number formats of a case: what fp32 means on this device, and what bf16 and fp16 convert.

================ ================================== ==========================================================
dtype            inference, prefill, decode         train
================ ================================== ==========================================================
fp32             weights and inputs in FP32, TF32 off everywhere
tf32             weights and inputs in FP32, TF32 on for matrix products, convolutions and recurrent layers
bf16             weights and inputs in BF16         FP32 weights, forward and loss under ``torch.autocast``
fp16             weights and inputs in FP16         as bf16, and the loss scaled by ``torch.amp.GradScaler``
================ ================================== ==========================================================

What stays in FP32 under bf16 and fp16 (a loss, an optimizer) runs with TF32 off.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from joulemark.errors import ConfigurationError, Unsupported

if TYPE_CHECKING:
    import torch

DTYPES = ("fp32", "tf32", "bf16", "fp16")
_HALVES = {"bf16": "bfloat16", "fp16": "float16"}


def check(dtype: str, device: str) -> None:
    """Whether ``device`` has the number format.

    Raises:
        ConfigurationError: no such format.
        Unsupported: TF32 on a CPU, or on a GPU before the Ampere generation.
    """
    import torch

    if dtype not in DTYPES:
        raise ConfigurationError(f"the dtype {dtype!r} is not known", f"it takes {', '.join(DTYPES)}")
    if dtype != "tf32":
        return
    if not device.startswith("cuda"):
        raise Unsupported("tf32 is a format of NVIDIA's tensor cores, not of a CPU", "use fp32 or bf16")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise Unsupported(f"this GPU (compute capability {major}.{minor}) has no TF32", "use fp32 or fp16")


def set_fp32(tf32: bool) -> None:
    """Say for this process what FP32 products and convolutions use, whatever was set before.

    Both of torch's interfaces end in the same state: with only the newer one set, the older getters raise, and
    torch's own compiler, as well as users' models, still read them.

    Args:
        tf32: round operands to TF32 on tensor cores.
    """
    import torch

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    if not hasattr(torch.backends, "fp32_precision"):
        return
    precision = "tf32" if tf32 else "ieee"
    torch.backends.fp32_precision = precision
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    torch.backends.cudnn.rnn.fp32_precision = precision


def weights_dtype(dtype: str, training: bool) -> torch.dtype | None:
    """What floating-point weights and inputs are converted to; None for FP32 as built."""
    import torch

    if training or dtype not in _HALVES:
        return None
    half: torch.dtype = getattr(torch, _HALVES[dtype])
    return half


def autocast(dtype: str, device: str) -> AbstractContextManager[object]:
    """The context of a training step's forward and loss."""
    import torch

    if dtype not in _HALVES:
        return nullcontext()
    context: AbstractContextManager[object] = torch.autocast(torch.device(device).type, getattr(torch, _HALVES[dtype]))
    return context


def scaler(dtype: str, device: str) -> torch.amp.GradScaler | None:
    """The loss scaler of a training step: FP16's narrow exponent needs one, BF16's does not."""
    import torch

    return torch.amp.GradScaler(torch.device(device).type) if dtype == "fp16" else None
