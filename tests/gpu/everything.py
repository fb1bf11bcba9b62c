"""Everything that is measured on GPUs for this project, on all GPUs of a machine side by side, within a given time.

Run: ``python tests/gpu/everything.py OUT --limit 580``; the same command goes on with what is left, until it says
"complete". ``--steps`` chooses, ``--list`` tells them. Each GPU takes the next step that nobody has; a step that was
cut goes on where it ended, on the GPU where it began. Files grow in WORK, outside the checkout, so that they stay
between two commands; what a step leaves is copied to OUT/STEP when it ends. A command that fails twice, or twice takes
longer than it may, is given up, with its log, and costs nobody else their turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from children import environment

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "joulemark" / "everything"
PYTHON = sys.executable
DONE, FAILED, UNFINISHED, OVERRAN = 0, 1, 3, -9
TRIES = 2
_GRACE_S = 10.0
_PACK_S = 8.0
_NO_END_S = 1e4
_CUDA_ERROR, _NOT_TOLD = 4, 4
"""Exit codes of ``merged_models.py``, whose next start goes on behind the case, and of ``counters_cost.py``."""


@dataclass(frozen=True)
class Step:
    """Commands for one GPU, one after another; the step is done when each of them has exited with 0, or ``ends``.

    In a command ``{dir}`` stands for the step's own folder, ``{left}`` for the seconds that it may take.

    Args:
        name: of its folder and log.
        commands: of one step.
        most_s: of one turn of each command.
        least_s: below which a command brings nothing.
        kept: patterns of the files that are copied to OUT.
        pinned: whether it has one core of the host to itself, as steps have that time the host.
        cut: exit codes that say that it was cut and goes on next time; pytest has none (its 3 is an error of its own).
        again: exit codes that ask for another start, which goes on behind what ended this one.
        ends: exit codes of a command that has ended, other than 0: it has measured what it could.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    most_s: float
    least_s: float = 20.0
    kept: tuple[str, ...] = ("*.json", "*.jsonl", "*.log", "*.csv", "*.npz", "*.gz")
    pinned: bool = False
    cut: tuple[int, ...] = (UNFINISHED,)
    again: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass
class State:
    """How far a step came, as WORK/everything.json holds it.

    Args:
        commands_done: of the step's commands, those given up among them.
        failures: in a row, of the same command.
        given_up: numbers of commands that failed twice.
        gpu: that it began on.
        took_s: so far.
        said: its last line.
    """

    commands_done: int = 0
    failures: int = 0
    given_up: list[int] = field(default_factory=list)
    gpu: str | None = None
    took_s: float = 0.0
    said: str = ""

    def fail(self) -> None:
        """The command has failed; given up where it had before."""
        self.failures += 1
        if self.failures == TRIES:
            self.given_up.append(self.commands_done)
            self.commands_done, self.failures = self.commands_done + 1, 0


