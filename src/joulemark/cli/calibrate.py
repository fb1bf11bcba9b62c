"""``joulemark calibrate``: microbenchmarks on this GPU, and the energies that they give."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.cli.arguments import Commands, add_command
from joulemark.cli.console import print_json, say
from joulemark.errors import ConfigurationError, MeasurementError

if TYPE_CHECKING:
    from joulemark.device.gpu import VisibleGpu
    from joulemark.energy.caches import Caches
    from joulemark.energy.calibrate import Progress
    from joulemark.energy.engine import Engine
    from joulemark.energy.windows import CalibrationWindow, Counted
    from joulemark.records import Json

EXIT_UNFINISHED, EXIT_FAILED = 3, 4
_SHORTEST_WINDOW_S, _LONGEST_WINDOW_S = 0.8, 60.0
_FOLDER = Path("results") / "calibration"


def add_parser(commands: Commands) -> None:
    """Add ``calibrate``."""
    parser = add_command(
        commands,
        "calibrate",
        "energy per operation and byte of each unit of this GPU, by microbenchmarks",
        "joulemark calibrate --quick; joulemark energy --calibration results/calibration/nvidia-h200-quick.json",
        run,
        "0 done, 2 wrong use or no GPU, 3 time was up before the plan was done, 4 a kernel failed: go on with --resume",
    )
    parser.add_argument("--quick", action="store_true", help="zero and random operands at two duties, once (3 minutes)")
    parser.add_argument("--resume", action="store_true", help="go on with windows that are there")
    parser.add_argument(
        "--out", type=Path, metavar="F.json", help=f"the calibration; else {_FOLDER}/<gpu>[-quick].json"
    )
    parser.add_argument("--gpu", default="0", metavar="N", help="CUDA ordinal or UUID; the first one unless you say")
    parser.add_argument("--limit", type=float, default=500.0, metavar="S", help="begin no window after S seconds (500)")
    parser.add_argument("--window", type=float, default=1.0, metavar="S", help="length of a window (1.0)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of the whole plan, without --quick (2)")
    parser.add_argument(
        "--until", choices=("short", "lines", "further"), default="further", metavar="PART",
        help="short: a first fit; lines: three windows for every line; else all of the plan",
    )  # fmt: skip
    parser.add_argument("--count", action="store_true", help="only count the benchmarks under hardware counters")
    parser.add_argument("--refit", type=Path, metavar="F.jsonl", help="fit stored windows again; needs no GPU")
    parser.add_argument(
        "--json", action="store_true", help="print the calibration (docs/schema/calibration.schema.json)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure what is left of the plan, then fit."""
    from joulemark.energy.calibration import SCHEMA
    from joulemark.report import output

    if args.out is not None:
        output.check_document_path(args.out, SCHEMA, "calibration", (".json",))
    if args.refit is not None:
        return _fit(args.refit, args.out, args.json)
    _check(args)
    from joulemark.energy.calibrate import BenchmarkFailed

    try:
        left, windows, calibration = _measure(args)
    except BenchmarkFailed as error:
        say(f"error: {error}")
        return EXIT_FAILED
    if left:
        say(f"{left} more to measure: run the same command with --resume")
    try:
        code = _fit(windows, None if left else calibration, args.json)
    except MeasurementError as early:
        if not left and not args.count:
            raise
        say(f"no fit yet: {early}")
        return EXIT_UNFINISHED
    return EXIT_UNFINISHED if left else code


def _check(args: argparse.Namespace) -> None:
    if args.repeats < 1:
        raise ConfigurationError(f"--repeats {args.repeats} measures nothing", "give 1 or more")
    if not 0 < args.limit < float("inf"):
        raise ConfigurationError(f"--limit {args.limit:g} is no time", "give seconds, as in --limit 500")
    if not _SHORTEST_WINDOW_S <= args.window <= _LONGEST_WINDOW_S:
        raise ConfigurationError(
            f"--window {args.window:g} is too short or too long",
            f"give {_SHORTEST_WINDOW_S:g} to {_LONGEST_WINDOW_S:g} s: the energy counter moves every 0.1 s",
        )


def _fit(windows: Path, target: Path | None, as_json: bool) -> int:
    from joulemark.energy.calibration import refit, write_calibration
    from joulemark.report import energy_view, formats

    calibration = refit(windows)
    if target is not None:
        write_calibration(calibration, target)
        say(f"wrote {target}")
    if as_json:
        print_json(calibration.to_json())
    else:
        sys.stdout.write(formats.render(energy_view.calibration_tables(calibration)))
    return 0


