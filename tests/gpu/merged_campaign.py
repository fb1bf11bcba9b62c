"""One run for merged execution on GPUs: blocks against all rivals with energy and bytes first, then what checks them.

``python tests/gpu/merged_campaign.py OUT --seconds 800`` measures the blocks of TABLE, then of FIRST, while processors
build the kernels that they try, and goes on with numerics, variants and compute-sanitizer while there is time; each
stage is a process of its own with a time limit: all blocks are one, for to start compilers takes 20 s. On a machine of
several GPUs each takes its share of the blocks. ``--begin results/nvidia-h200/merged-blocks.json`` goes on with a file
from elsewhere, and ``--again NAMES`` measures some of its blocks once more, first of all.
Started again with the same OUT it goes on where it ended: blocks that OUT/merged-blocks.json holds and stages that are
done are not repeated, and a block of which a kernel has left CUDA unusable is begun again without that kernel. At the
end OUT/campaign.json says what every stage did, and the seconds of kernels are fitted anew to what was measured
(OUT/merged-model.json), each block predicted without its own points.

Many variants of each inverted residual, and of the fronts of EfficientNet's, are timed alone, which tells which kind
wins where: the fastest of each family are in the summary, all in OUT/variants/merged-probe.json, with a fit of their
own beside it.
A later ``joulemark.merged_bench.refit OUT/merged-blocks.json --write`` puts the seconds into the package.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from children import compilers, end_process, environment

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests" / "gpu" / "merged_kernels.py"
BLOCKS = ROOT / "bench_inference" / "bench_merged_micro.py"
JOIN = ROOT / "bench_inference" / "bench_merged.py"
PROBE = ROOT / "tests" / "gpu" / "merged_blocks_probe.py"
TABLE = (
    "inverted-32-192-32-s1-56-b64", "chain-4x16-1024-b8", "chain-2x32-512-b16", "bottleneck-256-64-56-b64",
    "chain3d-2x16-128-b1", "inverted-16-96-16-s1-112-b64", "inverted-64-384-64-s1-56-b64", "chain-3x16-224-b64",
    "chain-2x16-1024-b8", "chain-4x16-512-b1", "chain-4x32-512-b16", "chain-3x32-224-b64", "chain-2x64-224-b64",
    "chain-2x64-56-b64", "chain-2x64-56-b1", "bottleneck-256-64-56-b1",
)  # fmt: skip
"""Those of the study, one of each kind that has a bar to reach ahead; each schedule is measured by itself here."""
FIRST = (
    "inverted", "inverted-s2", "bottleneck-256-64-56-b32", "chain3d-16-b1", "chain3d-32", "chain-32", "chain-16",
)  # fmt: skip
"""What comes next, padded alone of the schedules by itself: those of kinds with a bar first."""
SAMPLE = (
    r"^numerics (expand_depthwise|planes|planes_warpgroup|stream_warpgroup|stem|wide|memoized|inverted|bottleneck"
    r"|chain .*(tf32|fp32)|stream .*bf16)"
)
"""What of the numerics was not run on a GPU before, and some of what was."""
SANITIZED = (
    r"^numerics (chain|stream_warpgroup|memoized|wide) 2d_16_16_16_bf16 (?!.* adds behind)"
    r"|^numerics stream 2d_16_16_16_bf16 Plan\(width=32, rows=13,"
    r"|^numerics planes(_warpgroup)? 3d_16_16_16_bf16"
    r"|^numerics expand_depthwise 2d_16_96_96_bf16"
    r"|^numerics inverted.* 2d_32_192_192_32_bf16"
    r"|^numerics inverted_residual_warpgroup 2d_160_960_960_320_bf16 .*groups=2, halves=True, early=True"
    r"|^numerics bottleneck.*_bf16"
    r"|^numerics stem_warpgroup .*_bf16 .* on (2x40x50|2x9x40x61|3x61x101)$"
)
"""Some of each family, clusters and early launches among them: a check takes about 3 s."""
RACED = (
    r"(?!.* adds (behind|from))(?:"
    r"^numerics chain 2d_16_16_16_bf16|^numerics stream 2d_16_16_16_bf16 Plan\(width=32, rows=13,"
    r"|^numerics (memoized|wide) 2d_16_16_16_bf16|^numerics planes(_warpgroup)? 3d_16_16_16_bf16"
    r"|^numerics inverted.* 2d_32_192_192_32_bf16 (?!.*(early=True|groups=[234], halves=False))"
    r"|^numerics bottleneck.* 2d_256_64_64_256_bf16"
    r"|^numerics expand_depthwise 2d_16_96_96_bf16 .*narrow=True|^numerics stem_warpgroup .*_bf16 .* on 2x40x50$"
    r")"
)
"""Of those one or two of each family, on small inputs: a race check takes a hundred times as long as a run."""
_BARRIERS = ("--num-cuda-barriers", "256")
"""Of a block, at most: the tool finds no number in what NVRTC compiles; what it does not follow it calls a race."""
_LAST_S = 12.0
"""Kept for the fit at the end."""
_NO_END_S = 1e6
_STARTS = 4
"""Of a command, at most, that a CUDA error ends."""


NO_TIME, ENDED = "time was up", "it was ended"
_CUT, _CUDA_ERROR = 3, 4
"""Exit codes of a command that goes on where it ended when it is started again."""


@dataclass(frozen=True)
class Stage:
    """One step of the campaign.

    Args:
        name: unique.
        commands: what is run, each on a GPU of its own at the same time; ``{left}`` stands for the seconds that each
            may take.
        most_s: seconds at most.
        repeats: whether it runs again although it has ended well: it knows itself what is done.
        beside: whether the next stage begins at once, not when this one has ended.
        missing: why it cannot be run; None where it can.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    most_s: float
    repeats: bool = False
    beside: bool = False
    missing: str | None = None


