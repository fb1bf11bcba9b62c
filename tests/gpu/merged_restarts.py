"""What ``merge`` costs who starts a new process: the first time, and when its plan is on the disk.

    python tests/gpu/merged_restarts.py OUT.json [--networks resnet50,unet] [--batches "32 128 1"] [--limit 560]
    python tests/gpu/merged_restarts.py OUT.json --cases deepcam-b128,unet-b32
    python tests/gpu/merged_restarts.py --show OUT.json

For each network and batch size two processes, one after another (``merged_restart.py``): the first merges with empty
caches of its own, ours, those of torch's compiler, of Triton and of CUDA; the second merges from these, and then once
more. Imports, weights, and a context with model and input on the GPU are there before a clock starts. While the first
one merges, the second and the next case's first get ready, on two threads each: imports and weights need no GPU. None
gets ready while a second one is timed, or calls are, and none touches the GPU before the other has ended, which holds
memory there until then.

``--profile FOLDER`` adds a third process to each case, which merges from the disk under Python's profiler: its text is
FOLDER/CASE.txt, its seconds are no result. The file is written after each case; started again with the same one it goes
on with what is missing, and at last with what has failed. A process that dies, hangs or fails costs its case alone: its
figures are null, with the reason. A case begins where there is time for a usual one; one that time cuts all the same is
measured at the next start. ``--device cpu --tiny`` runs all of it without a GPU: no figures of use.

Exit codes: 0 all measured, 1 some failed or were not merged from the disk, 2 wrong use or no GPU, 3 time was up first:
start again; 130 and 143 after Ctrl-C and SIGTERM, with the processes ended and no case lost that was done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from children import ROOT, caches_in, end_process, environment
from merged_restart import DTYPE, nothing

from joulemark.argument_types import positive, seconds
from joulemark.errors import ConfigurationError, JoulemarkError
from joulemark.merged.executor import BUDGET_S
from joulemark.merged_bench.command import facts_of_device
from joulemark.merged_bench.limits import ends_when_asked
from joulemark.merged_bench.networks import figure, gain
from joulemark.merged_bench.provenance import measured_now, versions
from joulemark.merged_bench.rows import check_writable, write
from joulemark.merged_bench.subjects import NETWORKS, network
from joulemark.records import Table
from joulemark.report.markdown import render

SCHEMA = "joulemark/merged-restarts/2"
SCRIPT = Path(__file__).with_name("merged_restart.py")
FIRST, RESTARTED, PROFILED = "first", "restarted", "profiled"
WRONG = 4e-2
"""Relative error from which an output is no rounding: twice what either way may be off fp32 in bf16."""
_USUAL_S, _PROFILED_S, _READY_S = 30.0, 15.0, 15.0
"""Of a case beside its first merge's budget (on an H200 7.6 to 30.1 s beside the merge, the latter with getting ready);
of a profile; of getting ready, where nothing did ahead (guesses)."""
_MOST_READY_S, _MOST_S = 150.0, 100.0
"""After which a process hangs: getting ready; from its turn on, beside the budget."""
_CODE = ("joulemark", "commit", "dirty", "merged_code")
"""What tells states of the code apart."""
_POLL_S = 0.02
_BATCHES = "32 128"
_WORDS = 300
_OURS = "give a file that this version of the script has written"
_NOTES = (
    "first merge: of a process with empty caches, while two more get ready; all else: of a new one, with its plan.",
    "first call: after merging from the disk; call: a steady one, host included, and over the first process's;",
    "variant: as called / as captured; largest parts: of merging from the disk.",
    "Not timed: imports (torchvision's bring much of torch's compiler), weights, a context, moving the model there.",
)


@dataclass(frozen=True)
class Case:
    """A network at a batch size."""

    network: str
    batch: int

    @property
    def name(self) -> str:
        """As the document calls it."""
        return f"{self.network}-b{self.batch}"


class Cut(Exception):
    """Time was up."""


class Process(Protocol):
    """One that gets ready, waits for its turn on the GPU, measures and ends."""

    @property
    def ready(self) -> bool:
        """Whether it waits for its turn."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""

    def go(self) -> None:
        """The GPU is its own."""

    def quiet(self) -> None:
        """So is the machine: nobody else gets ready."""

    def end(self, why: str = "") -> None:
        """End it, and what it has started; ``why`` is then what it has to tell."""

    def told(self) -> dict[str, Any]:
        """What it has measured, or why nothing."""


