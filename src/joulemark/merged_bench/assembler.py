"""One assembler for Triton in all processes of torch's compiler.

torch's wheels bring a ``ptxas`` of their own. The workers of torch's compiler let Triton use it, the process that tunes
does so only for kernels that it compiles by itself, and the assembler's version is in the key of Triton's cache. So
what workers had compiled for tuning is compiled again, one after another. So say their sources, and so it was on an
H200 with torch 2.11 and CUDA 13.0: tuning took 2.8 to 8 s an operator once workers had started (0.3 s before), with one
assembler 0.16 to 0.55 s (20 of 21 operators; one took 1.4 s).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

VARIABLE = "TRITON_PTXAS_PATH"


def use_torchs_assembler(root: Path | None = None) -> Path | None:
    """Have Triton use torch's ``ptxas`` from now on, also here; call it before Triton compiles anything.

    Args:
        root: of torch's package; None for that of this process.

    Returns:
        Its path; None where there is none, or the user has chosen one.
    """
    path = (root or Path(torch.__file__).parent) / "bin" / "ptxas"
    if VARIABLE in os.environ or not path.is_file() or not os.access(path, os.X_OK):
        return None
    os.environ[VARIABLE] = str(path)
    return path
