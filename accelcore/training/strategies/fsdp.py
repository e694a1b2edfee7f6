"""fsdp: torch's fully_shard, which divides parameters, gradients and optimizer state among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.backend import Backend
from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.optim.shards import is_sharded
from accelcore.precision.table import LOW_PRECISION
from accelcore.torch_internals import AnyBatchNorm
from accelcore.training.fsdp_options import FSDP
from accelcore.training.gradients import Gradients
from accelcore.training.modules import chosen
from accelcore.training.options import TrainerOptions
from accelcore.training.policy import Policy
from accelcore.training.strategies.exchanging import COMM_DTYPES, broadcast, share_buffers
from accelcore.training.strategies.strategy import Strategy

__all__ = ["FullySharded"]


class FullySharded(Strategy):
    """torch's fully_shard, group by group, and two things more.

    torch reduces the gradients of a group when all ranks have them: here a parameter may go unused on some ranks, where
    zeros are sent. Which parameters received a gradient on any rank is exchanged beside them, so that None stays None.
    And after a forward pass without gradients all is sharded again, as it is at the end of a backward pass: what
    freezes a parameter or reads a state_dict then finds the shards.

    Gradients are reduced after each backward pass, also within a window: kept whole until its end, they would take the
    memory that sharding saves.
    """

    shards = True
    exchanges_in_backward = True
    prefers_flat = False

    def __init__(self, backend: Backend, options: TrainerOptions, sharding: FSDP) -> None:
        super().__init__(backend, options)
        self._modules: list[Any] = []
        self._hooks: list[Any] = []
        self._arrived: set[int] = set()
        self._backend, self._sharding = backend, sharding
        name = options["comm_dtype"]
        if name is not None and name not in COMM_DTYPES:
            raise ConfigurationError(
                f"comm_dtype={name!r} is no dtype to add gradients in", available=", ".join(COMM_DTYPES)
            )
        self._reduce_dtype: torch.dtype | None = None if name is None else getattr(torch, name)

    def check(self, model: nn.Module, policy: Policy) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not all(hasattr(FSDPModule, name) for name in ("set_reduce_scatter_unused_params", "reset_iter_state")):
            raise UnsupportedError(
                "this torch is too old to shard a model",
                why="ranks that use different parameters would wait for each other for ever",
                available=f"torch {torch.__version__}",
                remedy='install torch 2.13 or later, or say parallel="ddp"',
            )
        parameters = dict(model.named_parameters())
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ConfigurationError("the model has no parameter to train", remedy="look for requires_grad_(False)")
        for name, parameter in parameters.items():
            if reason := _unfit(parameter):
                raise ConfigurationError(f"the parameter {name!r} cannot be divided among ranks: it is {reason}")
        if isinstance(model, FSDPModule):
            for module in model.modules():  # what an evaluation has left gathered
                if isinstance(module, FSDPModule):
                    module.reshard()
            if whole := [name for name, one in model.named_parameters() if not is_sharded(one)]:
                raise ConfigurationError(
                    f"the parameter {whole[0]!r} is not divided among the ranks, and the rest of the model is",
                    why="it came when the model was divided already: it would be neither reduced over ranks nor the "
                    "same on all of them",
                    remedy="have every layer in the model before its trainer is made, frozen until it is needed; or "
                    'say parallel="ddp"',
                )
        if any(getattr(module, "sparse", False) is True for module in model.modules()):
            raise ConfigurationError(
                "an embedding has sparse gradients, and those of shards are dense", remedy="make it with sparse=False"
            )
        if self._sharding.cpu_offload and policy.loss_scale is not None:
            raise ConfigurationError(
                "cpu_offload=True with a loss scale",
                why="the scale is on the device, and the gradients it belongs to are not",
                remedy='say precision="bf16", which needs no loss scale',
            )
        self._plan_groups(model, policy)

    def shard(self, model: nn.Module, policy: Policy) -> None:
        from torch.distributed.fsdp import FSDPModule

        fresh = not any(isinstance(module, FSDPModule) for module in model.modules())
        if fresh:
            for module, low in self._plan_groups(model, policy):
                self._shard(module, low)
        if not isinstance(model, FSDPModule):
            raise ConfigurationError(
                "a part of the model is already sharded, and the model is not",
                remedy="call fully_shard on the model too, or leave all of it to the trainer",
            )
        self._model = model
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        model.set_reduce_scatter_unused_params(True)
        self._listen()
        self._hooks.append(model.register_forward_hook(_Rest(self._modules)))

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        share_buffers(self.collectives, model)
        return model

    def sharded(self, model: nn.Module) -> Mapping[str, Tensor]:
        self.rest()
        return dict(model.named_parameters(remove_duplicate=False))

    def rest(self) -> None:
        for module in self._modules:
            module.reshard()

    def before_backward(self) -> None:
        self._arrived.clear()
        self._had = [parameter.grad is not None for parameter in self._parameters]

    def exchange(self, *, last: bool) -> None:
        """Find the parameters that no rank used: what was reduced for them are zeros of our own."""
        has = [had or number in self._arrived for number, had in enumerate(self._had)]
        flags = torch.tensor(has, dtype=torch.float32).to(self._backend.device, non_blocking=True)
        self.collectives.all_reduce(flags, "max")
        if not all(has):  # only then the host has to wait for what the others say
            for parameter, anywhere in zip(self._parameters, flags.tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None

    def reduce(self, gradients: Gradients, *, exchanged: bool) -> None:
        pass

    def abandon(self) -> None:
        self._model.reset_iter_state()

    def mean(self, value: Tensor) -> Tensor:
        return self.collectives.all_reduce(value, "avg")

    def norm(self, local: Tensor) -> Tensor:
        squared = local.float().square().to(self._backend.device)
        return self.collectives.all_reduce(squared).sqrt().to(local.device)

    def agree(self, found: Tensor) -> Tensor:
        return self.collectives.all_reduce(found, "max")

    def sync_buffers(self) -> None:
        share_buffers(self.collectives, self._model)

    def _plan_groups(self, model: nn.Module, policy: Policy) -> list[tuple[nn.Module, torch.dtype | None]]:
        """The groups, inner ones first, and the low precision that each is gathered in."""
        low, kept = _low(model, policy), _kept(model, policy)
        groups = [module for module in _groups(model, self._sharding) if module not in kept]
        exact: list[tuple[nn.Module, torch.dtype | None]] = [(module, None) for module in kept if low is not None]
        return [*exact, *((module, low) for module in (*reversed(groups), model))]

    def _shard(self, module: nn.Module, low: torch.dtype | None) -> None:
        """Make a group of what no inner group has: of rank 0's values this rank's shards, on the device."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        device = self._backend.device
        whole = [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_sharded(tensor)]
        for tensor in whole:
            tensor.data = tensor.data.to(device)
        broadcast(self.collectives, whole)
        if low is not None:  # the shards are the masters
            for parameter in whole:
                if isinstance(parameter, nn.Parameter) and parameter.is_floating_point():
                    parameter.data = parameter.data.float()
        reduce_dtype = self._reduce_dtype or (None if low is None else torch.float32)
        pinned = self._backend.capabilities.pinned_memory
        assert dist.group.WORLD is not None
        fully_shard(
            module,
            mesh=DeviceMesh.from_group(dist.group.WORLD, device.type),
            reshard_after_forward=None if self._sharding.reshard_after_forward else False,
            mp_policy=MixedPrecisionPolicy(low, reduce_dtype, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if self._sharding.cpu_offload else OffloadPolicy(),
        )

    def _listen(self) -> None:
        """Note which parameters receive gradients: of those that are gathered, which torch keeps."""
        model = self._model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for module in self._modules:
            places = [
                (part, name, numbers[id(parameter)])
                for part in module.modules()
                for name, parameter in part.named_parameters(recurse=False)
                if id(parameter) in numbers
            ]
            module.unshard()
            for part, name, number in places:
                gathered = getattr(part, name)
                if not is_sharded(gathered):  # else another group's
                    self._hooks.append(gathered.register_post_accumulate_grad_hook(_Note(self._arrived, number)))
            module.reshard()

    def __del__(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Note:
    """Notes that a parameter received a gradient."""

    def __init__(self, arrived: set[int], number: int) -> None:
        self._arrived, self._number = arrived, number

    def __call__(self, parameter: Tensor) -> None:
        self._arrived.add(self._number)


class _Rest:
    """Shards all again after a forward pass without gradients."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for each in self._modules:
                each.reshard()


def _unfit(parameter: nn.Parameter) -> str | None:
    if is_sharded(parameter):
        return None
    if parameter.dim() == 0:
        return "a scalar: make it a vector of one element"
    return None if parameter.is_contiguous() else "not contiguous"


def _groups(model: nn.Module, sharding: FSDP) -> list[nn.Module]:
    """The modules that are groups of their own, the outer ones first."""
    return [module for module in chosen(model, sharding.wrap, "wrap") if not _shares(model, module)]


def _shares(model: nn.Module, module: nn.Module) -> bool:
    """Whether a part of the model has a parameter in common with the rest of it."""
    inside = set(module.modules())
    parameters = set(module.parameters())
    return any(
        parameter in parameters
        for other in model.modules()
        if other not in inside
        for parameter in other.parameters(recurse=False)
    )


def _kept(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """The modules that a policy computes in fp32, whatever the rest is computed in."""
    if not policy.keep_batchnorm_fp32:
        return []
    return [module for module in model.modules() if isinstance(module, AnyBatchNorm) and module.affine]


def _targets(model: nn.Module, policy: Policy, *, trained: bool) -> set[torch.dtype]:
    """The dtypes that parameters are computed with, those that are kept in fp32 not counted."""
    name, kept = policy.model_dtype, {parameter for module in _kept(model, policy) for parameter in module.parameters()}
    return {
        getattr(torch, name) if name else parameter.dtype
        for parameter in model.parameters()
        if parameter.is_floating_point() and parameter not in kept and (parameter.requires_grad or not trained)
    }


def _low(model: nn.Module, policy: Policy) -> torch.dtype | None:
    """The low precision that fp32 shards are gathered in; None where they are gathered as they are.

    Raises:
        ConfigurationError: parameters are of several dtypes.
    """
    every = _targets(model, policy, trained=False)
    casts = policy.masters and not every.isdisjoint(LOW_PRECISION)
    dtypes = every if casts else _targets(model, policy, trained=True)
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"the parameters are of several dtypes ({', '.join(sorted(map(str, dtypes)))})",
            why="a group of shards is gathered, and reduced, in one",
            remedy='cast the model, or say precision=Policy(model_dtype="bfloat16")',
        )
    return next(iter(dtypes)) if casts else None
