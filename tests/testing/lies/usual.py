"""What is right for usual values, dtypes, parameters and orders of calls only."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch
from torch.nn import functional

from accelcore.roles.compiler import Compiled
from accelcore.testing.support.options import EVERY
from lies.lie import LIES, Lie, lie, replaced
from lies.operators import Wrong, WrongFunction, _note, drawn, known, swept
from lies.optimizers import making


def _given(optimizer):
    return [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]


class _MaximizesDecay(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            decay = group["weight_decay"]
            if group["maximize"] and group["momentum"]:
                group["weight_decay"] = -decay
        return super().step(closure)


class _FirstBetas(torch.optim.AdamW):
    def step(self, closure=None):
        kept = self.__dict__.setdefault("_kept", [group["betas"] for group in self.param_groups])
        for group, betas in zip(self.param_groups, kept, strict=True):
            group["betas"] = betas
        return super().step(closure)


class _CutsOff(torch.optim.SGD):
    def step(self, closure=None):
        members = _given(self)
        for value in members:
            gradient = value.grad.float()
            value.grad, value.data = None, value.data.float()
            value.grad = gradient
        super().step(closure)
        for value in members:
            value.grad = None
            value.data = (value.data.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()


class _LeavesZerosOut(torch.optim.Adam):
    def step(self, closure=None):
        before = [(value, value.detach().clone()) for value in _given(self)]
        loss = super().step(closure)
        for value, old in before:
            value.data.copy_(torch.where(value.grad == 0, old, value.data))
        return loss


class _InFp32(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        for value in _given(self):
            value.data.copy_(value.data.float())
        return loss


class _WithoutHooks(torch.optim.SGD):
    def register_step_post_hook(self, hook):
        return None


class _ClearsByNone(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        if set_to_none:
            super().zero_grad()


for _name, _of, _kind, _test, _says in (
    ("decay_that_is_maximized", "sgd", _MaximizesDecay, "test_numerics", "'maximize': True"),
    ("betas_of_the_first_step", "adamw", _FirstBetas, "test_changes_between_steps", "when it was made"),
    ("zeros_that_are_left_out", "adam", _LeavesZerosOut, "test_zeros", "is wrong"),
    ("float64_in_fp32", "sgd", _InFp32, "test_group_of_several_dtypes", "a parameter in torch.float64 is off"),
    ("optimizer_without_hooks", "sgd", _WithoutHooks, "test_hooks_and_clearing", "the hooks called were ['before']"),
    ("gradients_that_are_not_cleared", "sgd", _ClearsByNone, "test_hooks_and_clearing", "leaves gradients"),
):
    assert _of in EVERY
    LIES[_name] = Lie(_name, making(_of, _kind), f"TestOptimizers.{_test}", _says, {"name": _of})


LIES["optimizer_that_cuts_off"] = Lie(
    "optimizer_that_cuts_off", making("sgd", _CutsOff), "TestOptimizers.test_low_precision_state",
    "does not round its updates to the nearest bfloat16", {"name": "sgd", "dtype": "bfloat16"},
)  # fmt: skip


@lie("TestOptimizers.test_low_precision_state", says="is rounded when it is loaded", name="adamw", dtype="bfloat16")
def state_that_loading_rounds(backend):
    def create(honest, *args, **options):
        optimizer = honest.create(*args, **options)
        load = optimizer.load_state_dict

        def rounding(state):
            load(state)
            for entry in optimizer.state.values():
                for value in entry.values():
                    value.copy_(value.bfloat16())

        optimizer.load_state_dict = rounding
        return optimizer

    return replaced(backend, "optimizers", create=create)


class _Both:
    def __init__(self, *contexts):
        self._contexts, self._entered = contexts, []

    def __enter__(self):
        self._entered.append(ExitStack())
        for context in self._contexts:
            self._entered[-1].enter_context(context)

    def __exit__(self, *error):
        self._entered.pop().__exit__(*error)

    def __call__(self, function):
        return function


def _beside(backend, functions):
    def autocast(honest, *args, **options):
        return _Both(honest.autocast(*args, **options), WrongFunction(functions))

    return replaced(backend, "precision", autocast=autocast)


def _in_fp32(function, *args, **options):
    with torch.autocast("cpu", enabled=False):
        return function(*args, **options)


@lie("TestPrecision.test_tables", says="and intercepts", table="torch")
def attention_that_autocast_leaves(backend):
    return _beside(backend, {"scaled_dot_product_attention": _in_fp32})


@lie("TestPrecision.test_tables", says="and intercepts", table="torch")
def losses_that_stay_low(backend):
    return _beside(backend, {"mse_loss": _in_fp32})


@lie("TestPrecision.test_autocast_keeps_tensors", says="float64 was cast", table="torch")
def autocast_of_float64(backend):
    class Casts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is functional.linear:
                args = [each.bfloat16() for each in args]
            return function(*args, **(kwargs or {}))

    def autocast(honest, *args, **options):
        return _Both(honest.autocast(*args, **options), Casts())

    return replaced(backend, "precision", autocast=autocast)


@lie("TestPrecision.test_ieee_fp32", says="backward of a product kept 7 bits")
def ieee_without_backward(backend):
    @contextmanager
    def fp32(honest, mode):
        def product(func, a, b):
            in_backward = torch._C._current_autograd_node() is not None
            return func(a.bfloat16().float(), b.bfloat16().float()) if in_backward else func(a, b)

        with honest.fp32(mode), Wrong({"mm": product}):
            yield

    return replaced(backend, "precision", fp32=fp32)


def _compiling(call):
    def compile(honest, module, options):
        kept = {}
        return Compiled(lambda *rows, **named: call(kept, module, *rows, **named), compiled=True)

    return lambda backend: replaced(backend, "compiler", compile=compile)


def _by_the_first_number(kept, module, rows, **named):
    return module(rows, **kept.setdefault("named", named))


def _by_the_first_mode(kept, module, rows, **named):
    with torch.set_grad_enabled(kept.setdefault("enabled", torch.is_grad_enabled())):
        return module(rows, **named)


def _by_the_first_dtype(kept, module, rows, **named):
    return module(rows.to(kept.setdefault("dtype", rows.dtype)), **named)


def _without_hooks(kept, module, rows, **named):
    hooks, module.norm._forward_hooks = module.norm._forward_hooks, {}
    try:
        return module(rows, **named)
    finally:
        module.norm._forward_hooks = hooks


for _name, _call, _says in (
    ("compiled_with_its_first_number", _by_the_first_number, "later does not count"),
    ("compiled_without_gradients", _by_the_first_mode, "whether gradients are enabled"),
    ("compiled_for_one_dtype", _by_the_first_dtype, "a compiled module makes torch.float32"),
    ("compiled_without_hooks", _without_hooks, "was not called once"),
):
    LIES[_name] = Lie(_name, _compiling(_call), "TestCompiler.test_compiled_follows_its_module", _says)


@lie("TestRuntime.test_random_state_of_another_device", says="a state without NumPy's was ignored")
def random_state_that_needs_numpy(backend):
    def set_rng_state(honest, state):
        return honest.set_rng_state(state) if "numpy" in state else []

    return replaced(backend, "runtime", set_rng_state=set_rng_state)


@lie("TestRuntime.test_every_seed_is_another", says="give the numbers of seed 7")
def seeds_of_32_bits(backend):
    return replaced(backend, "runtime", seed=lambda honest, n, **options: honest.seed(n % 2**32, **options))


@lie("TestRuntime.test_seed_deterministic", says="a later seed ends deterministic=True")
def determinism_of_one_seed(backend):
    def seed(honest, n, *, deterministic=False, same=None):
        honest.seed(n, deterministic=deterministic, same=same)
        torch.use_deterministic_algorithms(deterministic)

    return replaced(backend, "runtime", seed=seed)


# What is drawn.
def _rounded_up(function, *args, dtype=torch.float32, **options):
    return function(*args, **options).to(dtype)


def _of_few(function, count, **options):
    generator = torch.Generator().manual_seed(torch.initial_seed()) if count < 4 else None
    return function(count, generator=generator, **options)


class _TurnedMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rate):
        ctx.mask, ctx.rate = torch.rand(x.shape) >= rate, rate
        return x * ctx.mask / (1 - rate)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask.flatten().flip(0).reshape(ctx.mask.shape) / (1 - ctx.rate), None


def _dropout_of_memory(function, x, p=0.5, *args, **options):
    return function(x, p, *args, **options) if x.is_contiguous() or not 0 < p < 1 else _TurnedMask.apply(x, p)


def _unweighted(function, weights, count, replacement=False):
    return function(weights if replacement else (weights > 0).float(), count, replacement)


drawn("uniform_that_reaches_1_in_bf16", "test_draws_in_other_dtypes", "drew the upper end", {"rand": _rounded_up},
      draw="rand", dtype=torch.bfloat16)  # fmt: skip
LIES["uniform_with_the_digits_of_fp32"] = Lie(
    "uniform_with_the_digits_of_fp32", lambda backend: backend, "TestRuntime.test_draws_in_other_dtypes",
    "has the digits of fp32", {"draw": "rand", "dtype": torch.float64},
    around=lambda: WrongFunction({"rand": _rounded_up}),
)  # fmt: skip
drawn("uniform_of_few_that_repeats", "test_few_numbers", "draws the same numbers again", {"rand": _of_few})
drawn("permutations_that_move_everything", "test_few_numbers", "each order came", {
      "randperm": lambda function, count, **options: torch.arange(count - 1, -1, -1)})  # fmt: skip
drawn("dropout_with_a_mask_of_memory", "test_dropout", "in other strides", {"dropout": _dropout_of_memory},
      rate=0.5, dtype=torch.float32)  # fmt: skip
drawn("multinomial_that_is_even_without_replacement", "test_whole_numbers", "does not go by weight",
      {"multinomial": _unweighted})  # fmt: skip
drawn("exponential_of_rate_1", "test_distributions", "a share of the numbers is off",
      {"exponential_": lambda function, x, rate=1.0: function(x)}, draw="exponential_ of rate 4")  # fmt: skip
drawn("exponential_of_rate_1_in_bf16", "test_distributions", "bfloat16",
      {"exponential_": lambda function, x, rate=1.0: function(x, rate if x.dtype == torch.float32 else 1.0)},
      draw="exponential_ of rate 4")  # fmt: skip
drawn("whole_numbers_from_0", "test_distributions", "a share of the numbers is off", {
      "random_": lambda function, x, low, high: function(x, 0, high)}, draw="random_")  # fmt: skip
drawn("even_truth_of_whole_numbers", "test_moments", "has mean",
      {"bernoulli_": lambda function, x, p: function(x, p if x.is_floating_point() else 0.5)},
      draw="bernoulli_ of whole numbers")  # fmt: skip
drawn("complex_numbers_of_variance_2", "test_moments", "has variance", {
      "randn_like": lambda function, x, dtype: torch.complex(torch.randn(x.shape), torch.randn(x.shape))},
      draw="randn of complex numbers")  # fmt: skip
drawn("multinomial_of_fp16_that_is_even", "test_draws_in_other_dtypes", "has mean",
      {"multinomial": lambda function, weights, *args, **options: function(
          weights if weights.dtype == torch.float32 else (weights > 0).float(), *args, **options)},
      draw="1 in 172 of multinomial", dtype=torch.float16)  # fmt: skip
drawn("normal_by_variances", "test_distributions", "a share of the numbers is off",
      {"normal": lambda function, mean, std: function(mean, std * std)}, draw="normal by both")  # fmt: skip
drawn("randint_of_32_bits", "test_moments", "has mean", {
      "randint": lambda function, low, high, *args, **options: function(low, min(high, 2**32), *args, **options)},
      draw="randint of 40 bits")  # fmt: skip


# Operators and modules.
known("mean_by_rows", "nll_loss with weights", {
      "nll_loss_forward": lambda func, x, target, weight, *args: (
          func(x, target, weight, *args)[0] * weight[target].sum() / len(target), weight.sum())})  # fmt: skip
known("layer_norm_without_its_weight", "layer_norm with weights alone", {
      "native_layer_norm": lambda func, x, shape, weight, bias, eps: func(
          x, shape, weight if bias is not None else None, bias, eps)})  # fmt: skip
known("average_that_counts_padding", "avg_pool that leaves padding out", {
      "avg_pool2d": lambda func, x, *args: func(x, *args[:4], True, *args[5:])})  # fmt: skip
known(
    "convolution_of_channels_that_loses_a_tap",
    "convolution of each channel",
    {"convolution": lambda func, x, weight, *args: func(x, weight * torch.tensor([1, 0]).to(weight), *args)},
)
swept("gradient_of_the_last_pool", "nn.functional.max_pool2d", "the gradient", {
      "max_pool2d_with_indices_backward": lambda func, grad, x, *args: torch.zeros_like(x).flatten(-2).scatter(
          -1, args[-1].flatten(-2), grad.flatten(-2)).reshape(x.shape)})  # fmt: skip
known(
    "truth_by_whole_numbers",
    "conversion to truth values",
    {"_to_copy": lambda func, x, **options: func(x.int() if options.get("dtype") == torch.bool else x, **options)},
)
known(
    "indices_that_begin_at_0",
    "indices from the end",
    {"index": lambda func, x, indices: func(x, [each.clamp(min=0) for each in indices])},
)
known("largest_32", "largest 64 of many", {"topk": lambda func, x, k, *args: tuple(
      torch.cat([each[:32], each[32:].flip(0)]) for each in func(x, k, *args))})  # fmt: skip


def _from_zero(function, rows, hidden, *args):
    return function(rows, tuple(each * 0 for each in hidden), *args) if isinstance(hidden, tuple) else function(
        rows, hidden, *args)  # fmt: skip


def module(name, of, functions, test="test_module", says="the output"):
    _note(name, f"TestOperators.{test}", f": {says}", {"name": of}, lambda: WrongFunction(functions))


def _differentiated_without_its_mask(function, x, p=0.5, training=True, inplace=False):
    return function(x.detach(), p, training) + x - x.detach() if training else x


def _between_layers(function, rows, hidden, params, *options):
    if options[2] == 0 or not options[3] or isinstance(params, bool):  # the rate of dropout, training; not packed
        return function(rows, hidden, params, *options)
    first, second = params[: len(params) // 2], params[len(params) // 2 :]
    alone = options[0], 1, 0.0, True, False, options[5]
    below = function(rows, hidden[:1], first, *alone)
    drop = torch.nn.functional.dropout
    above = function(_differentiated_without_its_mask(drop, below[0], options[2]), hidden[1:], second, *alone)
    return above[0], torch.cat([below[1], above[1]])


def _of_all_tokens(function, *args, dropout_p, **options):
    whole = function(*args, **options)
    return function(*args, dropout_p=dropout_p, **options).detach() + whole - whole.detach()


module("lstm_that_begins_with_zeros", "LSTM", {"lstm": _from_zero}, "test_recurrent")
module("gradient_between_layers_without_the_mask", "GRU of two layers", {"gru": _between_layers},
       "test_gradients_of_draws", "the gradient of weight_ih_l0 is wrong")  # fmt: skip
module("dropout_between_layers_in_evaluation", "LSTM of two layers",
       {"lstm": lambda function, *args: function(*args[:6], True, *args[7:])}, "test_gradients_of_draws",
       "a result in evaluation is wrong")  # fmt: skip
module("gradient_of_attention_without_the_mask", "attention", {"scaled_dot_product_attention": _of_all_tokens},
       "test_gradients_of_draws", "the gradient of input 0 is wrong")  # fmt: skip
module(
    "attention_that_sees_padding",
    "MultiheadAttention",
    {
        "multi_head_attention_forward": lambda function, *args, key_padding_mask, **options: function(*args, **options),
    },
)


def _without_its_mark(function, target, source, *args, **options):
    return function(target, source.conj() if source.is_conj() else source, *args, **options)


LIES["copy_without_a_conjugate_mark"] = Lie(
    "copy_without_a_conjugate_mark", lambda backend: backend, "TestRuntime.test_conjugates_and_negatives_travel",
    "what is conjugate arrives by copy_", {"way": "copy_"},
    around=lambda: WrongFunction({"copy_": _without_its_mark}),
)  # fmt: skip
