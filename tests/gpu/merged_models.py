"""Outputs of whole networks after ``merge`` on a GPU, against fp32, with batch 1, odd batches and odd resolutions.

    python tests/gpu/merged_models.py OUT.json [--only mobilenet_v2] [--limit 500] [--dtype bf16]

Goes on with a file that is there; a case is written as soon as it is done. Relative errors are of Frobenius norms
against fp32 with TF32 off, of weights and inputs rounded to the format; beside them the error of the model as it is,
and how often both agree with the reference on the largest class. Also what merging took, at first and from its cache.
``--only=-b3-`` has the odd resolutions of all networks.

Exit codes: 0 all within the limits, 1 some are not, 3 time was up first, 4 a CUDA error: start again to go on.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from joulemark.merged import merge
from joulemark.merged.plan import relative_error
from joulemark.merged_bench.subjects import NETWORKS, network
from joulemark.workloads.precision import set_fp32

LIMITS = {"bf16": 2e-2, "fp16": 2e-2, "tf32": 5e-3, "fp32": 1e-4}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
ODD = {
    "resnet3d_34": (3, 7, 97, 103),
    "inception_v4": (3, 267, 251),
    "deepcam": (16, 387, 581),
    "unet": (3, 251, 317),
}


def cases(dtype: str) -> list[tuple[str, str, int, tuple[int, ...]]]:
    """(key, network, batch, shape): an odd resolution at batch 3, the usual one at batch 1 and 5."""
    found = []
    for name in NETWORKS:
        usual = network(name, 1).shape[1:]
        for batch, shape in ((3, ODD.get(name, (3, 203, 235))), (1, usual), (5, usual)):
            size = "x".join(str(one) for one in shape)
            found.append((f"{name}-b{batch}-{size}-{dtype}", name, batch, shape))
    return found


def reference_of(model: nn.Module, x: Tensor) -> Tensor:
    """The output in fp32, image by image, TF32 off."""
    set_fp32(tf32=False)
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        return torch.cat([wide(one[None].float()) for one in x])


def agreement(out: Tensor, reference: Tensor) -> float:
    """Share of images (or pixels) whose largest class is the reference's."""
    return float((out.argmax(1) == reference.argmax(1)).float().mean())


def worst(errors: list[float]) -> float:
    """The largest error; one that is no number is worse than any."""
    return max(errors, key=lambda one: math.inf if math.isnan(one) else one)


def measure(name: str, batch: int, shape: tuple[int, ...], dtype: str, budget_s: float) -> dict[str, Any]:
    """Errors and times of one case."""
    torch.manual_seed(batch)
    model = copy.deepcopy(network(name, 1).build()).eval().requires_grad_(False).to("cuda", DTYPES[dtype])
    for key, parameter in model.named_parameters():
        if key.endswith("layer_scale"):
            torch.nn.init.constant_(parameter, 0.1)  # ConvNeXt's 1e-6, as built, would hide every error of a block
    x = torch.randn(batch, *shape, device="cuda").to(DTYPES[dtype])
    reference = reference_of(model, x)
    set_fp32(tf32=dtype == "tf32")
    with torch.no_grad():
        plain = model(x)
        began = time.perf_counter()
        merged = merge(model, x, budget_s=budget_s)
        took = time.perf_counter() - began
        out = merged(x)
        # A batch that it was not made for, and the first one again: nothing may be left over.
        other = merged(x[: max(1, batch // 2)])
        again = merged(x)
        began = time.perf_counter()
        cached = merge(model, x, budget_s=budget_s)
        took_again = time.perf_counter() - began
        error_cached = relative_error(cached(x), reference)
    errors = [relative_error(one, reference[: len(one)]) for one in (out, other, again)]
    return {
        "relative_error": worst([*errors, error_cached]),
        "plain_error": relative_error(plain, reference),
        "agreement": agreement(out, reference),
        "plain_agreement": agreement(plain, reference),
        "variant": merged.variant,
        "merged_segments": sum(one.path is not None and "/" in one.path for one in merged.decisions),
        "times": merged.times,
        "problems": merged.problems,
        "merge_s": took,
        "merge_cached_s": took_again if cached.cached else None,
        "explain": merged.explain().splitlines(),
    }


def main() -> int:
    """All cases that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--limit", type=float, default=500.0, help="begin no case after so many seconds")
    parser.add_argument("--budget", type=float, default=12.0, help="of each merge, in s: outputs count, not times")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    options = parser.parse_args()
    document: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
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
            found = measure(name, batch, shape, options.dtype, options.budget)
        except Exception as error:  # its reason is the case's result; a broken context ends the process
            found = {"failed": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-1500:]}
            fatal = "CUDA" in str(error) and not isinstance(error, torch.OutOfMemoryError)
        document["cases"][key] = found
        options.out.write_text(json.dumps(document, indent=1))
        shown = {one: found[one] for one in found if one not in ("explain", "times", "problems", "trace")}
        print(key, json.dumps(shown), flush=True)
        if fatal:
            return 4
        gc.collect()
        torch.cuda.empty_cache()
    bad = [
        key
        for key, one in document["cases"].items()
        if not one.get("relative_error", float("inf")) <= LIMITS[key.rpartition("-")[2]]
    ]
    print("outside of the limits: " + ", ".join(bad) if bad else "all within the limits")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