@dataclass
class Machine:
    """GPUs that take steps until none is left that they could take, or time is up.

    Args:
        steps: in order of weight.
        work: where files grow.
        out: where results are copied.
        limit_s: for all.
        begin: of the limit, on the monotonic clock.
    """

    steps: tuple[Step, ...]
    work: Path
    out: Path
    limit_s: float
    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._book = self.work / "everything.json"
        book: Mapping[str, Any] = json.loads(self._book.read_text()) if self._book.exists() else {}
        self.states = {step.name: State(**book.get(step.name, {})) for step in self.steps}

    @property
    def left_s(self) -> float:
        """Seconds for steps."""
        return self.begin + self.limit_s - _PACK_S - time.monotonic()

    def run(self, gpus: Iterable[str]) -> int:
        """All steps on these GPUs; 0 when all are done, 3 when some are left, 1 when some failed."""
        gpus = list(gpus)
        for state in self.states.values():
            state.gpu = state.gpu if state.gpu in gpus else None
        lanes = [threading.Thread(target=self._lane, args=(gpu,), daemon=True) for gpu in gpus]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        left = [step.name for step in self.steps if not self._is_done(step)]
        failed = [step.name for step in self.steps if self.states[step.name].given_up]
        self._say(f"left: {', '.join(left)}" if left else "complete")
        if failed:
            self._say(f"failed, in part at least: {', '.join(failed)} (their logs say why)")
        return UNFINISHED if left else FAILED if failed else DONE

    def _is_done(self, step: Step) -> bool:
        return self.states[step.name].commands_done >= len(step.commands)

    def _lane(self, gpu: str) -> None:
        while (step := self._next(gpu)) is not None:
            try:
                self._turn(step, gpu)
            finally:
                with self._lock:
                    keep(step, self.work / step.name, self.out / step.name)
                    self._save()

    def _next(self, gpu: str) -> Step | None:
        """The first step that this GPU may take now; no step gets two turns in one run unless its turn ended early."""
        with self._lock:
            for step in self.steps:
                state = self.states[step.name]
                if step.name in self._taken or self._is_done(step):
                    continue
                if state.gpu in (None, gpu) and self.left_s >= step.least_s + _GRACE_S:
                    self._taken.add(step.name)
                    state.gpu = gpu
                    return step
        return None

    def _turn(self, step: Step, gpu: str) -> None:
        """Its commands from the first that is not done; one that fails is tried once more, then given up."""
        state = self.states[step.name]
        while not self._is_done(step):
            seconds = min(step.most_s, self.left_s - _GRACE_S)
            if seconds < step.least_s:
                return
            begin = time.monotonic()
            code = self._command(step, gpu, seconds)
            state.took_s = round(state.took_s + time.monotonic() - begin, 1)
            if code == DONE or code in step.ends:
                state.commands_done, state.failures = state.commands_done + 1, 0
            elif code == OVERRAN and seconds == step.most_s:  # all that it may take: another start is no longer
                state.fail()
                return
            elif code == OVERRAN or code in step.cut:
                return
            elif code not in step.again:
                state.fail()

    def _command(self, step: Step, gpu: str, seconds: float) -> int:
        """One command's exit code; it and what it started are ended when it overruns."""
        state, folder = self.states[step.name], self.work / step.name
        folder.mkdir(parents=True, exist_ok=True)
        words = [
            word.replace("{dir}", str(folder)).replace("{left}", f"{seconds:.0f}")
            for word in step.commands[state.commands_done]
        ]
        self._say(f"GPU {gpu}: {step.name} {state.commands_done + 1}/{len(step.commands)}, for {seconds:.0f} s")
        log = folder / "output.log"
        with log.open("ab") as sink:
            child = subprocess.Popen(
                [*_cores(pinned=step.pinned), *words],
                cwd=ROOT,
                env=environment(CUDA_VISIBLE_DEVICES=gpu),
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
            try:
                code = child.wait(seconds + _GRACE_S)
            except subprocess.TimeoutExpired:
                code = OVERRAN
            finally:
                _end(child)
        state.said = last_line(log)
        self._say(f"GPU {gpu}: {step.name}: exit {code}: {state.said}")
        return code

    def _save(self) -> None:
        text = json.dumps({name: vars(state) for name, state in self.states.items()}, indent=1)
        for path in (self._book, self.out / self._book.name):
            path.write_text(text + "\n")

    def _say(self, text: str) -> None:
        print(f"[{self.left_s:4.0f} s left] {text}", flush=True)


def _cores(*, pinned: bool) -> list[str]:
    """What binds a command to the last core, or else to the others: compilers of other steps keep off that one."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = cores[-1:] if pinned else cores[:-1]
    return ["taskset", "-c", ",".join(map(str, chosen))] if chosen and _can_bind(cores[-1]) else []


@cache
def _can_bind(core: int) -> bool:
    """Whether a command can be bound to a core here: not every machine has the tool, or allows it."""
    if shutil.which("taskset") is None:
        return False
    return subprocess.run(["taskset", "-c", str(core), "true"], capture_output=True, check=False).returncode == 0


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a command and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def keep(step: Step, folder: Path, to: Path) -> None:
    """Copies what a step left."""
    for path in sorted({path for pattern in step.kept for path in folder.rglob(pattern) if path.is_file()}):
        target = to / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def last_line(log: Path) -> str:
    """The end of a log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-200:] if lines else "nothing said"


