"""What kernels stand on: the emulated instructions against matrix products, NVRTC's builds, bad input."""

from __future__ import annotations

import copy

import pytest
import torch

from joulemark.merged.kernels import Description, Kernel, KernelError, build, emulate, run
from joulemark.merged.kernels.description import Format
from joulemark.merged.sequence import Conv, Sequence

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")

# One warp: output[16, 8] = input[16, K] · weights[8, K]ᵀ; A comes by ldmatrix, in 32-bit words whatever the format.
PRODUCT = """
KERNEL(product, 32, 1) {
    using T = FORMAT;
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
    const u32 base = shared_base();
    copy_async(base + lane * 16, (const char*)a.input + lane * 16, true);
    copy_commit();
    copy_wait<0>();
    block_sync();
    u32 fragment[4];
    load_matrix_4(fragment, base + (lane & 15) * 32 + (lane >> 4) * 16);
    float d[4] = {};
    const u32* b = (const u32*)a.weights + g * 8;
    T::mma(d, fragment, load_global(b + t), load_global(b + t + 4));
    float* out = (float*)a.output;
    for (int i = 0; i < 4; i++) out[(g + (i >> 1) * 8) * 8 + 2 * t + (i & 1)] = d[i];
}
"""


def one_layer(channels: int, out: int, format_: Format, adds: bool = False) -> Description:
    return Description(Sequence((Conv(channels, out, (1, 1), (1, 1), (0, 0), (1, 1)),)), format_, adds)


def product(format_: Format) -> Kernel:
    inner = 16 if format_ in ("bf16", "fp16") else 8
    return Kernel(
        "product",
        one_layer(inner, 8, format_),
        PRODUCT.replace("FORMAT", format_),
        32,
        512,
        (1, 16),
        lambda given: given[0].weight.flatten(1).contiguous(),
    )


def small(body: str, shared: int = 1024, block: int = 64, adds: bool = False, **more: object) -> Kernel:
    source = f"KERNEL(small, {block}, 1) {{ {body} }}"
    return Kernel(
        "small", one_layer(8, 8, "fp32", adds), source, block, shared, (1, 16), lambda _: torch.zeros(1), **more
    )  # type: ignore[arg-type]


def run_small(kernel: Kernel, **more: bool | int) -> torch.Tensor:
    x = torch.zeros(1, 8, 1, 16).contiguous(memory_format=torch.channels_last)
    return emulate.run(kernel, x, torch.zeros(1), **more).permute(0, 2, 3, 1).flatten()  # type: ignore[arg-type]


@pytest.mark.parametrize("format_", ["bf16", "fp16", "tf32"])
def test_emulated_mma_is_a_matrix_product(format_: Format) -> None:
    kernel = product(format_)
    inner, dtype = kernel.description.sequence.channels(0), kernel.description.dtype
    a, b = torch.randn(16, inner).to(dtype), torch.randn(8, inner).to(dtype)
    out = torch.empty(16, 8)
    x = a.view(1, 1, 16, inner).permute(0, 3, 1, 2)
    y = out.view(1, 1, 16, 8).permute(0, 3, 1, 2)
    emulate.run(kernel, x, b, out=y)
    # tf32 keeps 10 bits of each operand, cut off or rounded; products of 16-bit numbers are exact, sums are fp32's.
    limit = 2**-9 if format_ == "tf32" else 2**-20
    assert ((out - a.double() @ b.double().T).abs() <= limit * (a.double().abs() @ b.double().abs().T)).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_build_without_a_gpu(architecture: str) -> None:
    made = build(product("bf16"), architecture)
    assert made.code[:4] == b"\x7fELF"
    assert 8 <= made.registers <= 64
    assert (made.stack, made.spilled) == (0, 0)


def test_build_is_kept_on_disk(tmp_path, monkeypatch) -> None:
    from joulemark.merged.kernels import compile as compile_

    monkeypatch.setenv(compile_.CACHE_VARIABLE, str(tmp_path))
    compile_.build_text.cache_clear()
    first = build(product("fp16"), "sm_90a")
    compile_.build_text.cache_clear()
    monkeypatch.setattr(compile_, "_compile", lambda *_: pytest.fail("compiled twice"))
    assert build(product("fp16"), "sm_90a") == first
    compile_.build_text.cache_clear()


