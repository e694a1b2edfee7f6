"""Memory for torch_npu's fused optimizers: parameters, gradients and state of many tensors, each in one piece.

torch_npu's classes do their arithmetic on such pieces ("combined tensors"), which they lay out once, at the first
step, and then believe in for ever: a gradient that arrives later, a gradient tensor that backward made anew, a state
that was loaded, all go unseen. `FlatOptimizer` keeps the arithmetic and replaces the layout by one that is checked
before every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch_npu.optim.npu_fused_optim_base import NpuFusedOptimizerBase

from accelcore.errors import TrainingError

__all__ = ["Bucket", "FlatOptimizer", "flatten", "overlapping", "unfit"]

_ALIGNMENT = 512  # bytes; what the NPU's own allocator aligns a tensor to


@dataclass
class Bucket:
    """Parameters of one group, on one device, that were updated equally often and so share a bias correction.

    Attributes:
        parameters: they are views of `flat`.
        addresses: where each was put.
        flat: their values.
        gradient: one piece for their gradients, copied into it before each step.
        gradients: views of it, one a parameter.
        states: the flat state by name, and the number of updates under `"step"`.
        views: views of the flat state, one a parameter, as `optimizer.state` holds them.
        scratch: flat temporaries by name, with their views.
    """

    parameters: list[Tensor]
    addresses: list[int]
    flat: Tensor
    gradient: Tensor
    gradients: list[Tensor]
    states: dict[str, Any]
    views: dict[str, list[Tensor]]
    scratch: dict[str, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)


def flatten(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Tensors of one dtype and device copied into one piece of memory, each aligned, zeros between; and their views."""
    first = tensors[0]
    unit = _ALIGNMENT // first.element_size()
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += -(-tensor.numel() // unit) * unit
    flat = torch.zeros(total, dtype=first.dtype, device=first.device)
    views = [
        flat[offset : offset + tensor.numel()].view(tensor.shape)
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]
    torch._foreach_copy_(views, list(tensors))
    return flat, views


def unfit(parameter: Tensor) -> str | None:
    """Why torch_npu's fused arithmetic cannot update this parameter; None where it can."""
    if type(parameter.data) is not Tensor:
        return f"it is a {type(parameter.data).__name__}, and the flat layout takes plain tensors"
    if parameter.dtype != torch.float32:
        # fp16 moments lose eps=1e-8 to zero and divide by it; bf16 torch_npu refuses itself.
        return f"it is {str(parameter.dtype).removeprefix('torch.')}, and the moments are safe in float32 only"
    if not parameter.is_contiguous():
        return "it is not contiguous, and the flat layout is"
    return None


def overlapping(parameters: Sequence[Tensor]) -> bool:
    """Whether two parameters share memory: in a flat layout each would get its own, and they would part."""
    distinct = {id(parameter): parameter for parameter in parameters if parameter.numel()}.values()
    spans = sorted((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes) for p in distinct)
    return any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(spans))


