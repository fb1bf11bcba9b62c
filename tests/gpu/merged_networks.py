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

A job begins where there is time for a row with a compiler that tunes; what has less waits for the next start. XLA has
its turn where BrickDL's table has figures to stand beside. What follows the script's own options goes to
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread

from children import compilers, end_process, environment

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from joulemark.merged_bench.networks import BARS  # noqa: E402
from joulemark.merged_bench.rows import is_whole  # noqa: E402

SCRIPT = ROOT / "bench_inference" / "bench_merged.py"
ORDER = (
    "mobilenet_v2", "efficientnet_b0", "resnet50", "convnext_tiny", "unet", "vgg16", "darknet_53", "drn_26",
    "resnet3d_34", "deepcam", "inception_v4",
)  # fmt: skip
"""Networks with a bar of their own first, those whose compilers take longest last."""
RIVALS = ("merged", "eager", "fused", "jit", "compile", "compile_default", "tensorrt")
WITH_XLA = ("resnet50", "vgg16")
SHORT = ("--rounds", "15", "--sustain", "2.0", "--sustain-best", "1")
LARGE = {("unet", 128), ("deepcam", 128)}
"""Network and batch with tensors of more than 2³¹ elements, at which torch and cuDNN may fail (pytorch issue 117736):
they come last, in processes of their own."""
_CUDA_ERROR = 4
_WHOLE_S = 150.0
"""Of a row, at least, with the start of its process: no job begins with less."""
_FOR_OTHERS_S = 90.0
"""Of it, for all but the rival that is tuned."""
_TUNING_S = 180.0
"""Most that a rival may take to be built."""
_STARTING_S = 20.0
"""Of a job, until its clock runs, and from its last row to its end."""


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


Run = Callable[[Job, tuple[str, ...], int, float], int | None]
"""Runs a job's command on a GPU by its number for so many seconds; its exit code, None when it was ended."""


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


def command_of(job: Job, out: Path, seconds: float, more: Sequence[str]) -> tuple[str, ...]:
    """What is run for a job that may take so many seconds."""
    part = str(out / "parts" / f"{job.name}.json")
    rivals = (*RIVALS, "xla") if job.network in WITH_XLA else RIVALS
    what = ("--network", job.network, "--batches", job.batches, "--out", part, "--rivals", ",".join(rivals))
    tuning = min(_TUNING_S, max(_WHOLE_S, seconds) - _FOR_OTHERS_S)
    limits = ("--limit", f"{seconds - _STARTING_S:.0f}", "--rival-limit", f"{tuning:.0f}")
    return (sys.executable, str(SCRIPT), *what, *limits, *SHORT, *more)


def done(job: Job, out: Path) -> bool:
    """Whether a job's part holds a whole row for each of its batches: a process to find out takes a GPU's time."""
    part = out / "parts" / f"{job.name}.json"
    if not part.exists():
        return False
    rows = json.loads(part.read_text(encoding="utf-8"))["rows"]
    there = {row["subject"] for row in rows if is_whole(row)}
    return {f"{job.network}-b{batch}" for batch in job.batches.split(",")} <= there


def work(waiting: Queue[Job], gpu: int, out: Path, end: float, run: Run, more: Sequence[str]) -> None:
    """One GPU: job after job until there is none, or no time.

    Args:
        waiting: jobs that no GPU has begun.
        gpu: its number.
        out: folder of the result.
        end: on ``time.monotonic``.
        run: runs a job.
        more: arguments of its command.
    """
    while (left := end - time.monotonic()) > _WHOLE_S:
        try:
            job = waiting.get_nowait()
        except Empty:
            return
        begin = time.monotonic()
        code = run(job, command_of(job, out, left, more), gpu, left)
        if code == _CUDA_ERROR and (left := end - time.monotonic()) > _WHOLE_S:
            # The part knows which rival it was; a new process goes on behind it.
            code = run(job, command_of(job, out, left, more), gpu, left)
        print(f"== {job.name} on GPU {gpu}: {code}, {time.monotonic() - begin:.0f} s", flush=True)


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
        self.threads = max(2, len(os.sched_getaffinity(0)) // max(gpus, 1))
        self.running: set[subprocess.Popen[bytes]] = set()
        self.over = Event()

    def __call__(self, job: Job, command: tuple[str, ...], gpu: int, left: float) -> int | None:
        """As :data:`Run`."""
        variables = environment(CUDA_VISIBLE_DEVICES=self.names[gpu], **compilers())
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(self.threads))
        with (self.out / "logs" / f"{job.name}.log").open("a") as log:
            if self.over.is_set():
                return None
            child = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
            self.running.add(child)
            try:
                return child.wait(timeout=left)
            except subprocess.TimeoutExpired:
                end_process(child)
                return None
            finally:
                self.running.discard(child)

    def end(self) -> None:
        """End what runs; nothing begins any more."""
        self.over.set()
        for child in list(self.running):
            end_process(child)


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
    options, more = parser.parse_known_args()
    end = time.monotonic() + options.seconds
    for folder in ("parts", "logs"):
        (options.out / folder).mkdir(parents=True, exist_ok=True)
    gpus = options.gpus
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    planned = jobs(options.networks.split(","), options.batches)
    waiting: Queue[Job] = Queue()
    for job in planned:
        if not done(job, options.out):
            waiting.put(job)
    run = Commands(options.out, gpus)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    workers = [Thread(target=work, args=(waiting, gpu, options.out, end - 15, run, more)) for gpu in range(gpus)]
    try:
        for one in workers:
            one.start()
        for one in workers:
            one.join()
    finally:
        run.end()
    show(options.out)
    return 0 if all(done(job, options.out) for job in planned) else 3


if __name__ == "__main__":
    sys.exit(main())
