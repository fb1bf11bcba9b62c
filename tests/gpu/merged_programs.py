"""Programs of compiled networks on a GPU: made and proven in one process, run without a compiler in another.

    python tests/gpu/merged_programs.py OUT.json [--networks mobilenet_v2,efficientnet_b0] [--batch 32] [--limit 90]

For each case two processes with empty caches of their own. The first traces the network, compiles it, makes its program
and keeps that, an input and the output; the second traces it too and takes the program. Cases beside the networks:
``own``, layers that are operators of our own in the graph, and ``gated``, one of these by kernels of ours in Triton,
which alone may import Triton. Outputs are compared bit for bit, those of a CUDA graph too. ``--device cpu --tiny`` runs
all of it without a GPU: there is no program then. The file is written after each case; a case that fails or hangs costs
its own figures alone: they are null, with the reason.

Exit codes: 0 all programs run and give the same, 1 some do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from children import caches_in, environment

_CALLS = 15
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", default="mobilenet_v2,efficientnet_b0,inception_v4")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds, after which no case begins")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="inputs of a size for tests")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--role", choices=("first", "second"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.role:
        report = first(given) if given.role == "first" else second(given)
        given.out.write_text(json.dumps(report), encoding="utf-8")
        return 0
    began, cases = time.monotonic(), {}
    for case in ("own", "gated", *filter(None, given.networks.split(","))):
        left = given.limit - (time.monotonic() - began)
        cases[case] = of_case(given, case, left) if left > 0 else {"why": "time was up"}
        print(case, json.dumps(cases[case], indent=1), flush=True)
        given.out.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    return 0 if all(works(one) for one in cases.values()) else 1


def works(case: dict[str, Any]) -> bool:
    second = case.get("second") or {}
    return bool(second.get("equal") and second.get("replayed_equal"))


def of_case(given: argparse.Namespace, case: str, limit: float) -> dict[str, Any]:
    """Both processes' reports."""
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role in ("first", "second"):
            began = time.monotonic()
            reports[role] = report = of_process(given, case, role, Path(folder), limit)
            limit -= time.monotonic() - began
            report["whole_s"] = round(time.monotonic() - began, 2)
            if report.get("why"):
                break
    return reports


def of_process(given: argparse.Namespace, case: str, role: str, folder: Path, limit: float) -> dict[str, Any]:
    told = folder / f"{role}.json"
    command = [sys.executable, __file__, str(told), "--role", role, "--case", case, "--batch", str(given.batch)]
    command += ["--device", given.device, "--mode", given.mode, *(["--tiny"] if given.tiny else [])]
    own = {**caches_in(folder / role), "JOULEMARK_MERGED_CACHE": str(folder / "merged"), "PROGRAM_FOLDER": str(folder)}
    try:
        done = subprocess.run(
            command, env=environment(**own), timeout=max(limit, 1), capture_output=True, text=True, check=False
        )
        report: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    except subprocess.TimeoutExpired:
        return {"why": "time was up"}
    except (OSError, ValueError):
        return {"why": f"it died with {done.returncode}: {done.stderr[-1500:]}"}
    return report


