"""One run for merged execution on a GPU: numerics, blocks against all rivals with energy and bytes, compute-sanitizer.

``python tests/gpu/merged_campaign.py OUT --seconds 360`` builds all kernels first (on the processors, before the GPU is
held), then goes through its stages in order of weight, each in a process of its own with a time limit. Started again
with the same OUT it goes on where it ended: blocks that OUT/merged-blocks.json holds and stages that are done are not
repeated. At the end OUT/campaign.json says what every stage did, and the seconds of kernels are fitted anew to what was
measured (OUT/merged-model.json), each block predicted without its own points.

Many variants of each inverted residual are timed alone, which tells which kind wins where: the fastest of each family
are in the summary, all in OUT/variants/merged-probe.json, with a fit of their own beside it.
A later ``joulemark.merged_bench.refit OUT/merged-blocks.json --write`` puts the seconds into the package.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children import environment

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests" / "gpu" / "merged_kernels.py"
BLOCKS = ROOT / "bench_inference" / "bench_merged_micro.py"
PROBE = ROOT / "tests" / "gpu" / "merged_blocks_probe.py"
SAMPLE = (
    r"^numerics (planes|planes_warpgroup|stream_warpgroup|wide|memoized|inverted|bottleneck"
    r"|chain .*(tf32|fp32)|stream .*bf16)"
)
"""What of the numerics was not run on a GPU before, and some of what was."""
SANITIZED = (
    r"^numerics (chain|stream|stream_warpgroup|memoized|wide) 2d_16_16_16_bf16"
    r"|^numerics planes(_warpgroup)? 3d_16_16_16_bf16"
    r"|^numerics (inverted|bottleneck).*_bf16"
)
_LAST_S = 12.0
"""Kept for the fit at the end."""

_GRACE_S = 5.0

NO_TIME, ENDED = "time was up", "it was ended"
_CUT, _CUDA_ERROR = 3, 4
"""Exit codes of a command that goes on where it ended when it is started again."""


@dataclass(frozen=True)
class Stage:
    """One process of the campaign.

    Args:
        name: unique.
        command: what is run; ``{left}`` stands for the seconds that it may take.
        most_s: seconds at most.
        repeats: whether it runs again although it has ended well: it knows itself what is done.
        missing: why it cannot be run; None where it can.
    """

    name: str
    command: tuple[str, ...]
    most_s: float
    repeats: bool = False
    missing: str | None = None


def stages(out: Path, kernels: int) -> list[Stage]:
    """All stages, in order."""
    python = sys.executable
    blocks = (python, str(BLOCKS), "--out", str(out / "merged-blocks.json"), "--kernels", str(kernels))
    short = ("--rounds", "15", "--sustain", "1.0", "--sustain-best", "2", "--merge-budget", "8")
    variants = (python, str(PROBE), str(out / "variants"), "--only", "^ir.*b64$", "--most", "8", "--kernels-only")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    checks = (python, str(KERNELS), "--only", SANITIZED, "--start", "0")
    why = None if sanitizer else "compute-sanitizer is not on this machine"
    tools = [
        Stage(tool, (sanitizer or "", "--tool", tool, "--error-exitcode", "9", *checks), 70, missing=why)
        for tool in ("memcheck", "racecheck")
    ]
    return [
        Stage("build blocks", (*blocks, "--build", "sm_90a"), 60),
        Stage("build numerics", (python, str(KERNELS), "--only", SAMPLE, "--build", "sm_90a"), 40),
        Stage("build variants", (*variants, "--build"), 60),
        Stage("numerics", (python, str(KERNELS), str(out / "numerics"), "--only", SAMPLE, "--seconds", "{left}"), 60),
        Stage("variants", (*variants, "--seconds", "{left}"), 75, repeats=True),
        Stage("blocks", (*blocks, *short, "--limit", "{left}"), 250, repeats=True),
        *tools,
        Stage("more blocks", (*blocks, *short, "--limit", "{left}"), 600, repeats=True),
    ]


Run = Callable[[Stage, tuple[str, ...], float], int | None]
"""Runs a stage's command for so many seconds; its exit code, None when it was ended."""


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
        self.done: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def go(self, planned: list[Stage]) -> None:
        """Every stage for which there is time, and the fit at the end."""
        for stage in planned:
            if self.done.get(stage.name, {}).get("code") == 0 and not stage.repeats:
                continue
            if stage.missing is not None:
                self._keep(stage, {"missing": stage.missing})
                continue
            left = min(stage.most_s, self.end - _LAST_S - time.monotonic())
            if left < 5:
                self._keep(stage, {"missing": NO_TIME})
                continue
            begin = time.monotonic()
            code = self.run(stage, tuple(part.replace("{left}", f"{left - 4:.0f}") for part in stage.command), left)
            took_s = round(time.monotonic() - begin, 1)
            self._keep(stage, {"code": code, "took_s": took_s, **({} if code is not None else {"missing": ENDED})})

    def is_left(self, stage: Stage) -> bool:
        """Whether another call could bring more of a stage."""
        what = self.done.get(stage.name, {})
        return what.get("missing") in (NO_TIME, ENDED) or what.get("code") in (_CUT, _CUDA_ERROR)

    def _keep(self, stage: Stage, what: dict[str, Any]) -> None:
        print(f"== {stage.name}: {what}", flush=True)
        self.done[stage.name] = what
        self.path.write_text(json.dumps(self.done, indent=1) + "\n")


def end_process(child: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, so that it can say that it was at work; end it where it hangs."""
    child.terminate()
    try:
        child.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def run_here(out: Path) -> Run:
    """Commands as processes whose words go to OUT/<stage>.log."""

    def run(stage: Stage, command: tuple[str, ...], left: float) -> int | None:
        variables = environment()
        for name, folder in (("JOULEMARK_KERNEL_CACHE", "kernels"), ("JOULEMARK_MERGED_CACHE", "merged-cache")):
            variables.setdefault(name, f"/var/tmp/joulemark-{folder}")
        with (out / f"{stage.name.replace(' ', '-')}.log").open("a") as log:
            child = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
            try:
                return child.wait(timeout=left)
            except subprocess.TimeoutExpired:
                end_process(child)
                return None

    return run


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
        lines += [line for line in variants.read_text().splitlines() if line.startswith(("ir", "WRONG"))]
    blocks = out / "merged-blocks.json"
    if blocks.exists():
        for row in json.loads(blocks.read_text())["rows"]:
            gains = {name: round(value, 2) for name, value in row["gains"].items() if isinstance(value, float)}
            lines.append(f"{row['subject']}: over {row['gains']['best_rival']} {gains}, {row['took_s']:.0f} s")
    return lines


def main() -> int:
    """Go through the stages, then fit and summarize; the exit code is 3 while some of it is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--kernels", type=int, default=6, help="that a schedule tries for a range")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    campaign, planned = (
        Campaign(options.out, options.seconds, run_here(options.out)),
        stages(options.out, options.kernels),
    )
    campaign.go(planned)
    print(*summary(options.out), sep="\n", flush=True)
    for found in (options.out / "merged-blocks.json", options.out / "variants" / "merged-probe.json"):
        if found.exists():
            refit = ("-m", "joulemark.merged_bench.refit", str(found), "--out", str(found.parent / "merged-model.json"))
            subprocess.run([sys.executable, *refit], env=environment(), check=False)
    left = [
        stage.name for stage in planned if stage.name != "blocks" and campaign.is_left(stage)
    ]  # "more blocks" goes on
    return _CUT if left else 0


if __name__ == "__main__":
    sys.exit(main())
