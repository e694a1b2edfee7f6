"""Private names of torch that accelcore needs, each with what breaks without it.

`tests/test_torch_internals.py` tests each of them, so that a new version of torch which changes one fails there first.
Operators such as `torch._foreach_mul_` and `torch._fused_adamw_` stay where they are used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload as OpOverload
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from accelcore.torch_features import BACKWARD_PASS_AUTOCAST, RESET_ITER_STATE

pytree = _pytree
"""Flattens nested containers. Without it, tensors in unusual containers of a batch or an output are not found."""

AnyBatchNorm = _BatchNorm
"""Base class of BatchNorm of any number of dimensions and of SyncBatchNorm: `keep_batchnorm_fp32` finds all of them."""


def backward_outside_autocast() -> Any:
    """Return a new context for calls of compiled modules, whose backward pass is then compiled as outside autocast.

    Without it, torch compiles the backward pass as under the autocast of the forward pass. A torch that lacks the
    setting always does: see `BACKWARD_PASS_AUTOCAST`. Before torch 2.12 such a context cannot be entered twice at a
    time, as models do that call each other: each call takes a new one.
    """
    if not BACKWARD_PASS_AUTOCAST.present:
        return contextlib.nullcontext()
    return torch._functorch.config.patch({"backward_pass_autocast": "off"})


def without_graph_cache() -> Any:
    """Return a new context for calls of compiled modules, whose graphs torch's cache neither gives nor keeps.

    Without it, a torch whose cache does not know the dtype of autocast computes in the dtype of an earlier compilation.
    """
    return torch._functorch.config.patch({"enable_autograd_cache": False})


def guards_on_tensors() -> Any:
    """Return a new context for calls of compiled modules in which torch checks each parameter for what it compiled.

    Without it, a torch that takes a parameter for unchanged while its module holds the same one runs code that was
    compiled for another `requires_grad`.
    """
    import torch._dynamo.config  # slow, and not needed before a call

    return torch._dynamo.config.patch({"skip_tensor_guards_with_matching_dict_tags": False})


flatten, unflatten = torch._C._nn.flatten_dense_tensors, torch._C._nn.unflatten_dense_tensors
"""Concatenate many tensors of one dtype, and split the result by the shapes of these tensors, in one call each.

Without them, a broadcast of many small tensors takes several times as long.
"""

without_autocast = torch._C._DisableAutocast
"""Context without the dispatcher's autocast keys.

Without it, a kernel at such a key that calls its own operator never ends.
`torch.autocast(enabled=False)` is much slower to enter.
"""

_backward = torch.autograd.backward
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def compiler_error() -> type[Exception]:
    """Return the class of errors of torch's compiler. Without it, a model's own error would count as the compiler's."""
    import torch._dynamo.exc  # slow, and not needed before an error

    error: type[Exception] = torch._dynamo.exc.TorchDynamoException
    return error


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or `model` itself. Without it, names begin with `_orig_mod.`."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def shares_tensor_objects(device: torch.device) -> bool:
    """Return whether `parameter.data = value` can move a parameter from the host to a device.

    Without it, `Module.to` replaces the parameters, and the optimizer updates the old ones.
    """
    return bool(torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device)))


def in_backward() -> bool:
    """Return whether this thread runs a backward pass; a forward pass that runs now is a recomputation.

    Without it, table O1 is lost in checkpointed parts of a model, and observers see recomputed outputs twice.
    """
    return torch._C._current_graph_task_id() != -1


def inductor_generates_code(device_type: str) -> bool:
    """Return whether inductor has a code generator for a device type. Without it, a compiler is declared by hand."""
    from torch._inductor.codegen import common  # slow, and not needed on machines without Triton

    common.init_backend_registration()
    return common.get_scheduling_for_device(device_type) is not None


def is_autocast_enabled() -> bool:
    """Return whether autocast is on for any kind of device.

    Without it, a compiled module would have to know where it runs to find out.
    """
    return torch._C._is_any_autocast_enabled()


