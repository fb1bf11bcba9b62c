"""Records a few steps with torch.profiler into a trace file, and times the same steps without it first."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from joulemark.errors import Unsupported

MARK = "joulemark.iteration"
"""Name of the range around each step, with its number behind a ``#``; the trace analysis looks for it."""

_PLAIN_LOOPS = 3
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Recording:
    """What a recording tells besides its trace.

    Args:
        plain_s: seconds per step of each loop without the profiler, in the same process, before it.
        profiled_s: seconds per step while it recorded.
        steps: recorded.
        start, end: of the recorded steps on ``time.perf_counter``, in s.
    """

    plain_s: list[float]
    profiled_s: float
    steps: int
    start: float
    end: float

    @property
    def distortion(self) -> float:
        """Profiled step over the median unprofiled one, minus 1."""
        return self.profiled_s / median(self.plain_s) - 1


class Profiler(Protocol):
    """What the profiler pass needs of a profiler."""

    def record(
        self,
        run: Callable[[], object],
        setup: Callable[[], object] | None,
        steps: int,
        synchronize: Callable[[], None],
        path: Path,
    ) -> Recording:
        """Write a trace of ``steps`` steps to ``path``."""
        ...


class TorchProfiler:
    """torch.profiler with its schedule by hand, so that no ``ProfilerStep`` of its own stands between our marks."""

    def record(
        self,
        run: Callable[[], object],
        setup: Callable[[], object] | None,
        steps: int,
        synchronize: Callable[[], None],
        path: Path,
    ) -> Recording:
        """Time the warm step alone, let the profiler warm up over steps that it discards, then record.

        Args:
            run: one step.
            setup: runs before each step, outside its mark.
            steps: how many to record.
            synchronize: waits for the device.
            path: of the trace; ``.gz`` compresses it.

        Raises:
            Unsupported: torch is not installed.
        """
        try:
            from torch.profiler import ProfilerActivity, profile, record_function, supported_activities
        except ImportError as error:
            raise Unsupported("torch is not installed, so its profiler cannot record") from error

        def marked(number: int) -> None:
            with record_function(f"{MARK}#{number}"):
                run()

        plain = [seconds_per_step(lambda _: run(), setup, steps, synchronize) for _ in range(_PLAIN_LOOPS)]
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
        profiler = profile(activities=wanted)
        prepare(profiler)
        seconds_per_step(lambda _: run(), setup, _WARMUP_STEPS, synchronize)
        profiler.start_trace()
        start = time.perf_counter()
        try:
            profiled_s = seconds_per_step(marked, setup, steps, synchronize)
            end = time.perf_counter()
        finally:
            profiler.stop_trace()
        profiler.export_chrome_trace(str(path))
        return Recording(plain, profiled_s, steps, start, end)


def prepare(profiler: Any) -> None:
    """Set a session of ``torch.profiler.profile`` up; ``start_trace`` begins it.

    Some releases of torch warn here that only events of the current cycle are kept, though there is one
    (pytorch/pytorch#180387). With ``acc_events=True`` they would not, and would make an object of each event when the
    session stops: seconds per thousands of operators, where only the file is wanted.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        profiler.prepare_trace()


def seconds_per_step(
    run: Callable[[int], object], setup: Callable[[], object] | None, steps: int, synchronize: Callable[[], None]
) -> float:
    """Mean time of a step in s: steps back to back between two fences, each between its own where a setup runs.

    Args:
        run: takes the step's number.
    """
    together = steps if setup is None else 1
    spent = 0.0
    for first in range(0, steps, together):
        if setup is not None:
            setup()
        synchronize()
        start = time.perf_counter()
        for number in range(first, first + together):
            run(number)
        synchronize()
        spent += time.perf_counter() - start
    return spent / steps
