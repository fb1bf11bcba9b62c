"""Counters per kernel without replay on this GPU: three models recorded, Nsight Compute beside them, costs.

Run: ``python tests/gpu/attribution.py OUT --seconds 175`` on a machine with a CUDA GPU, again and again with the same
OUT until no part is left. Every part is a process of its own that leaves its files in ``OUT/PART`` and, behind them,
``done.json``, or ``failed.json`` with a typed reason, which the next call tries again. Nothing is analysed there, so
that no GPU waits; afterwards, anywhere:

    python tests/gpu/attribution.py OUT --analyse

writes ``OUT/attribution-MODEL.json`` with its picture, and ``OUT/attribution-ncu.json``: totals, costs, and errors
against Nsight Compute (``docs/schema/attribution-ncu.schema.json``). It exits with 0 when all that these are held to
was measured and holds, else with 1. Parts, in their order:

- ``MODEL-record``: windows beside both instruments in turns with stretches without them, then the roofline's
  references, then a session with the host's operators and modules. A recording that is cut short can be used, too;
- ``MODEL-ncu-CACHES-long``: one step under Nsight Compute, caches ``kept`` as the model leaves them or ``flushed``
  before each kernel: the functions of which any launch lasts 50 µs, by their time;
- ``MODEL-ncu-CACHES-rest``: the other functions, for the table of all classes.

Nsight Compute replays what it profiles, at a price per launch that no one knows before: a part takes as many functions
as fit into ``--ncu-seconds`` at the price that the parts before have shown, and lets go of the step when they are over.
Where it is missing or refused, the first part says why, and those behind it are not begun.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from attribution_tables import tables

from joulemark.attribution.against import ASKED, Function, compare, functions_of, largest_error
from joulemark.attribution.recording import read_recording, read_series
from joulemark.attribution.timeline import Timeline, read_timeline
from joulemark.collect.ncu import profiled_region, run_ncu
from joulemark.device.gpu import slug
from joulemark.errors import (
    CountersBusy,
    CountersUnavailable,
    CountersUnreadable,
    JoulemarkError,
    NotPermitted,
    NotSupported,
    UnreadableInput,
)
from joulemark.records import Case
from joulemark.utilization.ncu_csv import Launch, parse, read_export

SCHEMA = "joulemark/attribution-ncu/1"
MODELS = {
    "resnet50": Case("resnet50", "train", "eager", "bf16", 128, "channels_last", "device", "gpu"),
    "mobilenet_v2": Case("mobilenet_v2", "inference", "eager", "bf16", 256, "channels_last", "device", "gpu"),
    "bert_base": Case("bert_base", "train", "eager", "bf16", 128, "contiguous", "device", "gpu"),
}
"""Batches at which the device is the limit, not the host: of a step that waits, no instrument shows its own cost."""
CACHES, SHARES = ("kept", "flushed"), ("long", "rest")
ERROR, COST, TOTALS, FASTER = 0.10, 0.05, 0.02, 100.0
WARM_STEPS, RECORD_S = 3, 20.0
BEHIND_S = 6.0
"""Of a recording, for what comes behind its windows."""
LEAST_S = {"record": 15.0, "ncu": 35.0}
"""No part is begun with less time left."""
AROUND_S = 12.0
"""Of a part with Nsight Compute, for what comes behind the profiled step, and for models that take long to build."""
BARS = {"dram_error": "DRAM bytes", "tensor_error": "tensor activity"}
STEPS, SLOWER = ("kernel_time_s", "bare_s", "plain_s", "recorded_s"), ("slowdown", "slowdown_from_bare")
"""Of an attribution's steps: seconds per step, and what the instruments cost."""
LAUNCH_S = 0.15
"""Taken for Nsight Compute's price of a launch before one is known; ResNet-18's took 0.3 to 0.4 s with all metrics."""
AGAIN = ((), ("--careful",), ("--careful", "--beside"))
"""How a recording is tried: as usual, with samples as few and far apart as is known to work, by another process."""
REFUSED = (CountersUnavailable, CountersBusy, NotPermitted, NotSupported)
"""Reasons that hold for every part with Nsight Compute."""
END_S = 5.0


def parts() -> list[str]:
    """All of them, the most telling first."""
    ncu = [f"{model}-ncu-{caches}-{share}" for share in SHARES for caches in CACHES for model in MODELS]
    return [*(f"{model}-record" for model in MODELS), *ncu]


