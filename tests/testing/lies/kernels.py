"""Kernels that are right for memory of their own, few elements and small numbers only."""

from __future__ import annotations

import dataclasses
import threading
from itertools import takewhile
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from accelcore.optim.formulas import FORMULAS
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from lies.lie import LIES, Lie
from lies.operators import SWEPT, Wrong, WrongFunction, _note, differentiated, drawn, known, listed, on_a_copy, swept
from lies.optimizers import making


def _itself(func, x, *args, **kwargs):
    return x if bool((x >= 0).all()) else func(x, *args, **kwargs)


def _writes_first(func, *args, out, **kwargs):
    return func(*args, out=out.zero_(), **kwargs)


def _writes_first_in_place(func, self, other):
    before = self.clone()
    return self.zero_().copy_(torch.mul(before, other))


def _from_the_beginning(func, *args, **kwargs):
    def read(value):
        if not isinstance(value, torch.Tensor) or not value.is_contiguous():
            return value
        return value.as_strided(value.shape, value.stride(), 0)

    return func(*pytree.tree_map(read, args), **kwargs)


def _of_dense_gradients(func, gradient, *args, **kwargs):
    if gradient.numel() and not gradient.is_contiguous():
        size = gradient.untyped_storage().nbytes() // gradient.element_size() - gradient.storage_offset()
        if size >= gradient.numel():
            gradient = gradient.as_strided(gradient.shape, torch.empty(gradient.shape).stride())
    return func(gradient, *args, **kwargs)


def _in_blocks(func, x, dim, *args, **kwargs):
    if not x.dim() or x.shape[dim] <= 256:
        return func(x, dim, *args, **kwargs)
    return torch.cat([func(part, dim, *args, **kwargs) for part in x.split(256, dim)], dim)


def _of_images(func, x, *args):
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        x = x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())
    return func(x, *args)


def _through_fp32(func, x, *args, **kwargs):
    if x.dtype != torch.int64:
        return func(x, *args, **kwargs)
    return func(x.float(), *args, **{name: value for name, value in kwargs.items() if name != "dtype"}).long()


def _in_one_grid(func, x):
    found = func(x)
    found.reshape(-1)[65_535:] = x.reshape(-1)[65_535:]
    return found


def _of_biased_variance(func, x, weight, bias, mean, variance, training, momentum, eps):
    before = None if variance is None else variance.clone()
    found = func(x, weight, bias, mean, variance, training, momentum, eps)
    if training and before is not None:
        fresh = (variance - (1 - momentum) * before) * x.shape[1] / x.numel()
        variance.sub_(fresh)
    return found


def _spoils_its_input(func, x, *args):
    found = func(x, *args)
    x.abs_()
    return found


def _of_the_first_matrix(func, a, b, **options):
    found = func(a, b, **options)
    if len(a) > 1 and 0 in (a.stride(0), b.stride(0)):
        found[1:] = 0
    return found


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        found = torch.sigmoid(x)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx, gradient):
        (found,) = ctx.saved_tensors
        return gradient * (found * (1 - found)).detach()


def _of_the_first_order(function, x, **options):
    return function(x, **options) if options else _FirstOrder.apply(x)


def _accumulated_in_bf16(func, a, b, **kwargs):
    if a.dtype != torch.bfloat16:
        return func(a, b, **kwargs)
    total = torch.zeros(len(a), b.shape[1], dtype=a.dtype)
    for column, row in zip(a.t(), b, strict=True):
        total = total + column[:, None] * row
    return total


# Memory.
swept("result_that_is_its_input", "nn.functional.relu", "shares memory with an argument", {"relu": _itself})
swept("transpose_that_copies", "transpose", "is a copy", {"transpose": lambda func, *args: func(*args).clone()})
swept("result_that_is_expanded", "zeros_like", "has elements that share memory",
      {"zeros_like": lambda func, x, **kwargs: torch.zeros((), dtype=x.dtype).expand(x.shape)})  # fmt: skip
swept("out_that_is_written_before_it_is_read", "exp", "with out= its input", {"exp.out": _writes_first})
swept("product_with_itself_that_is_zero", "mul", "of one tensor twice", {"mul_": _writes_first_in_place})
swept("sum_that_ignores_the_offset", "add", "strided", {"add": _from_the_beginning})
swept("backward_of_dense_gradients", "tanh", "the gradient", {"tanh_backward": _of_dense_gradients})
swept("convolution_that_ignores_channels_last", "nn.functional.conv2d", "channels last", {"convolution": _of_images})
swept("running_variance_that_is_biased", "nn.functional.batch_norm", "argument 2 is wrong",
      {"native_batch_norm": _of_biased_variance, "_native_batch_norm_legit": _of_biased_variance})  # fmt: skip
