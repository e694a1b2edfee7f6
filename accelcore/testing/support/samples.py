"""torch's own operator samples (OpInfo), and the operators of the default run."""

from __future__ import annotations

import inspect
import random
import warnings
from functools import cache, partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

SAMPLED = (
    *("mm", "bmm", "addmm", "matmul", "baddbmm", "mv", "dot", "outer", "einsum", "nn.functional.linear"),
    "linalg.solve_triangular",
    *("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d"),
    *("nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.batch_norm", "nn.functional.rms_norm"),
    *("nn.functional.instance_norm", "nn.functional.normalize", "linalg.vector_norm"),
    *("nn.functional.relu", "nn.functional.gelu", "nn.functional.silu", "nn.functional.leaky_relu"),
    *("nn.functional.elu", "nn.functional.softplus", "nn.functional.hardswish", "nn.functional.glu", "sigmoid", "tanh"),
    *("nn.functional.mish", "nn.functional.logsigmoid", "nn.functional.prelu"),
    *("softmax", "log_softmax", "logsumexp", "nn.functional.scaled_dot_product_attention"),
    *("nn.functional.cross_entropy", "nn.functional.nll_loss", "nn.functional.mse_loss", "nn.functional.l1_loss"),
    *("nn.functional.smooth_l1_loss", "nn.functional.binary_cross_entropy_with_logits", "nn.functional.kl_div"),
    *("nn.functional.huber_loss", "nn.functional.cosine_similarity"),
    *("nn.functional.embedding", "gather", "index_select", "index_add", "index_copy", "index_put", "index_fill"),
    *("scatter", "scatter_add", "scatter_reduce.mean", "take_along_dim", "masked_fill"),
    *("masked_select", "where", "nonzero"),
    *("sum", "mean", "prod", "var", "std", "amax", "amin", "argmax", "any", "all", "norm"),
    *("cumsum", "cumprod", "logcumsumexp", "sort", "topk", "argsort", "max.reduction_with_dim", "median"),
    *("nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.adaptive_avg_pool2d"),
    *("nn.functional.interpolate.bilinear", "nn.functional.interpolate.nearest", "nn.functional.pad.constant"),
    *("nn.functional.pad.reflect", "nn.functional.unfold", "nn.functional.pixel_shuffle", "nn.functional.one_hot"),
    *("cat", "stack", "split", "chunk", "flip", "roll", "tril", "triu", "clone", "to", "repeat", "expand", "permute"),
    *("transpose", "reshape", "repeat_interleave", "unbind", "diagonal", "copysign"),
    *("add", "sub", "mul", "div.no_rounding_mode", "pow", "addcmul", "addcdiv", "lerp", "clamp", "maximum", "minimum"),
    *(
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "abs",
        "neg",
        "sign",
        "sin",
        "cos",
        "erf",
        "expm1",
        "log1p",
        "round",
    ),
    *("floor", "remainder", "eq", "lt", "isnan", "nan_to_num", "atan2", "square", "floor_divide"),
)
"""Operators of training, as torch's tests name them."""

REPEATABLE = (
    *("gather", "index_select", "index_add", "index_put", "scatter_add", "scatter_reduce.sum", "scatter_reduce.amax"),
    *("take", "take_along_dim", "nn.functional.embedding", "__getitem__"),
)
"""Operators whose result is defined if an index comes several times."""

UNIQUE_INDICES = ("index_copy", "scatter")
"""Operators that write, whose result is not defined if an index comes several times."""

ORDERED = (*("sort", "topk", "argsort", "argmax", "max.reduction_with_dim", "median", "nn.functional.max_pool2d"),)
"""Operators that choose by order, whose result is not unique if elements are equal."""

TIED = {"argsort": "result 0", **dict.fromkeys(("sort", "topk", "median", "nanmedian", "kthvalue", "mode"), "result 1")}
"""Which result is the index of any of the numbers that are equal, unless `stable=True`, by operator."""

_OPEN_NAN = ("fft.", "unpool", "rms_norm", "cdist", "polynomial")  # some polynomials of NaN read uninitialised memory
_OPEN = (*_OPEN_NAN, "masked.median")
_UNDEFINED = ("byte", "char", "short", "int", "long", "mode")  # of equal numbers, mode chooses any

CHOOSES = (*TIED, "msort")
"""Operators of which the gradient goes to any of the numbers that are equal."""

DECIDED = ("searchsorted", "bucketize", "cummax", "cummin", "isin", "heaviside", "unique", "unique_consecutive")
"""Operators whose result is defined, and an index or a step, if numbers are equal."""

