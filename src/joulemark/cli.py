"""The command line ``joulemark``: reads what was stored, describes the machine, and never needs torch."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from joulemark import __version__
from joulemark.errors import ConfigurationError, DeviceError, JoulemarkError

if TYPE_CHECKING:
    from joulemark.device.gpu import GpuState, Inventory
    from joulemark.records import Json
    from joulemark.regression.verdicts import Rule
    from joulemark.report.comparison import Comparison

# Heavier modules are imported by the command that needs them: --help answers at once.

EXIT_REFUSED, EXIT_WRONG, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141
_FORMATS = ("terminal", "markdown", "csv", "json")

_ABOUT = """\
Where a GPU's time and joules go: the reader's half of `pytest --bench`.

examples:
  joulemark env                                   what can be measured here, and what would be missing
  joulemark report results/nvidia-h200/           tables of stored runs
  joulemark compare old.jsonl new.jsonl           is anything worse? (exit code 1 if so)
  joulemark ab --old venv-a --new venv-b          the same, two environments in turns on one machine
  joulemark trace trace.json.gz                   is the GPU waiting for the framework?
  joulemark counters ncu.csv                      how much of the busy GPU works?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit code: 0 fine, 1 regressed or refused, 2 wrong use or unreadable input, 3 not to be decided.
    """
    _tolerate_narrow_encodings()
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_WRONG
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except JoulemarkError as error:
        _say(f"error: {error}")
        return EXIT_WRONG
    except BrokenPipeError:
        # The reader has seen enough; Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _tolerate_narrow_encodings() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(message: str) -> None:
    from joulemark.report.escape import printable

    print(f"joulemark: {printable(message)}", file=sys.stderr)


def _print_json(document: Json) -> None:
    from joulemark.report.jsonout import dumps

    sys.stdout.write(dumps(document))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "joulemark", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"joulemark {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about, example, add_arguments, run in (
        (
            "env",
            "GPUs, driver and software here, and what can be measured with them",
            "joulemark env --check && pytest --bench",
            _add_env,
            _env,
        ),
        (
            "report",
            "tables of stored runs (joulemark's and pytest-benchmark's)",
            "joulemark report results/cpu/ --out summary.md",
            _add_report,
            _report,
        ),
        (
            "compare",
            "two stored runs, row by row, with a verdict",
            "joulemark compare main.jsonl branch.jsonl --metrics device_time_s,energy_per_item_j",
            _add_compare,
            _compare,
        ),
        (
            "ab",
            "two Python environments on one machine, measured in turns and compared",
            "joulemark ab --old venvs/torch-2.10 --new venvs/torch-2.11 --rounds 3 -- bench_training --bench-quick",
            _add_ab,
            _ab,
        ),
        (
            "aa",
            "how often the gate cries wolf on this machine, and the smallest slowdown that it finds",
            "joulemark aa --processes 24 --out results/nvidia-h200/aa.json -- bench_training --bench-quick",
            _add_aa,
            _aa,
        ),
        (
            "trace",
            "how busy a torch.profiler trace shows the GPU, and what it waits for",
            "joulemark trace trace.json.gz --json",
            _add_trace,
            _trace,
        ),
        (
            "counters",
            "kernels, their classes and levels in an export of Nsight Compute (--csv)",
            "ncu --csv --page raw --print-units base python step.py > counters.csv; joulemark counters counters.csv",
            _add_counters,
            _counters,
        ),
    ):
        command = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        add_arguments(command)
    return parser


def _add_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/env.schema.json)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 without a GPU, or when it is busy, throttled or shared, and say why",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="a result file, or a folder of them")
    parser.add_argument("--format", choices=_FORMATS, help="terminal unless --out's suffix says otherwise")
    parser.add_argument("--out", type=Path, metavar="F", help="write to F (.md, .csv or .json) instead of the terminal")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, metavar="BASE", help="the result file to compare with")
    parser.add_argument("new", type=Path, metavar="NEW", help="the result file in question")
    _add_verdicts(parser)


def _add_verdicts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/compare.schema.json)")
    parser.add_argument("--format", choices=_FORMATS, default="terminal", help="terminal unless you choose")
    parser.add_argument("--metrics", metavar="NAMES", help="comma-separated, of the names in the result files")
    parser.add_argument(
        "--spread",
        type=_fraction,
        metavar="FRACTION",
        help="what two runs of the same thing are assumed to differ by: 0.02 or 2%% (2%% unless you say)",
    )
    parser.add_argument(
        "--threshold",
        type=_fraction,
        metavar="FRACTION",
        help="the worsening that must not stay unseen (5%% unless you say)",
    )
    parser.add_argument(
        "--min-effect",
        type=_fraction,
        metavar="FRACTION",
        help="smallest worsening that counts, however certain (1%% unless you say)",
    )
    parser.add_argument("--fail-on-missing", action="store_true", help="exit 1 when NEW lacks rows or figures of BASE")
    parser.epilog = f"{parser.epilog}\n\nexit codes: 0 nothing worse, 1 regressed, 2 unreadable, 3 cannot be decided"


def _add_ab(parser: argparse.ArgumentParser) -> None:
    for side in ("old", "new"):
        parser.add_argument(
            f"--{side}", type=Path, required=True, metavar="ENV", help="a Python interpreter, or a virtual environment"
        )
    parser.add_argument(
        "--rounds", type=_positive, default=3, metavar="N", help="of one process per side (3 unless you choose)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="for the records of all rounds",
    )
    parser.add_argument("pytest_args", nargs="*", metavar="-- PYTEST", help="arguments of pytest --bench")
    _add_verdicts(parser)
    parser.epilog = f"{parser.epilog}\n\nexit codes: as of compare"


def _add_aa(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        metavar="RESULT",
        help="stored runs of one binary with many processes; with --processes, arguments of pytest --bench",
    )
    parser.add_argument(
        "--processes", type=_positive, metavar="N", help="measure first, each case in N processes (24 or more)"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where that run is stored")
    parser.add_argument("--metric", metavar="NAME", help="device_time_s or host_time_s")
    parser.add_argument(
        "--pairs", type=_positive, default=1000, metavar="N", help="of triples (1000 unless you choose)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random splits")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/aa.schema.json)")
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), help="terminal unless you choose")
    parser.add_argument("--out", type=Path, metavar="F.json", help="also write the JSON document to F.json")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10**6):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="a Chrome trace, .json or .json.gz")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/trace.schema.json)")
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), help="terminal unless you choose")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="what changed from A to B")
    parser.epilog = f"{parser.epilog}\n\nexit codes: 0 all complete, 2 unreadable, 3 a trace is incomplete"


def _add_counters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the output of ncu --csv")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/counters.schema.json)")
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), help="terminal unless you choose")
    parser.epilog = f"{parser.epilog}\n\nexit codes: 0 all read, 2 unreadable or no permission, 3 a file is damaged"


def _fraction(text: str) -> float:
    number = text.strip()
    try:
        return float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; give 0.02 or 2%") from None


def _report(args: argparse.Namespace) -> int:
    from joulemark.report import foreign, output

    if args.out is not None and args.format is None:
        output.check_report_path(args.out)
    runs, unusable = foreign.read_results(args.results)
    for line in unusable:
        _say(f"left out: {line}")
    if not runs:
        raise ConfigurationError(f"no usable result in {', '.join(map(str, args.results))}", "run pytest --bench first")
    if args.out is not None:
        output.write_report(runs, args.out, args.format)
        _say(f"wrote {args.out}")
    else:
        sys.stdout.write(output.render(runs, args.format or "terminal"))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from joulemark.report import compare, foreign

    comparison = compare.compare(
        foreign.read_result(args.base), foreign.read_result(args.new), _metric_names(args.metrics), _rule(args)
    )
    return _show_comparison(comparison, args)


def _metric_names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _rule(args: argparse.Namespace) -> Rule:
    from joulemark.regression.verdicts import Rule

    given = {name: getattr(args, name) for name in ("spread", "threshold", "min_effect")}
    return Rule(**{name: value for name, value in given.items() if value is not None})


def _show_comparison(comparison: Comparison, args: argparse.Namespace) -> int:
    from joulemark.report import output
    from joulemark.report.comparison import exit_code

    form: output.Format = "json" if args.json else args.format
    sys.stdout.write(output.render_comparison(comparison, form))
    if form in ("json", "csv"):
        for message in comparison.messages:
            _say(message)
    return exit_code(comparison, args.fail_on_missing)


def _ab(args: argparse.Namespace) -> int:
    from joulemark.measure import rounds
    from joulemark.report.compare import check, compare

    rule, metrics = _rule(args), _metric_names(args.metrics)
    check(metrics, rule)
    old, new = (rounds.interpreter_of(one) for one in (args.old, args.new))
    if args.rounds < 3:
        _say(f"{args.rounds} rounds show no spread between processes: it will be assumed (3 rounds measure it)")
    folder = args.results or _new_folder("ab")
    sides = rounds.take_turns(old, new, args.rounds, folder, args.pytest_args, _say)
    _say(f"records: {sides[0].path} and {sides[1].path}")
    return _show_comparison(compare(*sides, metrics, rule), args)


def _new_folder(command: str) -> Path:
    """Where pytest --bench would store: the project's results, or a folder that git ignores."""
    parent = Path("results") if Path("results").is_dir() else Path(".joulemark")
    return parent / command / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def _aa(args: argparse.Namespace) -> int:
    from joulemark.measure import rounds
    from joulemark.regression import trials
    from joulemark.report import aa_view, foreign, jsonout, output

    if args.processes is None and not args.what:
        raise ConfigurationError("aa got no results", "give RESULT…, or --processes 24 to measure first")
    if args.processes is None:
        runs, unusable = foreign.read_results([Path(one) for one in args.what])
        for line in unusable:
            _say(f"left out: {line}")
    else:
        _say(f"measuring each case in {args.processes} processes")
        folder = args.results or _new_folder("aa")
        arguments = [f"--bench-processes={args.processes}", "--bench-collect=timing", *args.what]
        runs = [rounds.session(Path(sys.executable), folder, arguments)]
        _say(f"records: {runs[0].path}")
    document = trials.evaluate(runs, args.metric, pairs=args.pairs, seed=args.seed)
    if args.out is not None:
        output.write_text(jsonout.dumps(document), args.out)
        _say(f"wrote {args.out}")
    if args.json or args.format == "json":
        _print_json(document)
    else:
        sys.stdout.write(aa_view.render(document, "markdown" if args.format == "markdown" else "terminal"))
    return 0


