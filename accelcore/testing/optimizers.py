"""Conformance of the optimizer registry: every route computes what torch.optim computes, and remembers it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelcore import Backend, ConfigurationError, UnsupportedError
from accelcore.testing.declared import declared
from accelcore.testing.oracles import eps, error, weights

__all__ = ["TestOptimizers"]

# torch's classes in float64 are the oracle; each with its defaults, and with what else it is used with.
ORACLES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "adadelta": (torch.optim.Adadelta, [{}, {"weight_decay": 0.1}]),
    "adagrad": (torch.optim.Adagrad, [{}, {"weight_decay": 0.1, "lr_decay": 0.1}]),
    "adam": (torch.optim.Adam, [{}, {"weight_decay": 0.1, "amsgrad": True}]),
    "adamax": (torch.optim.Adamax, [{}, {"weight_decay": 0.1}]),
    "adamw": (torch.optim.AdamW, [{}, {"eps": 0.1, "maximize": True}, {"weight_decay": 0.1, "betas": (0.8, 0.95)}]),
    "asgd": (torch.optim.ASGD, [{}, {"weight_decay": 0.1}]),
    "nadam": (torch.optim.NAdam, [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}]),
    "radam": (torch.optim.RAdam, [{}, {"weight_decay": 0.1}]),
    "rmsprop": (torch.optim.RMSprop, [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}]),
    "rprop": (torch.optim.Rprop, [{}]),
    "sgd": (
        torch.optim.SGD,
        [
            {},
            {"momentum": 0.9, "dampening": 0.5, "maximize": True},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ],
    ),
}
EVERY = sorted(ORACLES)
LR = 0.05


def _start() -> list[Tensor]:
    """Parameters of several shapes: a matrix, a vector, a scalar, a strided one."""
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(2, 3, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last)
    return [torch.randn(6, 5, generator=generator), torch.randn(7, generator=generator), torch.tensor(0.5), image]


def _gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(tensor.shape, generator=generator) for tensor in _start()]


def _parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(tensor.to(device, dtype)) for tensor in _start()]


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], step: int, *, without: int = -1) -> None:
    for number, (parameter, gradient) in enumerate(zip(parameters, _gradients(step), strict=True)):
        parameter.grad = None
        if number != without:  # with the strides that autograd would give it
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


def _options(options: dict[str, Any]) -> dict[str, Any]:
    return {"lr": LR, **options}


class TestOptimizers:
    """The registry, and every optimizer of torch that it offers."""

    @pytest.mark.parametrize("name", EVERY)
    def test_numerics(self, accel: Backend, name: str) -> None:
        """Five steps equal those of torch's class in float64, for every route that takes the request."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            oracle, variants = ORACLES[name]
            for variant in variants:
                options = _options(variant)
                expected = _parameters(torch.device("cpu"), torch.float64)
                reference = oracle(expected, foreach=False, **options)
                for step in range(5):
                    _step(reference, expected, step)
                for choice in accel.optimizers.explain(name, **options):
                    parameters = _parameters(accel.device)
                    try:
                        optimizer = accel.optimizers.create(name, parameters, route=choice.route, **options)
                    except UnsupportedError:
                        continue  # this route says that it is not for these options
                    for step in range(5):
                        _step(optimizer, parameters, step)
                    worst = max(map(error, parameters, expected))
                    assert worst < 2e-5, f"route {choice.route} with {variant} is off by {worst:.1e}"
                    assert all(parameter.device == accel.device for parameter in parameters)

    @pytest.mark.parametrize("name", EVERY)
    def test_state_round_trip(self, accel: Backend, name: str) -> None:
        """An optimizer restored from a saved state goes on as if nothing had happened, hyperparameters included."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            options = _options(ORACLES[name][1][-1])
            through = _parameters(accel.device)
            optimizer = accel.optimizers.create(name, through, **options)
            for step in range(2):
                _step(optimizer, through, step)
            saved = copy.deepcopy(optimizer.state_dict())
            restored = [nn.Parameter(parameter.detach().clone()) for parameter in through]
            twin = accel.optimizers.create(name, restored, **{**options, "lr": LR / 4})
            twin.load_state_dict(saved)
            for step in range(2, 4):
                _step(optimizer, through, step)
                _step(twin, restored, step)
            assert all(error(a, b) < 1e-6 for a, b in zip(restored, through, strict=True)), "the state was not restored"

    @pytest.mark.parametrize("name", EVERY)
    def test_state_layout(self, accel: Backend, name: str) -> None:
        """The state has torch's layout, so that a run on one device can be resumed on another."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            oracle, variants = ORACLES[name]
            options = _options(variants[-1])
            mine, theirs = _parameters(accel.device), _parameters(torch.device("cpu"))
            optimizer, reference = accel.optimizers.create(name, mine, **options), oracle(theirs, **options)
            _step(optimizer, mine, 0)
            _step(reference, theirs, 0)
            found, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
            assert found.keys() == expected.keys()
            for number, entry in expected.items():
                assert found[number].keys() == entry.keys()
                for key, value in entry.items():
                    if isinstance(value, Tensor):
                        assert found[number][key].shape == value.shape, key

    @pytest.mark.parametrize("name", EVERY)
    def test_no_gradient_is_no_update(self, accel: Backend, name: str) -> None:
        """A parameter whose gradient is None stays as it is, and takes part once it has one."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            options = _options(ORACLES[name][1][-1])
            parameters = _parameters(accel.device)
            optimizer = accel.optimizers.create(name, parameters, **options)
            before = weights(parameters)
            _step(optimizer, parameters, 0, without=1)
            middle = weights(parameters)
            assert torch.equal(middle[1], before[1]), "a parameter without gradient was changed"
            assert not torch.equal(middle[0], before[0])
            _step(optimizer, parameters, 1)
            assert not torch.equal(weights(parameters)[1], middle[1]), "its first gradient came late, and was ignored"
            last = weights(parameters)
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()
            after = weights(parameters)
            assert all(torch.equal(a, b) for a, b in zip(after, last, strict=True)), "old gradients were used again"

    @pytest.mark.parametrize("name", EVERY)
    def test_native(self, accel: Backend, name: str) -> None:
        """A native optimizer is taken before torch's loops; what is not native has no fused route."""
        if name in accel.capabilities.native_optimizers:
            parameters = _parameters(accel.device)[:2]  # a kernel may be for dense ones only
            chosen = next(choice for choice in accel.optimizers.explain(name) if choice.chosen)
            assert chosen.route not in ("loop", "foreach"), f"declared native, and its route is {chosen.route}"
            accel.optimizers.create(name, parameters, lr=LR, route=chosen.route)
            return
        with declared(False, f"a native {name}"):
            accel.optimizers.create(name, _parameters(accel.device), lr=LR, route="fused")

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
    @pytest.mark.parametrize("name", ["sgd", "adamw"])
    def test_model_dtypes(self, accel: Backend, name: str, dtype: str) -> None:
        """Parameters of every model dtype that is declared are updated, all their elements."""
        if dtype not in accel.capabilities.model_dtypes:
            pytest.skip(f"not declared: models in {dtype}; the training part sees that the trainer refuses them")
        kind: torch.dtype = getattr(torch, dtype)
        parameter = nn.Parameter(torch.ones(300_001, device=accel.device, dtype=kind))
        optimizer = accel.optimizers.create(name, [parameter], lr=0.25, weight_decay=0.0)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert error(parameter, torch.full((300_001,), 0.75)) < max(4 * eps(kind), 1e-6)

    def test_groups(self, accel: Backend) -> None:
        """Parameter groups keep their own learning rates and decay."""
        first, second = (nn.Parameter(torch.ones(4, device=accel.device)) for _ in range(2))
        groups = [{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 1.0}]
        optimizer = accel.optimizers.create("sgd", groups, lr=0.25)
        for parameter in (first, second):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert first.tolist() == [0.5] * 4
        assert second.tolist() == [0.5] * 4

    @pytest.mark.parametrize("name", ["sgd", "adamw"])
    def test_changes_between_steps(self, accel: Backend, name: str) -> None:
        """A step takes hyperparameters and weights as they are then: a schedule, a checkpoint may have set them."""

        def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
            for step in range(4):
                _step(optimizer, parameters, step)
                optimizer.param_groups[0]["lr"] /= 4
                optimizer.param_groups[1]["weight_decay"] += 0.5
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.add_(1.0)

        def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
            return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1, "weight_decay": 0.25}]

        found, expected = _parameters(accel.device), _parameters(torch.device("cpu"), torch.float64)
        train(accel.optimizers.create(name, groups(found), lr=LR), found)
        train(ORACLES[name][0](groups(expected), lr=LR, foreach=False), expected)
        assert max(map(error, found, expected)) < 2e-5

    def test_explain(self, accel: Backend) -> None:
        """For every optimizer exactly one route would be taken, and the others say why not."""
        assert {"sgd", "adamw"} <= set(accel.optimizers.names()), "every backend can at least run torch's loops"
        for name in accel.optimizers.names():
            options = {"lr": LR} if name in ORACLES else {}
            choices = accel.optimizers.explain(name, **options)
            assert sum(choice.chosen for choice in choices) == 1, name
            assert all(choice.reason for choice in choices if not choice.chosen), name

    def test_refusals(self, accel: Backend) -> None:
        """An optimizer, route or hyperparameter that does not exist is refused."""
        with pytest.raises(UnsupportedError):
            accel.optimizers.create("no such optimizer", _parameters(accel.device))
        with pytest.raises(UnsupportedError):
            accel.optimizers.create("sgd", _parameters(accel.device), lr=LR, route="no such route")
        with pytest.raises(ConfigurationError):
            accel.optimizers.create("sgd", _parameters(accel.device), lr=LR, no_such_option=1)
        with pytest.raises(ConfigurationError):
            accel.optimizers.create("adamw", _parameters(accel.device), lr=-1.0)
