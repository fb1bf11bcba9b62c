"""The command line that the benchmarks of blocks and of networks share."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from joulemark.argument_types import positive, seconds
from joulemark.collect.pm_sampling import Pace
from joulemark.collect.power import open_power
from joulemark.device.gpu import probe_gpus
from joulemark.errors import ConfigurationError, JoulemarkError
from joulemark.merged.compiling import start_workers
from joulemark.merged.cost import Rates
from joulemark.merged.executor import BUDGET_S
from joulemark.merged.rates import rates_of
from joulemark.merged_bench import rivals
from joulemark.merged_bench.assembler import use_torchs_assembler
from joulemark.merged_bench.document import Document
from joulemark.merged_bench.gains import group_gains
from joulemark.merged_bench.judge import judge
from joulemark.merged_bench.limits import ends_when_asked
from joulemark.merged_bench.measure import measure_all
from joulemark.merged_bench.options import Options
from joulemark.merged_bench.prebuild import prebuild
from joulemark.merged_bench.prepare import weighted
from joulemark.merged_bench.remarks import lines_of_tests
from joulemark.merged_bench.rows import ask_again, measured_in
from joulemark.merged_bench.stage import COUNTED, Stage
from joulemark.merged_bench.subjects import Subject

_CUT, _INTERRUPTED = 3, 130
"""Exit codes: time was up first; Ctrl-C."""
_FOR_MERGING = 0.35
"""Of all the time, at most."""
_PACE = Pace(most_samples=500)
"""Totals alone are wanted, and each sample takes CUPTI time to decode."""


def main(
    kind: str,
    subjects: Callable[[argparse.Namespace], Sequence[Subject]],
    names: Sequence[str],
    argv: Sequence[str] | None,
    more: Callable[[argparse.ArgumentParser], object] = lambda _: None,
    about: str | None = None,
) -> int:
    """Measure what a file lacks.

    Args:
        kind: ``blocks`` or ``networks``.
        subjects: from the arguments.
        names: of rivals by default.
        argv: without the program's name.
        more: adds arguments of its own.
        about: what ``--help`` says.

    Returns:
        0 done, 2 wrong use or no GPU, 3 time was up first, 4 a CUDA error ended the process: start again to go on, 130
        interrupted.
    """
    parser = _parser(kind, names, about)
    more(parser)
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    try:
        every = subjects(args)
        chosen = chosen_of(every, args.only, args.first, args.share)
        known_in(every, _words(args.by_schedule or ""))
        if not chosen:
            raise ConfigurationError(
                f"no subject is left by --only {args.only!r} and --share {args.share}",
                f"there are {', '.join(one.name for one in every)}",
            )
        if args.again:
            ask_again(args.out, _words(args.again))
            return 0
        if args.build is not None:
            there = measured_in(args.out, args.dtype)
            chosen = [one for one in chosen if one.name not in there]
            print("\n".join(prebuild(chosen, args.dtype, args.kernels, args.build, forced=kind == "blocks")))
            return 0
        _start_compilers(args.device)
        if args.wait:
            told = _ready_and_told(chosen, args)
            if told is None:
                return _CUT
            args = parser.parse_args([*words, *told])
        with ends_when_asked(_CUT):
            return _run(kind, chosen, args)
    except JoulemarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}; start again to go on", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        print("interrupted: rows that are done are kept; start again to go on", file=sys.stderr)
        return _INTERRUPTED


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one and does not say it in its own words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default in (None, "", False, argparse.SUPPRESS) or "by default" in (action.help or "")
        return action.help if told else f"{action.help} (by default %(default)s)"


def _parser(kind: str, names: Sequence[str], about: str | None) -> argparse.ArgumentParser:
    """What both benchmarks are given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=_Help)
    parser.add_argument("--out", type=Path, required=True, metavar="F.json", help="goes on with a file that is there")
    parser.add_argument("--only", default="", metavar="WORD", help="subjects with WORD in their name; by default all")
    parser.add_argument("--rivals", default=",".join(names), metavar="NAMES", help=f"of {', '.join(rivals.EVERY)}")
    parser.add_argument("--without", default="", metavar="NAMES", help="rivals to leave out; by default none")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "tf32", "fp32"], help="number format")
    parser.add_argument(
        "--limit",
        type=seconds,
        default=540.0,
        metavar="S",
        help="for all: what of a row would not end in time is left out",
    )
    parser.add_argument("--subject-limit", type=seconds, default=300.0, metavar="S", help="of building one's rivals")
    parser.add_argument("--rival-limit", type=seconds, default=200.0, metavar="S", help="of building one rival")
    merge_s = 15.0 if kind == "blocks" else BUDGET_S
    parser.add_argument("--merge-budget", type=seconds, default=merge_s, metavar="S", help="of merging a subject")
    parser.add_argument("--rounds", type=positive, default=25, help="bursts of each rival")
    parser.add_argument("--sustain", type=seconds, default=2.2, metavar="S", help="of each steady window; 0 for none")
    parser.add_argument("--turns", type=positive, default=1, help="steady windows of each rival")
    parser.add_argument(
        "--sustain-best",
        type=positive,
        metavar="N",
        help="steady windows for ours and the N fastest; by default for all",
    )
    parser.add_argument(
        "--unmerged-bursts-only", action="store_true", help="no steady windows of our own unmerged kernels"
    )
    parser.add_argument(
        "--first",
        default="",
        metavar="NAMES",
        help="subjects or groups to begin with, in this order; then the others; by default none",
    )
    parser.add_argument(
        "--by-schedule",
        metavar="NAMES",
        help=f"subjects or groups that get {', '.join(rivals.OTHER_SCHEDULES)} by themselves; by default all",
    )
    parser.add_argument(
        "--again",
        default="",
        metavar="NAMES",
        help="only mark rows to be measured once more, which stay until then; no GPU",
    )
    parser.add_argument("--share", default="1/1", metavar="N/ALL", help="every ALLth subject, from the Nth on")
    parser.add_argument(
        "--kernels", type=positive, default=rivals.EVERY_KERNEL, metavar="N", help="that a schedule tries for a range"
    )
    parser.add_argument("--build", metavar="ARCHITECTURE", help="only compile what will be tried, as sm_90a; no GPU")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="do what needs no GPU, then wait for a line of further options on the input, which ends where none comes",
    )
    parser.add_argument("--no-counters", action="store_true", help="leave bytes by hardware counters out")
    parser.add_argument("--device", default="cuda:0", help="as torch calls it; cpu with --tiny tests the command")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    return parser