def _trace(args: argparse.Namespace) -> int:
    from joulemark import trace
    from joulemark.report import trace_view

    if bool(args.files) == (args.diff is not None):
        raise ConfigurationError(
            f"trace got {len(args.files)} files and {'a' if args.diff else 'no'} --diff", "give FILE…, or --diff A B"
        )
    if args.diff is not None:
        base, new = (trace.analyse_files([path]) for path in args.diff)
        document = trace.diff(base, new)
        sides = [document["base"], document["new"]]
    else:
        document = trace.analyse_files(args.files)
        sides = document["files"]
    if args.json or args.format == "json":
        _print_json(document)
    else:
        form: Literal["terminal", "markdown"] = "markdown" if args.format == "markdown" else "terminal"
        view = trace_view.render_diff if "base" in document else trace_view.render
        sys.stdout.write(view(document, form))
    for side in sides:
        if side["error"]:
            _say(f"error: {side['error']}")
    return trace.exit_code(document)


def _counters(args: argparse.Namespace) -> int:
    from joulemark import utilization
    from joulemark.report import counters_view

    document = utilization.read_files(args.files)
    if args.json or args.format == "json":
        _print_json(document)
    else:
        sys.stdout.write(counters_view.render(document, "markdown" if args.format == "markdown" else "terminal"))
    for entry in document["files"]:
        if entry["error"]:
            _say(f"error: {entry['error']}")
    return utilization.exit_code(document)


