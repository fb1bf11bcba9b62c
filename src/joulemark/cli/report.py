"""``joulemark report``: what stored runs say, as tables, as a page, and as plots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from joulemark.cli.arguments import Commands, add_command
from joulemark.cli.console import say
from joulemark.errors import ConfigurationError

if TYPE_CHECKING:
    from joulemark.records import Run
    from joulemark.report.evidence import Document, Evidence
    from joulemark.report.output import Format
    from joulemark.report.page.parts import Section

    Given = list[tuple[Path, list[Run], list[Document]]]

_Stored = TypeVar("_Stored", "Run", "Document")
_FORMATS = ("terminal", "markdown", "html", "csv", "json")
_AXES = ("run", "driver", "gpu", "mode", "dtype")


def add_parser(commands: Commands) -> None:
    """Add ``report``."""
    parser = add_command(
        commands,
        "report",
        "stored runs (joulemark's and pytest-benchmark's) as answers, tables, a page, plots",
        "joulemark report results/nvidia-h200/ --out report.html --plots plots/",
        run,
    )
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULT",
        help="a result file, a document of joulemark energy or attribution, or a folder of them",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="in a terminal, every case in its table; without it, what is longer than two screens is told in short",
    )
    parser.add_argument("--format", choices=_FORMATS, help="terminal unless --out's suffix says otherwise")
    parser.add_argument(
        "--out", type=Path, metavar="F", help="write to F (.html, .md, .csv or .json) instead of the terminal"
    )
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="also write every plot to DIR as .svg and .png, with its data as .csv"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="F",
        help="also draw the answers of the best known workload, each over its plot, into F (.svg, .png or .pdf)",
    )
    parser.add_argument(
        "--side-by-side",
        nargs="?",
        const="run",
        choices=_AXES,
        help="compare runs (the default: each RESULT is a side, or each file of a lone folder), drivers, GPUs, modes …",
    )
    parser.add_argument(
        "--shares",
        action="store_true",
        help="which part of the chip spends how much, side by side: results are documents of joulemark energy",
    )
    parser.add_argument(
        "--plateaus",
        nargs="?",
        const="throughput_per_s",
        metavar="METRIC",
        help="from which batch on a bigger one stops helping, of every series, GPU, driver and run "
        "(of throughput_per_s unless you say)",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write what the runs say."""
    from joulemark.report import output

    form: Format = args.format or ("terminal" if args.out is None else output.format_of(args.out))
    _check(args, form)
    width = None if args.out is None else output.FILE_WIDTH
    text = _shares(args.results, form, width) if args.shares else _of_runs(args, form, width)
    if args.out is None:
        sys.stdout.write(text)
    else:
        output.write_checked(text, args.out)
        say(f"wrote {args.out}")
    return 0


def _of_runs(args: argparse.Namespace, form: Format, width: int | None) -> str:
    given = _read(args.results)
    runs = [one for _, found, _ in given for one in found]
    if args.plateaus is not None:
        return _plateaus(runs, args.plateaus, form, width)
    if args.side_by_side is not None:
        return _side_by_side(given, args, form, width)
    return _report(given, args, form, width)


def _shares(paths: list[Path], form: Format, width: int | None) -> str:
    from joulemark.report import energy_shares, formats

    if form not in ("terminal", "markdown"):
        raise ConfigurationError(f"shares have no {form} form", "the documents themselves are JSON")
    return formats.render([energy_shares.shares_table(energy_shares.read_shares(paths))], form, width)