Begin = Callable[[Case, str], Process]
"""Starts a case's process by its role."""


class Turns:
    """Cases one after another on one GPU, and who gets ready meanwhile.

    Args:
        waiting: cases to measure.
        begin: starts a process.
        keep: takes what was found of a case.
        budget_s: of merging.
        end: on ``time.monotonic``.
        profile: whether each case is merged once more under a profiler.
    """

    def __init__(
        self,
        waiting: Iterable[Case],
        begin: Begin,
        keep: Callable[[Case, dict[str, Any]], object],
        budget_s: float,
        end: float,
        profile: bool = False,
    ) -> None:
        self.waiting, self.begin, self.keep = deque(waiting), begin, keep
        self.budget_s, self.end, self.profile = budget_s, end, profile
        self.ahead: Process | None = None

    @property
    def left_s(self) -> float:
        """Until time is up."""
        return self.end - time.monotonic()

    @property
    def case_s(self) -> float:
        """Of a usual case whose first process is ready."""
        return self.budget_s + _USUAL_S + (_PROFILED_S if self.profile else 0.0)

    def run(self) -> None:
        """All cases for which there is time."""
        with suppress(Cut):
            while self.waiting and self.left_s > self.case_s + (0.0 if self.ahead else _READY_S):
                case = self.waiting.popleft()
                begin = time.monotonic()
                found = self._measured(case)
                self.keep(case, {**found, "took_s": time.monotonic() - begin})

    def _measured(self, case: Case) -> dict[str, Any]:
        """A case's processes, each told to go when the one before it has ended."""
        first, self.ahead = self.ahead or self.begin(case, FIRST), None
        self._let_go(first)
        later = {role: self.begin(case, role) for role in (RESTARTED, *([PROFILED] if self.profile else []))}
        if self.waiting and self.left_s > 2 * self.case_s:
            self.ahead = self.begin(self.waiting[0], FIRST)
        others = [*later.values(), *([self.ahead] if self.ahead else [])]
        self._wait(lambda: first.over or all(one.ready or one.over for one in others), _MOST_READY_S)
        first.quiet()
        found = {FIRST: self._told(first)}
        if found[FIRST]["merge_s"] is None:
            for one in later.values():
                one.end("the first process has merged nothing")
        self._wait(lambda: all(one.ready or one.over for one in others), _MOST_READY_S)
        for role, process in later.items():
            self._let_go(process)
            process.quiet()
            found[role] = self._told(process)
        return found

    def _let_go(self, process: Process) -> None:
        """Its turn begins when it is ready; one that does not get ready is ended."""
        if self._wait(lambda: process.ready or process.over, _MOST_READY_S):
            process.go()
        else:
            process.end(f"it was not ready within {_MOST_READY_S:g} s")

    def _told(self, process: Process) -> dict[str, Any]:
        """What a process tells when it has ended, for which it has some time."""
        most_s = self.budget_s + _MOST_S
        hangs = not self._wait(lambda: process.over, most_s)
        process.end(f"it did not end within {most_s:g} s" if hangs else "")
        return process.told()

    def _wait(self, done: Callable[[], bool], most_s: float) -> bool:
        """Whether it was done in so many seconds.

        Raises:
            Cut: all time was up before.
        """
        until = time.monotonic() + most_s
        while not done():
            if self.left_s <= 0:
                raise Cut
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True