def test_a_build_is_the_same_in_this_process_and_in_one_of_its_own(monkeypatch) -> None:
    from joulemark.merged.kernels import compile as compile_

    text = ("small", compile_.full_source(small("((float*)a.output)[threadIdx.x] = 1;"), "prelude.cuh"), "sm_90a")
    alone = compile_._compile(*text)
    with monkeypatch.context() as patched:  # a process that finds no library
        patched.setattr(compile_.nvrtc, "__file__", "nowhere.py")
        assert compile_._compile(*text)[0] == alone[0]
    monkeypatch.setattr("sys.executable", "")
    monkeypatch.setattr(compile_.subprocess, "run", lambda *_, **__: pytest.fail("there is no Python to run"))
    code, log = compile_._compile(*text)
    assert code == alone[0]
    assert compile_._USED.search(log)[0] == compile_._USED.search(alone[1])[0]  # type: ignore[index]
    with pytest.raises(KernelError, match=r"refuses small for sm_90a: NVRTC_ERROR_COMPILATION: (.|\n)*nonsense"):
        compile_._compile("small", "nonsense", "sm_90a")


@pytest.mark.parametrize(("version", "told"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_keeps_nothing_whose_log_would_be_missing(version, told, monkeypatch) -> None:
    """Found on an H200: what NVRTC had compiled for another folder of ours came back without a word on registers."""
    from cuda.bindings import nvrtc as bindings

    from joulemark.merged.kernels import nvrtc

    options: list[bytes] = []
    compile_ = bindings.nvrtcCompileProgram

    def compiled(program, count, given):
        options.extend(given)
        return compile_(program, count, given)

    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (bindings.nvrtcResult.NVRTC_SUCCESS, *version))
    monkeypatch.setattr(bindings, "nvrtcCompileProgram", compiled)
    nvrtc.machine_code("small", 'extern "C" __global__ void small() {}', "sm_90a")
    assert (b"--no-cache" in options) is told


def test_a_copy_of_a_kernel_is_itself_so_that_it_is_loaded_once() -> None:
    kernel = product("bf16")
    assert copy.deepcopy([kernel])[0] is kernel


def test_spills_are_reported() -> None:
    body = "float v[300]; for (int i = 0; i < 300; i++) v[i] = ((float*)a.input)[i * threadIdx.x];"
    body += "for (int k = 0; k < a.count; k++) UNROLL for (int i = 0; i < 300; i++) v[i] = v[i] * v[(i + 1) % 300] + 1;"
    body += "float s = 0; UNROLL for (int i = 0; i < 300; i++) s += v[i]; ((float*)a.output)[threadIdx.x] = s;"
    assert build(small(body), "sm_90a").stack > 0


def test_refused_text_says_why() -> None:
    with pytest.raises(KernelError, match=r"small.*nonsense"):
        build(small("nonsense;"), "sm_90a")
    with pytest.raises(KernelError, match="nonsense"):
        run_small(small("nonsense;"))


def test_what_all_emulated_kernels_begin_with_is_read_once(tmp_path, monkeypatch) -> None:
    from joulemark.merged.kernels import compile as compile_

    monkeypatch.setenv(compile_.CACHE_VARIABLE, str(tmp_path))
    write = "((float*)a.output)[threadIdx.x] = {};"
    assert (run_small(small(write.format(11)))[:64] == 11).all()
    (header,) = tmp_path.glob("*.hpp")
    header.write_text("#error read again")
    assert (run_small(small(write.format(12)))[:64] == 12).all()


def test_emulation_refuses_shared_memory_that_is_not_there() -> None:
    with pytest.raises(KernelError, match="outside of shared memory at 1024"):
        run_small(small("store_shared(shared_base() + 1024, 1);"))


def test_emulation_sees_writes_behind_the_output() -> None:
    with pytest.raises(KernelError, match="outside of its output"):
        run_small(small("((float*)a.output)[8 * 16] = 1;"))


def test_emulation_sees_a_deadlock() -> None:
    with pytest.raises(KernelError, match="deadlock"):
        run_small(small("if (threadIdx.x == 0) block_sync();"))


def test_emulation_sees_a_missing_barrier() -> None:
    exchange = """
        store_shared(shared_base() + threadIdx.x * 4, bits_of((float)threadIdx.x));
        BARRIER
        if (blockIdx.x == 0) ((u32*)a.output)[threadIdx.x] = load_shared(shared_base() + (63 - threadIdx.x) * 4);
    """
    expected = torch.arange(63, -1, -1).float()
    assert torch.equal(run_small(small(exchange.replace("BARRIER", "block_sync();")))[:64], expected)
    assert not torch.equal(run_small(small(exchange.replace("BARRIER", "")))[:64], expected)


def test_emulated_copies_land_when_waited_for() -> None:
    body = """
        if (threadIdx.x < 8) {
            copy_async(shared_base() + threadIdx.x * 16, (const char*)a.input + threadIdx.x * 16, true);
            copy_commit();
            WAIT
            ((u32*)a.output)[threadIdx.x] = load_shared(shared_base() + threadIdx.x * 16);
        }
    """
    assert torch.equal(run_small(small(body.replace("WAIT", "copy_wait<0>();")))[:8], torch.zeros(8))
    assert run_small(small(body.replace("WAIT", "")))[:8].isnan().all()


def test_emulated_blocks_exchange_flags() -> None:
    body = """
        u32* flags = (u32*)a.scratch;
        if (threadIdx.x == 0 && blockIdx.x == 1) store_release(flags, 7);
        if (threadIdx.x == 0 && blockIdx.x == 0) {
            while (load_acquire(flags) != 7) spin();
            ((float*)a.output)[0] = 7;
        }
    """
    kernel = small(body, persistent=2, scratch=lambda batch, size: 4)
    wide = torch.zeros(1, 8, 1, 32).contiguous(memory_format=torch.channels_last)
    assert emulate.run(kernel, wide, torch.zeros(1), resident=2).permute(0, 2, 3, 1).flatten()[0] == 7


def test_emulated_shuffle() -> None:
    out = run_small(small("((float*)a.output)[threadIdx.x] = (float)shuffle(threadIdx.x, threadIdx.x * 7);"))
    assert torch.equal(out[:64], (torch.arange(64) * 7 % 32 + torch.arange(64) // 32 * 32).float())


def test_bad_tensors_are_refused() -> None:
    kernel, weights = small(""), torch.zeros(1)
    with pytest.raises(ValueError, match="channels-last"):
        run(kernel, torch.zeros(1, 8, 4, 16), weights)
    with pytest.raises(ValueError, match=r"takes torch\.float32, got torch\.float64"):
        run(kernel, torch.zeros(1, 8, 1, 16, dtype=torch.float64), weights)
    shifted = torch.zeros(8 * 4 * 16 + 1)[1:].view(1, 4, 16, 8).permute(0, 3, 1, 2)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        run(kernel, shifted, weights)
    with pytest.raises(ValueError, match="takes 8 channels in 2 dimensions"):
        run(kernel, torch.zeros(1, 4, 1, 16), weights)
    x = torch.zeros(1, 8, 1, 16).contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="adds none"):
        run(kernel, x, weights, residual=x)


def test_a_residual_that_would_be_misread_is_refused() -> None:
    kernel, weights = small("", adds=True), torch.zeros(1)
    x = torch.zeros(1, 8, 1, 16).contiguous(memory_format=torch.channels_last)
    for residual in (x[..., :1].clone(memory_format=torch.channels_last), x.half()):
        with pytest.raises(ValueError, match=r"adds a tensor of \(1, 8, 1, 16\) in torch\.float32, got"):
            run(kernel, x, weights, residual=residual)