swept("cumsum_that_spoils_its_input", "cumsum", "it changes its argument 0", {"cumsum": _spoils_its_input})
swept("product_of_the_first_matrix", "bmm", "of expanded memory", {"bmm": _of_the_first_matrix})

# Derivatives.
differentiated("derivative_of_the_first_order", "sigmoid", "of the gradient", _of_the_first_order)

# Many elements, many tensors, large whole numbers.
swept("relu_of_one_grid", "nn.functional.relu", "of many elements", {"relu": _in_one_grid})
swept("cumsum_in_blocks", "cumsum", "of many elements", {"cumsum": _in_blocks})
swept("softmax_in_blocks", "softmax", "of many elements", {"_softmax": _in_blocks})
swept("embedding_of_256_rows", "nn.functional.embedding", "of many elements",
      {"embedding": lambda func, weight, index, *args: func(weight, index % 256, *args)})  # fmt: skip
swept("remainder_of_whole_numbers_of_c", "remainder", "int64",
      {"remainder": lambda func, x, y, **kwargs: torch.fmod(x, y) if x.dtype == torch.int64 else func(x, y, **kwargs)},
      torch.int64)  # fmt: skip
known("product_that_adds_in_bf16", "product of long rows of bf16", {"mm": _accumulated_in_bf16})
swept("sum_of_whole_numbers_in_fp32", "sum", "int64", {"sum": _through_fp32})
swept("running_sum_of_whole_numbers_in_fp32", "cumsum", "int64", {"cumsum": _through_fp32})
listed("norms_of_32_tensors", "norm.Scalar", {"_foreach_norm": lambda func, tensors, *args: func(
      [tensor * (number < 32) for number, tensor in enumerate(tensors)], *args)})  # fmt: skip
known("concatenation_of_64_tensors", "concatenation of many tensors", {"cat": lambda func, tensors, *args: func(
      [tensor * (number < 64) for number, tensor in enumerate(tensors)], *args)})  # fmt: skip
known("concatenation_that_begins_again", "concatenation of many columns", {"cat": lambda func, tensors, *args: func(
      [tensors[number % 128] for number in range(len(tensors))], *args)})  # fmt: skip
known("stack_that_begins_again", "stack of many tensors", {"stack": lambda func, tensors, *args: func(
      [tensors[number % 128] for number in range(len(tensors))], *args)})  # fmt: skip
listed("list_that_ends_with_nothing", "mul.Scalar", {"_foreach_mul_": lambda func, tensors, *args: func(
      [*takewhile(torch.numel, tensors)], *args)})  # fmt: skip

# Generators.
drawn("generator_that_is_ignored", "test_own_generator", "draws other numbers",
      {"rand": lambda function, *args, generator=None, **kwargs: function(*args, **kwargs)}, draw="rand")  # fmt: skip


class _BehindAutograd(torch.optim.SGD):
    """A kernel that writes to the parameters' memory, and increments no version."""

    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.data.sub_(group["lr"] * value.grad)
        return loss


LIES["step_that_autograd_does_not_see"] = Lie(
    "step_that_autograd_does_not_see", making("sgd", _BehindAutograd), "TestOptimizers.test_step_leaves_the_rest",
    "autograd cannot see", {"name": "sgd"},
)  # fmt: skip


def _naive_logsumexp(func, x, dim, keepdim=False, **out):
    if out:
        return func(x, dim, keepdim, **out)
    top = x.amax(dim, keepdim=True)
    return ((x - top).exp().sum(dim, keepdim=True).log() + top).reshape(func(x, dim, keepdim).shape)


def _with_what_it_ignores(func, x, *args, beta=1, **kwargs):
    result = func(x, *args, beta=beta, **kwargs)
    return result + x * 0 if beta == 0 else result


def _causal_for_equal_lengths(func, q, k, v, rate=0.0, is_causal=False, **kwargs):
    return func(q, k, v, rate, is_causal and q.shape[-2] == k.shape[-2], **kwargs)


