"""Operators that compute something else: by a mode above or below autograd, in every dtype but the oracle's."""

from __future__ import annotations

import math

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lies.lie import LIES, Lie

SWEPT = []  # those that torch's samples show


def _exact(args):
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in pytree.tree_leaves(args))


class Wrong(TorchDispatchMode):
    """Kernels that are replaced, by the operator's name with or without its overload."""

    def __init__(self, kernels, dtype=None):
        super().__init__()
        self._kernels, self._dtype = kernels, dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        kernel = self._kernels.get(name) or self._kernels.get(name.split(".")[0])
        if kernel is None or _exact((args, kwargs)):
            return func(*args, **kwargs)
        if self._dtype and not any(getattr(leaf, "dtype", None) == self._dtype for leaf in pytree.tree_leaves(args)):
            return func(*args, **kwargs)
        return kernel(func, *args, **kwargs)


class WrongFunction(torch.overrides.TorchFunctionMode):
    """Functions that are replaced, by their names."""

    def __init__(self, functions):
        super().__init__()
        self._functions = functions

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wrong = self._functions.get(getattr(function, "__name__", ""))
        if wrong is None or _exact((args, kwargs)):
            return function(*args, **(kwargs or {}))
        return wrong(function, *args, **(kwargs or {}))


def _note(name, test, says, arguments, around):
    LIES[name] = Lie(name, lambda backend: backend, test, says, arguments, around=around)
    return LIES[name]


def swept(lie, operator, says, kernels, dtype=None):
    SWEPT.append(lie)
    return _note(lie, "TestOperators.test_operator", says, {"name": operator}, lambda: Wrong(kernels, dtype))


def differentiated(lie, operator, says, function):
    SWEPT.append(lie)
    return _note(
        lie, "TestOperators.test_operator", says, {"name": operator}, lambda: WrongFunction({operator: function})
    )


def known(lie, what, kernels):
    return _note(lie, "TestOperators.test_known_result", "instead of", {"what": what}, lambda: Wrong(kernels))


def listed(lie, what, kernels):
    return _note(lie, "TestOperators.test_lists", "are wrong", {"what": what}, lambda: Wrong(kernels))


def scaled(factor):
    return lambda func, *args, **kwargs: pytree.tree_map(
        lambda each: each * factor if isinstance(each, torch.Tensor) else each, func(*args, **kwargs)
    )


def as_if_contiguous(func, *args, **kwargs):
    def read(value):
        if not isinstance(value, torch.Tensor) or value.is_contiguous() or not value.numel():
            return value
        try:
            return value.as_strided(value.shape, torch.empty(value.shape).stride())
        except RuntimeError:
            return value

    return func(*pytree.tree_map(read, args), **kwargs)


def without_repeats(func, self, dim, index, source, **kwargs):
    first = torch.tensor([number for number, each in enumerate(index.tolist()) if each not in index.tolist()[:number]])
    if not source.dim() or len(first) == len(index):
        return func(self, dim, index, source, **kwargs)
    return func(self, dim, index[first], source.index_select(dim, first), **kwargs)


def on_a_copy(func, self, *args, **kwargs):
    return func(self.clone(), *args, **kwargs)


def _ties_from_the_end(func, x, *, stable=None, dim=-1, descending=False):
    if not x.dim():
        return func(x, stable=stable, dim=dim, descending=descending)
    values, places = func(x.flip(dim), stable=stable, dim=dim, descending=descending)
    return values, x.shape[dim] - 1 - places


def _by_the_narrowest(tensor, given):
    narrowest = min((each.dtype for each in given), key=lambda dtype: dtype.itemsize)
    return tensor.to(narrowest).to(tensor.dtype) if tensor.is_floating_point() else tensor


def nothing_written(func, *args, out, **kwargs):
    return out


# By torch's samples.
swept("gelu_by_tanh", "nn.functional.gelu", "is wrong in",
      {"gelu": lambda func, x, approximate="none", **kwargs: func(x, approximate="tanh", **kwargs)})  # fmt: skip
