"""All networks against all rivals, on one GPU or on several of a machine at once.

    python tests/gpu/merged_networks.py OUT --seconds 1650   # what matters most comes first; again to go on
    python tests/gpu/merged_networks.py OUT --seconds 560    # and so on, where one start may not take longer

Each job is a command of its own, ``bench_merged.py`` for one network and a group of batches, with its part of the
result in OUT/parts; jobs wait in order of weight for the next free GPU: all networks in the first group, those with a
bar of their own in the others, then all else, and at the very end what torch itself may fail at. Started again with the
same OUT it goes on: what the parts hold is not measured again. At the end the parts are joined to OUT/merged.json and
shown. ``--batches`` are groups apart by spaces: "32,128 1" measures all networks at 32 and 128 first, one process for
both, so that it starts, and its compilers do, once. Compilers' and our own caches are kept beside, so that a job that
is begun again finds what it has compiled.

While a job has the GPU, the next one's process gets ready beside it: its imports, compilers' processes and weights
need none. A job begins where there is time for a row with a compiler that tunes; what has less waits for the next
start. XLA has its turn where BrickDL's table has figures to stand beside. What follows the script's own options goes to
``bench_merged.py``. Ended by SIGTERM or Ctrl-C it ends the commands too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any, Protocol

from children import compilers, end_process, environment

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from joulemark.errors import ConfigurationError  # noqa: E402
from joulemark.merged_bench.networks import BARS  # noqa: E402
from joulemark.merged_bench.rows import is_whole, read, write  # noqa: E402

SCRIPT = ROOT / "bench_inference" / "bench_merged.py"
ORDER = (
    "mobilenet_v2", "efficientnet_b0", "resnet50", "convnext_tiny", "unet", "vgg16", "darknet_53", "drn_26",
    "resnet3d_34", "deepcam", "inception_v4",
)  # fmt: skip
"""Networks with a bar of their own first, those whose compilers take longest last."""
RIVALS = ("merged", "eager", "fused", "jit", "compile", "compile_default", "tensorrt", "layerwise")
WITH_XLA = ("resnet50", "vgg16")
RIVALS_WITH_XLA = (*RIVALS[:-1], "xla", RIVALS[-1])
"""What is no rival comes last: the time that merging layer by layer takes, up to a whole budget, costs no rival."""
SHORT = ("--rounds", "15", "--sustain", "2.0", "--sustain-best", "1")
LARGE = {("unet", 128), ("deepcam", 128)}
"""Network and batch with tensors of more than 2³¹ elements, at which torch and cuDNN may fail (pytorch issue 117736):
they come last, in processes of their own."""
LARGE_RIVALS = (
    "merged",
    "compile",
    "compile_default",
    *(one for one in RIVALS if "compile" not in one and one != "merged"),
)
"""In this order a compiler that tunes still has the memory that the others' graphs will take."""
_CUDA_ERROR = 4
_WHOLE_S = 150.0
"""Of a row, at least, with the start of its process: no job begins with less."""
_FOR_OTHERS_S = 90.0
"""Of it, for all but the rival that is tuned."""
_TUNING_S = 180.0
"""Most that a rival may take to be built."""
_STARTING_S = 20.0
"""Of a job, until its clock runs, and from its last row to its end."""
_READY_S, _MERGING_S = 26.0, 45.0
"""Of a job, until it is ready, and then while its processors are its own, for its time of merging is a result. After
that, while its rival is compiled and well before its bursts (67 s after it is ready at the earliest, on an H200), the
next one gets ready."""
_WORKERS = 32
"""Processes of torch's compiler, at most: as many as it starts by itself."""


@dataclass(frozen=True)
class Job:
    """One network and the batches that one process measures.

    Args:
        network: of the zoo.
        batches: as the command takes them.
    """

    network: str
    batches: str

    @property
    def name(self) -> str:
        """Of its part and its log."""
        return f"{self.network}-b{self.batches.replace(',', '-')}"

    @property
    def large(self) -> bool:
        """Whether it is one of :data:`LARGE`, which have their processes for themselves."""
        return any((self.network, int(batch)) in LARGE for batch in self.batches.split(","))

    @property
    def subjects(self) -> set[str]:
        """Of its rows."""
        return {f"{self.network}-b{batch}" for batch in self.batches.split(",")}


class Command(Protocol):
    """A job's command: it gets ready without a GPU, then waits."""

    def go(self, limits: Sequence[str]) -> None:
        """The GPU is its own from now on, for so long."""

    def code(self, seconds: float) -> int | None:
        """Its exit code; None where it has not ended within so many seconds."""

    def end(self) -> None:
        """End it, if it has not."""


Begin = Callable[[Job, tuple[str, ...], int], Command]
"""Starts a job's command on a GPU by its number."""


