"""Backends that lie: the CPU's, each with one promise broken, and the test of the suite that must notice.

As a plugin (see `test_lies.py`) this module offers each lie as a backend of that name.
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import os
import signal
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from accelcore_cpu.backend import create

from accelcore import Probe, hookimpl
from accelcore.optim.torch_optimizers import register_torch_optimizers
from accelcore.roles.collectives import TorchCollectives
from accelcore.roles.compiler import Compiled
from accelcore.roles.optimizers import Optimizers
from accelcore.roles.runtime import Memory
from accelcore.roles.scaler import GradScaler, Scalers

LIES = {}


@dataclass
class Lie:
    """A broken promise.

    Attributes:
        name: what it is called.
        tell: makes the lying backend out of an honest one.
        test: `Class.test` of the suite that notices.
        arguments: the parameters with which it does.
    """

    name: str
    tell: object
    test: str
    arguments: dict = field(default_factory=dict)

    @hookimpl
    def accelcore_probe(self):
        return Probe(self.name, available=True, reason="it says so", count=1, exclusive=False)

    @hookimpl
    def accelcore_create_backend(self, name, index):
        return dataclasses.replace(self.tell(create()), name=name) if name == self.name else None


def lie(test, **arguments):
    def note(tell):
        LIES[tell.__name__] = Lie(tell.__name__, tell, test, arguments)
        return LIES[tell.__name__]

    return note


def replaced(backend, role, **methods):
    """The backend with methods of one role replaced; each is given the honest role first."""
    honest = getattr(backend, role)
    liar = copy.copy(honest)
    for name, method in methods.items():
        setattr(liar, name, lambda *args, _method=method, **kwargs: _method(honest, *args, **kwargs))
    return dataclasses.replace(backend, **{role: liar})


def declaring(backend, **declaration):
    return dataclasses.replace(backend, capabilities=dataclasses.replace(backend.capabilities, **declaration))


# precision


@lie("TestPrecision.test_autocast_computes_in_its_dtype", name="bfloat16")
def claims_bf16_and_computes_fp32(backend):
    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: nullcontext())


class _RoundsLate(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.to(torch.bfloat16) if function is torch.Tensor.__matmul__ else result


@lie("TestPrecision.test_autocast_computes_in_its_dtype", name="bfloat16")
def computes_fp32_and_rounds_afterwards(backend):
    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: _RoundsLate())


@lie("TestPrecision.test_autocast_ends")
def autocast_that_never_ends(backend):
    def autocast(honest, dtype=None, *, enabled=True, table="torch"):
        context = honest.autocast(dtype, enabled=enabled, table=table)
        return _NeverLeft(context)

    return replaced(backend, "precision", autocast=autocast)


class _NeverLeft:
    def __init__(self, context):
        self._context = context

    def __enter__(self):
        return self._context.__enter__()

    def __exit__(self, *error):
        dtype = torch.get_autocast_dtype("cpu")
        self._context.__exit__(*error)  # what torch counts and caches is none of the lie
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", dtype)


@lie("TestPrecision.test_autocast_computes_in_its_dtype", name="float16")
def does_fp16_without_declaring_it(backend):
    return declaring(backend, autocast_dtypes=("bfloat16",))


@lie("TestPrecision.test_fp32_is_put_back_after_an_error")
def fp32_setting_that_stays_after_an_error(backend):
    @contextmanager
    def fp32(honest, mode):
        torch.set_float32_matmul_precision("medium")
        yield

    return replaced(backend, "precision", fp32=fp32)


@lie("TestPrecision.test_fp32", mode="fast")
def declares_a_fast_fp32_that_it_refuses(backend):
    return declaring(backend, fast_fp32="tf32")


@lie("TestPrecision.test_autocast_refuses_other_dtypes", dtype=torch.float64)
def takes_any_dtype_for_low_precision(backend):
    return replaced(backend, "precision", autocast=lambda honest, dtype=None, **kwargs: nullcontext())


def _operators_of_its_own(change):
    """A backend whose autocast computes some operators itself."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            with change(function):
                return function(*args, **(kwargs or {}))

    def autocast(honest, *args, **kwargs):
        stack = ExitStack()
        stack.enter_context(honest.autocast(*args, **kwargs))
        stack.enter_context(Mode())
        return stack

    return lambda backend: replaced(backend, "precision", autocast=autocast)