def steps() -> tuple[Step, ...]:
    """What is measured, in order of weight."""
    energy = _script("energy_campaign.py", "{dir}", "--limit", "{left}", "--resume", "--work", "{dir}/work")
    gate = _script("aa_cells.py", "--parts", "{dir}/parts", "--out", "{dir}", "--limit", "{left}")
    cost = _script("counters_cost.py", "{dir}", "--seconds", "150")
    outputs = _script("merged_models.py", "{dir}/merged-models.json", "--limit", "{left}")
    recordings = _script("attribution.py", "{dir}", "--seconds", "{left}", "--parts", RECORDINGS)
    beside_ncu = _script("attribution.py", "{dir}", "--seconds", "{left}", "--ncu-seconds", "25")
    blocks = _script("merged_campaign.py", "{dir}", "--seconds", "{left}", "--begin", str(BLOCKS))
    return (
        *(Step(f"networks-{number}", (_networks(names),), _NO_END_S, 90.0) for number, names in enumerate(NETWORKS, 1)),
        Step("outputs", (outputs,), _NO_END_S, 60.0, again=(_CUDA_ERROR,)),
        Step("kernels", (_tests("test_merged.py"),), 450.0, 60.0, cut=()),
        Step("blocks", (blocks,), 560.0, 60.0),
        Step("first-look", (_bench(), _tests("test_attribution.py")), 500.0, 60.0, cut=()),
        Step("attribution", (recordings, beside_ncu), _NO_END_S, 60.0),
        Step("tandem", (_TURNS,), 180.0, 90.0, pinned=True, cut=()),
        Step("counters-cost", (cost,), 280.0, 160.0, pinned=True, ends=(_NOT_TOLD,)),
        Step("counters", (_training("timing,power"), _training("timing,power,counters")), 200.0, 70.0, cut=()),
        Step("gate", (gate,), _NO_END_S, 60.0),
        Step("energy", (energy,), _NO_END_S, 90.0),
    )


BLOCKS = ROOT / "results" / "nvidia-h200" / "merged-blocks.json"
"""Blocks that are measured; what checks their kernels goes on behind them."""
MERGED = ROOT / "results" / "nvidia-h200" / "merged.json"
"""Networks whose rows are not measured again."""
RECORDINGS = "resnet50-record,mobilenet_v2-record,bert_base-record"
"""What the two instruments cost; then the comparison with Nsight Compute."""
NETWORKS = (
    ("mobilenet_v2", "resnet50", "unet", "darknet_53", "vgg16", "resnet3d_34", "inception_v4"),
    ("efficientnet_b0", "convnext_tiny", "drn_26", "deepcam"),
)
"""In two steps, for two GPUs, of about as many rows that are left."""


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, f"tests/gpu/{name}", *arguments)


def _tests(name: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "pytest", "-q", f"tests/gpu/{name}")


def _bench(*arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "pytest", "--bench", "--bench-anonymize", "--bench-results", "{dir}", *arguments)


def _training(collect: str) -> tuple[str, ...]:
    """The sweep that question 2 is answered with, with or without counters."""
    return _bench(
        "bench_training/bench_zoo.py::bench_training", "--bench-models", "resnet50", "--bench-batch-sizes", "8:1024",
        "--bench-dtypes", "bf16", "--bench-modes", "eager", "--bench-collect", collect,
    )  # fmt: skip


def _networks(names: Sequence[str]) -> tuple[str, ...]:
    """All rivals of some networks, those that are measured already left out."""
    chosen = ("--networks", ",".join(names), "--gpus", "1")
    begun = ("--begin", str(MERGED)) if MERGED.exists() else ()
    return _script("merged_networks.py", "{dir}", "--seconds", "{left}", *chosen, *begun)


_TURNS = _bench("bench_inference/bench_tandem.py::bench_issue_in_turns", "--bench-collect", "timing")
"""What question 1 still lacks: issue and step time over batches, in turns, and the busy time of the same process."""


def main(given: tuple[Step, ...] | None = None, arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--limit", type=float, default=580.0, metavar="S", help="for this command (580)")
    parser.add_argument("--work", type=Path, default=WORK, metavar="WORK", help=f"where files grow ({WORK})")
    parser.add_argument("--steps", default="", metavar="A,B", help="these alone, in this order")
    parser.add_argument("--gpus", default="", metavar="GPU,GPU", help="UUIDs or indices, these alone (all)")
    parser.add_argument("--list", action="store_true", help="name the steps, and how far each came")
    args = parser.parse_args(arguments)
    known = {step.name: step for step in (steps() if given is None else given)}
    chosen = [name for name in args.steps.split(",") if name] or list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(known)}")
    work = args.work.resolve()
    if ROOT in (work, *work.parents):
        parser.error(f"--work {work} lies in the checkout, which may be replaced between two commands")
    for folder in (work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    machine = Machine(tuple(known[name] for name in chosen), work, args.out.resolve(), args.limit)
    if args.list:
        for name, state in machine.states.items():
            print(f"{name}: {state.commands_done} of {len(known[name].commands)}, {state.took_s:.0f} s, {state.said}")
        return DONE
    return machine.run(args.gpus.split(",") if args.gpus else gpus_here())


def gpus_here() -> list[str]:
    """UUIDs of this machine's GPUs, in NVML's order."""
    from joulemark.device.nvml import Nvml

    with Nvml() as nvml:
        return [nvml.uuid_at(index) for index in range(nvml.count())]


if __name__ == "__main__":
    sys.exit(main())
