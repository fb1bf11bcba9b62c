"""Each call of the timed function leaves a line in calls.log (set CALLS=/path)."""
import os
import time
import pytest


@pytest.mark.parametrize("i", range(4))
def test_gpu_like(bench, i):
    def run():
        with open(os.environ.get("CALLS", "calls.log"), "a") as f:
            f.write("%s %d %f\n" % (os.environ.get("PYTEST_XDIST_WORKER", "main"), i, time.time()))
        time.sleep(.02)
    bench.pedantic(run, rounds=10, iterations=1)
