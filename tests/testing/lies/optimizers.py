"""Optimizers that are others than were asked for."""

from __future__ import annotations

import dataclasses

import torch

from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore.testing.support.options import ORACLES
from lies.lie import LIES, Lie, declaring, lie


def registry(**kinds):
    def tell(backend):
        made = Optimizers()
        register_torch_optimizers(made, fused=("adagrad", "adam", "adamw", "sgd"))
        for name, kind in kinds.items():
            made.register(name, "lying", kind, priority=99)
        return dataclasses.replace(backend, optimizers=made)

    return tell


def making(name, kind):
    """A backend that makes optimizers of that name by a class of its own."""

    class Lying(Optimizers):
        def create(self, wanted, params, *, lr=None, route="auto", **options):
            if wanted != name:
                return super().create(wanted, params, lr=lr, route=route, **options)
            return kind(params, **({} if lr is None else {"lr": lr}), **options)

    def tell(backend):
        made = Lying()
        register_torch_optimizers(made, fused=("adagrad", "adam", "adamw", "sgd"))
        return dataclasses.replace(backend, optimizers=made)

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


class _CountsForAll(torch.optim.Adam):
    """A kernel with one count of steps for all parameters."""

    def step(self, closure=None):
        super().step(closure)
        counts = [entry["step"] for entry in self.state.values()]
        for count in counts:
            count.copy_(max(counts))


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


def adam_for_adamw(params, **options):
    return torch.optim.Adam(params, **options)


class _OnlyTheFirstGroups(torch.optim.SGD):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._first = len(self.param_groups)

    def step(self, closure=None):
        late, self.param_groups = self.param_groups[self._first :], self.param_groups[: self._first]
        try:
            return super().step(closure)
        finally:
            self.param_groups += late


class _NoClosure(torch.optim.SGD):
    def step(self, closure=None):
        super().step()


class _ReadsNobodys(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "state": {}})


class _StateForShow(torch.optim.AdamW):
    """What it goes by is not what it shows."""

    def step(self, closure=None):
        hidden = self.__dict__.setdefault("_hidden", {})
        for parameter, mean in hidden.items():
            self.state[parameter]["exp_avg"].copy_(mean)
        super().step()
        for parameter, entry in self.state.items():
            hidden[parameter] = entry["exp_avg"].clone()
            entry["exp_avg"].zero_()