def _env(args: argparse.Namespace) -> int:
    from joulemark.device.gpu import probe_gpus
    from joulemark.environment import gather, preflight
    from joulemark.report import environment_view
    from joulemark.report.escape import printable

    inventory = probe_gpus(os.environ)
    environment = gather(inventory, Path.cwd())
    states = _states(inventory)
    verdict = preflight(inventory, states, os.getpid()) if args.check else None
    if args.json:
        _print_json(environment_view.document(inventory, environment, states, verdict))
    else:
        for line in environment_view.lines(inventory, environment, states):
            print(printable(line))
    if verdict is None:
        return 0
    for doubt in verdict.doubts:
        _say(f"not checked: {doubt}")
    for refusal in verdict.refusals:
        _say(f"refused: {refusal}")
    return EXIT_REFUSED if verdict.refusals else 0


def _states(inventory: Inventory) -> dict[str, GpuState | DeviceError]:
    from joulemark.device.gpu import gpu_state
    from joulemark.device.nvml import Nvml

    states: dict[str, GpuState | DeviceError] = {}
    if not inventory.visible:
        return states
    with Nvml() as nvml:
        for one in inventory.visible:
            try:
                states[one.gpu.uuid] = gpu_state(nvml, one.gpu.uuid)
            except DeviceError as error:
                states[one.gpu.uuid] = error
    return states