swept("gradient_that_is_wrong_in_bf16", "nn.functional.gelu", "bfloat16, as it is: the gradient",
      {"gelu_backward": scaled(1.07)}, torch.bfloat16)  # fmt: skip
swept("gradient_that_is_a_little_off", "tanh", "the gradient", {"tanh_backward": scaled(1 + 1e-4)})
swept("index_add_that_drops_repeats", "index_add", "of repeated indices", {"index_add": without_repeats,
      "index_add_": without_repeats})  # fmt: skip
swept("product_that_reads_memory", "mul", "strided", {"mul": as_if_contiguous})
swept("matrices_that_read_memory", "mm", "transposed", {"mm": as_if_contiguous})
swept("softmax_that_reads_memory", "softmax", "strided", {"_softmax": as_if_contiguous})
swept("in_place_on_a_copy", "mul", "in place", {"mul_": on_a_copy})
swept("out_that_is_not_written", "add", "with out=", {"add.out": nothing_written})
swept("softmax_of_the_last_dimension", "softmax", "is wrong in",
      {"_softmax": lambda func, x, dim, half: func(x, -1, half)})  # fmt: skip
swept("convolution_that_is_flipped_in_fp16", "nn.functional.conv2d", "float16",
      {"convolution": lambda func, x, weight, *args: func(x, weight.flip(-1), *args)}, torch.float16)  # fmt: skip
swept("layer_norm_with_another_eps", "nn.functional.layer_norm", "is wrong in", {
      "native_layer_norm": lambda func, x, shape, w, b, eps: func(x, shape, w, b, eps * 4 + 1e-4)})  # fmt: skip
swept("variance_that_is_biased", "var", "is wrong in",
      {"var": lambda func, x, *args, **kwargs: func(x, *args, **{**kwargs, "correction": 0})})  # fmt: skip
swept("pooling_that_counts_no_padding", "nn.functional.avg_pool2d", "is wrong in", {
      "avg_pool2d": lambda func, *args: func(*args[:4], False, False)})  # fmt: skip
swept("embedding_gradient_that_drops_repeats", "nn.functional.embedding", "the gradient",
      {"embedding_dense_backward": lambda func, grad, index, count, padding, scale: func(
          grad, index, count, padding, True)})  # fmt: skip
swept("cumsum_that_is_exclusive", "cumsum", "is wrong in",
      {"cumsum": lambda func, x, dim, **kwargs: func(x, dim, **kwargs) - (x if x.dim() else 0)})  # fmt: skip
swept("sum_that_skips_the_last", "sum", "is wrong in",
      {"sum.dim_IntList": lambda func, x, dim, *args, **kwargs: func(x, dim, *args, **kwargs) * 0.99})  # fmt: skip
swept("maximum_gradient_to_the_first", "maximum", "the gradient", {
      "ge": lambda func, a, b: torch.ones_like(func(a, b)),
      "eq": lambda func, a, b: func(a, b) & False, "lt": lambda func, a, b: func(a, b) & False})  # fmt: skip
swept("gather_of_the_first", "gather", "is wrong in", {"gather": lambda func, x, dim, index, **kwargs: func(
      x, dim, index.clamp(max=1), **kwargs)})  # fmt: skip
swept("result_of_another_dtype", "exp", "torch.int32 instead of",
      {"exp": lambda func, x, **out: func(x, **out) if out else func(x).int()})  # fmt: skip
swept("result_of_another_shape", "argmax", "of shape",
      {"argmax": lambda func, *args, **kwargs: func(*args, **kwargs)[None]})  # fmt: skip
swept("prod_of_nothing_that_is_0", "prod", "of no elements",
      {"prod": lambda func, x, *args, **kwargs: func(x, *args, **kwargs) * (0 if not x.numel() else 1)})  # fmt: skip


def _beside(func, x):
    func(x)
    if x.dim() and x.stride(-1) == 2:
        x.as_strided(x.shape, x.stride(), x.storage_offset() - 1).fill_(9)
    return x


