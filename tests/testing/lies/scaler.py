"""Loss scales that protect nothing."""

from __future__ import annotations

import dataclasses

import torch

from accelcore.roles.scaler import GradScaler, Scalers
from lies.lie import LIES, Lie


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
