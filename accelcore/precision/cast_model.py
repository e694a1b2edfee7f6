"""Cast a whole model: its parameters and buffers, its inputs and outputs, and its state_dict to fp32.

apex's O2 and O3 consist of these. Another `hold` in fp32 undoes a `hold`; the others return the hooks they made.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelcore.precision.policy import LOW_PRECISION
from accelcore.torch_internals import AnyBatchNorm
from accelcore.util.containers import cast


def hold(
    model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool, parameters: bool = True
) -> dict[int, Tensor]:
    """Cast a model's parameters and floating-point buffers; return the earlier values of trainable ones, by their id.

    They are cast in place: the `Parameter` objects, which an optimizer may hold, stay the same and get other memory. A
    gradient is cast with its parameter. Integers and complex numbers stay as they are. If `parameters` is False, only
    buffers are cast. With `keep_batchnorm_fp32`, BatchNorm of any kind, if it has weights, is held in fp32, because its
    statistics are sums over many numbers. It accepts inputs of any dtype, and returns that dtype.
    """
    before: dict[int, Tensor] = {}
    for module in model.modules():
        kept = keep_batchnorm_fp32 and isinstance(module, AnyBatchNorm) and module.affine
        own_dtype = torch.float32 if kept else dtype
        own = chain(module.parameters(recurse=False) if parameters else (), module.buffers(recurse=False))
        strange = [tensor for tensor in own if tensor.is_floating_point() and tensor.dtype != own_dtype]
        before |= {id(tensor): tensor.data for tensor in strange if tensor.requires_grad}
        for tensor in strange:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(own_dtype)
            tensor.grad = None if gradient is None else gradient.to(own_dtype)
        if strange and isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs its weights in one piece of memory
    return before


def cast_boundary(
    model: nn.Module, *, inputs: torch.dtype | None, outputs: torch.dtype | None
) -> list[RemovableHandle]:
    """Cast the floating-point inputs and outputs of a model's forward, by hooks; None leaves them alone.

    Tensors are found in tuples, lists, mappings and dataclasses, at any depth. A container without any tensor to cast
    is passed on itself, others as shallow copies. The casts are differentiable: a gradient has the dtype of its tensor.
    These are hooks on `model` alone. Copies, pickles, compiled and replicated models keep them.
    """
    hooks = []
    if inputs is not None:
        hooks.append(model.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True))
    if outputs is not None:
        hooks.append(model.register_forward_hook(partial(_cast_output, outputs)))
    return hooks


def fp32_state_dict(model: nn.Module) -> list[RemovableHandle]:
    """Make `state_dict()` of a model in bf16 or fp16, and of its parts, return fp32, by hooks; return these.

    A checkpoint then does not depend on the precision of the run. `load_state_dict` accepts it: torch casts each value
    to the dtype of its parameter. `keep_vars=True` returns the parameters themselves, in their dtype.
    """
    return [module.register_state_dict_post_hook(_to_fp32) for module in model.modules()]


def _cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return cast(inputs, dtype), cast(named, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return cast(output, dtype)


def _to_fp32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Cast a module's own entries of a state_dict; a hook on each module."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    for name, _ in chain(parameters, module.named_buffers(recurse=False, remove_duplicate=False)):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in LOW_PRECISION and not isinstance(value, nn.Parameter):
            state[prefix + name] = value.float()
