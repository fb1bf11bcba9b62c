"""The machine code of kernels, where a disassembler is there."""

from __future__ import annotations

import pytest

from joulemark.energy.microbench.compile import Cubin
from joulemark.energy.microbench.sass import Instruction, disassemble
from joulemark.errors import Unsupported
from joulemark.merged.kernels import Kernel, build


def instructions_of(kernel: Kernel, architecture: str = "sm_90a") -> tuple[Instruction, ...]:
    """All of a kernel, in order; without a disassembler the test is skipped."""
    code = build(kernel, architecture).code
    try:
        return disassemble(Cubin(kernel.name, architecture, code))[kernel.name]
    except Unsupported as error:
        pytest.skip(str(error))


def products_of_warpgroups(kernel: Kernel) -> tuple[int, int]:
    """Matrix instructions of warpgroups, and how many of them something waits for."""
    found = [one for one in instructions_of(kernel) if one.opcode.startswith("HGMMA")]
    return len(found), sum("gsb0" in one.operands for one in found)