def model_of(part: str) -> str:
    """The model of a part."""
    return part.partition("-")[0]


def is_ncu(part: str) -> bool:
    """Whether Nsight Compute runs in it."""
    return "-ncu-" in part


def read_json(path: Path) -> dict[str, Any] | None:
    """A file's content; None where it is not there, or its writer was killed."""
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return held


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


# In the processes that measure.


def wait_for_turn(folder: Path, until: float) -> None:
    """Returns when the starting process says so; ends this one when that will not happen any more."""
    parent = os.getppid()
    while not (folder / "go").exists():
        if time.time() > until or os.getppid() != parent:
            sys.exit(3)
        time.sleep(0.02)


def build(model: str) -> Any:
    """A step of the zoo."""
    from joulemark.workloads import zoo

    case = MODELS[model]
    return zoo.find(case.workload).build(case, "cuda:0")


def record_part(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Records a model; with its sampler in another process where the two instruments do not bear each other."""
    from joulemark.measure.attribution import CAREFUL_PACE, PACE, Plan, TorchBench, record

    pace = CAREFUL_PACE if options.careful else PACE
    if options.bench is None:
        import torch  # noqa: F401 - no context yet: another part may be measuring

        wait_for_turn(folder, options.until)
        began = time.perf_counter()
        step, bench = build(model), TorchBench("cuda:0", pace=pace, beside=options.beside)
    else:
        wait_for_turn(folder, options.until)
        began = time.perf_counter()
        bench, step = resolve_name(options.bench)(model)
    opened = time.perf_counter()
    plan = Plan(
        windows=options.windows,
        ahead=not options.waiting,
        limit_s=max(5.0, min(RECORD_S, options.until - time.time() - BEHIND_S)),
    )
    into = folder / f"recording-{len(list(folder.glob('recording-*')))}"
    label = replace(MODELS[model], gpu_model=slug(str(bench.facts["gpu"]))).label
    done = record(bench, step, into, label, plan, pace)
    return {"recording": into.name, "mode": done.mode, "interval_s": pace.interval_s, "opened_s": opened - began,
            "recorded_s": time.perf_counter() - opened}  # fmt: skip


def ncu_part(part: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One step of a model under Nsight Compute; it starts at once, and waits for its turn when it has imported."""
    model, _, caches, share = part.split("-")
    launch_s = price(options.out)
    chosen = functions_for(options.out, model, caches, share, options.ncu_seconds / launch_s)
    if chosen == []:
        return {"caches": caches, "share": share, "functions": [], "launches": 0, "wall_s": 0.0, "options": [],
                "cut": False, "build_s": 0.0, "profiled_s": 0.0}  # fmt: skip
    case = [sys.executable, __file__, str(options.out), "--ncu-child", part, "--until", str(options.until)]
    case += ["--ncu-seconds", str(options.ncu_seconds)]
    flush, left = caches == "flushed", options.until - time.time() - 1
    done = run_ncu(case, folder / "ncu.csv", left, ASKED, flush, options.ncu, functions=chosen or ())
    child = read_json(folder / "child.json")
    if child is None:
        raise CountersUnreadable("the profiled program ended before its step", "see what it wrote")
    launches = len(read_export(folder / "ncu.csv").launches)
    told = done.command[1 : done.command.index("--log-file")]
    return {"caches": caches, "share": share, "functions": chosen, "launches": launches, "wall_s": done.wall_s,
            "options": told, **child}  # fmt: skip


def price(out: Path) -> float:
    """Seconds of Nsight Compute per launch, by the parts that are done."""
    done = [one for path in sorted(out.glob("*-ncu-*/done.json")) if (one := read_json(path)) and one["launches"]]
    return sum(one["profiled_s"] for one in done) / sum(one["launches"] for one in done) if done else LAUNCH_S


def functions_for(out: Path, model: str, caches: str, share: str, most: float) -> list[str] | None:
    """Names of the functions to profile, the longest first, at least one and so many launches at the most.

    With flushed caches they are of those with kept ones, where these are done. None for all functions, where the
    model's recording does not tell; empty where no function is left.
    """
    folder = best_recording(out, model)
    if folder is None:
        return None
    found = functions_of(one_window(folder))
    if caches == "flushed" and (kept := done_functions(out, model, share)) is not None:
        return fitting([one for one in found if one.name in kept], most)
    if share == "long":
        return fitting([one for one in found if one.long_s > 0], most)
    long = done_functions(out, model, "long") or ()
    return fitting([one for one in found if one.name not in long], most)


def one_window(folder: Path) -> Timeline:
    """The timeline of the first window of a recording whose trace can be used: all of them take long to read.

    Raises:
        UnreadableInput: there is none.
    """
    whole = read_recording(folder)
    refused = UnreadableInput(f"{folder} holds no window of steps", "record again")
    for one in whole.of_role("steps"):
        try:
            return read_timeline(folder, replace(whole, windows=(one,)))
        except UnreadableInput as error:
            refused = error
    raise refused


def done_functions(out: Path, model: str, share: str) -> list[str] | None:
    """The functions that a model's part with kept caches has profiled; None where it is not done."""
    done = read_json(out / f"{model}-ncu-kept-{share}" / "done.json")
    return None if done is None else done["functions"]


def fitting(functions: Iterable[Function], most: float) -> list[str]:
    """The first of them, as long as their launches fit; one at least."""
    names: list[str] = []
    spent = 0.0
    for one in functions:
        spent += one.launches
        if names and spent > most:
            break
        names.append(one.name)
    return names


def best_recording(out: Path, model: str) -> Path | None:
    """The recording that was ended, or else the one with most windows."""
    done = read_json(out / f"{model}-record" / "done.json")
    if done is not None:
        return out / f"{model}-record" / str(done["recording"])
    held: list[tuple[int, Path]] = []
    for folder in sorted((out / f"{model}-record").glob("recording-*")):
        with suppress(UnreadableInput):
            held.append((len(read_recording(folder).of_role("steps")), folder))
    return max(held, key=lambda one: one[0])[1] if held else None


def ncu_child(part: str, options: argparse.Namespace) -> None:
    """Runs one step, profiled until the time is over."""
    import torch

    from joulemark.workloads import zoo  # noqa: F401 - its imports, too, come before the turn

    folder = options.out / part
    wait_for_turn(folder, options.until)
    began = time.time()
    step = build(model_of(part))
    for _ in range(WARM_STEPS):
        step.run()
    torch.cuda.synchronize()
    ready = time.time()
    cut = threading.Event()

    def let_go() -> None:
        cut.set()
        torch.cuda.profiler.stop()

    timer = threading.Timer(max(2.0, min(options.ncu_seconds, options.until - ready - AROUND_S)), let_go)
    with profiled_region():
        timer.start()
        step.run()
        torch.cuda.synchronize()
        timer.cancel()
    spent = {"build_s": ready - began, "profiled_s": time.time() - ready}
    write_json(folder / "child.json", {"cut": cut.is_set(), **spent})


def run_part(part: str, options: argparse.Namespace) -> int:
    """One part in this process; a reason that is known is left in its folder, and gives 1."""
    folder = options.out / part
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))  # so that what it has started is ended, too
    try:
        found = ncu_part(part, folder, options) if is_ncu(part) else record_part(model_of(part), folder, options)
    except JoulemarkError as error:
        fail(folder, type(error).__name__, error.what, error.remedy)
        print(f"{part}: {error}", flush=True)
        return 1
    write_json(folder / "done.json", found)
    print(f"{part}: {json.dumps({key: value for key, value in found.items() if key != 'options'})}", flush=True)
    return 0


