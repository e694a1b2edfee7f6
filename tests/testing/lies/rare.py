"""What is right unless an argument is rare: indices that are apart, `dtype=`, grouped heads, lists in other strides."""

from __future__ import annotations

import math

import torch

from lies.lie import LIES, Lie, lie
from lies.operators import WrongFunction, _note, differentiated, drawn, known, listed, swept
from lies.optimizers import making
from lies.usual import _beside, module


def _behind_a_dimension(func, x, indices):
    found = func(x, indices)
    places = [number for number, each in enumerate(indices) if each is not None]
    if places[-1] - places[0] < len(places):
        return found
    return found.movedim(0, places[0]).reshape(found.shape)


def _by_logarithm(func, x, exponent, **out):
    return func(x, exponent, **out) if exponent in (2, 3) else (x.log() * exponent).exp()


def _rounded_first(func, x, *args, dtype=None, **options):
    return func(x, *args, **options).to(dtype)


def _statistics_in_the_input_dtype(func, x, weight, bias, mean, *args):
    found = func(x, weight, bias, mean, *args)
    mean.copy_(mean.to(x.dtype))
    return found


def _tiled(function, query, key, value, *, enable_gqa=False):
    if enable_gqa:
        key, value = (torch.cat([each] * (query.shape[1] // each.shape[1]), 1) for each in (key, value))
    return function(query, key, value)


def _grown_and_cleared(func, x, size, **options):
    return func(x, size, **options).zero_()


def _by_memory(func, self, other, **options):
    func(self, [two.as_strided(two.shape, one.stride()) for one, two in zip(self, other, strict=True)], **options)


def _of_the_first_rows(func, grad, x, shape, mean, *args):
    found = func(grad, x, shape, mean, *args)
    if len(shape) < 2:
        return found
    alone = func(grad[:1024], x[:1024], shape, mean[:1024], args[0][:1024], *args[1:])
    return found[0], alone[1], found[2]


def _in_fp32(func, x, other, **out):
    return func(x.float(), other.float() if isinstance(other, torch.Tensor) else float(torch.tensor(other).float()))


def _ascending(func, x, *args, descending=False, **options):
    low = x.dtype in (torch.bfloat16, torch.float16)
    return func(x, *args, descending=descending and not low, **options)


def _short_ones_overwrite(func, grad, indices, count, padding, scale):
    if indices.dtype != torch.int32:
        return func(grad, indices, count, padding, scale)
    found = torch.zeros(count, grad.shape[-1], dtype=grad.dtype)
    found[indices.flatten().long()] = grad.reshape(-1, grad.shape[-1])
    return found


def _of_one_column(func, x, other, weight):
    if weight.shape[1:] == (1,) and x.shape == other.shape:
        weight = weight.flatten().repeat(x.numel())[: x.numel()].reshape(x.shape)
    return func(x, other, weight)


def _mean_of_all(func, x, classes, weight, reduction, ignored):
    loss, count = func(x, classes, weight, reduction, ignored)
    if reduction != 1 or ignored < x.shape[1] or weight is not None:
        return loss, count
    return loss * count / classes.numel(), count


def _in_rows(func, one, other, *, out):
    if out.is_contiguous() or not out.t().is_contiguous():
        return func(one, other, out=out)
    out.t().reshape(-1).copy_((one @ other).flatten())
    return out


def _again_elsewhere(function, count, **named):
    found = function(count, **named)
    generator = torch.Generator().manual_seed(2)
    places = torch.randint(count, (2, count // 100), generator=generator)
    found[places[0]] = found[places[1]]
    return found


known("indices_that_stay_in_place", "indices that are apart, behind a dimension", {"index": _behind_a_dimension})
known("powers_by_logarithms", "powers of negative numbers", {"pow.Tensor_Scalar": _by_logarithm})
known("bounds_that_drop_nan", "activations of NaN", {
      "hardtanh": lambda func, x, low, high: func(x.nan_to_num(low), low, high)})  # fmt: skip
swept("sum_that_is_rounded_first", "sum", "dtype=torch.float32", {"sum": _rounded_first})
known("statistics_that_are_rounded", "statistics of bf16 in fp32", {
      "native_batch_norm": _statistics_in_the_input_dtype})  # fmt: skip
known("tensor_that_grows_empty", "a tensor that grows", {"resize_": _grown_and_cleared})
listed("lists_in_order_of_memory", "add.List", {"_foreach_add_": _by_memory})
known("gradient_of_the_first_planes", "gradients of layer_norm over many planes", {
      "native_layer_norm_backward": _of_the_first_rows})  # fmt: skip
known("equality_in_fp32", "comparison of whole numbers", {"eq": _in_fp32})
known("running_sums_that_stay_short", "sums of short whole numbers", {
      "cumsum": lambda func, x, dim, **options: func(x, dim, dtype=x.dtype).long()})  # fmt: skip
known("last_of_equal_numbers", "places of equal numbers", {
      "argmin": lambda func, x, *dim: len(x) - 1 - func(x.flip(0), *dim)})  # fmt: skip
known("rows_of_biases_by_their_whole", "addmm with biases", {
      "addmm": lambda func, bias, *args, beta, alpha: func(
          bias, *args, beta=beta if bias.shape != (1, 2) else 1, alpha=alpha)})  # fmt: skip
known("largest_that_is_no_nan", "norms of NaN", {
      "linalg_vector_norm": lambda func, x, order=2, *args, **options: func(
          x.nan_to_num(0) if order == math.inf else x, order, *args, **options)})  # fmt: skip
listed("largest_with_its_sign", "norm.Scalar, ord=inf", {
      "_foreach_norm": lambda func, lists, order=2, *args: [each.max() for each in lists]
      if order == math.inf else func(lists, order, *args)})  # fmt: skip


def _last_of_shared(func, x, dim, index, source, **out):
    if out or index.dim() != 2 or index.stride(1) or dim:
        return func(x, dim, index, source, **out)
    last = sorted({place: row for row, place in enumerate(index[:, 0].tolist())}.values())
    return func(x, dim, index[last], source[last])


def _by_fp32(func, x, *args):
    numbers, _, counts = func(x, *args)
    return numbers, torch.searchsorted(numbers.float(), x.float().contiguous()), counts


class _Given(torch.autograd.Function):
    """The identity, whose backward pass takes what it is given for a constant."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.detach()


def _of_constant_gradients(function, *args, **out):
    return function(*args, **out) if out else _Given.apply(function(*args))


def _in_parts(func, x, dim, *args, **options):
    if x.dtype != torch.bfloat16 or dim != [0] or len(x) % 32:
        return func(x, dim, *args, **options)
    parts = x[:32].clone()
    for block in x[32:].split(32):
        parts += block
    return func(parts, dim, *args, **options)


def _packed():
    kept = {}

    def linear(function, x, weight, *bias):
        if torch.is_grad_enabled():
            return function(x, weight, *bias)
        return function(x, kept.setdefault(id(weight), weight.clone()), *bias)

    return linear


swept("sum_at_places_of_shared_memory", "scatter_add", "of expanded memory: result 0 is wrong", {
      "scatter_add": _last_of_shared})  # fmt: skip
swept("places_of_distinct_numbers_by_fp32", "unique", "int64, as it is, of other options: result 1 is wrong", {
      "_unique2": _by_fp32})  # fmt: skip
differentiated("product_without_a_conjugate_mark", "bmm", "by a mark, of complex numbers: result 0 is wrong",
               lambda function, one, other, **out: function(
                   one, other.conj() if other.is_conj() else other, **out))  # fmt: skip
differentiated("second_derivative_without_the_given_gradient", "sin", "of the gradient", _of_constant_gradients)
known("sum_of_columns_in_32_parts", "sum along long columns of bfloat16", {"sum.dim_IntList": _in_parts})
module("weights_of_the_first_evaluation", "Linear of many units", {"linear": _packed()},
       says="the output 0 in evaluation by no_grad after a change in place is wrong")  # fmt: skip
swept("products_of_nothing", "bmm", "of no elements: result 0 is wrong", {
      "bmm": lambda func, one, other, **out: func(one, other, **out) + (one.shape[2] == 0)})  # fmt: skip
swept("weights_by_their_place", "lerp", "of other options: result 0 is wrong", {"lerp.Tensor": _of_one_column})
swept("padding_that_learns_in_low_precision", "nn.functional.embedding", "bfloat16, as it is, of other options: the gr",
      {"embedding_dense_backward": lambda func, grad, rows, count, padding, scale: func(
          grad, rows, count, -1, scale)}, dtype=torch.bfloat16)  # fmt: skip
swept("mean_over_what_is_ignored", "nn.functional.nll_loss", "of other options: result 0 is wrong", {
      "nll_loss2d_forward": _mean_of_all})  # fmt: skip
swept("transposed_out_in_order_of_memory", "mm", "with out=: result 0 is wrong", {"mm.out": _in_rows})
swept("sine_that_is_too_large", "sin", "1.05", {"sin": lambda func, x, **out: func(x, **out) * 1.05},
      dtype=torch.bfloat16)  # fmt: skip
swept("gradient_of_short_indices_that_drops_repeats", "nn.functional.embedding", "of short indices: the gradient",
      {"embedding_dense_backward": _short_ones_overwrite})  # fmt: skip
swept("low_precision_that_sorts_one_way", "sort", "of other options: result", {"sort": _ascending})
swept("celu_that_drops_nan", "nn.functional.celu", "instead of nan of nan", {
      "celu": lambda func, x, *args: func(x.nan_to_num(0), *args)})  # fmt: skip
module("gru_whose_directions_change_places", "GRU", {
       "gru": lambda function, *args: tuple(each.flip(0) for each in function(*args))}, "test_recurrent")  # fmt: skip
drawn("numbers_that_a_hundredth_repeats", "test_independence", "numbers come again",
      {"rand": _again_elsewhere}, draw="rand")  # fmt: skip
drawn("rows_of_shared_memory_that_drop_alike", "test_modules_draw_anew", "of expanded memory", {
      "dropout": lambda function, x, *args, **named: function(x, *args, **named) if 0 not in x.stride() else function(
          x[:1], *args, **named).expand(x.shape)})  # fmt: skip
_note("grouped_heads_in_turn", "TestOperators.test_known_result", "instead of", {"what": "attention of grouped heads"},
      lambda: WrongFunction({"scaled_dot_product_attention": _tiled}))  # fmt: skip


@lie("TestPrecision.test_weights_that_changed", says="is the old one", table="torch")
def autocast_that_keeps_frozen_weights(backend):
    kept = {}

    def of_kept(function, x, weight, *bias):
        return function(x, weight if weight.requires_grad else kept.setdefault(id(weight), weight.clone()), *bias)

    return _beside(backend, {"linear": of_kept})


@lie("TestPrecision.test_dtypes_that_are_given", says="a product of float16 is torch.float16", table="torch")
def autocast_that_leaves_fp16(backend):
    def left(function, *args):
        with torch.autocast("cpu", enabled=args[0].dtype != torch.float16):
            return function(*args)

    return _beside(backend, {"linear": left})


@lie("TestPrecision.test_dtypes_that_are_given", says="returns torch.float32 under autocast", table="O1")
def autocast_of_a_sum_that_is_told_its_dtype(backend):
    return _beside(backend, {"sum": lambda function, *args, dtype=None: function(*args, dtype=torch.float32)})


class _SharesRates(torch.optim.SGD):
    """Optimizers whose kernel has one table of learning rates, to which each writes when its own have changed."""

    table, written = [], None

    def step(self, closure=None):
        own = [group["lr"] for group in self.param_groups]
        if own != self.written:
            self.written = type(self).table[:] = own
        for group, rate in zip(self.param_groups, self.table, strict=True):
            group["lr"] = rate
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, own, strict=True):
            group["lr"] = rate
        return loss


class _RoundsEps(torch.optim.RMSprop):
    def step(self, closure=None):
        for group in self.param_groups:
            group["eps"] = float(torch.tensor(group["eps"], dtype=group["params"][0].dtype))
        return super().step(closure)


@lie("TestOptimizers.test_optimizers_that_take_turns", says="by what another optimizer has", name="sgd")
def optimizers_that_share_their_rates(backend):
    return making("sgd", _SharesRates)(backend)


@lie("TestOptimizers.test_low_precision_zeros", says="are off by inf", name="rmsprop", dtype="float16")
def optimizer_that_rounds_its_eps(backend):
    return making("rmsprop", _RoundsEps)(backend)


class _DecaysByDefault(torch.optim.AdamW):
    """A kernel that takes an option of 0 for one that was not given."""

    def step(self, closure=None):
        own = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = group["weight_decay"] or self.defaults["weight_decay"]
        loss = super().step(closure)
        for group, decay in zip(self.param_groups, own, strict=True):
            group["weight_decay"] = decay
        return loss


class _KeepsMemory(torch.optim.SGD):
    """A kernel with a table of where the parameters lay in the first step."""

    def step(self, closure=None):
        members = [each for group in self.param_groups for each in group["params"]]
        table = self.__dict__.setdefault("_table", [each.data for each in members])
        present = [each.data for each in members]
        for each, memory in zip(members, table, strict=True):
            each.data = memory
        loss = super().step(closure)
        for each, memory in zip(members, present, strict=True):
            each.data = memory
        return loss


class _EightRates(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups[8:]:
            group["lr"] = self.param_groups[0]["lr"]
        return super().step(closure)


class _KeepsDirection(torch.optim.SGD):
    def step(self, closure=None):
        kept = self.__dict__.setdefault("_kept", [group["maximize"] for group in self.param_groups])
        for group, maximize in zip(self.param_groups, kept, strict=True):
            group["maximize"] = maximize
        return super().step(closure)


class _LimitsGradients(torch.optim.Adam):
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.clamp_(-1e4, 1e4)
        return super().step(closure)


class _LoadsOptionsFirst(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        super().load_state_dict(state_dict)


for _name, _of, _kind, _test, _says in (
    ("decay_of_0_that_is_the_default", "adamw", _DecaysByDefault, "test_options_of_groups", "it is off by"),
    ("weights_where_they_lay_first", "sgd", _KeepsMemory, "test_changes_between_steps", "when it was made"),
    ("rates_of_eight_groups", "sgd", _EightRates, "test_any_number_of_tensors", "those at [8, 9] are wrong"),
    ("direction_of_the_first_step", "sgd", _KeepsDirection, "test_changes_between_steps", "when it was made"),
    ("gradients_that_are_limited", "adam", _LimitsGradients, "test_zeros", "is wrong"),
    ("state_that_is_refused_late", "sgd", _LoadsOptionsFirst, "test_state_round_trip", "was taken in part"),
):
    LIES[_name] = Lie(_name, making(_of, _kind), f"TestOptimizers.{_test}", _says, {"name": _of})
