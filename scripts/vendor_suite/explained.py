"""Failures that were looked into one by one, and are not the emulator's: by the test's name, with how that is known.

A failure counts as explained where its text is the one that was looked into, too: whatever else the same test may say
counts as wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["EXPLAINED", "Explanation", "explanation"]


@dataclass(frozen=True)
class Explanation:
    """Why a test fails.

    Attributes:
        verdict: one of `table.VERDICTS`.
        text: what the failure says, as a pattern.
        why: how it is known that it is not the emulator's.
    """

    verdict: str
    text: str
    why: str


def explanation(test: str, text: str) -> Explanation | None:
    """The explanation of a test's failure that says `text`, or None."""
    found = EXPLAINED.get(test)
    return found if found is not None and re.search(found.text, text) else None


def _older_torch(text: str, why: str) -> Explanation:
    return Explanation("environment", text, f"it is for an older torch: {why}")


EXPLAINED = {
    # Numbers
    **dict.fromkeys(
        (
            "test_native_mha.py::TestMHADeviceTypePRIVATEUSE1::test_native_multihead_self_attention_use_nt_False_"
            f"use_padding_False_pad_all_False_need_weights_False_average_attn_weights_False_fused_{fused}_npu_float16"
            for fused in (False, True)
        ),
        Explanation(
            "hardware",
            r"weight_npt\.to\(torch\.float32\), atol=5e-4, rtol=5e-4(?s:.)*Mismatched elements: \d / 4096",
            "with 100 seeds, exact arithmetic whose results alone are rounded to fp16 misses the tolerance with all of "
            "them; plugins/npu_emulator/tests/test_attention.py compares with the exact result",
        ),
    ),
    "test_modules.py::TestModulePRIVATEUSE1::test_cpu_gpu_parity_nn_LinearCrossEntropyLoss_npu_bfloat16": Explanation(
        "hardware",
        r"Tensor-likes are not close!",
        "torch expects it to fail on CUDA and XPU, 'insufficient accuracy', and its list does not know the NPU; "
        "plugins/npu_emulator/tests/test_layers.py compares with float64",
    ),
    "npu/test_torch_fftplancache.py::TorchFFTPlanCacheApiTestCase::test_size": Explanation(
        "hardware", r"fft_plan_cache\.size, 1\)", "it counts the plans that CANN's FFT library keeps"
    ),
    "distributed/fsdp2/test_fully_shard_clip_grad_norm_.py::TestClipGradNormWorldSize4::test_clip_grad_norm_2d": (
        Explanation(
            "hardware",
            r"ref_total_norm(?s:.)*Expected 23\.93\d+ but got 23\.93\d+",
            "with 3 of 6 seeds it passes; ranks on the CPU, over gloo, get the same two norms of the same inputs; "
            "test_sharding.py compares a norm that is exact",
        )
    ),
    **dict.fromkeys(
        (
            f"distributed/tensor/test_math_ops.py::TestConv2d::test_torch_npu_npu_conv2d_backward_{which}input_shard0"
            for which in ("", "bias_is_None_")
        ),
        Explanation(
            "hardware",
            r"assertEqual\(weight_dgrad\.full_tensor\(\), weight_grad\)(?s:.)*1\.3e-06 allowed",
            "sums of some 3000 numbers in another order: of ranks on the CPU, over gloo, 39 of 40 seeds miss it "
            "as well; test_sharding.py compares sums that are exact",
        ),
    ),
    "distributed/test_reduce_scatter.py::HcclReduceScatterTest::test_reduce_scatter_input_list_not_equal_world_size": (
        Explanation(
            "torch_npu",
            r"Expect receive tensor tensor\(\[0., 0., 0., 0.\]\) but got tensor\(\[nan, nan, nan, nan\]\)",
            "torch_npu warns that the result is not guaranteed where there are fewer tensors than ranks: hccl then "
            "reads what lies behind them, which is not 0 here; test_mismatches.py shows it",
        )
    ),
    # The checkout and the wheel
    **dict.fromkeys(
        (
            "npu/test_sanitizer.py::TestSanitizerRegressionGuards::test_caching_allocator_traces_erase_stream_paths",
            "npu/test_sanitizer.py::TestSanitizerRegressionGuards::test_pluggable_allocator_traces_alloc_and_free",
        ),
        Explanation(
            "environment", r"No such file or directory: '.*/torch_npu/csrc/", "it reads sources, of which none is here"
        ),
    ),
    "npu/test_public_bindings.py::TestPublicBindings::test_correct_module_names": Explanation(
        "torch_npu", r"`__module__` attribute \(`torch\._ops\.npu`\)", "it reads names in the wheel's Python modules"
    ),
    "npu/test_public_bindings.py::TestPublicBindings::test_modules_can_be_imported": Explanation(
        "environment", r"torch\._native\.ops\..*trit", "it imports all of torch, also what needs Triton"
    ),
    "utils/test_collet_env.py::TestCollectEnv::test_check_directory_path_readable_symlink": Explanation(
        "environment", r"not found in 'Invalid path is a symbolic link", "the wheel's own Python code says it otherwise"
    ),
    "test_torch_npu_init.py::TestTorchNpuBootstrap::test_06_component_behavior_snapshot": Explanation(
        "environment", r"line 14, in <module>\s+E\s+AssertionError", "the wheel patches os.getenv only where it logs"
    ),
    "test_torch_npu_init.py::TestTorchNpuBootstrap::test_07_distributed_patch_behavior": Explanation(
        "environment", r"no attribute '_hccl_get_sequence_number_for_group'", "the wheel has no such function"
    ),
    # The installed torch, by the same calls on the CPU
    "distributed/fsdp2/test_fully_shard_comm.py::TestFullyShardCommunication::test_fully_shard_communication_count": (
        _older_torch(
            r"bwd_comm_counts\[c10d_ops\._allgather_base_\], num_blocks\)(?s:.)*Expected 2 but got 3",
            "a root that is told to reshard does so; test_sharding.py counts the same collectives on the CPU",
        )
    ),
    **dict.fromkeys(
        (
            "distributed/fsdp2/test_fully_shard_comm.py::TestFullyShardPrefetch::test_set_modules_to_backward_prefetch",
            "distributed/fsdp2/test_fully_shard_comm.py::TestFullyShardPrefetch::test_set_modules_to_forward_prefetch",
        ),
        _older_torch(r"length of the sequences mismatch: 10 != 9", "the root reshards, as above"),
    ),
    "distributed/fsdp2/test_fully_shard_comm.py::TestFullyShardPrefetch::"
    "test_fully_shard_multi_module_backward_prefetch": (
        _older_torch(r"ValueError: Parameter 'output\.weight' is shared", "its fully_shard refuses tied parameters")
    ),
    **dict.fromkeys(
        (
            f"distributed/checkpoint/test_checkpoint.py::TestDistributedFailure::test_load_error_handling{suffix}"
            for suffix in ("", "_no_dist")
        ),
        _older_torch(r"metadata is None; global metadata read failed", "its loader asserts what it raised before"),
    ),
    "test_shape_ops.py::TestShapeOpsPRIVATEUSE1::test_rot90_npu": (
        _older_torch(r"IndexError: Dimension out of range", "it raises IndexError on the CPU, too")
    ),
    "distributed/_tensor/test_redistribute.py::RedistributeTest::test_partial_to_replicate_forward_backward": (
        _older_torch(r"Greatest absolute difference: 0\.75", "the gradient is 1 on the CPU, too")
    ),
    "distributed/_tensor/test_redistribute.py::RedistributeTest::test_replicate_to_partial": (
        _older_torch(r'"Can not redistribute to Partial" does not match', "the message is another one")
    ),
    "distributed/_tensor/test_dtensor.py::DTensorTest::test_dtensor_constructor": (
        _older_torch(r"_dtensor__new__\(\): argument 'requires_grad'", "DTensor takes other arguments")
    ),
    "distributed/_tensor/test_dtensor.py::DTensorTest::test_modules_w_meta_dtensor": Explanation(
        "environment", r"TypeError: 'dict' object is not callable", "the test calls a dict of its own"
    ),
    "distributed/_tensor/test_dtensor.py::TestDTensorPlacementTypes::test_split_tensor": (
        _older_torch(r"\(shapes \(0,\), \(8,\) mismatch\)", "padding that is not needed is told as zeros")
    ),
    "distributed/_tensor/test_matrix_ops.py::DistMatrixOpsTest::test_npu_bmmV2": Explanation(
        "environment", r"missing value for argument 'output_sizes'", "the wheel's operator has another schema"
    ),
    "distributed/_tensor/test_pointwise_ops.py::DistElementwiseOpsTest::test_dropout_errors": (
        _older_torch(r"Partial\(reduce_op: str \| None\)", "Partial takes a name")
    ),
    "distributed/_tensor/test_view_ops.py::TestViewOps::test_view_groups": (
        _older_torch(r"InputDim\(input_dim=4\) != Singleton\(\)", "a function of shapes alone answers otherwise")
    ),
}  # fmt: skip
