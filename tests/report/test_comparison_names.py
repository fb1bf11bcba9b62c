"""Rows of a comparison are told apart, also where there is little room."""

from dataclasses import replace

from joulemark.records import Case
from joulemark.report.names import kernel_titles, made_of, series_titles, without_common_parts


def test_parts_that_all_keys_hold_are_said_once():
    keys = [
        "resnet50-train-bf16-b8-nvidia-h200",
        "resnet50-train-bf16-b64-nvidia-h200",
        "vgg16-train-bf16-b8-nvidia-h200",
    ]
    names, common = without_common_parts(keys)
    assert list(names.values()) == ["resnet50-b8", "resnet50-b64", "vgg16-b8"]
    assert common == "train-bf16-nvidia-h200"


def test_keys_that_would_become_equal_or_empty_stay_whole():
    assert without_common_parts(["a-b", "b-a"]) == ({"a-b": "a-b", "b-a": "b-a"}, "")
    assert without_common_parts(["a", "a-b"]) == ({"a": "a", "a-b": "a-b"}, "")
    assert without_common_parts(["a-b"]) == ({"a-b": "a-b"}, "")


def test_series_are_called_by_as_much_as_tells_them_apart():
    case = Case("resnet50", "train", "eager", "bf16", 8, "channels_last", "device", "nvidia-h200")

    def titles(*changes):
        return series_titles([replace(case, **change).series_to_json() for change in changes])

    assert titles({}, {"input": "loader"}, {"world_size": 2}, {"params": {"depth": 3}}) == [
        "resnet50 train bf16 eager",
        "resnet50 train bf16 eager loader",
        "resnet50 train bf16 eager x2",
        "resnet50 train bf16 eager depth=3",
    ]
    assert titles({}, {"gpu_model": "cpu"}, {"workload": "vgg16"}) == [
        "resnet50 train bf16 eager nvidia-h200",
        "resnet50 train bf16 eager cpu",
        "vgg16 train bf16 eager",
    ]
    assert len(set(titles({}, {"benchmark": "mine"}, {"layout": "contiguous"}))) == 3


def test_the_first_files_of_a_document_are_named():
    assert made_of([{"file": "a"}, {"file": "b"}]) == "made of a, b"
    assert made_of([{"file": str(number)} for number in range(20)]).endswith("6, 7 and 12 more (--json names all)")


ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<8, "
ADD = f"{ELEMENTWISE}at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int, std::array<char*, 3ul>)"
CLAMP = (
    f"{ELEMENTWISE}at::native::(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&)::{{lambda()#1}}"
    "::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 3ul> >(int)"
)
POOLING = "void at::native::(anonymous namespace)::max_pool_forward_nhwc<c10::BFloat16, int>(long, {})"
GEMM = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"


def test_kernels_are_called_by_what_tells_them_apart():
    names = [ADD, CLAMP, GEMM, "memcpy", "(x)", "\x1b[31mevil<int>(int)"]
    titles = kernel_titles(names, 60)
    assert titles[ADD] == "vectorized_elementwise_kernel<8, CUDAFunctor_add>"
    assert titles[CLAMP] == "vectorized_elementwise_kernel<8, launch_clamp_scalar>"
    assert (titles["memcpy"], titles["(x)"]) == ("memcpy", "(x)")
    assert "\x1b" not in titles[names[-1]]
    assert all(len(title) <= 60 for title in titles.values())
    assert len(set(titles.values())) == len(names)


def test_kernels_of_one_outline_keep_their_arguments():
    names = [POOLING.format("int"), POOLING.format("long")]
    titles = kernel_titles(names, 120)
    assert list(titles.values()) == names
    assert kernel_titles(names[:1], 120)[names[0]] == "max_pool_forward_nhwc<BFloat16, int>"