OF_ELEMENTS = ("UnaryUfuncInfo", "BinaryUfuncInfo")
"""torch's kinds of operators that take each element alone."""

READS_MEMORY = ("as_strided", "as_strided_copy", "as_strided_scatter", "stft", "istft")
"""Operators whose result depends on the strides of their input."""

IGNORES_OUT = ("fft.ihfft2", "fft.ihfftn")
"""Operators that torch does not let write `out=` on any device if one dimension is transformed: a known kernel bug."""

DENSE_OUT = ("nn.functional.gelu", "tril", "triu", "nn.functional.avg_pool3d", "narrow_copy")
"""Operators whose kernel on the CPU, which also plays devices, needs a contiguous `out=`: known kernel bugs."""

MEDIANS = ("median", "nanmedian", "masked.median")
"""Operators that are wrong of expanded memory on the CPU, to which devices hand them: a known bug."""

ROUNDED_OUT = ("any", "all")
"""Operators that torch's CPU kernels give their argument in the dtype of `out=`, without its fraction: a known bug."""

OF_ITS_INPUT = ("nn.functional.huber_loss", "nn.functional.binary_cross_entropy_with_logits")
"""Operators whose result may have the dtype of the first tensor or that of all: torch's own devices differ."""

CONVERTS = ("double", "cdouble", "cfloat")
"""Operators that are a copy or not, depending on the dtype that the device makes of it."""

HOST_ARGUMENTS = ("tensor_split",)
"""Operators of which torch takes only the first tensor on a device, and the others on the CPU."""

NOT_UNIQUE = (
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
    *("resize_as_", "linalg.eig", "linalg.eigh", "linalg.svd", "svd", "svd_lowrank", "pca_lowrank", "linalg.qr", "qr"),
    *("geqrf", "linalg.lstsq", "linalg.lstsq.grad_oriented", "nn.functional.fractional_max_pool2d", "lobpcg"),
    *(
        "nn.functional.fractional_max_pool3d",
        "torch.ops.aten._unsafe_masked_index",
    ),
    "as_strided.partial_views",  # it reads memory around the view, which a copy to a device lacks
    "native_dropout_backward",  # it takes a mask in the form in which the device's own dropout returns it
)
"""Operators with several right results, of which only shape and dtype are compared."""

UNWRITTEN = ("nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss")
"""Operators whose result torch does not write on the CPU if there are no elements."""

ROUGH = (
    *(
        "matrix_exp",
        "linalg.matrix_exp",
        "native_layer_norm",
        "native_group_norm",
        "nn.functional.soft_margin_loss",
        "grid_sampler_2d",
    ),
    *("grid_sampler_3d", "nn.functional.grid_sample", "nn.functional.interpolate.trilinear"),
    "nn.functional.interpolate.bilinear",
    *("nn.functional.interpolate.bicubic", "_upsample_bilinear2d_aa", "nn.functional.ctc_loss"),
    "nn.functional.cosine_embedding_loss",
    "linalg.pinv.hermitian",  # the gradient divides by differences of eigenvalues
    "histc",  # rounded to low precision, values change bins
)
"""Operators that overflow or lose digits inside, on the CPU, too: compared in fp32, with a wider tolerance."""

_ROUNDED_OFTEN = (
    *("nn.functional.scaled_dot_product_attention", "attention", "causal attention"),
    *("logcumsumexp", "solution", "determinant", "inverse", "prod"),
)
"""Operators whose fastest kernels round several times more often than those of the CPU, also in fp32."""
_WIDER = 32  # times the usual limits in sums of thousands of elements: what a kernel misses or repeats is more
_OFTEN = 4  # times the usual limits

_WRONG_ON_HOST = {"nn.functional.embedding_bag": "scale_grad_by_freq"}
"""Options with which torch's kernel on the CPU is wrong before 2.14, by operator."""

FRAGILE = (
    *("_segment_reduce.lengths", "_segment_reduce.offsets", "nn.functional.pdist", "sgn"),
    *("native_batch_norm", "_native_batch_norm_legit"),  # without elements
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",  # reads a last dimension with gaps as if it had none
    "torch._scaled_mm_v2",  # torch 2.10 makes no samples of it in a build for CUDA without a GPU
)
"""Operators with nothing to compare with: CPU kernels that may crash the process in float64, or no samples."""

_MOST_MADE, _MOST = 1500, 64  # samples of an operator
_MOST_KEPT = 32  # lists of samples


