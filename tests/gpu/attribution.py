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
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from attribution_analysis import analyse, checks_of, show, summary
from attribution_parts import MODELS, best_recording, is_ncu, model_of, one_window, parts, read_json, write_json
from attribution_tables import tables

from joulemark.attribution.against import ASKED, Function, functions_of
from joulemark.collect.ncu import profiled_region, run_ncu
from joulemark.device.gpu import slug
from joulemark.errors import (
    CountersBusy,
    CountersUnavailable,
    CountersUnreadable,
    JoulemarkError,
    NotPermitted,
    NotSupported,
)
from joulemark.utilization.ncu_csv import read_export

WARM_STEPS, RECORD_S = 3, 20.0
BEHIND_S = 6.0
"""Of a recording, for what comes behind its windows."""
LEAST_S = {"record": 15.0, "ncu": 35.0}
"""No part is begun with less time left."""
AROUND_S = 12.0
"""Of a part with Nsight Compute, for what comes behind the profiled step, and for models that take long to build."""
LAUNCH_S = 0.15
"""Taken for Nsight Compute's price of a launch before one is known; ResNet-18's took 0.3 to 0.4 s with all metrics."""
AGAIN = ((), ("--careful",), ("--careful", "--beside"))
"""How a recording is tried: as usual, with samples as few and far apart as is known to work, by another process."""
REFUSED = (CountersUnavailable, CountersBusy, NotPermitted, NotSupported)
"""Reasons that hold for every part with Nsight Compute."""
END_S = 5.0


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