class Clock:
    """Seconds of steps, the GPU's work included."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, {}

    def of(self, name: str, step: Callable[[], Any]) -> Any:
        self.wait()
        began = time.perf_counter()
        made = step()
        self.wait()
        self.seconds[name] = round(time.perf_counter() - began, 4)
        return made

    def wait(self) -> None:
        import torch

        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def first(given: argparse.Namespace) -> dict[str, Any]:
    """Compile, make a program, keep it."""
    import torch

    from joulemark.merged import cache
    from joulemark.merged.compiling import Compiled
    from joulemark.merged.programs import NoProgram

    clock, report = Clock(given.device), {}
    graph, x = case_of(given, clock)
    with torch.no_grad():
        made = Compiled(graph, given.mode)
        clock.of("compile", lambda: made.ready_for(x))
        y = clock.of("first_call", lambda: made(x))
        try:
            program = clock.of("program", lambda: made.record(x))
        except NoProgram as error:
            return {"why": str(error), "seconds": clock.seconds}
        again = made(x)
        report["same_after"] = same(again, y)
        cache.write("program", "key", asdict(program))
        report["bytes"] = (cache.folder() / "program-key.json").stat().st_size
        report["text_bytes"] = len(program.text)
        report["kernels"] = len(program.kernels)
        other = Compiled(graph, given.mode)
        clock.of("take", lambda: other.take(program, x))
        report["host_us"] = {"compiled": host_us(made, x, clock), "program": host_us(other, x, clock)}
        report["host_us"] |= {"compiled_again": host_us(made, x, clock), "program_again": host_us(other, x, clock)}
        state = graph.state_dict()
        torch.save({"x": x, "y": y, "state": state}, folder() / "kept.pt")
    return {**report, "seconds": clock.seconds}


def second(given: argparse.Namespace) -> dict[str, Any]:
    """Take the program and run it."""
    import torch

    from joulemark.merged import cache
    from joulemark.merged.compiling import Compiled
    from joulemark.merged.programs import NoProgram, Program
    from joulemark.merged.replay import capture

    clock, report = Clock(given.device), {}
    graph, x = case_of(given, clock)
    kept = torch.load(folder() / "kept.pt", map_location=given.device)
    graph.load_state_dict(kept["state"])
    x.copy_(kept["x"])
    report["compilers_before"] = compilers()
    with torch.no_grad():
        made = Compiled(graph, given.mode)
        program = clock.of("read", lambda: cache.read("program", "key", Program))
        try:
            clock.of("take", lambda: made.take(program, x))
        except NoProgram as error:
            return {"why": str(error), "seconds": clock.seconds}
        report["compilers_after_take"] = compilers()
        y = clock.of("first_call", lambda: made(x))
        clock.of("second_call", lambda: made(x))
        report |= {"equal": same(y, kept["y"]), "off": off(y, kept["y"])}
        report["compilers_after_call"] = compilers()
        report["host_us"] = host_us(made, x, clock)
        graph, out = clock.of("capture", lambda: capture(made, (x,), None))
        x.copy_(kept["x"].flip(0))
        graph.replay()
        clock.wait()
        replayed = out.clone()
        report["replayed_equal"] = same(replayed, made(x)) and not same(replayed, y)
    return {**report, "seconds": clock.seconds}


def case_of(given: argparse.Namespace, clock: Clock) -> tuple[Any, Any]:
    """A module and an input for it."""
    import torch

    from joulemark.merged.graph import trace
    from joulemark.merged_bench.options import Options
    from joulemark.merged_bench.prepare import arranged, inputs_of, weighted
    from joulemark.merged_bench.subjects import network

    if given.case in ("own", "gated"):
        torch.manual_seed(1)
        size = (given.batch, 64, 28, 28)
        x = torch.randn(size).to(given.device, torch.bfloat16).contiguous(memory_format=torch.channels_last)
        return arranged(own(gated=given.case == "gated"), "bf16", given.device), x
    subject = network(given.case, given.batch)
    model = arranged(weighted(subject), "bf16", given.device)
    shape = subject.tiny if given.tiny else subject.shape
    x = inputs_of(shape, Options("bf16", most_inputs=1), given.device)[0]
    with torch.no_grad():
        return clock.of("trace", lambda: trace(model, (x,), on_disk=True)), x


def own(gated: bool) -> Any:
    """Layers of which some are operators of our own in a compiled graph."""
    import torch
    from torch import nn

    from joulemark.merged.bricks import Parameters
    from joulemark.merged.paths import Executed
    from joulemark.merged.sequence import Conv, Sequence
    from joulemark.merged.squeeze import Excitation

    def pointwise(path: str) -> Executed:
        conv = Conv(64, 64, (1, 1), (1, 1), (0, 0), (1, 1), activation="relu")
        return Executed(Sequence((conv,)), [Parameters(torch.randn(64, 64, 1, 1) / 8, torch.randn(64))], path, False)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.third = pointwise("product"), pointwise("product")
            self.second = nn.Conv2d(64, 64, 3, padding=1)
            self.gate = Excitation(nn.Conv2d(64, 8, 1), "relu", nn.Conv2d(8, 64, 1), False) if gated else None

        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.silu(self.second(self.first(x) + 1)) * 2
            return self.third(x if self.gate is None else x * self.gate(x)).sigmoid()

    return Own().eval()


def folder() -> Path:
    return Path(os.environ["PROGRAM_FOLDER"])


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    import torch

    bits = [each.contiguous().flatten().view(torch.uint8) for each in (one, other)]
    return one.stride() == other.stride() and torch.equal(*bits)


def off(one: Any, other: Any) -> float:
    """Relative error of an output."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def host_us(made: Any, x: Any, clock: Clock) -> float:
    """Microseconds until a call has enqueued its work, the median."""
    times = []
    for _ in range(_CALLS):
        clock.wait()
        began = time.perf_counter()
        made(x)
        times.append(time.perf_counter() - began)
    return round(1e6 * statistics.median(times), 1)


def compilers() -> dict[str, int]:
    """Imported modules of compilers."""
    counts = {name: sum(one == name or one.startswith(f"{name}.") for one in sys.modules) for name in _COMPILERS}
    return {name: count for name, count in counts.items() if count}


if __name__ == "__main__":
    sys.exit(main())