def fail(folder: Path, kind: str, what: str, remedy: str) -> None:
    """Leave a reason in a part's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "failed.json", {"error": kind, "message": what, "remedy": remedy})


# In the process that starts them.


class Turns:
    """Starts parts one after the other; the next one imports and waits while one measures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._out = options, options.out
        self._until = time.time() + options.seconds
        self._running: list[subprocess.Popen[bytes]] = []
        self._begun: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._until - time.time()

    def run(self) -> None:
        """All parts that are not done; ends what it has started, whatever happens."""
        wanted = [part for part in self._options.parts if not (self._out / part / "done.json").exists()]
        ahead: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for part, following in zip(wanted, [*wanted[1:], None], strict=False):
                if self._is_refused(part):
                    continue
                process = ahead.pop(part, None)
                if self.left_s < (0 if self._options.bench else LEAST_S["ncu" if is_ncu(part) else "record"]):
                    print(f"{part}: no time left", flush=True)
                    continue
                process = process or self._start(part)
                (self._out / part / "go").touch()
                self._begun.append(part)
                # PM sampling and a waiting Nsight Compute are not tried together
                if following and is_ncu(following) == is_ncu(part) and not self._is_refused(following):
                    ahead[following] = self._start(following)
                self._ended(process, part)
        finally:
            for process in self._running:
                self._end(process)

    def _ended(self, process: subprocess.Popen[bytes], part: str) -> None:
        """Waits for a part; a recording that fails is tried in other ways (:data:`AGAIN`)."""
        code = self._wait(process, part)
        for more in AGAIN[1:] if not is_ncu(part) else ():
            if code != 1 or self.left_s < LEAST_S["record"]:
                break
            process = self._start(part, *more)
            (self._out / part / "go").touch()
            code = self._wait(process, f"{part} ({' '.join(more)})")

    def _start(self, part: str, *more: str) -> subprocess.Popen[bytes]:
        folder, options = self._out / part, self._options
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("go", "failed.json", "child.json"):
            (folder / name).unlink(missing_ok=True)
        command = [sys.executable, __file__, str(self._out), "--part", part, "--until", str(self._until), *more]
        command += ["--ncu-seconds", str(options.ncu_seconds), "--windows", str(options.windows)]
        for name in ("bench", "ncu"):
            if getattr(options, name) is not None:
                command += [f"--{name}", getattr(options, name)]
        command += [
            f"--{name}"
            for name in ("careful", "beside", "waiting")
            if getattr(options, name) and f"--{name}" not in more
        ]
        process = subprocess.Popen(command)
        self._running.append(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes], part: str) -> int | None:
        try:
            code: int | None = process.wait(max(0.5, self.left_s))
        except subprocess.TimeoutExpired:
            self._end(process)
            code = None
        self._running.remove(process)
        print(f"{part}: exit {code}, {self.left_s:.0f} s left", flush=True)
        return code

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Asks a part to end, so that it ends Nsight Compute; then ends it."""
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _is_refused(self, part: str) -> bool:
        """Whether a part of this call has shown that Nsight Compute does not work here; the part then says so, too."""
        if not is_ncu(part):
            return False
        for other in filter(is_ncu, self._begun):
            found = read_json(self._out / other / "failed.json")
            if found and found["error"] in [one.__name__ for one in REFUSED]:
                fail(self._out / part, found["error"], found["message"], found["remedy"])
                print(f"{part}: not begun, as {other}: {found['message']}", flush=True)
                return True
        return False


# Afterwards, without a GPU.


def analyse(out: Path) -> dict[str, Any]:
    """Attributions of all models that were recorded, and what they are held to."""
    return {"schema": SCHEMA, "models": {model: of_model(out, model) for model in MODELS}}


def of_model(out: Path, model: str) -> dict[str, Any]:
    """Figures of one model; its attribution is written."""
    from joulemark.attribution.document import Attribution  # its statistics take a while to load
    from joulemark.report.jsonout import dumps

    folder = best_recording(out, model)
    if folder is None:
        why = read_json(out / f"{model}-record" / "failed.json") or {"error": "NotMeasured", "message": "not recorded"}
        return {"label": MODELS[model].label, "recording": None, "ncu": None, "why": why}
    try:
        found = Attribution.of(folder)
    except UnreadableInput as error:
        why = {"error": "UnreadableInput", "message": error.what}
        return {"label": MODELS[model].label, "recording": None, "ncu": None, "why": why}
    document = found.document()
    (out / f"attribution-{model}.json").write_text(dumps(document))
    recording = held_to(document, folder, read_json(out / f"{model}-record" / "done.json"))
    alone = one_window_alone(folder)
    ncu = {caches: against(out, model, caches, found.places(), recording, alone) for caches in CACHES}
    return {"label": document["label"], "recording": recording, "ncu": ncu, "why": None}


class Alone(NamedTuple):
    """What the first window of a recording that can be used says without the others.

    Args:
        window: its number.
        seconds: of its steps, with what holds the device before them.
        places: of a step.
        totals: counter → what kernels are given, over what was counted.
    """

    window: int
    seconds: float
    places: list[dict[str, Any]]
    totals: dict[str, float]


def one_window_alone(folder: Path) -> Alone:
    """As much as Nsight Compute tells of one step: no intervals over windows, no references, no modules.

    Raises:
        UnreadableInput: no window can be used.
    """
    from joulemark.attribution.document import Attribution

    whole = read_recording(folder)
    refused = UnreadableInput(f"{folder} holds no window of steps", "record again")
    for one in whole.of_role("steps"):
        recording = replace(whole, windows=(one,), plain_step_s=(), recorded_step_s=())
        try:
            timeline = read_timeline(folder, recording)
            found = Attribution(recording, timeline, {one.number: read_series(folder / one.file)})
        except UnreadableInput as error:
            refused = error
            continue
        return Alone(one.number, (one.seconds or 0.0) + one.hold_s, found.places(), totals_of(found.counters()))
    raise refused


def totals_of(counters: Mapping[str, Any]) -> dict[str, float]:
    """Counter → what kernels are given, over what was counted."""
    return {name: one["ratio"] for name, one in counters.items() if one["ratio"] is not None}


def show(out: Path) -> None:
    """Tables and a picture of each attribution that was written."""
    from joulemark.report import attribution_plot, attribution_view, formats

    for path in sorted(out.glob("attribution-*.json")):
        document = read_json(path)
        if document is not None and document["schema"] != SCHEMA:
            print(formats.render(attribution_view.tables(document)))
            attribution_plot.draw(document, path.with_suffix(".svg"))


def held_to(document: Mapping[str, Any], folder: Path, done: Mapping[str, Any] | None) -> dict[str, Any]:
    """Totals and cost of one model."""
    told = totals_of(document["counters"])
    windows, steps = document["clock"]["windows"], document["steps"]
    return {
        "file": f"{folder.parent.name}/{folder.name}",
        "ended": done is not None,
        "in_windows_s": sum((one.seconds or 0.0) + one.hold_s for one in read_recording(folder).of_role("steps")),
        "recorded_s": None if done is None else done["recorded_s"],
        "opened_s": None if done is None else done["opened_s"],
        "totals": told,
        "clock_uncertainty_s": max(one["uncertainty_s"] for one in windows),
        "counts_best_at_s": [one["check"]["best_s"] for one in windows],
        "steps": {name: steps[name] for name in STEPS},
        **{name: steps[name] for name in (*SLOWER, "slowdown_interval")},
        "checks": {
            "totals within 2 %": all(abs(ratio - 1) <= TOTALS for ratio in told.values()),
            "at most 5 % slower": within_cost([steps[name] for name in SLOWER]),
        },
    }


def within_cost(slower: Sequence[float | None]) -> bool | None:
    """Whether a run is slowed no more than it may be, both against stretches in turns and against a bare process."""
    return None if None in slower else all(one is not None and one <= COST for one in slower)


def against(
    out: Path,
    model: str,
    caches: str,
    places: Sequence[Mapping[str, Any]],
    recording: Mapping[str, Any],
    alone: Alone | None = None,
) -> dict[str, Any]:
    """What Nsight Compute says of the same step, what it took, and why it says nothing.

    Flushed caches change the work itself: their errors are shown and not held to anything. Nsight Compute's answer is
    one step's, so what it took is held against one window, if that alone keeps the limits of errors and totals.
    """
    folders = {share: out / f"{model}-ncu-{caches}-{share}" for share in SHARES}
    done = {share: one for share, folder in folders.items() if (one := read_json(folder / "done.json")) is not None}
    missing = {
        share: read_json(folder / "failed.json") or {"error": "NotMeasured", "message": "it was not begun or not ended"}
        for share, folder in folders.items()
        if share not in done
    }
    launches = [launch for share, one in done.items() if one["launches"] for launch in launches_of(folders[share])]
    cut = any(one["cut"] for one in done.values())
    compared = compare(places, launches, cut=cut) if launches else None
    profiled_s = sum(one["profiled_s"] for one in done.values())
    ratio = profiled_s / recording["in_windows_s"] if launches and recording["in_windows_s"] else None
    errors = errors_of(compared)
    single = of_one_window(alone, launches, cut=cut, profiled_s=profiled_s) if alone and launches else None
    checks = {
        **{f"long launches' {what} within 10 %": within(errors[name], ERROR) for name, what in BARS.items()},
        "over 100 times faster": single and single["keeps_limits"] and single["times_as_long"] > FASTER,
    }
    return {
        "parts": {share: {key: value for key, value in one.items() if key != "caches"} for share, one in done.items()},
        "missing": missing,
        "profiled_s": profiled_s if done else None,
        "times_as_long": ratio,
        "times_as_long_as_recording": profiled_s / whole if launches and (whole := recording["recorded_s"]) else None,
        "one_window": single,
        "largest_errors": errors,
        "compared": compared,
        "checks": checks if caches == "kept" else {},
    }


def launches_of(folder: Path) -> Sequence[Launch]:
    """What Nsight Compute said in a part, also where that was packed to be kept."""
    packed = folder / "ncu.csv.gz"
    if packed.exists():
        return parse(gzip.decompress(packed.read_bytes()).decode(), str(packed)).launches
    return read_export(folder / "ncu.csv").launches


def errors_of(compared: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Of the class of long launches that is furthest off."""
    long = None if compared is None else compared["classes_of_long_launches"]
    return {name: largest_error(long, name) if long else None for name in BARS}


