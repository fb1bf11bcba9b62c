"""The microbenchmarks: what each keeps busy, what it counts per launch, its operands and its geometry (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from joulemark.energy.microbench.compile import number_of
from joulemark.energy.units import HBM_ACTIVE, INSTRUCTION, L1_REQUEST, L2_REQUEST, MEMORY_ACCESS, SM_ACTIVE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Role = Literal["static", "fit", "check"]
Level = Literal["none", "shared", "l1", "l2", "hbm"]
Operands = Literal["zero", "constant", "random", "normal", "normal_fp32"]

WARP = 32
TILE_BYTES = 8 * 1024 * 16
"""What a block touches per iteration of a sequential global kernel."""
_OF_MEMORY = 8
L1_BLOCK_BYTES = 65536
"""Distance between the regions of two blocks in the L1 kernels."""


_HOLDING_NONE = frozenset({"idle", "empty"})
"""Benchmarks that keep no SM occupied."""


@dataclass(frozen=True)
class Work:
    """Instructions of the measured loop that do what the benchmark is for.

    Args:
        opcode: regular expression of the whole opcode.
        count: per warp and iteration.
        slack: how many more the loop may hold (addresses that use the same instruction).
    """

    opcode: str
    count: int
    slack: int = 0


@dataclass(frozen=True)
class Variant:
    """A benchmark on architectures from ``since`` on.

    Args:
        since: number of the first architecture.
        work: see :class:`Work`.
        counts: unit of the model → count per warp and iteration, without ``instruction``.
    """

    since: int
    work: tuple[Work, ...]
    counts: Mapping[str, float]


@dataclass(frozen=True)
class Benchmark:
    """A kernel with everything that is known of it before it runs.

    Args:
        name: of the benchmark.
        kernel: entry point.
        family: source file.
        unit: of the model, that the benchmark is about.
        format: of the operands, see :mod:`joulemark.energy.microbench.operands`.
        threads: per block; one block per SM.
        overhead: instructions per iteration beside the work, nominal (read from the machine code when it runs).
        variants: by architecture, ascending.
        level: where the footprint is pinned.
        footprint: of the whole grid, as a multiple of the L2's size (``hbm``), at most an eighth of the memory: blocks
            drift apart, and a block meets what another has just read with the probability that it is still in the L2
            (of 800 MB on 132 SMs, a tenth: 5.0 TB/s, more than the memory has [H200]); a tile per SM, and at most
            this fraction of it (``l2``): fewer tiles would be shared, and requests of two SMs for one line that come
            together reach the L2 as one (of 66 SMs over 104 tiles, 14 % of the bytes [H200]).
        lane_bytes: between neighbouring lanes of a global access.
        role: ``fit`` enters the fit; ``check`` is measured, predicted and reported; ``static`` has no work.
        only: architectures; None for all from the first variant on.
        operands: kinds that are measured.
        about: one clause.
    """

    name: str
    kernel: str
    family: str
    unit: str
    format: str
    threads: int
    overhead: int
    variants: tuple[Variant, ...]
    level: Level = "none"
    footprint: float = 0.0
    lane_bytes: int = 16
    role: Role = "fit"
    only: frozenset[int] | None = None
    operands: tuple[Operands, ...] = ("zero", "constant", "random")
    about: str = ""

    def runs_on(self, architecture: str) -> bool:
        """Whether the kernel exists there."""
        number = number_of(architecture)
        if self.family == "wgmma":
            return architecture == "sm_90a"
        return number >= self.variants[0].since and (self.only is None or number in self.only)

    def variant(self, architecture: str) -> Variant:
        """What holds on an architecture.

        Raises:
            KeyError: the benchmark does not run there.
        """
        if not self.runs_on(architecture):
            raise KeyError(f"{self.name} does not run on {architecture}")
        return [one for one in self.variants if one.since <= number_of(architecture)][-1]

    def work(self, architecture: str) -> tuple[Work, ...]:
        """The instructions that the loop must hold."""
        return self.variant(architecture).work

    def counts_per_launch(self, architecture: str, blocks: int, iterations: int, instructions: int) -> dict[str, float]:
        """Unit of the model → count in one launch.

        Args:
            architecture: as in ``sm_90a``.
            blocks, iterations: of the launch.
            instructions: warp instructions per warp and iteration.

        Returns:
            Counts in the units' own terms (operations of threads, FLOP, bytes, warp instructions).
        """
        warps = blocks * self.threads / WARP
        counts = {unit: count * warps * iterations for unit, count in self.variant(architecture).counts.items()}
        return {INSTRUCTION: float(instructions) * warps * iterations, **counts}

    def counts_over(self, blocks: int, seconds: float) -> dict[str, float]:
        """Unit of the model → count of what time alone counts: SMs that hold warps, and a memory that is in use."""
        held = blocks * seconds if self.name not in _HOLDING_NONE else 0.0
        in_use = seconds if self.level == "hbm" else 0.0
        return {unit: count for unit, count in ((SM_ACTIVE, held), (HBM_ACTIVE, in_use)) if count}


def _vector(name: str, opcodes: Sequence[tuple[str, int]], counts: Mapping[str, float], about: str) -> Benchmark:
    work = tuple(Work(opcode, count) for opcode, count in opcodes)
    return Benchmark(name, name, "vector", name, name, 1024, 5, (Variant(75, work, counts),), about=about)


def _tile(key: str, opcode: str, steps: int) -> Benchmark:
    """A matrix product on tiles in registers: three registers per multiply-add, as library code has it."""
    name, unit = f"{key}_tile", f"{key}_operands"
    count = {key: float(steps * WARP), unit: float(steps * WARP)}
    variant = Variant(75, (Work(opcode, steps),), count)
    kinds: tuple[Operands, ...] = ("zero", "random", "normal")
    about = f"{key.upper()} multiply-add of three registers"
    return Benchmark(name, name, "vector", unit, key, 1024, 5, (variant,), operands=kinds, about=about)


def _composed() -> list[Benchmark]:
    """Several units at once, predicted from what was fitted one by one; the second slows the clock the furthest."""
    product = 144.0 * WARP
    loads: dict[str, float] = {MEMORY_ACCESS: 18.0, "shared_read": 18.0 * WARP * 16}
    tile = Variant(
        75, (Work("FFMA", 144), Work(_LDS + r"\.128", 18)), {"fp32": product, "fp32_operands": product, **loads}
    )
    from_l2 = 8.0 * WARP * 16
    wide = Variant(
        90,
        (Work(r"HGMMA\.64x256x16\.F32", 8), Work(_LDG + r"\.128" + _TAIL, 8), Work(_XOR, 16, 2)),
        {
            "wgmma_fp16": 8 * 2.0 * 64 * 256 * 16 / 4, MEMORY_ACCESS: 8.0, L1_REQUEST: 8.0, L2_REQUEST: 32.0,
            "logic": 16.0 * WARP, "l1": from_l2, "l2_read": from_l2,
        },
    )  # fmt: skip
    return [
        Benchmark("fp32_shared", "fp32_shared", "vector", "fp32_operands", "fp32", 1024, 5, (tile,), role="check",
                  operands=("zero", "random"), about="FP32 multiply-add of three registers, two from shared memory"),
        Benchmark("wgmma_fp16_l2", "wgmma_fp16_l2", "wgmma", "wgmma_fp16", "fp16", 256, 38, (wide,), role="check",
                  operands=("zero", "random"), about="wgmma beside loads from the L2, as a library's product has them"),
    ]  # fmt: skip


def _mma(key: str, shapes: Sequence[tuple[int, str, int]], only: frozenset[int] | None = None) -> Benchmark:
    """``shapes``: first architecture, opcode, FLOP of one warp instruction (2·m·n·k)."""
    unit = f"mma_{key}"
    variants = tuple(Variant(since, (Work(opcode, 32),), {unit: 32.0 * flop}) for since, opcode, flop in shapes)
    about = f"mma.sync on {key} operands in registers"
    format_ = "mma_fp64" if key == "fp64" else key
    return Benchmark(unit, unit, "tensor", unit, format_, 512, 7, variants, only=only, about=about)


def _wgmma(key: str, opcode: str, k: int) -> Benchmark:
    unit = f"wgmma_{key}"
    counts = {unit: 8 * 2.0 * 64 * 256 * k / 4}  # a product is issued by each of a warpgroup's four warps
    variant = Variant(90, (Work(opcode, 8),), counts)
    about = f"wgmma on {key} operands in shared memory, which its energy includes"
    return Benchmark(unit, unit, "wgmma", unit, key, 256, 30, (variant,), about=about)


_LDS, _STS = r"LDS(\.U)?", r"STS"
_LDG, _STG = r"LDG\.E", r"STG\.E"
_TAIL = r"(\.\w+)*"
_XOR = "LOP3.LUT"
_WAVEFRONT_BYTES = 128
_SECTOR_BYTES = 32


def _memory(
    name: str,
    kernel: str,
    unit: str,
    work: tuple[Work, ...],
    counts: Mapping[str, float],
    level: Level,
    footprint: float = 0.0,
    lane_bytes: int = 16,
    role: Role = "fit",
    overhead: int = 10,
) -> Benchmark:
    """The first work is the access itself: each is a memory instruction."""
    pattern = kernel.rpartition("_")[2]
    how = pattern if pattern in ("narrow", "strided", "scattered") else "sequential"
    kinds: tuple[Operands, ...] = ("zero", "constant", "random") if how == "sequential" else ("zero", "random")
    variant = Variant(75, work, {MEMORY_ACCESS: float(work[0].count), **counts})
    return Benchmark(
        name, kernel, "memory", unit, "word", 1024, overhead, (variant,), level=level, footprint=footprint,
        lane_bytes=lane_bytes, role=role, operands=kinds, about=f"{unit.replace('_', ' ')}, {how}",
    )  # fmt: skip


def _global(level: Level, footprint: float) -> list[Benchmark]:
    """Loads and stores whose footprint lies in the L2 or far beyond it; 8 accesses per iteration.

    A request to the L2 is of up to a line of 128 B. Bytes are those of the sectors that an access touches, as counters
    see it: a sector written by halves, in two accesses, is one sector twice; HBM sees it once.
    """
    full, sectors = 8.0 * WARP * 16, 8.0 * WARP * _SECTOR_BYTES
    reads = {"l2": ("l2_read",), "hbm": ("l2_read", "hbm_read")}[level]
    writes = {"l2": ("l2_write",), "hbm": ("l2_write", "hbm_write")}[level]
    read, write = reads[-1], writes[-1]
    store = (Work(_STG + r"\.128" + _TAIL, 8),)
    wide = (Work(_LDG + r"\.128" + _TAIL, 8), Work(_XOR, 16, 2))
    words = (Work(_LDG + r"(\.(?!128)\w+)*", 8), Work(_XOR, 4, 2))

    def touched(units: Sequence[str], bytes_: float, lines: int, logic: int = 0) -> dict[str, float]:
        requests = {L1_REQUEST: 8.0, L2_REQUEST: 8.0 * lines}
        return {"l1": bytes_, "logic": float(logic * WARP), **dict.fromkeys(units, bytes_), **requests}

    halves = touched(writes, sectors, 8) | ({"hbm_write": full} if level == "hbm" else {})
    fitted: Role = "fit" if level == "l2" else "check"
    return [
        _memory(read, "global_read", read, wide, touched(reads, full, 4, 16), level, footprint),
        _memory(f"{read}_strided", "global_read_strided", read, words, touched(reads, sectors, 8, 4),
                level, footprint, 32, "check"),
        _memory(f"{read}_scattered", "global_read_scattered", L2_REQUEST if level == "l2" else read, words,
                touched(reads, sectors, 32, 4), level, footprint, 32, fitted),
        _memory(write, "global_write", write, store, touched(writes, full, 4), level, footprint),
        _memory(f"{write}_strided", "global_write_strided", write, store, halves, level, footprint, 32, "check"),
    ]  # fmt: skip


def _words_written() -> Benchmark:
    """Each access touches a sector per lane, of which it writes one word."""
    sectors = 8.0 * WARP * _SECTOR_BYTES
    counts = {"l1": sectors, "l2_write": sectors, L1_REQUEST: 8.0, L2_REQUEST: 64.0}
    work = (Work(_STG + r"(\.(?!128)\w+)*", 8),)
    return _memory("l2_write_scattered", "global_write_scattered", "l2_write", work, counts, "l2", 0.75, 32, "check")


def _on_chip() -> list[Benchmark]:
    """Shared memory and L1 hits; 32 accesses per iteration."""
    full, wide = 32.0 * WARP * 16, 32.0 * 2 * _WAVEFRONT_BYTES
    narrow = 32.0 * WARP * 4
    looked_up = {L1_REQUEST: 32.0}
    xor, xor_narrow = {"logic": 64.0 * WARP}, {"logic": 16.0 * WARP}
    narrow_load = (Work(_LDS, 32), Work(_XOR, 16, 2))
    return [
        _memory("shared_read", "shared_read", "shared_read", (Work(_LDS + r"\.128", 32), Work(_XOR, 64, 2)),
                {"shared_read": full, **xor}, "shared", overhead=8),
        _memory("shared_read_narrow", "shared_read_narrow", "shared_read", narrow_load,
                {"shared_read": narrow, **xor_narrow}, "shared", overhead=7),
        _memory("shared_read_strided", "shared_read_strided", "shared_read", narrow_load,
                {"shared_read": wide, **xor_narrow}, "shared", role="check", overhead=7),
        _memory("shared_write", "shared_write", "shared_write", (Work(_STS + r"\.128", 32),),
                {"shared_write": full}, "shared", overhead=7),
        _memory("shared_write_strided", "shared_write_strided", "shared_write", (Work(_STS, 32),),
                {"shared_write": wide}, "shared", role="check", overhead=7),
        _memory("l1_read", "l1_read", "l1", (Work(_LDG + r"\.128" + _TAIL, 32), Work(_XOR, 64, 2)),
                {"l1": full, **xor, **looked_up}, "l1", overhead=10),
        _memory("l1_read_narrow", "l1_read_narrow", "l1", (Work(_LDG + r"(\.(?!128)\w+)*", 32), Work(_XOR, 16, 2)),
                {"l1": narrow, **xor_narrow, **looked_up}, "l1", overhead=10),
        _memory("l1_read_strided", "l1_read_strided", "l1", (Work(_LDG + r"(\.(?!128)\w+)*", 32), Work(_XOR, 16, 2)),
                {"l1": 32.0 * WARP * _SECTOR_BYTES, **xor_narrow, **looked_up}, "l1", 0.0, 32, "check", overhead=10),
    ]  # fmt: skip


def _static() -> list[Benchmark]:
    nothing = (Variant(75, (), {}),)
    zero: tuple[Operands, ...] = ("zero",)
    predicated = (Variant(75, (Work("FFMA", 128),), {}),)
    return [
        Benchmark("idle", "", "", "static", "word", 0, 0, nothing, role="static", operands=zero,
                  about="a context and no work"),
        Benchmark("empty", "empty", "control", "static", "word", 32, 0, nothing, role="check", operands=zero,
                  about="grids without work, one after the other: static power and what launching itself costs"),
        Benchmark("sleep_one_warp", "sleep", "control", "sm_active", "word", 32, 0, nothing, role="static",
                  operands=zero, about="one sleeping warp per SM"),
        Benchmark("sleep", "sleep", "control", "sm_active", "word", 1024, 0, nothing, role="static",
                  operands=zero, about="32 sleeping warps per SM"),
        Benchmark("issue", "issue", "control", INSTRUCTION, "fp32", 1024, 11, predicated, operands=zero,
                  about="instructions whose predicate is false"),
    ]  # fmt: skip


def _suite() -> list[Benchmark]:
    warp = float(WARP)
    return [
        *_static(),
        _vector("fp32", (("FFMA", 128),), {"fp32": 128 * warp}, "FP32 multiply-add"),
        _vector("fp64", (("DFMA", 128),), {"fp64": 128 * warp}, "FP64 multiply-add"),
        _vector("fp16x2", ((r"HFMA2(\.MMA)?", 128),), {"fp16x2": 128 * warp}, "FP16x2 multiply-add"),
        _tile("fp32", "FFMA", 144),
        _tile("fp64", "DFMA", 108),
        _vector("integer", (("IMAD", 128),), {"integer": 128 * warp}, "32-bit integer multiply-add"),
        _vector("logic", ((r"SHF\.L\.W\.U32\.HI", 64), (_XOR, 64)), {"logic": 128 * warp}, "shift and logic"),
        _vector("special", ((r"MUFU\.SQRT", 64), (_XOR, 64)), {"special": 64 * warp, "logic": 64 * warp},
                "square root"),
        _mma("fp16", ((75, r"HMMA\.1688\.F32", 2048), (80, r"HMMA\.16816\.F32", 4096))),
        _mma("bf16", ((80, r"HMMA\.16816\.F32\.BF16", 4096),)),
        _mma("tf32", ((80, r"HMMA\.1688\.F32\.TF32", 2048),)),
        _mma("fp64", ((80, r"DMMA\.(884|8x8x4)", 512),)),
        _mma("int8", ((75, r"IMMA\.8816\.S8\.S8", 2048), (80, r"IMMA\.16832\.S8\.S8", 8192))),
        _mma("fp8", ((89, r"QMMA\.16832\.F32\.E4M3\.E4M3", 8192),), only=frozenset({89, 120, 121})),
        _wgmma("fp16", r"HGMMA\.64x256x16\.F32", 16),
        _wgmma("bf16", r"HGMMA\.64x256x16\.F32\.BF16", 16),
        _wgmma("tf32", r"HGMMA\.64x256x8\.F32\.TF32", 8),
        _wgmma("fp8", r"QGMMA\.64x256x32\.F32\.E4M3\.E4M3", 32),
        _wgmma("int8", r"IGMMA\.64x256x32\.S8\.S8", 32),
        *_on_chip(),
        *_global("l2", 0.75),
        _words_written(),
        *_global("hbm", 640.0),
        *_composed(),
    ]  # fmt: skip


SUITE: Mapping[str, Benchmark] = {one.name: one for one in _suite()}
"""Every microbenchmark by name."""


def benchmarks_for(architecture: str) -> list[Benchmark]:
    """Those that run on an architecture, in the suite's order."""
    return [one for one in SUITE.values() if one.runs_on(architecture)]


def tiles_for(benchmark: Benchmark, l2_bytes: int, sms: int, memory_bytes: int) -> int:
    """How many tiles the footprint has (1 where the footprint is not in global memory).

    Args:
        benchmark: its level and footprint count.
        l2_bytes: where the L2 ends, as measured.
        sms: streaming multiprocessors of the GPU.
        memory_bytes: of its memory that is free.
    """
    if benchmark.level == "l1":
        return 1 << (sms - 1).bit_length()
    if benchmark.level not in ("l2", "hbm"):
        return 1
    tile = TILE_BYTES * benchmark.lane_bytes // 16 if "read" in benchmark.kernel else TILE_BYTES
    fitting = max(1, int(min(benchmark.footprint * l2_bytes, memory_bytes / _OF_MEMORY) / tile))
    return min(fitting, sms) if benchmark.level == "l2" else fitting
