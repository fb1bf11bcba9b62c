"""An attribution beside Nsight Compute: functions, launches in their order, errors."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from joulemark.attribution.against import METRICS, compare, function_of, functions_of, largest_error
from joulemark.attribution.document import Attribution
from joulemark.utilization.ncu_csv import Launch, Reading, read_export

from .conftest import ADD, GEMM, STEP, SUM, TINY

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("sm90_xmma_gemm_bf16bf16", "sm90_xmma_gemm_bf16bf16"),
        ("void at::native::reduce_kernel<512, 1, at::ReduceOp<float> >(at::ReduceOp<float>)", "reduce_kernel"),
        ("void (anonymous namespace)::softmax<4, float>(float*, int)", "softmax"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, __half>(int)", "kernel"),
        ("void at::unrolled<at::copy(T &)::[lambda() (instance 3)]::operator ()(), A<char *, 2>>(T1)", "unrolled"),
        ("void at::native::unrolled<at::copy(T&)::{lambda()#3}::operator()() const, A<char*, 2ul> >(A)", "unrolled"),
        ("_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionEEEvNT_6ParamsE", "Kernel"),
        ("_Z4scalPfi", "scal"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("odd>name", "name"),
    ],
)
def test_a_function_is_a_name_without_what_tools_write_differently(name, function):
    assert function_of(name) == function


def test_both_tools_tell_the_same_functions_of_real_kernels():
    export = read_export(DATA / "counters" / "ncu_resnet18_b64_fp16_h200.csv")
    counted = Counter(function_of(one.kernel) for one in export.launches)
    with gzip.open(DATA / "trace" / "torch_profiler_resnet18_b8_h200.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    profiled = Counter(function_of(one["name"]) for one in events if one.get("cat") == "kernel")
    assert {"vectorized_elementwise_kernel", "reduce_kernel", "nchwToNhwcKernel"} <= counted.keys() & profiled.keys()
    assert all("<" not in name and "(" not in name for name in counted | profiled)


def test_functions_with_long_launches_come_first(run):
    timeline = run().recorded()[1]
    found = functions_of(timeline)
    assert [one.name for one in found] == [GEMM.name, function_of(ADD.name), "reduce_kernel"]
    assert found[0].launches == 3
    assert found[0].long_s == pytest.approx(found[0].time_s)
    assert found[1].long_s < 0.1 * found[1].time_s  # it lasts 47 µs
    assert found[2].long_s == 0


def launches(kernels, more=1.0):
    """What Nsight Compute would say of some kernels, which move so much more."""
    found = []
    for number, kernel in enumerate(kernels):
        moved = [kernel.rates[name] * kernel.length_s * more for name in ("dram_read_bytes", "dram_write_bytes")]
        values = (kernel.length_s, 100 * kernel.rates["pipe_tensor"], *moved)
        readings = {name: Reading(value, "") for name, value in zip(METRICS, values, strict=True)}
        found.append(Launch(number, 1, kernel.name, readings=readings))
    return found


@pytest.fixture(scope="module")
def places():
    from joulemark.synthetic_run import SyntheticRun

    return Attribution(*SyntheticRun(STEP, steps=15, seed=1).recorded()).places()


KERNELS = [kernel for kernel in STEP if kernel is not TINY]


def test_places_stand_in_the_order_of_the_step(places):
    assert [one["name"] for one in places] == [kernel.name for kernel in STEP]
    assert [one["class"] for one in places[:3]] == ["tensor_gemm", "elementwise", "reduction"]
    assert all(one["launches"] == 1 for one in places)


def test_errors_are_those_of_the_classes(places):
    found = compare(places, launches(KERNELS, more=0.8))
    assert (found["launches"], found["compared"], found["differing"]) == (8, 8, [])
    assert found["time_compared"] == pytest.approx(1, abs=0.01)
    gemm, add, _ = found["classes"]
    assert (gemm["class"], gemm["launches"], add["class"]) == ("tensor_gemm", 3, "elementwise")
    assert gemm["dram_error"] == pytest.approx(0.25, abs=0.02)
    assert gemm["tensor_error"] == pytest.approx(0, abs=0.01)
    assert add["tensor_error"] is None
    assert [one["class"] for one in found["classes_of_long_launches"]] == ["tensor_gemm"]
    assert largest_error(found["classes"], "dram_error") == pytest.approx(0.25, abs=0.05)
    assert largest_error([add], "tensor_error") is None
    assert {one["name"] for one in found["kernels"]} == {GEMM.name, ADD.name, SUM.name}


def test_a_function_that_both_did_not_see_equally_often_is_compared_nowhere(places):
    found = compare(places, launches([*KERNELS, ADD]))
    assert found["differing"] == [{"name": function_of(ADD.name), "launches": 2, "ncu_launches": 3}]
    assert {one["class"] for one in found["classes"]} == {"tensor_gemm", "reduction"}
    assert [one["ncu_launches"] for one in compare(places, launches(KERNELS[:6]))["differing"]] == [2, 2]
    cut = compare(places, launches(KERNELS[:6]), cut=True)
    assert (cut["differing"], cut["compared"]) == ([], 6)


def test_counters_that_were_not_counted_leave_nothing_to_compare(places):
    bare = [Launch(0, 1, GEMM.name), Launch(1, 1, "of another program")]
    found = compare(places, bare, cut=True)
    assert (found["launches"], found["compared"], found["time_compared"]) == (2, 0, 0)
    assert [one["name"] for one in found["differing"]] == ["program"]
