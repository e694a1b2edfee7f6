"""Capabilities: a backend's declaration of what it can do, which the conformance suite tests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHARDED", "Capabilities"]

SHARDED = ("fsdp", "zero2", "zero3")
"""Strategies of `Capabilities.parallel` that divide the model."""


@dataclass(frozen=True)
class Capabilities:
    """Declaration of a backend, in strings and bools, so that it can be read without torch.

    What is declared works. Everything else raises `UnsupportedError`.

    Attributes:
        autocast_dtypes: dtypes of `autocast`, preferred first (`"bfloat16"`).
        autocast_tables: operator tables of `autocast`: `"torch"` has the lists of `torch.autocast`, `"O1"` apex's.
        model_dtypes: dtypes in which a whole model can be held and trained.
        fast_fp32: format of the products of `fp32="fast"`: `"tf32"`, `"hf32"`, `"bf16"`, or `"fp32"` if a faster method
            is as exact; None if there is no faster one.
        native_optimizers: optimizers with a kernel for this device, one launch for many parameters.
        compilers: compilers of `compile`; `{"backend": name}` chooses one.
        process_groups: torch.distributed backends of the collectives; each can form a group by its name.
        parallel: data-parallel strategies of the trainer.
        sync_batchnorm: BatchNorm can use statistics of all ranks (`trainer(..., sync_batchnorm=True)`).
        streams: work can be queued on side streams (`runtime.side_stream`).
        graphs: a whole step can be captured and launched at once (`trainer(..., graph=True)`).
        pinned_memory: pinning host memory makes transfers faster (`Tensor.pin_memory`, `accel.loading()`).
        overflow_flag: the device reports overflows by a flag. The scaler skips a step if it is raised, even if all
            gradients are finite.
    """

    autocast_dtypes: tuple[str, ...] = ()
    autocast_tables: tuple[str, ...] = ("torch",)
    model_dtypes: tuple[str, ...] = ("float32",)
    fast_fp32: str | None = None
    native_optimizers: tuple[str, ...] = ()
    compilers: tuple[str, ...] = ()
    process_groups: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ("none",)
    sync_batchnorm: bool = False
    streams: bool = False
    graphs: bool = False
    pinned_memory: bool = False
    overflow_flag: bool = False