def after_backward(call: Callable[[], None]) -> None:
    """Call a function when the present backward pass ends, after the functions that were queued before it.

    Without it, a group of a sharded model whose inputs need no gradient reduces its gradients before accelcore can add
    those of unused parameters.
    """
    Variable._execution_engine.queue_callback(call)


def reset_sharded_model(model: Any) -> None:
    """Make a model that `fully_shard` divided forget a forward or backward pass that raised.

    Without it, the next pass continues in the middle of the last one.
    """
    if RESET_ITER_STATE.present:
        model.reset_iter_state()
        return
    root = model._get_fsdp_state()
    root._comm_ctx.all_gather_state = None
    root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
    for state in root._state_ctx.all_states:
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._modules_to_run_forward.clear()
        if (group := state._fsdp_param_group) is not None:
            group.finalize_backward()  # waits for what is still being sent
            group._training_state = idle
            group._partial_reduce_output = None


def forward_number() -> int:
    """Return the number that the next node of autograd's graph gets in this thread.

    Without it, an operator of the backward pass cannot be told to belong to a module.
    """
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def backward_number() -> int | None:
    """Return the number of the node of autograd's graph that runs now; None outside of it. See `forward_number`."""
    node = torch._C._current_autograd_node() if in_backward() else None
    return None if node is None else node._sequence_nr()


def is_fake_mode_active() -> bool:
    """Return whether tensors are fake, as while a compiler traces.

    Without it, the cache of casts would keep fake tensors.
    """
    return torch._C._get_dispatch_mode(_FAKE) is not None


def in_transform() -> bool:
    """Return whether a transform of torch.func runs, such as vmap.

    Without it, operators that read the memory of its tensors fail an assertion of torch.
    """
    return torch._C._functorch.maybe_current_level() is not None


def end_dispatch_mode(mode: TorchDispatchMode) -> bool:
    """End a mode of torch's dispatcher, and return whether it was the last to begin, as a mode that ends should be.

    Without it, torch ends the last mode, whichever it is: if others have begun or ended meanwhile, the one that was to
    end goes on. Here the others are left as their own ends expect them.
    """
    modes = _get_current_dispatch_mode_stack()
    if mode not in modes:  # one that began earlier has ended, and torch has taken this one in its place
        _pop_mode()
        return False
    others = [_pop_mode() for _ in modes[modes.index(mode) + 1 :]]
    mode.__exit__(None, None, None)
    for other in reversed(others):
        _push_mode(other)
    return not others


def operators_registered_at(dispatch_key: str) -> frozenset[str]:
    """Return the names of operators with a kernel of their own at a dispatch key, such as `"aten::mm"`.

    Without it, accelcore cannot know which operators torch's autocast intercepts, or which draw random numbers.
    """
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(dispatch_key))


def has_any_kernel(operator: OpOverload) -> bool:
    """Return whether an operator has a kernel at all. To register one for an operator without any fails."""
    return torch._C._dispatch_has_kernel(operator_name(operator))


def has_kernel(operator: OpOverload, dispatch_key: str) -> bool:
    """Return whether an operator has a kernel of its own at a dispatch key.

    Without this and `has_computed_kernel`, operators that torch composes of others cannot be told from device kernels.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator_name(operator), dispatch_key)


def has_computed_kernel(operator: OpOverload, dispatch_key: str) -> bool:
    """Return whether an operator has a kernel at a dispatch key, maybe one that is composed of other operators."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator_name(operator), dispatch_key)


