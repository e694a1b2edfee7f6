"""What a backend declares it can do: the product's truth, and the selector of the tests that hold it to it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capabilities"]


@dataclass(frozen=True)
class Capabilities:
    """One backend's declaration, in plain strings and bools so that it can be read without torch.

    What is declared works; asking for what is not declared raises `UnsupportedError`.

    Attributes:
        autocast_dtypes: dtypes that `autocast` takes, preferred first (`"bfloat16"`).
        autocast_tables: op tables that `autocast` takes (`"torch"`: the lists of `torch.autocast`; `"O1"`: apex's).
        model_dtypes: dtypes a whole model can be held and trained in.
        fast_fp32: the format in which `fp32="fast"` multiplies: `"tf32"`, `"hf32"`, `"bf16"`; `"fp32"` where that is a
            quicker route to products that are as exact; None where there is no faster one.
        native_optimizers: optimizers with a kernel of this device's own (one launch for many parameters).
        compilers: compilers that `compile` can use; `{"backend": name}` asks for one.
        process_groups: torch.distributed backends the collectives run on; each can form a group by its name.
        parallel: data-parallel strategies the trainer offers here.
        sync_batchnorm: BatchNorm can take its statistics over all ranks (`trainer(..., sync_batchnorm=True)`).
        streams: work can be queued on side streams (`runtime.side_stream`).
        graphs: a whole step can be captured and launched as one (`trainer(..., graph=True)`).
        pinned_memory: pinning host memory makes transfers faster (`Tensor.pin_memory`, `accel.loading()`).
        overflow_flag: the device reports overflow by a flag, and the scaler skips a step for which it was raised, even
            where all gradients are finite.
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
