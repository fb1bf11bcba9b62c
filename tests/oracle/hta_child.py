"""Runs in a Python that has HolisticTraceAnalysis (``pip install traceinsight``): one trace, its figures as JSON."""

import json
import logging
import os
import resource
import sys
import time


def main() -> None:
    """``hta_child.py FILE default|exact``: load and temporal breakdown; ``exact`` neither rounds nor drops a step."""
    path, mode = sys.argv[1:]
    if mode == "exact":
        os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    begin = time.perf_counter()
    try:
        analysis = TraceAnalysis(trace_files={0: path}, include_last_profiler_step=mode == "exact")
        rows = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    names = ("idle_time", "compute_time", "non_compute_time", "kernel_time")
    figures = {name: float(rows[0][f"{name}(us)"]) * 1e-6 for name in names}
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, **figures}))


main()