def dispatch_keyset(dispatch_key: str) -> torch.DispatchKeySet:
    """Return the set of one dispatch key: a kernel that is called directly takes such a set."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))


def keyset_below(dispatch_key: str) -> torch.DispatchKeySet:
    """Return the dispatch keys below one. Without it, a kernel cannot call the one that it covers."""
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, dispatch_key))


def device_dispatch_key(device_type: str) -> str:
    """Return the dispatch key of a device type: `"PrivateUse1"` is not among the names of devices."""
    return torch._C._dispatch_key_for_device(device_type)


def forget_python_dispatch(operator: OpOverload, dispatch_key: str) -> None:
    """Make torch's Python dispatcher look up a kernel again.

    Without it, compilers trace with the kernel that was there before.
    """
    operator._uncache_dispatch(getattr(torch._C.DispatchKey, dispatch_key))


def run_backward(loss: Tensor, start: Tensor | None, *, retain_graph: bool) -> None:
    """Do what `torch.autograd.backward` does for one scalar, and a gradient of its dtype and shape or None for 1.

    Without it, torch's checks in Python take a tenth of a small step. A backward that the process has replaced, or that
    has more to check, is called.
    """
    backward = torch.autograd.backward
    if backward is not _backward or type(loss) is not Tensor or not loss.is_floating_point():
        backward(loss, start, retain_graph=retain_graph)
        return
    start = torch.ones_like(loss) if start is None else start
    _engine_run_backward((loss,), (start,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether torch runs anything around `step`: hooks of the optimizer or the process, or a profiler's label.

    Without it, these would have to be called in every step, or would be lost.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


def expect_no_step(optimizer: Optimizer) -> None:
    """Let torch's schedulers not warn that `step` of this optimizer was not called before theirs."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def job_store(prefix: str) -> Any:
    """Return the store that the ranks of the default process group share, with `prefix` before each key.

    Without it, a rank that waits cannot learn what the other ranks do, and a missing rank has no name.
    """
    default = torch.distributed.distributed_c10d._get_default_store()
    return torch.distributed.PrefixStore(prefix, default)  # type: ignore[attr-defined]  # missing in torch's types


def flight_records() -> list[dict[str, Any]]:
    """Return the collectives in torch's flight recorder; some libraries write none.

    Without it, the error for a missing rank cannot name the collective that waited for it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", []) if dump is not None else []
    return entries


def never_compile(function: Callable[..., Any]) -> None:
    """Keep torch.compile away from a function and all that it calls.

    Without it, kernels in Python are compiled, with a warning, where compiled code calls them after a graph break.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    function = function.func if isinstance(function, partial) else function
    if isinstance(function, FunctionType):
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no mode of torch's dispatcher is active.

    Without it, a kernel in Python that was replaced by another cannot be called while operators are recorded.
    """
    return _disable_current_modes()


def replaceable_kernel(operator: OpOverload, dispatch_key: str) -> Callable[..., Any]:
    """Return the kernel that an operator has at a dispatch key now; it takes a set of dispatch keys first.

    Only with `GET_KERNEL`.
    """
    kernel: Callable[..., Any] = torch.library.get_kernel(operator, dispatch_key).call_boxed
    return kernel


def register_kernel(
    library: torch.library.Library,
    operator: OpOverload,
    kernel: Callable[..., Any],
    dispatch_key: str,
    with_keyset: bool,
) -> None:
    """Register a kernel, also over one in Python. An older torch has no public way to do the latter."""
    if _impl_overrides():
        library.impl(operator, kernel, dispatch_key, with_keyset=with_keyset, allow_override=True)
    else:
        assert library.m is not None, "it is not removed yet"
        library.m.impl(operator_name(operator).partition("::")[2], dispatch_key, kernel, with_keyset)


@cache
def _impl_overrides() -> bool:  # not when this file is imported: the documentation is built without torch
    return "allow_override" in signature(torch.library.Library.impl).parameters


@contextlib.contextmanager
def unlocked_destruction() -> Iterator[None]:
    """Return a context in which process groups on the host are destroyed without Python's lock.

    Their destruction waits for the threads of the group. Without this context, torch 2.7 keeps the lock
    (pytorch#154976). It waits forever if one of them needs the lock, to drop the tensor of a finished collective.
    In this context the groups end with the last reference to their backends: there torch 2.7, too, releases the lock.
    """
    cpu = torch.device("cpu")
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(cpu) for group in groups if cpu in group._device_types]
    try:
        yield
    finally:
        backends.clear()


def remove_library(library: torch.library.Library) -> None:
    """Remove a library's kernels at once. Without it, they stay until the garbage collector comes by."""
    library._destroy()


def operator_name(operator: OpOverload) -> str:
    """Return an operator's whole name, such as `"aten::softmax.int"`."""
    return str(operator.name())
