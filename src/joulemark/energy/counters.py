"""From hardware counters of a workload to counts of the model's units: the one table that joins the two (pure).

A counter sees pipes and levels, the model has units. Where a pipe mixes units (the FMA pipes FP32, FP16x2 and integer
multiply-adds; the tensor pipes their formats) or a level mixes reads and writes, a :class:`Mix` says the shares, each
with its range, and the range goes into the interval of every prediction. How much a counter counts per unit is taken
from the calibration where its microbenchmarks were counted (:attr:`Calibration.factors`), else nominal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING

from joulemark.energy.units import HBM_ACTIVE, INSTRUCTION, L1_REQUEST, L2_REQUEST, MEMORY_ACCESS, SM_ACTIVE, UNITS
from joulemark.errors import UnreadableInput

if TYPE_CHECKING:
    from joulemark.energy.calibration import Calibration
    from joulemark.records import Json

_LANES, _WAVEFRONT_BYTES, _SECTOR_BYTES = 32.0, 128.0, 32.0
_TENSOR_CYCLES = ("pipe_tensor_cycles", "pipe_tensor_hmma_cycles", "pipe_tensor_imma_cycles")
"""Counters of the tensor pipes: all work, half-precision work, integer work."""


@dataclass(frozen=True)
class Range:
    """A figure with the range that it may lie in."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Range:
        """Without doubt."""
        return cls(value, value, value)

    def __mul__(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor)

    @property
    def rest(self) -> Range:
        """What a share leaves to its complement."""
        return Range(1 - self.value, 1 - self.high, 1 - self.low)

    def at_most(self, limit: float) -> Range:
        """No more than a limit."""
        return Range(min(self.value, limit), min(self.low, limit), min(self.high, limit))

    def __add__(self, other: Range) -> Range:
        return Range(self.value + other.value, self.low + other.low, self.high + other.high)


_OF_FMA = ("fp32", "fp16x2", "integer")
_OF_TENSOR = tuple(name for name, unit in UNITS.items() if unit.group == "tensor")
_WHOLE_DOUBT = 0.01
"""By so much, shares written with two digits may miss 1."""
_FMA_SHARES: Mapping[str, Range] = {"fp32": Range(0.8, 0.5, 1.0), "integer": Range(0.2, 0.0, 0.5)}
"""Of kernels of networks, where nobody disassembled them."""


def _product(one: Range, other: Range) -> Range:
    return Range(one.value * other.value, one.low * other.low, one.high * other.high)


