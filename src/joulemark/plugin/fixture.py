"""The fixture ``bench``: measures one function or step in the process that it runs in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from joulemark.collect.memory import MemoryPeak
from joulemark.collect.power import PowerSampler
from joulemark.collect.timing import Timer
from joulemark.collect.torch_profiler import TorchProfiler
from joulemark.errors import ConfigurationError, Unsupported
from joulemark.measure.assemble import assemble
from joulemark.measure.counters import Counting
from joulemark.measure.pace import Alone, Pace
from joulemark.measure.plan import PROFILE, PROFILE_OF_RANKS, Plan, plan_for
from joulemark.measure.runner import Runner, missing_metrics, warnings_as_findings
from joulemark.measure.steady import Clock, unknown_clock
from joulemark.measure.turn import turn_at
from joulemark.plugin.sweep import Target
from joulemark.records import Case, Finding, Measurement, Record, Row
from joulemark.workloads.base import Step

if TYPE_CHECKING:
    from joulemark.measure.attribution_pass import Attributing

T = TypeVar("T")


@dataclass
class Instruments:
    """What one measuring process has for its device, opened once and shared by its cases.

    Args:
        target: the device.
        device: torch's name of it (``cuda:0``, ``cpu``).
        power: None when it is off; ``no_power`` says why.
        static_power_w: of the idle board with clocks up, in W.
        facts: of the framework in this process, for the environment.
        counting: hardware counters; only in the process of the counters pass.
        attributing: counters and profiler at once; only in the process of the attribution pass.
        clock: reads the SM clock of the device.
    """

    target: Target
    device: str
    timer: Timer
    memory: MemoryPeak
    power: PowerSampler | None
    no_power: str = ""
    static_power_w: float | None = None
    no_clock: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    counting: Counting | None = None
    attributing: Attributing | None = None
    clock: Clock = unknown_clock


@dataclass
class Bench:
    """Measures one benchmark; usable once per test, like pytest-benchmark's fixture.

    Args:
        case: what is measured.
        instruments: of this process.
        collect: instruments that were asked for.
        quick: short passes.
        budget_s: wall time for this case, None for the plan's own.
        process: number of this process among ``--bench-processes``.
        alone: the plan of this process where it is for one instrument alone; None for the case's own plan.
        keep_trace: where the profiler's trace stays, or the recording of attribution; None throws it away.
        document: where the document of attribution goes; None for none.
        pace: who decides how many steps a pass takes; several ranks go by rank 0.
        turn: the turn at the device, which the passes keep from the warm-up on; None where no process shares it.
    """

    case: Case
    instruments: Instruments
    collect: tuple[str, ...]
    quick: bool = False
    budget_s: float | None = None
    process: int = 0
    alone: Plan | None = None
    keep_trace: Path | None = None
    document: Path | None = None
    pace: Pace = field(default_factory=Alone)
    turn: Path | None = None
    measurements: list[Measurement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    used: bool = False
    opened: float = field(default_factory=time.perf_counter)

    @property
    def target(self) -> Target:
        """The device under test."""
        return self.instruments.target

    @property
    def device(self) -> str:
        """Torch's name of the device under test."""
        return self.instruments.device

    def require(self, instrument: str) -> Any:
        """Add an instrument to this benchmark's plan and return it for direct use.

        Raises:
            Unsupported: it is off; the reason says why.
        """
        if instrument in ("profiler", "counters"):
            self.collect = tuple(dict.fromkeys((*self.collect, instrument)))
            return TorchProfiler() if instrument == "profiler" else self.instruments.counting
        if instrument != "power":
            raise ConfigurationError(
                f"there is no instrument {instrument!r}", "bench.require takes 'power', 'profiler' and 'counters'"
            )
        if self.instruments.power is None:
            raise Unsupported(f"power: {self.instruments.no_power}")
        self.collect = tuple(dict.fromkeys((*self.collect, instrument)))
        return self.instruments.power

    def __call__(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Measure ``function(*args, **kwargs)`` and return its last result."""
        __tracebackhide__ = True
        last: list[T] = []

        def run() -> None:
            last.clear()  # a result kept while the next is made would double the peak memory
            last.append(function(*args, **kwargs))

        self._measure(Step(run))
        return last[0]

    def pedantic(
        self,
        target: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        teardown: Callable[..., Any] | None = None,
        rounds: int | None = None,
        warmup_rounds: int | None = None,
        iterations: int | None = None,
    ) -> T:
        """Measure with pytest-benchmark's pedantic arguments; rounds that are not given are chosen by the pilot.

        ``setup`` runs before each round and may return ``(args, kwargs)`` for it; ``teardown`` runs before the
        next one with the same arguments. Both stay outside the measured window.
        """
        __tracebackhide__ = True
        if setup is not None and (iterations or 1) != 1:
            raise ConfigurationError(f"pedantic got a setup and iterations={iterations}", "a setup needs iterations=1")
        for name, number in (("rounds", rounds), ("iterations", iterations)):
            if number is not None and number < 1:
                raise ConfigurationError(f"pedantic got {name}={number}", "give at least 1, or leave it out")
        given: list[Any] = [tuple(args), dict(kwargs or {})]
        last: list[T] = []

        def run() -> None:
            last.clear()
            last.append(target(*given[0], **given[1]))

        def prepare() -> None:
            if teardown is not None and last:
                teardown(*given[0], **given[1])
            produced = setup() if setup is not None else None
            if produced is not None:
                given[0], given[1] = tuple(produced[0]), dict(produced[1])

        before = prepare if setup is not None or teardown is not None else None
        self._measure(Step(run, setup=before), rounds, iterations, warmup_rounds)
        if teardown is not None and last:
            teardown(*given[0], **given[1])
        return last[0]

    def step(
        self,
        function: Callable[[], object] | Step,
        items: int | None = None,
        setup: Callable[[], object] | None = None,
        unit: str | None = None,
    ) -> Record:
        """Measure one step of ``items`` items and return its Record.

        Args:
            function: the step, or a built :class:`joulemark.workloads.base.Step`.
            items: how many items a step processes; a Step knows its own.
            setup: runs before each round, outside the window.
            unit: what an item is.

        Returns:
            The record as it will be stored (run and environment are filled in by the session).
        """
        __tracebackhide__ = True
        if not callable(function) and not isinstance(function, Step):
            raise ConfigurationError(f"bench.step got {function!r}", "give it a function without arguments, or a Step")
        step = function if isinstance(function, Step) else Step(function)
        if items is not None and (not isinstance(items, Integral) or items < 1):
            raise ConfigurationError(f"bench.step got items={items!r}", "a step processes a whole number of items")
        step = replace(step, items=items or step.items, setup=setup or step.setup, unit=unit or step.unit)
        self._measure(step)
        return self.record()

    def keep(self, table: str, rows: Sequence[Row]) -> None:
        """Store rows beside the record's figures.

        A process that has the case for one instrument alone keeps none: what the benchmark times there is disturbed.

        Args:
            table: its name, of those in ``docs/metrics.md``.
            rows: scalars in base units.
        """
        if self.alone is None:
            self.measurements.append(Measurement(table, tables={table: list(rows)}, process=self.process))

    def record(self) -> Record:
        """What was measured so far, as a record."""
        return assemble(
            self.case,
            self.measurements,
            run_id="",
            environment_id="",
            outcome="ok",
            findings=self.findings,
            gpu_uuid=self.target.uuid,
            static_power_w=self.instruments.static_power_w,
        )

    def _plan(self, fixed_rounds: bool) -> Plan:
        if self.alone is not None:
            return PROFILE_OF_RANKS if self.alone == PROFILE and not self.pace.alone else self.alone
        has_clock = self.device.startswith("cuda")
        plan = plan_for(self.collect, has_clock, self.instruments.power is not None, self.quick)
        if fixed_rounds:
            plan = plan.only(("latency", "power"))
        if not self.pace.alone:
            plan = plan.only(("latency", "steady", "power"))
        plan = plan.only(self.pace.agree([one.name for one in plan.passes]))
        return plan if self.budget_s is None else plan.scaled(self.budget_s)

    def _measure(
        self, step: Step, rounds: int | None = None, iterations: int | None = None, warmup_rounds: int | None = None
    ) -> None:
        __tracebackhide__ = True
        if self.used:
            raise ConfigurationError("the fixture bench was used twice in one test", "write one test per measurement")
        self.used = True
        plan = self._plan(fixed_rounds=rounds is not None)
        instruments = self.instruments
        runner = Runner(
            instruments.timer,
            instruments.memory,
            instruments.power,
            instruments.no_power,
            keep_trace=self.keep_trace,
            counting=instruments.counting,
            attributing=instruments.attributing,
            document=self.document,
            label=self.case.label,
            dtype=self.case.dtype,
            pace=self.pace,
            clock=instruments.clock,
        )
        build_s = time.perf_counter() - self.opened
        with turn_at(self.turn), warnings_as_findings(self.findings):
            measured = runner.measure(step, plan, rounds, iterations, warmup_rounds, build_s=build_s)
        self.measurements = [replace(one, process=self.process) for one in measured]
        if self.alone is None:
            self.measurements.append(Measurement("plan", missing=self._missing(plan, rounds), process=self.process))

    def _missing(self, plan: Plan, rounds: int | None) -> dict[str, str]:
        """Why the passes that are not in the plan are not."""
        instruments = self.instruments
        no_clock = instruments.no_clock or "a CPU has no CUDA clock"
        if self.device.startswith("cuda"):
            no_clock = "rounds were fixed by the benchmark" if rounds else "timing was not asked for"
        power = instruments.no_power if "power" in self.collect else "power was not asked for (--bench-collect power)"
        lone = no_clock if self.pace.alone else "not taken of several ranks"
        reasons = {"power": power, "steady": no_clock, "cold": lone, "graph": lone}
        if "profiler" in self.collect:  # the parent replaces it by what the process of its own has measured
            reasons["profiler"] = "the profiler needs a process of its own (leave out --bench-inprocess)"
        if "counters" in self.collect:
            reasons["counters"] = "the counters need a process of their own (leave out --bench-inprocess)"
        if "attribution" in self.collect:
            reasons["attribution"] = "attribution needs a process of its own (leave out --bench-inprocess)"
        missing = missing_metrics(plan, reasons)
        latency_names = {"throughput_per_s"} if not plan.find("steady") else set()
        return {name: why for name, why in missing.items() if name not in latency_names}
