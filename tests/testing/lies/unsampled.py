"""What is right unless an argument is none of torch's samples: large matrices, nothing, ties, long ranges."""

from __future__ import annotations

import torch

from lies.lie import LIES, Lie
from lies.operators import Wrong, WrongFunction, _note, as_if_contiguous, differentiated, drawn, known, listed, swept
from lies.optimizers import making

LONGEST = 2  # of the targets


def _ctc(func, chances, targets, *args, **options):
    if targets.dim() == 1:
        places = torch.arange(3)[:, None] * LONGEST + torch.arange(LONGEST)
        targets = targets[places.clamp(max=len(targets) - 1)]
    return func(chances, targets, *args, **options)


def _ctc_backward(func, gradient, chances, targets, *args, **options):
    return _ctc(lambda *given, **named: func(gradient, *given, **named), chances, targets, *args, **options)


def _by_all(func, value, lengths, dim):
    found = func(value, lengths, dim)
    return found if dim == 0 else (value * lengths / value.norm(), found[1])


def _in_order_of_memory(func, images, factor):
    found = func(images, factor)
    if images.is_contiguous():
        return found
    parts = found.view(len(images), images.shape[1], factor**2, *found.shape[2:])
    return parts.transpose(1, 2).reshape(found.shape)


def _places_in_memory(func, x, *args):
    found = func(x, *args)
    return (
        found[0],
        found[1].t().reshape(found[1].shape) if x.dim() == 2 and not x.is_contiguous() else found[1],
        found[2],
    )


def _added_up(func, start, end, step=1, **options):
    found = func(start, end, step, **options)
    return found if isinstance(step, int) else found + found * 1e-4


def _without_repeats(func, x, dim, index, source, reduce, **options):
    if reduce != "prod":
        return func(x, dim, index, source, reduce, **options)
    hit = torch.zeros_like(x).scatter(dim, index, torch.ones_like(source)).bool()
    return torch.where(hit, x * torch.zeros_like(x).scatter(dim, index, source), x)


def _of_the_first_pivots(func, matrices, **options):
    inverse, info = func(matrices, **options)
    return torch.cat([inverse[:1], inverse[1:].roll(1, -1)]), info


def _rounded(func, values, factor):
    return func(values, factor.to(values[0].dtype))


def _tied_to_one(func, gradient, one, other, p, distances):
    equal = (one[:, None] == other[None]).to(one.dtype)
    return func(gradient, one, other, p, distances) + (equal * gradient[..., None]).sum(1)


def _whole_normals(function, rates):
    normals = (torch.randn_like(rates) * rates.sqrt() + rates).floor()
    return normals.where(rates > 30, function(rates))


def _of_the_first(function, rates):
    return function(rates if rates.is_contiguous() else rates[:1, :1].expand_as(rates))


def _without_the_last(function, x, *args):
    return function(x, *args).clamp_(max=8.0)


known("inverse_by_the_first_pivots", "inverse of large matrices", {"linalg_inv_ex": _of_the_first_pivots})
known("determinant_of_nothing_that_is_0", "det of nothing",
      {"_linalg_det": lambda func, x: (x.new_zeros(()), *func(x)[1:])})  # fmt: skip
known("largest_number_of_fp32", "nan_to_num of bfloat16", {
      "nan_to_num": lambda func, x, *args, **out: func(x if out else x.float(), *args, **out).to(x.dtype)})  # fmt: skip
known("sign_of_complex_zero_that_is_none", "signs of complex numbers", {"sgn": lambda func, x: x / x.abs()})
known("targets_that_lie_apart", "ctc_loss of joined targets", {"_ctc_loss": _ctc, "_ctc_loss_backward": _ctc_backward})
known("weight_norm_of_all", "weight_norm of columns", {"_weight_norm_interface": _by_all})
known("shuffle_in_order_of_memory", "pixel_unshuffle of channels last", {"pixel_unshuffle": _in_order_of_memory})
known("places_in_order_of_memory", "distinct numbers by columns", {"_unique2": _places_in_memory})
known("gradient_of_ties", "gradient of cdist where it jumps", {"_cdist_backward": _tied_to_one})
known("range_that_adds_up", "range of many fractions", {"arange": _added_up})
known("factor_of_lists_in_bf16", "multiplication of lists by a tensor, that is, by a number that bf16 cannot hold",
      {"_foreach_mul.Tensor": _rounded})  # fmt: skip
swept("product_of_the_last", "scatter_reduce.prod", "result 0 is", {"scatter_reduce": _without_repeats})
drawn("poisson_that_is_a_whole_normal", "test_distributions", "a share of the numbers is off", {
      "poisson": _whole_normals}, draw="poisson")  # fmt: skip


