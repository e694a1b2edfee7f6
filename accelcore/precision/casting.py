"""A whole model in one dtype: its tensors held so, what goes in and comes out cast, its state_dict in fp32 nonetheless.

What apex calls O2 and O3 is made of these. Each change to a module is an object with `remove()`, but for `hold`, which
is undone by `hold` in another dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelcore.nested import cast
from accelcore.precision.table import LOW_PRECISION
from accelcore.torch_internals import AnyBatchNorm

__all__ = ["CastBoundary", "FP32StateDict", "hold"]


def hold(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool, parameters: bool = True) -> None:
    """Hold a model's parameters and floating-point buffers in a dtype from now on.

    They are cast in place: the same `Parameter` objects, which an optimizer may have, with other memory. A gradient is
    cast with its parameter. Integers and complex numbers stay as they are.

    Args:
        model: on any device.
        dtype: a floating-point one.
        keep_batchnorm_fp32: hold BatchNorm with weights of its own, of any number of dimensions and SyncBatchNorm, in
            fp32 instead: its statistics are sums over many numbers. It takes inputs of any dtype, and answers in that.
        parameters: False leaves them as they are, and casts buffers only.
    """
    for module in model.modules():
        kept = keep_batchnorm_fp32 and isinstance(module, AnyBatchNorm) and module.affine
        moved = _hold_own(module, torch.float32 if kept else dtype, parameters=parameters)
        if moved and isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one piece of memory


class _Hooks:
    """Hooks on a model, until they are removed."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Take the hooks off again. Copies of the model keep theirs."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class CastBoundary(_Hooks):
    """Casts the floating-point tensors that a model's forward is given, and those that it returns.

    They are found in tuples, lists, mappings and dataclasses, at any depth; containers in which nothing is cast are
    passed on as they are, others as shallow copies. Other objects are not looked into. The casts are differentiable: a
    gradient has the dtype of the tensor that it belongs to.

    It is a pair of forward hooks on `model` alone, not on what is in it, and so goes wherever hooks go: into copies,
    pickles, compiled and replicated models.

    Args:
        model: the root; whoever calls another method than its `forward` goes around.
        inputs: dtype of the arguments; None leaves them alone.
        outputs: dtype of the results; None leaves them alone.
    """

    def __init__(self, model: nn.Module, *, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        super().__init__()
        if inputs is not None:
            self._handles.append(model.register_forward_pre_hook(_CastInputs(inputs), with_kwargs=True))
        if outputs is not None:
            self._handles.append(model.register_forward_hook(_CastOutputs(outputs)))


class FP32StateDict(_Hooks):
    """Makes `state_dict()` of a model that is held in bf16 or fp16 come out in fp32, and so that of its parts.

    A checkpoint then says nothing of the precision it was trained in. `load_state_dict` takes it: torch casts each
    value to the dtype of its parameter. With `keep_vars=True` the parameters themselves come out, as they are held.

    Args:
        model: the root.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for module in model.modules():
            self._handles.append(module.register_state_dict_post_hook(_to_fp32))  # type: ignore[no-untyped-call]


def _hold_own(module: nn.Module, dtype: torch.dtype, *, parameters: bool) -> bool:
    """Hold the tensors of a module, without those of its children, in a dtype; whether one had to be cast."""
    own = _own(module) if parameters else module.buffers(recurse=False)
    strange = [tensor for tensor in own if tensor.is_floating_point() and tensor.dtype != dtype]
    for tensor in strange:
        gradient, tensor.grad = tensor.grad, None
        tensor.data = tensor.data.to(dtype)
        tensor.grad = None if gradient is None else gradient.to(dtype)
    return bool(strange)


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@dataclass(frozen=True)
class _CastInputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return cast(inputs, self.dtype), cast(named, self.dtype)


@dataclass(frozen=True)
class _CastOutputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return cast(output, self.dtype)


def _to_fp32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """A hook on each module: casts what is the module's own in a state_dict."""
    for name in _names(module):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in LOW_PRECISION and not isinstance(value, nn.Parameter):
            state[prefix + name] = value.float()


def _names(module: nn.Module) -> Iterator[str]:
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        yield name
    for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
        yield name
