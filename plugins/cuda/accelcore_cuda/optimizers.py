"""Optimizers of CUDA: torch's fused kernels, compiled formulas, torch's foreach kernels, then its loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.engine import Request
from accelcore.optim.formulas import FLAT_FORMULAS
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers

_FUSED = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
_COMPILED_PRIORITY = 20


def fused_kernels() -> tuple[str, ...]:
    """Return the optimizers for which this build of torch has a fused CUDA kernel.

    An older Adagrad refuses fused=True on CUDA although a kernel exists. A trial step would have to initialise CUDA, so
    the source of the class is read.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(
        name
        for name, kind in _FUSED.items()
        if has_kernel(f"aten::_fused_{name}_", "CUDA") and "cuda_unsupported=True" not in inspect.getsource(kind)
    )


def create_optimizers(fused: tuple[str, ...], *, no_compiler: str | None = None) -> Optimizers:
    """Return the optimizer registry of a CUDA backend; `no_compiler` is the reason why inductor cannot compile."""
    registry = Optimizers()
    register_torch_optimizers(registry, fused=fused, prefers_foreach=True)
    for name, kind in FLAT_FORMULAS.items():
        registry.register(
            name,
            "compiled",
            partial(kind, asynchronous=True, compile=_compiled),
            priority=_COMPILED_PRIORITY,
            supports=lambda request: no_compiler or _compiled_supports(request),
            memory="flat",
        )
    return registry


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function to Triton kernels for GPU tensors. For a model on the host, the function runs uncompiled."""
    kernels = torch.compile(function, fullgraph=True)

    def run(*arguments: Any) -> Any:
        there = any(isinstance(part, Tensor) and not part.is_cpu for argument in arguments for part in _parts(argument))
        return (kernels if there else function)(*arguments)

    return run


def _compiled_supports(request: Request) -> str | None:
    if any(request.values("differentiable", False)):
        return "the compiled formula cannot be differentiated through"
    if any(parameter.is_complex() for parameter in request.parameters):
        return "the compiled formula takes real parameters"
    options: list[Any] = [
        item for group in (request.options, *request.groups) for item in group.items() if item[0] != "lr"
    ]
    if any(isinstance(part, Tensor) for _, value in options for part in _parts(value)):
        return "only the lr of the compiled formula can be a tensor"
    return None


def _parts(value: Any) -> tuple[Any, ...] | list[Any]:
    return value if isinstance(value, tuple | list) else (value,)
