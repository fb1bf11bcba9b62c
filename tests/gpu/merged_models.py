"""Outputs of whole networks after ``merge`` on a GPU, against fp32, with batch 1, odd batches and odd resolutions.

    python tests/gpu/merged_models.py OUT.json [--only mobilenet_v2] [--limit 500] [--dtype bf16]

Every case is merged by ``kernels``: whatever our kernels can execute they do, no time is measured, so that what runs
does not depend on the load of the GPU; in batch 5 without products of warpgroups, which keep kernels of single warps
from running where there are both. Cases of batch 1 (``--auto``) are merged by ``auto`` too, as a user has it, within
``--budget`` seconds, and once more from its cache.

Relative errors are of Frobenius norms against fp32 with TF32 off, of weights and inputs rounded to the format; beside
them the error of the model as it is, and how often both agree with the reference on the largest class, of how many
classes that occur, and how close the two largest ever come. Networks are those of the benchmark
(:func:`joulemark.merged_bench.subjects.condition`). Goes on with a file that is there; a case is written as soon as it
is done. Odd resolutions and batch 1 of all networks come first, batch 5 last; ``--only=-b3-`` has the odd ones alone.

Exit codes: 0 all within the limits, 1 some are not, 2 wrong use or no GPU, 3 time was up first, 4 a CUDA error: start
again to go on.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from joulemark.merged import MergedModel, merge
from joulemark.merged.families import Family, known_families
from joulemark.merged.memory import give_back
from joulemark.merged.paths import Executed
from joulemark.merged.questions import relative_error
from joulemark.merged.replay import for_capture
from joulemark.merged_bench.subjects import NETWORKS, images, network
from joulemark.workloads.precision import set_fp32

SCHEMA = "joulemark/merged-outputs/1"
LIMITS = {"bf16": 2e-2, "fp16": 2e-2, "tf32": 5e-3, "fp32": 1e-4}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
ODD = {
    "resnet3d_34": (3, 7, 97, 103),
    "inception_v4": (3, 267, 251),
    "deepcam": (16, 387, 581),
    "unet": (3, 251, 317),
}


def cases(dtype: str) -> list[tuple[str, str, int, tuple[int, ...]]]:
    """(key, network, batch, shape): an odd resolution at batch 3 and the usual one at batch 1; then all at batch 5."""
    usual = {name: network(name, 1).shape[1:] for name in NETWORKS}
    chosen = [
        *((name, *one) for name in NETWORKS for one in ((3, ODD.get(name, (3, 203, 235))), (1, usual[name]))),
        *((name, 5, usual[name]) for name in NETWORKS),
    ]
    sizes = ["x".join(map(str, shape)) for *_, shape in chosen]
    return [(f"{one[0]}-b{one[1]}-{size}-{dtype}", *one) for one, size in zip(chosen, sizes, strict=True)]


def reference_of(model: nn.Module, x: Tensor) -> Tensor:
    """The output in fp32, image by image, TF32 off."""
    set_fp32(tf32=False)
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        return torch.cat([wide(one[None].float()) for one in x])


def agreement(out: Tensor, reference: Tensor) -> float:
    """Share of images (or pixels) whose largest class is the reference's."""
    return float((out.argmax(1) == reference.argmax(1)).float().mean())


def least_margin(reference: Tensor) -> float:
    """Least distance between the two largest classes of an image or pixel, in root mean squares of the output.

    Weights are random, so classes may come closer to each other than any format of 16 bits can tell.
    """
    largest = reference.topk(2, dim=1).values
    return float((largest[:, 0] - largest[:, 1]).min() / reference.square().mean().sqrt())


def worst(errors: list[float]) -> float:
    """The largest error; one that is no number is worse than any."""
    return max(errors, key=lambda one: math.inf if math.isnan(one) else one)


def measure(
    name: str, batch: int, shape: tuple[int, ...], dtype: str, device: str = "cuda", budget_s: float = 0.0, **more: Any
) -> dict[str, Any]:
    """One case: merged by kernels, and by itself where there is a budget.

    Args:
        more: for ``merge``: rates and kernels of a device that is not there.
    """
    torch.manual_seed(batch)
    model = copy.deepcopy(network(name, 1).build()).requires_grad_(False).to(device, DTYPES[dtype])
    x = images(batch, shape, device).to(DTYPES[dtype])
    reference = reference_of(model, x)
    set_fp32(tf32=dtype == "tf32")
    with torch.no_grad():
        plain = model(x)
        ways = {"kernels": by_kernels(model, x, reference, {"families": families_for(batch, device), **more})}
        if budget_s:
            ways["auto"] = by_itself(model, x, reference, budget_s, more)
    return {
        "relative_error": worst([one["relative_error"] for one in ways.values()]),
        "plain_error": relative_error(plain, reference),
        "plain_agreement": agreement(plain, reference),
        "classes": len(reference.argmax(1).unique()),
        "least_margin": least_margin(reference),
        **ways,
    }


def families_for(batch: int, device: str) -> tuple[Family, ...] | None:
    """Of batch 5 kernels of single warps, of any other all; None, which is none on a CPU."""
    if batch != 5 or device == "cpu":
        return None
    return tuple(one for one in known_families() if one.name != "wide" and not one.name.endswith("_warpgroup"))


