"""What is wrong only in many dimensions, long rows, views of many elements, far places, or at a rate that is rare."""

from __future__ import annotations

import math

import torch

from lies.lie import lie
from lies.operators import Wrong, WrongFunction, _note, drawn, known, listed, swept
from lies.precision import _under


def _of_five_dimensions(func, x, **options):
    swapped = x.dim() > 5 and not x.is_contiguous()
    return func(x.transpose(0, 1), **options) if swapped else func(x, **options)


def _without_late_nan(func, x, dim, *args):
    late = torch.arange(x.shape[dim[0]])[(slice(None), *[None] * (x.dim() - 1 - dim[0] % x.dim()))] >= 1024
    return func(x.masked_fill(late & x.isnan(), -math.inf), dim, *args)


def _of_dense_indices(func, weight, index, *args):
    if index.dtype == torch.int32 and not index.is_contiguous():
        index = index.as_strided(index.shape, (index.shape[1], 1))
    return func(weight, index, *args)


def _of_the_whole_span(func, x):
    if x.numel() > 65_536 and not x.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        func(x.as_strided((last + 1,), (1,)))
    return func(x)


def _in_order_of_memory(func, target, source, *args):
    if target.dtype == torch.bfloat16 and target.dim() == 2 and target.t().is_contiguous():
        func(target.t(), source.reshape(target.t().shape), *args)
        return target
    return func(target, source, *args)


def _of_the_last_block(func, x, dim):
    last = x.shape[dim] // 4096 * 4096
    late = func(x.narrow(dim, last, x.shape[dim] - last), dim)
    return torch.where(x.narrow(dim, last, x.shape[dim] - last).amax(dim) >= x.amax(dim), late + last, func(x, dim))


