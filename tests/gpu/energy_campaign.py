"""Calibration, held-out workloads and splits of one GPU within a given time, on one board and day.

Run: ``python tests/gpu/energy_campaign.py OUT --limit 560``, then the same with ``--resume`` until it says "complete".
What is most wanted comes first: the part of the plan that gives every line its three windows, counters of the
microbenchmarks, held-out workloads, splits, then what is left of the plan; from the first part on, what there is gives
a calibration. Each part is a process of its own, is killed when it overruns its time, and goes on where it ended. Files
grow in WORK, outside the checkout, so that they stay between two commands, and are copied to OUT all along. On another
board, begin anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from children import environment

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "joulemark" / "energy-campaign"
CALIBRATION, WORKLOADS = "nvidia-h200.json", "energy-measurements.json"
DONE, UNFINISHED, LOST, OVERRAN = 0, 3, 4, -9
_GRACE_S = 12.0
_COPY_S = 10.0
_WINDOW_S = 0.85
_STARTS = 6
_TURNS = 5
"""Of the held-out workloads before anything else comes: each ends with the counters of what it has weighed, so that a
campaign that is cut off has whole workloads."""


@dataclass(frozen=True)
class Part:
    """A part of the campaign.

    Args:
        name: of its log, and of its mark once it is done.
        command: without its limit.
        most_s: of one turn; the rest comes in a later one.
        keep: share of a turn that is kept for counters.
        least_s: below which a turn brings nothing.
    """

    name: str
    command: tuple[str, ...]
    most_s: float
    keep: float = 0.0
    least_s: float = 8.0

    def of(self, seconds: float) -> list[str]:
        """The command with its limit."""
        kept = ["--keep", f"{self.keep * seconds:.0f}"] if self.keep else []
        return [*self.command, "--limit", f"{seconds:.0f}", *kept]


def parts(work: Path, workload_window_s: float) -> tuple[Part, ...]:
    """In order of turns; a part that is done is left out of later ones."""
    joulemark = (sys.executable, "-c", "import sys; from joulemark.cli import main; sys.exit(main())")
    calibrate = (*joulemark, "calibrate", "--resume", "--out", str(work / CALIBRATION), "--window", f"{_WINDOW_S:g}")
    measure = (sys.executable, "bench_energy/measure_workloads.py", "--out", str(work / WORKLOADS))
    held_out, splits = (
        (*measure, "--window", f"{workload_window_s:g}", "--list", one) for one in ("held_out", "splits")
    )
    return (
        Part("lines", (*calibrate, "--until", "lines"), 420.0),
        Part("counts", (*calibrate, "--count"), 130.0),
        *[Part("workloads", held_out, 170.0, 0.4, 40.0)] * _TURNS,
        Part("splits", splits, 300.0, 0.4, 40.0),
        Part("windows", calibrate, 1e4),
    )


class Campaign:
    """Runs parts until time is up.

    Args:
        work: where files grow.
        out: where everything is copied.
        limit_s: for all.
    """

    def __init__(self, work: Path, out: Path, limit_s: float) -> None:
        self._work, self._out, self._end = work, out, time.monotonic() + limit_s
        self._stop = threading.Event()
        self._note = work / "done.txt"
        self._done = set(self._note.read_text().split()) if self._note.exists() else set[str]()

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return self._end - time.monotonic()

    def run(self, todo: tuple[Part, ...]) -> int:
        """All parts in turn, and again what is left while there is time."""
        copier = threading.Thread(target=self._copy_all_along)
        copier.start()
        try:
            while (
                self.left_s > min(part.least_s for part in todo) + _GRACE_S
                and not {part.name for part in todo} <= self._done
            ):
                turns = [self._turn(part) for part in todo if part.name not in self._done]
                if not any(turns):
                    break
        finally:
            self._stop.set()
            copier.join()
        missing = sorted({part.name for part in todo} - self._done)
        self._say("complete" if not missing else f"left: {', '.join(missing)}")
        return UNFINISHED if missing else DONE

    def _turn(self, part: Part) -> bool:
        """Whether another turn could bring something."""
        for start in range(_STARTS):
            seconds = min(part.most_s, self.left_s - _GRACE_S)
            if seconds < part.least_s:
                return False
            code = self._start(part, seconds)
            if code == DONE:
                self._done.add(part.name)
                self._note.write_text("\n".join(sorted(self._done)))
            if code in (DONE, UNFINISHED):
                return True
            self._say(f"{part.name} ended with {code} (start {start + 1} of {_STARTS})")
            if code == OVERRAN:  # its turn is over
                return True
            if code == 2:  # wrong use: another start changes nothing
                return False
        return False

    def _start(self, part: Part, seconds: float) -> int:
        self._say(f"{part.name} begins, for {seconds:.0f} s")
        log = self._work / f"{part.name}.log"
        begin = time.monotonic()
        with log.open("ab") as sink:
            process = subprocess.Popen(part.of(seconds), cwd=ROOT, env=environment(), stdout=sink, stderr=sink)
            try:
                code = self._wait(process, part.name, seconds + _GRACE_S, log)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        self._say(f"{part.name}: exit {code} after {time.monotonic() - begin:.0f} s: {last_line(log)}")
        return code

    def _wait(self, process: subprocess.Popen[bytes], name: str, seconds: float, log: Path) -> int:
        """Its exit code; says now and then where it stands."""
        end = time.monotonic() + min(seconds, self.left_s)
        while time.monotonic() < end:
            try:
                return process.wait(min(20.0, max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                self._say(f"{name}: {last_line(log)}")
        return OVERRAN

    def _say(self, text: str) -> None:
        print(f"[{self.left_s:4.0f} s left] {text}", flush=True)

    def _copy_all_along(self) -> None:
        while not self._stop.wait(_COPY_S):
            copy(self._work, self._out)
        copy(self._work, self._out)


def copy(work: Path, out: Path) -> None:
    """Everything in WORK to OUT, but for files that are being written and take their name's place in a moment."""
    for path in work.iterdir():
        if path.suffix != ".part" and not path.name.startswith("."):
            shutil.copy2(path, out / path.name)


def last_line(log: Path) -> str:
    """The end of a log, for a line of progress."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][-160:] if lines else "nothing said yet"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--limit", type=float, default=560.0, metavar="S", help="for this command (560)")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier command left in WORK")
    parser.add_argument("--work", type=Path, default=WORK, metavar="WORK", help=f"where files grow ({WORK})")
    parser.add_argument("--workload-window", type=float, default=1.4, metavar="S", help="of each workload (1.4)")
    args = parser.parse_args()
    work = args.work.resolve()
    if ROOT in (work, *work.parents):
        parser.error(f"--work {work} lies in the checkout, which may be replaced between two commands")
    if not args.resume:
        _clear(work)
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    return Campaign(work, args.out, args.limit).run(parts(work, args.workload_window))


def _clear(work: Path) -> None:
    """Away with an earlier campaign: its own files alone, whatever folder was named."""
    for pattern in ("*.log", "*.json", "*.jsonl", "*.part", "done.txt"):
        for path in work.glob(pattern):
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