def of_one_window(alone: Alone, launches: Sequence[Launch], *, cut: bool, profiled_s: float) -> dict[str, Any]:
    """Whether one window gives the same answer, and how many times as long Nsight Compute took."""
    errors = errors_of(compare(alone.places, launches, cut=cut))
    off = max(abs(ratio - 1) for ratio in alone.totals.values())
    keeps = all(within(error, ERROR) is not False for error in errors.values()) and off <= TOTALS
    return {
        "window": alone.window,
        "seconds": alone.seconds,
        "times_as_long": profiled_s / alone.seconds,
        "largest_errors": errors,
        "largest_total_error": off,
        "keeps_limits": keeps,
    }


def within(error: float | None, limit: float) -> bool | None:
    """Whether an error keeps a limit; None where it is not known."""
    return None if error is None else abs(error) <= limit


def checks_of(found: Mapping[str, Any]) -> list[bool | None]:
    """All checks of a model."""
    if found["recording"] is None:
        return [None]
    told = [found["recording"]["checks"], *(one["checks"] for one in found["ncu"].values())]
    return [ok for checks in told for ok in checks.values()]


def summary(found: Mapping[str, Any]) -> Any:
    """A model's figures without its tables."""
    if found["recording"] is None:
        return found["why"]
    keys = ("steps", *SLOWER, "slowdown_interval", "clock_uncertainty_s", "checks")
    short: dict[str, Any] = {key: found["recording"][key] for key in keys}
    for caches, one in found["ncu"].items():
        short[caches] = {
            key: one[key] for key in ("missing", "times_as_long", "one_window", "largest_errors", "checks")
        }
        short[caches]["time_compared"] = None if one["compared"] is None else one["compared"]["time_compared"]
    return short