def jobs(networks: Sequence[str], groups: str) -> list[Job]:
    """All jobs, in the order in which they are begun."""
    first, *others = ([int(one) for one in group.split(",")] for group in groups.split())
    barred = [one for one in networks if one in BARS]
    rest = [one for one in networks if one not in BARS]
    ordered = [(network, first) for network in networks]
    ordered += [(network, batches) for some in (barred, rest) for batches in others for network in some]
    usual = [(network, [one for one in batches if (network, one) not in LARGE]) for network, batches in ordered]
    large = [(network, [one]) for network, batches in ordered for one in batches if (network, one) in LARGE]
    return [Job(network, ",".join(map(str, batches))) for network, batches in (*usual, *large) if batches]


def command_of(job: Job, out: Path, more: Sequence[str]) -> tuple[str, ...]:
    """What is run for a job, as soon as it is told its limits."""
    rivals = LARGE_RIVALS if job.large else RIVALS_WITH_XLA if job.network in WITH_XLA else RIVALS
    what = ("--network", job.network, "--batches", job.batches, "--out", str(part_of(job, out)))
    return (sys.executable, str(SCRIPT), *what, "--rivals", ",".join(rivals), *SHORT, *more, "--wait")


def limits_of(seconds: float) -> tuple[str, ...]:
    """What a command is told that may take so many seconds."""
    tuning = min(_TUNING_S, max(_WHOLE_S, seconds) - _FOR_OTHERS_S)
    return ("--limit", f"{seconds - _STARTING_S:.0f}", "--rival-limit", f"{tuning:.0f}")


def part_of(job: Job, out: Path) -> Path:
    """The file of a job's rows."""
    return out / "parts" / f"{job.name}.json"


def whole_rows(part: Path) -> dict[str, dict[str, Any]]:
    """Rows of a file that stay as they are, by their subjects; none where there is no file."""
    return {row["subject"]: row for row in read(part)["rows"] if is_whole(row)} if part.exists() else {}


def done(job: Job, out: Path) -> bool:
    """Whether a job's part holds a whole row for each of its batches: a process to find out takes a GPU's time."""
    return job.subjects <= whole_rows(part_of(job, out)).keys()


def begin_parts(planned: Sequence[Job], out: Path, earlier: Path, again: Sequence[str]) -> None:
    """Take whole rows of an earlier file over into the parts of the jobs that ask for them and have none.

    Args:
        planned: jobs.
        out: folder of the result.
        earlier: a file of networks.
        again: subjects of its rows that are to be measured once more.

    Raises:
        ConfigurationError: the file holds no rows, or none of a subject in ``again``.
    """
    document, rows = read(earlier), whole_rows(earlier)
    for name in again:
        if not any(row["subject"] == name for row in document["rows"]):
            raise ConfigurationError(f"{earlier} holds no row of {name!r} to measure again", "leave it out")
        rows.pop(name, None)
    for job in planned:
        part = part_of(job, out)
        wanted = job.subjects - whole_rows(part).keys()
        taken = [{"gpu_uuid": document["gpu_uuid"], **row} for name, row in rows.items() if name in wanted]
        if taken:
            begun = read(part) if part.exists() else {**document, "rows": [], "failed": {}}
            # A row that was cut gives way to a whole one.
            kept = [row for row in begun["rows"] if row["subject"] not in rows or row["subject"] not in wanted]
            write(part, {**begun, "rows": [*kept, *taken]})


class Lane:
    """One GPU: job after job until there is none, or no time.

    Args:
        gpu: its number.
        waiting: jobs that nobody has begun.
        out: folder of the result.
        end: on ``time.monotonic``.
        begin: starts a job's command.
        more: arguments of it.
        gpus: that take from the same jobs.
    """

    def __init__(
        self, gpu: int, waiting: Queue[Job], out: Path, end: float, begin: Begin, more: Sequence[str], gpus: int = 1
    ) -> None:
        self.gpu, self.waiting, self.out, self.end = gpu, waiting, out, end
        self.begin, self.more, self.gpus = begin, more, gpus
        self.ahead: tuple[Job, Command] | None = None

    @property
    def left_s(self) -> float:
        """Until time is up."""
        return self.end - time.monotonic()

    def run(self) -> None:
        """All jobs."""
        while self.left_s > _WHOLE_S and (begun := self.ahead or self._next()) is not None:
            alone_s = _MERGING_S + (_READY_S if self.ahead is None else 0.0)
            self.ahead = None
            job, command = begun
            begin = time.monotonic()
            code = self._code(command, alone_s)
            if code == _CUDA_ERROR and self.left_s > _WHOLE_S:
                # The part knows which rival it was; a new process goes on behind it.
                code = self._code(self._begun(job), _MERGING_S + _READY_S)
            print(f"== {job.name} on GPU {self.gpu}: {code}, {time.monotonic() - begin:.0f} s", flush=True)
        if self.ahead is not None:
            self.ahead[1].end()

    def _next(self) -> tuple[Job, Command] | None:
        try:
            job = self.waiting.get_nowait()
        except Empty:
            return None
        return job, self._begun(job)

    def _begun(self, job: Job) -> Command:
        return self.begin(job, command_of(job, self.out, self.more), self.gpu)

    def _code(self, command: Command, alone_s: float) -> int | None:
        """Its exit code, None when it was ended; after the seconds that it has for itself the next job gets ready."""
        command.go(limits_of(self.left_s))
        code = command.code(min(alone_s, self.left_s))
        if code is None and self.ahead is None and self.left_s > 2 * _WHOLE_S and self.waiting.qsize() >= self.gpus:
            self.ahead = self._next()  # the last jobs are left to who is free first
        if code is None and (code := command.code(max(self.left_s, 0.0))) is None:
            command.end()
        return code