@cache
def operators() -> dict[str, Any]:
    """Return torch's OpInfo of each operator by name. Skip the test if the samples cannot be imported."""
    try:
        # Importing them would forbid the whole process to set the flags of torch.backends, as backends do.
        with warnings.catch_warnings(), patch.object(torch.backends, "disable_global_flags", lambda: None):
            warnings.simplefilter("ignore")  # of torch, at itself
            from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        pytest.skip(
            f"torch's operator samples need more packages ({error}): pip install '.[testing]' in a clone of accelcore"
        )
    return {".".join(filter(None, (info.name, info.variant_test_name))): info for info in op_db}


def in_place(info: Any) -> Any:
    """Return an operator's form in place, which torch does not list of each function with `inplace=`; None without."""
    name = getattr(info, "name", "").removeprefix("nn.functional.")
    function = getattr(functional, name, None)
    if info.inplace_variant is not None or not inspect.isfunction(function) or "dropout" in name:
        return info.inplace_variant
    return partial(function, inplace=True) if "inplace" in inspect.signature(function).parameters else None


def tolerance(name: str, *, many: bool) -> int:
    """Return how many times the usual limits an operator may differ, on many elements or not."""
    return _WIDER if many or name in ROUGH else _OFTEN if name.startswith(_ROUNDED_OFTEN) else 1


@cache
def _is_right_on_host() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def is_comparable(name: str, dtype: torch.dtype, arguments: Any) -> bool:
    """Return whether the CPU is right about a sample, and no other result is: equal zeros may be taken in any order.

    Other numbers that are equal are moved apart where the effect of rounding is tried.
    """
    (first, *_), options = arguments
    if name in TIED and dtype.is_floating_point and not options.get("stable"):
        return int((first == 0).sum()) < 2
    return _is_right_on_host() or not options.get(_WRONG_ON_HOST.get(name))


def defines_infinities(name: str) -> bool:
    """Return whether it is defined what an operator makes of infinities, NaN, and numbers beyond whole numbers."""
    return name not in _UNDEFINED and not any(each in name for each in _OPEN)


def defines_nan(name: str) -> bool:
    """Return whether it is defined what an operator makes of NaN."""
    return name not in _UNDEFINED and not any(each in name for each in _OPEN_NAN)


def needs_lapack(info: Any) -> bool:
    """Return whether an operator decomposes matrices by LAPACK, which may crash the process if they are not finite."""
    from torch.testing._internal.common_device_type import skipCPUIfNoLapack

    return any(each is skipCPUIfNoLapack for each in info.decorators)


def samples(info: Any, dtype: torch.dtype, *, differentiable: bool = True) -> list[Any]:
    """Return some of an operator's samples on the CPU, of all kinds, the same each time.

    torch omits some options of samples that are `differentiable`, because its own tests of gradients fail then.
    """
    key = id(info), dtype, differentiable and has_gradients(info, dtype)
    if key not in _kept:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[key] = info, _made(info, dtype, gradients=key[-1])
    return list(_kept[key][1])


_kept: dict[tuple[int, torch.dtype, bool], tuple[Any, list[Any]]] = {}
"""Samples of the last operators, because to make them takes a tenth of the time; and their info, which has the id."""


def has_gradients(info: Any, dtype: torch.dtype) -> bool:
    """Return whether an operator has gradients in a dtype, so that `differentiable` samples may be others."""
    return bool(info.supports_autograd and dtype in info.supported_backward_dtypes("cpu"))


def _made(info: Any, dtype: torch.dtype, *, gradients: bool) -> list[Any]:
    torch.default_generator.manual_seed(0)
    state = random.getstate()
    random.seed(0)
    try:
        # Not info.sample_inputs, which inspects the stack for each sample.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some samples are made by what torch calls deprecated
            made = islice(info.sample_inputs_func(info, "cpu", dtype, gradients), _MOST_MADE)
            every = [each for each in made if not _leaves_the_host(each)]
        # By chance, because options change in a fixed order.
        return [every[n] for n in sorted(random.sample(range(len(every)), min(len(every), _MOST)))]
    finally:
        random.setstate(state)


def _leaves_the_host(sample: Any) -> bool:
    """Return whether a sample names a device, which torch's do where it finds a GPU."""
    named = sample.kwargs.get("device")
    given = [*sample.args, *([torch.device(named)] if named else [])]
    return any(isinstance(each, torch.device) and each.type != "cpu" for each in given)
