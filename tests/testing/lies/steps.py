"""Steps, scales and contexts that fail for some numbers of tensors, layouts, sizes or dtypes only."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from torch.nn import functional

from accelcore.scaling.contract import by_dtype
from accelcore.scaling.dynamic import GradScaler, Scalers
from accelcore.testing.support.oracles_optim import Lamb
from lies.lie import LIES, Lie, lie, replaced
from lies.operators import WrongFunction, _note
from lies.optimizers import making


def _members(optimizer):
    return [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]


def _skipping(which):
    """An SGD that leaves some of its parameters as they were."""

    class Skipping(torch.optim.SGD):
        def step(self, closure=None):
            left = [(value, value.detach().clone()) for value in which(_members(self))]
            loss = super().step(closure)
            for value, before in left:
                value.data.copy_(before)
            return loss

    return Skipping


_note("step_that_no_profile_shows", "TestOptimizers.test_profiled", "shows no kernel", {"name": "sgd"},
      lambda: patch("accelcore_cpu.native.record_function", lambda name: nullcontext()))  # fmt: skip


def _behind_an_empty_one(values):
    found = [number for number, value in enumerate(values) if not value.numel()]
    return values[found[0] + 1 :] if found else []


class _ReadsMemory(torch.optim.SGD):
    """It reads a gradient in the order of its memory."""

    def step(self, closure=None):
        for value in _members(self):
            value.grad = torch.empty_like(value).copy_(value.grad.t().reshape(value.shape))
        return super().step(closure)


class _MakesContiguous(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        for value in _members(self):
            value.data = value.data.contiguous()
        return loss


class _NeverZero(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] or 1e-3
        return super().step(closure)


class _ReadsRateOnce(torch.optim.SGD):
    def step(self, closure=None):
        given = [group["lr"] for group in self.param_groups]
        if torch.is_tensor(given[0]):
            self.__dict__.setdefault("_rate", float(given[0]))
            self.param_groups[0]["lr"] = self._rate
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, given, strict=True):
            group["lr"] = rate
        return loss


class _OptionsOfTheFirst(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups[1:]:
            group["maximize"] = self.param_groups[0]["maximize"]
        return super().step(closure)


class _KeepsItsDecay(torch.optim.SGD):
    """It loads a state, and not the options that are in it."""

    def load_state_dict(self, state_dict):
        own = [group["weight_decay"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, decay in zip(self.param_groups, own, strict=True):
            group["weight_decay"] = decay


class _StepsAnyway(torch.optim.SGD):
    """A kernel that is given `found_inf`, and does not look at it."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        for value in _members(self):
            value.grad = value.grad / (getattr(self, "grad_scale", None) or 1)
        self.grad_scale = self.found_inf = None
        return super().step(closure)


