from __future__ import annotations

import pytest
import torch
from accelcore_cuda.declaration import declare, emulates_bfloat16, missing_kernels

FUSED = ("sgd", "adamw")
# autocast, models in bf16, fast fp32, inductor
EXPECTED = {
    (5, 0): ((), False, None, False),
    (5, 2): ((), False, None, False),
    (5, 3): (("float16", "bfloat16"), False, None, False),
    (6, 0): (("float16", "bfloat16"), False, None, False),
    (6, 1): (("float16", "bfloat16"), False, None, False),
    (7, 0): (("float16", "bfloat16"), False, None, True),
    (7, 5): (("float16", "bfloat16"), False, None, True),
    (8, 0): (("bfloat16", "float16"), True, "tf32", True),
    (8, 6): (("bfloat16", "float16"), True, "tf32", True),
    (8, 9): (("bfloat16", "float16"), True, "tf32", True),
    (9, 0): (("bfloat16", "float16"), True, "tf32", True),
    (10, 0): (("bfloat16", "float16"), True, "tf32", True),
    (12, 0): (("bfloat16", "float16"), True, "tf32", True),
}


@pytest.mark.parametrize("compute", EXPECTED)
def test_each_generation_declares_what_it_has(compute):
    autocast, low_models, fast, inductor = EXPECTED[compute]
    found = declare(compute, rocm=False, nccl=True, fused=FUSED)
    assert found.autocast_dtypes == autocast
    assert ("bfloat16" in found.model_dtypes) is low_models
    assert ("float16" in found.model_dtypes) is ("float16" in autocast)
    assert {"float32", "float64"} <= set(found.model_dtypes)
    assert found.fast_fp32 == fast
    assert ("inductor" in found.compilers) is inductor
    assert "cudagraphs" in found.compilers
    assert emulates_bfloat16(compute, rocm=False) is not low_models


@pytest.mark.parametrize("compute", [(9, 0), (9, 4), (11, 0)])
def test_rocm_has_bf16_and_no_fast_fp32_whatever_its_number(compute):
    found = declare(compute, rocm=True, nccl=True, fused=FUSED)
    assert found.autocast_dtypes == ("bfloat16", "float16")
    assert {"bfloat16", "float16"} <= set(found.model_dtypes)
    assert found.fast_fp32 is None
    assert "inductor" in found.compilers
    assert not emulates_bfloat16(compute, rocm=True)


def test_without_nccl_there_is_one_process():
    found = declare((9, 0), rocm=False, nccl=False, fused=())
    assert (found.process_groups, found.parallel) == ((), ("none",))
    found = declare((9, 0), rocm=False, nccl=True, fused=())
    assert found.process_groups == ("nccl", "gloo")
    assert found.parallel == ("none", "ddp", "combine_ddp", "zero1", "fsdp", "zero2", "zero3")


def test_fused_kernels_are_declared_in_order_and_no_others():
    assert declare((9, 0), rocm=False, nccl=True, fused=FUSED).native_optimizers == ("adamw", "sgd")


def test_every_gpu_has_streams_graphs_and_pinned_memory_and_none_a_flag():
    found = declare((6, 0), rocm=False, nccl=True, fused=())
    assert found.streams
    assert found.graphs
    assert found.pinned_memory
    assert not found.overflow_flag


def test_each_declared_compiler_is_one_of_torchs():
    assert set(declare((9, 0), rocm=False, nccl=True, fused=()).compilers) <= set(torch._dynamo.list_backends())


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("compute", "built", "runs"),
    [
        ((7, 5), WHEEL, True),
        ((8, 9), WHEEL, True),
        ((8, 7), ["sm_80"], True),
        ((12, 1), WHEEL, True),
        ((6, 1), WHEEL, False),
        ((7, 0), WHEEL, False),
        ((8, 0), ["sm_86"], False),
        ((11, 0), WHEEL, False),
        ((9, 0), ["sm_90a"], True),
        ((9, 1), ["sm_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((8, 0), ["compute_90"], False),
        ((9, 0), ["compute_90a"], True),
        ((10, 0), ["compute_90a"], False),
        ((9, 0), [], True),
    ],
)
def test_a_gpu_that_this_torch_has_no_code_for_is_known(compute, built, runs):
    reason = missing_kernels(compute, built)
    assert (reason is None) is runs
    if reason is not None:
        assert f"sm_{compute[0]}{compute[1]}" in reason
        assert all(architecture in reason for architecture in built)