def main() -> int:
    """The command line; its exit code is 3 while parts are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--ncu-seconds", type=float, default=35.0, help="of each part, for the profiled step")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=parts())
    parser.add_argument(
        "--windows", type=int, default=9, help="of each recording; 6 give a 95 %% interval, 9 one without its ends"
    )
    parser.add_argument("--analyse", action="store_true")
    parser.add_argument("--ncu", help="path of Nsight Compute's command, or of a stand-in")
    parser.add_argument("--bench", help="pkg.mod:function that gives a bench and a step in place of a GPU's")
    parser.add_argument("--careful", action="store_true", help="fewer samples, further apart")
    parser.add_argument("--beside", action="store_true", help="PM sampling by another process")
    parser.add_argument("--waiting", action="store_true", help="the device waits for the host, as it does by itself")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--ncu-child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts()):
        parser.error(f"no parts are called {sorted(unknown)}; there are {', '.join(parts())}")
    if options.ncu_child:
        ncu_child(options.ncu_child, options)
    elif options.part:
        return run_part(options.part, options)
    elif options.analyse:
        from joulemark.report.jsonout import dumps

        found = analyse(options.out)
        (options.out / "attribution-ncu.json").write_text(dumps(found))
        show(options.out)
        print(tables(found))
        print(json.dumps({model: summary(one) for model, one in found["models"].items()}, indent=1))
        return 0 if all(all(checks_of(one)) for one in found["models"].values()) else 1
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
        Turns(options).run()
        return 3 if any(is_left(options.out / part) for part in options.parts) else 0
    return 0


def is_left(folder: Path) -> bool:
    """Whether another call could measure a part."""
    found = read_json(folder / "failed.json")
    refused = found and found["error"] in [one.__name__ for one in REFUSED]
    return not (folder / "done.json").exists() and not refused


if __name__ == "__main__":
    sys.exit(main())
