"""Blocks of layers, merged against every other way to run them, all in one process.

python bench_inference/bench_merged_micro.py --out results/nvidia-h200/merged-blocks.json

python bench_inference/bench_merged.py table results/nvidia-h200/merged-blocks.json   # what it has written

Without a GPU: the tables of a file, and the command itself with --device cpu --tiny (small shapes; no figures of use).
Goes on with a file that is there. Exit codes: 0 done, 2 wrong use or no GPU, 3 time was up first, 4 a CUDA error: start
again. As a benchmark of ``pytest --bench`` each pair of a block and a way to run it is a case of its own.
"""

from __future__ import annotations

import sys

import pytest

_BLOCKS = ("chain-4x16-1024-b8", "chain-3x32-224-b64", "chain3d-2x16-128-b1", "bottleneck-256-64-56-b64",
           "inverted-32-192-32-s1-56-b64")  # fmt: skip


@pytest.mark.bench(needs_gpu="which compare kernels of a GPU", campaign="which set merged blocks beside their rivals")
@pytest.mark.parametrize("rival", ["eager", "compile", "fused", "own_unmerged", "merged"])
@pytest.mark.parametrize("block", _BLOCKS)
def bench_merged_block(bench, power, block, rival):
    """One call of a block in bf16 under one of the ways to run it; on the CPU a tiny one."""
    pytest.importorskip("torch", exc_type=ImportError)
    from joulemark.errors import Unsupported
    from joulemark.merged_bench.prepare import step_of
    from joulemark.merged_bench.subjects import BLOCKS

    subject = next(one for one in BLOCKS if one.name == block)
    try:
        run, items = step_of(subject, rival, bench.device)
    except Unsupported as reason:
        pytest.skip(str(reason))
    bench.step(run, items=items, unit="images")


def main(argv=None):
    """Measure all blocks into one file."""
    from joulemark.merged_bench import command, rivals
    from joulemark.merged_bench.subjects import BLOCKS

    return command.main("blocks", lambda args: BLOCKS, rivals.FOR_BLOCKS, argv, about=__doc__)


if __name__ == "__main__":
    sys.exit(main())
