"""Registration of a kernel for each operator.

Every operator that torch_npu registers gets a host kernel, or one that raises an error. Operators that torch_npu does
not implement behave as on hardware: they run on the CPU, with a warning that names them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from accelcore.errors import ConfigurationError
from accelcore.torch_internals import register_kernel
from accelcore_npu_emulator.kernels import (
    aten_operators,
    batch_norm,
    dropout,
    layout_operators,
    npu_operators,
    optimizers,
    recurrent,
    special,
)
from accelcore_npu_emulator.kernels.attention import attention_operators
from accelcore_npu_emulator.kernels.autograd import decomposed, recomputed
from accelcore_npu_emulator.kernels.boxing import host_kernel
from accelcore_npu_emulator.kernels.optimizers import optimizer_kernels
from accelcore_npu_emulator.kernels.overflow import overflow_kernels
from accelcore_npu_emulator.kernels.special import coalesce_kernel, special_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelcore_npu_emulator.kernels.machine import Machine

_DEVICE, _AUTOGRAD = "PrivateUse1", "AutogradPrivateUse1"

# Allocation, metadata and layout compute nothing, and products are made of other operators: torch_npu's own code serves
# them on the emulated memory, and checks what the device does not take.
_TORCH_NPU_ATEN = frozenset({
    "_copy_from_and_resize", "_pin_memory", "_reshape_alias", "_to_copy", "as_strided", "as_strided_", "clone",
    "contiguous", "empty.memory_format", "empty_like", "empty_strided", "is_pinned", "is_set_to", "matmul",
    "new_empty_strided", "record_stream", "resize_", "resize_as_", "scaled_dot_product_attention", "set_",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "squeeze", "squeeze.dim",
    "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
})  # fmt: skip
_TORCH_NPU_OWN = frozenset({
    "_npu_dtype_cast_backward", "_npu_format_cast", "copy_memory_", "empty_with_format",
    "empty_with_swapped_memory", "get_npu_format", "get_storage_size", "npu_change_data_ptr",
    "npu_dtype_cast_backward", "npu_format_cast", "npu_format_cast_", "print_npugraph_tensor",
    "save_npugraph_tensor", "set_op_timeout_ms", "super_kernel_scope_begin", "super_kernel_scope_end",
    "unsafe_empty_with_format",
})  # fmt: skip
# torch_npu's autograd nodes for these call the device's library directly.
_PAST_THE_DISPATCHER = ("_thnn_fused_gru_cell", "binary_cross_entropy_with_logits", "renorm")
# torch_npu has autograd kernels for these, though there is no graph to record.
_OF_INTEGERS = ("one_hot",)
# Composites of torch that are single operators of the device; torch_npu knows their derivatives.
_OF_THE_DEVICE = ("cdist", "inverse", "kl_div", "l1_loss", "linalg_cholesky", "repeat_interleave")
# A part of this operator's result stays on the host.
_BY_PARTS = ("_pack_padded_sequence",)
_HOST_KEYS = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def register(machine: Machine) -> list[torch.library.Library]:
    """Register all kernels. They stay as long as the returned libraries."""
    missing = list(_missing(machine))
    library: Callable[[str, str], Any] = torch.library.Library
    libraries = {name: library(name, "IMPL") for name in ("aten", "npu")}

    def give(name: str, key: str, kernel: Callable[..., Any]) -> None:
        operator = _operator(name)
        if operator is not None:  # an implementation without a schema cannot be called
            register_kernel(libraries[operator.namespace], operator, kernel, key, with_keyset=False)

    with warnings.catch_warnings():
        # torch warns of each kernel that replaces another, as all of these do.
        warnings.simplefilter("ignore")
        for name, key, kernel in _kernels(machine):
            give(name, key, kernel)
        give("aten::_coalesce", "SparsePrivateUse1", coalesce_kernel(machine))
        for name in missing:
            give(name, _DEVICE, _refusal(name))
            give(name, _AUTOGRAD, _refusal(name))
    return list(libraries.values())


def _kernels(machine: Machine) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    kernels = {
        **special_kernels(machine),
        **overflow_kernels(machine),
        **optimizer_kernels(machine),
    }
    functions = {
        **aten_operators.OPERATORS,
        **batch_norm.OPERATORS,
        **special.OPERATORS,
        **npu_operators.OPERATORS,
        **layout_operators.OPERATORS,
        **dropout.OPERATORS,
        **recurrent.OPERATORS,
        **optimizers.OPERATORS,
        **attention_operators(machine),
    }
    for name in _registered():
        rest = name.partition("::")[2]
        base = rest.partition(".")[0]
        if rest in _TORCH_NPU_ATEN or base in _TORCH_NPU_OWN:
            continue
        operator = _operator(name)
        if operator is None:  # an implementation without a schema cannot be called
            continue
        function = functions.get(rest) or functions.get(base)
        if base in _PAST_THE_DISPATCHER and not _is_out(name):
            yield name, _AUTOGRAD, recomputed(operator, machine, function)
        if name in kernels:
            yield name, _DEVICE, kernels[name]
        elif function is not None:
            kernel = host_kernel(operator, machine, function)
            yield name, _DEVICE, kernel
            if base in _OF_INTEGERS:
                yield name, _AUTOGRAD, kernel
        elif not any(_has(name, key) for key in _HOST_KEYS) or "npu" in base:
            yield name, _DEVICE, _refusal(name)
            if _has(name, _AUTOGRAD):
                yield name, _AUTOGRAD, _refusal(name)
        elif _has(name, "CompositeImplicitAutograd") and not _has(name, "CPU") and base not in _OF_THE_DEVICE:
            kernel = decomposed(operator)
            yield name, _DEVICE, kernel
            yield name, _AUTOGRAD, kernel
        elif base in _BY_PARTS:
            yield name, _DEVICE, decomposed(operator, "CompositeExplicitAutograd")
        else:
            kernel = host_kernel(operator, machine)
            yield name, _DEVICE, kernel
            if _is_out(name) and _has(name, _AUTOGRAD):  # there is no graph to record
                yield name, _AUTOGRAD, kernel


def _registered() -> list[str]:
    """Return the operators that torch_npu implements for its device."""
    names = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith(("aten::", "npu::")) and _has(name, _DEVICE)]


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _is_out(name: str) -> bool:
    return name.endswith((".out", "_out"))


def _operator(name: str) -> torch._ops.OpOverload | None:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"EMULATED: npu operator {name} is not emulated")

    return refuse


def _missing(machine: Machine) -> Iterator[str]:
    """Yield the operators that injected faults remove: one overload, or all overloads of a name."""
    every = torch._C._dispatch_get_all_op_names()
    for fault in machine.settings.faults:
        if fault.kind != "missing":
            continue
        found = [name for name in every if fault.operator in (name, name.partition(".")[0])]
        if not found or not fault.operator.startswith(("aten::", "npu::")):
            raise ConfigurationError(
                f"the fault {fault} names no operator",
                available="the operators of aten:: and npu::",
                remedy="correct the name in ACCEL_EMULATED_FAULTS, such as missing@aten::add.Tensor",
            )
        yield from found
