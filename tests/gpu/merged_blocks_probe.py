"""Numbers and times of the kernels for inverted residuals, their fronts and bottlenecks, many plans each.

Run on a machine with a GPU: ``python tests/gpu/merged_blocks_probe.py OUT --seconds 120``. All kernels are built first,
by several processes; then one process measures block after block and appends a line to OUT/results.jsonl after each.
When it crashes or hangs (a kernel went astray: its context is lost), it is started again behind the kernel that it was
at. Rivals beside the merged kernels: eager and cuDNN fused; torch.compile comes last, while time is left. Exit codes:
0 all kernels were tried, 3 time was up first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from cuda.bindings import driver
from torch import Tensor, nn

from joulemark.merged.bricks import ACTIVATIONS, Parameters, run_plain
from joulemark.merged.kernels import Description, Kernel, build, run
from joulemark.merged.kernels import bottleneck as bottlenecks
from joulemark.merged.kernels import bottleneck_warpgroup as warpgroups
from joulemark.merged.kernels import expand_depthwise as fronts
from joulemark.merged.kernels import inverted_residual as inverted
from joulemark.merged.kernels import inverted_residual_warpgroup as inverted_warpgroups
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.kernels.launch import loaded
from joulemark.merged.sequence import Conv, Sequence

P = TypeVar("P")
ARCHITECTURE = "sm_90a"
RIVALS = ("eager", "cudnn_fused", "compile")
HANG_S = 40.0
ROTATION_BYTES = 256 << 20


@dataclass(frozen=True)
class Block:
    """A block of a network at one size."""

    name: str
    sequence: Sequence
    batch: int
    size: int
    format: str = "bf16"

    @property
    def description(self) -> Description:
        return Description(self.sequence, self.format)


def pointwise(inputs: int, outputs: int, activation: str, residual: int | None = None) -> Conv:
    return Conv(inputs, outputs, (1, 1), (1, 1), (0, 0), (1, 1), 1, activation, residual)


def inverted_residual(inputs: int, hidden: int, outputs: int, stride: int = 1, activation: str = "relu6") -> Sequence:
    expansion = [pointwise(inputs, hidden, activation)] if hidden != inputs else []
    depthwise = Conv(hidden, hidden, (3, 3), (stride, stride), (1, 1), (1, 1), hidden, activation)
    residual = 0 if stride == 1 and inputs == outputs else None
    return Sequence((*expansion, depthwise, pointwise(hidden, outputs, "none", residual)))


def bottleneck(channels: int, middle: int) -> Sequence:
    inner = Conv(middle, middle, (3, 3), (1, 1), (1, 1), (1, 1), 1, "relu")
    return Sequence((pointwise(channels, middle, "relu"), inner, pointwise(middle, channels, "relu", 0)))


def front(inputs: int, hidden: int, window: int, stride: int) -> Sequence:
    """Expansion and depthwise of a block of EfficientNet."""
    half = window // 2
    shape = ((window, window), (stride, stride), (half, half), (1, 1))
    return Sequence((pointwise(inputs, hidden, "silu"), Conv(hidden, hidden, *shape, hidden, "silu")))


def front_blocks(batch: int = 64) -> list[Block]:
    """Of EfficientNet-B0, each shape once."""
    shapes = [
        (16, 96, 3, 2, 112),
        (24, 144, 3, 1, 56),
        (24, 144, 5, 2, 56),
        (40, 240, 5, 1, 28),
        (40, 240, 3, 2, 28),
        (80, 480, 3, 1, 14),
        (80, 480, 5, 1, 14),
        (112, 672, 5, 1, 14),
        (112, 672, 5, 2, 14),
        (192, 1152, 5, 1, 7),
        (192, 1152, 3, 1, 7),
    ]
    return [Block(f"front{i}-{h}k{k}s{s}@{n}b{batch}", front(i, h, k, s), batch, n) for i, h, k, s, n in shapes]


def blocks(only: str = "") -> list[Block]:
    """Those whose name the regular expression finds."""
    shapes = [
        (32, 192, 32, 1, 56, 64),
        (16, 96, 16, 1, 112, 64),
        (64, 384, 64, 1, 56, 64),
        (16, 96, 24, 2, 112, 64),
        (24, 144, 24, 1, 56, 64),
        (24, 144, 32, 2, 56, 64),
        (32, 192, 32, 1, 28, 64),
        (32, 192, 64, 2, 28, 64),
        (64, 384, 64, 1, 14, 64),
        (64, 384, 96, 1, 14, 64),
        (96, 576, 96, 1, 14, 64),
        (96, 576, 160, 2, 14, 64),
        (160, 960, 160, 1, 7, 64),
        (160, 960, 320, 1, 7, 64),
        (32, 32, 16, 1, 112, 64),
        (32, 192, 32, 1, 56, 1),
        (64, 384, 64, 1, 56, 1),
    ]
    made = [Block(f"ir{i}-{h}-{o}s{s}@{n}b{b}", inverted_residual(i, h, o, s), b, n) for i, h, o, s, n, b in shapes]
    made.append(Block("ir32-192-32s1@56b64fp16", inverted_residual(32, 192, 32), 64, 56, "fp16"))
    wide = [Block(f"bottleneck256-64@56b{b}", bottleneck(256, 64), b, 56) for b in (64, 1)]
    listed = [*front_blocks(), made[0], wide[0], *made[1:], wide[1]]
    return [one for one in listed if re.search(only, one.name)]


class Way(NamedTuple):
    """A kernel for a block, and what it was generated from."""

    family: str
    plan: Any
    kernel: Kernel


@cache
def ways_of(block: Block, most: int) -> list[Way]:
    """Different ways to cut a block: of each family of inverted residuals the best predicted, at most two of a kind."""
    description, size, device = block.description, (block.size, block.size), Device()

    def ways(module: Any, plans: Iterable[Any]) -> list[Way]:
        name = module.__name__.rpartition(".")[2]
        return [Way(name, plan, getattr(module, name)(description, plan)) for plan in dict.fromkeys(plans)]

    if "bottleneck" in block.name:
        cuts = warpgroup_plans() + warpgroups.candidates(description, size, block.batch, device)
        plans = bottleneck_plans() + bottlenecks.candidates(description, size, block.batch, device)
        return ways(warpgroups, cuts) + ways(bottlenecks, plans)
    if fronts.unsuited(description) is None:
        return ways(fronts, fronts.candidates(description, size, block.batch, device, limit=most))
    found = inverted.candidates(description, size, block.batch, device, limit=1000)
    made = ways(inverted, different(found, most, lambda plan: (plan.width, plan.tiles, plan.groups, plan.ahead), True))
    if inverted_warpgroups.unsuited(description) is not None:
        return made
    grouped = inverted_warpgroups.candidates(description, size, block.batch, device, limit=1000)

    def kind(plan: inverted_warpgroups.Plan) -> tuple[int, ...]:
        return plan.width, plan.tiles, plan.images, plan.split, plan.ahead, plan.groups, plan.halves, plan.early

    odd = [plan for plan in grouped if plan.split not in (1, 2, 4, 8)]  # clusters of sizes that were never measured
    chosen = list(dict.fromkeys(different(grouped, most, kind) + odd[:2]))
    chosen.sort(key=lambda plan: plan.groups == 1 and not plan.halves)  # first those that were never measured
    return ways(inverted_warpgroups, chosen) + made


def different(plans: Iterable[P], most: int, kind: Callable[[P], tuple[int, ...]], by_tiles: bool = False) -> list[P]:
    """The first plans, at most two of a kind, half of them persistent; by tiles: half with as many tiles to a warp."""
    kinds: Counter[Any] = Counter()
    kept: list[P] = []
    for plan in plans:
        halves = [("ahead", plan.ahead)] * plan.ahead + [("tiles", plan.tiles)] * by_tiles  # type: ignore[attr-defined]
        if len(kept) == most or kinds[kind(plan)] == 2 or any(kinds[one] == (most + 1) // 2 for one in halves):
            continue
        kinds.update((kind(plan), *halves))
        kept.append(plan)
    return kept


def warpgroup_plans() -> list[warpgroups.Plan]:
    sizes = (
        (8, 28, 2, 2),
        (8, 28, 2, 1),
        (4, 28, 3, 1),
        (8, 28, 1, 4),
        (8, 28, 1, 2),
        (4, 28, 2, 2),
        (2, 56, 2, 1),
        (4, 56, 1, 4),
    )
    return [warpgroups.Plan(*one) for one in sizes]


def bottleneck_plans() -> list[bottlenecks.Plan]:
    plan = bottlenecks.Plan
    return [
        plan(8, 28, 4, groups=2, together=3),
        plan(8, 28, 4, groups=2, together=2),
        plan(8, 28, 2, groups=2, together=1),
        plan(8, 28, 2, groups=2, together=2),
        plan(4, 56, 2, groups=2, narrow=True, together=1),
        plan(4, 28, 2, groups=3, together=1),
        plan(4, 28, 2, groups=3, together=2),
        plan(6, 28, 3, groups=2, together=2),
        plan(8, 28, 4, groups=1, together=3),
        plan(4, 14, 2, groups=4, together=2),
        plan(8, 14, 4, groups=4, together=2),
        plan(7, 14, 1, groups=2, together=1),
    ]


def parameters_of(sequence: Sequence, dtype: torch.dtype, device: str) -> list[Parameters]:
    made = []
    for layer in sequence.layers:
        shape = layer.out_channels, layer.in_channels // layer.groups, *layer.kernel
        scale = (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        weight = (torch.randn(shape, device=device) * scale).to(dtype)
        made.append(Parameters(weight, torch.randn(layer.out_channels, device=device) * 0.1))
    return made


def images(block: Block, batch: int, size: tuple[int, int]) -> Tensor:
    x = torch.randn(batch, block.sequence.channels(0), *size, device="cuda").to(block.description.dtype)
    return x.contiguous(memory_format=torch.channels_last)


def error_of(y: Tensor, x: Tensor, sequence: Sequence, parameters: list[Parameters]) -> float:
    """Relative error against float64; a value that is not finite makes it NaN."""
    exact = [Parameters(one.weight.double(), one.bias.double()) for one in parameters]
    expected = run_plain(sequence, exact, x.double())
    return float((y.double() - expected).norm() / expected.norm())


def time_of(calls: list[Callable[[], Any]], budget_s: float = 0.03) -> tuple[float, float]:
    """Median and fastest seconds of a call: replays of a CUDA graph of all calls, each on its own tensors."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    count = max(5, min(40, int(budget_s / (time.perf_counter() - begin))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del kept, graph
    times = [start.elapsed_time(end) * 1e-3 / len(calls) for start, end in events]
    return statistics.median(times), min(times)


