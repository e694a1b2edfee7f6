"""Capabilities of a GPU, computed from plain values so that tests need no GPU."""

from __future__ import annotations

from collections.abc import Iterable

from accelcore.devices import Capabilities

Compute = tuple[int, int]  # compute capability: `(8, 0)` for sm_80

_HALF, _TENSOR_CORES, _TRITON = (5, 3), (8, 0), (7, 0)


def declare(compute: Compute, *, rocm: bool, nccl: bool, fused: Iterable[str]) -> Capabilities:
    """Return the capabilities of one GPU.

    fp16 arithmetic begins with sm_53. bf16 and TF32 units begin with sm_80. On older GPUs torch computes bf16 in fp32
    units and rounds, which is correct but slow. There bf16 is declared for autocast, after fp16, and not for models.
    Every GPU that ROCm supports has bf16; there fp32="fast" is not available.

    `nccl`: whether torch is built with NCCL (ROCm: RCCL). `fused`: optimizers with a fused kernel in torch.
    """
    half = rocm or compute >= _HALF
    native = not emulates_bfloat16(compute, rocm=rocm)
    low = ("bfloat16", "float16") if native else ("float16", "bfloat16")
    return Capabilities(
        autocast_dtypes=low if half else (),
        autocast_tables=("torch", "O1"),
        model_dtypes=("float32", "float64", *(["bfloat16"] if native else []), *(["float16"] if half else [])),
        fast_fp32="tf32" if native and not rocm else None,
        native_optimizers=tuple(sorted(fused)),
        compilers=("inductor", "cudagraphs") if rocm or compute >= _TRITON else ("cudagraphs",),
        process_groups=("nccl", "gloo") if nccl else (),
        parallel=("none", "ddp", "combine_ddp", "zero1", "fsdp", "zero2", "zero3") if nccl else ("none",),
        sync_batchnorm=nccl,
        streams=True,
        graphs=True,
        pinned_memory=True,
    )


def emulates_bfloat16(compute: Compute, *, rocm: bool) -> bool:
    """Return whether the GPU computes bf16 in fp32 units and rounds."""
    return not rocm and compute < _TENSOR_CORES


def missing_kernels(compute: Compute, built: Iterable[str]) -> str | None:
    """Return why a torch built for these architectures has no code for a GPU, or None.

    Machine code (`sm_80`) runs on GPUs of the same major version with an equal or higher minor one. Code for `sm_90a`
    and the like runs only on that architecture. Intermediate code (`compute_80`) runs on equal or newer GPUs.
    """
    built = list(built)
    if not built or any(_runs(compute, architecture) for architecture in built):
        return None
    return f"torch has code for {', '.join(built)}, and this GPU is sm_{compute[0]}{compute[1]}"


def _runs(compute: Compute, architecture: str) -> bool:
    kind, _, digits = architecture.partition("_")
    exact, family = digits.endswith("a"), digits.endswith("f")
    number = int(digits.rstrip("af"))
    other = (number // 10, number % 10)
    if exact:
        return compute == other
    if kind == "compute" and not family:
        return compute >= other
    return compute[0] == other[0] and compute[1] >= other[1]