@dataclass(frozen=True)
class Mix:
    """What counters do not tell apart, as shares.

    Args:
        fma: of the FMA pipes' instructions: ``fp32``, ``fp16x2`` and ``integer``; None takes them from the counter of
            the pipe that alone multiplies integers, or assumes them.
        tensor: of the tensor pipes' half-precision cycles: unit (``wgmma_bf16`` …) → share.
        int8: of the integer tensor cycles, likewise.
        shared_read: of shared-memory wavefronts, that read.
        l2_read: of L2 bytes that are no HBM traffic, that read.
        source: where the shares come from.
    """

    fma: Mapping[str, Range] | None = None
    tensor: Mapping[str, Range] = field(default_factory=dict)
    int8: Mapping[str, Range] = field(default_factory=dict)
    shared_read: Range = Range(0.6, 0.4, 0.9)
    l2_read: Range = Range(0.75, 0.5, 1.0)
    source: str = "assumed"

    @classmethod
    def for_dtype(cls, dtype: str | None, architecture: str) -> Mix:
        """What a workload in one number format most likely does; library kernels use ``wgmma`` on Hopper."""
        key = {"fp32": None, "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp64": None, "int8": None, "fp8": "fp8"}
        name = key.get(dtype or "", "bf16")
        kind = "wgmma" if architecture == "sm_90a" else "mma"
        tensor = {} if name is None else {f"{kind}_{name}": Range.exact(1.0)}
        return cls(tensor=tensor, int8={f"{kind}_int8": Range.exact(1.0)}, source=f"assumed for {dtype}")

    @classmethod
    def from_json(cls, data: Mapping[str, Json], otherwise: Mix) -> Mix:
        """Shares given by hand or by disassembly: a number, or ``[value, low, high]``.

        Raises:
            UnreadableInput: a share is no number from 0 to 1, shares add up to more than 1, or a name is unknown.
        """
        try:
            _only_known(data, {one.name for one in fields(cls)})
            return cls(
                _ranges(data["fma"], _OF_FMA) if "fma" in data else otherwise.fma,
                _ranges(data["tensor"], _OF_TENSOR) if "tensor" in data else otherwise.tensor,
                _ranges(data["int8"], _OF_TENSOR) if "int8" in data else otherwise.int8,
                _range(data["shared_read"]) if "shared_read" in data else otherwise.shared_read,
                _range(data["l2_read"]) if "l2_read" in data else otherwise.l2_read,
                str(data.get("source", "given" if data else otherwise.source)),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise UnreadableInput(f"the mix of a workload is unreadable ({error})", "see docs/energy.md") from error


def _range(data: Json) -> Range:
    value, low, high = map(float, data if isinstance(data, list) else (data, data, data))
    if not 0 <= low <= value <= high <= 1:
        raise ValueError(f"{data!r} is no share with its range")
    return Range(value, low, high)


def _ranges(data: Mapping[str, Json], names: Collection[str]) -> dict[str, Range]:
    """Shares of one whole."""
    _only_known(data, names)
    found = {name: _range(one) for name, one in data.items()}
    if (whole := sum(one.value for one in found.values())) > 1 + _WHOLE_DOUBT:
        raise ValueError(f"the shares of {', '.join(found)} add up to {whole:g}")
    return found


def _only_known(data: Mapping[str, Json], names: Collection[str]) -> None:
    if unknown := sorted(set(data) - set(names)):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(names))}")


@dataclass(frozen=True)
class Counts:
    """Counts of a stretch of work.

    Args:
        values: unit → count with its range.
        notes: counters that were missing or assumptions made, each with what it means.
        busy: share of the time in which any SM does anything, by samples of a tenth of a millisecond.
        active: share of SMs and time that is active.
    """

    values: Mapping[str, Range]
    notes: tuple[str, ...] = ()
    busy: Range = Range(1.0, 1.0, 1.0)
    active: Range = Range(1.0, 1.0, 1.0)


NOMINAL: Mapping[str, Mapping[str, float]] = {
    "sm_80": {"bf16": 512, "fp16": 512, "tf32": 256, "int8": 1024, "fp64": 32},
    "sm_90a": {"bf16": 1024, "fp16": 1024, "tf32": 512, "int8": 2048, "fp8": 2048, "fp64": 64},
}
"""FLOP per cycle of one tensor pipe (a quarter of an SM), dense: peak rate over SMs, pipes and clock (NVIDIA A100 and
H100 Tensor Core GPU Architecture white papers)."""

_FP64_LANES = 16.0
_WGMMA_WAVEFRONTS: Mapping[str, float] = {
    unit: size * (64 + 256) / (2 * 64 * 256) / _WAVEFRONT_BYTES
    for unit, size in {"wgmma_bf16": 2, "wgmma_fp16": 2, "wgmma_tf32": 4, "wgmma_fp8": 1, "wgmma_int8": 1}.items()
}
"""Wavefronts of shared memory per FLOP of a 64 × 256 product that reads both operands there: the counter of wavefronts
sees these reads, as it sees what bulk copies write."""
_ACCESSES_OF_ALL = Range(0.25, 0.1, 0.4)
"""Share of memory instructions where no counter tells them."""
_ACCESSES_OF_WAVEFRONTS = Range(0.5, 0.25, 1.0)
"""Accesses to shared memory per wavefront where they are not counted: lanes with 16 B each have one in 4."""
_THREE_REGISTERS = Range(0.8, 0.5, 1.0)
"""Share of multiply-adds that read three registers; the others have a constant or one register twice."""
_L1_REQUESTS_OF_SECTORS = Range(0.12, 0.06, 0.25)
"""Requests per sector where they are not counted: lanes with 16 B each have one in 16 sectors, with 4 B one in 4."""
_L2_REQUESTS_OF_SECTORS = Range(0.27, 0.25, 0.5)
"""Likewise; 0.25 are whole lines."""
_LEAST_IN_USE, _MOST_IN_USE = 0.7, 1.5
"""Of the mean time of active SMs: kernels that use no memory, and kernels that do not fill the SMs."""
_HEAVY_DOUBT = 0.1
"""On a share read from the heavy pipe: FP32 is not dealt out to both pipes exactly alike."""


