"""Backend of a device that torch knows and for which nobody has written a plugin."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelcore.backend import Backend
from accelcore.capabilities import Capabilities
from accelcore.errors import BackendUnavailableError, ConfigurationError
from accelcore.jobs.collectives import NoCollectives, TorchCollectives
from accelcore.jobs.launchers import Launch
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore.precision.role import TorchPrecision
from accelcore.roles.compiler import NoCompiler, TorchCompiler
from accelcore.roles.runtime import AcceleratorRuntime, TorchRuntime
from accelcore.roles.trials import autocast_key, graph_class, has_generator, process_group, try_capabilities
from accelcore.scaling.dynamic import Scalers

__all__ = ["from_torch"]


def from_torch(
    device: str, index: int = 0, *, name: str | None = None, capabilities: Capabilities | None = None
) -> Backend:
    """Compose a backend from what torch says of a device: its module, its kernels, its process group.

    Import the vendor's package first if torch needs one. To replace a role, use
    `dataclasses.replace(from_torch(...), runtime=...)`.

    Args:
        device: torch's name of the device, as in `torch.ones(1, device="xpu")`.
        index: the number of the device.
        name: the backend's name, by which users select it; None means `device`.
        capabilities: the declaration. None means that it is found by trials, each time; the log has the reason for
            each feature that is left out. Print the `capabilities` of the result to write them down.

    Raises:
        ConfigurationError: `device` has an index.
        BackendUnavailableError: torch does not know the device, or cannot compute on it.
    """
    module = _module(device)
    place = _usable(module, device, index)
    declared = try_capabilities(place) if capabilities is None else capabilities
    optimizers = Optimizers()
    register_torch_optimizers(optimizers, fused=declared.native_optimizers, prefers_foreach=_is_accelerator(device))
    return Backend(
        name=name or device,
        index=index,
        emulated=False,
        capabilities=declared,
        precision=TorchPrecision(device, declared, autocast_key(device)),
        scaler=Scalers(place),
        optimizers=optimizers,
        collectives=_Collectives(place) if declared.process_groups else NoCollectives(),
        compiler=TorchCompiler() if declared.compilers else NoCompiler(),
        runtime=_runtime(place, declared),
    )


def _module(device: str) -> Any:
    if ":" in device:
        raise ConfigurationError(f"{device!r} has an index", remedy="give the name and the index apart")
    try:
        return torch.get_device_module(device)
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no device {device!r}",
            why=str(error).split("\n", 1)[0],
            available=_what_torch_has(),
            remedy="import the vendor's package before from_torch, or use the name that it gives the device in torch",
        ) from error


def _usable(module: Any, device: str, index: int) -> torch.device:
    """Return the device after a first computation on it, and make it the current one."""
    count = module.device_count() if module.is_available() else 0
    if index >= count:
        raise BackendUnavailableError(
            f"there is no device {device}:{index}",
            why=f"torch.{device}.is_available() is {module.is_available()}, and torch sees {count} of them",
            available=_what_torch_has(),
            remedy="install a build of torch for the device, and its driver" if not count else "choose a lower index",
        )
    place = torch.device(device, index) if _is_accelerator(device) else torch.device(device)
    try:
        if _is_accelerator(device):
            torch.accelerator.set_device_index(index)
        total = float(torch.ones(3, device=place).sum())
    except Exception as error:
        raise BackendUnavailableError(
            f"torch cannot compute on {place}",
            why=f"{type(error).__name__}: {str(error).split(chr(10), 1)[0]}",
            available=_what_torch_has(),
            remedy="see whether torch.ones(3, device=...) works in this environment",
        ) from error
    if total != 3:
        raise BackendUnavailableError(
            f"torch computes wrongly on {place}",
            why=f"the sum of three ones is {total}",
            remedy="repair the driver, or the vendor's package",
        )
    return place


def _is_accelerator(device: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device


def _what_torch_has() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "cpu; this torch has no accelerator"
    count = torch.accelerator.device_count()
    return f"cpu; torch's accelerator is {accelerator.type}, with {count} device{'s' * (count != 1)}"


class _Collectives(TorchCollectives):
    """Process group that torch registers for a device, with that for CPU tensors beside it."""

    def __init__(self, device: torch.device) -> None:
        kind, host, own = device.type, process_group("cpu"), process_group(device.type)
        super().__init__(device, str(own) if own == host else f"cpu:{host},{kind}:{own}", host=host)

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        if (launch is not None or dist.is_initialized()) and _is_accelerator(self.device.type):
            torch.accelerator.set_device_index(self.device.index)  # libraries bind a rank to the current device
        super().init(launch, timeout=timeout)


def _runtime(device: torch.device, declared: Capabilities) -> TorchRuntime:
    if not has_generator(device):
        return TorchRuntime(device)
    graph = graph_class(torch.get_device_module(device)) if declared.graphs else None
    return AcceleratorRuntime(device, streams=declared.streams, graph=graph)
