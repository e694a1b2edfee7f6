"""Conformance of the optimizer state: its layout, its precision, and moving it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelcore import Backend, ConfigurationError, UnsupportedError
from accelcore.testing.support.declared import declared
from accelcore.testing.support.options import EVERY, LR, NINE, ORACLES, STEPS, gradients, oracle, parameters, step
from accelcore.testing.support.oracles import eps, error, weights

_UPDATES = 4099  # neither bf16 nor fp16 has the next whole number


def with_rate(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the suite's learning rate."""
    return {"lr": LR, **options}


def on_host(name: str, options: dict[str, Any]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Return the oracle in float64, and its parameters."""
    members = parameters(torch.device("cpu"), torch.float64)
    return oracle(name, members, **with_rate(options)), members


def routes_of(
    accel: Backend, name: str, options: dict[str, Any]
) -> Iterator[tuple[str, torch.optim.Optimizer, list[nn.Parameter]]]:
    """Yield every route that takes the request, with its optimizer and the optimizer's parameters."""
    taken = 0
    for choice in accel.optimizers.explain(name, **with_rate(options)):
        members = parameters(accel.device)
        try:
            optimizer = accel.optimizers.create(name, members, route=choice.route, **with_rate(options))
        except UnsupportedError:
            continue  # this route does not take these options
        taken += 1
        yield choice.route, optimizer, members
    assert taken, f"no route to {name} takes {options}"


def state_error(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> float:
    """Return the largest error between the states, of the entries that both have."""
    states, expected_states = found.state_dict()["state"], expected.state_dict()["state"]
    return max(
        (
            error(torch.as_tensor(states[number][key]), torch.as_tensor(value))
            for number, entry in expected_states.items()
            for key, value in entry.items()
            if value is not None and states.get(number, {}).get(key) is not None
        ),
        default=0.0,
    )


def _in_other_strides(value: Any) -> Any:
    """Return a tensor of several dimensions with its first ones, or its last ones, next to each other in memory."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    return value.transpose(0, 1).contiguous().transpose(0, 1) if value.is_contiguous() else value.contiguous()


class StateOfOptimizers:
    """The part of `TestOptimizers` that is about state."""

    @pytest.mark.parametrize("name", EVERY)
    def test_state_round_trip(self, accel: Backend, name: str) -> None:
        """An optimizer restored from a saved state resumes there, hyperparameters included: a new one, and the same.

        A state of other parameters is refused, and changes nothing.
        """
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            options = ORACLES[name][1][-1]
            for route, optimizer, members in routes_of(accel, name, options):
                passed = []
                for number in range(4):
                    passed.append((weights(members), copy.deepcopy(optimizer.state_dict())))
                    step(optimizer, members, number)
                last = weights(members)
                restored = [nn.Parameter(torch.empty_like(parameter)) for parameter in members]
                twin = accel.optimizers.create(name, restored, route=route, lr=LR / 4)
                back = ((2, twin, restored), (2, optimizer, members), (0, optimizer, members), (3, optimizer, members))
                for begin, loaded, own in back:
                    with torch.no_grad():
                        for parameter, value in zip(own, passed[begin][0], strict=True):
                            parameter.copy_(value)
                    loaded.load_state_dict(copy.deepcopy(passed[begin][1]))
                    for number in range(begin, 4):
                        step(loaded, own, number)
                    kind = "a new optimizer" if loaded is twin else "the same optimizer"
                    same = all(error(one, other) < 1e-6 for one, other in zip(own, last, strict=True))
                    assert same, f"route {route}: the state after {begin} steps was not restored in {kind}"
                before = copy.deepcopy(twin.state_dict())
                others = copy.deepcopy(passed[1][1])
                for group in others["param_groups"]:
                    group.update(lr=9.0, params=group["params"][1:])
                with pytest.raises(ValueError):  # noqa: PT011  torch's, by which the first thing checked is named
                    twin.load_state_dict(others)
                same = [group["lr"] for group in twin.param_groups] == [g["lr"] for g in before["param_groups"]]
                assert same, f"route {route}: a state that was refused was taken in part"

    @pytest.mark.parametrize("name", EVERY)
    def test_state_in_other_strides(self, accel: Backend, name: str) -> None:
        """A state that is loaded in other strides than its parameters' is read by its elements."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            for route, optimizer, members in routes_of(accel, name, ORACLES[name][1][-1]):
                for number in range(2):
                    step(optimizer, members, number)
                copies = [nn.Parameter(parameter.detach().clone()) for parameter in members]
                saved = copy.deepcopy(optimizer.state_dict())
                for entry in saved["state"].values():
                    entry.update({key: _in_other_strides(value) for key, value in entry.items()})
                twin = accel.optimizers.create(name, copies, route=route, lr=LR)
                twin.load_state_dict(saved)
                for number in range(2, 4):
                    step(optimizer, members, number)
                    step(twin, copies, number)
                off = max(map(error, copies, members))
                assert off < 1e-6, f"route {route}: after a state in other strides was loaded it is off by {off:.1e}"

    @pytest.mark.parametrize("name", EVERY)
    def test_group_of_several_dtypes(self, accel: Backend, name: str) -> None:
        """Parameters of several dtypes in one group are updated as in float64, but for rounding."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            dtypes = [getattr(torch, each) for each in accel.capabilities.model_dtypes]
            options = with_rate(ORACLES[name][1][-1])
            members = [
                each for own in zip(*(parameters(accel.device, each) for each in dtypes), strict=True) for each in own
            ]
            expected = [nn.Parameter(each.detach().to("cpu", torch.float64, copy=True)) for each in members]
            try:
                optimizer = accel.optimizers.create(name, members, **options)
            except UnsupportedError:
                return  # eps is 0 in one of them, or the device takes one dtype at a time
            reference = oracle(name, expected, **options)
            for number in range(STEPS):
                given = [each.bfloat16() for each in gradients(number) for _ in dtypes]
                for each, own in ((optimizer, members), (reference, expected)):
                    for parameter, gradient in zip(own, given, strict=True):
                        parameter.grad = torch.empty_like(parameter).copy_(gradient)
                    each.step()
            for parameter, right in zip(members, expected, strict=True):
                exact = parameter.dtype == torch.float64  # but for a norm of the group, which is of fp32 members, too
                off, limit = error(parameter, right), 5e-9 if exact else max(2e-5, STEPS * eps(parameter.dtype))
                assert off < limit, f"beside other dtypes, a parameter in {parameter.dtype} is off by {off:.1e}"

    @pytest.mark.parametrize("name", EVERY)
    def test_count_of_updates(self, accel: Backend, name: str) -> None:
        """Updates are counted one by one in every dtype of parameters, also after some thousands."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            for dtype in accel.capabilities.model_dtypes:
                members = parameters(accel.device, getattr(torch, dtype))
                try:
                    optimizer = accel.optimizers.create(name, members, lr=LR)
                except UnsupportedError:
                    continue  # eps is 0 in this dtype
                step(optimizer, members, 0)
                saved = copy.deepcopy(optimizer.state_dict())
                for entry in saved["state"].values():
                    if isinstance(count := entry.get("step"), Tensor):
                        entry["step"] = torch.full_like(count, _UPDATES)
                    elif count is not None:
                        entry["step"] = _UPDATES
                optimizer.load_state_dict(saved)
                for number in (1, 2):
                    step(optimizer, members, number)
                counts = {float(e["step"]) for e in optimizer.state_dict()["state"].values() if "step" in e}
                assert counts <= {_UPDATES + 2.0}, f"the count of {dtype} parameters is {counts}, not {_UPDATES + 2}"

    @pytest.mark.parametrize("name", EVERY)
    def test_state_layout(self, accel: Backend, name: str) -> None:
        """The state has torch's layout, so that a run on one device can be resumed on another, either way."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            options = with_rate(ORACLES[name][1][-1])
            trained, references = parameters(accel.device), parameters(torch.device("cpu"))
            optimizer, reference = (
                accel.optimizers.create(name, trained, **options),
                oracle(name, references, **options),
            )
            for number in range(2):
                step(optimizer, trained, number)
                step(reference, references, number)
            found, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
            assert found.keys() == expected.keys()
            for number, entry in expected.items():
                assert found[number].keys() == entry.keys(), f"the state is {list(found[number])}, not {list(entry)}"
                for key, value in entry.items():
                    if isinstance(value, Tensor):
                        assert found[number][key].shape == value.shape, key
            # Each continues from the other's state, in which steps may be counted by a plain number.
            saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(reference.state_dict())
            for entry in saved[0]["state"].values():  # as a checkpoint has it: torch leaves `step` where it is
                entry.update({key: value.cpu() for key, value in entry.items() if isinstance(value, Tensor)})
            for entry in saved[1]["state"].values():
                entry.update({key: int(value) for key, value in entry.items() if key == "step"})
            twin, other = accel.optimizers.create(name, trained, **options), oracle(name, references, **options)
            twin.load_state_dict(saved[1])
            other.load_state_dict(saved[0])
            for number in range(2, 4):
                step(twin, trained, number)
                step(other, references, number)
            assert max(map(error, trained, references)) < 1e-4, "torch's class and this one do not go on alike"

    @pytest.mark.parametrize("name", EVERY)
    def test_state_between_routes(self, accel: Backend, name: str) -> None:
        """A run goes from each route to the next, parameters and state, as if nothing had happened."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            options = ORACLES[name][1][-1]
            reference, expected = on_host(name, options)
            number, saved, passed = 0, None, parameters(accel.device)
            routes = []
            for route, optimizer, members in routes_of(accel, name, options):
                with torch.no_grad():
                    for parameter, value in zip(members, passed, strict=True):
                        parameter.copy_(value)
                if saved is not None:
                    optimizer.load_state_dict(saved)
                for _ in range(2):
                    step(reference, expected, number)
                    step(optimizer, members, number)
                    number += 1
                routes.append(route)
                worst = max(map(error, members, expected))
                assert worst < 5e-5, f"after {' -> '.join(routes)} the parameters are off by {worst:.1e}"
                saved, passed = optimizer.state_dict(), members

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("name", NINE)
    def test_low_precision_state(self, accel: Backend, name: str, dtype: str) -> None:
        """Parameters of low precision are updated by the formula in float32, in which their state is kept, too."""
        if dtype not in accel.capabilities.model_dtypes:
            pytest.skip(f"not declared: models in {dtype}")
        low, options = getattr(torch, dtype), ORACLES[name][1][-1]
        members = parameters(accel.device, low)
        optimizer = accel.optimizers.create(name, members, **with_rate(options))
        reference, expected = on_host(name, options)
        off = []
        for number in range(STEPS):
            start = [parameter.to(low) for parameter in weights(expected)]
            for each, own in ((optimizer, members), (reference, expected)):
                with torch.no_grad():
                    for parameter, value, gradient in zip(own, start, gradients(number), strict=True):
                        parameter.copy_(value)
                        parameter.grad = torch.empty_like(parameter).copy_(gradient.to(low))
                each.step()
            for one, other in zip(weights(members), weights(expected), strict=True):
                off.append(float(((one - other).abs() / (eps(low) / 2 * other.abs() + 1e-4)).max()))
        for entry in optimizer.state_dict()["state"].values():
            for key, value in entry.items():
                kept = value.dtype if isinstance(value, Tensor) else torch.float32
                assert kept == torch.float32, f"the {key} of a {dtype} parameter is kept in {kept}"
        worst = state_error(optimizer, reference)
        assert worst < 0.05, f"the state of route {optimizer.route} is off by {worst:.1e}"
        assert all(each <= 1 for each in off), f"{name} does not round its updates to the nearest {dtype}"
        saved = copy.deepcopy(optimizer.state_dict())
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in members]
        twin = accel.optimizers.create(name, copies, **with_rate(options))
        twin.load_state_dict(copy.deepcopy(saved))
        for number, entry in twin.state_dict()["state"].items():
            for key, value in entry.items():
                same = torch.equal(torch.as_tensor(value), torch.as_tensor(saved["state"][number][key]))
                assert same, f"the {key} of a {dtype} parameter is rounded when it is loaded"
        for each, own in ((optimizer, members), (twin, copies)):
            step(each, own, STEPS)
        for number, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                one, other = torch.as_tensor(value), torch.as_tensor(twin.state_dict()["state"][number][key])
                same = one.dtype == other.dtype and torch.equal(one, other)
                assert same, f"the {key} of a {dtype} parameter is another one in the step after it was loaded"
        assert all(map(torch.equal, members, copies)), f"{dtype} parameters do not go on alike after a state was loaded"

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("name", NINE)
    def test_low_precision_zeros(self, accel: Backend, name: str, dtype: str) -> None:
        """Gradients of 0 divide by no more than `eps`, which is not rounded to the dtype of the parameters."""
        if dtype not in accel.capabilities.model_dtypes:
            pytest.skip(f"not declared: models in {dtype}")
        members = parameters(accel.device, getattr(torch, dtype))
        optimizer = accel.optimizers.create(name, members, lr=LR)
        reference, expected = on_host(name, {})
        for each, own in ((optimizer, members), (reference, expected)):
            for _ in range(2):
                for parameter in own:
                    parameter.grad = torch.zeros_like(parameter)
                each.step()
        off = max(map(error, members, expected))
        assert off < 2 * eps(getattr(torch, dtype)), f"after gradients of 0 {dtype} parameters are off by {off:.1e}"

    @pytest.mark.parametrize("name", NINE)
    def test_state_dtype(self, accel: Backend, name: str) -> None:
        """`state_dtype` is the dtype of the state, also of loaded state."""
        options = {**with_rate(ORACLES[name][1][-1]), **({"momentum": 0.7} if name == "sgd" else {})}

        def found(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
            entries = optimizer.state_dict()["state"].values()
            return {value.dtype for entry in entries for key, value in entry.items() if key != "step"}

        saved: list[Any] = []
        for state_dtype in ("bfloat16", "float32"):
            members = parameters(accel.device)
            optimizer = accel.optimizers.create(name, members, state_dtype=state_dtype, **options)
            wanted = {getattr(torch, state_dtype)}
            for number in range(2):
                step(optimizer, members, number)
            assert found(optimizer) == wanted, f"state_dtype={state_dtype} keeps the state in {found(optimizer)}"
            for other in saved:
                optimizer.load_state_dict(other)
                step(optimizer, members, 2)
                assert found(optimizer) == wanted, f"state_dtype={state_dtype} takes over a state in {found(optimizer)}"
            saved.append(optimizer.state_dict())
        with pytest.raises(ConfigurationError):
            accel.optimizers.create(name, parameters(accel.device), state_dtype="float8", **options)
