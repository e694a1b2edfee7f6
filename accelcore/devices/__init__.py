"""Devices: what a plugin declares of one, the roles of its backend, and the files that choose a device.

`select` reads the request, asks the plugins for a `Probe`, and lets one create its backend. Nothing here imports torch
before a plugin has said that its device works.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, get_origin, get_type_hints

if TYPE_CHECKING:
    import torch

    from accelcore.jobs.collectives import Collectives
    from accelcore.optim.registry import Optimizers
    from accelcore.precision.role import Precision
    from accelcore.roles.compiler import Compiler
    from accelcore.roles.runtime import Runtime
    from accelcore.scaling.dynamic import Scalers


SHARDED = ("fsdp", "zero2", "zero3")
"""Strategies of `Capabilities.parallel` that divide the model."""


@dataclass(frozen=True)
class Probe:
    """Answer of a plugin: whether its backend can work here.

    A probe imports no vendor library and initialises no device, so it is quick, and `fork` stays safe.

    Attributes:
        name: the backend's name, equal to its entry point's: ASCII, lower case (`"cpu"`).
        available: whether a backend can be created here.
        reason: why, in one sentence; required if `available` is false.
        remedy: what would make it available; required if `available` is false.
        priority: `auto` takes the available backend with the highest priority. A host CPU has 0, an accelerator 100.
        count: how many devices of this kind this process may use; at least 1 if `available`.
        absent: whether the machine has no such device, as far as files of its driver tell. `auto` then does not warn of
            the backend if an emulator of it is installed: a rehearsal needs no device.
        exclusive: whether each rank of a job needs a device of its own. False for a CPU, which all ranks share.
        api: the version of the plugin interface that the plugin was written for, as a number. None counts as 1, which
            is the only version that plugins could omit.
        environment: names of the environment variables that this backend reads, for `accelcore doctor`.
        distributions: names of the distributions of the vendor's runtime. `accelcore doctor` shows them, and
            `accelcore run` keeps torch from loading the runtime of an unusable backend.
        visible_devices: name of the environment variable that limits which devices a process sees
            (`"CUDA_VISIBLE_DEVICES"`); empty if there is none.
        slurm: the name by which SLURM grants one device, such as `"gpu"`. Empty if the device needs no grant.
        kubernetes: the same in a container's limits, such as `"nvidia.com/gpu"`.
        ray: the same in Ray, such as `"GPU"`.

    Raises:
        ValueError: a field has the wrong type, or the fields contradict each other.
    """

    name: str
    available: bool
    reason: str = ""
    remedy: str = ""
    priority: int = 0
    count: int = 0
    exclusive: bool = True
    api: int | None = None
    environment: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    visible_devices: str = ""
    slurm: str = ""
    kubernetes: str = ""
    ray: str = ""
    absent: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks of a job that fit on this host, one for each device, or one if all ranks share a device."""
        return self.count if self.exclusive else 1

    def __post_init__(self) -> None:
        hints = get_type_hints(Probe) | {"api": NoneType if self.api is None else int}
        for field, kind in hints.items():
            value, of_names = getattr(self, field), get_origin(kind) is tuple
            if type(value) is not (get_origin(kind) or kind) or (of_names and not {str}.issuperset(map(type, value))):
                what = "tuple of str" if of_names else kind.__name__
                raise ValueError(f"probe {self.name!r}: {field} is {value!r}, not a {what}")
        if self.available and self.count < 1:
            raise ValueError(f"probe {self.name!r}: available, but count is {self.count}: it must be 1 or more")
        if self.available and self.absent:
            raise ValueError(f"probe {self.name!r}: available, but absent")
        if not self.available and not (self.reason and self.remedy):
            raise ValueError(f"probe {self.name!r}: not available, and its reason or its remedy is empty")


@dataclass(frozen=True)
class Capabilities:
    """Declaration of a backend, in strings and bools, so that it can be read without torch.

    What is declared works. Everything else raises `UnsupportedError`.

    Attributes:
        autocast_dtypes: names of the dtypes of `autocast`, preferred first (`"bfloat16"`).
        autocast_tables: operator tables of `autocast`: `"torch"` has the lists of `torch.autocast`, `"O1"` apex's.
        model_dtypes: dtypes in which a whole model can be held and trained.
        fast_fp32: format of the products of `fp32="fast"`: `"tf32"`, `"hf32"`, `"bf16"`, or `"fp32"` if a faster method
            is as exact; None if there is no faster one.
        native_optimizers: optimizers with a kernel for this device, one launch for many parameters.
        compilers: compilers of `compile`; `{"backend": name}` chooses one.
        process_groups: torch.distributed backends of the collectives; each can form a group by its name.
        parallel: data-parallel strategies of the trainer.
        sync_batchnorm: torch's SyncBatchNorm works: BatchNorm by the statistics of all ranks.
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


@dataclass(frozen=True)
class Roles:
    """One device, its declaration and its six roles: what a training needs of a `Backend`, which documents them."""

    name: str
    index: int
    emulated: bool
    capabilities: Capabilities
    precision: Precision
    scaler: Scalers
    optimizers: Optimizers
    collectives: Collectives
    compiler: Compiler
    runtime: Runtime

    @property
    def device(self) -> torch.device:
        """The device, as for `model.to(accel.device)`."""
        return self.runtime.device