def counts_of(
    counters: Mapping[str, float], time_s: float, clock_hz: float | None, calibration: Calibration, mix: Mix
) -> Counts:
    """Counts of the model's units from totals of hardware counters.

    Args:
        counters: canonical name (:data:`joulemark.counter_series.COUNTERS`) → total over the stretch.
        time_s: length of the stretch.
        clock_hz: SM clock, for the time that SMs were active; None takes them all as active.
        calibration: its factors and GPU.
        mix: shares.
    """
    blind = [name for name in _REPLACEABLE if not counters.get(name, 1.0) and _saw_nothing(calibration, name)]
    seen = {name: total for name, total in counters.items() if name not in blind}
    table = _Table(seen, time_s, clock_hz, calibration, mix)
    values: dict[str, Range] = {}
    for part in (table.issue, table.fma, table.pipes, table.tensor, table.shared, table.levels):
        values.update(part())
    present = {unit: one for unit, one in values.items() if one.value > 0 or one.high > 0}
    unknown = sorted(set(present) - calibration.units - _REFINEMENTS)
    notes = [f"{name} saw nothing in any microbenchmark either: it is taken as not counted" for name in blind]
    notes += table.notes
    if unknown:
        notes.append(f"the calibration has no energy for {', '.join(unknown)}: they cost nothing in this prediction")
    return Counts(present, tuple(notes), table.busy(), table.active())


_REPLACEABLE = ("pipe_lsu_instructions", "l1_requests", "l2_requests", "l2_write_sectors", "pipe_fmaheavy_instructions")
"""Counters without which something is assumed in their place."""


def _saw_nothing(calibration: Calibration, counter: str) -> bool:
    """Whether a counter stayed at 0 under all microbenchmarks, memory's among them: it does not work on this GPU."""
    seen = [factors[counter] for factors in calibration.factors.values() if counter in factors]
    return bool(seen) and not any(seen)


_REFINEMENTS = frozenset({L1_REQUEST, L2_REQUEST, HBM_ACTIVE, "fp32_operands", "fp64_operands"})
"""Units that share what others count: an older calibration has their energy inside those."""