class Child:
    """As :class:`Process`, of ``merged_restart.py``, in a process group of its own.

    Args:
        words: what is behind the script's name.
        variables: of its environment.
        files: start of the names of its files.
    """

    def __init__(self, words: Sequence[str], variables: dict[str, str], files: Path) -> None:
        self.mark, self.out, self.log = (files.with_suffix(one) for one in (".ready", ".json", ".log"))
        self.why, self.began = "", time.time()
        command = (sys.executable, str(SCRIPT), *words, "--ready", str(self.mark), "--out", str(self.out))
        with self.log.open("w") as said:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ready(self) -> bool:
        return self.mark.exists()

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def go(self) -> None:
        if self.over:  # how, its code says
            return
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def quiet(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self, why: str = "") -> None:
        self.why = self.why or why
        if not self.over:
            end_process(self.process)
        with suppress(ProcessLookupError):  # compilers' processes may live a little longer
            os.killpg(self.process.pid, signal.SIGKILL)
        self.quiet()  # its pipe is of no more use

    def told(self) -> dict[str, Any]:
        """As :class:`Process` has it, once it is over: with the seconds until it was ready, and of its end."""
        if self.out.exists() and not self.why:
            found = json.loads(self.out.read_text(encoding="utf-8"))
            ready_s, ended_s = self.mark.stat().st_mtime - self.began, time.time() - self.out.stat().st_mtime
            return {**found, "beside_s": {"getting ready": ready_s, **found["beside_s"], "ending": ended_s}}
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = self.why or f"its process ended with exit code {self.process.returncode}"
        return nothing(f"{why}: {said[-1][:_WORDS]}" if said else why)


class Children:
    """Starts children, each case's with caches of its own, and ends those that are left.

    Args:
        work: a folder for caches and files, a folder for each case.
        words: for all of them.
        profiles: folder of texts.
    """

    def __init__(self, work: Path, words: Sequence[str], profiles: Path | None) -> None:
        self.work, self.words, self.profiles = work, words, profiles
        self.running: list[Child] = []

    def __call__(self, case: Case, role: str) -> Child:
        """As :data:`Begin`."""
        folder = self.work / case.name
        words = [case.network, str(case.batch), *self.words, *(["--again"] if role == RESTARTED else [])]
        if role == PROFILED and self.profiles is not None:
            words += ["--profile", str(self.profiles.resolve() / f"{case.name}.txt")]
        caches = caches_in(folder / "caches")
        for kept in caches.values():
            Path(kept).mkdir(parents=True, exist_ok=True)
        child = Child(words, environment(**caches), folder / role)
        self.running = [one for one in self.running if not one.over] + [child]
        return child

    def forget(self, case: Case) -> None:
        """A case's caches and files are of no more use."""
        shutil.rmtree(self.work / case.name, ignore_errors=True)

    def end(self) -> None:
        """End what runs."""
        for child in self.running:
            child.end()


def facts_of(device: str, budget_s: float, tiny: bool) -> dict[str, Any]:
    """On what and for what a file is measured; a file of something else is not gone on with.

    Raises:
        JoulemarkError: no GPU is visible.
    """
    known = facts_of_device(device)
    del known["gpu_uuid"]  # another board of its kind may go on
    how = {"dtype": DTYPE, "tiny": tiny, "budget_s": budget_s, "processors": len(os.sched_getaffinity(0))}
    return {**known, **how}


def read(path: Path) -> dict[str, Any]:
    """A document from its file.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", _OURS) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ConfigurationError(f"{path} is no document of {SCHEMA}", _OURS)
    try:
        table_of(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not whole: {type(error).__name__}: {error}", _OURS) from error
    return content


def document_in(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The document that a file holds, or a new one.

    Raises:
        ConfigurationError: the file is no such document, of other facts, or cannot be written.
    """
    check_writable(path)
    if not path.exists():
        return {"schema": SCHEMA, **facts, "cases": {}}
    content = read(path)
    other = [name for name, value in facts.items() if content.get(name) != value]
    if other:
        told = ", ".join(f"{name} {content.get(name)!r}, now {facts[name]!r}" for name in other)
        raise ConfigurationError(f"{path} was begun with {told}", "choose another file")
    return content


def problem_of(found: dict[str, Any]) -> str | None:
    """Why a case is not as it should be: what was not measured, a plan that is not from the disk, a wrong output."""
    for role, when in ((FIRST, "first merge"), (RESTARTED, "new process")):
        one = found[role]
        if one["merge_s"] is None:
            return f"{when}: {one['missing']['all']}"
        if one["relative_error"] is None or one["relative_error"] > WRONG:
            off = one["missing"].get("relative_error") or f"off by {one['relative_error']:.3g}"
            return f"{when}: its output is wrong or unknown: {off}"
        if one["call_s"] is None:
            return f"{when}: no seconds of a call: {one['missing']['call_s']}"
    if not found[RESTARTED]["cached"]:
        return "new process: its plan is not from the disk"
    again = found[RESTARTED]["again"]
    if again["merge_s"] is None:
        return f"same process again: {again['missing']['all']}"
    return None if again["cached"] else "same process again: its plan is not from the disk"


