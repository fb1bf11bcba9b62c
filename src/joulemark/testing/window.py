"""A window of samples in no time."""

from __future__ import annotations

from joulemark.collect.power import PowerSampler, PowerWindow
from joulemark.testing.clock import FakeClock
from joulemark.testing.gpu import FakeGpu
from joulemark.testing.replay import ReplayCollector


def simulate_window(
    source: FakeGpu | ReplayCollector, seconds: float, lead_s: float = 0.0, tail_s: float = 0.0
) -> PowerWindow:
    """What the sampler records of a source in ``seconds``, in no time: its clock becomes a :class:`FakeClock`.

    Args:
        source: to sample.
        seconds: length of the window.
        lead_s, tail_s: how much earlier and later the sampling begins and ends.
    """
    clock = source.clock if isinstance(source.clock, FakeClock) else FakeClock()
    if source.clock is not clock:
        source.clock = clock
        if isinstance(source, FakeGpu):
            source.born = clock()
    window, recorder = PowerSampler(source, clock).prepare()
    window.start = clock() + lead_s
    window.end = window.start + seconds
    stop = window.end + tail_s

    def wait(pause: float) -> bool:
        clock.sleep(min(pause, max(0.0, stop - clock())))
        return clock() >= stop

    if recorder is not None:
        recorder.run(wait)
    return window
