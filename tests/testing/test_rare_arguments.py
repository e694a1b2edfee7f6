"""Kernels that are wrong for arguments that scripts rarely give, and that the suite compares all the same."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from accelcore_cpu.backend import create

from accelcore import testing as suite
from accelcore.testing.suite import operators as of_suite
from accelcore.testing.support.composed import is_composed
from accelcore.testing.support.found import known_faults
from accelcore.testing.support.samples import FRAGILE, SAMPLED, operators
from accelcore.testing.support.sweep import compare_options

HERE = str(Path(__file__).parent)
sys.path.append(HERE)
Wrong, WrongFunction = (getattr(import_module("lies.operators"), name) for name in ("Wrong", "WrongFunction"))
sys.path.remove(HERE)

HOST = torch.device("cpu")


def _inside(func, grad, x, padding):
    left, right, top, bottom = padding
    if min(padding) < 0:
        return func(grad, x, padding)
    return grad[..., top : grad.shape[-2] - bottom, left : grad.shape[-1] - right].clone()


def _nothing_is_nan(func, weight, rows, begins, *args):
    found = func(weight, rows, begins, *args)
    found[0][:-1][begins.diff()[: len(found[0]) - 1] == 0] = torch.nan
    return found


def _of_bias(func, *args):
    found = func(*args)
    return (*found[:2], found[2] * 0) if args[-1] == [False, False, True] else found


def _smooth_without_weights(function, x, target, weight=None, *, label_smoothing=0.0, **options):
    weight = None if label_smoothing else weight
    return function(x, target, weight, label_smoothing=label_smoothing, **options)


def _twice(x, wrong):
    return 1 + (wrong and x.dtype == torch.complex64)


def _whole_windows(func, x, size, step=(), padding=0, ceil_mode=False, counts=True, divisor=None):
    divisor = size[0] * size[1] if ceil_mode and counts and divisor is None else divisor
    return func(x, size, step, padding, ceil_mode, counts, divisor)


def _of_dense_depth(func, x, weight, bias, step, padding, dilation, *args):
    alone = args[-1] == x.shape[1] > 1
    return func(x, weight, bias, step, padding, dilation, *args) * (1 + (alone and max(dilation) > 1))


def _of_reversed_groups(func, grad, x, weight, biases, stride, *args):
    found = func(grad, x, weight, biases, stride, *args)
    if args[-2] == 1 or max(stride) == 1:
        return found
    return (found[0].unflatten(1, (args[-2], -1)).flip(1).flatten(1, 2), *found[1:])


def _without_gaps(func, bias, *args, out=None, **options):
    to = bias if out is None else out
    if to.stride(0) == 1 or len(to) < 2:
        return func(bias, *args, **options) if out is None else func(bias, *args, out=out, **options)
    to.as_strided(to.shape, (1,)).copy_(torch.addmv(bias, *args, **options))
    return to


def _resized_and_left(func, *args, out, **options):
    given = out.numel()
    func(*args, out=out, **options)
    return out if given else out.zero_()


def _first_of_equal(func, x, dim):
    values, places = func(x, dim)
    return values, places if not x.dim() else (values.movedim(dim, -1)[..., None] == x.movedim(dim, -1)[
        ..., None, :]).int().argmax(-1).movedim(-1, dim)  # fmt: skip


def _not_scaled_with_mask(function, *args, attn_mask=None, scale=None, **options):
    return function(*args, attn_mask=attn_mask, scale=scale if attn_mask is None else None, **options)


def _as_if_contiguous(x):
    return x if x.is_contiguous() or not x.numel() else x.as_strided(x.shape, torch.empty(x.shape).stride())


def _is_whole(x):
    return not x.dtype.is_floating_point


def _largest_of_whole_numbers(func, x, k, dim=-1, largest=True, ordered=True):
    return func(x, k, dim, largest or _is_whole(x), ordered)


def _in_order_of_the_first(func, x, other, *weight, **out):
    alike = x.shape == other.shape and other.is_contiguous() and not x.is_contiguous()
    return func(x, other.as_strided(x.shape, x.stride()) if alike else other, *weight, **out)


def _of_weights_in_order_of_images(func, x, weight, *args):
    images_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    if images_last and weight.is_contiguous():
        weight = weight.as_strided(weight.shape, weight.contiguous(memory_format=torch.channels_last).stride())
    return func(x, weight, *args)


def _masked_as_the_first(function, *args, attn_mask=None, **options):
    broadcast = attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] == 1
    return function(*args, attn_mask=attn_mask[:1] if broadcast else attn_mask, **options)


def _each_row_from_the_first(func, x, mask, source):
    if mask.dim() != 1 or x.dim() != 2:
        return func(x, mask, source)
    return torch.stack([func(row, mask, source) for row in x])


FUNCTIONS = {"isclose", "cosine_similarity", "cross_entropy", "ctc_loss", "scaled_dot_product_attention"}

WRONG = {
    "an option of torch's samples": ("nn.functional.pad.replicate", "of other options: the gradient", {
        "replication_pad2d_backward": _inside}),
    "a word of torch's samples": ("fft.irfft", "of other options: result", {
        "_fft_c2r": lambda func, x, dim, norm, last: func(x, dim, norm, last) * _twice(x, norm == 1)}),
    "two options at once": ("nn.functional.cross_entropy", "of other options: result", {
        "cross_entropy": _smooth_without_weights}),
    "a number that no sample gives": ("nn.functional.celu", "of other options: result", {
        "celu": lambda func, x, *alpha: func(x)}),
    "quotients beyond 32 bits": ("div.trunc_rounding", "of numbers of every size: result", {
        "div.Tensor_mode": lambda func, *args, **mode: func(*args, **mode).clamp(-(2.0**31), 2.0**31)}),
    "an infinite divisor": ("remainder", "of numbers of every size: result", {
        "remainder": lambda func, x, y: func(x, y).where(~torch.as_tensor(y).isinf(), 0.0)
        if x.is_floating_point() else func(x, y)}),
    "the bias alone": ("nn.functional.conv2d", "of frozen inputs: the gradient", {"convolution_backward": _of_bias}),
    "images of other sizes": ("nn.functional.avg_pool2d", "of other options: result", {"avg_pool2d": _whole_windows}),
    "a kernel for each channel": ("nn.functional.conv2d", "of other options: result", {"convolution": _of_dense_depth}),
    "groups and strides": ("nn.functional.conv3d", "of other options: the gradient 0", {
        "convolution_backward": _of_reversed_groups}),
    "memory with gaps, in place": ("addmv", "in place strided, of other options: ", {"addmv_": _without_gaps}),
    "memory with gaps": ("addmv", "with out=, of other options: ", {"addmv.out": _without_gaps}),
    "memory that is resized": ("addmv", "with out=, of other options: ", {"addmv.out": _resized_and_left}),
    "an index that is left out": ("nn.functional.embedding", "of other options: the gradient", {
        "embedding_dense_backward": lambda func, grad, index, count, padding, scale: func(
            grad, index, count, padding, scale and padding < 0)}),
    "a number for NaN": ("nan_to_num", "of other options: result", {
        "nan_to_num": lambda func, x, nan=None, *others: func(x, None, *others)}),
    "an order that is given": ("searchsorted", "of other options: result", {
        "searchsorted": lambda func, *args, sorter=None, **options: func(*args, **options)}),
    "windows with gaps": ("nn.functional.unfold", "of other options: result", {
        "im2col": lambda func, x, size, gap, *args: func(x, size, gap, *args) * (1 + (max(gap) > 1))}),
    "an impossible alignment": ("nn.functional.ctc_loss", "of other options: ", {
        "ctc_loss": lambda function, *args, zero_infinity=False, **options: function(*args, **options)}),
    "options behind a function of the samples": ("nn.functional.scaled_dot_product_attention",
        "of other options: result", {"scaled_dot_product_attention": _not_scaled_with_mask}),
    "a diagonal beyond the sizes": ("tril", "of other options: result", {
        "tril": lambda func, x, number=0: func(x, max(1 - x.shape[-2], number))}),
    "NaN among options": ("nanmedian", "with NaN: result", {
        "nanmedian.dim": lambda func, x, *args, **options: torch.median(x, *args, **options)}),
    "an option and strides": ("aminmax", "strided, of other options: result", {
        "aminmax": lambda func, x, **options: func(_as_if_contiguous(x), **options)}),
    "a power of a loss": ("nn.functional.multi_margin_loss", "of other options: result", {
        "multi_margin_loss": lambda func, x, target, power=1, *others: func(x, target, 1, *others)}),
    "equal numbers": ("cummax", "with equal numbers: result 1", {"cummax": _first_of_equal}),
    "an option of whole numbers": ("topk", "int64, transposed, of other options: result", {
        "topk": _largest_of_whole_numbers}),
    "whole numbers in other strides": ("argmax", "int64, strided, of other options: result", {
        "argmax": lambda func, x, *args, **options: func(_as_if_contiguous(x) if _is_whole(x) else x, *args, **options)
    }),
    "whole numbers that have no fractions": ("bitwise_right_shift", "int16, as it is, of other options: result", {
        "bitwise_right_shift": lambda func, x, *args, **out: func(x.abs(), *args, **out)}),
    "whole numbers beyond 32 bits": ("gather", "int64, as it is, with large numbers: result", {
        "gather": lambda func, x, *args, **options: func(x.int() if _is_whole(x) else x, *args, **options).to(x.dtype)
    }),
    "sums of truth values": ("sum", "bool, strided, of other options: result", {
        "sum": lambda func, x, *args, **options: func(x, *args, **options).clamp(
            max=1 if x.dtype == torch.bool else None, min=None if x.dtype == torch.bool else -1e9)}),
    "dimensions from the last one": ("cumsum", "float32, as it is, of other options: result", {
        "cumsum": lambda func, x, dim, **options: func(x, max(dim, 0), **options)}),
    "indices from the end": ("take", "of other options: result", {
        "take": lambda func, x, index: func(x, index.clamp(min=0))}),
    "operands in different strides": ("lerp", "the first in another order, of other options: result", {
        "lerp": _in_order_of_the_first}),
    "a divisor that is NaN": ("fmod", "of numbers of every size: result", {
        "fmod.Tensor": lambda func, x, y, **out: func(x, y.nan_to_num(1), **out)}),
    "zeros below 0": ("atan2", "of numbers of every size: result", {
        "atan2": lambda func, x, y, **out: func(x + 0, y + 0, **out)}),
    "zeros that lose their sign": ("neg", "of numbers of every size: result", {
        "neg": lambda func, x, **out: 0 - x if x.is_floating_point() and not out else func(x, **out)}),
    "whole numbers of 32 bits": ("div.floor_rounding", "int32, as it is, with the ends of integers: result", {
        "div.Tensor_mode": lambda func, *given, rounding_mode=None, **out: func(
            *given, rounding_mode="trunc" if given[0].dtype == torch.int32 else rounding_mode, **out)}),
    "weights in other strides than images": ("nn.functional.conv2d", "the first in another order, of other options", {
        "convolution": _of_weights_in_order_of_images}),
    "a tolerance": ("isclose", "of other options: result", {
        "isclose": lambda function, x, y, **options: function(x, y)}),
    "the least length of a vector": ("nn.functional.cosine_similarity", "of other options: ", {
        "cosine_similarity": lambda function, x, y, *, dim=1, **options: function(x, y, dim)}),
    "vectors of another value": ("linalg.eigh", "of other options: result 1", {
        "_linalg_eigh": lambda func, *args: (func(*args)[0], func(*args)[1].flip(-1))}),
    "vectors that are too long": ("linalg.svd", "of other options: result", {
        "_linalg_svd": lambda func, *args: [func(*args)[0] * 2, func(*args)[1] / 2, func(*args)[2]]}),
    "NaN in windows with gaps": ("nn.functional.max_pool2d", "with NaN: result", {
        "max_pool2d_with_indices": lambda func, x, *args: func(x.nan_to_num(-1e9), *args)}),
    "a mask for each sequence": ("nn.functional.scaled_dot_product_attention", "of other options: result", {
        "scaled_dot_product_attention": _masked_as_the_first}),
    "masks of fewer dimensions": ("masked_scatter", "of other options: result", {
        "masked_scatter": _each_row_from_the_first}),
    "more elements than a grid has blocks": ("sinh", "float32, as it is, of many elements: result", {
        "sinh": lambda func, x, **out: func(x, **out) if x.numel() <= 2**16 else func(x).reshape(-1).index_fill(
            0, torch.tensor([x.numel() - 1]), 0.0).reshape(x.shape)}),
    "low precision": ("logaddexp", "float16, as it is, of other options: result", {
        "logaddexp": lambda func, x, y, **out: func(x, y, **out) * (1.1 if x.dtype == torch.float16 else 1)}),
    "an empty part": ("nn.functional.embedding_bag", "float32, as it is, of other options: result 0", {
        "_embedding_bag": _nothing_is_nan}),
    "more elements of a function than a grid has blocks": ("nn.functional.hardswish", "of many elements: result", {
        "hardswish": lambda func, x: func(x) * (1 + (x.numel() > 2**16))}),
    "the ends of a range": ("acos", "float32, as it is, with the ends of a range: result", {
        "acos": lambda func, x, **out: func(x, **out) if out else func(x).where(x.abs() != 1, torch.nan)}),
    "a switch that another option hides": ("nn.functional.avg_pool2d", "of other options: the gradient", {
        "avg_pool2d_backward": lambda func, *given: func(*given[:6], True, given[7])}),
    "images behind the first": ("nn.functional.pixel_unshuffle", "of other options: result", {
        "pixel_unshuffle": lambda func, x, factor: func(x, factor) * (1 + (x.dim() == 4 and len(x) > 1))}),
    "zeros among complex numbers": ("sqrt", "of complex numbers: result", {
        "sqrt": lambda func, x: func(x) if x.dtype != torch.complex64 else func(x).where(x.abs() > 0, torch.nan)}),
    "an answer in numbers": ("ge", "with out= of another dtype, of other options: result", {
        "ge.Tensor_out": lambda func, *given, out: func(*given, out=out).mul_(255 if out.dtype == torch.uint8 else 1)}),
    "an index that is expanded": ("gather", "of expanded memory: result", {
        "gather": lambda func, x, dim, index, **options: func(
            x, dim, index.mT if 0 in index.stride() else index, **options)}),
    "NaN and the option of no sample": ("topk", "with NaN: result", {
        "topk": lambda func, x, k, dim=-1, *largest: func(x.nan_to_num(0) if False in largest else x, k, dim, *largest)
        if x.is_floating_point() else func(x, k, dim, *largest)}),
    "complex numbers": ("reciprocal", "of complex numbers: result", {
        "reciprocal": lambda func, x: func(x) * _twice(x, True)}),
}  # fmt: skip
"""What is rare, the operator, what the suite says, and kernels that are wrong there."""


@pytest.mark.parametrize("what", WRONG)
def test_a_kernel_that_is_wrong_for_a_rare_argument_is_caught(what):
    name, says, kernels = WRONG[what]
    wrong = WrongFunction if kernels.keys() & FUNCTIONS else Wrong
    with wrong(kernels):
        found = compare_options(HOST, [name], [torch.float16], known_faults(create())).wrong
    assert any(says in each for each in found), found


NAMES = sorted({name for name, _, _ in WRONG.values()})


@pytest.mark.parametrize("names", [NAMES[::6], pytest.param(NAMES, marks=pytest.mark.full)], ids=["some", "all"])
def test_kernels_that_are_right_for_these_arguments_pass(names):
    right = compare_options(HOST, names, [torch.float16], known_faults(create()))
    assert right.compared
    assert right.wrong == []


def test_an_option_is_compared_with_large_numbers_in_low_precision():
    def infinite(func, x, approximate="none"):
        found = func(x, approximate=approximate)
        return found if approximate == "none" or x.dtype == torch.float32 else found.where(x < 10, torch.nan)

    with Wrong({"gelu": infinite}), pytest.raises(AssertionError, match="with large numbers: result 0 is wrong"):
        suite.TestOperators().test_operator(create(), "nn.functional.gelu", lambda *said: None)


def _into_whole_numbers(func, x, *, out):
    return func(x, out=out) if out.is_floating_point() else out.copy_(x.exp())


def _without_resizing(func, x, *args, out, **options):
    found = func(x, *args, out=torch.empty(0, dtype=out.dtype), **options)
    if found.shape == out.shape:
        return out.copy_(found)
    out.reshape(-1)[: found.numel()] = found.reshape(-1)[: out.numel()]
    return out


def _in_order(func, one, other, *, out):
    if out.untyped_storage().data_ptr() != one.untyped_storage().data_ptr() or out.data_ptr() == one.data_ptr():
        return func(one, other, out=out)
    for place, factor in enumerate(torch.as_tensor(other).expand(one.shape).flatten()):
        out.view(-1)[place] = one.view(-1)[place] * factor
    return out


@pytest.mark.parametrize(("name", "says", "kernels"), [
    ("exp", "with out= of whole numbers: result 0 is torch.int64", {"exp.out": _into_whole_numbers}),
    ("cumsum", "with out=: result 0 is of shape", {"cumsum.out": _without_resizing}),
    ("mul", "with out= beside its input: result 0 is wrong", {"mul.out": _in_order}),
])  # fmt: skip
def test_memory_that_torch_refuses_or_resizes_is_given_as_out(name, says, kernels):
    with Wrong(kernels), pytest.raises(AssertionError, match=says):
        suite.TestOperators().test_operator(create(), name, lambda *said: None)


def test_images_are_compared_in_channels_last_behind_other_elements():
    def from_the_beginning(func, x, *args, **out):
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return func(x.as_strided(x.shape, x.stride(), 0) if last else x, *args, **out)

    says = "float32, channels last, behind other elements: result 0 is wrong"
    with Wrong({"avg_pool2d": from_the_beginning}), pytest.raises(AssertionError, match=says):
        suite.TestOperators().test_operator(create(), "nn.functional.avg_pool2d", lambda *said: None)


def _to_the_next_power(func, x, *args):
    found = func(x, *args)
    width = found.shape[-1]
    found[..., width & -width if width > 256 and not width % 256 else width :] = 0
    return found


def _in_low_precision(func, x, dim, *args, **options):
    if x.dtype.itemsize != 2 or dim != [0]:
        return func(x, dim, *args, **options)
    return x.cumsum(0, dtype=torch.float64)[-1:].clamp(max=300).to(x.dtype).sum(dim, *args, **options)


def _last_of_equal(func, x, dim=-1, **options):
    if x.shape[dim] <= 128:
        return func(x, dim=dim, **options)
    values, places = func(x.flip(dim), dim=dim, **options)
    return values, x.shape[dim] - 1 - places


def _again_in_pieces(func, x, *args):
    return torch.cat([func(each, *args) for each in x.split(1024, -1)], -1)


def _without_the_last_tile(func, one, other):
    found = func(one, other)
    rows, columns = (size // 64 * 64 for size in found.shape)
    if rows and columns:
        found[rows:, columns:] = 0
    return found


@pytest.mark.parametrize(("name", "says", "kernels"), [
    ("mm of many columns", "of rows of 129: result", {"mm": _without_the_last_tile}),
    ("cholesky", "of rows of 33: result", {"linalg_cholesky_ex": lambda func, x, **options: [
        each * 1.01 if len(x) > 32 and each.dim() else each for each in func(x, **options)]}),
    ("glu", "of rows of 768: result", {"glu": _to_the_next_power}),
    ("cumsum", "of rows of 1025: result", {"cumsum": _again_in_pieces}),
    ("sum", "bfloat16, as it is, of columns of 4099: result", {"sum.dim_IntList": _in_low_precision}),
    ("gradient of linear over rows", "of columns of 4099: the gradient 1", {"sum.dim_IntList": _in_low_precision}),
    ("softmax", "softmax of rows of 4099, .* with large numbers: result", {
        "_softmax": lambda func, x, *args: func(x, *args) if x.shape[-1] < 2048 else x.exp() / x.exp().sum(-1, True)}),
    ("order, stable", "order, stable of rows of 129, .* with equal numbers: result 1", {"sort": _last_of_equal}),
])  # fmt: skip
def test_rows_of_more_than_a_block_are_compared(name, says, kernels):
    with Wrong(kernels), pytest.raises(AssertionError, match=says):
        suite.TestOperators().test_rows(create(), name, lambda *said: None)


def _with_the_last_twice(func, one, other):
    return func(one, other) + (one[..., -1:] @ other[..., -1:, :] if one.shape[-1] > 2**15 else 0)


@pytest.mark.parametrize(("what", "kernels"), [
    ("products of long rows", {"bmm": _with_the_last_twice}),
    ("products of long rows", {"mm": _with_the_last_twice}),
    ("product of matrices of whole numbers", {"mm": lambda func, one, other: func(one.float(), other.float()).long()}),
    ("product of many torch.int64", {"prod": lambda func, x: func(x).int().long()}),
    ("powers of whole numbers", {"pow": lambda func, x, power: func(x, power.clamp(min=0))}),
    ("rows of a long embedding", {"embedding": lambda func, weight, rows, *args: func(weight, rows % 2**16, *args)}),
    ("gradient of rows of a long embedding", {
        "embedding_dense_backward": lambda func, grad, rows, *args: func(grad, rows % 2**16, *args)}),
    ("scattering by masks of rows and columns", {
        "masked_scatter_": lambda func, x, mask, source: torch.stack(
            [func(row, one, source) for row, one in zip(x, mask.expand_as(x), strict=True)])}),
])  # fmt: skip
def test_a_known_result_of_many_shows_a_wrong_kernel(what, kernels):
    suite.TestOperators().test_known_result(create(), what)
    with Wrong(kernels), pytest.raises(AssertionError, match=what):
        suite.TestOperators().test_known_result(create(), what)


def test_a_part_fails_by_what_one_of_its_operators_computes():
    names = sorted(operators().keys() - {*SAMPLED, *FRAGILE})
    default = [name for name in names if not is_composed(name, operators()[name], HOST)]
    part = default.index("cummax") % of_suite.PARTS
    wrong = Wrong({"cummax": lambda func, x, dim: (x * 0, func(x, dim)[1])})
    with wrong, pytest.raises(AssertionError, match="cummax, float32, as it is, of other options: result 0 is wrong"):
        suite.TestOperators().test_options(create(), part, lambda *said: None)
