"""The same random numbers on every device: `runtime.seed(n, same="everywhere")` draws them on the host.

Here are the operators that draw, and the switch; `host_kernels` has the kernels that draw instead of torch's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from accelcore.errors import UnsupportedError
from accelcore.precision.dispatcher import Kernel, Overrides, Placed, overrides, torch_kernel
from accelcore.randomness.host_kernels import COMPOSED, argument_values, host_kernels
from accelcore.torch_features import GET_KERNEL
from accelcore.torch_internals import (
    OpOverload,
    device_dispatch_key,
    dispatch_keyset,
    has_computed_kernel,
    has_kernel,
    operator_name,
    operators_registered_at,
    replaceable_kernel,
    without_modes,
)

# Arguments that give the chance to drop, or to keep, and whether anything is dropped at all.
_DROPPED, _KEPT = ("dropout", "dropout_p", "dropout_prob"), ("keep_prob",)
_TRAINED = ("train", "training")

_overrides = Overrides(beneath=overrides)
_eager: Any = None  # torch's stance that runs compiled code eagerly
_lock = threading.Lock()


def draw_on_host(device_type: str) -> None:
    """From now on, draw random numbers for a device type and for the host from the host's generator.

    Forks, such as a data loader's workers, still draw as torch does. torch.compile's code runs eagerly, because
    compilers draw in code of their own.
    """
    global _eager
    if not GET_KERNEL.present:
        raise UnsupportedError(
            'same="everywhere" is not available',
            why=f"torch {torch.__version__} has no {GET_KERNEL}",
            available="seeds without same, which are the same on devices of one kind",
            remedy="remove same, or install torch 2.10 or later",
        )
    with _lock:
        for kind in ("cpu", device_type):
            _overrides.install(kind, partial(_kernels, kind))
        if _eager is None:
            _eager = torch.compiler.set_stance("force_eager")


def draw_on_device() -> None:
    """Let each device draw its own numbers again."""
    global _eager
    with _lock:
        _overrides.remove()
        if _eager is not None:
            _eager.__exit__(None, None, None)
            _eager = None


def draws_on_host() -> bool:
    """Return whether random numbers are drawn on the host for every device."""
    return bool(_overrides)


def _kernels(device_type: str) -> Iterator[Placed]:
    device = device_dispatch_key(device_type)
    keys = (device, f"Autograd{device}")
    kernels: dict[tuple[OpOverload, str], Kernel] = {
        (operator, key): _composition(operator) or partial(_refuse, operator)
        for key in keys
        for operator in _random_operators(key)
    }
    kernels |= {(operator, key): compose for operator, compose in COMPOSED.items() for key in keys}
    kernels |= {(operator, device): kernel for operator, kernel in host_kernels().items()}
    for place, kernel in kernels.items():
        yield place, _if_it_draws(*place, kernel, device_type)


def _random_operators(dispatch_key: str) -> Iterator[OpOverload]:
    """Yield the operators, from torch or anybody else, that have a kernel at a dispatch key and may draw."""
    for name in operators_registered_at(dispatch_key):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        # A kernel may be registered for an operator that nobody has declared, and so nobody can call.
        overloads = getattr(getattr(torch.ops, namespace), packet, None)
        operator = getattr(overloads, overload or "default", None)
        # torch_npu puts a function in the place of an operator of fully_shard.
        if isinstance(operator, OpOverload) and _may_draw(operator):
            yield operator


def _may_draw(operator: OpOverload) -> bool:
    schema = operator._schema
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return False  # it only chooses between kernels
    return torch.Tag.nondeterministic_seeded in operator.tags or any(
        argument.name in (*_DROPPED, *_KEPT) or "Generator" in str(argument.type) for argument in schema.arguments
    )


def _draws(operator: OpOverload, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether this call of an operator draws: dropout does only in training, and with a chance above 0."""
    values = argument_values(operator, arguments, options)
    chances = [value > 0 for name, value in values.items() if name in _DROPPED]
    chances += [value < 1 for name, value in values.items() if name in _KEPT]
    trained = all(values.get(name) is not False for name in _TRAINED)
    return trained and (any(chances) if chances else True)


def _if_it_draws(operator: OpOverload, key: str, on_host: Kernel, device_type: str) -> Kernel:
    """Return a kernel that draws on the host, and does as before at this key if a call draws nothing."""
    before = replaceable_kernel(operator, key) if has_computed_kernel(operator, key) else None
    capturing = getattr(torch.get_device_module(device_type), "is_current_stream_capturing", bool)
    process = os.getpid()

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(keys, torch.DispatchKeySet):
            # Under a mode of the dispatcher, torch looks a kernel in Python up once more when it is called, and finds
            # this one in its place, which it calls as it would the other: without keys.
            assert before is not None, "torch was about to call it"
            with without_modes():
                return before(dispatch_keyset(key), keys, *arguments, **options)
        if before is not None and (os.getpid() != process or not _draws(operator, arguments, options)):
            return before(keys, *arguments, **options)
        if capturing():
            raise UnsupportedError(
                f"{operator_name(operator)} would draw random numbers inside a graph",
                why='after runtime.seed(..., same="everywhere") the host draws them, once for all launches',
                remedy="remove the graph, or seed without same",
            )
        return on_host(*arguments, **options)

    return kernel


def _composition(operator: OpOverload) -> Kernel | None:
    """Return torch's composition of an operator from others: the CPU uses it if it has no kernel of its own."""
    composed = has_computed_kernel(operator, "CPU") and not has_kernel(operator, "CPU")
    return torch_kernel(operator, "CPU") if composed else None


def _refuse(operator: OpOverload, *arguments: Any, **options: Any) -> NoReturn:
    raise UnsupportedError(
        f"{operator_name(operator)} draws random numbers of its own",
        why='after runtime.seed(..., same="everywhere") all devices must draw the same, and others lack this operator',
        remedy="use an operator that every device has, such as torch.dropout, or seed without same",
    )
