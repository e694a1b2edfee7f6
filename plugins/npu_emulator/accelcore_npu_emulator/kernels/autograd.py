"""Derivatives by CPU autograd, for backward operators and for torch_npu's nodes that bypass the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accelcore_npu_emulator.kernels.host_memory import place, view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from accelcore_npu_emulator.kernels.machine import Machine

_EXCLUDED = ("AutogradCPU", "AutogradFunctionality", "AutogradOther", "ADInplaceOrView")


def autograd_below() -> AbstractContextManager[None]:
    """Return a context that lets the host's autograd record: autograd nodes call kernels with autograd excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _EXCLUDED:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard


def gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], upstream: Tensor | Sequence[Tensor]
) -> tuple[Any, ...]:
    """Return the gradients of a host function with respect to `inputs`; None for an input without influence."""
    with autograd_below(), torch.inference_mode(False), torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*leaves), leaves, upstream, allow_unused=True)


def backward_of(function: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """Return the backward operator `(gradient, *inputs, *options)` of a host function of so many inputs."""

    def kernel(grad: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = gradients(lambda *leaves: function(*leaves, *args[inputs:], **kwargs), args[:inputs], grad)
        return found[0] if inputs == 1 else found

    return kernel


def decomposed(operator: torch._ops.OpOverload, kind: str = "CompositeImplicitAutograd") -> Callable[..., Any]:
    """Return a composite operator as its parts: device operators that are counted and differentiated separately."""
    key = getattr(torch._C.DispatchKey, kind)
    return lambda *args, **kwargs: operator._op_dk(key, *args, **kwargs)


def recomputed(
    operator: torch._ops.OpOverload, machine: Machine, function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return an autograd kernel whose backward differentiates `function`, by default the operator, on host views."""
    name = str(operator._name)
    on_host = function or operator

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kwargs: dict[str, Any], *args: Any) -> Any:
            ctx.kwargs, ctx.constants = kwargs, [None if isinstance(arg, Tensor) else arg for arg in args]
            ctx.is_tensor = [isinstance(arg, Tensor) for arg in args]
            ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)))
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args, **kwargs)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *upstream: Tensor) -> Any:
            machine.count_launch(f"{name} backward")
            saved = iter(ctx.saved_tensors)
            args = [
                next(saved) if is_tensor else constant
                for is_tensor, constant in zip(ctx.is_tensor, ctx.constants, strict=True)
            ]
            wanted = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]

            def forward(*inputs: Tensor) -> Any:
                values = [view(arg) if isinstance(arg, Tensor) else arg for arg in args]
                for i, value in zip(wanted, inputs, strict=True):
                    values[i] = value
                return on_host(*values, **ctx.kwargs)

            inputs, outputs = [view(args[i].detach()) for i in wanted], [view(g) for g in upstream]
            placed = [
                None if gradient is None else place(gradient, upstream[0].device)
                for gradient in gradients(forward, inputs, outputs)
            ]
            if (tape := machine.recorder.tape) is not None:

                def step() -> None:
                    for target, gradient in zip(placed, gradients(forward, inputs, outputs), strict=True):
                        if target is not None:
                            view(target).copy_(gradient)

                tape.append(step)
            results: list[Any] = [None] * (len(args) + 1)
            for i, gradient in zip(wanted, placed, strict=True):
                results[i + 1] = gradient
            return tuple(results)

    apply: Callable[..., Any] = Recomputed.apply
    return lambda *args, **kwargs: apply(kwargs, *args)


def rounded_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of several steps to round once, not to the inputs' low precision after each step."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return function(*args, **kwargs)
        single = [arg.float() if isinstance(arg, Tensor) and arg.dtype == dtype else arg for arg in args]
        found = function(*single, **kwargs)
        if isinstance(found, Tensor):
            return found.to(dtype)
        return tuple(None if each is None else each.to(dtype) for each in found)

    return kernel
