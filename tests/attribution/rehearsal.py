"""Stand-ins for a GPU's instruments, with which ``tests/gpu/attribution.py`` is rehearsed: both see one known step.

Run as a program it is Nsight Compute: it takes its options, waits as the profiled program would, and writes its CSV
(banner lines, a line of units, thousands separators, parameters behind kernels' names). ``REHEARSAL`` in the
environment says how it behaves: ``refused`` is a GPU whose counters are for administrators, ``hangs`` a replay without
end, ``cut`` a step that is let go in its middle, ``flushed`` a cache that keeps nothing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 2ul> >"
SUM = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float> > >"
KERNELS = (
    (GEMM, 120e-6, 0.6, 1e12, 2e11),
    (ADD, 70e-6, 0.0, 2e12, 1e12),
    (SUM, 30e-6, 0.0, 1.5e12, 1e10),
    (GEMM, 90e-6, 0.7, 8e11, 2e11),
    (ADD, 60e-6, 0.0, 2e12, 1e12),
    (SUM, 25e-6, 0.0, 1.5e12, 1e10),
)
"""Name, time in s, tensor activity, bytes read and written per s of each launch of the step."""
FLUSHED, LAUNCH_S, CYCLES_PER_S = 1.25, 0.2, 132 * 1.9e9


def bench(model: str) -> Any:
    """A bench that sees the step, and something that takes time as a step would."""
    from joulemark.synthetic_run import SyntheticBench, SyntheticKernel, SyntheticRun
    from joulemark.workloads.base import Step

    kernels = [
        SyntheticKernel(f"{name}(int)" if "<" in name else name, length_s,
                        {"pipe_tensor": tensor, "dram_read_bytes": read, "dram_write_bytes": written})
        for name, length_s, tensor, read, written in KERNELS
    ]  # fmt: skip
    return SyntheticBench(SyntheticRun(kernels, interval_s=10e-6, seed=len(model))), Step(lambda: time.sleep(8e-3))


def rows(wanted: re.Pattern[str], more: float) -> list[list[str]]:
    """Of each launch that is wanted what Nsight Compute prints."""
    found = []
    for name, length_s, tensor, read, written in KERNELS:
        if wanted.search(name.partition("<")[0].rpartition(":")[2]):
            told = name.replace("char*, 2ul> >", "char *, 2>>") + ("(int, T2, T3)" if "<" in name else "")
            numbers = (length_s * 1e9, tensor * 100, read * length_s * more, written * length_s, CYCLES_PER_S)
            found.append([str(len(found)), "1123", "python3.12", "127.0.0.1", told, "1", "7", "(128, 1, 1)",
                          "(2, 7, 64)", "0", "9.0", *(f"{number:,.2f}" for number in numbers)])  # fmt: skip
    return found


def main(arguments: list[str]) -> int:
    """Nsight Compute's command line."""
    behaviour = os.environ.get("REHEARSAL", "")
    log = Path(arguments[arguments.index("--log-file") + 1])
    out, part = (Path(arguments[arguments.index("--ncu-child") + step]) for step in (-1, 1))
    while not (out / part / "go").exists():
        time.sleep(0.01)
    if behaviour == "hangs":
        (out / part / "pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    if behaviour == "refused":
        print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission …")
        return 1
    named = arguments[arguments.index("--kernel-name") + 1].removeprefix("regex:")
    flushed = arguments[arguments.index("--cache-control") + 1] == "all"
    found = rows(re.compile(named), FLUSHED if flushed else 1.0)
    found = found[:1] if behaviour == "cut" else found
    text = io.StringIO()
    table = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    first = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
             "Grid Size", "Device", "CC")  # fmt: skip
    table.writerow([*first, *arguments[arguments.index("--metrics") + 1].split(",")])
    table.writerow([*("" for _ in first), "ns", "%", "byte", "byte", "cycle/second"])
    table.writerows(found)
    log.write_text(f"==PROF== Connected to process 1123 (/usr/bin/python3.12)\n{text.getvalue()}")
    held = {"cut": behaviour == "cut", "build_s": 9.0, "profiled_s": LAUNCH_S * len(found)}
    (out / part / "child.json").write_text(json.dumps(held))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