def part_of(out: Path, number: int, gpus: int) -> Path:
    """The file of one GPU's blocks."""
    return out / "merged-blocks.json" if gpus == 1 else out / "parts" / f"blocks-{number + 1}of{gpus}.json"


def stages(out: Path, kernels: int, gpus: int = 1, again: str = "") -> list[Stage]:
    """All stages, in order.

    Args:
        out: folder.
        kernels: that a schedule tries for a range.
        gpus: of this machine.
        again: blocks to measure once more, separated by commas.
    """
    python = sys.executable
    first = ",".join(filter(None, (again, *TABLE, *FIRST)))
    blocks = (python, str(BLOCKS), "--kernels", str(kernels), "--first", first, "--by-schedule", ",".join(TABLE))
    short = (
        "--rounds",
        "15",
        "--sustain",
        "2.2",
        "--sustain-best",
        "1",
        "--unmerged-bursts-only",
        "--merge-budget",
        "8",
    )
    measured = tuple(
        (*blocks, "--out", str(part_of(out, n, gpus)), "--share", f"{n + 1}/{gpus}", *short, "--limit", "{left}")
        for n in range(gpus)
    )
    marked = tuple(
        (python, str(BLOCKS), "--out", str(part_of(out, n, gpus)), "--again", again) for n in range(gpus) if again
    )
    variants = (
        python,
        str(PROBE),
        str(out / "variants"),
        "--only",
        "^(front|ir).*b64$",
        "--most",
        "8",
        "--kernels-only",
    )
    numerics = (python, str(KERNELS), "--only", SAMPLE)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    checks = (("memcheck", SANITIZED, (), 100.0), ("racecheck", RACED, _BARRIERS, 200.0))
    why = None if sanitizer else "compute-sanitizer is not on this machine"
    told = ("--error-exitcode", "9", "--print-limit", "20", python, str(KERNELS), "--start", "0", "--only")
    tools = [
        Stage(tool, ((sanitizer or "", "--tool", tool, *more, *told, pattern),), most_s, missing=why)
        for tool, pattern, more, most_s in checks
    ]
    build = ("nice", *blocks, "--out", str(part_of(out, 0, gpus)), "--build", "sm_90a")
    return [
        *([Stage(f"again {again}", marked, 60)] if again else []),
        # What the first block lacks it builds itself; the rounds are replays of graphs, which no host disturbs.
        Stage("build blocks", (build,), 150, beside=True),
        Stage("blocks", measured, _NO_END_S, repeats=bool(again)),
        Stage("build numerics", ((*numerics, "--build", "sm_90a"),), 40),
        Stage("numerics", ((*numerics[:2], str(out / "numerics"), *numerics[2:], "--seconds", "{left}"),), 60),
        Stage("build variants", ((*variants, "--build"),), 60),
        Stage("variants", ((*variants, "--seconds", "{left}"),), 75, repeats=True),
        *tools,
    ]