class Bench:
    """One block's tensors, and the rows about it."""

    def __init__(self, block: Block) -> None:
        torch.manual_seed(0)
        self.block = block
        description = block.description
        self.parameters = parameters_of(block.sequence, description.dtype, "cuda")
        one = images(block, block.batch, (block.size, block.size))
        out = block.sequence.sizes((block.size, block.size))[-1]
        produced = block.batch * out[0] * out[1] * block.sequence.channels(len(block.sequence.layers)) * 2
        count = max(2, min(64, ROTATION_BYTES // (one.numel() * 2 + produced)))
        self.inputs = [one, *(images(block, block.batch, (block.size, block.size)) for _ in range(count - 1))]
        self.odd = images(block, 3, (19, 37))

    def kernel(self, kernel: Kernel) -> dict[str, Any]:
        ready = loaded(kernel, torch.device("cuda", 0))
        weights = kernel.pack(self.parameters)
        row: dict[str, Any] = {
            "kernel": kernel.name,
            "registers": ready.build.registers,
            "spilled": ready.build.spilled,
            "shared": kernel.shared,
            "threads": kernel.block,
            "resident": ready.blocks_per_multiprocessor,
        }
        y = run(kernel, self.odd, weights)
        row["odd_error"] = error_of(y, self.odd, self.block.sequence, self.parameters)
        x = self.inputs[0]
        y = torch.full_like(kernel.empty_output(x), float("nan"))
        run(kernel, x, weights, out=y)
        few = [0, x.shape[0] - 1]
        row["error"] = error_of(y[few], x[few], self.block.sequence, self.parameters)
        row["unwritten"] = int(torch.isnan(y).sum())
        outputs = [kernel.empty_output(one) for one in self.inputs]
        calls = [ready.prepare(one, weights, None, out, None) for one, out in zip(self.inputs, outputs, strict=True)]
        row["time_s"], row["fastest_s"] = time_of(calls)
        share = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        driver.cuFuncSetAttribute(ready._function, share, 100)
        row["all_shared_time_s"] = time_of(calls)[0]
        return row

    def eager(self) -> dict[str, Any]:
        model = Layers(self.block.sequence, self.parameters)
        return self._rival([lambda x=x: model(x) for x in self.inputs])

    def fused(self) -> dict[str, Any]:
        layers = list(zip(self.block.sequence.layers, self.parameters, strict=True))
        if any(layer.activation != "relu" for layer, _ in layers):
            return {"missing": "cuDNN fuses ReLU alone"}

        def call(x: Tensor) -> Tensor:
            y = x
            for layer, given in layers:
                weight, bias = given.weight, given.bias.to(x.dtype)
                shape = list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups
                if layer.residual is None:
                    y = torch.cudnn_convolution_relu(y, weight, bias, *shape)
                else:
                    y = torch.cudnn_convolution_add_relu(y, weight, x, 1.0, bias, *shape)
            return y

        return self._rival([lambda x=x: call(x) for x in self.inputs])

    def compiled(self) -> dict[str, Any]:
        begin = time.perf_counter()
        torch._dynamo.reset()
        model = torch.compile(Layers(self.block.sequence, self.parameters), dynamic=False)
        model(self.inputs[0])
        row = self._rival([lambda x=x: model(x) for x in self.inputs])
        return row | {"compile_s": time.perf_counter() - begin}

    def _rival(self, calls: list[Callable[[], Tensor]]) -> dict[str, Any]:
        x = self.inputs[0]
        error = error_of(calls[0]()[:1], x[:1], self.block.sequence, self.parameters)
        median, fastest = time_of(calls)
        return {"time_s": median, "fastest_s": fastest, "error": error}


RATE = """
KERNEL(rate_WHAT, 256, 2) {
    float d[8][4] = {};
    u32 f[4] = {(u32)threadIdx.x, 0, 0, 0};
    NO_UNROLL for (int i = 0; i < 2000; i++) UNROLL for (int j = 0; j < 8; j++) CALL;
    float sum = 0;
    UNROLL for (int j = 0; j < 8; j++) sum += d[j][0];
    if (sum == 1.f) *(float*)a.output = sum;
}
"""


def rate(what: str) -> dict[str, Any]:
    """Products of a warp per second on the whole device, by one instruction."""
    call = "bf16::mma(d[j], f, 0, 0)" if what == "k16" else "bf16::mma_8(d[j], f[0], f[1], 0)"
    description = Description(Sequence((pointwise(8, 8, "none"),)), "bf16")
    source = RATE.replace("WHAT", what).replace("CALL", call)
    kernel = Kernel(f"rate_{what}", description, source, 256, 0, (1, 1), lambda _: torch.zeros(8, device="cuda"))
    ready = loaded(kernel, torch.device("cuda", 0))
    blocks = 2 * ready.multiprocessors
    x = torch.zeros(1, 8, 1, blocks, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    start = ready.prepare(x, kernel.pack([]), None, torch.empty_like(x), None)
    seconds = time_of([start])[0]
    return {"seconds": seconds, "products_per_s": blocks * 8 * 2000 * 8 / seconds}


class Layers(nn.Module):
    """The sequence in torch's operators, channels-last."""

    def __init__(self, sequence: Sequence, parameters: list[Parameters]) -> None:
        super().__init__()
        self.sequence = sequence
        self.convolutions = nn.ModuleList()
        for layer, given in zip(sequence.layers, parameters, strict=True):
            one = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel, layer.stride, layer.padding,
                            groups=layer.groups)  # fmt: skip
            one.weight.data, one.bias.data = given.weight, given.bias.to(given.weight.dtype)
            self.convolutions.append(one)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer, one in zip(self.sequence.layers, self.convolutions, strict=True):
            y = one(y)
            y = ACTIVATIONS[layer.activation](y if layer.residual is None else y + x)
        return y


def measure(out: Path, end: float, most: int, chosen: list[Block], rivals: bool) -> None:
    """Everything that OUT has no row of, in order; a line before and after each."""
    done = {(row["block"], row["what"]) for row in rows_of(out)}
    torch.backends.cudnn.benchmark = True
    with (out / "results.jsonl").open("a") as file, torch.no_grad():

        def tell(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        def attempt(block: Block, what: str, run: Callable[[], dict[str, Any]]) -> None:
            if (block.name, what) in done or time.time() > end:
                return
            tell({"block": block.name, "what": what, "state": "begun"})
            try:
                row = run()
            except Exception as error:
                torch.cuda.synchronize()  # raises where the context is lost: nothing can follow in this process
                row = {"failed": repr(error)[:300]}
            tell({"block": block.name, "what": what, "state": "done", **row})

        for what in ("k16", "k8"):
            attempt(chosen[0], f"rate_{what}", lambda what=what: rate(what))
        for block in chosen:
            bench = Bench(block)
            for way in ways_of(block, most):
                attempt(block, way.kernel.name, lambda kernel=way.kernel: bench.kernel(kernel))
            if rivals:
                attempt(block, "eager", bench.eager)
                attempt(block, "cudnn_fused", bench.fused)
        for block in chosen if rivals else ():
            attempt(block, "compile", lambda block=block: Bench(block).compiled())


def rows_of(out: Path) -> list[dict[str, Any]]:
    file = out / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def is_left(out: Path, most: int, chosen: list[Block]) -> bool:
    """Whether a kernel was not even begun."""
    begun = {(row["block"], row["what"]) for row in rows_of(out)}
    return any((block.name, way.kernel.name) not in begun for block in chosen for way in ways_of(block, most))


def build_one(given: tuple[str, int, int]) -> dict[str, Any]:
    name, number, most = given
    block = next(one for one in blocks() if one.name == name)
    kernel = ways_of(block, most)[number].kernel
    try:
        made = build(kernel, ARCHITECTURE)
    except Exception as error:
        return {"kernel": kernel.name, "failed": repr(error)[:300]}
    facts = asdict(made)
    del facts["code"]
    return facts


def build_all(out: Path, most: int, workers: int, chosen: list[Block]) -> None:
    """All machine code, into the cache that the measuring process reads."""
    begin = time.time()
    work = [(block.name, n, most) for block in chosen for n in range(len(ways_of(block, most)))]
    with ProcessPoolExecutor(workers) as pool:
        facts = list(pool.map(build_one, work))
    (out / "builds.json").write_text(json.dumps(facts, indent=1))
    broken = [one for one in facts if "failed" in one]
    print(f"{len(facts)} kernels built in {time.time() - begin:.1f} s, {len(broken)} refused {broken[:2]}", flush=True)


def is_right(row: dict[str, Any]) -> bool:
    """Whether all numbers of a row's kernel are right and written; an error that is none, of NaN, is a wrong one."""
    return all(row.get(one, 0.0) < 1e-2 for one in ("error", "odd_error", "unwritten"))


def document(out: Path, most: int, chosen: list[Block]) -> dict[str, Any]:
    """What ``joulemark.merged_bench.refit`` fits seconds to: every kernel whose numbers were right."""
    rows = {(row["block"], row["what"]): row for row in rows_of(out) if "time_s" in row}
    right = {key: row for key, row in rows.items() if is_right(row)}
    blocks = []
    for block in chosen:
        kernels = [
            {"family": way.family, "plan": asdict(way.plan), **right[block.name, way.kernel.name]}
            for way in ways_of(block, most)
            if way.kernel.counts is not None and (block.name, way.kernel.name) in right
        ]
        rivals = {name: right[block.name, name] for name in RIVALS if (block.name, name) in right}
        layers = [_layer(one) for one in block.sequence.layers]
        shape = {"layers": layers, "batch": block.batch, "size": [block.size] * 2, "format": block.format}
        blocks.append({"name": block.name, **shape, "rivals": rivals, "kernels": kernels})
    return {"schema": "joulemark.merged-probe/1", "gpu": torch.cuda.get_device_name(), "blocks": blocks}


def _layer(layer: Conv) -> dict[str, Any]:
    named = {"in": layer.in_channels, "out": layer.out_channels, "kernel": layer.kernel[0], "stride": layer.stride[0]}
    return {**named, "groups": layer.groups, "activation": layer.activation, "residual": layer.residual}


def report(out: Path) -> None:
    """Per block its rivals and the fastest kernels of each family, and every kernel whose numbers are wrong."""
    times: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for row in rows_of(out):
        if row.get("state") != "done" or "time_s" not in row:
            continue
        what = row["what"]
        kind = what if what in RIVALS else "warpgroup" if "_wg_" in what else "merged"
        seconds = min(row["time_s"], row.get("all_shared_time_s", row["time_s"]))
        times.setdefault(row["block"], {}).setdefault(kind, []).append((seconds, what))
        if kind not in RIVALS and not is_right(row):
            print("WRONG", row["block"], what, row["error"], row["odd_error"], row["unwritten"])
    for name, kinds in times.items():
        rivals = [min(found)[0] for kind, found in kinds.items() if kind in RIVALS]
        own = [min(found)[0] for kind, found in kinds.items() if kind not in RIVALS]
        gain = f"{min(rivals) / min(own):.2f}× " if rivals and own else ""
        fastest = {kind: [f"{1e6 * t:.1f} us {what}" for t, what in sorted(found)[:3]] for kind, found in kinds.items()}
        print(f"{name}: {gain}{fastest}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--most", type=int, default=10, help="kernels per block and family")
    parser.add_argument("--only", default="", help="blocks whose name this regular expression finds")
    parser.add_argument("--kernels-only", action="store_true", help="no rivals")
    parser.add_argument("--build", action="store_true", help="build the kernels and measure nothing")
    parser.add_argument("--measure", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JOULEMARK_KERNEL_CACHE", "/var/tmp/joulemark-kernels")
    chosen = blocks(given.only)
    if given.measure:
        measure(given.out, given.measure, given.most, chosen, not given.kernels_only)
        return 0
    end = time.time() + given.seconds
    build_all(given.out, given.most, min(24, os.cpu_count() or 1), chosen)
    if given.build:
        return 0
    while time.time() < end - 5:
        before = len(rows_of(given.out))
        command = [sys.executable, __file__, str(given.out), "--measure", str(end - 3), "--most", str(given.most)]
        command += ["--only", given.only, *(["--kernels-only"] if given.kernels_only else [])]
        child = subprocess.Popen(command, stderr=(given.out / "errors.txt").open("a"))
        watch(child, given.out / "results.jsonl", end)
        if child.returncode == 0 or len(rows_of(given.out)) == before:
            break
    report(given.out)
    found = document(given.out, given.most, chosen)
    (given.out / "merged-probe.json").write_text(json.dumps(found, indent=1) + "\n")
    return 3 if is_left(given.out, given.most, chosen) else 0


def watch(child: subprocess.Popen[bytes], file: Path, end: float) -> None:
    """Wait for the child; end it when nothing new is written for HANG_S, or the time is over."""
    begin = time.time()
    while child.poll() is None:
        time.sleep(0.2)
        last = max(begin, file.stat().st_mtime if file.exists() else begin)
        if time.time() - last > HANG_S or time.time() > end:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
