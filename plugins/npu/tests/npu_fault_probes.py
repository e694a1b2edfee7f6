"""Probes: whether the installed torch_npu still has the known faults.

They run on an NPU, emulated or not. An emulated one has the Python of torch_npu's optimizers, and other kernels: what
is wrong with a kernel cannot be found out there.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch_npu
from accelcore_npu.detection import emulated_devices
from fused_cases import OPTIONS, VENDORS
from torch import Tensor, nn
from torch_npu import optim

_OPTIONS: dict[Any, dict[str, float]] = {VENDORS[name]: OPTIONS[name] for name in OPTIONS}


def _asked(probe: Callable[[], bool]) -> Callable[[], bool | None]:
    """The probe, where there is an NPU; without the warnings of an old API that torch_npu's classes use."""

    @wraps(probe)
    def ask() -> bool | None:
        if not torch_npu.npu.is_available():
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return probe()

    return ask


@_asked
def late_gradient_lost() -> bool:
    """A parameter has its first gradient in the second step: is it as it was, in both classes?"""
    for kind in (optim.NpuFusedSGD, optim.NpuFusedBertAdam):
        early, late = _weights(2)
        optimizer = kind([early, late], **_OPTIONS[kind])
        _step(optimizer, [early], 1.0)
        _step(optimizer, [early, late], 1.0)
        if not torch.equal(late.detach(), _weights(1)[0].detach()):
            return False
    return True


@_asked
def stale_gradients() -> bool:
    """Does it not matter what the gradient of the second step is, if it is a tensor of its own?"""
    return all(
        torch.equal(_trained(kind, [1.0, 2.0]), _trained(kind, [1.0, -3.0]))
        for kind in _OPTIONS
        if kind is not optim.NpuFusedAdamP  # which reads the new gradient, too
    )


@_asked
def loaded_state_ignored() -> bool:
    """One step from the same weights, before and after the state of before was loaded: do all classes differ?"""
    for kind in _OPTIONS:
        parameters = _weights(1)
        optimizer = kind(parameters, **_OPTIONS[kind])
        for value in (1.0, -2.0, 3.0):
            _step(optimizer, parameters, value, in_place=True)
        start, state = parameters[0].detach().clone(), copy.deepcopy(optimizer.state_dict())
        results = []
        for _ in range(2):
            with torch.no_grad():
                parameters[0].copy_(start)
            _step(optimizer, parameters, 0.5, in_place=True)
            results.append(parameters[0].detach().clone())
            optimizer.load_state_dict(state)
        if torch.equal(*results):
            return False
    return True


@_asked
def steps_uncounted() -> bool:
    """After a step, does the state say 0?"""
    parameters = _weights(1)
    optimizer = optim.NpuFusedBertAdam(parameters, lr=0.01)
    _step(optimizer, parameters, 1.0)
    return bool(optimizer.state_dict()["state"][0]["step"] == 0)


@_asked
def clipped_by_first_group() -> bool:
    """Is a group clipped that says it is not to be?"""
    first, second = _weights(2)
    optimizer = optim.NpuFusedBertAdam([{"params": [first]}, {"params": [second], "max_grad_norm": -1.0}], lr=0.01)
    _step(optimizer, [first, second], 100.0)
    return not torch.allclose(optimizer.state[second]["exp_avg"], 0.1 * _gradient(second, 100.0))


@_asked
def fp16_epsilon() -> bool:
    """A step with small gradients in fp16: does neither class leave the parameter finite?"""
    finite = []
    for kind in (optim.NpuFusedAdam, optim.NpuFusedAdamW):
        parameters = _weights(1, torch.float16)
        _step(kind(parameters, lr=0.01), parameters, 1e-5)
        finite.append(bool(parameters[0].isfinite().all()))
    return not any(finite)


def scaling_ignored() -> bool | None:
    """A step that found_inf says to skip: is it made? The kernel has to be torch_npu's own."""
    if not torch_npu.npu.is_available() or emulated_devices() is not None:
        return None
    (parameter,) = _weights(1)
    optimizer = torch.optim.AdamW([parameter], lr=0.5, fused=True)
    optimizer.grad_scale, optimizer.found_inf = (  # type: ignore[attr-defined]
        torch.ones((), device="npu"), torch.ones((), device="npu"),
    )  # fmt: skip
    _step(optimizer, [parameter], 1.0)
    return not torch.equal(parameter.detach(), _weights(1)[0].detach())


def gradient_of_determinant_transposed() -> bool:
    """A matrix with gaps, and the same one without: do their determinants have other gradients?"""
    matrix = torch.tensor([[2.0, 1.0], [0.5, 3.0]], device="npu")
    gradients = []
    for leaf in (torch.stack([matrix, matrix], -1)[..., 0], matrix):
        leaf = leaf.detach().requires_grad_()
        gradients += torch.autograd.grad(torch.linalg.det(leaf), leaf)
    return not torch.allclose(*gradients)


@_asked
def unseen_update() -> bool:
    """Is a value as it was for autograd, after a kernel for many tensors changed it?"""
    value = torch.ones(4, device="npu")
    before = value._version
    torch._foreach_add_([value], 1.0)
    return value._version == before


@_asked
def constant_gradient() -> bool:
    """Does the gradient of a scaled l1_loss not depend on the scale?"""
    leaf, scale = (torch.tensor(value, device="npu", requires_grad=True) for value in (2.0, 3.0))
    loss = scale * nn.functional.l1_loss(leaf, torch.zeros_like(leaf))
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return torch.autograd.grad(gradient, scale, allow_unused=True) == (None,)


def _weights(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters that are equal each time."""
    return [nn.Parameter(torch.linspace(0.5, 2.0, 12).reshape(3, 4).to("npu", dtype)) for _ in range(count)]


def _gradient(parameter: Tensor, value: float) -> Tensor:
    generator = torch.Generator().manual_seed(int(abs(value)))  # another direction for another value
    return value * torch.randn(3, 4, generator=generator).to(parameter.device, parameter.dtype)


def _step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], value: float, in_place: bool = False
) -> None:
    for parameter in parameters:
        gradient = _gradient(parameter, value)
        if in_place and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient
    optimizer.step()


def _trained(kind: Any, values: list[float]) -> Tensor:
    parameters = _weights(1)
    optimizer = kind(parameters, **_OPTIONS[kind])
    for value in values:
        _step(optimizer, parameters, value)
    return parameters[0].detach()


PROBES: dict[str, Callable[[], bool | None]] = {
    "torch._fused_adamw_ on an NPU": scaling_ignored,
    "torch_npu.optim.NpuFusedSGD, NpuFusedBertAdam": late_gradient_lost,
    "torch_npu.optim.NpuFused* except AdamP": stale_gradients,
    "torch_npu.optim.NpuFused*": loaded_state_ignored,
    "torch_npu.optim.NpuFusedBertAdam": steps_uncounted,
    "torch_npu.optim.NpuFusedBertAdam with several groups": clipped_by_first_group,
    "torch_npu.optim.NpuFusedAdam, NpuFusedAdamW, fp16": fp16_epsilon,
    "torch.linalg.det, slogdet and torch.logdet on an NPU": gradient_of_determinant_transposed,
    "torch._foreach_add_, _foreach_mul_ and others in place, on an Ascend 910B": unseen_update,
    "torch.nn.functional.l1_loss and kl_div on an NPU, gradients of their gradients": constant_gradient,
}
"""By the kernel of a known fault, its probe; None if it cannot tell here."""
