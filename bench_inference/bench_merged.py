"""Whole networks, merged against every other way to run them, all rivals of a network in one process.

python bench_inference/bench_merged.py --network mobilenet_v2 --batches 1,32,128 --out results/nvidia-h200/merged.json

python bench_inference/bench_merged.py table results/nvidia-h200/merged.json   # gains, and BrickDL's table beside ours

python bench_inference/bench_merged.py table results/nvidia-h200/merged-blocks.json   # gains, schedules side by side

python bench_inference/bench_merged.py join OUT.json PART.json…   # files of several GPUs of one machine as one

One command per network; it goes on with a file that is there. Exit codes: 0 done, 2 wrong use or no GPU, 3 time was up
first, 4 a CUDA error: start again. As a benchmark of ``pytest --bench`` each network and mode is a case of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.mark.bench(
    models=("mobilenet_v2", "efficientnet_b0", "resnet50"),
    phases=("inference",),
    batch_sizes=(1, 32, 128),
    dtypes=("bf16",),
    modes=("eager", "compile", "graph", "merged"),
    cpu={"models": ("mobilenet_v2",), "batch_sizes": (1,), "dtypes": ("fp32",), "modes": ("eager", "merged")},
)
def bench_merged(bench, workload):
    """One forward pass, as the framework runs it and merged."""
    bench.step(workload)


def show(path):
    """The tables of a file of networks or of blocks, in Markdown."""
    from joulemark.merged_bench import blocks, networks
    from joulemark.merged_bench.published import brickdl_table
    from joulemark.report.markdown import render

    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if document["kind"] == "blocks":
        tables = [blocks.gains_table(document), blocks.schedules_table(document)]
    else:
        tables = [networks.gains_table(document), brickdl_table(document)]
    print(render(tables), end="")
    return 0


def join(out, *parts):
    """Several files as one."""
    from joulemark.errors import ConfigurationError
    from joulemark.merged_bench.networks import joined

    try:
        whole = joined([json.loads(Path(one).read_text(encoding="utf-8")) for one in parts])
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Path(out).write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def main(argv=None):
    """Measure the networks that the arguments name into one file."""
    from joulemark.merged_bench import command, rivals
    from joulemark.merged_bench.subjects import NETWORKS, network

    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["table"] and len(given) == 2:
        return show(given[1])
    if given[:1] == ["join"] and len(given) > 2:
        return join(*given[1:])

    def chosen(args):
        batches = [int(one) for one in args.batches.split(",")]
        names = args.network.split(",") if args.network else NETWORKS
        return [network(name, batch) for name in names for batch in batches]

    def more(parser):
        parser.add_argument(
            "--network", default="", metavar="NAMES", help=f"of the zoo; by default {', '.join(NETWORKS)}"
        )
        parser.add_argument("--batches", default="1,32,128", metavar="N,…", help="batch sizes")

    return command.main("networks", chosen, rivals.FOR_NETWORKS, given, more, __doc__)


if __name__ == "__main__":
    sys.exit(main())
