"""Parts of torch that its older versions lack, each with what accelcore does without it.

accelcore asks for these parts, never for a version.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter


@dataclass(frozen=True)
class TorchFeature:
    """Part of torch that some supported versions lack."""

    module: str  # the module of torch that defines it
    attribute: str  # its name in that module, or in a class of it (`"FSDPModule.reshard"`)
    instead: str  # what accelcore does without it, in one sentence without its full stop

    @property
    def present(self) -> bool:
        """Whether the installed torch has it."""
        try:
            attrgetter(self.attribute)(import_module(self.module))
        except (AttributeError, ImportError):
            return False
        return True

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"

GET_KERNEL = TorchFeature(
    "torch.library",
    "get_kernel",
    'runtime.seed(n, same="everywhere") raises UnsupportedError; attention and fp16 products on the host use torch\'s '
    "slower kernels, recurrent layers in bf16 and fp16 may raise there, and gradients of layer norms, embeddings and "
    "convolutions are summed in low precision; outside of O1's regions, operators that O1 treats differently follow a "
    "copy of torch's table",
)
"""Returns the kernel that an override replaces."""
BACKWARD_PASS_AUTOCAST = TorchFeature(
    "torch._functorch.config",
    "backward_pass_autocast",
    "a compiled model that is called under autocast runs eagerly, because torch would compile all of its backward pass "
    "in low precision",
)
"""Setting of compilers: the autocast that the backward pass is compiled under."""
UNUSED_SHARDS = TorchFeature(
    _FULLY_SHARD,
    "FSDPModule.set_reduce_scatter_unused_params",
    "accelcore itself gives zero gradients to the parameters of a group that a rank did not use",
)
"""Method of sharded modules: ranks that did not use a parameter take part in reducing its gradient."""
RESET_ITER_STATE = TorchFeature(
    _FULLY_SHARD,
    "FSDPModule.reset_iter_state",
    "accelcore itself clears the state that a step leaves in a sharded model if it raises",
)
"""Method of sharded modules: forget a forward or backward pass that raised."""

GET_CAPABILITIES = TorchFeature(
    "torch.cpu",
    "get_capabilities",
    "accelcore reads the host's instructions from /proc/cpuinfo; on systems without this file it assumes none for low "
    "precision",
)
"""Returns the instructions of the host's processor."""

TORCH_FEATURES = (GET_KERNEL, BACKWARD_PASS_AUTOCAST, UNUSED_SHARDS, RESET_ITER_STATE, GET_CAPABILITIES)