def _fp32_convolutions(function):
    return torch.autocast("cpu", enabled=False) if function is torch.conv2d else nullcontext()


LIES["convolutions_in_fp32"] = Lie(
    "convolutions_in_fp32", _operators_of_its_own(_fp32_convolutions), "TestPrecision.test_autocast_reaches",
    {"name": "bfloat16", "operator": "convolution"},
)  # fmt: skip


# scaler


class _FirstGroup(GradScaler):
    def _check(self, optimizer, multiplier):
        found = super()._check(optimizer, multiplier)
        return found.fill_(not all(p.grad.isfinite().all() for p in optimizer.param_groups[0]["params"]))


class _ZeroesGradients(GradScaler):
    def step(self, optimizer):
        self.unscale_(optimizer)
        if self._overflows[id(optimizer)].item():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.zero_()
        optimizer.step()


class _NeverSkips(GradScaler):
    def step(self, optimizer):
        self.unscale_(optimizer)
        optimizer.step()


class _NeverHalves(GradScaler):
    def update(self):
        super().update()
        self._scale.fill_(1024.0)


class _NeverUnscales(GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= self._scale


class _NoFloor(GradScaler):
    def update(self):
        overflow = max(found.item() for found in self._overflows.values())
        before = self._scale.item()
        super().update()
        if overflow:
            self._scale.fill_(before / 2)


class _ForgetsItsCount(GradScaler):
    def state_dict(self):
        return {**super().state_dict(), "_growth_tracker": 0}


class _AllowsTwo(GradScaler):
    def unscale_(self, optimizer):
        self._stages.clear()
        super().unscale_(optimizer)


def _scalers(kind):
    class Lying(Scalers):
        def create(self, **options):
            made = super().create(**options)
            if isinstance(made, GradScaler):
                made.__class__ = kind
            return made

    return lambda backend: dataclasses.replace(backend, scaler=Lying(backend.device))


OVERFLOW = {"value": float("inf")}


def _plain(accel, parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def _own(accel, parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


for _name, _kind, _test, _arguments in (
    ("scaler_that_never_skips", _NeverSkips, "test_overflow_skips_and_halves", {**OVERFLOW, "make": _plain}),
    ("scaler_that_never_halves", _NeverHalves, "test_overflow_skips_and_halves", {**OVERFLOW, "make": _plain}),
    ("scaler_that_never_unscales", _NeverUnscales, "test_unscale_then_clip", {"make": _plain}),
    ("scaler_that_changes_updates", _NeverUnscales, "test_scaling_changes_no_update", {"make": _plain}),
    ("scale_that_falls_to_nothing", _NoFloor, "test_endless_overflow_has_a_floor", {}),
    ("scaler_that_forgets_its_count", _ForgetsItsCount, "test_state_round_trip", {}),
    ("scaler_of_the_first_group", _FirstGroup, "test_overflow_anywhere", {"group": 1, "element": 0}),
    ("scaler_that_steps_with_zeroes", _ZeroesGradients, "test_overflow_ages_no_state", {"make": _own}),
    ("scaler_that_unscales_twice", _AllowsTwo, "test_calls_out_of_order", {}),
):
    LIES[_name] = Lie(_name, _scalers(_kind), f"TestScaler.{_test}", _arguments)


# optimizers


def _registry(**kinds):
    def tell(backend):
        registry = Optimizers()
        register_torch_optimizers(registry, fused=("adagrad", "adam", "adamw", "sgd"))
        for name, kind in kinds.items():
            registry.register(name, "lying", kind, priority=99)
        return dataclasses.replace(backend, optimizers=registry)

    return tell


class _LosesMomentum(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "state": {}}


class _KeepsGradients(torch.optim.SGD):
    def step(self, closure=None):
        kept = self.__dict__.setdefault("_kept", {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and parameter in kept:
                    parameter.grad = kept[parameter]
                elif parameter.grad is not None:
                    kept[parameter] = parameter.grad.clone()
        return super().step(closure)


class _IgnoresLatecomers(torch.optim.SGD):
    def step(self, closure=None):
        known = self.__dict__.setdefault(
            "_known", [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                if not any(parameter is other for other in known):
                    parameter.grad = None
        return super().step(closure)


class _OwnLayout(torch.optim.AdamW):
    def state_dict(self):
        state = super().state_dict()
        state["state"] = {key: {f"my_{name}": value for name, value in entry.items()} for key, entry in
                          state["state"].items()}  # fmt: skip
        return state


class _SkipsSome(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad[..., 16:] = 0
        return super().step(closure)


class _FixedRate(torch.optim.SGD):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._rates = [group["lr"] for group in self.param_groups]

    def step(self, closure=None):
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate
        return super().step(closure)


def _adam_for_adamw(params, **options):
    return torch.optim.Adam(params, **options)


for _name, _kinds, _test, _arguments in (
    ("adamw_that_is_adam", {"adamw": _adam_for_adamw}, "test_numerics", {"name": "adamw"}),
    ("optimizer_that_ignores_schedules", {"sgd": _FixedRate}, "test_changes_between_steps", {"name": "sgd"}),
    ("state_dict_that_loses_momentum", {"sgd": _LosesMomentum}, "test_state_round_trip", {"name": "sgd"}),
    ("optimizer_that_uses_old_gradients", {"sgd": _KeepsGradients}, "test_no_gradient_is_no_update", {"name": "sgd"}),
    ("optimizer_that_ignores_latecomers", {"sgd": _IgnoresLatecomers}, "test_no_gradient_is_no_update",
     {"name": "sgd"}),
    ("state_that_nobody_else_can_read", {"adamw": _OwnLayout}, "test_state_layout", {"name": "adamw"}),
    ("bf16_update_of_some_elements", {"sgd": _SkipsSome}, "test_model_dtypes", {"name": "sgd", "dtype": "bfloat16"}),
):  # fmt: skip
    LIES[_name] = Lie(_name, _registry(**_kinds), f"TestOptimizers.{_test}", _arguments)


@lie("TestOptimizers.test_native", name="rmsprop")
def native_optimizer_that_is_a_loop(backend):
    return declaring(backend, native_optimizers=(*backend.capabilities.native_optimizers, "rmsprop"))


@lie("TestOptimizers.test_native", name="adam")
def native_optimizer_that_is_not_declared(backend):
    return declaring(backend, native_optimizers=("sgd",))


# collectives


class _ForgetsToSum(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        return tensor if op == "sum" else super().all_reduce(tensor, op)


class _SumsForAverage(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        return super().all_reduce(tensor, "sum" if op == "avg" else op)


class _AlwaysFromZero(TorchCollectives):
    def broadcast(self, tensor, src=0):
        return super().broadcast(tensor, 0)


class _BroadcastsACopy(TorchCollectives):
    def broadcast(self, tensor, src=0):
        return super().broadcast(tensor.clone(), src)


class _ForgetsScalars(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        return super().all_reduce(tensor, op) if tensor.dim() else tensor


class _NeverWaits(TorchCollectives):
    def barrier(self):
        pass


for _name, _kind, _test, _arguments in (
    ("broadcast_of_a_copy", _BroadcastsACopy, "test_broadcast", {}),
    ("all_reduce_that_forgets_scalars", _ForgetsScalars, "test_all_reduce", {"what": "scalar", "expected": [3.0]}),
    ("barrier_that_does_not_wait", _NeverWaits, "test_barrier", {}),
    ("all_reduce_that_forgets_to_sum", _ForgetsToSum, "test_all_reduce", {"what": "sum", "expected": [3.0, 30.0]}),
    ("average_that_is_a_sum", _SumsForAverage, "test_all_reduce", {"what": "avg", "expected": [1.5, 15.0]}),
    ("broadcast_always_from_zero", _AlwaysFromZero, "test_broadcast", {}),
):
    LIES[_name] = Lie(
        _name,
        lambda backend, kind=_kind: dataclasses.replace(backend, collectives=kind(backend.device, "gloo")),
        f"TestCollectives.{_test}",
        _arguments,
    )


# compiler


@lie("TestCompiler.test_compiled_is_the_same")
def compiler_that_trains_a_copy(backend):
    return replaced(
        backend, "compiler", compile=lambda honest, module, options: Compiled(copy.deepcopy(module), compiled=True)
    )


@lie("TestCompiler.test_compiled_is_the_same")
def compiler_that_changes_results(backend):
    def compile(honest, module, options):
        return Compiled(lambda rows: module(rows) * 1.01, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_failure_falls_back_once")
def compiler_that_fails_in_silence(backend):
    return replaced(
        backend, "compiler", compile=lambda honest, module, options: Compiled(module, compiled=True)
    )  # fmt: skip


@lie("TestCompiler.test_compiled_is_the_same")
def compiler_that_is_not_declared(backend):
    return declaring(backend, compilers=())


@lie("TestCompiler.test_compiled_follows_its_module")
def compiler_that_drops_named_arguments(backend):
    def compile(honest, module, options):
        return Compiled(lambda rows, **named: module(rows), compiled=True)

    return replaced(backend, "compiler", compile=compile)


# runtime


@lie("TestRuntime.test_random_state_replays")
def random_state_without_numpy(backend):
    def rng_state(honest):
        return {name: value for name, value in honest.rng_state().items() if not name.startswith("numpy")}

    return replaced(backend, "runtime", rng_state=rng_state)


@lie("TestRuntime.test_transfers_keep_values")
def transfer_that_casts_fp64(backend):
    def to_device(honest, batch):
        return batch.float() if batch.dtype == torch.float64 else honest.to_device(batch)

    return replaced(backend, "runtime", to_device=to_device)


@lie("TestRuntime.test_random_state_replays")
def random_state_that_is_not_restored(backend):
    return replaced(backend, "runtime", set_rng_state=lambda honest, state: [])


@lie("TestRuntime.test_seed")
def seed_that_is_ignored(backend):
    return replaced(backend, "runtime", seed=lambda honest, n, deterministic=False: None)


@lie("TestRuntime.test_random_state_of_another_device")
def unknown_random_state_in_silence(backend):
    def set_rng_state(honest, state):
        honest.set_rng_state(state)
        return []

    return replaced(backend, "runtime", set_rng_state=set_rng_state)


@lie("TestRuntime.test_batches_move_whole")
def silent_cpu_tensor(backend):
    """Its device is another than the host, and tensors stay on the host."""
    backend = replaced(backend, "runtime", to_device=lambda honest, batch: batch)
    backend.runtime.device = torch.device("meta")
    return backend


@lie("TestRuntime.test_memory")
def memory_that_is_always_nothing(backend):
    return replaced(backend, "runtime", memory=lambda honest: Memory(0, 0, 1))


@lie("TestRuntime.test_side_stream")
def side_stream_that_is_not_declared(backend):
    return replaced(backend, "runtime", side_stream=lambda honest: nullcontext())


@lie("TestRuntime.test_pinned_memory")
def pinned_memory_that_is_not_pinned(backend):
    backend = replaced(backend, "runtime", pin=lambda honest, tensor: tensor)
    return declaring(backend, pinned_memory=True)


@lie("TestRuntime.test_no_needless_copy")
def transfer_that_always_copies(backend):
    return replaced(backend, "runtime", to_device=lambda honest, batch: [batch[0].clone()])


# the whole


@lie("TestTraining.test_parallel", parallel="fsdp")
def strategy_that_does_not_exist(backend):
    return declaring(backend, parallel=("none", "ddp", "fsdp"))


@lie("TestTraining.test_fp32", options={})
def device_that_computes_wrongly(backend):
    return _registry(adamw=_adam_for_adamw)(backend)


@lie("TestTraining.test_resume_goes_on_alike", precision="fp32")
def resume_that_forgets_random_numbers(backend):
    return replaced(backend, "runtime", set_rng_state=lambda honest, state: [])


@lie("TestBackend.test_declaration_is_readable")
def declaration_that_nobody_can_read(backend):
    return declaring(backend, autocast_dtypes=("bf16",))


# what no assertion can catch: these are for `accelcore verify`


@lie("TestRuntime.test_memory")
def device_that_crashes(backend):
    def memory(honest):
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)

    return replaced(backend, "runtime", memory=memory)


@lie("TestRuntime.test_memory")
def device_that_hangs(backend):
    return replaced(backend, "runtime", memory=lambda honest: threading.Event().wait())


@lie("TestRuntime.test_memory")
def device_that_ends_the_process(backend):
    os._exit(0)


globals().update(LIES)