class _CountsAnew(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(0.0)


class _OwnMoments(torch.optim.RMSprop):
    """A kernel that keeps its moments by parameter, whatever is loaded later."""

    def step(self, closure=None):
        own = self.__dict__.setdefault("_own", {})
        for parameter, kept in own.items():
            self.state[parameter]["square_avg"].copy_(kept)
        super().step(closure)
        for parameter, entry in self.state.items():
            own[parameter] = entry["square_avg"].clone()


class _CountsInBf16(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        for parameter, entry in self.state.items():
            entry["step"].copy_(entry["step"].to(parameter.dtype))


def without_lamb(backend):
    class Lying(Optimizers):
        def names(self):
            return tuple(name for name in super().names() if name != "lamb")

    made = Lying()
    register_torch_optimizers(made, fused=("adagrad", "adam", "adamw", "sgd"))
    return dataclasses.replace(backend, optimizers=made)


def adamw_of_any_state(params, state_dtype=None, **options):
    return torch.optim.AdamW(params, **options)


def ignoring(name, option):
    """A backend whose optimizer takes an option, and does without it."""
    kind = ORACLES[name][0]

    def make(params, **options):
        return kind(params, **{key: value for key, value in options.items() if key != option})

    return registry(**{name: make})


def foreach_rmsprop(params, **options):
    return torch.optim.RMSprop(params, foreach=True, **options)


for _name, _tell, _test, _says, _arguments in (
    ("adamw_that_is_adam", registry(adamw=adam_for_adamw), "test_numerics", "route lying with", {"name": "adamw"}),
    ("optimizer_that_ignores_schedules", registry(sgd=_FixedRate), "test_changes_between_steps", "when it was made",
     {"name": "sgd"}),
    ("state_dict_that_loses_momentum", making("sgd", _LosesMomentum), "test_state_round_trip", "was not restored",
     {"name": "sgd"}),
    ("state_of_others_that_is_dropped", making("adamw", _ReadsNobodys), "test_state_layout", "do not go on alike",
     {"name": "adamw"}),
    ("optimizer_that_uses_old_gradients", registry(sgd=_KeepsGradients), "test_no_gradient_is_no_update", "was changed",
     {"name": "sgd"}),
    ("optimizer_that_ignores_latecomers", registry(sgd=_IgnoresLatecomers), "test_no_gradient_is_no_update", "late",
     {"name": "sgd"}),
    ("count_of_all_parameters", making("adam", _CountsForAll), "test_no_gradient_is_no_update", "late",
     {"name": "adam"}),
    ("optimizer_of_the_first_groups", making("sgd", _OnlyTheFirstGroups), "test_group_added_later", "added later",
     {"name": "sgd"}),
    ("optimizer_without_closures", making("sgd", _NoClosure), "test_closure", "returns None", {"name": "sgd"}),
    ("state_that_nobody_else_can_read", making("adamw", _OwnLayout), "test_state_layout", "the state is ['my_step'",
     {"name": "adamw"}),
    ("state_that_only_it_can_go_on_from", registry(adamw=_StateForShow), "test_state_between_routes",
     "after lying -> fused the parameters are off", {"name": "adamw"}),
    ("count_that_is_lost", making("adamw", _CountsAnew), "test_state_layout", "do not go on alike", {"name": "adamw"}),
    ("state_that_the_same_optimizer_ignores", making("rmsprop", _OwnMoments), "test_state_round_trip",
     "the state after 2 steps was not restored in the same optimizer", {"name": "rmsprop"}),
    ("count_in_bf16", making("adamw", _CountsInBf16), "test_count_of_updates",
     "the count of bfloat16 parameters is {4096.0}", {"name": "adamw"}),
    ("moments_in_bf16", registry(adamw=torch.optim.AdamW), "test_low_precision_state",
     "of a bfloat16 parameter is kept in torch.bfloat16", {"name": "adamw", "dtype": "bfloat16"}),
    ("moments_in_fp16", registry(adamw=torch.optim.AdamW), "test_low_precision_state",
     "of a float16 parameter is kept in torch.float16", {"name": "adamw", "dtype": "float16"}),
    ("state_dtype_that_is_ignored", registry(adamw=adamw_of_any_state), "test_state_dtype",
     "state_dtype=bfloat16 keeps the state in {torch.float32}", {"name": "adamw"}),
    ("eight_optimizers", without_lamb, "test_nine", "lamb is missing", {}),
    ("bf16_update_of_some_elements", registry(sgd=_SkipsSome), "test_model_dtypes", "some elements are off",
     {"name": "sgd", "dtype": "bfloat16"}),
):  # fmt: skip
    LIES[_name] = Lie(_name, _tell, f"TestOptimizers.{_test}", _says, _arguments)


@lie("TestOptimizers.test_native", says="operators for 4 parameters", name="rmsprop")
def native_optimizer_that_is_a_loop(backend):
    return declaring(registry()(backend), native_optimizers=("rmsprop",))


@lie("TestOptimizers.test_native", says="what torch's foreach loop does", name="rmsprop")
def native_optimizer_that_is_foreach(backend):
    return declaring(registry(rmsprop=foreach_rmsprop)(backend), native_optimizers=("rmsprop",))


@lie("TestOptimizers.test_every_native_is_there", says="native_optimizers declares zzz, which cannot be made")
def native_optimizer_that_is_not_there(backend):
    return declaring(backend, native_optimizers=("adamw", "zzz"))


@lie("TestOptimizers.test_native", says="unexpected success: a native adam", name="adam")
def native_optimizer_that_is_not_declared(backend):
    return declaring(backend, native_optimizers=("sgd",))


class _FirstSixtyFour(torch.optim.Adam):
    """A kernel whose list of addresses is full, in silence."""

    full = 64

    @torch.no_grad()
    def step(self, closure=None):
        kept = [(parameter, parameter.clone()) for parameter in self.param_groups[0]["params"][self.full :]]
        loss = super().step(closure)
        for parameter, before in kept:
            parameter.copy_(before)
        return loss


class _FirstTwoHundred(_FirstSixtyFour):
    full = 200


@lie("TestOptimizers.test_any_number_of_tensors", says="of 263 tensors and an empty one, those at [200, ", name="adam")
def kernel_of_two_hundred_tensors(backend):
    return making("adam", _FirstTwoHundred)(backend)


@lie("TestOptimizers.test_many_large_and_late", says="68 of 132 tensors are wrong", name="adam")
def kernel_of_sixty_four_tensors(backend):
    return making("adam", _FirstSixtyFour)(backend)
