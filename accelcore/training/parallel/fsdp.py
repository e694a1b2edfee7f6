"""fsdp: torch's fully_shard, which divides parameters, gradients and optimizer state among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.devices import Roles
from accelcore.errors import ConfigurationError, TrainingError
from accelcore.optim.shards import is_sharded
from accelcore.precision.policy import LOW_PRECISION, Policy
from accelcore.torch_features import UNUSED_SHARDS
from accelcore.torch_internals import AnyBatchNorm, after_backward, pytree, reset_sharded_model
from accelcore.training.gradients import Gradients
from accelcore.training.observers import Hooks
from accelcore.training.options import FSDP, TrainerOptions, chosen
from accelcore.training.parallel.strategy import Strategy, broadcast_tensors, comm_dtype

# torch asks reduce_scatter for an average of gradients in these dtypes. It adds up and divides others itself.
_AVERAGED = (torch.float32, torch.bfloat16)


class FullySharded(Strategy):
    """torch's fully_shard, group by group, and two things more.

    1. A parameter may go unused on some ranks: zeros are then reduced for it, by torch or through `UnusedShards`.
       `after_backward` exchanges which parameters received a gradient on any rank, so that None stays None.
    2. After a forward pass without gradients all groups are freed, as after a backward pass. A script that freezes a
       parameter or reads a state_dict then finds the shards.

    Gradients are reduced after each backward pass, also within a window: whole gradients would take the memory that
    sharding saves.

    What `is_sharded` changes:

    - Checks: `Shard` refuses `clip=`. `Bind` refuses `flat=True`, and routes that need whole parameters.
    - Preparation: `Place` does not move the model. `Cast` keeps fp32 parameters if there are masters: the shards are
      the masters. `Shard` calls `shard`, and gives the optimizer the shards. `Bind` makes `ShardedGradients`.
      `Replicate` broadcasts buffers only.
    - Steps: `before_backward` and `after_backward` at each backward pass; at the end of a window `reduce`, and `agree`
      and `norm`, which all-reduce what a rank knows of its shards.
    - Evaluation: ranks with another number of batches raise.
    - Checkpoints: each rank saves and reads its own rows.
    """

    is_sharded = True

    def __init__(self, backend: Roles, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        asked = options["parallel"]
        self._sharding = asked if isinstance(asked, FSDP) else FSDP(reshard_after_forward=asked != "zero2")
        self._pinned = backend.capabilities.pinned_memory
        self._reduce_dtype = comm_dtype(options)
        self._hooks = Hooks()
        self._arrived: set[int] = set()
        self._ran: set[bool] = set()
        self._unused: UnusedShards | None = None

    def check(self, model: nn.Module, optimizer: Optimizer, policy: Policy) -> None:
        from torch.distributed.fsdp import FSDPModule

        for name, parameter in model.named_parameters():
            for unfit, what, remedy in (
                (parameter.dim() == 0, "a scalar", "make it a vector of one element"),
                (not is_sharded(parameter) and not parameter.is_contiguous(), "not contiguous", "use .contiguous()"),
                (not parameter.numel() and parameter.requires_grad, "empty", "freeze it by requires_grad_(False)"),
                (parameter.is_complex() and parameter.requires_grad, "complex", 'choose parallel="ddp"'),
            ):
                if unfit:
                    raise ConfigurationError(
                        f"the parameter {name!r} cannot be divided among ranks: it is {what}", remedy=remedy
                    )
        if isinstance(model, FSDPModule):  # `trainer.refresh()`
            for module in model.modules():  # an evaluation may have left groups gathered
                if isinstance(module, FSDPModule):
                    module.reshard()
            if whole := [name for name, one in model.named_parameters() if not is_sharded(one)]:
                raise ConfigurationError(
                    f"the parameter {whole[0]!r} is not divided among the ranks, and the rest of the model is",
                    remedy="have every layer in the model before its trainer is made, frozen until it is needed; or "
                    'choose parallel="ddp"',
                )
        if any(getattr(module, "sparse", False) is True for module in model.modules()):
            raise ConfigurationError(
                "an embedding has sparse gradients, and shards need dense gradients", remedy="make it with sparse=False"
            )
        if self._sharding.cpu_offload and policy.loss_scale is not None:
            raise ConfigurationError(
                'cpu_offload=True cannot be combined with a loss scale or on_nonfinite="skip"',
                remedy='choose precision="bf16", which needs no loss scale, and on_nonfinite="raise"',
            )
        self._plan_groups(model, policy)

    def shard(self, model: nn.Module, policy: Policy) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            for module, low in self._plan_groups(model, policy):
                self._shard_group(module, low)
        if not isinstance(model, FSDPModule):
            remedy = "call fully_shard on the model too, or leave all of it to the trainer"
            raise ConfigurationError("a part of the model is already sharded, and the model is not", remedy=remedy)
        self._model, self._sums = model, not _averages(self.device)
        self._groups: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._hooks.close()
        if UNUSED_SHARDS.present:
            model.set_reduce_scatter_unused_params(True)
        else:
            self._unused = UnusedShards(self._groups, self._hooks)
        self._note_gradients()
        self._hooks.add(model.register_forward_pre_hook(partial(_note_forward, self._ran)))
        self._hooks.add(model.register_forward_hook(partial(_free_after_evaluation, self._groups)))

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        broadcast_tensors(self.collectives, list(model.buffers()))
        return model

    def leaves(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        return [self._gathered[id(parameter)] for parameter in parameters]

    def before_backward(self) -> None:
        self._arrived.clear()
        if self._unused is not None:
            self._unused.begin()
        self._had = [parameter.grad is not None for parameter in self._parameters]

    def after_backward(self) -> None:
        """Drop the zeros that were reduced for parameters that no rank used."""
        has = [had or number in self._arrived for number, had in enumerate(self._had)]
        flags = torch.tensor(has, dtype=torch.float32, device="cpu").to(self.device, non_blocking=True)
        self.collectives.all_reduce(flags, "max")
        if not all(has):  # only then the host waits for the flags of the other ranks
            for parameter, anywhere in zip(self._parameters, flags.tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None

    def reduce(self, gradients: Gradients, *, full: bool) -> None:
        """Do what torch left undone in backward: divide sums by the number of ranks."""
        if self._sums:
            for gradient in gradients.of_values():
                if gradient is not None and (self._reduce_dtype or gradient.dtype) in _AVERAGED:
                    gradient.div_(self.collectives.world_size)

    def agree(self, found: Tensor) -> Tensor:
        return self.collectives.all_reduce(found.to(self.device), "max")

    def norm(self, local: Tensor) -> Tensor:
        squared = local.to(torch.promote_types(local.dtype, torch.float32)).square().to(self.device)
        return self.collectives.all_reduce(squared).sqrt().to(local.device)

    def reset(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        if self._ran:  # before its first forward pass torch has nothing to reset, and raises
            reset_sharded_model(self._model)
        for group in self._groups:
            group.reshard()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is not gradient:  # torch 2.15 drops it, and a save within a window comes here, too
                parameter.grad = gradient
        self._check_unwritten()

    def _check_unwritten(self) -> None:
        """Raise if something wrote to a gathered parameter, or gave it other memory: the shards do not have that."""
        for name, gathered, version in self._whole:
            if gathered._version != version or gathered.untyped_storage().nbytes():
                raise TrainingError(
                    f"a forward pass or a loss wrote to the parameter {name!r}",
                    why="it is whole only there, and its shards, which are trained and saved, keep the old values",
                    remedy="write to it after a step, when it and others are shards, as by torch.no_grad() and "
                    'parameter.lerp_(other, 0.1); or choose parallel="ddp" or "zero1"',
                )

    def _plan_groups(self, model: nn.Module, policy: Policy) -> list[tuple[nn.Module, torch.dtype | None]]:
        """Return the groups, inner ones first, each with the low precision it is gathered in; None: as it is."""
        low, in_fp32 = _gather_dtype(model, policy), _kept_in_fp32(model, policy)
        chosen_groups = chosen(model, self._sharding.wrap, "wrap")
        groups = [module for module in chosen_groups if module not in in_fp32 and not _shares(model, module)]
        exact: list[tuple[nn.Module, torch.dtype | None]] = [(module, None) for module in in_fp32 if low is not None]
        return [*exact, *((module, low) for module in (*reversed(groups), model))]

    def _shard_group(self, module: nn.Module, low: torch.dtype | None) -> None:
        """Move to the device what no inner group has, take rank 0's values, and shard it; in fp32 if `low` is given."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        whole = [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_sharded(tensor)]
        for tensor in whole:
            tensor.data = tensor.data.to(self.device)
        broadcast_tensors(self.collectives, whole)
        if low is not None:  # the shards are the masters
            for parameter in whole:
                if isinstance(parameter, nn.Parameter) and parameter.is_floating_point():
                    parameter.data = parameter.data.float()
        reduce_dtype = self._reduce_dtype or (None if low is None else torch.float32)
        assert dist.group.WORLD is not None
        # torch's default frees all groups but the model's own after their forward pass.
        kept: dict[str, Any] = {} if self._sharding.reshard_after_forward else {"reshard_after_forward": False}
        fully_shard(
            module,
            mesh=DeviceMesh.from_group(dist.group.WORLD, self.device.type),
            **kept,
            mp_policy=MixedPrecisionPolicy(low, reduce_dtype, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=self._pinned) if self._sharding.cpu_offload else OffloadPolicy(),
        )

    def _note_gradients(self) -> None:
        """Note which parameters receive gradients, by hooks on the gathered parameters, which torch keeps."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._gathered: dict[int, Tensor] = {}
        self._whole: list[tuple[str, Tensor, int]] = []
        for group in self._groups:
            places = [
                (part, name, id(parameter))
                for part in group.modules()
                for name, parameter in part.named_parameters(recurse=False)
            ]
            group.unshard()
            for part, name, identity in places:
                gathered = getattr(part, name)
                if is_sharded(gathered):  # another group's
                    continue
                self._whole.append((names[identity], gathered, gathered._version))
                if identity in numbers:
                    note = partial(_note_gradient, self._arrived, numbers[identity])
                    self._hooks.add(gathered.register_post_accumulate_grad_hook(note))
                    self._gathered[identity] = gathered
            group.reshard()


# These hooks are bound to lists, not to the strategy: a copy of the model gets copies of them.
def _note_gradient(arrived: set[int], number: int, parameter: Tensor) -> None:
    arrived.add(number)


def _note_forward(ran: set[bool], *_: Any) -> None:
    ran.add(True)


def _free_after_evaluation(groups: list[Any], *_: Any) -> None:
    if not torch.is_grad_enabled():
        for group in groups:
            group.reshard()


def _averages(device: torch.device) -> bool:
    """Return whether this job's reduce_scatter can average: over gloo, torch 2.7 adds up instead."""
    import torch.distributed as dist

    ones, mean = torch.ones(dist.get_world_size(), device=device), torch.empty(1, device=device)
    # Newer versions of torch warn of the older name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(mean, ones, op=dist.ReduceOp.AVG)
    return mean.item() == 1