Run = Callable[[str, tuple[str, ...], int, float], int | None]
"""Runs a command, of a log by name, on a GPU by number for so many seconds; its exit code, None when it was ended."""


class Campaign:
    """What was done so far, and time.

    Args:
        out: folder.
        seconds: of the whole run.
        run: runs a command.
    """

    def __init__(self, out: Path, seconds: float, run: Run) -> None:
        self.out, self.run = out, run
        self.end = time.monotonic() + seconds
        self.path = out / "campaign.json"
        self._kept = Lock()
        self.done: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def go(self, planned: list[Stage]) -> None:
        """Every stage for which there is time."""
        with ThreadPoolExecutor() as beside:
            for stage in planned:
                if self.done.get(stage.name, {}).get("code") == 0 and not stage.repeats:
                    continue
                end = min(time.monotonic() + stage.most_s, self.end - _LAST_S)
                if stage.missing is not None:
                    self._keep(stage, {"missing": stage.missing})
                elif end - time.monotonic() < 5:
                    self._keep(stage, {"missing": NO_TIME})
                elif stage.beside:
                    beside.submit(self._run_all, stage, end)
                else:
                    self._run_all(stage, end)

    def _run_all(self, stage: Stage, end: float) -> None:
        """All commands of a stage at once."""
        begin = time.monotonic()
        with ThreadPoolExecutor(len(stage.commands)) as pool:
            codes = list(pool.map(partial(self._run, stage, end), range(len(stage.commands))))
        code = None if None in codes else max(one for one in codes if one is not None)
        took_s = round(time.monotonic() - begin, 1)
        self._keep(stage, {"code": code, "took_s": took_s, **({} if code is not None else {"missing": ENDED})})

    def _run(self, stage: Stage, end: float, gpu: int) -> int | None:
        """One command; begun again after a CUDA error, since its file says which kernel is to be left out."""
        name = stage.name if len(stage.commands) == 1 else f"{stage.name} {gpu}"
        code: int | None = _CUDA_ERROR
        for _ in range(_STARTS):
            left = end - time.monotonic()
            if code != _CUDA_ERROR or left < 5:
                break
            command = tuple(part.replace("{left}", f"{left - 4:.0f}") for part in stage.commands[gpu])
            code = self.run(name, command, gpu, left)
        return code

    def is_left(self, stage: Stage) -> bool:
        """Whether another call could bring more of a stage."""
        what = self.done.get(stage.name, {})
        return what.get("missing") in (NO_TIME, ENDED) or what.get("code") in (_CUT, _CUDA_ERROR)

    def _keep(self, stage: Stage, what: dict[str, Any]) -> None:
        print(f"== {stage.name}: {what}", flush=True)
        with self._kept:
            self.done[stage.name] = what
            self.path.write_text(json.dumps(self.done, indent=1) + "\n")


