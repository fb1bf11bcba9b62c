"""What both instruments saw of some steps, as files in a folder.

::

    recording.json       what was recorded where: :class:`Recording`
    window-N.npz         the samples of window N
    window-N.json.gz     torch.profiler's trace of the device in window N, where steps of the work ran in it
    host.json.gz         of a few steps more, with the host's operators and the modules' forward calls; where asked for
    trace.json.gz        where windows have no trace of their own: of all of them, with the host's marks

Everything that the analysis needs stands here, so that it can be done again elsewhere. ``recording.json`` is written
anew behind each window: a recording that is cut short holds the windows before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from joulemark import whole_files
from joulemark.counter_series import CounterSeries
from joulemark.errors import UnreadableInput, in_words

SCHEMA = "joulemark/attribution-recording/1"
FILE, TRACE, HOST = "recording.json", "trace.json.gz", "host.json.gz"

Mode = Literal["one process", "side process"]
"""Where PM sampling was: beside torch.profiler in the process of the work, or in another one."""
Role = Literal["steps", "product", "stream"]
ROLES: Mapping[Role, str] = {
    "steps": "steps of the work",
    "product": "a large matrix product over and over, of known FLOP: the peak of the tensor pipe",
    "stream": "a large array read and written over and over: the peak of DRAM",
}


@dataclass(frozen=True)
class RecordedWindow:
    """One window.

    Args:
        number: in its mark and in the name of its file.
        role: what ran in it.
        group: pass of the counters.
        steps: how many; of a reference, how often it ran.
        flop: of all of them together, where that is known.
        seconds: that the work took.
        own_trace: whether it has a trace of its own, in which spinning kernels mark the steps.
        hold_s: for which a kernel that spins held the device before the steps, while the host went ahead.
        held: whether it then led so far that the device waited for no launch; None where it held none, or none told.
    """

    number: int
    role: Role
    group: str
    steps: int
    flop: float | None = None
    seconds: float | None = None
    own_trace: bool = False
    hold_s: float = 0.0
    held: bool | None = None

    @property
    def file(self) -> str:
        """Name of the file with its samples."""
        return f"window-{self.number}.npz"

    @property
    def trace(self) -> str:
        """Name of the file with its trace."""
        return f"window-{self.number}.json.gz" if self.own_trace else TRACE


@dataclass(frozen=True)
class Recording:
    """What a folder holds.

    Args:
        label: what was recorded, in the user's words.
        windows: in order of time.
        mode: where PM sampling was.
        facts: of the GPU and of the software.
        bare_step_s: seconds per step of each stretch before the process's first session of the profiler.
        plain_step_s: seconds per step of each stretch without instruments. Where there is one more than windows of
            steps, they stand in turns: one before each window, and one behind the last.
        recorded_step_s: of each window of steps, with both.
        missing: canonical counter → why it was not counted.
        notes: what could not be recorded → why.
    """

    label: str
    windows: tuple[RecordedWindow, ...]
    mode: Mode = "one process"
    facts: Mapping[str, Any] = field(default_factory=dict)
    bare_step_s: tuple[float, ...] = ()
    plain_step_s: tuple[float, ...] = ()
    recorded_step_s: tuple[float, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def of_role(self, role: Role) -> list[RecordedWindow]:
        """The windows in which that ran."""
        return [one for one in self.windows if one.role == role]


def write_recording(folder: Path, recording: Recording) -> None:
    """Write what a folder holds, behind the files that it names, whole or not at all."""
    text = json.dumps({"schema": SCHEMA, **asdict(recording)}, indent=1)
    whole_files.put((text + "\n").encode(), folder / FILE)


def read_recording(folder: Path) -> Recording:
    """What a folder holds.

    Raises:
        UnreadableInput: it is no whole recording.
    """
    path = folder / FILE
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held.pop("schema") != SCHEMA:
            raise UnreadableInput(f"{path} is no recording of this version", f"its schema must be {SCHEMA}")
        windows = tuple(RecordedWindow(**one) for one in held.pop("windows"))
        for name in ("bare_step_s", "plain_step_s", "recorded_step_s"):
            held[name] = tuple(held.get(name, ()))
        return Recording(windows=windows, **held)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableInput(
            f"{folder} holds no whole recording ({in_words(error)})",
            "give the folder that joulemark.measure.attribution.record wrote, or a document (--out F.json)",
        ) from error


def write_series(path: Path, series: CounterSeries) -> None:
    """Write samples into a compressed file of arrays, with the rest of the series as JSON text."""
    told = {
        "tier": series.tier,
        "group": series.group,
        "units": dict(series.units),
        "clock": series.clock,
        "raw": dict(series.raw),
        "missing": dict(series.missing),
        "source": dict(series.source),
    }
    values: dict[str, Any] = {f"value_{name}": samples for name, samples in series.values.items()}
    np.savez_compressed(path, start_s=series.start_s, end_s=series.end_s, told=np.array(json.dumps(told)), **values)


def read_series(path: Path) -> CounterSeries:
    """Samples from :func:`write_series`.

    Raises:
        UnreadableInput: the file cannot be read, or a sample is no number.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            told = json.loads(str(held["told"]))
            values = {name.removeprefix("value_"): held[name] for name in held.files if name.startswith("value_")}
            series = CounterSeries(start_s=held["start_s"], end_s=held["end_s"], values=values, **told)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise UnreadableInput(
            f"{path} holds no samples ({in_words(error)})", "record again, or copy the whole folder"
        ) from error
    if not len(series) or not all(np.isfinite(samples).all() for samples in series.values.values()):
        raise UnreadableInput(f"{path} holds {len(series)} samples, or values that are no numbers", "record again")
    return series