def _check(args: argparse.Namespace, form: Format) -> None:
    """Refuse what cannot be written or does not go together, before anything is read."""
    from joulemark.report import output

    if args.out is not None and args.format is None:
        output.check_report_path(args.out)
    if args.tables and (form != "terminal" or args.shares or (args.plateaus, args.side_by_side) != (None, None)):
        raise ConfigurationError(
            "--tables is for a report in the terminal", "leave it out: what else is asked for is whole"
        )
    if args.plateaus is not None and (args.side_by_side is not None or _draws(args) or form == "html"):
        raise ConfigurationError(
            "--plateaus is a table of its own", "leave --side-by-side, --plots, --picture and html out"
        )
    if args.shares and (args.plateaus is not None or args.side_by_side is not None or _draws(args)):
        raise ConfigurationError("--shares is a table of its own", "leave the other tables and plots out")
    if args.side_by_side is not None and form in ("csv", "json"):
        raise ConfigurationError(f"--side-by-side has no {form} form", "use html or markdown, or joulemark compare")
    if args.plots is not None:
        from joulemark.report.page import pictures

        pictures.check_folder(args.plots)
    if args.picture is not None:
        from joulemark.report import plot

        plot.check_path(args.picture, "--picture")
    if form == "html":
        from joulemark.report import page

        page.check_installed()


def _read(paths: Sequence[Path]) -> Given:
    from joulemark.report import documents

    given: Given = []
    for path in paths:
        runs, found, unusable = documents.read_all([path])
        for line in unusable:
            say(f"left out: {line}")
        given.append((path, runs, found))
    if not any(runs for _, runs, _ in given):
        what = f"no usable result in {', '.join(map(str, paths))}"
        kinds = sorted({one.kind for _, _, found in given for one in found})
        if kinds:
            raise ConfigurationError(f"{what}, only what joulemark {' and '.join(kinds)} wrote", "give runs beside it")
        raise ConfigurationError(what, "run pytest --bench first")
    return given


def _report(given: Given, args: argparse.Namespace, form: Format, width: int | None) -> str:
    from joulemark.report import output
    from joulemark.report.evidence import gather

    runs = _once([one for _, found, _ in given for one in found])
    documents = _once([one for _, _, found in given for one in found])
    if form == "html" or _draws(args):
        page = _page(gather(runs, documents), [], args, form == "html")
        if page is not None:
            return page
    if form == "terminal":
        from joulemark.report import overview

        whole = args.tables or args.out is not None
        return (overview.render_whole if whole else overview.render)(runs, documents, width)
    return output.render(runs, form, width, documents)


def _once(found: Sequence[_Stored]) -> list[_Stored]:
    """Each file once, though several arguments name it."""
    return list({Path(one.path).resolve(): one for one in found}.values())


def _side_by_side(given: Given, args: argparse.Namespace, form: Format, width: int | None) -> str:
    from joulemark.report import output, sides

    parts = sides.sides_of(given, args.side_by_side)
    evidence = sides.together(parts, [one for _, _, found in given for one in found])
    if form == "html" or _draws(args):
        from joulemark.report.page import side_by_side

        first = side_by_side.section(parts, args.side_by_side)
        page = _page(evidence, [first], args, form == "html")
        if page is not None:
            return page
    tables = sides.tables_of(parts, args.side_by_side)
    return output.render_tables(evidence, tables, "markdown" if form == "markdown" else "terminal", width)


def _draws(args: argparse.Namespace) -> bool:
    return args.plots is not None or args.picture is not None


def _page(evidence: Evidence, first: list[Section], args: argparse.Namespace, wanted: bool) -> str | None:
    """Write the plots and the picture where they are asked for; the page where it is."""
    from joulemark.report import page
    from joulemark.report.page import pictures, poster

    sections = [*first, *page.sections_of(evidence)]
    if args.plots is not None:
        written = pictures.save_all(page.figures_of(sections), args.plots)
        say(f"wrote {len(written)} files to {args.plots}")
    if args.picture is not None:
        poster.draw(evidence, sections, args.picture)
        say(f"wrote {args.picture}")
    return page.render(evidence, sections) if wanted else None


def _plateaus(runs: list[Run], name: str, form: Format, width: int | None) -> str:
    from joulemark.report import formats, jsonout, plateau_table

    metric = plateau_table.check_metric(name)
    if form == "csv":
        raise ConfigurationError("plateaus have no csv form", "use --format json")
    rows = plateau_table.plateaus_of(runs, metric)
    if form == "json":
        return jsonout.dumps(plateau_table.document(rows, metric))
    return formats.render([plateau_table.table_of(rows, metric)], form, width)
