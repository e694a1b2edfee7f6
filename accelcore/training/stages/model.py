"""Place and Cast: move the model to the device, and cast it to the dtype of its policy."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.__future__ import get_swap_module_params_on_conversion as swaps_parameters
from torch.__future__ import set_swap_module_params_on_conversion as swap_parameters

from accelcore.errors import ConfigurationError, UnsupportedError, logger
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.precision.cast_model import cast_boundary, fp32_state_dict, hold
from accelcore.precision.policy import LOW_PRECISION, choose_policy, create_scaler, skipping
from accelcore.precision.role import Contexts
from accelcore.torch_internals import shares_tensor_objects
from accelcore.training.observers import Hooks
from accelcore.training.plan import Plan, Stage


class Place(Stage):
    """Move the model, and state that the optimizer already has, to the device."""

    def check(self, plan: Plan) -> None:
        if isinstance(plan.model, nn.DataParallel):
            raise ConfigurationError(
                "the model is already wrapped in DataParallel", remedy='pass the bare module, and parallel="ddp"'
            )
        if empty := [name for name, one in plan.model.named_parameters() if one.is_meta]:
            raise ConfigurationError(
                f"{len(empty)} of the model's parameters are on the meta device, such as {empty[0]!r}",
                why="they have no values",
                remedy="make the model without torch.device('meta'), or load weights with assign=True first",
            )
        names = {id(parameter) for parameter in plan.model.parameters()}
        strangers = sum(id(parameter) not in names for members in plan.groups() for parameter in members)
        if strangers:
            raise ConfigurationError(
                f"{strangers} of the optimizer's parameters are not in the model",
                why="they would be neither moved to the device, nor reduced over ranks, nor saved",
                remedy="make the optimizer from model.parameters(); make other trained modules submodules of the model",
            )
        held = {id(member) for members in plan.groups() for member in members}
        trainable = [(name, one) for name, one in plan.model.named_parameters() if one.requires_grad]
        if names and not trainable:
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
        if plan.strategy.layout == "shards":  # moved group by group: the device need not hold all of the model
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
            state = [value for entry in optimizer.state.values() for value in entry.values()]
            # Step counts may be on the host.
            if any(isinstance(value, Tensor) and value.dim() > 0 and value.device != device for value in state):
                optimizer.load_state_dict(optimizer.state_dict())


class Cast(Stage):
    """Casts parameters and buffers to the policy's `model_dtype`, and the model's inputs and outputs in hooks.

    The hooks are removed with the trainer; the model stays in that dtype. `check` chooses the policy, and makes the
    contexts of a training: autocast, with O1's table or torch's, and the arithmetic of fp32.
    """

    def __init__(self) -> None:
        self._warned = False
        self._state_dict, self._boundary = Hooks(), Hooks()
        self._bounded = False

    def check(self, plan: Plan) -> None:
        options = plan.options
        plan.policy = policy = choose_policy(options["precision"], options["loss_scale"])
        if options["on_nonfinite"] == "skip":
            plan.policy = policy = skipping(policy)
        plan.contexts = Contexts(plan.backend.precision, policy, options["fp32"])
        declared = plan.backend.capabilities.model_dtypes
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
                "the gradients are fp16, and are to be divided by a loss scale",
                why="that would lose small values",
                remedy='leave loss_scale= and on_nonfinite="skip" out, or train fp32 masters: precision="O2"',
            )

    def apply(self, plan: Plan) -> None:
        policy = plan.policy
        self._state_dict.close()
        if policy.model_dtype is not None:
            dtype = getattr(torch, policy.model_dtype)
            # Shards stay in fp32: they are the masters, and are gathered in low precision.
            whole = not (plan.strategy.layout == "shards" and policy.masters)
            plan.exact = hold(plan.model, dtype, keep_batchnorm_fp32=policy.keep_batchnorm_fp32, parameters=whole)
            if dtype in LOW_PRECISION:
                self._state_dict.add(*fp32_state_dict(plan.model))  # again, because the model may have new parts
            if policy.cast_boundary and not self._bounded:
                self._bounded = True
                self._boundary.add(*cast_boundary(plan.model, inputs=dtype, outputs=torch.float32))
        held = {parameter.dtype for parameter in plan.model.parameters()}
        if policy.model_dtype is not None:  # gathered shards have it, the shards themselves do not
            held.add(getattr(torch, policy.model_dtype))
        for low_dtype in sorted(held.intersection(LOW_PRECISION), key=str):
            plan.backend.precision.prepare(low_dtype)
        trained = [(name, parameter) for name, parameter in plan.model.named_parameters() if parameter.requires_grad]
        low = [name for name, parameter in trained if parameter.dtype in LOW_PRECISION]
        if low and not plan.policy.masters and not self._warned:
            self._warned = True
            logger.warning(
                "%d parameters, such as %s, are held in low precision without fp32 masters: small updates are lost",
                len(low),
                low[0],
            )
        is_fp16 = torch.float16 in (parameter.dtype for _, parameter in trained)
        if is_fp16 and (policy.model_dtype, policy.loss_scale) == (None, None) and not self._warned:
            self._warned = True
            logger.warning(
                "the model has fp16 parameters, and its gradients no loss scale: small ones become zero; give "
                'precision="16-true", which has one, or call model.float() before the optimizer is made'
            )