def chosen_of(subjects: Sequence[Subject], only: str = "", first: str = "", share: str = "1/1") -> list[Subject]:
    """Subjects as the options choose and order them.

    Args:
        only: a word of their names.
        first: names and groups, separated by commas, that come before all others.
        share: ``n/all``: every ``all``-th, from the ``n``-th on.

    Raises:
        ConfigurationError: a name that nothing has, or a share that is none.
    """
    wanted = _words(first)
    known_in(subjects, wanted)
    number, _, every = share.partition("/")
    if not (number.isdecimal() and every.isdecimal() and 1 <= int(number) <= int(every)):
        raise ConfigurationError(f"a share of {share!r}", "give N/ALL with N from 1 to ALL, as 1/2")

    def place(one: Subject) -> int:
        return next((n for n, name in enumerate(wanted) if name in (one.name, one.group)), len(wanted))

    chosen = sorted((one for one in subjects if only in one.name), key=place)
    return chosen[int(number) - 1 :: int(every)]


def known_in(subjects: Sequence[Subject], names: Sequence[str]) -> None:
    """Refuse a name that no subject or group has.

    Raises:
        ConfigurationError: one has none.
    """
    known = {name for one in subjects for name in (one.name, one.group)}
    unknown = [one for one in names if one not in known]
    if unknown:
        raise ConfigurationError(
            f"no subject or group is called {unknown[0]!r}", f"there are {', '.join(sorted(known))}"
        )


def _words(text: str) -> list[str]:
    return [one for one in text.split(",") if one]


def _start_compilers(device: str) -> None:
    """First of all, and with one assembler: they take long to be there."""
    assembler = use_torchs_assembler()
    if assembler is not None:
        print(f"Triton assembles by {assembler}", flush=True)
    if device != "cpu":
        start_workers()