def _measure(args: argparse.Namespace) -> tuple[int, Path, Path]:
    """Measure; returns what is left, the file of windows and that of the calibration."""
    from joulemark.collect.power import open_power
    from joulemark.energy.calibrate import SampledMeter, count, measure
    from joulemark.energy.cuda_engine import CudaEngine
    from joulemark.energy.plan import plan
    from joulemark.energy.windows import WindowWriter

    one = _gpu(args.gpu)
    stem = f"{one.gpu.slug}-quick" if args.quick else one.gpu.slug
    target: Path = args.out or _FOLDER / f"{stem}.json"
    windows = target.with_name(f"{target.stem}-windows.jsonl")
    if windows.exists() and not args.resume:
        raise ConfigurationError(f"{windows} is there", "go on with --resume, or choose another --out")
    with CudaEngine(one.ordinal, one.gpu.uuid) as engine, open_power(one.gpu.uuid) as power:
        caches, found = _caches(engine, windows)
        writer = WindowWriter(windows, _header(one, engine, args) | found)
        if args.count:
            with _counters(one) as recorder:
                return count(engine, recorder.source, caches, writer, args.limit, tell=_tell_count), windows, target
        repeats = args.repeats if args.until == "further" else 1
        points = plan(engine.facts.architecture, args.quick, repeats, last=args.until)
        progress = measure(engine, SampledMeter(power), points, caches, writer, args.limit, args.window, tell=_Teller())
    return progress.left, windows, target


def _gpu(wanted: str) -> VisibleGpu:
    from joulemark.device.gpu import probe_gpus, select_gpus

    inventory = probe_gpus(os.environ)
    if inventory.problem is not None:
        raise inventory.problem
    if not inventory.visible:
        raise ConfigurationError("no GPU is visible", "calibrate on a machine with one; see joulemark env")
    return select_gpus(inventory.visible, wanted)[0]


def _caches(engine: Engine, windows: Path) -> tuple[Caches | None, dict[str, Json]]:
    """Ends of the caches, of the file that is gone on with or measured, and what the header says of them."""
    from joulemark.energy.caches import Caches, find_caches
    from joulemark.energy.calibrate import chase_curve
    from joulemark.energy.windows import read_windows

    if windows.exists():
        known = read_windows(windows).header.get("caches")
        return None if known is None else Caches.from_json(known), {}
    say("finding the ends of the caches")
    curve = chase_curve(engine)
    try:
        caches = find_caches(*zip(*curve, strict=True))
    except MeasurementError as lack:
        say(f"{lack}; footprints are sized by half of the L2 that the driver names")
        return None, {"caches": None, "caches_reason": str(lack), "chase": [list(point) for point in curve]}
    return caches, {"caches": caches.to_json()}


def _header(one: VisibleGpu, engine: Engine, args: argparse.Namespace) -> dict[str, Json]:
    from datetime import UTC, datetime

    from joulemark import __version__
    from joulemark.energy.calibrate import SETTLE_S

    gpu, facts = one.gpu, engine.facts
    return {
        "gpu": gpu.name, "gpu_uuid": facts.uuid, "architecture": facts.architecture, "sms": facts.sms,
        "l2_bytes": facts.l2_bytes, "driver": gpu.driver, "vbios": gpu.vbios, "power_limit_w": gpu.power_limit_w,
        "max_sm_clock_hz": gpu.max_sm_clock_hz, "mode": "quick" if args.quick else "reference",
        "window_s": args.window, "settle_s": SETTLE_S, "repeats": 1 if args.quick else args.repeats,
        "begun_utc": datetime.now(UTC).isoformat(timespec="seconds"), "joulemark": __version__,
    }  # fmt: skip


class _counters:
    """The hardware counters of a GPU."""

    def __init__(self, one: VisibleGpu) -> None:
        import importlib

        try:
            ladder = importlib.import_module("joulemark.collect.counters")
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"--count needs hardware counters ({error})", "leave --count out") from error
        self._ladder = ladder.open_counters(one.gpu.uuid, f"cuda:{one.ordinal}", memory_requests=True)
        if self._ladder.source is None:
            refused = "; ".join(map(str, self._ladder.refused.values()))
            raise ConfigurationError(f"no hardware counters on this GPU: {refused}", "leave --count out")
        self.source = self._ladder.source

    def __enter__(self) -> _counters:
        return self

    def __exit__(self, *_: object) -> None:
        self._ladder.close()


class _Teller:
    """Says after each window what it showed and how long the rest will take."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, progress: Progress, window: CalibrationWindow) -> None:
        power = "no power" if window.power_w is None else f"{window.power_w:.0f} W"
        capped = ", capped" if window.capped else ""
        left_s = (time.monotonic() - self._begin) / progress.measured * progress.left
        say(f"{window.point.key}: {power}{capped}; {progress.left} to go, {left_s:.0f} s")


def _tell_count(left: int, counted: Counted) -> None:
    say(f"{counted.benchmark}: {len(counted.counters)} counters; {left} to go")
