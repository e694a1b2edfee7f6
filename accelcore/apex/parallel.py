"""apex.parallel on any device: torch's own classes, under apex's names and arguments."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import parallel

from accelcore.errors import UnsupportedError

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]

SyncBatchNorm = nn.SyncBatchNorm

_ONLY_SPEED = {
    "message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params", "retain_allreduce_buffers",
    "num_allreduce_streams", "allreduce_communicators", "gradient_predivide_factor", "prof",
}  # fmt: skip
_DEFAULTS = {"allreduce_always_fp32": False, "gradient_average": True}


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, for a model that `amp.initialize` has returned.

    As in apex, ranks exchange parameters once and gradients in backward passes. Each rank keeps its own buffers, and a
    forward pass without gradients communicates with no other rank. Inputs are not moved to the device.

    Args:
        module: the model, on this rank's device.
        options: of apex. Options that only concern speed or rounding are ignored.

    Raises:
        UnsupportedError: an option that would give other gradients.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        for name, value in options.items():
            if name not in _ONLY_SPEED and (name not in _DEFAULTS or value != _DEFAULTS[name]):
                raise UnsupportedError(
                    f"apex.parallel.DistributedDataParallel cannot take {name}={value!r}",
                    why="this is torch's DistributedDataParallel, which averages gradients in their own dtype",
                    remedy="remove it, or use torch.nn.parallel.DistributedDataParallel and its options",
                )
        with warnings.catch_warnings():
            # Newer versions of torch deprecate this name, but their other name exchanges buffers once, at the start.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            super().__init__(
                module, broadcast_buffers=False, find_unused_parameters=bool(options.get("delay_allreduce", False))
            )


def convert_syncbn_model(
    module: nn.Module, process_group: ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Replace every BatchNorm by torch's SyncBatchNorm; call it before the optimizer is made. torch needs a GPU for it.

    Args:
        module: a model.
        process_group: the ranks that share statistics; None for all.
        channel_last: ignored: torch reads it from the inputs.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted
