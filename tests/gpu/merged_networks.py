"""All networks against all rivals, on one GPU or on several of a machine at once.

    python tests/gpu/merged_networks.py OUT --seconds 1650 [--networks mobilenet_v2,resnet50] [--batches "32 128 1"]
    python tests/gpu/merged_networks.py OUT --seconds 560 --later 1090  # and so on, where one start may not take longer

Each job is a command of its own, ``bench_merged.py`` for one network and a group of batches, with its part of the
result in OUT/parts; jobs wait in order of weight for the next free GPU: all networks in the first group, those with a
bar of their own in the others, then all else. Started again with the same OUT it goes on: what the parts hold is not
measured again. At the end the parts are joined to OUT/merged.json and shown. ``--batches`` are groups apart by spaces:
"32 128 1" measures all networks at 32 first, "32,128,1" one network at all three in one process. Compilers' and our own
caches are kept beside, so that a job that is begun again finds what it has compiled.

Of the time the networks behind keep what a row takes without a compiler that tunes; what is left beyond that, such a
compiler may take, and where it is not ready by then the one that does not tune is the rival. XLA has its turn where
BrickDL's table has figures to stand beside. What follows the script's own options goes to ``bench_merged.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

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
_CUDA_ERROR = 4
_LEAST_S = 100.0
"""Of a row without a compiler that tunes: 9 until the clock runs, merging 50, the other rivals 30, measuring 11. No job
begins with less, and those that wait behind another keep as much."""
_WHOLE_S = 150.0
"""Of a row with one. Where another start follows, a job that has less left waits for it."""
_TUNING_S = (30.0, 180.0)
"""Least and most that a rival may take to be built."""
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
    first, *others = groups.split()
    barred = [one for one in networks if one in BARS]
    rest = [one for one in networks if one not in BARS]
    return [
        *(Job(network, first) for network in networks),
        *(Job(network, batches) for some in (barred, rest) for batches in others for network in some),
    ]


def given_to(job: Job, behind: Sequence[Job], left: float, later: float, gpus: int) -> float:
    """Seconds of a job: all but what those behind it in its group keep and no later start has for them.

    Args:
        job: that begins.
        behind: that wait.
        left, later: seconds of this start and of those that follow it.
        gpus: that share what waits.
    """
    kept = _LEAST_S * sum(one.batches == job.batches for one in behind) / gpus
    return min(left, max(_LEAST_S, left - max(0.0, kept - later)))


def command_of(job: Job, out: Path, seconds: float, more: Sequence[str]) -> tuple[str, ...]:
    """What is run for a job that may take so many seconds."""
    part = str(out / "parts" / f"{job.name}.json")
    rivals = (*RIVALS, "xla") if job.network in WITH_XLA else RIVALS
    what = ("--network", job.network, "--batches", job.batches, "--out", part, "--rivals", ",".join(rivals))
    least, most = _TUNING_S
    tuning = min(most, max(least, seconds - _LEAST_S))
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


def work(
    waiting: Queue[Job],
    gpu: int,
    out: Path,
    end: float,
    run: Run,
    more: Sequence[str],
    later: float = 0.0,
    gpus: int = 1,
) -> None:
    """One GPU: job after job until there is none, or no time.

    Args:
        waiting: jobs that no GPU has begun.
        gpu: its number.
        out: folder of the result.
        end: on ``time.monotonic``.
        run: runs a job.
        more: arguments of its command.
        later: seconds of the starts that follow this one.
        gpus: that take jobs from the same queue.
    """
    least = _WHOLE_S if later >= _WHOLE_S else _LEAST_S
    while (left := end - time.monotonic()) > least:
        try:
            job = waiting.get_nowait()
        except Empty:
            return
        begin = time.monotonic()
        seconds = given_to(job, list(waiting.queue), left, later, gpus)
        code = run(job, command_of(job, out, seconds, more), gpu, left)
        if code == _CUDA_ERROR and (left := end - time.monotonic()) > _LEAST_S:
            # The part knows which rival it was; a new process goes on behind it.
            code = run(job, command_of(job, out, min(seconds, left), more), gpu, left)
        print(f"== {job.name} on GPU {gpu}: {code}, {time.monotonic() - begin:.0f} s", flush=True)


def run_here(out: Path, gpus: int) -> Run:
    """Commands as processes that see one GPU each and share the processors."""
    cores = len(os.sched_getaffinity(0))

    def run(job: Job, command: tuple[str, ...], gpu: int, left: float) -> int | None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(one) for one in range(gpus)]
        variables = environment(CUDA_VISIBLE_DEVICES=names[gpu], **compilers())
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, cores // gpus)))
        with (out / "logs" / f"{job.name}.log").open("a") as log:
            child = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
            try:
                return child.wait(timeout=left)
            except subprocess.TimeoutExpired:
                end_process(child)
                return None

    return run


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
    parser.add_argument("--batches", default="32 128 1")
    parser.add_argument("--later", type=float, default=0.0, metavar="S", help="seconds of starts that follow this one")
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
    run = run_here(options.out, max(gpus, 1))
    given = (run, more, options.later, gpus)
    workers = [Thread(target=work, args=(waiting, gpu, options.out, end - 15, *given)) for gpu in range(gpus)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    show(options.out)
    return 0 if all(done(job, options.out) for job in planned) else 3


if __name__ == "__main__":
    sys.exit(main())
