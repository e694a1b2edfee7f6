"""Regions of autocast, by table O1 or by torch's table, and the kernels that follow them in a device's autocast key.

A kernel must know by which table it casts, also where a backward pass recomputes a checkpointed part of a region, maybe
in another thread. torch then restores three facts about autocast: whether it is on, its dtype, and whether its cache of
casts is on. Compiled code guards on the same three. The third one carries the table: an `O1Region` turns torch's cache
off, and keeps casts itself (`_State.casts`). A `TorchRegion` leaves it on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.precision.dispatcher import Kernel, Placed, overrides
from accelcore.precision.o1.table import O1, O1_REPLACES, PROMOTES_BY_ITSELF, Treatment, torch_treatment
from accelcore.precision.policy import LOW_PRECISION
from accelcore.torch_features import GET_KERNEL
from accelcore.torch_internals import (
    OpOverload,
    has_any_kernel,
    in_backward,
    is_fake_mode_active,
    keyset_below,
    operator_name,
    operators_registered_at,
    replaceable_kernel,
    without_autocast,
)

# These convert while they compute if they are given a dtype: they make no fp32 copy of the input.
_CONVERTING = ("cumprod", "cumsum", "linalg_vector_norm", "log_softmax", "nansum", "prod", "softmax", "sum")

_torch_operators: dict[str, frozenset[str]] = {}


class _State(threading.local):
    """Regions that this thread is in, and the weights cast in them."""

    def __init__(self) -> None:
        self.depth = 0
        self.torch_depth = 0
        self.cached: dict[str, torch.dtype | None] = {}  # of each device type, the dtype of the casts in torch's cache
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}


_state = _State()
_mark = f"accelcore O1 {sha256(repr(sorted((name, it.value) for name, it in O1.items())).encode()).hexdigest()}"
_lock = threading.Lock()
_threads_in_o1 = 0


def _mark_compiled_code(change: int) -> None:
    """Mark code that is compiled while a thread is in O1.

    torch keeps compiled code on disk, by its source and the state of autocast. It does not know about O1's kernels:
    without a mark, it would use code of one table for the other.
    """
    global _threads_in_o1
    with _lock:
        _threads_in_o1 += change
        tag = torch.compiler.config.cache_key_tag.removesuffix(_mark)
        torch.compiler.config.cache_key_tag = tag + _mark * (_threads_in_o1 > 0)


class O1Region:
    """Context of autocast by table O1. It can be entered again after it was left.

    The first one that is entered installs the kernels at `dispatch_key`, the key of the device's autocast.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, dispatch_key: str) -> None:
        self._autocast = torch.autocast(device_type, dtype, cache_enabled=False)  # by which the kernels know it
        self._kernels = dispatch_key, partial(_o1_kernels, device_type, dispatch_key)

    def __enter__(self) -> None:
        overrides.install(*self._kernels)
        self._autocast.__enter__()
        if not _state.depth:
            _mark_compiled_code(+1)
        _state.depth += 1

    def __exit__(self, *error: object) -> None:
        _state.depth -= 1
        if not _state.depth:
            _mark_compiled_code(-1)
            _state.casts.clear()
        self._autocast.__exit__(*error)


class TorchRegion:
    """Context of autocast by torch's table. It can be entered again after it was left.

    On entering, it drops the casts of an outer region in another dtype: torch's cache would return them for this one's.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, dispatch_key: str) -> None:
        self._device_type, self._dtype = device_type, dtype
        self._outer: torch.dtype | None = None  # of the casts that torch's cache held when this region was entered
        self._autocast = torch.autocast(device_type, dtype, cache_enabled=True)  # also in a region by O1
        self._kernels = f"refused on {dispatch_key}", partial(_refusals, device_type, dispatch_key)

    def __enter__(self) -> None:
        overrides.install(*self._kernels)
        kind = self._device_type
        self._outer = _state.cached.get(kind)
        if self._outer is None and torch.is_autocast_enabled(kind):  # by torch.autocast itself
            self._outer = torch.get_autocast_dtype(kind)
        if self._outer not in (None, self._dtype):
            torch.clear_autocast_cache()
        _state.cached[kind] = self._dtype
        self._autocast.__enter__()
        _state.torch_depth += 1

    def __exit__(self, *error: object) -> None:
        _state.torch_depth -= 1
        self._autocast.__exit__(*error)
        _state.cached[self._device_type] = self._outer
        if self._outer is not self._dtype:
            torch.clear_autocast_cache()


def is_o1_active() -> bool:
    """Return whether autocast follows table O1 now: in an `O1Region` of this thread, or in a recomputation.

    Under an inner autocast by torch's table, it does not. Compilers trace without the cache, too: no recomputation.
    """
    return not torch.is_autocast_cache_enabled() and (_state.depth > 0 or (in_backward() and not is_fake_mode_active()))


def _in_low_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`. A weight is cast once for all regions of this thread, as by torch's autocast."""
    if tensor.dtype is dtype:
        return tensor
    is_kept = _state.depth and tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
    if not is_kept or is_fake_mode_active():
        return tensor.to(dtype)
    # The weight is kept with its cast, so that no other tensor can get its id.
    kept = _state.casts.get((id(tensor), dtype))
    if kept is None or kept[1] != tensor._version:  # or written to, for example by load_state_dict
        kept = _state.casts[id(tensor), dtype] = (tensor, tensor._version, tensor.to(dtype))
    return kept[2]


