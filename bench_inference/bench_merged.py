"""Whole networks, merged against every other way to run them, all rivals of a network in one process.

python bench_inference/bench_merged.py --network mobilenet_v2 --batches 1,32,128 --out results/nvidia-h200/merged.json

python bench_inference/bench_merged.py table results/nvidia-h200/merged.json   # beside BrickDL's published table

One command per network; it goes on with a file that is there. Exit codes: 0 done, 2 wrong use or no GPU, 3 time was up
first, 4 a CUDA error: start again. As a benchmark of ``pytest --bench`` each network and mode is a case of its own.
"""

from __future__ import annotations

import sys

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


def main(argv=None):
    """Measure the networks that the arguments name into one file."""
    import json

    from joulemark.merged_bench import command, rivals
    from joulemark.merged_bench.published import markdown
    from joulemark.merged_bench.subjects import NETWORKS, network

    if argv is None and sys.argv[1:2] == ["table"]:
        with open(sys.argv[2], encoding="utf-8") as file:
            print(markdown(json.load(file)))
        return 0

    def chosen(args):
        batches = [int(one) for one in args.batches.split(",")]
        names = args.network.split(",") if args.network else NETWORKS
        return [network(name, batch) for name in names for batch in batches]

    def more(parser):
        parser.add_argument(
            "--network", default="", metavar="NAMES", help=f"of the zoo; by default {', '.join(NETWORKS)}"
        )
        parser.add_argument("--batches", default="1,32,128", metavar="N,…", help="batch sizes")

    return command.main("networks", chosen, rivals.FOR_NETWORKS, argv, more, __doc__)


if __name__ == "__main__":
    sys.exit(main())
