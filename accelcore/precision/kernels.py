"""O1's kernels, on the key by which torch's dispatcher knows a device's autocast: put in place, and taken out again."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from accelcore.precision.region import holds, is_computed_anew, torchs_holds
from accelcore.precision.table import O1, PROMOTES_BY_ITSELF, TORCH_DIFFERS, Treatment
from accelcore.precision.treatments import Compute, computation

__all__ = ["install", "listed", "name_of", "refuse", "remove", "torchs_operators"]

_libraries: dict[str, torch.library.Library] = {}
_torchs: dict[str, frozenset[str]] = {}
_lock = threading.Lock()


def install(device_type: str, dispatch_key: str) -> None:
    """Put O1's kernels in place for a kind of device, if they are not. Outside O1's regions they do what torch does.

    Where torch's own kernel does what the table says, it stays: that is so for most in low precision.
    """
    if dispatch_key in _libraries:
        return
    with _lock:
        if dispatch_key in _libraries:  # by another thread, meanwhile
            return
        torchs = _torchs[dispatch_key] = _registered(dispatch_key)
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # torch says so of a kernel that is replaced; it is back when ours is taken out.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for operator, treatment in listed():
                if _is_needed(operator, treatment, torchs):
                    kernel = _kernel(operator, computation(operator, treatment, device_type), dispatch_key, torchs)
                    library.impl(operator, kernel, dispatch_key, with_keyset=True)  # type: ignore[no-untyped-call]
        _libraries[dispatch_key] = library


def refuse(device_type: str, dispatch_key: str) -> None:
    """See to it that what O1 refuses is refused by torch's table, too, in our regions: alike on every device.

    torch refuses it on some devices, whatever its dtype, and computes it in fp32 on others.
    """
    name = f"refused on {dispatch_key}"
    if name in _libraries:
        return
    with _lock:
        if name in _libraries:  # by another thread, meanwhile
            return
        known = _registered(dispatch_key)
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for operator, treatment in listed():
                if treatment is Treatment.REFUSED:
                    kernel = _refusing(operator, device_type, dispatch_key, known)
                    library.impl(operator, kernel, dispatch_key, with_keyset=True)  # type: ignore[no-untyped-call]
        _libraries[name] = library


def remove() -> None:
    """Take all kernels out again; torch's own are back."""
    with _lock:
        while _libraries:
            key, library = _libraries.popitem()
            library._destroy()  # type: ignore[no-untyped-call]
            _torchs.pop(key, None)


def torchs_operators(dispatch_key: str) -> frozenset[str]:
    """The operators that torch's own autocast intercepts on a kind of device, such as `"aten::mm"`."""
    with _lock:
        return _torchs.get(dispatch_key) or _registered(dispatch_key)


def listed() -> Iterator[tuple[OpOverload, Treatment]]:
    """The operators of the table, with all overloads that autocast is about: those that return new tensors."""
    for name, treatment in O1.items():
        packet = getattr(torch.ops.aten, name, None)  # another version of torch may lack it
        for overload in packet.overloads() if packet is not None else ():
            operator = getattr(packet, overload)
            schema = operator._schema
            if (
                torch._C._dispatch_has_kernel(name_of(operator))
                and not schema.is_mutable
                and any("Tensor" in str(argument.type) for argument in schema.arguments)
                # Those with an out_dtype are told their dtypes; names of dimensions are a prototype of torch's.
                and not any(argument.name == "out_dtype" or "Dimname" in str(argument) for argument in schema.arguments)
            ):
                yield operator, treatment


def name_of(operator: OpOverload) -> str:
    """Its whole name, such as `"aten::softmax.int"`."""
    return str(operator.name())  # type: ignore[no-untyped-call]


def _registered(dispatch_key: str) -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(dispatch_key))


def _is_needed(operator: OpOverload, treatment: Treatment, torchs: frozenset[str]) -> bool:
    name = operator._opname
    if name_of(operator) in torchs:
        return name in TORCH_DIFFERS
    return treatment is not Treatment.AS_IS and name not in PROMOTES_BY_ITSELF


def _kernel(operator: OpOverload, compute: Compute, dispatch_key: str, torchs: frozenset[str]) -> Compute:
    outside = _as_before(operator, dispatch_key, torchs)

    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        if holds():
            with torch._C._DisableAutocast():
                return compute(*arguments, **options)
        return outside(keys, *arguments, **options)

    return kernel


def _refusing(operator: OpOverload, device_type: str, dispatch_key: str, torchs: frozenset[str]) -> Compute:
    refused = computation(operator, Treatment.REFUSED, device_type)
    in_fp32 = computation(operator, Treatment.FP32, device_type)
    outside = _as_before(operator, dispatch_key, torchs)

    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        # What is computed anew was not refused in the forward pass, whose region is not known any more.
        anew = is_computed_anew() and not holds()
        if anew or torchs_holds():
            with torch._C._DisableAutocast():
                return (in_fp32 if anew else refused)(*arguments, **options)
        return outside(keys, *arguments, **options)

    return kernel


def _as_before(operator: OpOverload, dispatch_key: str, torchs: frozenset[str]) -> Compute:
    """What there was at this key before a kernel of ours."""
    if name_of(operator) in torchs:
        before: Compute = torch.library.get_kernel(operator, dispatch_key).call_boxed
        return before
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, dispatch_key))
    return lambda keys, *arguments, **options: operator.redispatch(keys & below, *arguments, **options)
