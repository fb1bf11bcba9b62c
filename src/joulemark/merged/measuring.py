"""Measures candidates of a segment in turns, each of which was right once; what they took is kept on disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import suppress

import torch
from torch import Tensor

from joulemark.merged import cache
from joulemark.merged.graph import Segment
from joulemark.merged.kernels import KernelError
from joulemark.merged.kernels.description import Format
from joulemark.merged.paths import OWN, Executed, kind_of_path
from joulemark.merged.questions import Given, ends, question, relative_error, with_ordinary_weights
from joulemark.merged.setting import TOLERANCE, Setting
from joulemark.merged.stopwatch import race
from joulemark.merged.trials import Trial, shape_of
from joulemark.merged.trying import told

_NO_MEMORY = "out of memory when it was measured"
_NOT_FINITE = "with these weights its layers one by one give no finite numbers"
_KEPT = dict[str, tuple[float | None, str | None]]
"""What the disk keeps of a segment: path → seconds and problem."""


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
    except torch.OutOfMemoryError:  # beside what else the process holds: nothing is kept of it
        for one in trials:
            one.problem = None if one.path == "library" else _NO_MEMORY
        return True
    if not any(one.problem == _NO_MEMORY or one.of_values for one in trials):
        cache.write("segment", key, {one.path: [one.measured_s, one.problem] for one in trials})
    return True


def _race(segment: Segment, trials: List[Trial], setting: Setting) -> None:
    given, expected = question(segment, setting.device)
    if not bool(expected.isfinite().all()):
        for one in trials:
            one.problem, one.of_values = _NOT_FINITE, True
        return
    tried = {one.path: right_once(segment, one, given, expected, setting) for one in trials}
    calls = {path: call for path, call in tried.items() if call is not None}
    with torch.no_grad():
        times = race(calls, setting.device)
    for one in trials:
        one.measured_s = times.get(one.path)


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
    except torch.OutOfMemoryError:
        trial.problem = _NO_MEMORY
    except Exception as error:  # a compiler of kernels raises anything; the path is one of several
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
