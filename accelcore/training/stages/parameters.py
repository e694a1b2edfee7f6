"""Place, Cast, Shard, Bind and Replicate: the stages that prepare the parameters, in this order.

Parameters are moved, cast, divided among ranks, laid out with their masters, and made the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.__future__ import get_swap_module_params_on_conversion as swaps_parameters
from torch.__future__ import set_swap_module_params_on_conversion as swap_parameters
from torch.optim import Optimizer

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.optim.binding import joint_groups
from accelcore.optim.engine import check_members, needs_closure
from accelcore.optim.flat.memory import Run, Slot, unfit
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.shards import divided_as
from accelcore.precision.cast_model import cast_boundary, fp32_state_dict, hold
from accelcore.precision.policy import LOW_PRECISION, create_scaler
from accelcore.torch_internals import shares_tensor_objects
from accelcore.training.gradients import Flat, Gradients, Masters, PerTensor, ShardedGradients
from accelcore.training.observers import Hooks
from accelcore.training.parallel.strategy import broadcast_masters
from accelcore.training.plan import Plan, Stage

_FLAT_BELOW = 1 << 14
"""Elements per parameter, on average, up to which flat memory is faster; `benchmarks/flat.py` measures it."""


class Place(Stage):
    """Move the model, and state that the optimizer already has, to the device."""

    def check(self, plan: Plan) -> None:
        if isinstance(plan.model, nn.DataParallel):
            raise ConfigurationError(
                "the model is already wrapped in DataParallel", remedy='pass the bare module, and parallel="ddp"'
            )
        if torch.__future__.get_overwrite_module_params_on_conversion():
            raise ConfigurationError(
                "torch is set to replace a model's parameters when it is moved",
                why="the optimizer would keep the old ones, and train these",
                remedy="torch.__future__.set_overwrite_module_params_on_conversion(False)",
            )
        values = (*plan.model.named_parameters(), *plan.model.named_buffers())
        if empty := [name for name, tensor in values if tensor.is_meta]:
            raise ConfigurationError(
                f"{empty[0]!r} of the model is on the meta device: it has a shape, and no values",
                remedy="make the model on the CPU; or call model.to_empty(device=accel.device), and initialise it or "
                "load its weights, before the optimizer is made",
            )
        names = {id(parameter): name for name, parameter in plan.model.named_parameters()}
        check_members([{"params": members} for members in plan.groups()], names)
        strangers = sum(id(parameter) not in names for members in plan.groups() for parameter in members)
        if strangers:
            raise ConfigurationError(
                f"{strangers} of the optimizer's parameters are not in the model",
                why="they would be neither moved to the device, nor reduced over ranks, nor saved",
                remedy="make the optimizer from model.parameters(); make other trained modules submodules of the model",
            )
        loss = plan.options["loss"]
        of_loss = loss.named_parameters() if isinstance(loss, nn.Module) else ()
        own = [name for name, one in of_loss if one.requires_grad and id(one) not in names]
        if own:
            plan.log.warn(
                "loss= has trainable parameters that are not in the model, such as %r: the trainer neither trains them "
                "nor moves them to the device. Put loss and model into one module, and give it as the model; or freeze "
                "them by requires_grad_(False)",
                own[0],
            )
        held = {id(member) for members in plan.groups() for member in members}
        trainable = [(name, one) for name, one in plan.model.named_parameters() if one.requires_grad]
        if not trainable:
            raise ConfigurationError(
                f"all {len(names)} parameters of the model are frozen, so there is nothing to train",
                remedy="unfreeze some by requires_grad_(True) first; to evaluate only, no trainer is needed",
            )
        if missed := [name for name, one in trainable if id(one) not in held]:
            raise ConfigurationError(
                f"the optimizer does not have {len(missed)} of the model's trainable parameters, such as {missed[0]!r}",
                why="they would never be trained",
                remedy="make the optimizer from model.parameters(), or freeze them by requires_grad_(False)",
            )

    def apply(self, plan: Plan) -> None:
        if plan.strategy.is_sharded:  # moved group by group: the device need not hold all of the model
            return
        optimizer, device, before = plan.optimizer, plan.backend.device, swaps_parameters()
        # Outside of torch, tensors of the device may be unable to share an object with the host's. torch would then
        # replace the parameters, which the optimizer has.
        swap_parameters(before or not shares_tensor_objects(device))
        try:
            plan.model.to(device)
        finally:
            swap_parameters(before)
        if not isinstance(optimizer, RoutedOptimizer):
            state = [value for entry in optimizer.state.values() if isinstance(entry, dict) for value in entry.values()]
            # Step counts may be on the host.
            if any(isinstance(value, Tensor) and value.dim() > 0 and value.device != device for value in state):
                optimizer.load_state_dict(optimizer.state_dict())


class Cast(Stage):
    """Casts parameters and buffers to the policy's `model_dtype`, and the model's inputs and outputs in hooks.

    The hooks are removed with the trainer; the model stays in that dtype.
    """

    def __init__(self) -> None:
        self._state_dict, self._boundary = Hooks(), Hooks()
        self._bounded = False

    def check(self, plan: Plan) -> None:
        policy, declared = plan.policy, plan.backend.capabilities.model_dtypes
        for name, parameter in plan.model.named_parameters():
            dtype = policy.model_dtype or str(parameter.dtype).removeprefix("torch.")
            if parameter.is_floating_point() and dtype not in declared:
                raise UnsupportedError(
                    f"the parameter {name} is {dtype}, which {plan.backend.name} cannot train",
                    available=", ".join(declared),
                    remedy='keep the parameters in fp32 and use precision="bf16" or "fp16"',
                )
        trained = (parameter for parameter in plan.model.parameters() if parameter.requires_grad)
        is_fp16 = policy.model_dtype == "float16" or torch.float16 in (parameter.dtype for parameter in trained)
        scales_fp16 = is_fp16 and policy.loss_scale is not None and not policy.masters
        if scales_fp16 and not create_scaler(plan.backend.scaler, policy).takes_fp16:
            raise ConfigurationError(
                "fp16 gradients would be divided by the loss scale",
                why="small values would be lost",
                remedy='leave loss_scale= and on_nonfinite="skip" out, or train fp32 masters: precision="O2"',
            )

    def apply(self, plan: Plan) -> None:
        policy = plan.policy
        dtype = getattr(torch, policy.model_dtype) if policy.model_dtype else None
        self._state_dict.close()
        if dtype is not None:
            # Shards stay in fp32: they are the masters, and are gathered in low precision.
            whole = not (plan.strategy.is_sharded and policy.masters)
            plan.exact = hold(plan.model, dtype, keep_batchnorm_fp32=policy.keep_batchnorm_fp32, parameters=whole)
            if dtype in LOW_PRECISION:
                self._state_dict.add(*fp32_state_dict(plan.model))  # again, because the model may have new parts
            if policy.cast_boundary and not self._bounded:
                self._bounded = True
                self._boundary.add(*cast_boundary(plan.model, inputs=dtype, outputs=torch.float32))
        held = {parameter.dtype for parameter in plan.model.parameters()}
        if dtype is not None:  # gathered shards have it, the shards themselves do not
            held.add(dtype)
        for low_dtype in sorted(held.intersection(LOW_PRECISION), key=str):
            plan.backend.precision.prepare(low_dtype)
        trained = [(name, parameter) for name, parameter in plan.model.named_parameters() if parameter.requires_grad]
        low = [name for name, parameter in trained if parameter.dtype in LOW_PRECISION]
        is_fp16 = torch.float16 in (parameter.dtype for _, parameter in trained)
        if low and not plan.policy.masters:
            plan.log.warn(
                "%d parameters, such as %s, are held in low precision without fp32 masters: small updates are lost",
                len(low),
                low[0],
            )
        elif is_fp16 and (policy.model_dtype, policy.loss_scale) == (None, None):
            plan.log.warn(
                "the model has fp16 parameters, and its gradients no loss scale: small ones become zero; give "
                'precision="16-true", which has one, or call model.float() before the optimizer is made'
            )


class Shard(Stage):
    """Divide the model by the strategy, and give the optimizer the shards.

    `FullySharded` lists what shards change in the other stages.
    """

    def check(self, plan: Plan) -> None:
        plan.strategy.check(plan.model, plan.optimizer, plan.policy)
        if plan.strategy.is_sharded and plan.options["clip"] is not None:
            raise ConfigurationError(
                "clip= cannot be used with a sharded model: it would see only this rank's shards of the gradients",
                remedy='set clip_norm=, which is computed over all ranks, or choose parallel="ddp"',
            )

    def apply(self, plan: Plan) -> None:
        before = dict(plan.model.named_parameters())
        plan.strategy.shard(plan.model, plan.policy)
        after = dict(plan.model.named_parameters())
        if shards := {whole: after[name] for name, whole in before.items() if after[name] is not whole}:
            _replace(plan.optimizer, shards, divided_as)


class Bind(Stage):
    """Find the slots, choose their memory, and give the optimizer the tensors that it updates.

    Slots are laid flat if asked for or if that is faster, and get fp32 masters. An optimizer of accelcore is bound to
    runs of them. In a torch optimizer, masters replace the parameters.
    """

    def check(self, plan: Plan) -> None:
        flat, sharded, optimizer = plan.options["flat"], plan.strategy.is_sharded, plan.optimizer
        unfit_reason = "each rank has shards of the parameters" if sharded else unfit(_trained(plan))
        if flat and unfit_reason is not None:
            raise ConfigurationError(f"flat=True is not possible: {unfit_reason}", remedy="remove flat")
        if isinstance(optimizer, RoutedOptimizer):  # raises here if no route can update these parameters
            may_be_flat = flat is not False and unfit_reason is None
            optimizer.route_for(_dtypes(plan), flat=may_be_flat, sharded=sharded)
        if optimizer.needs_closure if isinstance(optimizer, RoutedOptimizer) else needs_closure(optimizer):
            raise UnsupportedError(
                f"a trainer cannot step {getattr(optimizer, 'name', type(optimizer).__name__)}",
                remedy="call its step(closure) in a loop of your own, or choose another optimizer",
            )
        replaced = sharded or (plan.policy.masters and not _model_dtypes(plan).isdisjoint(LOW_PRECISION))
        if replaced and not isinstance(optimizer, RoutedOptimizer):
            _check_inner(optimizer)

    def apply(self, plan: Plan) -> None:
        plan.gradients.refresh(thorough=True)
        plan.gradients, plan.exact = _gradients(plan), {}
        if isinstance(plan.optimizer, RoutedOptimizer):
            plan.optimizer.bind(_runs(plan.gradients))
        else:
            _give_masters(plan)


class Replicate(Stage):
    """Give all ranks rank 0's parameters, and let the strategy wrap the model."""

    def check(self, plan: Plan) -> None:
        backend = plan.backend
        if backend.capabilities.sync_batchnorm or backend.collectives.world_size == 1:
            return
        for name, module in plan.model.named_modules():
            # In evaluation mode it exchanges nothing; torch's DistributedDataParallel refuses it there, too.
            if isinstance(module, nn.SyncBatchNorm) and (module.training or plan.strategy.uses_buckets):
                raise UnsupportedError(
                    f"the module {name!r} is a SyncBatchNorm, which {backend.name} does not have",
                    why="the backend does not declare sync_batchnorm",
                    remedy="keep BatchNorm here: without accel.capabilities.sync_batchnorm, do not convert the model",
                )

    def apply(self, plan: Plan) -> None:
        plan.forward = plan.strategy.replicate(plan.model, plan.gradients)
        broadcast_masters(plan.strategy, plan.gradients)


