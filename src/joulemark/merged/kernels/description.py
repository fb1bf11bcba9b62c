"""What a kernel is generated from: a sequence of convolutions and the number format of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from joulemark.merged.sequence import Sequence

Format = Literal["bf16", "fp16", "tf32", "fp32"]

STORED: dict[Format, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class Description:
    """A sequence in a number format; hashable, so that it can be a key.

    Args:
        sequence: the layers.
        format: bf16 and fp16 are stored in 16 bits, tf32 and fp32 in 32; tf32 multiplies 19 bits of them. Sums are
            fp32 in all.
        adds: another tensor, given at run time, is added in the last layer (a residual from outside of the sequence).
    """

    sequence: Sequence
    format: Format = "bf16"
    adds: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What tensors hold."""
        return STORED[self.format]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.itemsize)

    def __str__(self) -> str:
        channels = "-".join(str(self.sequence.channels(n)) for n in range(len(self.sequence.layers) + 1))
        return f"{self.sequence.dimensions}d_{channels}_{self.format}".replace("-", "_")
