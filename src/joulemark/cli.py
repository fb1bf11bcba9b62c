"""The command line ``joulemark``: reads what was stored, describes the machine, and never needs torch."""

from __future__ import annotations

import argparse
import io
import os
import sys
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