swept("in_place_beside_a_view", "exp", "beside", {"exp_": _beside})


def _from_where_storage_begins(func, x, *args, **kwargs):
    if x.is_contiguous() and x.storage_offset():
        x = x.as_strided(x.shape, x.stride(), 0)
    return func(x, *args, **kwargs)


def _as_dense(func, condition, *args, **kwargs):
    whole = condition.untyped_storage().nbytes() <= condition.numel() + 1  # no gaps, and nothing before it
    whole &= condition.storage_offset() == 0
    if whole and condition.dim() == 2:
        condition = condition.as_strided(condition.shape, torch.empty(condition.shape).stride())
    return func(condition, *args, **kwargs)


def _nan_is_least(func, x, k, dim=-1, largest=True, ordered=True, **out):
    if out or largest or not x.is_floating_point():
        return func(x, k, dim, largest, ordered, **out)
    places = func(x.masked_fill(x.isnan(), -math.inf), k, dim, False, ordered)[1]
    return (x.gather(dim, places) if x.dim() else x.clone()), places


class _KeepsItsResult:
    """A kernel that computes into the memory of its last result of the same shape."""

    def __init__(self):
        self._memory = {}

    def __call__(self, func, x, **kwargs):
        found = func(x, **kwargs)
        return self._memory.setdefault((found.shape, found.dtype), found).copy_(found)


def _with_whole_exponents(func, x, exponent):
    return func(x, exponent if exponent.is_floating_point() or not x.is_floating_point() else exponent.sign())


swept("convolution_that_begins_elsewhere", "nn.functional.conv2d", "behind other elements: result",
      {"convolution": _from_where_storage_begins})  # fmt: skip
swept("choice_by_another_order", "where", "transposed", {"where": _as_dense})
swept("out_with_gaps_that_is_not_written", "cat", "with out=",
      {"cat.out": lambda func, *args, out: func(*args, out=out) if out.is_contiguous() else out})  # fmt: skip
swept("out_that_is_transposed_and_not_written", "baddbmm", "with out=",
      {"baddbmm.out": lambda func, *args, out, **kwargs: out if out.stride(-1) > 1 and out.stride(0) == 1
       else func(*args, out=out, **kwargs)})  # fmt: skip
swept("gradient_beside_frozen_weights_that_is_doubled", "nn.functional.conv2d", "of frozen inputs: the gradient",
      {"convolution_backward": lambda func, *args: [each if each is None or args[-1][1] else each * 2
                                                    for each in func(*args)]})  # fmt: skip
swept("result_that_the_next_call_overwrites", "exp", "between other calls", {"exp": _KeepsItsResult()})
swept("relu_that_drops_nan", "nn.functional.relu", "instead of nan of nan",
      {"relu": lambda func, x: func(x.nan_to_num(0))})  # fmt: skip
swept("power_of_some_whole_numbers", "pow", "with whole numbers", {"pow.Tensor_Tensor": _with_whole_exponents})
swept("nonzero_of_the_first_many", "nonzero", "of many elements",
      {"nonzero": lambda func, x, **out: func(x, **out) if out else func(x)[:3000]})  # fmt: skip


swept("out_of_another_dtype_that_is_not_written", "add", "with out= of another dtype", {
      "add.out": lambda func, *args, out, **options: out
      if out.dtype != torch.result_type(*args) else func(*args, out=out, **options)})  # fmt: skip
swept("largest_of_the_first_block", "argmax", "of many elements", {
      "argmax": lambda func, x, *args, **options: func(x, *args, **options).clamp(max=1023)})  # fmt: skip
