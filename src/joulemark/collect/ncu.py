"""Nsight Compute on one case: exact counters of each kernel, by replay, in a child process.

``ncu`` runs every kernel several times, one after the other, so a run takes many times longer and its times are those
of kernels, never of a step. It writes CSV into a file; reading that is :mod:`joulemark.utilization.ncu_csv`'s part.

Source: Nsight Compute CLI documentation, "Command Line Options".
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.collect.cupti import BUSY_REMEDY, PERMISSION_REMEDY
from joulemark.errors import (
    CaseTimeout,
    CountersBusy,
    CountersUnavailable,
    CountersUnreadable,
    DeviceError,
    NotPermitted,
    NotSupported,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FLAGS = ("--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off")
_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_INSTALL = "install Nsight Compute (it comes with the CUDA toolkit), or name its `ncu`"
_TAIL = 400

METRICS: tuple[str, ...] = (
    "gpu__time_duration.sum",
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_fp64_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "l1tex__t_bytes.sum",
)
"""What is asked of every kernel: the fewer, the fewer replays."""

_CAUSES: tuple[tuple[re.Pattern[str], type[DeviceError], str, str], ...] = (
    (
        re.compile(r"ERR_NVGPUCTRPERM|does not have permission to access NVIDIA GPU Performance Counters"),
        NotPermitted,
        "Nsight Compute was refused the GPU's performance counters (ERR_NVGPUCTRPERM)",
        PERMISSION_REMEDY,
    ),
    (
        re.compile(r"driver resource was unavailable|[Aa]nother (?:profiling )?tool"),
        CountersBusy,
        "Nsight Compute found the counters in use",
        BUSY_REMEDY,
    ),
    (
        re.compile(r"[Pp]rofiling is not supported on (?:this )?device|not supported on this (?:GPU|system)"),
        NotSupported,
        "Nsight Compute does not support this GPU",
        "use the Nsight Compute of a newer CUDA",
    ),
    (
        re.compile(r"No kernels were profiled"),
        CountersUnreadable,
        "Nsight Compute saw no kernel between the start and the stop of the profiled region",
        "run the work inside joulemark.collect.ncu.profiled_region",
    ),
)


@dataclass(frozen=True)
class NcuRun:
    """What Nsight Compute left behind.

    Args:
        csv: file with its rows and banner lines.
        command: that was run.
        wall_s: that it took, in s.
        caches: ``flushed`` before each kernel, or ``kept`` as the model leaves them.
    """

    csv: Path
    command: tuple[str, ...]
    wall_s: float
    caches: str


def find_ncu(named: str | None = None) -> Path:
    """Nsight Compute's command.

    Args:
        named: path or name; by default ``ncu`` on the path, then where the CUDA toolkit puts it.

    Raises:
        CountersUnavailable: it is not there.
    """
    found = shutil.which(named or "ncu")
    if found is not None:
        return Path(found)
    if named is not None:
        raise CountersUnavailable(f"there is no Nsight Compute at {named}", _INSTALL)
    for place in _PLACES:
        hits = sorted(Path("/").glob(place.lstrip("/")))
        if hits:
            return hits[-1]
    raise CountersUnavailable("Nsight Compute (ncu) is not installed", _INSTALL)


def command_line(
    ncu: Path,
    case: Sequence[str],
    csv: Path,
    metrics: Sequence[str] = METRICS,
    flush_caches: bool = False,
    functions: Sequence[str] = (),
) -> tuple[str, ...]:
    """The command that profiles a case.

    Args:
        ncu: Nsight Compute's command.
        case: program and arguments; its work stands in :func:`profiled_region`.
        csv: file that ncu writes into, so that the case's own output stays out of it.
        metrics: names of Nsight Compute.
        flush_caches: whether to flush the caches before each kernel, as ncu does by default; it adds to the bytes
            of kernels whose data the kernel before left in L2.
        functions: names of the kernels to profile, without namespaces and template arguments; all kernels by default.
            The others run once, as they are.
    """
    caches = "all" if flush_caches else "none"
    options: tuple[str, ...] = (*_FLAGS, "--cache-control", caches, "--target-processes", "all")
    options = (*options, "--metrics", ",".join(metrics))
    if functions:
        named = "|".join(re.escape(name) for name in functions)
        options = (*options, "--kernel-name-base", "function", "--kernel-name", f"regex:^({named})$")
    return (str(ncu), *options, "--log-file", str(csv), "--force-overwrite", *case)


def run_ncu(
    case: Sequence[str],
    csv: Path,
    timeout_s: float,
    metrics: Sequence[str] = METRICS,
    flush_caches: bool = False,
    ncu: str | None = None,
    environment: Mapping[str, str] | None = None,
    functions: Sequence[str] = (),
) -> NcuRun:
    """Profiles a case in a child process.

    Args:
        case, csv, metrics, flush_caches, functions: see :func:`command_line`.
        timeout_s: after which the child and all its processes are killed, in s.
        ncu: see :func:`find_ncu`.
        environment: of the child; by default this process's.

    Raises:
        CountersUnavailable: Nsight Compute is not installed or cannot be started.
        NotPermitted: the driver refuses it the counters.
        CountersBusy: another profiler holds them.
        NotSupported: it does not know this GPU.
        CountersUnreadable: it saw no kernel, or wrote no counters.
        CaseTimeout: the child was killed.
    """
    command = command_line(find_ncu(ncu), case, csv, metrics, flush_caches, functions)
    csv.unlink(missing_ok=True)
    began = time.monotonic()
    output, code = _run(command, timeout_s, environment)
    wall_s = time.monotonic() - began
    written = csv.read_text(encoding="utf-8", errors="replace") if csv.exists() else ""
    if problem := _problem(written + output, '"ID"' in written, code):
        raise problem
    return NcuRun(csv, command, wall_s, "flushed" if flush_caches else "kept")


def _run(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None) -> tuple[str, int]:
    """Output and exit code of a command that is killed with all its processes at its timeout."""
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise CountersUnavailable(f"{command[0]} cannot be started ({error})", _INSTALL) from error
    with child:
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CaseTimeout(
                    f"Nsight Compute was killed after {timeout_s:g} s", "profile fewer steps, or allow more time"
                ) from error
            raise
    return output, child.returncode


def _problem(text: str, has_rows: bool, code: int) -> DeviceError | None:
    """Why there are no counters, by ncu's own words; None when there are some."""
    for pattern, kind, what, remedy in _CAUSES:
        if pattern.search(text) and not (has_rows and kind is CountersUnreadable):
            return kind(what, remedy)
    if has_rows:
        return None
    said = text.strip()[-_TAIL:] or "nothing"
    return CountersUnreadable(f"Nsight Compute ended with exit code {code} and wrote no counters; it said: {said}")


@contextmanager
def profiled_region() -> Iterator[None]:
    """The work that Nsight Compute profiles: with ``--profile-from-start off`` nothing outside of it is replayed."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