def clear_cast_cache() -> None:
    """Cast weights again from now on, in regions that this thread stays in. Needed after an optimizer's update."""
    _state.casts.clear()


def _o1_kernels(device_type: str, dispatch_key: str) -> Iterator[Placed]:
    """Yield O1's kernels for a device type. Outside O1's regions they do what torch does.

    If torch's own kernel does what the table says, it stays; most low-precision operators are such a case.
    """
    known = _torch_operators[dispatch_key] = operators_registered_at(dispatch_key)
    for operator, treatment in listed_operators():
        if _is_needed(operator, treatment, known):
            outside = _kernel_before(operator, dispatch_key, known, device_type)
            yield (operator, dispatch_key), _o1_kernel(_treated(operator, treatment, device_type), outside)


def _refusals(device_type: str, dispatch_key: str) -> Iterator[Placed]:
    """Yield kernels that refuse, under torch's table too, what O1 refuses: alike on every device.

    torch refuses these operators on some devices, whatever their dtype, and computes them in fp32 on others.
    """
    known = operators_registered_at(dispatch_key)
    for operator, treatment in listed_operators():
        if treatment is Treatment.REFUSED:
            outside = _kernel_before(operator, dispatch_key, known, device_type)
            yield (operator, dispatch_key), _refusing_kernel(operator, device_type, outside)


def forget_installed() -> None:
    """Forget what torch had before O1's kernels, after these were removed."""
    _torch_operators.clear()


def torch_operators(dispatch_key: str) -> frozenset[str]:
    """Return the operators that torch's own autocast intercepts on a device type, such as `"aten::mm"`."""
    return _torch_operators.get(dispatch_key, operators_registered_at(dispatch_key))


def listed_operators() -> Iterator[tuple[OpOverload, Treatment]]:
    """Yield the table's operators, each overload that returns new tensors, with their treatment."""
    for name, treatment in O1.items():
        packet = getattr(torch.ops.aten, name, None)  # another version of torch may lack it
        for overload in packet.overloads() if packet is not None else ():
            operator = getattr(packet, overload)
            schema = operator._schema
            if (
                has_any_kernel(operator)
                and not schema.is_mutable
                and any("Tensor" in str(argument.type) for argument in schema.arguments)
                # With an out_dtype the caller decides. Names of dimensions are a prototype that newer versions lack.
                and not any(
                    each.name == "out_dtype" or (each.name == "dim" and "str" in str(each.type))
                    for each in schema.arguments
                )
            ):
                yield operator, treatment


