"""A GPU that is known: an engine and sensors with given energies, for tests of a calibration without a GPU.

>>> gpu = SyntheticGpu()
>>> gpu.coefficients[("fp32", "control")] > 0
True
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from joulemark.collect.energy import ConditionReading, EnergyEdge, PowerReading, PowerWindow
from joulemark.energy.engine import GpuFacts, Launch, Run
from joulemark.energy.fit import with_loss
from joulemark.energy.microbench.suite import Benchmark, Operands
from joulemark.energy.model import voltage
from joulemark.energy.units import (
    HBM_ACTIVE,
    INSTRUCTION,
    L1_REQUEST,
    L2_REQUEST,
    MEMORY_ACCESS,
    SM_ACTIVE,
    SM_SUPPLY,
    STATIC,
    SUPPLY,
    Part,
    fed_by_core,
    of_sms,
)

ACTIVITIES: Mapping[str, float] = {"zero": 0.0, "constant": 0.1, "random": 1.0, "normal": 0.8, "normal_fp32": 0.9}

_PARTS: tuple[Part, Part] = ("control", "datapath")
_PJ = 1e-12
_DRIFT_KEPT = 0.95
_STEP_AFTER = 50
_FACTS = GpuFacts("Synthetic GPU", "GPU-00000000-0000-4000-8000-000000000000", "sm_90a", 132, 60 << 20)
_TYPICAL: Mapping[str, tuple[float, float]] = {
    "fp32": (3.0, 7.5), "fp32_operands": (1.0, 3.0), "fp64": (7.0, 23.0), "fp64_operands": (2.0, 5.0),
    "fp16x2": (4.0, 8.0), "integer": (4.0, 8.5), "logic": (3.5, 7.5),
    "special": (9.0, 6.0), "mma_fp16": (0.2, 0.7), "mma_bf16": (0.2, 0.75), "mma_tf32": (0.4, 1.3),
    "mma_fp64": (2.0, 7.5), "mma_int8": (0.08, 0.26), "mma_fp8": (0.1, 0.3), "wgmma_fp16": (0.17, 0.7),
    "wgmma_bf16": (0.15, 0.65), "wgmma_tf32": (0.3, 1.2), "wgmma_int8": (0.06, 0.2), "wgmma_fp8": (0.09, 0.33),
    "shared_read": (2.6, 3.1), "shared_write": (2.2, 2.6), "l1": (3.2, 3.2), "l2_read": (9.0, 14.0),
    "l2_write": (18.0, 22.0), "hbm_read": (34.0, 28.0), "hbm_write": (22.0, 44.0),
}  # fmt: skip


def typical_coefficients() -> dict[tuple[str, Part], float]:
    """Energies of the size that an H200 has, in J per count (W for time): made up, for tests."""
    found: dict[tuple[str, Part], float] = {
        (STATIC, "static"): 118.0,
        (SM_ACTIVE, "static"): 0.08,
        (SUPPLY, "static"): 2.5e-4,
        (SM_SUPPLY, "static"): 0.0,
        (INSTRUCTION, "control"): 60.0 * _PJ,
        (MEMORY_ACCESS, "control"): 220.0 * _PJ,
        (L1_REQUEST, "control"): 120.0 * _PJ,
        (L2_REQUEST, "control"): 900.0 * _PJ,
        (HBM_ACTIVE, "control"): 12.0,
    }
    for unit, (control, datapath) in _TYPICAL.items():
        found[unit, "control"] = control * _PJ
        found[unit, "datapath"] = datapath * _PJ
    return found


@dataclass(frozen=True)
class Noise:
    """What is between the true power and the sensors.

    Args:
        window: relative standard deviation of a window's true power.
        drift_w: step of static power from one window to the next, of which a twentieth is lost again, in W.
        step_w: step of static power for good, half-way through 100 windows, in W.
        period_s: between updates of the counter.
        jitter_s: of an update's time.
        edge_s: standard deviation of the time that an update is thought to have.
        quantum_j: of the counter.
        gain: factor of all sensors.
        leakage: relative rise of static power per K above 45 °C.
    """

    window: float = 0.003
    drift_w: float = 0.15
    step_w: float = 0.0
    period_s: float = 0.1
    jitter_s: float = 0.003
    edge_s: float = 0.0015
    quantum_j: float = 0.001
    gain: float = 1.0
    leakage: float = 0.0


@dataclass
class SyntheticGpu:
    """A simulated engine whose sensors follow given coefficients.

    Args:
        coefficients: (unit, part) → J per count, W for time.
        noise: of the sensors.
        facts: of the GPU.
        peak_w: dynamic power of each benchmark at full duty with random operands: sets its speed.
        limit_w: power limit; None for a GPU without one.
        beta, curvature: of the frequency law.
        follows: share of the supply's loss that follows the power of the moment; the rest follows its mean.
        seed: of the noise.
    """

    coefficients: Mapping[tuple[str, Part], float] = field(default_factory=typical_coefficients)
    noise: Noise = field(default_factory=Noise)
    facts: GpuFacts = _FACTS
    peak_w: float = 300.0
    limit_w: float | None = None
    beta: float = 0.9
    curvature: float = 0.0
    follows: float = 0.0
    seed: int = 0
    now: float = field(default=1000.0, init=False)
    _drift: float = field(default=0.0, init=False)
    _clock: float = field(default=1.0, init=False)
    _loaded: tuple[Benchmark, Operands] | None = field(default=None, init=False)
    _launch: Launch | None = field(default=None, init=False)
    _windows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    # The engine.

    def chase(self, size: int) -> float:
        """A curve with ends at 192 KiB and 40 MiB."""
        latency = 35.0 if size <= 192 << 10 else 260.0 if size <= 40 << 20 else 750.0
        return latency * float(self._rng.normal(1, 0.01))

    def load(self, benchmark: Benchmark, operands: Operands, tiles: int) -> None:
        """Take note of what is to run."""
        del tiles
        self._loaded = benchmark, operands

    def instructions(self, benchmark: Benchmark, paused: bool) -> int:
        """As declared."""
        return benchmark.overhead + sum(part.count for part in benchmark.work("sm_90a")) + 2 * paused

    def time_launch(self, launch: Launch) -> float:
        """From the benchmark's speed; a pause adds itself."""
        return launch.iterations * (self._iteration_s() + launch.sleep_ns * 1e-9) + launch.rest_s

    def repeat(self, launch: Launch, times: int) -> None:
        """Let the clock pass."""
        self.now += times * self.time_launch(launch)

    def close(self) -> None:
        """Nothing is held."""

    def run(self, launch: Launch | None, settle_s: float, seconds: float) -> Run:
        """Let the clock pass; launches come at their speed, slower under the power limit."""
        start = self.now + settle_s
        self._launch = launch
        if launch is None:
            self._clock = 1.0
            self.now = start + seconds
            return Run(0, start, self.now)
        self._clock = self._capped_clock(launch)
        each = self.time_launch(launch) / self._clock
        launches = max(1, round(seconds / each))
        self.now = start + launches * each
        return Run(launches, start, self.now)

    def _iteration_s(self) -> float:
        """So that a full grid with random operands spends about ``peak_w``."""
        if self._loaded is None or not self._loaded[0].work("sm_90a"):
            return 1e-6
        benchmark = self._loaded[0]
        counts = benchmark.counts_per_launch("sm_90a", self.facts.sms, 1, self.instructions(benchmark, False))
        core, _, memory = self._energies(counts, 1.0, 1.0)
        return (core + memory) / self._peak(benchmark)

    def _peak(self, benchmark: Benchmark) -> float:
        """Benchmarks differ in power by a factor that their name fixes."""
        return self.peak_w * (0.5 + (sum(benchmark.name.encode()) % 100) / 100)

    def _energies(self, counts: Mapping[str, float], activity: float, clock: float) -> tuple[float, float, float]:
        """Dynamic energy of the core, of its SMs and of the memory, without the supply's loss."""
        squared = float(voltage(clock, self.beta, self.curvature)) ** 2
        core, in_sms, memory = 0.0, 0.0, 0.0
        for unit, count in counts.items():
            control, datapath = (self.coefficients.get((unit, part), 0.0) for part in _PARTS)
            energy = count * (control + activity * datapath)
            if fed_by_core(unit):
                core += squared * energy
                in_sms += squared * energy if of_sms(unit) else 0.0
            else:
                memory += energy
        return core, in_sms, memory

    def _power(self, launch: Launch | None, clock: float) -> float:
        static = self.coefficients[STATIC, "static"] + self._drift
        if launch is None or self._loaded is None:
            return static
        benchmark, operands = self._loaded
        loss = self.coefficients.get((SUPPLY, "static"), 0.0)
        active = 0.0 if benchmark.name == "empty" else self.coefficients[SM_ACTIVE, "static"] * launch.blocks
        if not benchmark.work("sm_90a"):
            return static + float(with_loss(np.array(active), loss))
        instructions = self.instructions(benchmark, launch.sleep_ns > 0)
        counts = benchmark.counts_per_launch("sm_90a", launch.blocks, launch.iterations, instructions)
        length = self.time_launch(launch) / clock
        core, in_sms, memory = (energy / length for energy in self._energies(counts, ACTIVITIES[operands], clock))
        in_use = self.coefficients.get((HBM_ACTIVE, "control"), 0.0) if benchmark.level == "hbm" else 0.0
        busy = 1 - launch.rest_s / self.time_launch(launch)
        loss *= 1 + self.follows * (1 / busy - 1)
        crowding = self.facts.sms / (launch.blocks * busy) - 1
        in_sms = self.coefficients.get((SM_SUPPLY, "static"), 0.0) * crowding * (busy * active + in_sms) ** 2
        return static + busy * in_use + memory + in_sms + float(with_loss(np.array(busy * active + core), loss))

    def _capped_clock(self, launch: Launch) -> float:
        if self.limit_w is None or self._power(launch, 1.0) <= self.limit_w:
            return 1.0
        steps, limit_w = 600, self.limit_w
        over = bisect_right(range(steps + 1), limit_w, key=lambda step: self._power(launch, 0.4 + 0.001 * step))
        return 0.4 + 0.001 * max(over - 1, 0)

    # The sensors.

    def meter(self, run: Callable[[], Run]) -> tuple[Run, PowerWindow]:
        """What ran and what the sensors show of it."""
        before = self.now
        ran = run()
        self._drift = _DRIFT_KEPT * self._drift + float(self._rng.normal(0, self.noise.drift_w))
        self._windows += 1
        true = self._power(self._launch, self._clock) + (self.noise.step_w if self._windows > _STEP_AFTER else 0.0)
        temperature = 35.0 + true / 20
        static = self.coefficients[STATIC, "static"]
        true += static * self.noise.leakage * (temperature - 45.0)
        true *= float(self._rng.normal(1, self.noise.window))
        return ran, self._window(before, ran, true, temperature)

    def _window(self, before: float, ran: Run, true: float, temperature: float) -> PowerWindow:
        noise = self.noise
        window = PowerWindow("nvml_energy_counter", "nvml_power_integral", True, before, ran.end + 0.01)
        n = int((ran.end - before) / noise.period_s)
        times = before + (np.arange(n) + self._rng.random()) * noise.period_s
        times = times + self._rng.normal(0, noise.jitter_s, n)
        energy = np.floor(noise.gain * true * (times - before) / noise.quantum_j) * noise.quantum_j
        seen = times + self._rng.normal(0, noise.edge_s, n)
        window.edges = [
            EnergyEdge(float(t), float(e), noise.edge_s) for t, e in zip(np.sort(seen), energy, strict=True)
        ]
        window.readings = [
            PowerReading(float(t), float(round(noise.gain * true * self._rng.normal(1, 0.004), 3)))
            for t in np.arange(before, ran.end, 0.02)
        ]
        state = ConditionReading(
            1.98e9 * self._clock, 3.201e9, 1.98e9, float(round(temperature)),
            frozenset({"power_cap"} if self._clock < 1.0 else ()),
        )  # fmt: skip
        window.states = [(float(t), state) for t in np.arange(before, ran.end, 0.1)]
        return window