swept("whole_quotient_that_is_cut_off", "floor_divide", "int64", {
      "floor_divide": lambda func, x, y, **out: func(x, y, **out)
      if out or x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")})  # fmt: skip
swept("mean_loss_of_images_that_counts_rows", "nn.functional.nll_loss", "is wrong in",
      {"nll_loss2d_forward": lambda func, x, target, weight, reduction, *args: [
          each * (1 + (reduction == 1)) for each in func(x, target, weight, reduction, *args)]})  # fmt: skip
swept(
    "gradient_that_is_lost_at_infinity",
    "nn.functional.softplus",
    "of numbers of every size: the gradient",
    {"softplus_backward": lambda func, grad, x, beta, limit, **out: func(grad, x, beta, limit, **out) + (x - x)},
)
swept("log1p_of_a_sum", "log1p", "of numbers of every size", {
      "log1p": lambda func, x, **out: func(x, **out) if out else (x + 1).log()})  # fmt: skip
swept("mean_of_scattered_values_and_the_old_one", "scatter_reduce.mean", "is wrong in",
      {"scatter_reduce": lambda func, *args, include_self=True: func(*args)})  # fmt: skip


# By results known by hand: these also if the oracle's dtype is wrong alike.
known("sum_in_bf16", "mean of bf16", {"mean": lambda func, x, *args, **kwargs: (x.sum() * 0 + 256) / len(x)})
swept("least_of_which_nan_is_one", "topk", "with NaN: result 0", {"topk": _nan_is_least})
known("largest_that_drops_nan", "largest with NaN", {"max": lambda func, x: func(x.nan_to_num(-math.inf))})
known("clamp_that_drops_nan", "clamp", {"clamp": lambda func, x, *args: func(x, *args).nan_to_num(-1)})
known("rounding_away_from_zero", "round", {"round": lambda func, x: x.sign() * (x.abs() + 0.5).floor()})
swept("remainder_of_c", "remainder", "is wrong in", {"remainder": lambda func, x, y: torch.fmod(x, y)})
swept("sort_that_is_not_stable", "sort", "is wrong in", {"sort.stable": _ties_from_the_end})
swept("mean_that_counts_ignored_rows", "nn.functional.nll_loss", "is wrong in",
      {"nll_loss_forward": lambda func, *args: (func(*args)[0] * 2 / 3, func(*args)[1])})  # fmt: skip
_note("attention_that_sees_the_future", "TestOperators.test_known_result", "instead of",
      {"what": "attention that is causal"}, lambda: WrongFunction(
          {"scaled_dot_product_attention": lambda function, *args, is_causal: function(*args)}))  # fmt: skip
swept("log_softmax_that_overflows", "log_softmax", "with large numbers",
      {"_log_softmax": lambda func, x, dim, half: (x.exp() / x.exp().sum(dim, keepdim=True)).log()})  # fmt: skip
swept("softmax_of_a_scalar_that_is_itself", "softmax", "is wrong in",
      {"_softmax": lambda func, x, dim, half: func(x, dim, half) if x.dim() else x + 0})  # fmt: skip
known("bf16_that_is_cut_off", "rounding to bf16",
      {"_to_copy": lambda func, x, **kwargs: (x.view(torch.int32) & -65536).view(torch.float32).to(**kwargs)
       if x.dtype == torch.float32 else func(x, **kwargs)})  # fmt: skip
known("mean_of_nothing_that_is_0", "mean of nothing", {"mean": lambda func, x, **kwargs: func(x).nan_to_num(0)})
known("cat_that_stops_at_nothing", "cat with nothing", {"cat": lambda func, tensors, *args: func(tensors[:1], *args)})
swept("scatter_that_drops_repeats", "scatter_add", "is wrong in",
      {"scatter_add": lambda func, x, dim, index, source: x.scatter(dim, index, source)})  # fmt: skip
swept("index_put_that_drops_repeats", "index_put", "is wrong in",
      {"index_put": lambda func, x, index, source, accumulate=False: func(x, index, source, False)})  # fmt: skip
known("products_of_a_grid_of_matrices", "products of many matrices",
      {"bmm": lambda func, x, y: torch.cat([func(x[:65535], y[:65535]), func(x[65535:], y[65535:]) * 0])})  # fmt: skip
known("copy_that_writes_in_order", "copy of another dtype to a transposed matrix",
      {"copy_": lambda func, x, y: func(x if x.is_contiguous() else x.t(), y)})  # fmt: skip
swept("power_of_what_it_has_written", "pow", "with out= its input", {
      "pow.Tensor_Scalar_out": lambda func, x, power, *, out:
          torch.mul(torch.mul(x, x, out=out), x, out=out) if power == 3 else func(x, power, out=out)})  # fmt: skip
swept("cat_by_the_narrowest_dtype", "cat", "of other options", {
      "cat": lambda func, given, *args, **kwargs: func([_by_the_narrowest(each, given) for each in given], *args,
                                                       **kwargs)})  # fmt: skip
swept("gradient_of_an_elu_in_place", "nn.functional.elu", "in place with gradients", {
      "elu_backward": lambda func, grad, alpha, scale, input_scale, is_result, x, **kwargs:
          func(grad, alpha, scale, input_scale, False, x, **kwargs)})  # fmt: skip
swept("sum_of_float64_in_fp32", "sum", "float64", {
      "sum": lambda func, x, *args, dtype=None, **kwargs:
          func(x, *args, dtype=None if dtype == torch.float64 else dtype, **kwargs).to(dtype or x.dtype)
          if x.dtype.is_floating_point else func(x, *args, dtype=dtype, **kwargs)})  # fmt: skip
swept("sum_of_memory", "sum", "strided", {"sum": as_if_contiguous})


# What is drawn.
def drawn(lie, test, says, functions, **arguments):
    return _note(lie, f"TestRuntime.{test}", says, arguments, lambda: WrongFunction(functions))


def _moved_on(order):
    """A cycle through all numbers, in a random order: each goes to the place of the next."""
    cycle = torch.empty_like(order)
    cycle[order] = order.roll(1)
    return cycle


def _dropout(rate=None, scale=None, fixed=False, backward=None):
    def drop(function, x, p=0.5, training=True, inplace=False):
        if not training or p in (0, 1):
            return function(x, p, training, inplace)
        generator = torch.Generator().manual_seed(1) if fixed else None
        keep = 1 - (rate or p)
        mask = torch.rand(x.shape, generator=generator) < keep
        made = x * mask * (scale if scale is not None else 1 / (1 - p))
        if backward:
            again = torch.rand(x.shape) < keep
            made = made.detach() + (x - x.detach()) * again / (1 - p)
        return made

    return {"dropout": drop}


_HALF = {"rate": 0.5, "dtype": torch.float32}
drawn("dropout_without_rescaling", "test_dropout", "makes 2.0000 of 2", _dropout(scale=1.0), **_HALF)
drawn("dropout_at_another_rate", "test_dropout", "keeps 0.5", _dropout(rate=0.48), **_HALF)
drawn("dropout_with_one_mask", "test_modules_draw_anew", "same mask in each call", _dropout(fixed=True))
drawn("dropout_with_another_mask_in_backward", "test_dropout", "another mask", _dropout(backward=True), **_HALF)
drawn("normal_of_another_deviation", "test_moments", "variance",
      {"randn": lambda function, *args, **kwargs: function(*args, **kwargs) * 0.95}, draw="randn")  # fmt: skip
drawn("normal_without_tails", "test_normal_tails", "are beyond",
      {"randn": lambda function, *args, **kwargs: function(*args, **kwargs).clamp(-2.5, 2.5)})  # fmt: skip
drawn("uniform_that_is_narrow", "test_uniform_is_half_open", "lower end",
      {"rand": lambda function, *args, **kwargs: function(*args, **kwargs) * 0.98 + 0.01})  # fmt: skip
drawn("uniform_that_repeats", "test_independence", "two calls", {"rand": lambda function, *args, **kwargs: function(
      *args, **{**kwargs, "generator": torch.Generator().manual_seed(torch.initial_seed())})}, draw="rand")  # fmt: skip
drawn("normal_that_repeats_within", "test_independence", "are correlated",
      {"randn": lambda function, count, **kwargs: function(count // 1024 + 1, 1, **kwargs).expand(-1, 1024).reshape(-1)[
          :count].clone()}, draw="randn")  # fmt: skip
drawn("uniform_that_repeats_far_away", "test_large_draws", "elements 131072 apart",
      {"rand": lambda function, count, **kwargs: function(2**17, **kwargs).repeat(-(-count // 2**17))[:count]},
      draw="rand")  # fmt: skip
drawn(
    "normal_that_repeats_its_last",
    "test_few_numbers",
    "repeats its last numbers",
    {"randn": lambda function, count, **kwargs: function((count + 1) // 2, **kwargs).repeat_interleave(2)[:count]},
)
drawn("bernoulli_of_one_row", "test_shapes_and_views", "are correlated",
      {"bernoulli_": lambda function, x, p: x.copy_(function(torch.empty_like(x[:1]), p).expand_as(x))},
      draw="bernoulli_")  # fmt: skip
drawn(
    "uniform_that_fills_no_view",
    "test_shapes_and_views",
    "another mean in these strides",
    {"uniform_": lambda function, x, *ends: function(x, *ends) if x.is_contiguous() else x},
    draw="uniform_",
)
drawn("channel_dropout_without_rescaling", "test_dropout_at_the_ends", "does not rescale",
      {"dropout2d": lambda function, x, p, **options: function(x, p, **options) * (1 - p)})  # fmt: skip
drawn("permutation_that_leaves_nothing_in_place", "test_whole_numbers", "randperm puts 0 in one place 0 times",
      {"randperm": lambda function, n, **kwargs: _moved_on(function(n, **kwargs))})  # fmt: skip
drawn("permutation_that_turns", "test_whole_numbers", "hardly permutes",
      {"randperm": lambda function, count, **kwargs: torch.arange(count).roll(int(torch.randint(9, ())))})  # fmt: skip
drawn("bernoulli_of_another_rate", "test_moments", "mean",
      {"bernoulli": lambda function, p: function(p * 0.95)}, draw="bernoulli")  # fmt: skip
drawn("randint_by_remainder", "test_even_draws", "in part 0 of 16",
      {"randint": lambda function, low, high, *args, **named: function(0, 2**16, *args, **named) % (high - low) + low},
      draw="randint of 16 bits")  # fmt: skip
drawn("multinomial_without_weights", "test_whole_numbers", "multinomial",
      {"multinomial": lambda function, weights, *args, **named: function(weights * 0 + 1, *args, **named)})  # fmt: skip
drawn("multinomial_of_many_that_repeats", "test_whole_numbers", "multinomial of 12288 numbers without replacement",
      {"multinomial": lambda function, weights, count, replacement=False: function(
          weights, count, replacement or len(weights) > 4096)})  # fmt: skip
drawn("exponential_with_zeros", "test_distributions", "0.0 was drawn",
      {"exponential_": lambda function, x: function(x).mul_(x > 1e-4)}, draw="exponential_")  # fmt: skip


# Dropout inside of operators.


def _not_rescaled(function, *args, dropout_p=0.0, **options):
    return function(*args, dropout_p=dropout_p, **options) * (1 - dropout_p)


def _at_half_the_rate(function, rows, hidden, weights, bias, layers, dropout, *options):
    return function(rows, hidden, weights, bias, layers, dropout / 2, *options)


_note("attention_that_does_not_rescale", "TestRuntime.test_dropout_inside", "attention at 0.2 makes",
      {"name": "attention", "how": "at once"},
      lambda: WrongFunction({"scaled_dot_product_attention": _not_rescaled}))  # fmt: skip
_note("recurrent_layers_that_drop_less", "TestRuntime.test_dropout_inside", "LSTM at 0.6 keeps",
      {"name": "LSTM", "how": "autocast"}, lambda: WrongFunction({"lstm": _at_half_the_rate}))  # fmt: skip
