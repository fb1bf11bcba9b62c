"""What a session says before anything runs, and after everything has."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from joulemark import __version__
from joulemark.metrics import format_value
from joulemark.records import Run

if TYPE_CHECKING:
    from joulemark.device.gpu import Gpu
    from joulemark.plugin.session import BenchSession


def header_lines(session: BenchSession) -> list[str]:
    """Devices, clocks, limits, instruments with their tiers, and what is off and why."""
    inventory, options = session.inventory, session.options
    assert inventory is not None
    assert session.sweep is not None
    known = {gpu.uuid: gpu for gpu in inventory.gpus}
    lines = [f"joulemark {__version__}: records go to {session.sweep.path}"]
    for target in session.targets:
        gpu = known.get(target.uuid or "")
        lines.append(f"  {_gpu_line(gpu)}" if gpu else "  CPU: no GPU is measured" + _why_no_gpu(session))
        if target.note:
            lines.append(f"  ! {target.note}")
    if inventory.simulated:
        lines.append("  ! these GPUs are simulated: no figure of power or energy is real")
    if inventory.problem is not None:
        lines.append(f"  ! {inventory.problem}")
    if not session.config.pluginmanager.hasplugin("benchmark"):
        lines.append("  ! joulemark needs pytest-benchmark and measures nothing without it: leave out -p no:benchmark")
    lines += [f"  {one}" for one in _instrument_lines(session)]
    limits = [f"timeout {options.timeout_s:g} s per case"] if options.isolate and options.timeout_s else []
    limits += [f"budget {options.budget_s:g} s"] if options.budget_s else []
    limits += ["quick: short passes"] if options.quick else []
    limits += [] if options.isolate else ["in this process: no timeout, no recovery"]
    return [*lines, "  " + ", ".join(limits)] if limits else lines


def _why_no_gpu(session: BenchSession) -> str:
    if session.options.gpus in ("cpu", "none"):
        return " (--bench-gpus)"
    assert session.inventory is not None
    if session.inventory.gpus:
        return " (CUDA_VISIBLE_DEVICES hides all)"
    return ""


def _gpu_line(gpu: Gpu) -> str:
    """Name, UUID, clocks, limit, ECC, MIG and driver of one GPU; what is not known is left out."""
    parts = [
        f"driver {gpu.driver}" if gpu.driver else None,
        f"SM clock up to {format_value(gpu.max_sm_clock_hz, 'Hz', 4)}" if gpu.max_sm_clock_hz else None,
        f"power limit {format_value(gpu.power_limit_w, 'W')}" if gpu.power_limit_w else None,
        None if gpu.ecc is None else f"ECC {'on' if gpu.ecc else 'off'}",
        None if not gpu.mig else "MIG",
        f"{format_value(gpu.memory_bytes, 'B')}" if gpu.memory_bytes else None,
    ]
    return f"{gpu.name} ({gpu.uuid}): " + ", ".join(part for part in parts if part)


def _instrument_lines(session: BenchSession) -> list[str]:
    from joulemark.plugin.instruments import describe_power

    on_gpu = session.targets[0].on_gpu
    torch = _version("torch")
    clock = f"CUDA events of torch {torch} beside the host clock" if on_gpu and torch else "host clock"
    if on_gpu and not torch:
        clock += " only (torch is not installed: pip install 'joulemark[torch]')"
    lines = [f"timing: {clock}" + ("" if torch or on_gpu else " (torch is not installed)")]
    if "power" in session.options.collect:
        lines.append(f"power: {describe_power(session.targets[0].uuid)}")
    else:
        lines.append("power: off (--bench-collect)")
    return lines


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_summary(session: BenchSession, reporter: Any) -> None:
    """The tables, what was collected nowhere, the reports and the file."""
    from joulemark.report.output import render, render_comparison, write_report

    sweep = session.sweep
    assert sweep is not None
    for name in session.stray:
        reporter.write_line(
            f"joulemark: {name} takes bench but its name is not collected; call it bench_…", yellow=True
        )
    run = whole_run(session)
    if not sweep.records:
        reporter.write_line(f"joulemark: nothing was measured{_why_nothing(session)}")
    if not run.records:
        return
    reporter.section("joulemark")
    reporter.write_line(render([run], "terminal"))
    comparison = session.comparison()
    if comparison is not None:
        reporter.write_line(render_comparison(comparison, "terminal"))
    for path in session.options.reports:
        write_report([run], path)
        reporter.write_line(f"report: {path}")
    reporter.write_line(f"records: {sweep.path}")
    if not sweep.completed and sweep.records:
        reporter.write_line(f"go on with the same command and --bench-resume {sweep.path}")


def whole_run(session: BenchSession) -> Run:
    """What this session measured; of a resumed sweep, all that its file holds."""
    from joulemark.store import read_run

    sweep = session.sweep
    assert sweep is not None
    if session.resumed is not None:
        return read_run(sweep.path)
    environment = sweep.environment
    return Run(
        str(sweep.path),
        sweep.run_id,
        {} if environment is None else {environment.environment_id: environment},
        tuple(sweep.records),
        sweep.completed,
        sweep.wall_s,
        sweep.measured_s,
        started_utc=sweep.begin,
    )


def _why_nothing(session: BenchSession) -> str:
    sweep = session.sweep
    assert sweep is not None
    if sweep.finished:
        return f": all {len(sweep.finished)} cases are in the resumed file"
    if sweep.total == 0:
        return (
            ": no function that takes the fixture bench was found; write one in a file bench_*.py, for example "
            "def bench_model(bench, workload): bench.step(workload)"
        )
    return "; pytest -rs shows why each case was skipped"
