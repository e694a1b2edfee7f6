"""ddp: torch's DistributedDataParallel, which averages gradients in buckets while backward runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelcore.backend import Backend
from accelcore.errors import ConfigurationError, TrainingError
from accelcore.training.gradients import Gradients
from accelcore.training.options import TrainerOptions
from accelcore.training.policy import Policy
from accelcore.training.strategies.exchanging import add_up, share_buffers
from accelcore.training.strategies.strategy import Strategy

__all__ = ["DDP"]


class DDP(Strategy):
    """torch's DistributedDataParallel, made once a trainer, and one thing more: parameters may go unused.

    torch exchanges a bucket when all gradients in it are there, so that a parameter without one stops all ranks;
    `find_unused_parameters=True` walks the graph in every step to prevent that. Here a small second backward pass at
    the end of a window gives such parameters a gradient of zero. It also brings along which parameters really received
    one, in an additional parameter, so that None stays None where no rank had a gradient.
    """

    prefers_flat = False
    exchanges_in_backward = True

    def __init__(self, backend: Backend, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        self._device = backend.device
        self._hooks: list[Any] = []
        self._arrived: list[Tensor] = []
        self._ran = [False]

    def check(self, model: nn.Module, policy: Policy) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigurationError("the model has no parameter to train", remedy="look for requires_grad_(False)")

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._release()
        self._model, self._parameters = model, parameters
        self._module = _WithReceived(model, parameters)
        options: dict[str, Any] = {
            "device_ids": None if self._device.index is None else [self._device.index],
            "gradient_as_bucket_view": True,
            _name_of_buffer_sync(): False,  # `sync_buffers` sees to them
        }
        self._ddp = DistributedDataParallel(self._module, **options)
        share_buffers(self.collectives, model)
        # These hold nothing of the replica: what a hook of a parameter holds lives as long as the parameter.
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived.append) for p in parameters]  # type: ignore[no-untyped-call]
        self._ddp.register_forward_pre_hook(_Note(self._ran))
        return self._ddp

    def micro(self, last: bool) -> None:
        self._ddp.require_backward_grad_sync = last

    def before_backward(self) -> None:
        if not self._ran[0]:
            raise TrainingError(
                "backward was called, but the replicated model was not: gradients would stay on this rank",
                why="the forward pass went to your own module",
                remedy="call trainer.forward(...), or the model that loss(model, batch) is given",
            )
        self._ran[0] = False
        self._arrived.clear()

    def exchange(self, *, last: bool) -> None:
        if not self._ddp.require_backward_grad_sync:
            return
        arrived = set(map(id, self._arrived))
        received = self._module.received
        self._had = [parameter.grad is not None for parameter in self._parameters]
        with torch.enable_grad():
            loss = (received * torch.tensor(self._had).to(received)).sum()
            for parameter in self._parameters:
                if id(parameter) not in arrived:
                    loss = loss + parameter.reshape(-1)[:0].sum()  # of no element: zeros, also where one is inf
        loss.backward()  # type: ignore[no-untyped-call]
        self._arrived.clear()
        flags, received.grad = received.grad, None
        assert flags is not None
        if not all(self._had):  # only then the host has to wait for what the others say
            for parameter, anywhere in zip(self._parameters, (flags > 0).tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None

    def reduce(self, gradients: Gradients, *, exchanged: bool) -> None:
        if not (exchanged and self._ddp.require_backward_grad_sync):
            add_up(self.collectives, gradients, divisor=self.collectives.world_size)

    def mean(self, value: Tensor) -> Tensor:
        return self.collectives.all_reduce(value, "avg")

    def sync_buffers(self) -> None:
        share_buffers(self.collectives, self._model)

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __del__(self) -> None:
        self._release()


def _name_of_buffer_sync() -> str:
    """DDP's option for buffers; newer versions of torch warn of its old name."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"


class _WithReceived(nn.Module):
    """The model, and a parameter whose gradient says which of the model's parameters received one."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        # The first of all parameters is in the last bucket, which would be waited for anyhow.
        self.received = nn.Parameter(parameters[0].detach().new_zeros(len(parameters)))
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


class _Note:
    """Notes that a forward pass ran that can be trained on."""

    def __init__(self, ran: list[bool]) -> None:
        self._ran = ran

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self._ran[0] = self._ran[0] or torch.is_grad_enabled()