def _of_neighbours(func, grad, x, weight, biases, stride, *args):
    found = func(grad, x, weight, biases, stride, *args)
    if weight.shape[2:].numel() > 1 or max(stride) == 1:
        return found
    return found[0][..., torch.arange(x.shape[-1]) // stride[-1] * stride[-1]], *found[1:]


swept("gradient_of_points_that_no_kernel_reads", "nn.functional.conv2d", "the gradient 0",
      {"convolution_backward": _of_neighbours})  # fmt: skip
known("sums_of_int8_in_int16", "sums of many torch.int8", {
      "sum.dim_IntList": lambda func, x, *args, **named: func(x, *args, **named).short().long()})  # fmt: skip
known("quotients_without_small_numbers", "small numbers of fp16", {
      "div": lambda func, x, y: torch.where((found := func(x, y)).abs() > 2**-14, found, 0)})  # fmt: skip


drawn("normal_numbers_of_the_default_generator", "test_own_generator", "it draws other numbers, too",
      {"normal_": lambda func, x, *args, generator=None: func(x, *args)}, draw="normal_")  # fmt: skip
known("products_in_32_bits", "product of larger whole numbers",
      {"mul": lambda func, *factors: func(*factors).int().long()})  # fmt: skip


def _mask_of_the_first_query(function, query, key, value, mask):
    if mask.dim() == 4 and mask.shape[2] == 1:
        rest = torch.ones_like if mask.dtype == torch.bool else torch.zeros_like
        mask = torch.cat([mask, rest(mask), rest(mask)], 2)
    return function(query, key, value, mask)


_note("mask_of_the_first_query", "TestOperators.test_known_result", "instead of",
      {"what": "attention by masks of every shape"},
      lambda: WrongFunction({"scaled_dot_product_attention": _mask_of_the_first_query}))  # fmt: skip


class _CountsTwice(torch.optim.Adam):
    """A kernel with a launch for each dtype, which counts the steps of the group."""

    def step(self, closure=None):
        first = self.param_groups[0]["params"][0].dtype
        later = [entry["step"] for value, entry in self.state.items() if value.dtype != first]
        for count in later:
            count.add_(1)
        super().step(closure)
        for count in later:
            count.sub_(1)


class _LoadsMemory(torch.optim.Adam):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for parameter, entry in self.state.items():
            for key, value in entry.items():
                if value.dim() > 1 and value.stride() != parameter.stride():
                    entry[key] = value.contiguous().view(-1).as_strided(parameter.shape, parameter.stride())


class _TakesNeighbours(torch.optim.Adam):
    """A kernel that takes the first moments in order, of parameters with gradients or not."""

    def step(self, closure=None):
        members = self.param_groups[0]["params"]
        for value, neighbour in zip((each for each in members if each.grad is not None), members, strict=False):
            if neighbour is not value and value.shape == neighbour.shape and self.state[value]:
                self.state[value]["exp_avg"].copy_(self.state[neighbour]["exp_avg"])
        super().step(closure)


class _ByImages(torch.optim.Adam):
    def step(self, closure=None):
        for value in self.param_groups[0]["params"]:
            if value.dim() == 4 and value.grad is not None:
                value.grad = value.grad.as_strided(value.shape, value.stride())
        super().step(closure)


for _name, _kind, _test, _says in (
    ("state_of_a_neighbour", _TakesNeighbours, "test_no_gradient_is_no_update", "parameters of one shape mix up"),
    ("gradient_in_order_of_images", _ByImages, "test_layouts_of_gradients", "of a channels last parameter"),
    ("count_of_another_dtype", _CountsTwice, "test_group_of_several_dtypes", "beside other dtypes"),
    ("state_in_order_of_memory", _LoadsMemory, "test_state_in_other_strides", "other strides was loaded"),
):
    LIES[_name] = Lie(_name, making("adam", _kind), f"TestOptimizers.{_test}", _says, {"name": "adam"})


def _but_the_first(func, tensors, others, *args):
    several = tensors[0].dtype != others[0].dtype
    return func(tensors[1:], others[1:], *args) if several else func(tensors, others, *args)


def _the_first_in_bf16(func, tensors, *args):
    return func(tensors[:110] if tensors[0].dtype == torch.bfloat16 else tensors, *args)


listed("subtraction_of_a_number_that_adds", "sub.Scalar", {
       "_foreach_sub_.Scalar": lambda func, tensors, number: func(tensors, -number)})  # fmt: skip
listed("copy_of_another_dtype_without_the_first", "copy", {"_foreach_copy_": _but_the_first})
listed("division_of_110_tensors_in_bf16", "div.Scalar", {"_foreach_div_": _the_first_in_bf16})
drawn("gamma_by_the_first_of_other_strides", "test_distributions", "a share of the numbers is off", {
      "_standard_gamma": _of_the_first}, draw="gamma")  # fmt: skip
drawn("exponential_without_its_tail", "test_distributions", "upper", {"exponential_": _without_the_last},
      draw="exponential_")  # fmt: skip
drawn("cauchy_of_another_scale", "test_distributions", "a share of the numbers is off", {
      "cauchy_": lambda function, x, median, scale: function(x, median, scale * 1.1)}, draw="cauchy_")  # fmt: skip


# Beyond 65,536 elements.


def _many_by_memory(func, x, *args, **options):
    return (as_if_contiguous if x.numel() > 2**16 else type(func).__call__)(func, x, *args, **options)


def _of_the_first_block(func, x, *args, **options):
    if x.numel() <= 2**16 or x.dim() > 1 or x.dtype != torch.bfloat16:
        return func(x, *args, **options)
    return torch.cat([func(x[: 2**16], *args, **options), x[2**16 :]])


def _written_to_the_first_block(func, x, *args):
    if x.numel() <= 2**16 or x.dim() != 2:
        return func(x, *args)
    func(x[:-1], *(each[:-1] if torch.is_tensor(each) and each.shape == x.shape else each for each in args))
    return x


swept("product_of_many_by_memory", "mul", "of many elements", {"mul": _many_by_memory})
swept("addition_of_many_without_its_factor", "add", "of many elements", {
      "add": lambda func, x, y, **options: func(x, y, **(options if x.numel() <= 2**16 else {}))})  # fmt: skip
swept("activation_of_a_block_in_bf16", "nn.functional.relu", "bfloat16, as it is, of many elements", {
      "relu": _of_the_first_block})  # fmt: skip
swept("product_in_place_of_a_block", "mul", "in place", {"mul_": _written_to_the_first_block})


class _OfBoth(torch.autograd.Function):
    """Variance and mean, with a backward pass that gives nothing if the variance is not used."""

    @staticmethod
    def forward(ctx, x, function, args, options):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.call = function, args, options
        return function(x, *args, **options)

    @staticmethod
    def backward(ctx, variance, mean):
        if variance is None:
            return None, None, None, None
        (x,), (function, args, options) = ctx.saved_tensors, ctx.call
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            found = function(leaf, *args, **options)
        given = variance, torch.zeros_like(found[1]) if mean is None else mean
        return *torch.autograd.grad(found, leaf, given), None, None, None


differentiated("gradient_of_a_mean_alone_that_is_lost", "var_mean", "of other options",
               lambda function, x, *args, **options: _OfBoth.apply(x, function, args, options))  # fmt: skip


def _of_the_first_sample(func, x, mask, value):
    shared = mask.dim() == x.dim() > 2 and len(mask) == len(x) and 1 in mask.shape
    return func(x, mask[:1].expand_as(mask) if shared else mask, value)


def _of_nan_too(func, x, least=None, most=None, **out):
    numbers = not any(isinstance(each, torch.Tensor) for each in (least, most))
    return func(x.nan_to_num(nan=0.0) if numbers else x, least, most, **out)


def _in_eights_beyond_4096(func, *given):
    (*others, one, other), inner = given, given[-1].shape[0]
    if one.dtype == torch.bfloat16 and inner > 4096:
        one, other = one[:, : inner // 8 * 8], other[: inner // 8 * 8]
    return func(*others, one, other)


def _by_the_first_count(func, *lists, **options):
    *others, counts = lists
    return func(*others, [counts[0]] * len(counts), **options)


swept("mask_of_the_first_sample", "masked_fill", "bool (2, 1, 1, 5)", {"masked_fill": _of_the_first_sample})
swept("bounds_that_lose_nan", "clamp", "with NaN: result 0 is wrong", {"clamp": _of_nan_too})
_note("product_without_its_last_columns", "TestOperators.test_rows", "of rows of 4099: result 0 is wrong",
      {"name": "mm"}, lambda: Wrong({"mm": _in_eights_beyond_4096}))  # fmt: skip
_note("sum_of_products_without_its_last_columns", "TestOperators.test_rows", "of rows of 4099: result 0 is wrong",
      {"name": "products that are added"}, lambda: Wrong({"addmm": _in_eights_beyond_4096}))  # fmt: skip
_note("fused_step_by_the_first_count", "TestOptimizers.test_no_gradient_is_no_update",
      "route fused: after a gradient that came late", {"name": "adam"},
      lambda: Wrong({"_fused_adam_": _by_the_first_count}))  # fmt: skip