def by_kernels(model: nn.Module, x: Tensor, reference: Tensor, more: dict[str, Any]) -> dict[str, Any]:
    """Merged wherever our kernels can, for the example's batch and for half of it."""
    merged, took_s = timed_merge(model, x, strategy="kernels", **more)
    return told(merged, x, reference) | {"merge_s": took_s}


def by_itself(model: nn.Module, x: Tensor, reference: Tensor, budget_s: float, more: dict[str, Any]) -> dict[str, Any]:
    """Merged as a user has it, and once more from the cache."""
    merged, took_s = timed_merge(model, x, budget_s=budget_s, **more)
    found = told(merged, x, reference)
    merged.inner = for_capture(merged.inner)  # a new process would have the memory of its graph
    give_back(x.device)
    cached, again_s = timed_merge(model, x, budget_s=budget_s, **more)
    found["relative_error"] = worst([found["relative_error"], relative_error(cached(x), reference)])
    times = {"times": merged.times, "problems": merged.problems}
    return found | {"merge_s": took_s, "merge_cached_s": again_s if cached.cached else None, **times}


def timed_merge(model: nn.Module, x: Tensor, **options: Any) -> tuple[MergedModel, float]:
    """What ``merge`` gives, and its seconds."""
    began = time.perf_counter()
    merged = merge(model, x, **options)
    return merged, time.perf_counter() - began


def told(merged: MergedModel, x: Tensor, reference: Tensor) -> dict[str, Any]:
    """What a merged model gives for its example, for another batch and for the example again; what runs in it."""
    outs = [merged(x), merged(x[: max(1, len(x) // 2)]), merged(x)]
    executed = [one for one in merged.modules() if isinstance(one, Executed)]
    ranges = [one for one in executed if len(one.sequence.layers) > 1]
    return {
        "relative_error": worst([relative_error(one, reference[: len(one)]) for one in outs]),
        "agreement": agreement(outs[0], reference),
        "variant": merged.variant,
        "merged_ranges": len(ranges),
        "merged_layers": sum(len(one.sequence.layers) for one in ranges),
        "paths": dict(Counter(one.path.partition("/")[0].partition(" ")[0] for one in executed)),
        "failed": merged.failed,
        "refused": [str(one) for one in merged.decisions if one.how == "refused"],
        "explain": merged.explain().splitlines(),
    }


def line_of(found: dict[str, Any]) -> str:
    """A case in one line."""
    if "failed" in found:
        return f"failed: {found['failed']}"
    classes = f"{found['classes']} classes, {found['least_margin']:.4f} apart"
    parts = [f"plain {found['plain_error']:.4f} (agrees {found['plain_agreement']:.3f}, {classes})"]
    for way in ("kernels", "auto"):
        one = found.get(way)
        if one is None:
            continue
        again = "" if one.get("merge_cached_s") is None else f", again {one['merge_cached_s']:.1f} s"
        parts.append(
            f"{way} {one['relative_error']:.4f} (agrees {one['agreement']:.3f}, {one['merged_ranges']} ranges of "
            f"{one['merged_layers']} layers merged, {one['variant']}, {one['merge_s']:.1f} s{again})"
        )
        parts += [f"{way} {one['failed']}"] * (one["failed"] is not None) + one["refused"]
    return "; ".join(parts)


def is_right(key: str, found: dict[str, Any]) -> bool:
    """Whether errors are within the limit of the case's format, and nothing failed or was refused."""
    ways = [found[way] for way in ("kernels", "auto") if way in found]
    whole = bool(ways) and not any(one["failed"] or one["refused"] for one in ways)
    return whole and found["relative_error"] <= LIMITS[key.rpartition("-")[2]]


def main(arguments: list[str] | None = None) -> int:
    """All cases that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--limit", type=float, default=500.0, help="begin no case after so many seconds")
    parser.add_argument("--auto", default="-b1-", metavar="PART", help="of names of cases merged by auto too")
    parser.add_argument("--budget", type=float, default=6.0, help="of merging by auto, in s: outputs count, not times")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU is visible: see joulemark env")
    facts = {"schema": SCHEMA, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    document: dict[str, Any] = {**facts, "cases": {}}
    if options.out.exists():
        document = json.loads(options.out.read_text())
    begin = time.perf_counter()
    for key, name, batch, shape in cases(options.dtype):
        if key in document["cases"] or options.only not in key:
            continue
        if time.perf_counter() - begin > options.limit:
            return 3
        fatal = False
        try:
            budget_s = options.budget if options.auto in key else 0.0
            found = measure(name, batch, shape, options.dtype, budget_s=budget_s)
        except Exception as error:  # its reason is the case's result; a broken context ends the process
            found = {"failed": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-1500:]}
            fatal = "CUDA" in str(error) and not isinstance(error, torch.OutOfMemoryError)
        document["cases"][key] = found
        options.out.write_text(json.dumps(document, indent=1))
        print(f"{key}: {line_of(found)}", flush=True)
        if fatal:
            return 4
        gc.collect()
        torch.cuda.empty_cache()
    bad = [key for key, found in document["cases"].items() if not is_right(key, found)]
    print("outside of the limits: " + ", ".join(bad) if bad else "all within the limits")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