class Commands:
    """Commands as processes that see one GPU each and share the processors.

    Args:
        out: folder of the result.
        gpus: of the machine, that have a job at a time each.
    """

    def __init__(self, out: Path, gpus: int) -> None:
        self.out = out
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.names = visible.split(",") if visible else [str(one) for one in range(gpus)]
        cores = len(os.sched_getaffinity(0))
        # Twice its share: jobs seldom compile at the same time.
        self.threads = max(2, min(_WORKERS, cores, 2 * cores // max(gpus, 1)))
        self.running: set[Child] = set()
        self.over = Event()

    def __call__(self, job: Job, command: tuple[str, ...], gpu: int) -> Child:
        """As :data:`Begin`."""
        variables = environment(CUDA_VISIBLE_DEVICES=self.names[gpu], **compilers())
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(self.threads))
        child = Child(command, variables, self.out / "logs" / f"{job.name}.log")
        self.running.add(child)
        if self.over.is_set():
            child.end()
        return child

    def end(self) -> None:
        """End what runs; nothing goes on any more."""
        self.over.set()
        for child in list(self.running):
            child.end()


class Child:
    """As :class:`Command`, a process that takes its limits from a line of its input.

    Args:
        command: with ``--wait``.
        variables: of its environment.
        log: what it says is written behind what is there.
    """

    def __init__(self, command: tuple[str, ...], variables: Mapping[str, str], log: Path) -> None:
        with log.open("a") as words:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def go(self, limits: Sequence[str]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as words:  # who has ended says how by its code
            words.write(" ".join(limits) + "\n")

    def code(self, seconds: float) -> int | None:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        if self.process.poll() is None:
            end_process(self.process)
        if self.process.stdin is not None:
            self.process.stdin.close()


def show(out: Path) -> None:
    """Join the parts and print their tables."""
    parts = [one for one in sorted((out / "parts").glob("*.json")) if json.loads(one.read_text())["rows"]]
    if not parts:
        print("nothing was measured", flush=True)
        return
    whole = str(out / "merged.json")
    for arguments in (("join", whole, *map(str, parts)), ("table", whole)):
        subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment(), check=False)


def main() -> int:
    """All jobs for which there is time; the exit code is 3 while some are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--networks", default=",".join(ORDER))
    parser.add_argument("--batches", default="32,128 1")
    parser.add_argument("--gpus", type=int, help="by default all that are visible")
    parser.add_argument("--begin", type=Path, metavar="F.json", help="rows of it that are whole are not measured")
    parser.add_argument("--again", default="", metavar="NAMES", help="rows of that file to measure all the same")
    options, more = parser.parse_known_args()
    end = time.monotonic() + options.seconds
    for folder in ("parts", "logs"):
        (options.out / folder).mkdir(parents=True, exist_ok=True)
    gpus = options.gpus
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    planned = jobs(options.networks.split(","), options.batches)
    again = [one for one in options.again.split(",") if one]
    if again and options.begin is None:
        parser.error("--again chooses among the rows of a file: name it by --begin")
    if options.begin is not None:
        try:
            begin_parts(planned, options.out, options.begin, again)
        except ConfigurationError as error:
            parser.error(str(error))
    waiting: Queue[Job] = Queue()
    for job in planned:
        if not done(job, options.out):
            waiting.put(job)
    if gpus < 1 and not waiting.empty():
        parser.error("no GPU is visible: see joulemark env")
    begin = Commands(options.out, gpus)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lanes = [Lane(gpu, waiting, options.out, end - 15, begin, more, gpus) for gpu in range(gpus)]
    workers = [Thread(target=lane.run) for lane in lanes]
    try:
        for one in workers:
            one.start()
        for one in workers:
            one.join()
    finally:
        for lane in lanes:
            lane.end = 0.0
        begin.end()
    show(options.out)
    return 0 if all(done(job, options.out) for job in planned) else 3


if __name__ == "__main__":
    sys.exit(main())