class _DecaysGradients(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        for value in _members(self):
            value.grad.add_(value.detach(), alpha=0.1)
        return loss


class _CallsTwice(torch.optim.SGD):
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        return super().step(closure)


class _LeavesGradientsOn(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        torch.set_grad_enabled(closure is not None or torch.is_grad_enabled())
        return loss


for _name, _kind, _test, _says in (
    ("kernel_without_the_last_of_sixteen", _skipping(lambda values: values[15:16] if len(values) == 16 else []),
     "test_any_number_of_tensors", "of 15 tensors and an empty one, those at [15] are wrong"),
    ("kernel_that_ends_at_an_empty_tensor", _skipping(_behind_an_empty_one), "test_any_number_of_tensors",
     "of 1 tensors and an empty one, those at [1] are wrong"),
    ("kernel_that_reads_memory_in_order", _ReadsMemory, "test_layouts_of_gradients", "with a gradient that is"),
    ("step_that_makes_contiguous", _MakesContiguous, "test_layouts_of_gradients", "changed the strides"),
    ("options_of_the_first_group", _OptionsOfTheFirst, "test_options_of_groups", "in the second group it is off"),
    ("state_without_its_options", _KeepsItsDecay, "test_state_round_trip",
     "was not restored in a new optimizer"),
    ("learning_rate_that_is_never_zero", _NeverZero, "test_learning_rates", "steps by another learning rate"),
    ("learning_rate_that_is_read_once", _ReadsRateOnce, "test_learning_rates", "changed in place is not seen"),
    ("kernel_that_steps_after_an_overflow", _StepsAnyway, "test_overflow_is_skipped_by_every_optimizer",
     "an overflow changed a parameter"),
    ("step_that_decays_gradients", _DecaysGradients, "test_step_leaves_the_rest", "changes gradients"),
    ("step_that_calls_a_closure_twice", _CallsTwice, "test_step_leaves_the_rest", "calls a closure 2 times"),
    ("step_that_leaves_gradients_on", _LeavesGradientsOn, "test_step_leaves_the_rest", "leaves gradients True"),
):  # fmt: skip
    LIES[_name] = Lie(_name, making("sgd", _kind), f"TestOptimizers.{_test}", _says, {"name": "sgd"})


class _NormOfAGroup(Lamb):
    def prepared(self, gradients):
        every, found = self.param_groups, []
        for group, own in zip(every, gradients, strict=True):
            self.param_groups = [group]
            found += super().prepared([own])
        self.param_groups = every
        return found


@lie("TestOptimizers.test_options_of_groups", says="in the second group it is off", name="lamb")
def lamb_by_the_norm_of_a_group(backend):
    return making("lamb", _NormOfAGroup)(backend)


class _DividesAfterDecay(torch.optim.SGD):
    """A kernel that divides by the scale what it has added the weight decay to."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self.grad_scale = self.found_inf = None
        if overflow is not None and overflow.item():
            return None
        kept = [group["weight_decay"] for group in self.param_groups]
        for value in _members(self) if scale is not None else ():
            value.grad = value.grad / scale
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay if scale is None else decay / float(scale)
        loss = super().step(closure)
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay
        return loss


@lie("TestOptimizers.test_overflow_is_skipped_by_every_optimizer", says="with scaled gradients and {", name="sgd")
def kernel_that_unscales_after_its_decay(backend):
    return making("sgd", _DividesAfterDecay)(backend)


class _FirstSixtyFour(GradScaler):
    def check(self, gradients, multiplier):
        found = super().check(gradients[:64], multiplier)
        super().check(gradients[64:], multiplier)
        return found


class _FirstDtype(GradScaler):
    def check(self, gradients, multiplier):
        found = [
            super(_FirstDtype, self).check(members, torch.ones_like(multiplier) if number else multiplier)
            for number, members in enumerate(by_dtype(gradients).values())
        ]
        return torch.stack(found).amax()


class _SumsSquares(GradScaler):
    def check(self, gradients, multiplier):
        total = sum(gradient.square().sum() for gradient in gradients)
        return torch.maximum(super().check(gradients, multiplier), (~total.isfinite()).float())


def _plain(accel, parameters):
    return torch.optim.SGD(parameters, lr=0.5)


for _name, _kind, _test, _says, _arguments in (
    ("scaler_of_sixty_four_tensors", _FirstSixtyFour, "test_overflow_in_any_tensor", "gradient 64 of 300 was not found",
     {"make": _plain, "position": 64}),
    ("scaler_of_one_dtype", _FirstDtype, "test_gradients_of_several_dtypes", "it makes [256.0", {}),
    ("scaler_that_sums_squares", _SumsSquares, "test_large_gradients_are_no_overflow", "count as overflow", {}),
):  # fmt: skip
    LIES[_name] = Lie(
        _name,
        lambda backend, kind=_kind: dataclasses.replace(backend, scaler=Scalers(backend.device, kind)),
        f"TestScaler.{_test}",
        _says,
        _arguments,
    )


class _Altered(torch.overrides.TorchFunctionMode):
    """Computes one function otherwise in low precision."""

    def __init__(self, wanted, change):
        super().__init__()
        self._wanted, self._change = wanted, change

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is self._wanted and torch.is_autocast_enabled("cpu"):
            return self._change(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class _Both:
    """A context and a mode beside it."""

    def __init__(self, make, mode):
        self._make, self._mode, self._entered = make, mode, []

    def __enter__(self):
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(self._make())
        self._entered[-1].enter_context(self._mode)

    def __exit__(self, *error):
        self._entered.pop().__exit__(*error)


def _computing(wanted, change):
    def autocast(honest, *args, **options):
        return _Both(lambda: honest.autocast(*args, **options), _Altered(wanted, change))

    return lambda backend: replaced(backend, "precision", autocast=autocast)


@lie("TestPrecision.test_autocast_of_wide_layers", says="of a layer of width 1024 is wrong", table="torch", width=1024)
def autocast_of_narrow_layers(backend):
    def narrow(rows, weight):
        return functional.linear(rows[:, :1020], weight[:, :1020])

    return _computing(functional.linear, narrow)(backend)


@lie("TestPrecision.test_autocast_of_attention", says="of attention over 5 keys is wrong", table="torch", mask="causal")
def attention_without_its_mask(backend):
    def unmasked(*tensors, is_causal, scale):
        return functional.scaled_dot_product_attention(*tensors, scale=scale)

    return _computing(functional.scaled_dot_product_attention, unmasked)(backend)


@lie("TestRuntime.test_batches_move_whole", says="has other strides", kind="dict", way="to_device")
def nested_transfer_that_is_contiguous(backend):
    def to_device(honest, batch):
        return {name: part.contiguous() if torch.is_tensor(part) else part for name, part in batch.items()}

    return replaced(backend, "runtime", to_device=to_device)


@lie("TestRuntime.test_every_dtype_travels", says="came back as torch.float32", name="bfloat16", way="to")
def fetch_that_widens(backend):
    def fetch(honest, tensor):
        ready = honest.fetch(tensor)
        return lambda: ready().float() if tensor.dtype == torch.bfloat16 else ready()

    return replaced(backend, "runtime", fetch=fetch)


@lie("TestRuntime.test_random_state_replays", says="does not repeat the numbers")
def random_state_without_pythons_second_number(backend):
    def rng_state(honest):
        return {**honest.rng_state(), "python_gauss": torch.empty(0, dtype=torch.float64)}

    return replaced(backend, "runtime", rng_state=rng_state)


def _by_autocast(function, x, y, **options):
    low = torch.get_autocast_dtype("cpu")
    return function(x.to(low), y.to(low), **options) if torch.is_autocast_enabled("cpu") else function(x, y, **options)


_note("loss_that_autocast_rounds", "TestPrecision.test_fp32_stays_fp32", "l1_loss of fp32 numbers loses digits in",
      {"table": "torch"}, lambda: WrongFunction({"l1_loss": _by_autocast}))  # fmt: skip