def lacks_figures(found: dict[str, Any]) -> bool:
    """Whether a case is worth another try: some of its merges was not measured."""
    first, restarted = found[FIRST], found[RESTARTED]
    merges = (first, restarted, *([restarted["again"]] if restarted["cached"] else []))
    return any(one["merge_s"] is None for one in merges)


def left_of(every: Sequence[Case], done: dict[str, Any]) -> list[Case]:
    """Cases to measure: those that a file lacks, then those that it holds without some figure."""
    lacking = [one for one in every if one.name not in done]
    return lacking + [one for one in every if one.name in done and lacks_figures(done[one.name])]


def from_disk(found: dict[str, Any]) -> str:
    """Seconds of merging with a plan from the disk, in a cell; told as something else where there was none."""
    said = figure(found["merge_s"], "s")
    return said if found["cached"] or found["merge_s"] is None else f"not from the disk: {said}"


def call_ratio(found: dict[str, Any]) -> float | None:
    """Seconds of a call of the new process over those of the first one's, where both are known."""
    first, restarted = (found[role]["call_s"] for role in (FIRST, RESTARTED))
    return None if first is None or restarted is None else float(restarted / first)


def call_of(found: dict[str, Any]) -> str:
    """A new process's seconds of a call, in a cell, and over the first one's."""
    ratio = call_ratio(found)
    return figure(found[RESTARTED]["call_s"], "s") + ("" if ratio is None else f", {gain(ratio)}")


def calls_note(cases: dict[str, dict[str, Any]]) -> list[str]:
    """Whether plans from the disk are as fast in a new process as where they were measured."""
    known = ((call_ratio(one), name) for name, one in cases.items() if one[RESTARTED]["cached"])
    ratios = sorted((ratio, name) for ratio, name in known if ratio is not None)
    if not ratios:
        return []
    largest, name = ratios[-1]
    middle = gain(median(ratio for ratio, _ in ratios))
    told = f"median {middle}, largest {gain(largest)} ({name})"
    return [f"Calls with a plan from the disk over the first process's, {len(ratios)} cases: {told}."]


def code_notes(cases: dict[str, dict[str, Any]]) -> list[str]:
    """Which cases were measured by which state of the code, where there are several."""
    states = {tuple(one["measured"][key] for key in _CODE) for one in cases.values()}
    return versions([{**one, "subject": name} for name, one in cases.items()]) if len(states) > 1 else []