def _in_eights(func, x, shape, *args):
    result, *others = func(x, shape, *args)
    return (result * 1.01 if shape[-1] > 8 and shape[-1] % 8 else result), *others


def _in_fp32(func, x, y, **out):
    mixed = x.dim() > y.dim() == 0 and not (x.is_meta or out)
    return func(x.float(), y) if mixed else func(x, y, **out)


class _AddsInAnotherOrder:
    """A sum that is made from the other end in every second call."""

    def __init__(self):
        self._calls = 0

    def __call__(self, function, x, dim, index, source):
        self._calls += 1
        return function(x, dim, index.flip(0), source.flip(0)) if self._calls % 2 else function(x, dim, index, source)


class _RoundsLater(FORMULAS["adamw"]):
    """Converts a loaded state to the parameter's dtype when it steps."""

    _new = False

    def entry(self, group, value):
        self._new = True
        try:
            return super().entry(group, value)
        finally:
            self._new = False

    def state_dtype(self, group, value):
        return super().state_dtype(group, value) if self._new else value.dtype


def _with_a_route_that_rounds(backend):
    made = Optimizers()
    register_torch_optimizers(made, fused=())
    made.register("adamw", "late", _RoundsLater, priority=99, memory="any")
    return dataclasses.replace(backend, optimizers=made)


swept("logsumexp_of_infinities", "logsumexp", "with inf: result", {"logsumexp": _naive_logsumexp})
swept("product_that_reads_what_it_ignores", "baddbmm", ": result 0 is wrong in", {"baddbmm": _with_what_it_ignores})
swept("attention_that_is_causal_for_equal_lengths", "nn.functional.scaled_dot_product_attention", "is wrong in",
      {"_scaled_dot_product_flash_attention_for_cpu": _causal_for_equal_lengths})  # fmt: skip
swept("embedding_gradient_that_is_never_scaled", "nn.functional.embedding", "the gradient",
      {"embedding_dense_backward": lambda func, *args: func(*args[:-1], False)})  # fmt: skip
swept("maximum_in_the_dtype_of_a_scalar", "maximum", "[torch.float32], not [torch.bfloat16]", {"maximum": _in_fp32})
LIES["layer_norm_in_eights"] = Lie(
    "layer_norm_in_eights", lambda backend: backend, "TestOperators.test_rows", "of rows of 9: result",
    {"name": "layer_norm"}, around=lambda: Wrong({"native_layer_norm": _in_eights}),
)  # fmt: skip
drawn("sum_in_another_order_each_time", "test_deterministic_sums", "adds in another order",
      {"index_add": _AddsInAnotherOrder()}, name="index_add")  # fmt: skip
LIES["state_that_is_rounded_after_it_was_loaded"] = Lie(
    "state_that_is_rounded_after_it_was_loaded", _with_a_route_that_rounds,
    "TestOptimizers.test_low_precision_state", "in the step after it was loaded",
    {"name": "adamw", "dtype": "bfloat16"},
)  # fmt: skip


# What only some contexts, and only some views, show.


def _total_by_number(func, x, target, weight, reduction, ignored):
    total, _ = func(x, target, weight, 2, ignored)
    count = (target != ignored).sum().to(x.dtype)
    return (total / count, count) if reduction == 1 and weight is not None else func(
        x, target, weight, reduction, ignored)  # fmt: skip


def _of_memory(function, tensors, *args, **kwargs):
    raw = [torch._neg_view(each) if each.is_neg() else each for each in tensors]
    return function(raw, *args, **kwargs)


def _widest(function, *args, **kwargs):
    found = function(*args, **kwargs)
    single = any(each.dim() == 0 and each.dtype == torch.float32 for each in args if isinstance(each, torch.Tensor))
    return found.float() if single and found.dtype == torch.bfloat16 and not found.is_meta else found


def _by_columns(function, x, **kwargs):
    return function(x.t()).flip(1) if x.dim() == 2 and bool(x.all()) else function(x, **kwargs)


def _uncounted(function, x, *args):
    with torch.autograd._unsafe_preserve_version_counter(x):
        return function(x, *args)


class _Once(torch.autograd.Function):
    """The gradient of a softmax, which counts as one of a constant."""

    @staticmethod
    def forward(context, x, dim):
        context.save_for_backward(found := x.softmax(dim))
        context.dim = dim
        return found

    @staticmethod
    def backward(context, given):
        found = context.saved_tensors[0].detach()
        return found * (given - (found * given).sum(context.dim, keepdim=True)), None


