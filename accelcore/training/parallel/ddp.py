"""ddp: torch's DistributedDataParallel, which averages gradients in buckets while backward runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelcore.devices import Roles
from accelcore.errors import TrainingError, UnsupportedError
from accelcore.training.gradients import Gradients
from accelcore.training.observers import Hooks
from accelcore.training.options import TrainerOptions
from accelcore.training.parallel.strategy import Strategy, all_reduce_gradients, broadcast_tensors, check_no_launcher
from accelcore.util.text import first_line


class DDP(Strategy):
    """torch's DistributedDataParallel, in which parameters may go unused.

    torch exchanges a bucket when all gradients in it are there. A parameter without one therefore stops all ranks.
    `find_unused_parameters=True` prevents that, and walks the graph in every step. Here a small second backward pass at
    the end of a window gives such parameters a gradient of zero. The gradient of one more parameter tells all ranks
    which parameters received a gradient, so that None stays None if no rank had one.
    """

    uses_buckets = True

    def __init__(self, backend: Roles, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        self._hooks = Hooks()

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        self._hooks.close()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._module = _WithReceived(model, self._parameters)
        # A step broadcasts buffers once a window. Newer versions of torch deprecate the older of these names.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {sync: False, "gradient_as_bucket_view": True}
        try:
            self._ddp = DistributedDataParallel(self._module, device_ids=_device_ids(self.device), **options)
        except RuntimeError as error:
            if not any(map(torch.is_complex, self._parameters)):
                raise
            raise UnsupportedError(  # torch 2.7 over gloo
                "DistributedDataParallel cannot take complex parameters here",
                why=first_line(error),
                remedy='choose parallel="combine_ddp"',
            ) from error
        broadcast_tensors(self.collectives, list(model.buffers()))
        # A hook lives as long as its parameter. So it holds no reference to the replica.
        self._arrived: list[Tensor] = []
        self._ran = [False]
        for parameter in self._parameters:
            self._hooks.add(parameter.register_post_accumulate_grad_hook(self._arrived.append))
        ran = self._ran

        def note_forward(*_: Any) -> None:
            ran[0] = ran[0] or torch.is_grad_enabled()

        self._ddp.register_forward_pre_hook(note_forward)
        return self._ddp

    def before_forward(self, last: bool) -> None:
        self._ddp.require_backward_grad_sync = last

    def before_backward(self) -> None:
        if not self._ran[0]:
            raise TrainingError(
                "backward was called, but the replicated model was not: gradients would stay on this rank",
                remedy="call trainer.forward(...), or the model that loss(model, batch) receives, before each backward "
                "pass; add several losses of one forward pass up",
            )
        self._ran[0] = False
        self._arrived.clear()

    def after_backward(self) -> None:
        if not self._ddp.require_backward_grad_sync:
            return
        arrived = set(map(id, self._arrived))
        received: Tensor = self._module.received
        has = [parameter.grad is not None for parameter in self._parameters]
        with torch.enable_grad():
            if not all(has):  # by a copy that does not make the host wait for the whole backward pass
                received = received * torch.tensor(has, dtype=received.dtype, device="cpu").to(
                    received.device, non_blocking=True
                )
            loss = received.sum()
            for parameter in self._parameters:
                if id(parameter) not in arrived:
                    # of no element: 0, even if the parameter has an inf
                    loss = loss + parameter.reshape(-1)[:0].real.sum()
        loss.backward()
        self._arrived.clear()
        flags, self._module.received.grad = self._module.received.grad, None
        assert flags is not None
        if not all(has):  # only then the host waits for the flags of the other ranks
            for parameter, anywhere in zip(self._parameters, (flags > 0).tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None

    def reduce(self, gradients: Gradients, *, full: bool) -> None:
        if not (full and self._ddp.require_backward_grad_sync):
            all_reduce_gradients(self.collectives, gradients, divisor=self.collectives.world_size)


def replicate(backend: Roles, module: nn.Module, **options: Any) -> nn.Module:
    """Move a module to the device, and let ranks average its gradients in backward; see `Backend.replicate`."""
    collectives = backend.collectives
    if collectives.world_size == 1:
        check_no_launcher("call job = accel.join() before, or replicate inside `with accel.distributed():`")
    if collectives.world_size > 1 and "ddp" not in backend.capabilities.parallel:
        remedy = 'average gradients with accel.collectives.all_reduce(parameter.grad, "avg"), or run one process'
        raise UnsupportedError(f"modules cannot be replicated on {backend.name}", remedy=remedy)
    module.to(backend.device)
    if collectives.world_size == 1:
        return module
    return DistributedDataParallel(module, device_ids=_device_ids(backend.device), **options)


def _device_ids(device: torch.device) -> list[int] | None:
    return None if device.index is None else [device.index]


class _WithReceived(nn.Module):
    """The model, and one more parameter; its gradient tells which parameters of the model received a gradient."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        # As the first of all parameters it is in the last bucket, which ranks wait for anyway.
        self.received = nn.Parameter(parameters[0].detach().real.new_zeros(len(parameters)))
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)