def run_here(out: Path, gpus: int = 1) -> Run:
    """Commands as processes that see one GPU each, share the processors, and whose words go to OUT/<name>.log."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(one) for one in range(gpus)]

    def run(name: str, command: tuple[str, ...], gpu: int, left: float) -> int | None:
        variables = environment(CUDA_VISIBLE_DEVICES=names[gpu], **compilers())
        if gpus > 1:
            share = max(2, len(os.sched_getaffinity(0)) // gpus)
            variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
        with (out / f"{name.replace(' ', '-')}.log").open("a") as log:
            child = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
            try:
                return child.wait(timeout=left)
            except subprocess.TimeoutExpired:
                end_process(child)
                return None

    return run


def begin_parts(out: Path, gpus: int, earlier: Path | None = None) -> None:
    """What earlier runs have measured is there for every GPU; ``earlier`` where OUT holds nothing of its own yet."""
    whole = out / "merged-blocks.json"
    if earlier is not None and not whole.exists():
        shutil.copyfile(earlier, whole)
    for part in (part_of(out, number, gpus) for number in range(gpus)):
        part.parent.mkdir(parents=True, exist_ok=True)
        if part != whole and whole.exists():
            shutil.copyfile(whole, part)


def join_parts(out: Path, gpus: int) -> None:
    """The files of all GPUs as one."""
    parts = [str(one) for one in (part_of(out, number, gpus) for number in range(gpus)) if one.exists()]
    if gpus > 1 and parts:
        command = [sys.executable, str(JOIN), "join", str(out / "merged-blocks.json"), *parts]
        subprocess.run(command, env=environment(), check=False)


def summary(out: Path) -> list[str]:
    """What was found, in lines: wrong kernels, gains per block, the model's errors."""
    lines = []
    numerics = out / "numerics" / "merged-kernels.json"
    if numerics.exists():
        records = json.loads(numerics.read_text())["records"]
        wrong = [one for one in records if not one.get("ok")]
        lines.append(f"numerics: {len(records) - len(wrong)} of {len(records)} within limits")
        lines += [f"  {one['label']}: {one.get('failed', one.get('error'))}"[:200] for one in wrong]
    variants = out / "variants.log"
    if variants.exists():
        lines += [line for line in variants.read_text().splitlines() if line.startswith(("front", "ir", "WRONG"))]
    blocks = out / "merged-blocks.json"
    if blocks.exists():
        for row in json.loads(blocks.read_text())["rows"]:
            gains = {name: round(value, 2) for name, value in row["gains"].items() if isinstance(value, float)}
            lines.append(f"{row['subject']}: over {row['gains']['best_rival']} {gains}, {row['took_s']:.0f} s")
    return lines


def refit(out: Path) -> None:
    """The seconds of kernels fitted to what was measured, beside it."""
    for found in (out / "merged-blocks.json", out / "variants" / "merged-probe.json"):
        if found.exists():
            words = ("-m", "joulemark.merged_bench.refit", str(found), "--out", str(found.parent / "merged-model.json"))
            subprocess.run([sys.executable, *words], env=environment(), check=False)


def main() -> int:
    """Go through the stages, then fit and summarize; the exit code is 3 while some of it is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--kernels", type=int, default=3, help="that a schedule tries for a range")
    parser.add_argument("--gpus", type=int, help="by default all that are visible")
    parser.add_argument("--begin", type=Path, metavar="F.json", help="blocks that are measured; OUT goes on with them")
    parser.add_argument("--again", default="", metavar="NAMES", help="of those blocks, to measure once more")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = options.gpus
    if gpus is None:
        import torch

        gpus = max(1, torch.cuda.device_count())
    begin_parts(options.out, gpus, options.begin)
    campaign = Campaign(options.out, options.seconds, run_here(options.out, gpus))
    planned = stages(options.out, options.kernels, gpus, options.again)
    campaign.go(planned)
    join_parts(options.out, gpus)
    print(*summary(options.out), sep="\n", flush=True)
    refit(options.out)
    return _CUT if any(campaign.is_left(stage) for stage in planned) else 0


if __name__ == "__main__":
    sys.exit(main())
