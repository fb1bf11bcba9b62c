"""Where rivals take turns: bursts, sustained windows with energy, bytes by counters; all of one subject in one process.

Each rival is a *round*: one call for each of several inputs that together exceed the L2, captured into a CUDA graph
where that is possible, so that no rival pays for its host's launches. A *burst* is one round between two events after a
short rest; a *sustained* window repeats rounds for seconds, as the energy counter needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from joulemark.collect.energy import conditions_of, energy_of
from joulemark.collect.power import PowerSampler
from joulemark.collect.timing import CudaTimer, Timer, first_line, is_out_of_memory, is_poisoned, timer_for
from joulemark.counter_series import CounterSource
from joulemark.errors import DeviceError, Unsupported
from joulemark.merged.cost import Rates
from joulemark.stats import summarize

Round = Callable[[], object]


class Poisoned(RuntimeError):
    """A CUDA error that has left the process unusable, and whose it was.

    Args:
        rival: that was at work.
        why: CUDA's own words.
    """

    def __init__(self, rival: str, why: str) -> None:
        self.rival = rival
        super().__init__(f"{rival} left CUDA unusable: {why}")


_REST_S = 2e-3
_TURNS = 6
"""Bursts of each rival, whatever time says: a median of fewer has no interval."""
_SETTLE_S = 0.3
_COUNTED_S = 0.25
_SECTOR_BYTES = 32
_BYTES = {
    "dram_read_bytes": ("dram_read_bytes", 1),
    "dram_write_bytes": ("dram_write_bytes", 1),
    "l2_bytes": ("l2_bytes", 1),
    "l1_bytes": ("l1_sectors", _SECTOR_BYTES),
}
"""Figure → counter and bytes of one count."""
COUNTED = ("sm_active_cycles", *(name for name, _ in _BYTES.values()))
"""Counters that a stage asks for; the first tells that there was work at all."""


@dataclass
class Act:
    """A rival on the stage.

    Args:
        name: of the rival.
        round: runs it once for each input.
        calls: in a round.
        graphed: whether a round is a CUDA graph.
        on_stream: whether torch's events see its work; else a round ends when it is done, by the host's clock.
        figures: what was measured of it, in SI units; what is missing is in ``missing``.
        missing: figure → why.
        kept: what a CUDA graph reads though it holds no reference to it: weights, and inputs in a layout of its own.
    """

    name: str
    round: Round
    calls: int
    graphed: bool
    on_stream: bool = True
    figures: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    kept: tuple[object, ...] = ()


@contextmanager
def _blaming(act: Act) -> Iterator[None]:
    """What CUDA does not forgive is told with the name of the rival that was at work."""
    try:
        yield
    except Poisoned:
        raise
    except RuntimeError as error:
        if is_poisoned(error):
            raise Poisoned(act.name, first_line(error)) from error
        raise


@dataclass
class Stage:
    """A device and its instruments.

    Args:
        device: as torch calls it.
        power: its sensors; None leaves energy out.
        counters: of its hardware; None leaves bytes out.
        why_no_counters: the reason for the rows.
        rates: of the device, for floors; None leaves them out.
    """

    device: str
    power: PowerSampler | None = None
    counters: CounterSource | None = None
    why_no_counters: str = "no hardware counters were asked for"
    rates: Rates | None = None

    def __post_init__(self) -> None:
        self.timer: Timer = timer_for(self.device)

    def share_memory(self) -> None:
        """Graphs captured from now on share one pool of memory: of a large model five rivals' would not fit beside.

        They never run at the same time, and none reads what another left.
        """
        if isinstance(self.timer, CudaTimer):
            self.timer.pool = torch.cuda.graph_pool_handle()

    def act(
        self,
        name: str,
        call: Callable[[Any], object],
        inputs: Sequence[Any],
        wait: Callable[[object], object] | None = None,
    ) -> Act:
        """A rival over rotating inputs; launched one by one, and saying so, where it cannot be captured.

        Args:
            name: of the rival.
            call: input → output.
            inputs: that rotate.
            wait: for an output of work that is not on torch's streams; None where it is.
        """

        def round_() -> object:
            last: object = None
            for one in inputs:
                last = call(one)
            return last if wait is None else wait(last)

        act = Act(name, round_, len(inputs), False, wait is None, kept=(call, inputs))
        if wait is not None:
            act.missing["graph"] = "it runs outside of torch's streams"
        elif self.device.startswith("cuda"):
            try:
                with torch.no_grad():
                    act.round, act.graphed = self.timer.capture(round_), True
            except Unsupported as error:
                act.missing["graph"] = str(error)
        return act

    def standing(self, acts: Sequence[Act]) -> list[Act]:
        """Those that run a round beside all others' memory; the others say why not in ``missing``."""
        found = []
        for act in acts:
            try:
                self._seconds(act)
            except Poisoned:
                raise
            except RuntimeError as error:
                what = "out of memory" if is_out_of_memory(error) else type(error).__name__
                act.missing["all"] = f"{what}: {first_line(error)}"[:400]
                continue
            found.append(act)
        return found

    def bursts(self, acts: Sequence[Act], rounds: int, ends_s: float = inf) -> int:
        """Rounds in turns, each after a rest; ``burst_s`` per call with its interval. Who begins changes.

        Args:
            acts: all that take turns.
            rounds: turns of each.
            ends_s: on ``time.perf_counter``, after which no turn begins that an interval does not need.

        Returns:
            Turns that each had.
        """
        times: dict[str, list[float]] = {act.name: [] for act in acts}
        for turn in range(rounds):
            if turn >= _TURNS and time.perf_counter() >= ends_s:
                rounds = turn
                break
            first = turn % len(acts)
            for act in (*acts[first:], *acts[:first]):
                time.sleep(_REST_S)
                times[act.name].append(self._seconds(act) / act.calls)
        for act in acts:
            summary = summarize(times[act.name])
            act.figures["burst_s"] = summary.median
            act.figures["burst_interval_s"] = None if summary.interval is None else list(summary.interval)
        return rounds

    def _seconds(self, act: Act) -> float:
        """One round alone: between events on the device, else on the host's clock."""
        with _blaming(act):
            return self._timed(act)

    def _timed(self, act: Act) -> float:
        timer, run = self.timer, act.round
        timer.synchronize()
        if not self.device.startswith("cuda") or not act.on_stream:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        opened, closed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        opened.record()
        run()
        closed.record()
        closed.synchronize()
        timer.synchronize()
        return float(opened.elapsed_time(closed)) * 1e-3

    def sustained(self, acts: Sequence[Act], seconds: float, turns: int = 1) -> None:
        """Windows of steady rounds in turns: time, power and energy per call of each rival's middle one."""
        for turn in range(turns):
            for act in acts if turn % 2 == 0 else reversed(acts):
                with _blaming(act):
                    self._sustain(act, seconds)
        for act in acts:
            windows = act.figures.pop("windows", [])
            if windows:
                act.figures.update(sorted(windows, key=lambda one: one["sustained_s"])[len(windows) // 2])
                act.figures["sustained_all_s"] = [one["sustained_s"] for one in windows]

    def _sustain(self, act: Act, seconds: float) -> None:
        about = max(self._seconds(act), 1e-7)
        if self.power is None:
            act.missing["energy_j"] = "no power sensor was asked for"
            progress = self.timer.sustain(act.round, seconds, about)
            act.figures.setdefault("windows", []).append({"sustained_s": _per_call(progress, act, progress[0][0])})
            return
        with self.power.window() as window:
            progress = self.timer.sustain(act.round, seconds + _SETTLE_S, about)
        start, end = progress[0][0] + _SETTLE_S, progress[-1][0]
        sustained = _per_call(progress, act, start)
        reading, state = energy_of(window, start, end), conditions_of(window, start, end)
        found: dict[str, Any] = {"sustained_s": sustained, "power_w": reading.power_w.value}
        found["sm_clock_hz"] = None if state is None else state.sm_clock_hz
        if reading.power_w.value is None:
            found["energy_j"], found["energy_interval_j"] = None, None
            act.missing["energy_j"] = reading.reason or "no energy"
        else:
            found["energy_j"] = reading.power_w.value * sustained
            interval = reading.power_w.interval
            found["energy_interval_j"] = None if interval is None else [one * sustained for one in interval]
        found["energy_findings"] = [one.code for one in reading.findings]
        act.figures.setdefault("windows", []).append(found)

    def count(self, acts: Sequence[Act]) -> None:
        """Bytes per call through DRAM, L2 and L1."""
        for act in acts:
            with _blaming(act):
                self._count(act)

    def _count(self, act: Act) -> None:
        if self.counters is None:
            act.missing.update(dict.fromkeys(_BYTES, self.why_no_counters))
            return
        about = max(self._seconds(act), 1e-7)
        rounds = max(3, round(_COUNTED_S / about))

        def run() -> None:
            for _ in range(rounds):
                act.round()
            self.timer.synchronize()

        wanted = {name for name, _ in _BYTES.values()}
        found: dict[str, float] = {}
        for group in self.counters.groups:
            if not (wanted - set(found)) & set(self.counters.counters(group)):
                continue
            try:
                series = self.counters.record(group, run, rounds * about)
            except DeviceError as error:
                act.missing[f"counters {group}"] = str(error)
                continue
            for name in wanted & set(series.values):
                total = series.total(name)
                if total is not None:
                    found.setdefault(name, total / (rounds * act.calls))
        for figure, (name, each) in _BYTES.items():
            if name in found:
                act.figures[figure] = found[name] * each
            else:
                act.missing[figure] = f"{self.counters.tier} does not count {name} here"


def _per_call(progress: Sequence[tuple[float, int]], act: Act, start: float) -> float:
    """Seconds per call from the first chunk that ended after ``start`` to the last."""
    after = [one for one in progress if one[0] >= start]
    if len(after) < 2:
        after = list(progress)
    (begin, first), (end, last) = after[0], after[-1]
    return (end - begin) / max((last - first) * act.calls, 1)
