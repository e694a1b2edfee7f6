"""Conformance of the scaler role: overflow skips, scales move, gradients are unscaled."""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import compress, product

import pytest
import torch
from torch import Tensor, nn

from accelcore import Backend, CheckpointError, ConfigurationError, TrainingError
from accelcore.testing.suite.scaler_gradients import (
    GradientsOfScaler,
    Make,
    every_optimizer,
    make_adaptive,
    make_own,
    make_plain,
    new_gradients,
    parameters_of,
    take_step,
)
from accelcore.testing.support.oracles import eps, error, overflow, spoil, weights
from accelcore.testing.support.usable import DeviceTests


class TestScaler(GradientsOfScaler, DeviceTests):
    """Dynamic, static and no loss scaling."""

    @every_optimizer
    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_overflow_skips_and_halves(self, accel: Backend, make: Make, value: float) -> None:
        """An inf or NaN in one gradient skips the whole update and halves the scale; the next clean step updates."""
        parameters = parameters_of(accel)
        optimizer, scaler, before = make(accel, parameters), accel.scaler.create(init=1024.0), weights(parameters)
        new_gradients(accel, scaler, parameters)
        spoil(parameters[1], value)
        take_step(scaler, optimizer)
        assert all(map(torch.equal, weights(parameters), before)), "it was not skipped"
        assert scaler.state_dict()["scale"] == 512.0, "the scale was not halved"
        new_gradients(accel, scaler, parameters)
        take_step(scaler, optimizer)
        after = weights(parameters)
        assert all(bool(a.isfinite().all()) for a in after), "the skipped step left its inf behind"
        assert not any(map(torch.equal, after, before)), "a clean step updated nothing"
        assert scaler.skipped == 1

    @every_optimizer
    def test_overflow_ages_no_state(self, accel: Backend, make: Make) -> None:
        """A skipped update does not change momentum and step counts."""
        parameters = parameters_of(accel)
        optimizer, scaler = make(accel, parameters), accel.scaler.create(init=1024.0)
        for spoilt in (False, True):
            before, state = weights(parameters), copy.deepcopy(optimizer.state_dict()["state"])
            new_gradients(accel, scaler, parameters)
            if spoilt:
                spoil(parameters[0], math.inf)
            take_step(scaler, optimizer)
        assert all(map(torch.equal, weights(parameters), before)), "a skipped update changed a weight"
        for number, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                same = torch.equal(value, state[number][key]) if isinstance(value, Tensor) else True
                assert same, f"{key} was changed by an update that was skipped"

    def test_scale_is_on_the_device(self, accel: Backend) -> None:
        """A scaled loss is the loss times the scale, on the same device, in the same dtype."""
        loss = torch.tensor(100_003.0, device=accel.device)  # more than fp16 holds
        scaled = accel.scaler.create(init=128.0).scale(loss)
        assert (scaled.device, scaled.dtype) == (accel.device, loss.dtype)
        assert scaled.item() != loss.item(), "the scaler is off: it left the loss as it was"
        assert scaled.item() == 128 * 100_003.0, "the scale is not the one that was asked for"
        for name in accel.capabilities.model_dtypes:
            exact = torch.tensor(1 + eps(getattr(torch, name)), dtype=getattr(torch, name), device=accel.device)
            scaled = accel.scaler.create(init=2.0**17).scale(exact)  # more than fp16 holds
            assert scaled.cpu().double() == 2**17 * exact.cpu().double(), f"the scale rounds a loss in {name}"

    def test_overflow_flag(self, accel: Backend) -> None:
        """An overflow that no gradient shows skips the step if the device reports it by a flag, and only then."""
        flagged, parameters = accel.capabilities.overflow_flag, parameters_of(accel)
        optimizer, scaler, before = make_plain(accel, parameters), accel.scaler.create(init=64.0), weights(parameters)
        new_gradients(accel, scaler, parameters)
        assert overflow(accel.device).item() > 0
        take_step(scaler, optimizer)
        skipped = all(map(torch.equal, weights(parameters), before))
        if flagged:
            assert skipped, "it declares an overflow flag, and what only the flag could show was not seen"
        else:
            assert not skipped, "it declares no overflow flag, and skipped a step whose gradients are finite"

    def test_growth(self, accel: Backend) -> None:
        """After `interval` clean steps the scale grows, up to `max`; an overflow shrinks it and restarts the count."""
        parameters = parameters_of(accel)
        optimizer, scales = make_plain(accel, parameters), []
        scaler = accel.scaler.create(init=4.0, growth=4.0, backoff=0.25, interval=2, max=32.0)
        for step in range(9):
            new_gradients(accel, scaler, parameters, 1e-3)
            if step == 3:
                spoil(parameters[0], math.inf)
            take_step(scaler, optimizer)
            scales.append(scaler.state_dict()["scale"])
        assert scales == [4.0, 16.0, 16.0, 4.0, 4.0, 16.0, 16.0, 32.0, 32.0], "the scale does not move as it was told"
        scaler = accel.scaler.create(init=2.0**126, growth=4.0, interval=1, max=2.0**127)  # 2**128 is beyond fp32
        for _ in range(2):
            new_gradients(accel, scaler, parameters, 2.0**-20)
            take_step(scaler, optimizer)
            assert scaler.state_dict()["scale"] in (2.0**126, 2.0**127), "the scale grows beyond its largest value"

    def test_endless_overflow_has_a_floor(self, accel: Backend) -> None:
        """The scale never falls below `min`, however long gradients overflow, and training recovers.

        There, too, an overflow restarts the count of clean steps.
        """
        parameters = parameters_of(accel)
        optimizer, scaler = make_plain(accel, parameters), accel.scaler.create(init=8.0, min=2.0, interval=2)
        for _ in range(12):
            new_gradients(accel, scaler, parameters)
            spoil(parameters[0], math.inf)
            take_step(scaler, optimizer)
        assert scaler.state_dict()["scale"] == 2.0, "the scale fell below its floor"
        assert scaler.skipped == 12
        scales = []
        for spoilt in (False, True, False, False):
            new_gradients(accel, scaler, parameters, 1e-3)
            if spoilt:
                spoil(parameters[0], math.inf)
            take_step(scaler, optimizer)
            scales.append(scaler.state_dict()["scale"])
        assert scales == [2.0, 2.0, 2.0, 4.0], f"from its floor the scale moves by {scales}"
        assert all(bool(weight.isfinite().all()) for weight in weights(parameters))

    @every_optimizer
    def test_unscale_then_clip(self, accel: Backend, make: Make) -> None:
        """After `unscale_` gradients have their true values; clipping sees the true norm, and step keeps them."""
        parameters = parameters_of(accel)
        optimizer, scaler = make(accel, parameters), accel.scaler.create(init=65536.0)
        true = torch.cat(weights(parameters)).norm().item()
        new_gradients(accel, scaler, parameters)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        assert abs(norm.item() - true) < 1e-5 * true, "the gradients were not unscaled"
        clipped = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        take_step(scaler, optimizer)
        reference = parameters_of(accel)
        for parameter, gradient in zip(reference, clipped, strict=True):
            parameter.grad = gradient
        make(accel, reference).step()
        off = max(map(error, weights(parameters), weights(reference)))
        assert off < 1e-6, "step changed the gradients that were clipped"

    @pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled"])
    def test_several_optimizers(self, accel: Backend, unscales: bool) -> None:
        """Each of several optimizers is skipped by its own overflow only; that of any moves the scale, once."""
        members = parameters_of(accel, 4, 6, 5)
        optimizers = [
            make(accel, [own]) for make, own in zip((make_plain, make_own, make_adaptive), members, strict=True)
        ]
        scaler = accel.scaler.create(init=1024.0, interval=1)
        for spoilt in product((False, True), repeat=3):
            before, scale = weights(members), scaler.state_dict()["scale"]
            new_gradients(accel, scaler, members)
            for parameter in compress(members, spoilt):
                spoil(parameter, math.inf)
            for call in (scaler.unscale_, scaler.step) if unscales else (scaler.step,):
                for optimizer in optimizers:
                    call(optimizer)
            scaler.update()
            skipped = tuple(map(torch.equal, weights(members), before))
            if not accel.capabilities.overflow_flag:  # one for all gradients
                assert skipped == spoilt, f"of three optimizers {spoilt} overflowed, and {skipped} were skipped"
            expected = scale / 2 if any(spoilt) else scale * 2
            assert scaler.state_dict()["scale"] == expected, f"{spoilt} overflowed, and the scale is not {expected}"
        assert scaler.skipped == 7
        scaler, scales = accel.scaler.create(init=4.0, interval=2), []
        for _ in range(4):
            new_gradients(accel, scaler, members, 1e-3)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.state_dict()["scale"])
        assert scales == [4.0, 8.0, 8.0, 16.0], f"a step of three optimizers is not one clean step: {scales}"
        for spoilt_, expected in ((False, 16.0), (True, 8.0), (False, 8.0), (False, 16.0)):
            new_gradients(accel, scaler, members, 1e-3)
            if spoilt_:
                spoil(members[0], math.inf)
            scaler.unscale_(optimizers[0])
            scaler.update()
            found = scaler.state_dict()["scale"]
            assert found == expected, f"gradients that were unscaled, and not stepped, make the scale {found}"

    @every_optimizer
    @pytest.mark.parametrize("way", ["a group", "a parameter", "a gradient"])
    def test_parameters_that_came_later(self, accel: Backend, make: Make, way: str) -> None:
        """Gradients of parameters that an optimizer was given later are unscaled and looked at, too."""
        first, late = parameters_of(accel, 8, 5)
        members = [first, late] if way == "a gradient" else [first]
        optimizer, scaler = make(accel, members), accel.scaler.create(init=64.0)
        for _ in range(2):
            new_gradients(accel, scaler, [first])
            take_step(scaler, optimizer)
        if way == "a group":
            optimizer.add_param_group({"params": [late]})
        elif way == "a parameter":
            optimizer.param_groups[0]["params"].append(late)
        before = weights([late])
        assert torch.equal(before[0], torch.linspace(1, 2, 5).double()), "a parameter without gradient was changed"
        new_gradients(accel, scaler, [first, late], 2.0**-6)
        scaler.unscale_(optimizer)
        assert late.grad is not None
        assert error(late.grad, 2.0**-6 * before[0]) < 1e-6, f"{way} that came later was not unscaled"
        take_step(scaler, optimizer)
        after = weights([first, late])
        assert not torch.equal(after[1], before[0]), f"{way} that came later is not updated"
        assert scaler.skipped == 0, "a gradient that is absent counts as overflow"
        new_gradients(accel, scaler, [first, late], 2.0**-6)
        spoil(late, math.inf)
        take_step(scaler, optimizer)
        assert all(map(torch.equal, weights([first, late]), after)), f"an overflow in {way} that came later was missed"

    @every_optimizer
    def test_calls_out_of_order(self, accel: Backend, make: Make) -> None:
        """A call twice, unscaling after a step, or updating before it is an error; `abandon` begins the step again."""
        parameters = parameters_of(accel)
        optimizer, scaler = make(accel, parameters), accel.scaler.create()
        with pytest.raises(TrainingError):
            scaler.update()
        for calls in ((scaler.unscale_, scaler.step), (scaler.step,)):
            new_gradients(accel, scaler, parameters)
            for call in calls:
                call(optimizer)
                with pytest.raises(TrainingError):
                    call(optimizer)
            with pytest.raises(TrainingError):
                scaler.unscale_(optimizer)
            scaler.abandon()
        new_gradients(accel, scaler, parameters)
        take_step(scaler, optimizer)
        assert scaler.skipped == 0

    @every_optimizer
    @pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled"])
    def test_gradients_that_are_given(self, accel: Backend, make: Make, unscales: bool) -> None:
        """`gradients` are read in place of the parameters' own; an overflow of another rank skips the step, too."""
        parameters = parameters_of(accel)
        optimizer, scaler, before = make(accel, parameters), accel.scaler.create(init=64.0), weights(parameters)
        for mine, others in ((1.0, 1.0), (1.0, 0.0), (math.inf, 0.0), (1.0, 0.0)):
            new_gradients(accel, scaler, parameters)
            given = [torch.ones_like(parameter) for parameter in parameters]
            if math.isinf(mine):
                given[1].mul_(overflow(accel.device))
            call = scaler.unscale_ if unscales else scaler.step
            call(optimizer, given, partial(torch.add, others * torch.ones((), device=accel.device)))
            if unscales:
                scaler.step(optimizer)
            scaler.update()
            same = all(map(torch.equal, weights(parameters), before))
            overflowed = bool(others) or math.isinf(mine)
            assert same == overflowed, f"{mine} in the gradients and {others} of other ranks: skipped is {same}"
            before = weights(parameters)

    def test_state_round_trip(self, accel: Backend) -> None:
        """A restored scaler has the scale, growth count and skipped steps of the saved one."""
        parameters = parameters_of(accel)
        optimizer, scaler = make_plain(accel, parameters), accel.scaler.create(init=16.0, interval=3)
        for step in range(3):
            new_gradients(accel, scaler, parameters, 1e-3)
            if step == 0:
                spoil(parameters[0], math.nan)
            take_step(scaler, optimizer)
        twin = accel.scaler.create(init=2.0, interval=7)
        new_gradients(accel, twin, parameters, 1e-3)
        take_step(twin, make_plain(accel, parameters))  # it is in use already
        twin.load_state_dict(scaler.state_dict())
        assert twin.skipped == scaler.skipped == 1
        one, scale = torch.ones((), device=accel.device), scaler.state_dict()["scale"]
        for scaler_ in (scaler, twin):
            assert scaler_.scale(one).item() == scale, "the restored scale does not count yet"
            new_gradients(accel, scaler_, parameters, 1e-3)
            scaler_.unscale_(optimizer)
            for parameter, weight in zip(parameters, weights(parameters), strict=True):
                assert parameter.grad is not None
                assert error(parameter.grad, 1e-3 * weight) < 1e-5, "after a restore gradients are unscaled by another"
            take_step(scaler_, optimizer)
        assert twin.state_dict() == scaler.state_dict(), "the restored scaler does not go on as the saved one"

    def test_state_of_torch(self, accel: Backend) -> None:
        """The state of torch.amp.GradScaler can be loaded; one with invalid values is refused."""
        scaler = accel.scaler.create()
        state = torch.amp.GradScaler("cpu", init_scale=256.0).state_dict()
        scaler.load_state_dict(state)
        assert scaler.state_dict()["scale"] == 256.0
        before, other = scaler.state_dict(), {**state, "growth_factor": 8.0, "growth_interval": 7, "_growth_tracker": 5}
        for damaged in ({}, {**other, "scale": -1.0}, {**other, "scale": math.nan}):
            with pytest.raises(CheckpointError):
                scaler.load_state_dict(damaged)
        assert scaler.state_dict() == before, "a refused state was taken in part"

    def test_static(self, accel: Backend) -> None:
        """A static scaler never skips, never moves, and changes no update."""
        parameters, reference = parameters_of(accel), parameters_of(accel)
        scaler = accel.scaler.create(init=1001.0, dynamic=False)
        for chosen, members in ((scaler, parameters), (accel.scaler.none(), reference)):
            new_gradients(accel, chosen, members)
            take_step(chosen, make_plain(accel, members))
        assert max(map(error, weights(parameters), weights(reference))) < 1e-6
        assert scaler.skipped == 0
        assert scaler.scale(torch.ones((), device=accel.device)).item() == 1001.0

    @pytest.mark.parametrize(
        "options", [{"init": 0.0}, {"init": math.nan}, {"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}, {"min": 0.0}]
    )
    def test_nonsense_is_refused(self, accel: Backend, options: dict[str, float]) -> None:
        """Options with which no scaler can work are refused."""
        with pytest.raises(ConfigurationError):
            accel.scaler.create(**options)  # type: ignore[arg-type]
