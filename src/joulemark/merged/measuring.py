"""Measures candidates of a segment in turns, each of which was right once; what they took is kept on disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from contextlib import suppress
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from joulemark.merged import cache
from joulemark.merged.graph import Segment
from joulemark.merged.kernels import KernelError
from joulemark.merged.kernels.description import Format
from joulemark.merged.memory import says_out_of_memory
from joulemark.merged.paths import OWN, Executed, cudnn_tuning, kind_of_path
from joulemark.merged.questions import Given, ends, question, relative_error, with_ordinary_weights
from joulemark.merged.setting import TOLERANCE, Setting
from joulemark.merged.stopwatch import race
from joulemark.merged.trials import Trial, shape_of
from joulemark.merged.trying import told

_MANY_TAPS, _HOPELESS = 27, 3.0
"""Taps from which cuDNN's trials may take seconds, and as many times what the fastest of our own takes: then a path is
not tried any further. Measured before that: a stem of 7×7×7 taps and one layer more took 15 s of an H200.
"""
_TUNED = ("library", "fused", "epilogue")
"""Paths whose convolution cuDNN may pick by trial."""
_NEVER_GUESSED = "fused"
"""Of these the one that is always picked by trial, see :func:`cudnn_tuning`."""
_NO_MEMORY = "out of memory when it was measured"
_NOT_FINITE = "with these weights its layers one by one give no finite numbers"
_KEPT = dict[str, tuple[float | None, str | None]]
"""What the disk keeps of a segment: path → seconds and problem."""
Calls = dict[str, Callable[[], Tensor]]
"""Path → a call."""


def measure(segment: Segment, trials: List[Trial], setting: Setting) -> bool:
    """Fill in what trials of a segment take, from the disk where it is there.

    Returns:
        Whether they are known or were tried; False where time was up before.
    """
    key = cache.key_of(
        cache.device_key(setting.device),
        *shape_of(segment),
        setting.form,
        [(one.path, _text_of(one)) for one in trials],
    )
    kept = cache.read("segment", key, _KEPT)
    if kept is not None and all(one.path in kept for one in trials):
        for one in trials:
            one.measured_s, one.problem = kept[one.path]
        return True
    if not setting.in_time:
        return False
    try:
        _race(segment, trials, setting)
    except RuntimeError as error:
        if not says_out_of_memory(str(error)):
            raise
        # Beside what else the process holds: nothing is kept of it.
        for one in trials:
            one.problem = None if one.path == "library" else _NO_MEMORY
        return True
    if not any(one.problem == _NO_MEMORY or one.of_values for one in trials):
        cache.write("segment", key, {one.path: [one.measured_s, one.problem] for one in trials})
    return True


def _race(segment: Segment, trials: List[Trial], setting: Setting) -> None:
    """Time all trials that are right in turns; what cuDNN is far behind with has the time of its guess."""
    given, expected = question(segment, setting.device)
    if not bool(expected.isfinite().all()):
        for one in trials:
            one.problem, one.of_values = _NOT_FINITE, True
        return

    def right(some: Iterable[Trial]) -> Calls:
        tried = {one.path: right_once(segment, one, given, expected, setting) for one in some}
        return {path: call for path, call in tried.items() if call is not None}

    with torch.no_grad():
        lengthy = [one for one in trials if one.path in _TUNED] if _may_take_long(segment, setting) else []
        calls = right(one for one in trials if one not in lengthy)
        behind = _far_behind(lengthy, calls, right, setting)
        calls |= right(one for one in lengthy if one.path not in behind)
        times = {**behind, **race(calls, setting.device)}
    for one in trials:
        one.measured_s = times.get(one.path)


def _may_take_long(segment: Segment, setting: Setting) -> bool:
    """Whether cuDNN's trials may: for convolutions of many taps over all channels."""
    layer = segment.sequence.layers[0]
    return setting.device.type == "cuda" and layer.groups == 1 and prod(layer.kernel) >= _MANY_TAPS


def _far_behind(
    lengthy: Iterable[Trial], ours: Calls, right: Callable[[Iterable[Trial]], Calls], setting: Setting
) -> dict[str, float | None]:
    """Paths that are so slow as cuDNN guesses them that trials are not worth their time, and what they take so, in s.

    cuDNN's fused kernels convolve as the others do: where all of those are so slow they are too, and have no time.

    Args:
        lengthy: candidates whose trials may take long.
        ours: calls of what needs no trial.
        right: gives calls of the candidates that are right.
    """
    guessed = [replace(one) for one in lengthy if one.path != _NEVER_GUESSED]  # what is wrong as guessed may be right
    if not ours or not guessed:
        return {}
    with cudnn_tuning(False):
        guesses = right(guessed)
        limit = _HOPELESS * min(race(ours, setting.device).values())
        times = {path: race({path: call}, setting.device)[path] for path, call in guesses.items()}
    behind: dict[str, float | None] = {path: seconds for path, seconds in times.items() if seconds > limit}
    return {**behind, _NEVER_GUESSED: None} if len(behind) == len(guessed) else behind


def works(segment: Segment, trial: Trial, setting: Setting) -> bool:
    """Whether a trial that is not measured is right once, on random input; where it is not, the trial says why."""
    try:
        given, expected = question(segment, setting.device)
    except torch.OutOfMemoryError:
        trial.problem = _NO_MEMORY
        return False
    return right_once(segment, trial, given, expected, setting) is not None


def right_once(
    segment: Segment, trial: Trial, given: Given, expected: Tensor, setting: Setting
) -> Callable[[], Tensor] | None:
    """A call of a trial that was right once; None where it was not, the trial says why."""
    try:
        return _checked(segment, trial, given, expected, setting.form)
    except Exception as error:  # a compiler of kernels raises anything; the path is one of several
        if says_out_of_memory(str(error)):
            trial.problem = _NO_MEMORY
            return None
        trial.problem = told(error)
        trial.of_values = _is_right_with_others(segment, trial, setting)
    return None


def _is_right_with_others(segment: Segment, trial: Trial, setting: Setting) -> bool:
    """Whether a trial that failed is right with ordinary weights: then the values of these are why."""
    with suppress(Exception):
        other = with_ordinary_weights(segment)
        _checked(other, trial, *question(other, setting.device), setting.form)
        return True
    return False


def _checked(
    segment: Segment,
    one: Trial,
    given: Given,
    expected: Tensor,
    form: Format | None,
) -> Callable[[], Tensor]:
    """A call of a trial whose output was right once.

    Raises:
        KernelError: its output is wrong.
    """
    module = Executed(segment.sequence, segment.parameters, one.path, segment.adds is not None, one.kernel)
    with torch.no_grad():
        out = module.run(*given)
        error = relative_error(ends(out), expected)
    limit = TOLERANCE[form] if form is not None else 1e-9
    if not error <= limit:
        raise KernelError(f"its output is wrong: relative error {error:.2g}, {limit:g} is allowed")
    return lambda: module.run(*given)


def _text_of(trial: Trial) -> str | None:
    """The text that a trial's measured time depends on; None for what a library's version says."""
    if trial.kernel is not None:
        return trial.kernel.source
    if kind_of_path(trial.path) not in OWN:
        return None
    from joulemark.merged import gather, normalize, pointwise, sliding, stem

    return "".join(inspect.getsource(one) for one in (gather, normalize, pointwise, sliding, stem))
