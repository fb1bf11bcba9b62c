"""Runs the stages of a script so that one that fails, crashes or hangs costs itself alone.

Stages run in a child process, in order; each writes a line of JSON into OUT/stages.jsonl as soon as it ends. A child
that dies, or whose device no longer answers, is replaced by one that goes on with the stages that are left.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG, LINES = "stages.log", "stages.jsonl"


@dataclass(frozen=True)
class Stage:
    """A part of a script.

    Args:
        run: gives what is stored; may raise.
        limit_s: after which the child is killed.
    """

    run: Callable[[], Mapping[str, Any]]
    limit_s: float = 20.0


def main(script: str, about: str, build: Callable[[Path], Mapping[str, Stage]], default_s: float) -> int:
    """The command line of a script of stages.

    Args:
        script: its path.
        about: its docstring.
        build: (OUT) → name → stage.
        default_s: for all stages, in s.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=default_s, help="for everything")
    parser.add_argument("--only", default="", metavar="WORD", help="stages with WORD in their name")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stages = {name: stage for name, stage in build(args.out).items() if args.only in name}
    if args.child is not None:
        return _child(args.out, {name: stages[name] for name in args.child.split(",")}, args.seconds)
    return _parent(script, args.out, list(stages), time.monotonic() + args.seconds)


def _parent(script: str, out: Path, names: list[str], deadline: float) -> int:
    (out / LINES).unlink(missing_ok=True)
    left = names
    while left and deadline - time.monotonic() > 2:
        _start(script, out, left, deadline)
        said = (out / LOG).read_text(errors="replace")
        begun = [line.removeprefix("BEGIN ") for line in said.splitlines() if line.startswith("BEGIN ")]
        if not begun or begun[-1] not in left:
            _add(out, {"stage": left[0], "died": said[-2000:]})
            return _end(out, left[1:])
        if begun[-1] not in {line["stage"] for line in _lines(out)}:
            _add(out, {"stage": begun[-1], "died": said[-2000:]})
        left = left[left.index(begun[-1]) + 1 :]
    return _end(out, left)


def _end(out: Path, left: list[str]) -> int:
    for name in left:
        _add(out, {"stage": name, "skipped": "time was up"})
    _summary(out)
    return 0


def _start(script: str, out: Path, left: list[str], deadline: float) -> None:
    seconds = deadline - time.monotonic()
    command = [sys.executable, script, str(out), "--child", ",".join(left), "--seconds", f"{seconds - 1:.1f}"]
    with (out / LOG).open("ab") as log:
        try:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            log.write(b"\nkilled: time was up\n")


def _child(out: Path, stages: Mapping[str, Stage], seconds: float) -> int:
    deadline = time.monotonic() + seconds
    for name, stage in stages.items():
        limit_s = min(stage.limit_s, deadline - time.monotonic())
        if limit_s < 1:
            return 0
        faulthandler.dump_traceback_later(limit_s, exit=True)
        begin = time.monotonic()
        print(f"BEGIN {name}", flush=True)
        found = guarded(stage.run)
        faulthandler.cancel_dump_traceback_later()
        _add(out, {"stage": name, "seconds": round(time.monotonic() - begin, 3), **found})
        if found.get("lost"):
            return 1
    return 0


def guarded(run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What a stage gives, or its error with the end of its traceback."""
    try:
        return dict(run())
    except Exception as error:
        lost = "CUDA_ERROR" in str(error) or "CUDA error" in str(error)
        return {
            "error": f"{type(error).__name__}: {error}"[:800],
            "lost": lost,
            "trace": traceback.format_exc()[-2500:],
        }


def _add(out: Path, line: Mapping[str, Any]) -> None:
    with (out / LINES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / LINES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _summary(out: Path) -> None:
    for line in _lines(out):
        rest = {key: value for key, value in line.items() if key not in ("stage", "seconds", "trace")}
        print(f"{line['stage']} {line.get('seconds', '-')} s: {json.dumps(rest, default=str)[:330]}", flush=True)