def _ready_and_told(subjects: Sequence[Subject], args: argparse.Namespace) -> list[str] | None:
    """Further options, which come when the GPU is free; until then the first subject's weights are made.

    Returns:
        None where the input ended instead: nothing is to be measured.
    """
    there = measured_in(args.out, args.dtype, args.tiny)
    first = next((one for one in subjects if one.name not in there), None)
    if first is not None:
        with suppress(
            Exception
        ):  # whatever a model's code raises, it does again where its row is measured and tells it
            weighted(first)
    line = sys.stdin.readline()
    return line.split() if line else None


def _run(kind: str, subjects: Sequence[Subject], args: argparse.Namespace) -> int:
    without = _words(args.without)
    chosen = tuple(one for one in _words(args.rivals) if one not in without)
    unknown = [one for one in (*chosen, *without) if one not in rivals.RIVALS]
    if unknown:
        raise ConfigurationError(f"no rival is called {unknown[0]!r}", f"there are {', '.join(rivals.EVERY)}")
    if not chosen:
        raise ConfigurationError("no rival is left to measure", f"there are {', '.join(rivals.EVERY)}")
    ends_s = time.perf_counter() + args.limit
    stage, facts = _stage(args)
    options = Options(
        args.dtype,
        chosen,
        args.rounds,
        args.sustain,
        args.turns,
        limit_s=args.subject_limit,
        rival_s=args.rival_limit,
        ends_s=ends_s,
        merge_s=min(args.merge_budget, _FOR_MERGING * args.limit),
        kernels=args.kernels,
        sustain_best=args.sustain_best,
        steady_unmerged=not args.unmerged_bursts_only,
        tiny=args.tiny,
        by_schedule=None if args.by_schedule is None else frozenset(_words(args.by_schedule)),
    )
    document = Document(args.out, kind, facts)
    if args.device != "cpu":
        stage.rates = rates_of(torch.device(args.device))
        if not _holds_rates(document):
            document.content["rates"] = stage.rates.to_json()
    try:
        done = measure_all(subjects, document, stage, options, lambda line: print(line, flush=True))
    finally:
        document.content["model"] = judge(document.content)
        document.write()
        for group, gains in group_gains(document.content["rows"]).items():
            told = ", ".join(f"{name} {gain:.2f}×" for name, gain in gains.items() if name != "rows")
            print(f"{group} ({gains['rows']:.0f}): {told or 'no gain known'}")
        print("".join(f"{line}\n" for line in lines_of_tests(document.content)), end="")
        if stage.counters is not None:
            stage.counters.close()
        if stage.power is not None:
            stage.power.close()
    return 0 if done else _CUT


def _holds_rates(document: Document) -> bool:
    """Whether the rates that a file begins with are some that a GPU can have."""
    try:
        Rates.from_json(document.content["rates"] or {})
    except (TypeError, ValueError):
        return False
    return True


def facts_of_device(device: str) -> dict[str, Any]:
    """What a document says of a device and of torch there.

    Raises:
        JoulemarkError: no GPU is visible.
    """
    software = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if device == "cpu":
        return {"gpu": "cpu", "gpu_uuid": None, "driver": None, "software": software}
    inventory = probe_gpus(os.environ)
    if not inventory.visible:
        raise inventory.problem or ConfigurationError("no GPU is visible", "see joulemark env")
    seen = inventory.visible[0]
    return {"gpu": seen.gpu.name, "gpu_uuid": seen.gpu.uuid, "driver": inventory.driver, "software": software}


def _stage(args: argparse.Namespace) -> tuple[Stage, dict[str, Any]]:
    """The device with its instruments, and what the document says of it."""
    facts = facts_of_device(args.device)
    if args.device == "cpu":
        return Stage("cpu"), facts
    uuid = facts["gpu_uuid"]
    if args.no_counters:
        return Stage(args.device, open_power(uuid)), facts
    counters = importlib.import_module("joulemark.collect.counters")
    ladder = counters.open_counters(uuid, args.device, pace=_PACE, wanted=COUNTED)
    why = "; ".join(f"{tier}: {reason}" for tier, reason in ladder.refused.items())
    return Stage(args.device, open_power(uuid), ladder.source, why or "no hardware counters here"), facts