def row_of(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """A case in cells."""
    first, restarted = found[FIRST], found[RESTARTED]
    spent = sorted((restarted["spent_s"] or {}).items(), key=lambda one: -one[1])[:3]
    variants = dict.fromkeys(one for one in (restarted["variant"], restarted["captured"]) if one)
    return (
        name,
        figure(first["merge_s"], "s"),
        from_disk(restarted),
        from_disk(restarted["again"]) if restarted.get("again") else "–",
        figure(restarted["first_call_s"], "s"),
        call_of(found),
        " / ".join(variants) or "–",
        ", ".join(f"{part} {figure(took_s, 's')}" for part, took_s in spent) or "–",
    )


def table_of(document: dict[str, Any]) -> Table:
    """A row per case, and what is to be known of them."""
    cases = document["cases"]
    columns = (
        "network-batch", "first merge", "new process, from the disk", "same process again", "first call", "call",
        "variant", "largest parts",
    )  # fmt: skip
    notes = [*_NOTES, f"Budget of merging: {document['budget_s']:g} s."]
    if document["tiny"]:
        notes.append("Tiny shapes: a test of the script, no figures of use.")
    kept = [one[RESTARTED]["merge_s"] for one in cases.values() if one[RESTARTED]["cached"]]
    if kept:
        notes.append(
            f"From the disk, {len(kept)} cases: median {figure(median(kept), 's')}, most {figure(max(kept), 's')}."
        )
    notes += calls_note(cases)
    notes += code_notes(cases)
    notes += [f"{name}: {why}" for name, one in cases.items() if (why := problem_of(one)) is not None]
    title = f"What merging costs in a new process ({document['gpu']}, torch {document['software']['torch']})"
    rows = tuple(row_of(name, one) for name, one in cases.items())
    return Table(columns, rows, frozenset(range(1, 6)), tuple(notes), title)


def measure_all(options: argparse.Namespace, cases: Sequence[Case], document: dict[str, Any], end: float) -> None:
    """What a file lacks, case by case."""
    words = ["--budget", str(options.budget), "--device", options.device, *(["--tiny"] if options.tiny else [])]
    with tempfile.TemporaryDirectory(prefix="joulemark-restarts-", ignore_cleanup_errors=True) as work:
        children = Children(Path(work), words, options.profile)

        def keep(case: Case, found: dict[str, Any]) -> None:
            profile = found.pop(PROFILED, None)
            shape = network(case.network, case.batch)
            what = {"network": case.network, "batch": case.batch, "shape": shape.tiny if options.tiny else shape.shape}
            document["cases"].pop(case.name, None)
            document["cases"][case.name] = {**what, **found, "measured": measured_now()}
            write(options.out, document)
            children.forget(case)
            print(" | ".join(row_of(case.name, found)), problem_of(found) or "", flush=True)
            if profile is not None:
                print(f"{case.name}: profile: {profile['missing']['all']}", flush=True)

        try:
            Turns(cases, children, keep, options.budget, end, options.profile is not None).run()
        finally:
            children.end()


def parser_of() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json", help="goes on with a file that is there")
    parser.add_argument("--networks", metavar="NAMES", help=f"of the zoo ({','.join(NETWORKS)})")
    parser.add_argument("--batches", metavar='"N N"', help=f'of each, in this order ("{_BATCHES}")')
    parser.add_argument("--cases", metavar="NAMES", help="instead of both, in this order, as deepcam-b128,unet-b32")
    parser.add_argument("--limit", type=seconds, default=560.0, metavar="S", help="for all (560)")
    parser.add_argument("--budget", type=seconds, default=BUDGET_S, metavar="S", help=f"of merging ({BUDGET_S:g})")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="merge each from the disk under a profiler too")
    parser.add_argument("--device", default="cuda:0", help="as torch calls it; cpu with --tiny tests the script")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--show", action="store_true", help="only show the table of a file")
    return parser


def case_of(text: str) -> Case:
    """A case by its name.

    Raises:
        ConfigurationError: it is none, or the zoo has no such network.
    """
    name, _, batch = text.strip().rpartition("-b")
    try:
        case = Case(name, positive(batch))
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"{text!r} is no case", "give network and batch size, as unet-b128") from error
    network(*astuple(case))
    return case


def cases_of(options: argparse.Namespace) -> list[Case]:
    """What a command line names, each once.

    Raises:
        ConfigurationError: something of it is unknown, or it names cases in two ways.
        ArgumentTypeError: a batch size is none.
    """
    if options.cases is not None:
        if options.networks is not None or options.batches is not None:
            raise ConfigurationError("--cases names networks and batch sizes", "leave out --networks and --batches")
        return list(dict.fromkeys(map(case_of, options.cases.split(","))))
    networks = NETWORKS if options.networks is None else options.networks.split(",")
    named = _BATCHES if options.batches is None else options.batches
    batches = [positive(one) for one in named.replace(",", " ").split()]
    if not batches:
        raise ConfigurationError("--batches names none", "give some, as --batches '32 128'")
    for name in networks:
        network(name, 1)
    return list(dict.fromkeys(Case(name, batch) for batch in batches for name in networks))


def main(arguments: list[str] | None = None) -> int:
    """All cases for which there is time, and their table."""
    parser = parser_of()
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.limit
    try:
        if options.show:
            print(render([table_of(read(options.out))]), end="")
            return 0
        every = cases_of(options)
        document = document_in(options.out, facts_of(options.device, options.budget, options.tiny))
        with ends_when_asked(143):
            measure_all(options, left_of(every, document["cases"]), document, end)
    except (JoulemarkError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted: cases that are done are kept; start again to go on", file=sys.stderr)
        return 130
    print(render([table_of(document)]), end="")
    done = document["cases"]
    if missing := [one.name for one in every if one.name not in done]:
        print(f"time was up, start again; missing: {', '.join(missing)}", flush=True)
        return 3
    return 1 if any(problem_of(done[one.name]) for one in every) else 0


if __name__ == "__main__":
    sys.exit(main())
