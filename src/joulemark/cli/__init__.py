"""The command line ``joulemark``: reads what was stored, describes the machine, and never needs torch.

Each command is a module of this package with two functions, named in :data:`COMMANDS`::

    add_parser(commands)   adds its parser, by joulemark.cli.arguments.add_command(commands, …, run)
    run(args) -> int       does the work and returns the exit code

Modules that import more than the standard library are imported within ``run``: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from joulemark import __version__
from joulemark.cli import (
    aa,
    ab,
    attribution,
    calibrate,
    compare,
    counters,
    energy,
    env,
    history,
    report,
    tandem,
    trace,
    utilization,
)
from joulemark.cli.arguments import Parser
from joulemark.cli.console import EXIT_INTERRUPTED, EXIT_PIPE, EXIT_WRONG, say
from joulemark.errors import JoulemarkError

COMMANDS = (
    env,
    report,
    compare,
    ab,
    aa,
    history,
    trace,
    counters,
    attribution,
    tandem,
    utilization,
    calibrate,
    energy,
)
"""The modules of the commands, in the order of ``joulemark --help``."""

_NAME_SHOWN = 100
_ABOUT = """\
Where a GPU's time and joules go: the reader's half of `pytest --bench`.

examples:
  joulemark env                                   what can be measured here, and what would be missing
  joulemark report results/nvidia-h200/           what stored runs say, in short
  joulemark compare old.jsonl new.jsonl           is anything worse? (exit code 1 if so)
  joulemark ab --old venv-a --new venv-b          the same, two environments in turns on one machine
  joulemark history results/                      since which run, and which driver?
  joulemark trace trace.json.gz                   is the GPU waiting for the framework?
  joulemark counters ncu.csv                      how much of the busy GPU works?
  joulemark attribution results/                  and which kernels do that work, without replay?
  joulemark tandem results/nvidia-h200/           from which batch on do kernels hide the framework?
  joulemark utilization results/nvidia-h200/      where does a bigger batch stop helping, and why?
  joulemark calibrate --quick                     what do an operation and a byte cost on this GPU?
  joulemark energy f.json --calibration c.json    where did the joules go?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit code: 0 fine, 1 regressed or refused, 2 wrong use or unreadable input, 3 not to be decided.
    """
    if sys.stdout is None:  # as a shell's >&- leaves it
        say("error: standard output is closed: leave it open, or redirect it to a file")
        return EXIT_WRONG
    _tolerate_narrow_encodings()
    try:
        args, unknown = _parser().parse_known_args(argv)
        if unknown:
            args.parser.refuse(unknown)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_WRONG
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except JoulemarkError as error:
        say(f"error: {error}")
        return EXIT_WRONG
    except BrokenPipeError:
        _leave_stdout()  # its reader has seen enough
        return EXIT_PIPE
    except OSError as error:
        if error.filename is not None:  # of a name that its command did not expect, such as one that is too long
            say(f"error: {str(error.filename)[:_NAME_SHOWN]} cannot be used ({error.strerror}): choose another file")
            return EXIT_WRONG
        _leave_stdout()
        say(f"error: the output cannot be written ({error.strerror}): choose another place")
        return EXIT_WRONG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _leave_stdout() -> None:
    """Python would complain again when it closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tolerate_narrow_encodings() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parser() -> Parser:
    parser = Parser("joulemark", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"joulemark {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