def _shares(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a part of the model has a parameter in common with the rest of it."""
    inside, own = set(module.modules()), set(module.parameters())
    others = (other for other in model.modules() if other not in inside)
    return any(parameter in own for other in others for parameter in other.parameters(recurse=False))


def _kept_in_fp32(model: nn.Module, policy: Policy) -> list[nn.Module]:
    if not policy.keep_batchnorm_fp32:
        return []
    return [module for module in model.modules() if isinstance(module, AnyBatchNorm) and module.affine]


def _gather_dtype(model: nn.Module, policy: Policy) -> torch.dtype | None:
    """Return the low precision that fp32 shards are gathered in; None: they are gathered as they are."""
    in_fp32 = {parameter for module in _kept_in_fp32(model, policy) for parameter in module.parameters()}
    parameters = [p for p in model.parameters() if p.is_floating_point() and p not in in_fp32]

    def dtypes_of(parameters: list[nn.Parameter]) -> set[torch.dtype]:
        return {getattr(torch, policy.model_dtype) if policy.model_dtype else p.dtype for p in parameters}

    dtypes = dtypes_of(parameters)
    casts = policy.masters and not dtypes.isdisjoint(LOW_PRECISION)
    if not casts:  # frozen parameters may differ
        dtypes = dtypes_of([parameter for parameter in parameters if parameter.requires_grad])
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"the parameters are of several dtypes ({', '.join(sorted(map(str, dtypes)))})",
            remedy='cast the model, or set precision=Policy(model_dtype="bfloat16")',
        )
    return next(iter(dtypes)) if casts else None


class UnusedShards:
    """Hooks that give unused parameters of sharded modules zeros, right before the gradients of a group are reduced.

    Ranks reduce the gradients of a group together. If a rank leaves a parameter out, the others wait for it, or add
    gradients of different parameters. Newer versions of torch fill in zeros themselves (`UNUSED_SHARDS`). torch reduces
    a group when the gradients of its inputs are known, and the other groups when the backward pass ends. A group that
    no rank has run stays without gradients.
    """

    def __init__(self, groups: Sequence[nn.Module], hooks: Hooks) -> None:
        self._places = [_places_of(group, groups) for group in groups]
        self._pending: set[int] = set()
        self._queued = False
        for number, group in enumerate(groups):
            hooks.add(group.register_forward_pre_hook(partial(_note_inputs, self, number), with_kwargs=True))
            # Before and after torch's own hook: it may put its mark on the output, or a function behind it. Ours has to
            # be reached first in backward, to be the first that asks to be called at its end.
            for first in (True, False):
                hooks.add(group.register_forward_hook(partial(_note_outputs, self, number), prepend=first))

    def begin(self) -> None:
        """Begin a backward pass: forget one that raised."""
        self._queued = False

    def enter(self, number: int, gradient: Tensor) -> None:
        """Note that the backward pass reaches a group."""
        if not self._queued:
            self._queued = True
            self._pending = set(range(len(self._places)))
            after_backward(self._end)
        self._pending.add(number)

    def leave(self, number: int, gradient: Tensor) -> None:
        """Fill in the gradients of a group, which torch reduces next."""
        self._pending.discard(number)
        for part, name in self._places[number]:
            parameter = getattr(part, name)
            if not is_sharded(parameter) and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _end(self) -> None:
        self._queued = False
        for number in tuple(self._pending):
            self.leave(number, torch.empty(0, device="cpu"))


def _places_of(group: nn.Module, groups: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return the modules and names of the parameters that belong to a group and to no group inside it."""
    inside = set(group.modules()) - {group}
    inner = {part for other in groups if other in inside for part in other.modules()}
    return [
        (part, name)
        for part in group.modules()
        if part not in inner
        for name, _ in part.named_parameters(recurse=False)
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_inputs(unused: UnusedShards, number: int, module: nn.Module, arguments: Any, options: Any) -> None:
    for tensor in _differentiable((arguments, options)):
        tensor.register_hook(partial(unused.leave, number))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_outputs(unused: UnusedShards, number: int, module: nn.Module, arguments: Any, output: Any) -> None:
    for tensor in _differentiable(output):
        tensor.register_hook(partial(unused.enter, number))


def _differentiable(tree: Any) -> list[Tensor]:
    if not torch.is_grad_enabled():
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
