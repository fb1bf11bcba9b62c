"""Classes of kernels: by names that libraries really use, and corrected by counters."""

from __future__ import annotations

import pytest

from joulemark.utilization.kernels import CLASSES, TITLES, class_by_name, classify

NAMES = {
    "tensor_gemm": [
        "nvjet_sm90_hsh_8x64_64x16_2x1_v_bz_bias_TNN",
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_warpgroupsize1x1x1_g1_execute",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_tensor16x8x8",
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_relu_f2f_stages_64x3_tn",
        "volta_h884gemm_64x128_ldg8_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(Params)",
        "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
        "gemm_f16_tn_128x64",
        "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS_4gemm4warp11MmaTensorOp9TransposeE",
        "triton_tem_fused_mm_3",
        "Cijk_Ailk_Bjlk_SB_Bias_MT64x16x16_MI16x16x1_SN",
    ],
    "gemm": [
        "ampere_sgemm_32x32_sliced1x4_tn",
        "volta_hgemm_32x128_tn",
        "void precomputed_convolve_sgemm<__half, 128, 6, 7, 3, 3, 5, 1, 0>(int, int, int, const T1 *)",
        "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
        "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize32x32x8_stage3_g1_ffma_aligna4_execute",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>(T1::Params)",
        "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>(T11)",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, c10::Half, int>(int)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false>>(Flash_fwd_params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
        "triton_tem_fused_flex_attention_0",
    ],
    "normalization": [
        "void at::native::batch_norm_transform_input_channels_last_kernel<c10::Half, float>(const T1 *)",
        "void at::vectorized_elementwise_kernel<4, at::<unnamed>::batch_norm_calc_invstd(const at::Tensor &)>(int, T2)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>(long)",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 32, true, 1>(float, float)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*)",
        "triton_per_fused_native_layer_norm_2",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::CUDAFunctor_add<float>, std::array<char*, 3>>(int)",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(int)",
        "triton_poi_fused_convolution_relu_1",
    ],
    "reduction": [
        "void at::native::reduce_kernel<128, 4, at::ReduceOp<c10::Half, at::MeanOps<c10::Half, float>>>(T3)",
        "void at::native::(anonymous namespace)::max_pool_forward_nhwc<c10::Half, int>(const T1 *, int)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, true, false>(Params)",
        "triton_red_fused_sum_4",
    ],
    "copy": [
        "void at::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)>(int)",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(Params)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<float, unsigned int, 1>(float*)",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(int)",
    ],
    "optimizer": [
        "void (anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float>>(T)",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)",
    ],
    "other": [
        "void cask_cudnn::computeOffsetsKernel<false, false>(cask_cudnn::ComputeOffsetsParams)",
        "mine",
        "",
        ")(",
    ],
}


@pytest.mark.parametrize(("expected", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_names(expected: str, name: str) -> None:
    assert class_by_name(name) == expected


def test_every_class_has_a_title_and_an_example() -> None:
    assert set(CLASSES) == set(TITLES) == set(NAMES)


def test_a_product_that_never_touches_the_tensor_pipe_is_found() -> None:
    found = classify("gemm_f16_tn_128x64", 0.0, 0, 10**6)
    assert (found.kernel_class, found.source, found.uses_tensor_cores, found.by_counters) == (
        "gemm",
        "counters",
        False,
        True,
    )
    # fp16 multiply-adds are issued to the tensor pipe: 6,272 of 22 million instructions are no matrix product.
    assert classify("precomputed_convolve_sgemm<__half>", 3e-4, 6272, 22453760).kernel_class == "gemm"


def test_a_product_on_tensor_cores_whose_name_does_not_say_so() -> None:
    found = classify("my_gemm", 0.4)
    assert (found.kernel_class, found.source) == ("tensor_gemm", "counters")


def test_a_small_product_waits_most_of_its_time_and_is_on_tensor_cores_all_the_same() -> None:
    assert classify("nvjet_sm90_hsh_8x64", 0.002, 16128, 497948).kernel_class == "tensor_gemm"


def test_other_kernels_keep_their_class_and_say_whether_they_use_tensor_cores() -> None:
    assert classify("batch_norm_transform", 0.0015, 8192, 4292608).uses_tensor_cores is False
    fused = classify("triton_poi_fused_add_0", 0.3)
    assert (fused.kernel_class, fused.uses_tensor_cores) == ("elementwise", True)
    assert classify("flash_fwd_kernel", 0.5).uses_tensor_cores is True


def test_without_counters_the_name_decides_or_nothing_does() -> None:
    assert classify("nvjet_sm90").uses_tensor_cores is True
    assert classify("ampere_sgemm").uses_tensor_cores is False
    assert classify("flash_fwd_kernel").uses_tensor_cores is None
    assert classify("mine").uses_tensor_cores is None
    assert classify("mine", None, 10, None).uses_tensor_cores is True
