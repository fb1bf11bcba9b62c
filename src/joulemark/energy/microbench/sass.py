"""What a kernel's machine code really does: its measured loop, instruction by instruction (needs no GPU).

The assembler deletes what nobody reads, narrows vector loads and merges operations, so the count of a benchmark is
checked where nothing changes it any more.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.energy.microbench.kept import kept
from joulemark.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from joulemark.energy.microbench.compile import Cubin
    from joulemark.energy.microbench.suite import Benchmark, Work

_INSTRUCTION_BYTES = 16
"""Of every architecture since Volta."""

_OVERHEAD = re.compile(
    r"(U?IADD3?|UIADD3|VIADD|U?ISETP|BRA|NANOSLEEP|NOP|U?MOV|U?LDCU?|U?SHF|U?LOP3|U?IMAD|U?LEA|U?SEL|R2UR|WARPGROUP|WARPSYNC"
    r"|BSSY|BSYNC|YIELD|DEPBAR|CS2R|S2R|S2UR|PLOP3|UPLOP3|R2P|P2R)(\.|$)"
)
"""What a loop may hold besides its work: counting, addresses, branching, moves. No memory access, no arithmetic."""


_SLACK = 4
"""Instructions by which the overhead of a loop may differ between architectures."""


@dataclass(frozen=True)
class Instruction:
    """One line of machine code, in nvdisasm's words; the opcode with its modifiers."""

    opcode: str
    operands: str = ""
    predicate: str = ""

    @property
    def target(self) -> int | None:
        """Index of the instruction that a branch goes to; None for any other instruction."""
        if not self.opcode.startswith("BRA"):
            return None
        address = self.operands.split(",")[-1].strip()
        return int(address, 16) // _INSTRUCTION_BYTES if address.startswith("0x") else None


@dataclass(frozen=True)
class Loop:
    """The measured loop of a kernel.

    Args:
        instructions: in order.
        skipped: how many of them are jumped over when the kernel does not pause.
    """

    instructions: tuple[Instruction, ...]
    skipped: int

    def executed(self, paused: bool) -> int:
        """Warp instructions per iteration."""
        return len(self.instructions) - (0 if paused else self.skipped)

    @property
    def fillers(self) -> int:
        """Instructions that only fill issue slots: some architectures want them between the works of slow pipes."""
        executed = self.instructions
        return sum(one.opcode == "NOP" or (one.opcode == "UIADD3" and one.predicate != "") for one in executed)

    @property
    def opcodes(self) -> Counter[str]:
        """How often each opcode stands in the loop."""
        return Counter(one.opcode for one in self.instructions)


def nvdisasm() -> str:
    """Path of the disassembler: the one that pip installed, else the one on the PATH.

    Raises:
        Unsupported: there is none.
    """
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            return str(file.locate())
    found = shutil.which("nvdisasm")
    if found is None:
        raise Unsupported("machine code cannot be read: no nvdisasm", "pip install nvidia-cuda-nvdisasm")
    return found


@cache
def disassemble(cubin: Cubin) -> Mapping[str, tuple[Instruction, ...]]:
    """Kernel → instructions.

    Raises:
        Unsupported: there is no disassembler, or it cannot read the code.
    """
    tool = nvdisasm()
    content = kept("sass", (cubin.code, tool, _version_of(tool)), lambda: _disassembled(cubin, tool))
    return {name: tuple(Instruction(*line) for line in lines) for name, lines in json.loads(content).items()}


def _version_of(tool: str) -> str:
    try:
        state = Path(tool).stat()
    except OSError:
        return "not there"
    return f"{state.st_size} {state.st_mtime_ns}"