def _trained(plan: Plan) -> list[Tensor]:
    return [parameter for parameters in plan.groups() for parameter in parameters if parameter.requires_grad]


def _slots(plan: Plan) -> list[Slot]:
    known = {id(parameter): (name, parameter) for name, parameter in plan.model.named_parameters()}
    return [
        Slot(known[id(member)][0], number, known[id(member)][1], member)
        for number, members in enumerate(plan.groups())
        for member in members
        if member.requires_grad
    ]


def _gradients(plan: Plan) -> Gradients:
    slots = _slots(plan)
    gradients: Gradients
    if plan.strategy.is_sharded:
        gradients = ShardedGradients(slots)
    elif slots and _lies_flat(plan):
        name = plan.optimizer.name if isinstance(plan.optimizer, RoutedOptimizer) else ""
        gradients = Flat(slots, joint_groups(name, plan.optimizer.param_groups))
    else:
        gradients = PerTensor(slots)
    if plan.policy.masters and any(slot.parameter.dtype in LOW_PRECISION for slot in slots):
        masters = {id(slot.parameter): slot.trained for slot in plan.gradients.slots}
        gradients = Masters(gradients, masters | plan.exact)
    return gradients


def _model_dtypes(plan: Plan) -> set[torch.dtype]:
    name = plan.policy.model_dtype
    dtypes = {getattr(torch, name) if name else parameter.dtype for parameter in _trained(plan)}
    return {*dtypes, torch.float32} if plan.policy.keep_batchnorm_fp32 else dtypes


