"""``joulemark history``: a metric over stored runs, by driver, with the runs at which it changed."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.argument_types import fraction
from joulemark.cli.arguments import Commands, add_command, add_form_arguments
from joulemark.cli.console import print_json, say
from joulemark.errors import ConfigurationError

if TYPE_CHECKING:
    from joulemark.history.index import Index
    from joulemark.history.runs import Source
    from joulemark.history.trend import Trend

_MANY = 200
"""Files to read before it is said that this takes a while."""


def add_parser(commands: Commands) -> None:
    """Add ``history``."""
    parser = add_command(
        commands,
        "history",
        "a metric over stored runs, by driver, and where it changed",
        "joulemark history results/nvidia-h200 --metric energy_per_item_j -k resnet50",
        run,
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULT",
        help="folders of results, and result files (results/ if there is one, else .joulemark/)",
    )
    parser.add_argument("--metric", metavar="NAME", help="device_time_s, or else the first that the runs have")
    parser.add_argument("-k", "--case", metavar="TEXT", default="", help="only cases whose names contain TEXT")
    add_form_arguments(parser, "history.schema.json")
    parser.add_argument("--html", type=Path, metavar="F", help="also write a page with charts to F")
    parser.add_argument(
        "--false-alarms",
        type=fraction,
        metavar="RATE",
        help="chance of a change point in a history without one: 0.01 or 1%% (1%% unless you say)",
    )
    parser.add_argument("--rebuild", action="store_true", help="read every file anew instead of asking the index")


def run(args: argparse.Namespace) -> int:
    """Bring the index up to date, judge the metric, and show it."""
    from joulemark.report import history_html
    from joulemark.whole_files import write_text

    rate = _rate(args.false_alarms)
    if args.html is not None:
        history_html.check_path(args.html)
    places = args.results or [_default_folder()]
    trend, sources = _judged(places, args.metric, args.case, rate, args.rebuild)
    if args.html is not None:
        write_text(history_html.render(trend, sources), args.html)
        say(f"wrote {args.html}")
    _show(trend, sources, "json" if args.json else args.format)
    return 0


def _judged(places: list[Path], metric: str | None, text: str, rate: float, anew: bool) -> tuple[Trend, list[Source]]:
    """Judge by the index that is kept; where that fails (a full disk, a damaged page), by one in memory."""
    import sqlite3

    from joulemark.history.index import Index, default_path

    path = default_path(places, os.environ)
    try:
        with Index(path, anew) as index:
            return _judged_by(index, places, metric, text, rate)
    except sqlite3.Error as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        say(f"the index {path} failed ({error}) and is removed: all files are read this time")
        with Index(None) as index:
            return _judged_by(index, places, metric, text, rate)


def _judged_by(
    index: Index, places: list[Path], metric: str | None, text: str, rate: float
) -> tuple[Trend, list[Source]]:
    from joulemark.report import history_view

    folder = _folder_of(places)
    _update(index, folder, places)
    sources = index.sources(folder)
    for line in history_view.problems_of(sources):
        say(line)
    return _trend(index, folder, places, metric, text, rate), sources


def _rate(given: float | None) -> float:
    from joulemark.history.changes import FALSE_ALARM_RATE

    rate = FALSE_ALARM_RATE if given is None else given
    if not 1e-4 <= rate <= 0.5:
        raise ConfigurationError(f"--false-alarms {rate:g} is out of range", "give a chance between 0.0001 and 0.5")
    return rate


def _default_folder() -> Path:
    from joulemark.store import PRIVATE_FOLDER

    return Path("results") if Path("results").is_dir() else Path(PRIVATE_FOLDER)


def _folder_of(places: list[Path]) -> Path:
    """That all results lie in: the one that was given, or the nearest that holds all."""
    if len(places) == 1 and not places[0].is_file():
        return places[0]
    if len({one.is_absolute() for one in places}) > 1:
        return _folder_of([one.resolve() for one in places])
    return Path(os.path.commonpath([one.parent if one.is_file() else one for one in places]) or ".")


def _files_of(folder: Path, places: list[Path]) -> list[Path]:
    """The result files, each once though several arguments name it."""
    from joulemark.store import result_files

    found = [file for one in places for file in ([one] if one.is_file() else result_files(one, (".jsonl", ".json")))]
    if folder.is_absolute():
        found = [one if one.is_absolute() else one.resolve() for one in found]
    return list({one.resolve(): one for one in found}.values())


def _update(index: Index, folder: Path, places: list[Path]) -> None:
    from joulemark.report.foreign import read_result

    files = _files_of(folder, places)
    read = 0

    def count(path: Path) -> None:
        nonlocal read
        read += 1
        if read % _MANY == 0:
            say(f"read {read} of {len(files)} files, now {path.name}")

    index.update(folder, files, read_result, count)
    if index.why_in_memory is not None:
        say(f"{index.why_in_memory}: all files are read each time")


def _trend(index: Index, folder: Path, places: list[Path], metric: str | None, text: str, rate: float) -> Trend:
    from joulemark.history.trend import trend_of
    from joulemark.metrics import CORE

    known = index.metrics()
    if not known:
        raise ConfigurationError(f"no usable result in {', '.join(map(str, places))}", "run pytest --bench first")
    name = metric or next((one for one in CORE if one in known), known[0])
    if name not in known:
        raise ConfigurationError(f"no run has the metric {name!r}", f"choose from {', '.join(known)}")
    figures = index.figures(folder, name, lambda case: text.lower() in case.label.lower())
    if not figures.runs:
        raise ConfigurationError(f"no run has {name} of a case named like {text!r}", "see joulemark report for names")
    return trend_of(figures, rate)


def _show(trend: Trend, sources: list[Source], form: str | None) -> None:
    from joulemark.report import formats, history_view

    if form == "json":
        print_json(history_view.document(trend, sources))
    else:
        sys.stdout.write(formats.render(history_view.tables_of(trend), form))
