"""Conformance of apex's levels: the dtypes at O0 to O3, and checkpoints that move between them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accelcore import Backend, Policy
from accelcore.testing.support.declared import LOW_PRECISION, declared
from accelcore.testing.support.oracles import eps, error

LEVELS = ("O0", "O1", "O2", "O3")
STEPS = 30

of_levels = pytest.mark.parametrize("level", LEVELS)
of_dtypes = pytest.mark.parametrize("dtype", LOW_PRECISION)


class LevelTests:
    """Levels O0 to O3, in each low precision that the backend declares for them."""

    @pytest.mark.parametrize("flat", [False, True], ids=["by tensor", "flat"])
    @of_dtypes
    @of_levels
    def test_level(self, accel: Backend, level: str, dtype: str, flat: bool) -> None:
        """Weights, gradients, activations and outputs are in the dtypes of the level, and it learns as fp32 does."""
        with declared(_offers(accel, level, dtype), f"{level} in {dtype}"):
            exact = _by_hand()
            fp32, low = torch.float32, getattr(torch, dtype)
            trainer, losses, seen, gradients, output = _train(accel, _policy(level, dtype), flat)
            of_weights = low if level in ("O2", "O3") else fp32
            of_norm = low if level == "O3" else fp32
            held = {name: tensor.dtype for name, tensor in trainer.model.named_parameters()}
            expected = {name: of_norm if name.startswith("1.") else of_weights for name in held}
            assert held == expected, f"at {level} in {dtype} the model is not held in the right dtypes"
            assert gradients == expected, "a gradient is of another dtype than what it belongs to"
            assert seen == (fp32 if level == "O0" else low), "the first layer computes in another dtype"
            assert output == (low if level == "O1" else fp32), "the model returns another dtype"
            counter = dict(trainer.model.named_buffers())["1.num_batches_tracked"]
            assert counter.dtype == torch.int64, "a counter was cast"
            state = trainer.model.state_dict()
            assert {value.dtype for value in state.values()} == {fp32, torch.int64}, "the state_dict is not fp32"
            assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), "it does not learn"
            assert abs(sum(losses[-5:]) - sum(exact[-5:])) < 0.2 * sum(exact[:5]), "it learns something else"

    @of_levels
    @pytest.mark.parametrize("before", LEVELS)
    def test_a_run_moves_between_levels(self, accel: Backend, before: str, level: str, tmp_path: Path) -> None:
        """A checkpoint of one level resumes at another with the same outputs, up to rounding, and trains on."""
        offered = all(_offers(accel, each, "float16") for each in (before, level))
        with declared(offered, f"{before} and {level} in float16"):
            first = _train(accel, before, None, steps=5)[0]
            first.save(tmp_path)
            second = _made(accel, level, None)
            second.resume(tmp_path)
            assert error(_answers(accel, second), _answers(accel, first)) < 32 * eps(torch.float16)
            rows, classes = accel.runtime.to_device(_data(1)[0])
            second.model.train()
            with second.autocast():
                loss = cross_entropy(second.forward(rows).float(), classes)
            second.backward(loss)
            second.update()
            assert second.steps == first.steps + 1
            assert all(bool(weight.isfinite().all()) for weight in second.model.parameters())


def _offers(accel: Backend, level: str, dtype: str) -> bool:
    known = accel.capabilities
    if level == "O1":
        return dtype in known.autocast_dtypes and "O1" in known.autocast_tables
    return level == "O0" or dtype in known.model_dtypes


def _policy(level: str, dtype: str) -> Policy:
    return Policy.preset(level, dtype=None if level == "O0" else dtype)


def _network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def _data(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(32, 8, generator=generator) for _ in range(count)]
    return [(each, each[:, :4].argmax(1)) for each in rows]


def _made(accel: Backend, precision: Any, flat: bool | None) -> Any:
    model = _network()
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1, momentum=0.9)
    return accel.trainer(model, optimizer, precision=precision, flat=flat)


@cache
def _by_hand() -> list[float]:
    """Return the losses of plain torch on the CPU in float64."""
    model, losses = _network().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for rows, classes in _data(STEPS):
        loss = cross_entropy(model(rows.double()), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(
    accel: Backend, precision: Any, flat: bool | None, steps: int = STEPS
) -> tuple[Any, list[float], Any, dict[str, Any], Any]:
    """Return a trained trainer, its losses, and the dtypes of first layer, gradients and outputs."""
    trainer = _made(accel, precision, flat)
    seen, gradients, losses = [], {}, []
    hooks = [trainer.model[0].register_forward_hook(lambda module, given, output: seen.append(output.dtype))]
    for name, parameter in trainer.model.named_parameters():
        hook = parameter.register_hook(lambda gradient, name=name: gradients.update({name: gradient.dtype}))
        hooks.append(hook)
    for batch in _data(steps):
        rows, classes = accel.runtime.to_device(batch)
        with trainer.autocast():
            logits = trainer.forward(rows)
            loss = cross_entropy(logits.float(), classes)
        trainer.backward(loss)
        trainer.update()
        losses.append(loss.item())
    for hook in hooks:
        hook.remove()
    return trainer, losses, seen[-1], gradients, logits.dtype


def _answers(accel: Backend, trainer: Any) -> Tensor:
    trainer.model.eval()
    with torch.no_grad(), trainer.autocast():
        answers: Tensor = trainer.forward(accel.runtime.to_device(_data(1)[0][0])).float()
    return answers