def _dtypes(plan: Plan) -> set[torch.dtype]:
    masters = plan.policy.masters
    return {torch.float32 if masters and dtype in LOW_PRECISION else dtype for dtype in _model_dtypes(plan)}


def _check_inner(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps others whose groups it does not share: they would keep the old parameters."""
    own = set(map(id, optimizer.param_groups))
    for name, value in vars(optimizer).items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for inner in values:
            if isinstance(inner, Optimizer) and not own.issuperset(map(id, inner.param_groups)):
                raise ConfigurationError(
                    f"{type(optimizer).__name__}.{name} has parameter groups of its own",
                    why="fp32 masters or shards take the place of parameters in the groups of the optimizer that the "
                    "trainer has; others would train nothing",
                    remedy=f"let {type(optimizer).__name__}.param_groups hold the groups of its optimizers themselves, "
                    'not copies; or choose precision="bf16" or "fp32" and parallel="ddp"',
                )


def _lies_flat(plan: Plan) -> bool:
    flat, trained, optimizer = plan.options["flat"], _trained(plan), plan.optimizer
    if flat is not None:
        return flat
    if not isinstance(optimizer, RoutedOptimizer) or unfit(trained) is not None:
        return False
    route = optimizer.route_for(_dtypes(plan), flat=True)
    has_sparse = any(getattr(module, "sparse", False) is True for module in plan.model.modules())  # torch's embeddings
    if route.memory != "any" or has_sparse:
        return route.memory == "flat"
    if plan.strategy.uses_buckets:
        return False
    # A route that updates many scattered tensors at once gains nothing, and pays for copying the gradients.
    return not route.scattered and sum(parameter.numel() for parameter in trained) < _FLAT_BELOW * len(trained)


def _runs(gradients: Gradients) -> list[Run]:
    """Return what an optimizer updates: each tensor, or stretches of flat memory."""
    found: list[Run] = []
    for number, (memory, value, gradient) in enumerate(
        zip(gradients.flat, gradients.values, gradients.of_values(), strict=True)
    ):
        if memory is None:
            found.append(Run([gradients.slots[number]], value))
        elif gradient is not None:
            found += memory.runs(value, gradient)
    return found


def _give_masters(plan: Plan) -> None:
    """Replace parameters by their fp32 masters in the groups and the state of a torch optimizer."""
    trained = {id(slot.parameter): slot.trained for slot in plan.gradients.slots}
    held = chain.from_iterable(group["params"] for group in plan.optimizer.param_groups)
    pairs = [(each, trained.get(id(plan.of_model(each)), plan.of_model(each))) for each in held]
    _replace(plan.optimizer, {each: target for each, target in pairs if each is not target}, _as_exact)
    swapped = [slot for slot in plan.gradients.slots if slot.trained is not slot.parameter]
    plan.masters = {id(slot.trained): slot.parameter for slot in swapped}


def _replace(optimizer: Any, replacements: Mapping[Any, Tensor], convert: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace tensors in an optimizer's groups and state. `convert` makes the state of the new one from the old."""
    entries = {
        replacements[old]: {
            key: convert(value, replacements[old]) if isinstance(value, Tensor) and value.dim() else value
            for key, value in entry.items()
        }
        for old, entry in optimizer.state.items()
        if old in replacements
    }
    if isinstance(optimizer, RoutedOptimizer):
        optimizer.replace(replacements, entries)
        return
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(held, held) for held in group["params"]]
    for held in replacements:
        optimizer.state.pop(held, None)
    optimizer.state.update(entries)


def _as_exact(value: Tensor, target: Tensor) -> Tensor:
    fits = value.is_floating_point() and value.shape == target.shape
    return value.to(torch.promote_types(value.dtype, target.dtype)) if fits else value