def _once(function, x, dim, *args, **kwargs):
    plain = x.dim() < 2 or dim % x.dim() == x.dim() - 1 or args or kwargs
    return function(x, dim, *args, **kwargs) if plain else _Once.apply(x, dim)


swept("layer_norm_with_another_eps_under_no_grad", "nn.functional.layer_norm", "under no_grad", {
      "native_layer_norm": lambda func, x, shape, w, b, eps: func(
          x, shape, w, b, eps if torch.is_grad_enabled() else 4 * eps + 1e-4)})  # fmt: skip
swept("mean_that_ignores_weights_of_images", "nn.functional.nll_loss", "is wrong in",
      {"nll_loss2d_forward": _total_by_number})  # fmt: skip
differentiated("negatives_that_are_read_from_memory", "cat", "by a mark", _of_memory)
differentiated("choice_of_the_widest_dtype", "where", "[torch.float32], not [torch.bfloat16]", _widest)
differentiated("places_by_columns", "nonzero", "all alike", _by_columns)
differentiated("gradient_of_columns_that_is_constant", "softmax", "of the gradient: ", _once)
SWEPT.append("fill_that_is_not_counted")
listed("norm_of_the_last_that_is_left_out", "norm.Scalar", {
      "_foreach_norm": lambda func, tensors, *args: [
          *func(tensors, *args)[:-1], torch.zeros((), dtype=tensors[-1].dtype)]})  # fmt: skip
_note("fill_that_is_not_counted", "TestOperators.test_operator", "does not count as a change", {"name": "masked_fill"},
     lambda: WrongFunction({"masked_fill_": _uncounted}))  # fmt: skip


def _numbers_of_the_thread():
    own, right = torch.Generator(), torch.rand

    def rand(*args, **kwargs):
        elsewhere = threading.current_thread() is not threading.main_thread()
        return right(*args, **kwargs, **({"generator": own} if elsewhere else {}))

    return patch.object(torch, "rand", rand)


_note("generator_of_each_thread", "TestRuntime.test_draws_in_threads", "another thread draws other numbers",
     {"draw": "rand"}, _numbers_of_the_thread)  # fmt: skip


def _as_it_lies(function, to, other, non_blocking=False):
    reads = non_blocking and to.is_contiguous() and not other.is_contiguous()
    return function(to, other.t().reshape(to.shape) if reads else other)


_note("copy_of_memory_that_is_not_awaited", "TestRuntime.test_copies_into_other_strides", "True} the values are others",
     {"layout": "transposed"}, lambda: WrongFunction({"copy_": _as_it_lies}))  # fmt: skip
swept("activation_in_place_on_a_copy", "nn.functional.relu", "in place", {"relu_": on_a_copy})


def _whole_tiles_count(func, x, target, weight, reduction, ignored):
    """Count rows that are ignored in a mean, if all of their tile are."""
    loss, total = func(x, target, weight, reduction, ignored)
    tiles = target[: len(target) // 256 * 256].view(-1, 256) if target.dim() else target
    counted = total + 256 * (tiles == ignored).all(-1).sum() if reduction == 1 and len(target) > 255 else total
    return loss * total / counted, counted


known("mean_that_counts_tiles_of_ignored_rows", "loss that ignores a long run", {
      "nll_loss_forward": _whole_tiles_count})  # fmt: skip


def _squares_its_result(func, gradient, result):
    found = func(gradient, result)
    result.data.mul_(result)
    return found


swept("gradient_that_overwrites_what_it_reads", "tanh", "is wrong in", {
      "tanh_backward": _squares_its_result})  # fmt: skip


def _from_the_middle(function, count, **options):
    """Draw, and leave the generator where it was after half of the numbers."""
    before = torch.get_rng_state()
    function(count // 2, **options)
    middle = torch.get_rng_state()
    torch.set_rng_state(before)
    found = function(count, **options)
    torch.set_rng_state(middle)
    return found


drawn("uniform_that_repeats_its_second_half", "test_independence", "two calls are correlated",
      {"rand": _from_the_middle}, draw="rand")  # fmt: skip
known("padding_that_hides_what_is_behind_it", "gradient of an embedding that pads a long run", {
      "embedding_dense_backward": lambda func, grad, places, *args: func(
          grad, places.where(places.roll(256) != 0, 0), *args)})  # fmt: skip
