"""Whole networks, merged against every other way to run them, all rivals of a network in one process.

python bench_inference/bench_merged.py --network mobilenet_v2 --batches 1,32,128 --out results/nvidia-h200/merged.json

python bench_inference/bench_merged.py table results/nvidia-h200/merged.json   # gains, and BrickDL's table beside ours

python bench_inference/bench_merged.py table results/nvidia-h200/merged-blocks.json   # gains, schedules side by side

python bench_inference/bench_merged.py table results/nvidia-h200/merged.json --plot merged.svg   # and a picture of them

python bench_inference/bench_merged.py join OUT.json PART.json…   # files of several GPUs of one machine as one

Without a GPU: the tables of a file, and the command itself with --device cpu --tiny (small shapes; no figures of use).
One command per network; it goes on with a file that is there. Exit codes: 0 done, 2 wrong use or no GPU, 3 time was up
first, 4 a CUDA error: start again. As a benchmark of ``pytest --bench`` each network and mode is a case of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

BROKEN = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading a document raises that is none."""


@pytest.mark.bench(
    models=("mobilenet_v2", "efficientnet_b0", "resnet50"),
    phases=("inference",),
    batch_sizes=(1, 32, 128),
    dtypes=("bf16",),
    modes=("eager", "compile", "graph", "merged"),
    campaign="which set merged execution beside its rivals",
    cpu={"models": ("mobilenet_v2",), "batch_sizes": (1,), "dtypes": ("fp32",), "modes": ("eager", "merged")},
)
def bench_merged(bench, workload):
    """One forward pass, as the framework runs it and merged."""
    bench.step(workload)


def show(path, plot=None):
    """The tables of a file of networks or of blocks, in Markdown; its gains as a picture where that is wanted."""
    from joulemark.merged_bench import blocks, networks
    from joulemark.merged_bench.gains import with_gains
    from joulemark.merged_bench.published import beside_brickdl, brickdl_table
    from joulemark.merged_bench.rows import read
    from joulemark.merged_bench.sequences import sequences_table
    from joulemark.report import merged_plot
    from joulemark.report.markdown import render
    from joulemark.report.plot import check_path

    if plot is not None:
        check_path(Path(plot))
    document = read(Path(path))
    with told_as_no_document(path):
        document = with_gains(document)
        if document["kind"] == "blocks":
            schedules = blocks.schedules_table(document)
            tables = [blocks.gains_table(document), *([schedules] if schedules.rows else [])]
        else:
            beside = [brickdl_table(document)] if beside_brickdl(document) else []
            costs = [networks.costs_table(document)] if document["rows"] else []
            sequences = [one] if (one := sequences_table(document)) is not None else []
            tables = [networks.gains_table(document), *sequences, *costs, *beside]
        if plot is not None:
            asked = networks.asked_of if document["kind"] == "networks" else lambda _: None
            merged_plot.draw(document, Path(plot), asked)
    print(render(tables), end="")


def join(out, *parts):
    """Several files as one; a file that is there is replaced when all are joined."""
    from joulemark.errors import ConfigurationError
    from joulemark.merged_bench.networks import joined
    from joulemark.merged_bench.rows import read

    documents = [read(Path(one)) for one in parts]
    with told_as_no_document(", ".join(parts)):
        try:
            whole = joined(documents)
        except BROKEN:
            for name, document in zip(parts, documents, strict=True):
                with told_as_no_document(name):
                    joined([document])
            raise
    part = Path(f"{out}.part")
    try:
        part.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error.strerror}", "choose another") from error


@contextmanager
def told_as_no_document(name):
    """What else a file lacks, as one error."""
    from joulemark.errors import ConfigurationError

    try:
        yield
    except BROKEN as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"{name} is no document of merged execution ({why})", "give a file that --out has written"
        ) from error


def batches(text):
    """Batch sizes out of ``1,32``."""
    found = [int(one) if one.isdecimal() else 0 for one in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are no batch sizes: give numbers from 1, as 1,32")
    return found


def of_files(what, *paths):
    """Tables of a file, or files as one; 2 where the use is wrong."""
    from joulemark.errors import ConfigurationError

    if {"-h", "--help"} & set(paths):
        print(__doc__)
        return 0
    files = [one for one in paths if one != "--plot"]
    plots = what == "table" and paths[1:2] == ("--plot",)
    right = len(files) > 1 if what == "join" else len(files) == (2 if plots else 1)
    try:
        if not right or len(files) + plots != len(paths):
            raise ConfigurationError(
                f"{what} of {len(paths)} files", "give table FILE, table FILE --plot PICTURE, or join OUT PART…"
            )
        (join if what == "join" else show)(*files)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv=None):
    """Measure the networks that the arguments name into one file."""
    from joulemark.merged_bench import command, rivals
    from joulemark.merged_bench.subjects import NETWORKS, network

    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] in (["table"], ["join"]):
        return of_files(*given)

    def chosen(args):
        names = args.network.split(",") if args.network else NETWORKS
        return [network(name, batch) for name in names for batch in args.batches]

    def more(parser):
        parser.add_argument(
            "--network", default="", metavar="NAMES", help=f"of the zoo; by default {', '.join(NETWORKS)}"
        )
        parser.add_argument("--batches", type=batches, default="1,32,128", metavar="N,…", help="batch sizes")

    return command.main("networks", chosen, rivals.FOR_NETWORKS, given, more, __doc__)


if __name__ == "__main__":
    sys.exit(main())