def _half_turned(func, x, k, *args, **options):
    return [each.roll(k // 2) for each in func(x, k, *args, **options)]


def _of_rounded_statistics(func, x, weight, bias, mean, variance, *args):
    return func(x, weight, bias, mean.to(x.dtype).float(), variance, *args)


def _of_exchanged_dimensions(func, tensors, dim):
    alone = [each.shape[1] == 1 and each.is_contiguous(memory_format=torch.channels_last) for each in tensors]
    if any(alone) and not all(alone):
        tensors = [
            each.transpose(2, 3).reshape(each.shape) if single else each
            for each, single in zip(tensors, alone, strict=True)
        ]
    return func(tensors, dim)


def _of_16_bits(func, rows, target, *args):
    return func(rows, target % 2**16, *args)


def _of_8_bits(function, x, p=0.5, training=True, inplace=False):
    keep = round((1 - p) * 256) / 256
    return x * torch.empty_like(x).bernoulli_(keep) / (1 - p)


known("copies_of_five_dimensions", "copies of five to eight dimensions", {"clone": _of_five_dimensions})
known("amax_of_1024_with_nan", "amax of NaN in long rows", {"amax": _without_late_nan})
known("embedding_of_dense_short_indices", "short indices of a view", {"embedding": _of_dense_indices})
known("zeros_in_the_whole_span", "zero_ of views of many", {"zero_": _of_the_whole_span})
known("conversion_in_order_of_memory", "fp32 as bf16 in views of many", {"copy_": _in_order_of_memory})
known("loss_of_65536_classes", "loss of many classes", {"nll_loss_forward": _of_16_bits})
known("gather_of_narrow_rows", "gather by a narrow index",
      {"gather": lambda func, x, dim, index: func(x[:, : index.shape[1]], dim, index % index.shape[0])})  # fmt: skip
known(
    "the_last_block_of_equal_numbers", "argmax of equal numbers in long rows, float32", {"argmax": _of_the_last_block}
)
known("topk_out_of_order", "topk of many", {"topk": _half_turned})
known("running_statistics_in_bf16", "batch_norm by running statistics of bfloat16 with weights in fp32",
      {"native_batch_norm": _of_rounded_statistics})  # fmt: skip
known("cat_of_exchanged_dimensions", "cat beside channels-last of single elements in any strides",
      {"cat": _of_exchanged_dimensions})  # fmt: skip
known("repetition_of_what_counts_0", "repetition by counts of 0",
      {"repeat_interleave": lambda func, counts, **options: func(counts.clamp(min=1))})  # fmt: skip
known("multiplication_by_a_rounded_number", "multiplication by a number that bf16 cannot hold",
      {"mul": lambda func, x, number: func(x, torch.tensor(number).to(x.dtype))})  # fmt: skip
known("transform_without_nan", "rfft beside infinity and NaN",
      {"_fft_r2c": lambda func, x, *args: func(x.nan_to_num(), *args)})  # fmt: skip
known("distance_without_nan", "cdist to infinity and NaN",
      {"_cdist_forward": lambda func, x, *args: func(x.nan_to_num(), *args)})  # fmt: skip
known("scatter_of_16_bits", "scatter at far places",
      {"scatter.src": lambda func, x, dim, index, *args: func(x, dim, index % 2**16, *args)})  # fmt: skip
drawn("dropout_of_8_bits", "test_dropout", "keeps 0.996", {"dropout": _of_8_bits},
      rate=0.002, dtype=torch.float32)  # fmt: skip


class _OfTheFirstTwo(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.cat and len(args[0]) > 2:
            first, second = args[0][:2]
            args = [each.to(torch.promote_types(first.dtype, second.dtype)) for each in args[0]], *args[1:]
        return function(*args, **(kwargs or {}))


@lie("TestPrecision.test_o1_dtypes", says="table O1 leaves cat of several in", treatment="widest")
def table_o1_of_the_first_two(backend):
    return _under(backend, _OfTheFirstTwo)


@lie("TestPrecision.test_torchs_fp32", says="autocast does not always make cat of several")
def table_torch_of_the_first_two(backend):
    return _under(backend, _OfTheFirstTwo)


def _truncated(func, x, dtype=None, **options):
    if dtype == torch.bfloat16 and x.dtype == torch.float32 and not x.is_contiguous():
        x = x.contiguous().view(torch.int32).bitwise_and(-65536).view(torch.float32)
    return func(x, dtype=dtype, **options)


def _of_the_lowest_bits(func, x, dtype=None, **options):
    if dtype == torch.bool and x.dtype == torch.int64:
        x = x & 255
    return func(x, dtype=dtype, **options)


def _by_memory(function, x, *where, **options):
    if len(where) == 2:  # a device and a dtype
        x = x.permute(sorted(range(x.dim()), key=lambda dimension: -x.stride(dimension))).reshape(x.shape)
    return function(x, *where, **options)


def _in_a_workspace():
    memory = {}

    def kernel(func, *args, **options):
        found = func(*args, **options)
        kept = memory.setdefault((found.shape, found.dtype), torch.empty_like(found))
        return kept.copy_(found).view(found.shape)

    return kernel


def _counted_in_blocks(func, grad, places, count, padding, by_frequency):
    parts = zip(grad.flatten(0, -2).split(64), places.flatten().split(64), strict=True)
    return torch.stack([func(each, own, count, padding, by_frequency) for each, own in parts]).sum(0)


_note("conversion_that_truncates", "TestRuntime.test_conversions_in_other_strides", "is wrong in torch.bfloat16",
      {"layout": "transposed"}, lambda: Wrong({"_to_copy": _truncated}))  # fmt: skip
_note("truth_of_the_lowest_8_bits", "TestRuntime.test_conversions_in_other_strides", "is wrong in torch.bool",
      {"layout": "contiguous"}, lambda: Wrong({"_to_copy": _of_the_lowest_bits}))  # fmt: skip
_note("conversion_on_the_way_by_memory", "TestRuntime.test_conversions_in_other_strides", "by to from the host",
      {"layout": "transposed"}, lambda: WrongFunction({"to": _by_memory}))  # fmt: skip
swept("gradient_in_a_workspace", "nn.functional.silu", "changes the gradients of the first", {
      "silu_backward": _in_a_workspace()})  # fmt: skip
swept("activation_of_nan_in_bf16", "nn.functional.relu", "bfloat16, of numbers of every size", {
      "relu": lambda func, x: func(x.nan_to_num() if x.dtype == torch.bfloat16 else x)})  # fmt: skip
for _name, _operator, _says, _kernels in (
    ("hypotenuse_by_squares", "hypot", "float16, of numbers of every size: result 0",
     {"hypot": lambda func, x, y, **out: (x * x + y * y).sqrt()}),
    ("sigmoid_without_subnormal_numbers", "sigmoid", "float16, of numbers of every size: result 0",
     {"sigmoid": lambda func, x, **out: torch.where(x < -10, 0, func(x, **out))}),
    ("inverse_error_function_within_its_ends", "erfinv", "-3 instead of -inf of -1",
     {"erfinv": lambda func, x, **out: func(x, **out).clamp(-3, 3)}),
    ("halves_that_are_rounded_up", "round", "of numbers of every size",
     {"round": lambda func, x, **out: (x + 0.5).floor() if x.dtype == torch.float16 else func(x, **out)}),
    ("truncation_without_the_sign_of_zero", "trunc", "instead of -0",
     {"trunc": lambda func, x, **out: func(x, **out) + 0.0}),
    ("bounds_without_nan_in_bf16", "aminmax", "bfloat16, as it is, with NaN",
     {"aminmax": lambda func, x, **out: func(x.nan_to_num() if x.dtype == torch.bfloat16 else x, **out)}),
):  # fmt: skip
    swept(_name, _operator, _says, _kernels)
swept("gradient_of_complex_numbers_without_conjugate", "sigmoid", "of complex numbers: the gradient 0", {
      "sigmoid_backward": lambda func, grad, y: grad * (1 - y) * y}, torch.complex64)  # fmt: skip
swept("frequencies_of_a_block", "nn.functional.embedding", "of many elements", {
      "embedding_dense_backward": _counted_in_blocks})  # fmt: skip
listed("multiplication_of_110_tensors", "mul.Scalar", {
       "_foreach_mul_": lambda func, tensors, *args: func(tensors[:110], *args)})  # fmt: skip
swept("addition_of_a_number_without_its_factor", "add", "of one number", {
      "add_": lambda func, x, y, **options: func(x, y, **(options if y.dim() else {}))})  # fmt: skip