def _disassembled(cubin: Cubin, tool: str) -> bytes:
    """Kernel → [opcode, operands, predicate] of each instruction, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin.code)
        try:
            run = subprocess.run([tool, "-json", str(path)], capture_output=True, text=True, check=False)
        except OSError as error:
            raise Unsupported(f"machine code cannot be read: nvdisasm does not run ({error})") from error
    if run.returncode:
        raise Unsupported(f"nvdisasm cannot read {cubin.family} for {cubin.architecture}: {run.stderr.strip()[:200]}")
    try:
        functions = json.loads(run.stdout)[1]
    except (ValueError, IndexError) as error:
        raise Unsupported("machine code cannot be read: this nvdisasm prints no JSON", "install a newer one") from error
    found = {
        one["function-name"]: [
            (line["opcode"], line.get("operands", ""), line.get("predicate", "")) for line in one["sass-instructions"]
        ]
        for one in functions
    }
    return json.dumps(found, separators=(",", ":")).encode()


def measured_loop(instructions: Sequence[Instruction], work: Sequence[Work]) -> Loop | None:
    """The loop that holds most of the work; None where no loop holds any."""
    best: tuple[int, int, int] | None = None
    for end, one in enumerate(instructions):
        start = one.target
        if start is None or start >= end:
            continue
        held = sum(_matches(part, instructions[start : end + 1]) for part in work)
        if held and (best is None or (held, start - end) > (best[0], best[1] - best[2])):
            best = held, start, end
    if best is None:
        return None
    _, start, end = best
    return Loop(tuple(instructions[start : end + 1]), _pause_block(instructions, start, end))


def _matches(part: Work, instructions: Sequence[Instruction]) -> int:
    return sum(re.fullmatch(part.opcode, one.opcode) is not None for one in instructions)


def _pause_block(instructions: Sequence[Instruction], start: int, end: int) -> int:
    """Length of the block with the sleep that a branch inside the loop jumps over."""
    for at in range(start, end):
        target = instructions[at].target
        if target is not None and at < target <= end:
            block = instructions[at + 1 : target]
            if any(one.opcode.startswith("NANOSLEEP") for one in block):
                return len(block)
    return 0


def problems(benchmark: Benchmark, cubin: Cubin) -> list[str]:
    """What a kernel's loop holds other than its registry says; empty when all is as declared.

    Checked are the number of each work instruction, that nothing else accesses memory or computes, and that the
    overhead (counting, addresses, the pause) is what the registry allows.
    """
    work = benchmark.work(cubin.architecture)
    loop = measured_loop(disassemble(cubin).get(benchmark.kernel, ()), work)
    if loop is None:
        return [f"{benchmark.kernel}: no loop holds {work[0].opcode}"] if work else []
    found = []
    rest = Counter(loop.opcodes)
    for part in work:
        seen = _matches(part, loop.instructions)
        if not part.count <= seen <= part.count + part.slack:
            found.append(f"{benchmark.kernel}: {seen} × {part.opcode} in the loop, {part.count} declared")
        for opcode in [name for name in rest if re.fullmatch(part.opcode, name)]:
            del rest[opcode]
    found += [
        f"{benchmark.kernel}: {count} × {opcode} in the loop is neither work nor overhead"
        for opcode, count in rest.items()
        if not _OVERHEAD.match(opcode)
    ]
    declared = sum(part.count for part in work) + benchmark.overhead
    seen = loop.executed(paused=False) - loop.fillers
    if abs(seen - declared) > max(_SLACK, 0.03 * declared):
        found.append(f"{benchmark.kernel}: {seen} instructions per iteration, {declared} declared")
    return found


def instructions_per_iteration(benchmark: Benchmark, cubin: Cubin, paused: bool) -> int:
    """Warp instructions that one warp executes per iteration, read from the machine code.

    Raises:
        Unsupported: the code cannot be read, or its loop is not as declared: its counts would be wrong.
    """
    wrong = problems(benchmark, cubin)
    if wrong:
        raise Unsupported(f"the counts of a microbenchmark do not hold on {cubin.architecture}: {wrong[0]}")
    loop = measured_loop(disassemble(cubin)[benchmark.kernel], benchmark.work(cubin.architecture))
    return 0 if loop is None else loop.executed(paused)
