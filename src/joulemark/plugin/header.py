"""What a session says before anything runs, and after everything has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulemark import __version__
from joulemark.metrics import format_value
from joulemark.records import NOT_REAL, Run

if TYPE_CHECKING:
    import argparse

    from joulemark.device.gpu import Gpu
    from joulemark.plugin.session import BenchSession
    from joulemark.plugin.sweep import Target
    from joulemark.report.comparison import Comparison
    from joulemark.report.evidence import Document


def header_lines(session: BenchSession) -> list[str]:
    """Devices, clocks, limits, instruments with their tiers, and what is off and why."""
    inventory, options = session.inventory, session.options
    assert inventory is not None
    assert session.journal is not None
    known = {gpu.uuid: gpu for gpu in inventory.gpus}
    lines = [f"joulemark {__version__}: records go to {session.journal.path}"]
    for target in targets_of(session):
        gpu = known.get(target.uuid or "")
        lines.append(f"  {_gpu_line(gpu)}" if gpu else "  CPU: no GPU is measured" + _why_no_gpu(session))
        if target.note:
            lines.append(f"  ! {target.note}")
    if inventory.simulated:
        lines.append(f"  ! these GPUs are simulated: {NOT_REAL}")
    if inventory.problem is not None:
        lines.append(f"  ! {inventory.problem}")
    if not session.config.pluginmanager.hasplugin("benchmark"):
        lines.append("  ! joulemark needs pytest-benchmark and measures nothing without it: leave out -p no:benchmark")
    lines += [f"  {one}" for one in (*_instrument_lines(session), *_sharing_lines(session))]
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

    if session.cluster is not None:
        lines = [f"cluster: {session.cluster.seats} GPUs through Ray, each with the instruments of its node"]
        return [*lines, *(f"! {problem}" for problem in session.cluster.problems)]
    on_gpu = session.targets[0].on_gpu
    torch = _version("torch")
    clock = f"CUDA events of torch {torch} beside the host clock" if on_gpu and torch else "host clock"
    if on_gpu and not torch:
        clock += " only (torch is not installed: pip install 'joulemark[torch]')"
    lines = [f"timing: {clock}" + ("" if torch or on_gpu else " (torch is not installed)")]
    if "power" in session.options.collect:
        said = {target.uuid: describe_power(target.uuid) for target in targets_of(session)}
        if len(set(said.values())) == 1:
            lines.append(f"power: {next(iter(said.values()))}")
        else:
            lines += [f"power of {uuid}: {words}" for uuid, words in said.items()]
    else:
        lines.append("power: off (--bench-collect)")
    if "counters" in session.options.collect:
        lines.append(f"counters: {_counters(session)}")
    if "attribution" in session.options.collect:
        lines.append(f"attribution: {_attribution(session)}")
    return lines


def _counters(session: BenchSession) -> str:
    """What will be tried: only the measuring process can tell what works."""
    if not session.targets[0].on_gpu:
        return "off: a CPU has no GPU counters"
    library = f" with {session.options.cupti}" if session.options.cupti else ""
    return f"PM sampling{library}, else NVML's GPM, in a process of their own"


def _attribution(session: BenchSession) -> str:
    """What will be tried, in a process of its own for each case."""
    if not session.targets[0].on_gpu:
        return "off: a CPU has no GPU counters"
    library = f" with {session.options.cupti}" if session.options.cupti else ""
    return f"PM sampling{library} and the profiler at once, in a process of its own for each case"


def targets_of(session: BenchSession) -> list[Target]:
    """All devices that may be measured: under pytest-xdist, every GPU that a worker may get."""
    return session.targets if session.controller is None else session.controller.stations


def _sharing_lines(session: BenchSession) -> list[str]:
    """How the GPUs are shared: with other sessions, and among workers."""
    options, lines = session.options, []
    if session.controller is not None:
        budget = f", {options.power_budget_w:g} W for all together" if options.power_budget_w else ""
        workers, have = session.controller.workers, len(session.controller.stations)
        some = f", on those of the {have} that are free" if workers < have else ""
        many = f"{workers} worker{'s' if workers > 1 else ''}"
        lines.append(f"{many}, one per GPU{some}, the longest cases first{budget}")
        lines.append("pytest-benchmark: off under -n; the records hold the samples")
    if session.cluster is None and any(one.on_gpu for one in session.targets):
        lines.append(f"lease: {_how_leased(options.lease_s)}")
    return lines


def _how_leased(limit_s: float | None) -> str:
    if limit_s is None:
        return "off (--bench-lease)"
    return f"wait up to {limit_s:g} s for another session" if limit_s else "refuse where another session measures"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_summary(session: BenchSession, reporter: Any) -> bool:
    """The tables, what was collected nowhere, the reports and the file.

    Returns:
        Whether all reports that were asked for could be written.
    """
    from joulemark.attribution.stored import folder_beside
    from joulemark.report.documents import in_folder
    from joulemark.report.output import render

    journal = session.journal
    assert journal is not None
    for name in session.stray:
        reporter.write_line(
            f"joulemark: {name} takes bench but its name is not collected; call it bench_…", yellow=True
        )
    run = journal.whole_run(session.plan, session.resumed)
    if not journal.records:
        reporter.write_line(f"joulemark: nothing was measured{_why_nothing(session)}")
    if not run.records:
        return True
    reporter.section("joulemark")
    documents, unusable = in_folder(folder_beside(journal.path))
    reporter.write_line(render([run], "terminal", documents=documents))
    comparison = session.comparison()
    if comparison is not None:
        _write_comparison(comparison, reporter)
    written = _write_reports(run, documents, session.options.reports, reporter)
    reporter.write_line(f"records: {journal.path}")
    for line in unusable:
        reporter.write_line(f"joulemark: left out: {line}", yellow=True)
    if documents:
        reporter.write_line(f"which kernels do the work: joulemark attribution {shlex.quote(str(journal.path))}")
    if journal.completed and not session.options.reports and not session.options.baseline:
        lacking = not all(map(importlib.util.find_spec, ("jinja2", "matplotlib")))
        needs = "    (needs pip install 'joulemark[html]')" if lacking else ""
        reporter.write_line(f"as a page: joulemark report {shlex.quote(str(journal.path))} --out report.html{needs}")
    if not journal.completed and journal.records:
        reporter.write_line(f"go on with the same command and --bench-resume {journal.path}")
    return written


def _write_comparison(comparison: Comparison, reporter: Any) -> None:
    """Beside the baseline; what that imports, scipy too, no sweep without one pays for."""
    from joulemark.report.comparison import why_nothing_counts
    from joulemark.report.output import render_comparison

    reporter.write_line(render_comparison(comparison, "terminal"))
    if not comparison.counts:
        why = why_nothing_counts(comparison)
        reporter.write_line(f"joulemark: --bench-baseline has judged nothing: {why}", yellow=True)


def _write_reports(run: Run, documents: Sequence[Document], paths: Iterable[Path], reporter: Any) -> bool:
    """Each report; one that cannot be written is named, and costs neither the others nor where the records are."""
    from joulemark.errors import JoulemarkError
    from joulemark.report.output import write_report

    whole = True
    for path in paths:
        try:
            write_report([run], path, documents=documents)
            reporter.write_line(f"report: {path}")
        except JoulemarkError as error:
            whole = False
            reporter.write_line(f"joulemark: {error}", red=True)
    return whole


def _chosen(option: argparse.Namespace) -> str:
    """By what cases were chosen: ``-k 'resnet'``; empty where all were."""
    given = (("-k", option.keyword), ("-m", option.markexpr))
    return " and ".join(f"{flag} {text!r}" for flag, text in given if text)


def _why_nothing(session: BenchSession) -> str:
    journal = session.journal
    assert journal is not None
    if session.finished:
        return f": all {len(session.finished)} cases are in the resumed file"
    left_out = session.left_out
    if journal.total == 0 and left_out.lines and not session.uncollected:
        if left_out.no_gpu and not left_out.unnamed:
            return f": its {len(left_out.no_gpu)} cases need a GPU; --bench-all lists them, each with its reason"
        return ": all cases are left out, as the lines above say; --bench-all takes them"
    chosen = _chosen(session.config.option)
    if journal.total == 0 and not session.uncollected and chosen:
        return f": no case fits {chosen}; the same with --collect-only -q and without {chosen} lists all cases"
    if journal.total == 0 and not session.uncollected:
        return (
            ": no function that takes the fixture bench was found; write one in a file bench_*.py, for example "
            "def bench_model(bench, workload): bench.step(workload)"
        )
    if session.uncollected:
        return ": a file cannot be collected, as the errors above say"
    if session.interrupted:
        return ": interrupted before the first case was done"
    return "; pytest -rs shows why each case was skipped"