def castable_tensors(values: Iterable[Any], device_type: str | None = None) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in lists of them, that autocast may cast: in fp32, bf16 or fp16.

    If `device_type` is None, the device does not matter.
    """
    for value in values:
        if isinstance(value, Tensor):
            if _is_castable(value, device_type or value.device.type):
                yield value
        elif isinstance(value, list | tuple):
            yield from castable_tensors(value, device_type)


def with_casts(
    function: Kernel,
    treatment: Treatment,
    arguments: Sequence[Any],
    options: dict[str, Any],
    device_type: str,
    tensors: Iterable[Tensor] | None = None,
) -> Any:
    """Call a function with the arguments that autocast may cast in low precision, in fp32, or in their widest dtype.

    Call it with autocast off. Autograd records the casts: a gradient has the dtype of its tensor. The widest
    dtype is that of `tensors`; None means the arguments on this device.
    """
    to: Callable[[Tensor], Tensor] = Tensor.float
    if treatment is Treatment.LOW:
        to = partial(_in_low_precision, dtype=torch.get_autocast_dtype(device_type))
    elif treatment is Treatment.WIDEST:
        if tensors is None:
            tensors = castable_tensors((*arguments, *options.values()), device_type)
        # bf16 and fp16 together need fp32
        to = partial(Tensor.to, dtype=reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.bool))

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to(value) if _is_castable(value, device_type) else value
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return [cast(item) for item in value] if isinstance(value, list) else tuple(cast(item) for item in value)
        return value

    return function(*map(cast, arguments), **{name: cast(value) for name, value in options.items()})


def _is_castable(tensor: Tensor, device_type: str) -> bool:
    return tensor.dtype in (torch.float32, *LOW_PRECISION) and tensor.device.type == device_type


def _is_needed(operator: OpOverload, treatment: Treatment, known: frozenset[str]) -> bool:
    name = operator._opname
    if operator_name(operator) in known:
        return name in O1_REPLACES
    return treatment is not Treatment.AS_IS and name not in PROMOTES_BY_ITSELF


def _kernel_before(operator: OpOverload, dispatch_key: str, known: frozenset[str], device_type: str) -> Kernel:
    """Return what the dispatcher called at this key before an O1 kernel."""
    if (ours := overrides.kernels.get((operator, dispatch_key))) is not None:
        return ours
    if operator_name(operator) in known:
        if GET_KERNEL.present:
            return replaceable_kernel(operator, dispatch_key)
        return _kernel_as_torch(operator, known, device_type)
    below = keyset_below(dispatch_key)
    return lambda keys, *arguments, **options: operator.redispatch(keys & below, *arguments, **options)


def _kernel_as_torch(operator: OpOverload, known: frozenset[str], device_type: str) -> Kernel:
    """Return a kernel that does what torch's autocast does, for a torch that cannot return its own kernel."""
    treated = _treated(operator, torch_treatment(operator._opname, known), device_type)

    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        with without_autocast():
            return treated(*arguments, **options)

    return kernel


def _o1_kernel(treated: Kernel, outside: Kernel) -> Kernel:
    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        if is_o1_active():
            with without_autocast():
                return treated(*arguments, **options)
        return outside(keys, *arguments, **options)

    return kernel


def _refusing_kernel(operator: OpOverload, device_type: str, outside: Kernel) -> Kernel:
    refused, in_fp32 = _refused(operator, device_type), _treated(operator, Treatment.FP32, device_type)

    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        # The forward pass did not refuse what is now recomputed; its region is not known any more.
        recomputed = in_backward() and not is_o1_active()
        by_torch = _state.torch_depth > 0 and torch.is_autocast_cache_enabled()
        if recomputed or by_torch:
            with without_autocast():
                return (in_fp32 if recomputed else refused)(*arguments, **options)
        return outside(keys, *arguments, **options)

    return kernel


def _treated(operator: OpOverload, treatment: Treatment, device_type: str) -> Kernel:
    """Return the operator under a treatment, to be called with autocast off."""
    if treatment is Treatment.AS_IS:
        return operator
    if treatment is Treatment.REFUSED:
        return _refused(operator, device_type)
    if treatment is Treatment.FP32 and operator._opname in _CONVERTING:
        return _converted(operator, device_type)
    return lambda *arguments, **options: with_casts(operator, treatment, arguments, options, device_type)


def _converted(operator: OpOverload, device_type: str) -> Kernel:
    position = [argument.name for argument in operator._schema.arguments].index("dtype")

    def compute(*arguments: Any, **options: Any) -> Any:
        chosen = options.get("dtype") is not None or len(arguments) > position  # by the caller
        if not chosen and any(tensor.dtype in LOW_PRECISION for tensor in castable_tensors(arguments, device_type)):
            options["dtype"] = torch.float32
        return operator(*arguments, **options)

    return compute


def _refused(operator: OpOverload, device_type: str) -> Kernel:
    def compute(*arguments: Any, **options: Any) -> Any:
        tensors = castable_tensors((*arguments, *options.values()), device_type)
        low = {tensor.dtype for tensor in tensors} & set(LOW_PRECISION)
        if low:
            raise TrainingError(
                f"under autocast, {operator._opname} refuses inputs in {', '.join(sorted(map(str, low)))}",
                why="its gradient grows as 1 / p, out of the range of low precision",
                available="binary_cross_entropy_with_logits, or BCEWithLogitsLoss, which is exact",
                remedy="remove the sigmoid and pass the logits to that one; or compute the probabilities in fp32",
            )
        return operator(*arguments, **options)

    return compute