class FlatOptimizer(NpuFusedOptimizerBase):  # type: ignore[misc]  # torch_npu is untyped
    """Base of our fused optimizers; put it before one of torch_npu's, whose `_group_step` is the arithmetic.

    `optimizer.state` has torch's layout: `step` a float32 tensor on the host, the rest of the parameter's shape.

    Attributes:
        counts: whether `state` counts the updates of each parameter.
        temporaries: names of torch_npu's temporaries: for each, the lists of views and of flat tensors.
    """

    counts = True
    temporaries: dict[str, tuple[str, str]] = {}  # noqa: RUF012  # a constant of the class

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # Past torch_npu's constructors, which check less than torch's do and make device tensors before any is needed.
        NpuFusedOptimizerBase.__init__(self, params, defaults)
        del self.is_fused_optimizer  # by which torch_npu's scaler knows classes whose flat gradients it may unscale
        self._buckets: dict[int, list[Bucket]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)
        self._buckets = {}

    zero_grad = Optimizer.zero_grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gather()
        for index in range(len(self.param_groups)):
            self._group_step(index)
        return loss

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """torch_npu's name for `torch.nn.utils.clip_grad_norm_` over this optimizer's parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Names of the state of a parameter of this group, and the value each starts with."""
        raise NotImplementedError

    def _gather(self) -> None:
        """See that every layout is still true, and copy the gradients into it."""
        for index, group in enumerate(self.param_groups):
            received = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not self._holds(index, group, received):
                self._buckets[index] = self._lay_out(group, received)
            for bucket in self._buckets[index]:
                gradients = [parameter.grad for parameter in bucket.parameters if parameter.grad is not None]
                torch._foreach_copy_(bucket.gradients, gradients)
        groups = [self._buckets[index] for index in range(len(self.param_groups))]
        # What torch_npu's `_group_step` reads: for each group a list, there one entry a dtype, here one a bucket.
        self.params_lists_indexed_by_group = [[bucket.parameters for bucket in group] for group in groups]
        self.combined_params_indexed_by_group = [[bucket.flat for bucket in group] for group in groups]
        self.combined_grads_indexed_by_group = [[bucket.gradient for bucket in group] for group in groups]
        self.combined_param_states_indexed_by_group = [[bucket.states for bucket in group] for group in groups]
        for name, (lists, combined) in self.temporaries.items():
            setattr(self, lists, [[bucket.scratch[name][1] for bucket in group] for group in groups])
            setattr(self, combined, [[bucket.scratch[name][0] for bucket in group] for group in groups])

    def _holds(self, index: int, group: dict[str, Any], received: list[Tensor]) -> bool:
        """Whether the layout is of these parameters, and they and their state are still where it put them."""
        buckets = self._buckets.get(index)
        if buckets is None or sum(len(bucket.parameters) for bucket in buckets) != len(received):
            return False
        names = self.initial_state(group).keys()
        wanted = {id(parameter) for parameter in received}
        for bucket in buckets:
            if bucket.views.keys() != names:
                return False
            for number, parameter in enumerate(bucket.parameters):
                state = self.state[parameter]
                if (
                    id(parameter) not in wanted
                    or parameter.data_ptr() != bucket.addresses[number]
                    or any(state.get(name) is not views[number] for name, views in bucket.views.items())
                ):
                    return False
        return True

    def _lay_out(self, group: dict[str, Any], received: list[Tensor]) -> list[Bucket]:
        initial = self.initial_state(group)
        alike: dict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)
        for parameter in received:
            _check(parameter)
            state = self.state[parameter]
            for name, value in initial.items():
                if state.get(name) is None:
                    state[name] = torch.full_like(parameter, value)
            count = int(state.get("step", 0))
            if self.counts:
                state["step"] = torch.tensor(float(count), dtype=torch.float32)
            alike[count, parameter.device].append(parameter)
        return [self._bucket(parameters, count, tuple(initial)) for (count, _), parameters in alike.items()]

    def _bucket(self, parameters: list[Tensor], count: int, names: tuple[str, ...]) -> Bucket:
        flat, places = flatten(parameters)
        for parameter, place in zip(parameters, places, strict=True):
            parameter.data = place
        gradient, gradients = flatten([torch.zeros_like(parameter) for parameter in parameters])
        states: dict[str, Any] = {"step": count}
        views: dict[str, list[Tensor]] = {}
        for name in names:
            states[name], views[name] = flatten([self.state[parameter][name] for parameter in parameters])
            for parameter, view in zip(parameters, views[name], strict=True):
                self.state[parameter][name] = view
        scratch = {
            name: flatten([torch.zeros_like(parameter) for parameter in parameters]) for name in self.temporaries
        }
        addresses = [place.data_ptr() for place in places]
        return Bucket(parameters, addresses, flat, gradient, gradients, states, views, scratch)


def _check(parameter: Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        raise TrainingError(
            "a gradient is sparse, which torch_npu's fused optimizers do not take",
            remedy="make the embedding with sparse=False, or the optimizer with route='loop'",
        )
    if parameter.device.type != "npu":
        raise TrainingError(
            f"a parameter is on {parameter.device}, and this optimizer updates parameters on an npu",
            remedy="move the model to accel.device before the first step",
        )
    reason = unfit(parameter)
    if reason is not None:
        raise TrainingError(
            f"a parameter has changed since its optimizer was made: {reason}",
            remedy="make the optimizer from the parameters as they will be trained",
        )
