"""Kernels for sequences of convolutions, generated from a description, for one brick of the output per block.

A family of kernels is a Python module that makes a :class:`~.kernel.Kernel` from a :class:`~.description.Description`
(the sequence and its number format) and sizes to choose from (brick, warps): it writes CUDA C++ text that calls the
templates in ``device/``, says how weights are packed for it, and how much shared memory and how many threads a block
takes. The same text is compiled

- by NVRTC for a GPU (:mod:`~.compile`, which needs none) and launched on torch's current stream (:mod:`~.launch`),
- by g++ for a CPU (:mod:`~.emulate`), where each thread is a fiber and each instruction of ``device/prelude.cuh`` a
  function of ``device/emulation.hpp``: slow, and enough to hold every kernel against float64 on small shapes.

:func:`run` takes the one or the other, after where its input lies.
"""

from joulemark.merged.kernels.compile import Build, KernelError, build
from joulemark.merged.kernels.description import Description, Format
from joulemark.merged.kernels.kernel import Kernel
from joulemark.merged.kernels.running import run

__all__ = ["Build", "Description", "Format", "Kernel", "KernelError", "build", "run"]