class _Table:
    """One method per group of units; each says which counters it needs and what it does without them."""

    def __init__(
        self,
        counters: Mapping[str, float],
        time_s: float,
        clock_hz: float | None,
        calibration: Calibration,
        mix: Mix,
    ) -> None:
        self._counters, self._time_s, self._clock_hz = counters, time_s, clock_hz
        self._calibration, self._mix = calibration, mix
        self.notes: list[str] = []

    def _total(self, name: str, without: str) -> float | None:
        if name not in self._counters:
            self.notes.append(f"{name} was not counted: {without}")
        return self._counters.get(name)

    def _factor(self, unit: str, counter: str, nominal: float) -> float:
        """Counts of a counter per count of a unit."""
        return self._calibration.factors.get(unit, {}).get(counter, nominal)

    def _divisor(self, unit: str, counter: str, nominal: float) -> float:
        """The same to divide by: a counter that saw nothing of its unit tells nothing of it."""
        return self._factor(unit, counter, nominal) or nominal

    def _tell_rest(self, shares: Mapping[str, Range], what: str) -> None:
        given = sum(one.value for one in shares.values())
        if shares and given < 1 - _WHOLE_DOUBT:
            self.notes.append(f"the mix names {given:.0%} of {what}: the rest costs nothing here")

    def issue(self) -> dict[str, Range]:
        """Warp instructions, and the time that SMs were active."""
        found = {}
        instructions = self._total("instructions", "issue costs nothing here")
        if instructions is not None:
            found[INSTRUCTION] = Range.exact(instructions)
            found[MEMORY_ACCESS] = self._accesses(instructions)
        sms = float(self._calibration.gpu.get("sms", 0))
        cycles = self._counters.get("sm_active_cycles")
        if cycles is not None and self._clock_hz:
            found[SM_ACTIVE] = Range.exact(min(cycles / self._clock_hz, sms * self._time_s))
        else:
            found[SM_ACTIVE] = Range(sms, 0.0, sms) * self._time_s
            self.notes.append("active SMs were not counted: all are taken as active")
        return found

    def _accesses(self, instructions: float) -> Range:
        """Those of the load and store pipe; uncounted, by what they move, at most all of no arithmetic pipe."""
        if "pipe_lsu_instructions" in self._counters:
            return Range.exact(self._counters["pipe_lsu_instructions"])
        requests, wavefronts = self._l1_requests(), self._own_wavefronts()
        if requests is None or wavefronts is None:
            return _ACCESSES_OF_ALL * instructions
        pipes = ("pipe_fma_instructions", "pipe_alu_instructions", "pipe_xu_instructions")
        computing = sum(self._counters.get(name, 0.0) for name in pipes) + self._fp64_operations() / _LANES
        return (requests + _ACCESSES_OF_WAVEFRONTS * wavefronts).at_most(max(instructions - computing, 0.0))

    def fma(self) -> dict[str, Range]:
        """The FMA pipes, which mix formats."""
        total = self._total("pipe_fma_instructions", "vector arithmetic costs nothing here")
        if total is None:
            return {}
        found = {unit: share * (total * _LANES) for unit, share in self._fma_shares(total).items()}
        if "fp32" in found:
            found["fp32_operands"] = _product(found["fp32"], _THREE_REGISTERS)
        return found

    def _fma_shares(self, total: float) -> Mapping[str, Range]:
        """Given, or from how much of the work ran on the heavy pipe: integers run there alone, FP32 on both alike."""
        if self._mix.fma is not None:
            self.notes.append(f"shares of the FMA pipes are {self._mix.source}")
            self._tell_rest(self._mix.fma, "the FMA pipes")
            return self._mix.fma
        heavy = self._counters.get("pipe_fmaheavy_instructions")
        if heavy is None or not total:
            self.notes.append("shares of the FMA pipes are assumed")
            return _FMA_SHARES
        known = self._calibration.factors.get("fp32", {})
        both = known.get("pipe_fma_instructions")
        alone = known["pipe_fmaheavy_instructions"] / both if both and "pipe_fmaheavy_instructions" in known else 0.5
        at = min(max((heavy / total - alone) / (1 - alone), 0.0), 1.0) if alone < 1 else 0.0
        integer = Range(at, max(at - _HEAVY_DOUBT, 0.0), min(at + _HEAVY_DOUBT, 1.0))
        return {"fp32": integer.rest, "integer": integer}

    def pipes(self) -> dict[str, Range]:
        """Pipes that hold one unit."""
        found = {}
        alu = self._total("pipe_alu_instructions", "logic costs nothing here")
        if alu is not None:
            found["logic"] = Range.exact(alu * _LANES)
        xu = self._total("pipe_xu_instructions", "special functions cost nothing here")
        if xu is not None:
            found["special"] = Range.exact(xu * _LANES)
        self._total("pipe_fp64_cycles", "FP64 arithmetic costs nothing here")
        operations = self._fp64_operations()
        found["fp64"] = Range.exact(operations)
        found["fp64_operands"] = _THREE_REGISTERS * operations
        return found

    def _fp64_operations(self) -> float:
        return self._counters.get("pipe_fp64_cycles", 0.0) / self._divisor("fp64", "pipe_fp64_cycles", 1 / _FP64_LANES)

    def tensor(self) -> dict[str, Range]:
        """FLOP of the tensor pipes."""
        return self._tensor

    @cached_property
    def _tensor(self) -> dict[str, Range]:
        """Tensor pipes: half-precision formats share one counter, FP64 is what is left of all.

        Where half precision is not counted, what is no integer work is taken for the formats of the mix.
        """
        every, half, integer = (self._counters.get(name) for name in _TENSOR_CYCLES)
        if every is None:
            self._total(_TENSOR_CYCLES[0], "what no other counter shows of the tensor cores costs nothing here")
        rest = (every or 0.0) - (half or 0.0) - (integer or 0.0)
        counter = _TENSOR_CYCLES[1]
        if half is None:
            half, rest, counter = max(rest, 0.0), 0.0, _TENSOR_CYCLES[0]
        found = self._products(half, self._mix.tensor, counter)
        found |= self._products(integer or 0.0, self._mix.int8, _TENSOR_CYCLES[2])
        if every and rest > 0.01 * every:
            if integer is None:
                self._total(_TENSOR_CYCLES[2], "what is no half precision is taken as FP64")
            found["mma_fp64"] = Range.exact(rest / self._cycles_per_flop("mma_fp64", _TENSOR_CYCLES[0]))
        return found

    def _products(self, cycles: float, shares: Mapping[str, Range], counter: str) -> dict[str, Range]:
        """FLOP of formats that share the cycles of a counter."""
        if not cycles:
            return {}
        if not shares:
            self.notes.append(f"{counter} counted, but the mix names no format: those cycles cost nothing here")
        self._tell_rest(shares, counter)
        return {unit: share * (cycles / self._cycles_per_flop(unit, counter)) for unit, share in shares.items()}

    def _cycles_per_flop(self, unit: str, counter: str) -> float:
        architecture = str(self._calibration.gpu.get("architecture"))
        table = NOMINAL.get(architecture) or NOMINAL["sm_90a"]
        nominal = 1 / table.get(unit.rpartition("_")[2], table["bf16"])
        measured = self._calibration.factors.get(unit, {})
        if counter not in measured and "pipe_tensor_cycles" not in measured:
            self.notes.append(f"FLOP per cycle of {unit} are nominal ({1 / nominal:.0f})")
        if measured.get(counter) == 0:
            self.notes.append(f"{counter} saw nothing of {unit} in its microbenchmark: the mix may name another format")
        return measured.get(counter) or measured.get("pipe_tensor_cycles") or nominal

    def shared(self) -> dict[str, Range]:
        """Shared memory by wavefronts of 128 B, less those of operands that ``wgmma`` reads: its energy holds them."""
        self._total("shared_wavefronts", "shared memory costs nothing here")
        wavefronts = self._own_wavefronts()
        if wavefronts is None:
            return {}
        share, total = self._mix.shared_read, wavefronts * _WAVEFRONT_BYTES
        return {"shared_read": share * total, "shared_write": share.rest * total}

    def _own_wavefronts(self) -> float | None:
        """Of accesses, without those of ``wgmma``'s operands."""
        wavefronts = self._counters.get("shared_wavefronts")
        operands = sum(
            one.value * self._factor(unit, "shared_wavefronts", _WGMMA_WAVEFRONTS.get(unit, 0.0))
            for unit, one in self._tensor.items()
            if unit.startswith("wgmma_")
        )
        return None if wavefronts is None else max(wavefronts - operands, 0.0)

    def levels(self) -> dict[str, Range]:
        """L1 by sectors; HBM by bytes; L2 by bytes less what HBM traffic counts twice there."""
        found: dict[str, Range] = {}
        sectors = self._total("l1_sectors", "L1 costs nothing here")
        if sectors is not None:
            found["l1"] = Range.exact(sectors * _SECTOR_BYTES)
        if (requests := self._l1_requests()) is not None:
            found[L1_REQUEST] = requests
        hbm = {}
        for unit, counter in (("hbm_read", "dram_read_bytes"), ("hbm_write", "dram_write_bytes")):
            total = self._total(counter, f"{unit.replace('_', ' ')} costs nothing here")
            hbm[unit] = total or 0.0
            found[unit] = Range.exact(hbm[unit])
        found[HBM_ACTIVE] = self._in_use(sum(hbm.values()))
        l2 = self._total("l2_bytes", "L2 costs nothing here")
        if l2 is None:
            return found
        moved = self._l2(l2, hbm["hbm_read"], hbm["hbm_write"])
        return found | moved | {L2_REQUEST: self._l2_requests(moved, hbm)}

    def _l1_requests(self) -> Range | None:
        """As counted, else from the sectors."""
        if "l1_requests" in self._counters:
            return Range.exact(self._counters["l1_requests"])
        sectors = self._counters.get("l1_sectors")
        return None if sectors is None else _L1_REQUESTS_OF_SECTORS * sectors

    def busy(self) -> Range:
        """As sampled; SMs on the mean are active for less, as kernels do not fill them all."""
        active = self._active_share()
        if "gpu_busy_s" in self._counters:
            share = min(self._counters["gpu_busy_s"] / self._time_s, 1.0)
            return Range(share, min(active or share, share), share)
        return Range(1.0, 1.0 if active is None else active, 1.0)

    def active(self) -> Range:
        """As counted: gaps between kernels may be too short for a supply to tell them from partly filled grids."""
        share = self._active_share()
        return Range.exact(1.0) if share is None else Range(share, share, 1.0)

    def _active_share(self) -> float | None:
        """Of SMs and time."""
        sms, cycles = float(self._calibration.gpu.get("sms", 0)), self._counters.get("sm_active_cycles")
        if cycles is None or not self._clock_hz or not sms:
            return None
        return min(cycles / self._clock_hz / sms / self._time_s, 1.0)

    def _in_use(self, moved: float) -> Range:
        """Time with the memory in use: that of kernels, if any byte is moved.

        Samples are far longer than the kernels of a small network and the gaps between them: busy ones are too many.
        """
        if not moved:
            return Range.exact(0.0)
        share = self._active_share()
        if share is None:
            return Range(1.0, 0.0, 1.0) * self._time_s
        return Range(share, share * _LEAST_IN_USE, min(share * _MOST_IN_USE, 1.0)) * self._time_s

    def _l2_requests(self, moved: Mapping[str, Range], hbm: Mapping[str, float]) -> Range:
        """As counted, less what HBM traffic adds to the requests of the SMs; else from the sectors."""
        counted = self._counters.get("l2_requests")
        if counted is None:
            return _L2_REQUESTS_OF_SECTORS * (sum(one.value for one in moved.values()) / _SECTOR_BYTES)
        added = sum(
            max(self._factor(unit, "l2_requests", 0.0) - self._factor(level, "l2_requests", 0.0), 0.0) * hbm[unit]
            for unit, level in (("hbm_read", "l2_read"), ("hbm_write", "l2_write"))
        )
        return Range.exact(max(counted - added, 0.0) / self._divisor(L2_REQUEST, "l2_requests", 1.0))

    def _l2(self, total: float, hbm_read: float, hbm_write: float) -> dict[str, Range]:
        read, write = (self._divisor(unit, "l2_bytes", 1.0) for unit in ("l2_read", "l2_write"))
        through = self._factor("hbm_read", "l2_bytes", read) * hbm_read
        back = self._factor("hbm_write", "l2_bytes", write) * hbm_write
        hits = max(total - through - back, 0.0)
        share = self._l2_reads(hits, write, hbm_write)
        reads = Range.exact(hbm_read) + share * (hits / read)
        others = share.rest * (hits / write)
        return {"l2_read": reads, "l2_write": Range.exact(hbm_write) + others}

    def _l2_reads(self, hits: float, write: float, hbm_write: float) -> Range:
        """Share of reads in the L2 bytes that are no HBM traffic: by the counter of writes, else the mix's."""
        written = self._counters.get("l2_write_sectors")
        if written is None or not hits:
            return self._mix.l2_read
        back = self._factor("hbm_write", "l2_write_sectors", 1 / _SECTOR_BYTES) * hbm_write
        others = max(written - back, 0.0) / self._divisor("l2_write", "l2_write_sectors", 1 / _SECTOR_BYTES)
        return Range.exact(1 - min(others * write / hits, 1.0))
