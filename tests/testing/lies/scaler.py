"""Loss scales that protect nothing."""

from __future__ import annotations

import dataclasses

import torch

from accelcore.scaling.dynamic import GradScaler, Scalers
from lies.lie import LIES, Lie, declaring, lie


class _FirstGroup(GradScaler):
    def check(self, gradients, multiplier):
        return super().check(gradients, multiplier).fill_(not gradients[0].isfinite().all())


class _WholeVectors(GradScaler):
    def check(self, gradients, multiplier):
        return super().check([each.reshape(-1)[: len(each) // 16 * 16] for each in gradients], multiplier)


class _OfAMillion(GradScaler):
    def check(self, gradients, multiplier):
        return super().check([each.view(-1)[: 2**20] for each in gradients], multiplier)


class _UnscalesAMillion(GradScaler):
    def check(self, gradients, multiplier):
        found = super().check([each.clone() for each in gradients], multiplier)
        super().check([each.view(-1)[: 2**20] for each in gradients], multiplier)
        return found


class _ThroughFp16(GradScaler):
    def check(self, gradients, multiplier):
        found = super().check(gradients, multiplier)
        for each in gradients:
            if each.dtype == torch.bfloat16:
                each.copy_(each.half())
        return found


class _SeesNoNan(GradScaler):
    def check(self, gradients, multiplier):
        found = super().check(gradients, multiplier)
        low = [each for each in gradients if each.dtype == torch.bfloat16]
        return found * (not any(bool(each.isnan().any()) for each in low))


class _FirstRowOfGaps(GradScaler):
    def check(self, gradients, multiplier):
        dense = [each if each.is_contiguous() else each[0].clone() for each in gradients]
        found = super().check(dense, multiplier)
        for each in gradients:
            if not each.is_contiguous():
                each.mul_(multiplier)
        return found


class _ZeroesGradients(GradScaler):
    def step(self, optimizer):
        self.unscale_(optimizer)
        if self.overflowed.item():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.zero_()
        optimizer.step()


class _NeverSkips(GradScaler):
    def step(self, optimizer):
        self.unscale_(optimizer)
        optimizer.step()


class _NeverHalves(GradScaler):
    def update(self, *arguments):
        super().update(*arguments)
        self._scale.fill_(1024.0)


class _NeverUnscales(GradScaler):
    def unscale_(self, optimizer, *arguments):
        super().unscale_(optimizer, *arguments)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= self._scale


class _NoFloor(GradScaler):
    def update(self, *arguments):
        overflow = self.overflowed
        before = self._scale.item()
        super().update(*arguments)
        if overflow is not None and overflow.item():
            self._scale.fill_(before / 2)


class _ForgetsItsCount(GradScaler):
    def state_dict(self):
        return {**super().state_dict(), "_growth_tracker": 0}


class _AllowsTwo(GradScaler):
    def unscale_(self, optimizer):
        self.abandon()
        super().unscale_(optimizer)


class _KeepsTheOldScale(GradScaler):
    old = None

    def load_state_dict(self, state):
        self.old = self._scale.clone()
        super().load_state_dict(state)

    def scale(self, loss):
        scaled = super().scale(loss)
        return scaled if self.old is None else loss * self.old


class _CountsOptimizers(GradScaler):
    def update(self, *arguments):
        self._clean_steps += len(self._progress) - 1
        super().update(*arguments)


class _CountsThemAfterwards(GradScaler):
    def update(self, *arguments):
        more = len(self._progress) - 1
        super().update(*arguments)
        if self._clean_steps:
            self._clean_steps += more


class _InverseInBf16(GradScaler):
    def check(self, gradients, multiplier):
        return super().check(gradients, multiplier.bfloat16().float())


class _ScalesInFp32(GradScaler):
    def scale(self, loss):
        return super().scale(loss.float())


class _OfTheFirstParameters(GradScaler):
    def _find_overflow(self, optimizer, gradients, *rest):
        kept = self.__dict__.setdefault("kept", {})
        members = kept.setdefault(id(optimizer), [p for group in optimizer.param_groups for p in group["params"]])
        present = [value.grad for value in members if value.grad is not None]
        return super()._find_overflow(optimizer, present, *rest)


class _OfFp32(GradScaler):
    def check(self, gradients, multiplier):
        super().check([each for each in gradients if each.dtype != torch.float32], multiplier)
        return super().check([each for each in gradients if each.dtype == torch.float32], multiplier)


class _OfThisRank(GradScaler):
    def _find_overflow(self, optimizer, gradients, multiplier, any_rank):
        return super()._find_overflow(optimizer, gradients, multiplier, None)


class _NeverAbandons(GradScaler):
    def abandon(self):
        if self.overflowed is None:
            super().abandon()


class _FirstOptimizer(GradScaler):
    @property
    def overflowed(self):
        return next((step.found for step in self._progress.values()), None)


class _SeesFlags(GradScaler):
    def check(self, gradients, multiplier):
        return super().check(gradients, multiplier).fill_(1.0)


class _LoadsTheCountFirst(GradScaler):
    def load_state_dict(self, state):
        if "_growth_tracker" in state:
            self._clean_steps.fill_(state["_growth_tracker"])
        super().load_state_dict(state)


class _GrowsBeyond(GradScaler):
    def update(self, *arguments):
        super().update(*arguments)
        if self._scale >= 2.0**100:
            self._scale.mul_(torch.inf)


class _KeepsItsCountAtTheFloor(GradScaler):
    def update(self, *arguments):
        count, scale = int(self._clean_steps), float(self._scale)
        super().update(*arguments)
        if scale == float(self._scale) == self._settings.min and not self._clean_steps:
            self._clean_steps.fill_(count)


class _MovesByStepsAlone(GradScaler):
    def update(self, *arguments):
        if any(each.stepped for each in self._progress.values()):
            return super().update(*arguments)
        return self.abandon()


def _scalers(kind):
    class Lying(Scalers):
        def create(self, **options):
            made = super().create(**options)
            if isinstance(made, GradScaler):
                made.__class__ = kind
            return made

    return lambda backend: dataclasses.replace(backend, scaler=Lying(backend.device))


def without(option):
    """A backend whose scaler does without what it is told in an option."""

    class Lying(Scalers):
        def create(self, **options):
            return super().create(**{key: value for key, value in options.items() if key != option})

    return lambda backend: dataclasses.replace(backend, scaler=Lying(backend.device))


OVERFLOW = {"value": float("inf")}


def _plain(accel, parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def _own(accel, parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


for _name, _kind, _test, _says, _arguments in (
    ("scaler_that_never_skips", _NeverSkips, "test_overflow_skips_and_halves", "it was not skipped",
     {**OVERFLOW, "make": _plain}),
    ("scaler_that_reads_rows", _FirstRowOfGaps, "test_gradients_in_any_strides", "transposed, with an inf at 2",
     {"kind": "transposed"}),
    ("scaler_that_never_halves", _NeverHalves, "test_overflow_skips_and_halves", "the scale was not halved",
     {**OVERFLOW, "make": _plain}),
    ("scaler_that_never_unscales", _NeverUnscales, "test_unscale_then_clip", "were not unscaled", {"make": _plain}),
    ("scale_that_falls_to_nothing", _NoFloor, "test_endless_overflow_has_a_floor", "below its floor", {}),
    ("scaler_that_forgets_its_count", _ForgetsItsCount, "test_state_round_trip", "does not go on as the saved", {}),
    ("scaler_of_the_first_group", _FirstGroup, "test_overflow_anywhere", "an overflow was not found",
     {"group": 1, "element": 0}),
    ("scaler_of_whole_vectors", _WholeVectors, "test_overflow_anywhere", "an overflow was not found",
     {"group": 0, "element": 2**21 + 2}),
    ("scaler_of_a_million", _OfAMillion, "test_overflow_anywhere", "an overflow was not found",
     {"group": 0, "element": 2**20 + 1}),
    ("scaler_that_unscales_a_million", _UnscalesAMillion, "test_overflow_anywhere", "are not unscaled",
     {"group": 0, "element": 0}),
    ("scaler_of_bf16_through_fp16", _ThroughFp16, "test_gradients_of_several_dtypes", "of gradients in torch.bfloat16",
     {}),
    ("scaler_that_sees_no_nan_in_bf16", _SeesNoNan, "test_gradients_of_several_dtypes", "nan in torch.bfloat16", {}),
    ("scaler_that_steps_with_zeroes", _ZeroesGradients, "test_overflow_ages_no_state", "skipped update changed",
     {"make": _own}),
    ("scaler_that_unscales_twice", _AllowsTwo, "test_calls_out_of_order", "DID NOT RAISE", {"make": _plain}),
    ("scale_of_the_first_optimizer", _FirstOptimizer, "test_several_optimizers", "and the scale is not",
     {"unscales": False}),
    ("scaler_of_an_undeclared_flag", _SeesFlags, "test_overflow_flag", "declares no overflow flag", {}),
    ("scaler_of_gradients_in_fp32", _OfFp32, "test_overflow_in_any_tensor", "gradient 31 of 300 was not found",
     {"make": _own, "position": 31}),
    ("scaler_of_one_rank", _OfThisRank, "test_gradients_that_are_given", "1.0 of other ranks: skipped is False",
     {"make": _plain, "unscales": False}),
    ("scaler_that_goes_on_with_a_failed_step", _NeverAbandons, "test_calls_out_of_order", "called twice",
     {"make": _plain}),
    ("state_that_is_refused_after_its_count", _LoadsTheCountFirst, "test_state_of_torch", "taken in part", {}),
    ("scale_beyond_fp32", _GrowsBeyond, "test_growth", "grows beyond its largest", {}),
    ("count_that_a_floor_keeps", _KeepsItsCountAtTheFloor, "test_endless_overflow_has_a_floor", "from its floor", {}),
    ("scale_that_moves_by_steps", _MovesByStepsAlone, "test_several_optimizers", "and not stepped",
     {"unscales": False}),
    ("scale_of_before_a_restore", _KeepsTheOldScale, "test_state_round_trip", "does not count yet", {}),
    ("scale_that_grows_with_optimizers", _CountsOptimizers, "test_several_optimizers", "the scale is not",
     {"unscales": True}),
    ("scale_that_counts_optimizers", _CountsThemAfterwards, "test_several_optimizers", "is not one clean step",
     {"unscales": True}),
    ("scale_in_fp32", _ScalesInFp32, "test_scale_is_on_the_device", "rounds a loss in float64", {}),
    ("scaler_of_the_first_parameters", _OfTheFirstParameters, "test_parameters_that_came_later", "was not unscaled",
     {"make": _plain, "way": "a group"}),
    ("scaler_of_the_first_list", _OfTheFirstParameters, "test_parameters_that_came_later", "was not unscaled",
     {"make": _own, "way": "a parameter"}),
):  # fmt: skip
    LIES[_name] = Lie(_name, _scalers(_kind), f"TestScaler.{_test}", _says, _arguments)

LIES["scaler_with_a_rounded_inverse"] = Lie(
    "scaler_with_a_rounded_inverse", _scalers(_InverseInBf16),
    "TestOptimizers.test_overflow_is_skipped_by_every_optimizer", "with scaled gradients", {"name": "asgd"},
)  # fmt: skip


@lie("TestScaler.test_overflow_flag", says="declares an overflow flag")
def flag_that_nobody_reads(backend):
    return declaring(backend, overflow_flag=True)


@lie("TestScaler.test_scale_is_on_the_device", says="the scaler is off")
def scaler_that_turns_itself_off(backend):
    """As torch.amp.GradScaler() does, which is for CUDA unless it is told (pytorch#196195)."""

    class Off(Scalers):
        def create(self, **options):
            return self.none()

    return dataclasses.replace(backend, scaler=Off(backend.device))
