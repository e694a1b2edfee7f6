"""Element types of device operators that take fewer types than the host's.

The tables follow the public sources of CANN 8.5's operators (the repositories ops-nn and ops-math, for Atlas A2) with
`jit_compile` off, the default there. For `jit_compile` on, only `_OF_ONE_TYPE` is known. Operators that are not in this
file take every type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_BOOL, _DOUBLE = frozenset({torch.bool}), frozenset({torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})


def _of(names: str, *dtypes: Iterable[torch.dtype]) -> dict[str, frozenset[torch.dtype]]:
    return dict.fromkeys(names.split(), frozenset().union(*dtypes))


# Operators of the matrix unit, which checks all tensors.
_PRODUCTS = {
    **_of("addbmm addmm addmv baddbmm bmm matmul_backward mm mv npu_bmmV2 npu_linear npu_linear_backward", _FLOATS),
    **_of("_convolution _slow_conv2d_forward conv_tbc convolution convolution_backward npu_conv2d", _FLOATS),
    **_of("convolution_backward_overrideable convolution_overrideable npu_conv2d_backward npu_conv3d", _FLOATS),
    **_of("npu_conv3d_backward npu_convolution npu_convolution_backward", _FLOATS),
}

# Operators that check their first tensor.
_TAKEN = {
    # Activations
    **_of("celu gelu gelu_backward hardshrink hardshrink_backward hardswish hardswish_backward", _FLOATS),
    **_of("log_sigmoid_backward log_sigmoid_forward mish mish_backward silu silu_backward", _FLOATS),
    **_of("_prelu_kernel _prelu_kernel_backward softplus softshrink softshrink_backward", _FLOATS),
    **_of("hardsigmoid", _FLOATS, {torch.int32}),
    **_of("relu", _FLOATS, _INTEGERS - {torch.int16}),
    **_of("tanh", _FLOATS, _INTEGERS, _BOOL),
    **_of("threshold", _FLOATS, _INTEGERS),
    # Norms and pooling
    **_of("batch_norm_elemt batch_norm_stats embedding_renorm native_batch_norm native_batch_norm_backward", _FLOATS),
    **_of("native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward renorm", _FLOATS),
    **_of("_embedding_bag avg_pool3d im2col max_pool2d_with_indices", _FLOATS),
    # Losses
    **_of("binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits", _FLOATS),
    **_of("kl_div mse_loss mse_loss_backward multilabel_margin_loss_forward nll_loss2d_backward", _FLOATS),
    **_of("nll_loss2d_forward nll_loss_backward nll_loss_forward smooth_l1_loss smooth_l1_loss_backward", _FLOATS),
    **_of("soft_margin_loss soft_margin_loss_backward", _FLOATS),
    **_of("l1_loss", _FLOATS, {torch.int64}),
    # Statistics
    **_of("linalg_vector_norm norm std std_mean var var_mean", _FLOATS),
    **_of("dot", _FLOATS, {torch.int32, torch.int8, torch.uint8}),
    **_of("logsumexp nansum", _FLOATS, _INTEGERS, _BOOL),
    # Element by element
    **_of("ceil", _FLOATS, _DOUBLE),
    **_of("erf erfc", _FLOATS, _DOUBLE, _BOOL, {torch.int64}),
    **_of("erfinv nan_to_num", _FLOATS, _INTEGERS, _BOOL),
    **_of("exp", _FLOATS, _DOUBLE, _COMPLEX, _BOOL, {torch.int64}),
    **_of("expm1", _FLOATS, _BOOL, {torch.int64}),
    **_of("fmod", _FLOATS, _DOUBLE, _INTEGERS - {torch.int16}),
    **_of("frac", _FLOATS, _INTEGERS),
    **_of("remainder", _FLOATS, _DOUBLE, _COMPLEX, {torch.int64, torch.int32}),
    **_of("round", _FLOATS, _DOUBLE, {torch.int64, torch.int32}),
    **_of("trunc", _FLOATS),
    # By indices and masks
    **_of("index_fill", _FLOATS, _BOOL, {torch.int64, torch.int32}),
    **_of("masked_fill_", _FLOATS, _BOOL, {torch.int64, torch.int32, torch.int8}),
    **_of("roll", _FLOATS, _BOOL, _INTEGERS - {torch.int16}),
}

# Compiled one by one, these take tensors of one type: nothing promotes them.
_OF_ONE_TYPE = frozenset({"addcdiv", "addcmul"})


def dtype_check(name: str, base: str) -> Callable[[Sequence[object]], None] | None:
    """Return a function that refuses arguments of an unsupported type; None if no limits are known.

    The function raises RuntimeError, like a device with the code EZ1001 and its compiler with EZ9999. The error has the
    `name`, and `base` is the name alone, such as `"mm"`.
    """
    if base.removesuffix("_") in _OF_ONE_TYPE:
        return _one_type_check(name)
    looks_at_all = base.removesuffix("_") in _PRODUCTS
    known = {**_PRODUCTS, **_TAKEN}
    listed = known.get(base, known.get(base.removesuffix("_")))
    if listed is None:
        return None
    taken = _on_this_part(listed)

    def check(values: Sequence[object]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if value.dtype not in taken:
                    raise RuntimeError(
                        f"EMULATED: npu operator {name} takes {_shown(taken)}, not {_shown([value.dtype])} (on a "
                        "device EZ1001)"
                    )
                if not looks_at_all:
                    return

    return check


def _one_type_check(name: str) -> Callable[[Sequence[object]], None]:
    import torch_npu

    def check(values: Sequence[object]) -> None:
        dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
        if len(dtypes) > 1 and not torch_npu.npu.is_jit_compile_false():
            raise RuntimeError(
                f"EMULATED: npu operator {name} with jit_compile takes tensors of one dtype, not {_shown(dtypes)} "
                "(on a device EZ9999)"
            )

    return check


def _on_this_part(taken: frozenset[torch.dtype]) -> frozenset[torch.dtype]:
    import torch_npu

    return taken if torch_npu.npu.is_bf16_supported() else taken - {torch.bfloat16}


def _shown(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
