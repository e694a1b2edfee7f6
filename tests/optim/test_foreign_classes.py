"""Optimizers of other packages, which keep more in their groups than options, and may choose the learning rate."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import accelcore


class SelfTuning(torch.optim.Optimizer):
    """Counts steps in the group and once for all parameters, and writes a factor that does not exist at first."""

    def __init__(self, params, lr=None, decay=0.5):
        super().__init__(params, {"lr": lr, "decay": decay, "steps": 0, "history": [None]})
        self.state["k"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            self.state["k"] += 1
            group["factor"] = group.get("factor", 1.0) * group["decay"] / self.state["k"]
            group["history"].append(group["steps"])
            for parameter in group["params"]:
                parameter -= parameter.grad * (group["lr"] or 0.1) * group["factor"]


class Named(SelfTuning):
    """Hands its options on to its base class."""

    def __init__(self, params, **options):
        super().__init__(params, **options)


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer, whose groups and state it has."""

    def __init__(self, params, **options):
        self.inner = SelfTuning(params, **options)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, {}
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.load

    def load(self, state):
        self.inner.load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        self.inner.step(closure)


def made(accel, observers=(), kind=SelfTuning, **options):
    accel.runtime.seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    trainer = accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean(), observers=list(observers))
    return model, optimizer, trainer


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator) for _ in range(4)]


def test_it_resumes_with_what_its_steps_wrote_into_the_groups(accel, tmp_path, caplog):
    model, optimizer, trainer = made(accel)
    for batch in trainer.batches(batches()[:3]):
        trainer(batch)
    trainer.save(tmp_path)
    trainer(batches()[3])

    other, its, resumed = made(accel)
    resumed.resume(tmp_path)
    assert "the script's" not in caplog.text  # what steps write is no option of the script
    resumed(batches()[3])
    assert its.param_groups[0]["factor"] == optimizer.param_groups[0]["factor"] == 0.5**4 / 24
    assert its.state["k"] == optimizer.state["k"] == 4
    assert its.param_groups[0]["steps"] == 4
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("kind", [SelfTuning, Named, Wrapping])
def test_an_option_of_the_script_that_differs_is_reported(accel, tmp_path, caplog, kind):
    _, _, trainer = made(accel, kind=kind)
    for batch in trainer.batches(batches()):
        trainer(batch)
    trainer.save(tmp_path)
    made(accel, kind=kind, decay=0.25)[2].resume(tmp_path)
    assert "decay is 0.25, and the checkpoint's is 0.5" in caplog.text


@pytest.mark.parametrize("kind", [SelfTuning, Named, Wrapping])
@pytest.mark.parametrize("by", ["trainer", "torch"])
def test_load_takes_what_steps_wrote_and_keeps_the_options(accel, tmp_path, kind, by):
    model, optimizer, trainer = made(accel, kind=kind)
    for batch in trainer.batches(batches()):
        trainer(batch)
    path = trainer.save(tmp_path)
    if by == "torch":
        path = tmp_path / "other.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    _, its, other = made(accel, kind=kind, decay=0.25)
    other.load(path, optimizer=True)
    assert its.state["k"] == 4
    (group,) = its.param_groups
    assert (group["factor"], group["steps"], group["decay"]) == (optimizer.param_groups[0]["factor"], 4, 0.25)


def test_a_state_dict_in_another_form_cannot_be_saved(accel, tmp_path):
    _, optimizer, trainer = made(accel)
    optimizer.state_dict = lambda: {"base_optimizer": {}}
    with pytest.raises(accelcore.CheckpointError, match=r"SelfTuning has 'base_optimizer'(.|\n)*'param_groups'"):
        trainer.save(tmp_path)


class WithoutRate(SelfTuning):
    """Has no learning rate in its groups."""

    def __init__(self, params):
        super().__init__(params)
        del self.param_groups[0]["lr"]

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.1
        super().step(closure)
        del self.param_groups[0]["lr"]


@pytest.mark.parametrize("options", [{"lr": None}, {"lr": 0.1}, {"kind": WithoutRate}])
def test_an_optimizer_may_choose_its_learning_rate(accel, tmp_path, capsys, options):
    lr = options.get("lr")
    observers = [accelcore.Progress(seconds=1e-9), accelcore.Log(tmp_path / "log", every=1)]
    with accelcore.Record(tmp_path / "recorded"):
        _, _, trainer = made(accel, observers, **options)
        for batch in trainer.batches(batches()):
            trainer(batch)
    lines = (tmp_path / "log" / "log.jsonl").read_text().splitlines()
    assert lines
    assert all(('"lr"' in line) is (lr is not None) for line in lines)
    assert ("lr 0.1" in capsys.readouterr().err) is (lr is not None)
    made(accel, **options)[2].resume(trainer.save(tmp_path))


def test_a_schedule_of_an_optimizer_without_a_learning_rate_is_refused(accel):
    model = nn.Linear(3, 2)
    optimizer = SelfTuning(model.parameters())
    with pytest.raises(accelcore.ConfigurationError, match=r"no learning rate(.|\n)*give it lr="):
        accel.trainer(model, optimizer, scheduler="cosine", total_steps=4)


class Clearing(torch.optim.SGD):
    """Keeps gradients beside `grad`, as Opacus those of each sample, and forgets them in `zero_grad`."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.kept = []
        self.used = []
        for parameter in self.param_groups[0]["params"]:
            parameter.register_hook(self.kept.append)

    def step(self, closure=None):
        self.used.append(len(self.kept))
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.kept.clear()
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("precision", ["fp32", "fp16", accelcore.Policy(model_dtype="bfloat16", cast_boundary=True)])
def test_an_optimizers_own_zero_grad_is_called_after_each_update(accel, precision):
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    optimizer = Clearing(model.parameters())
    trainer = accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean(), precision=precision, accumulate=2)
    for batch in batches():
        trainer(batch)
    assert optimizer.used == [4, 4]
    assert not optimizer.kept
    assert all(torch.count_nonzero(a - b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_optimizers_own_zero_grad_is_called_for_a_window_that_is_dropped(accel):
    def loss_of(model, batch):
        if batch.isnan().any():
            raise ValueError("no such row")
        return model(batch).square().mean()

    model = nn.Linear(3, 2)
    optimizer = Clearing(model.parameters())
    trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=2)
    first, second, third, _ = batches()
    trainer(first)
    with pytest.raises(ValueError, match="no such row"):
        trainer(second * torch.nan)
    trainer(second)
    trainer(third)
    assert optimizer.used == [4]


class Both(torch.optim.Optimizer):
    """Steps two optimizers, whose groups it shares or has as copies."""

    def __init__(self, params, *, shares):
        weight, bias = params
        self.each = [torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([bias], lr=0.1)]
        super().__init__([weight, bias], {"lr": 0.1})
        if shares:
            self.param_groups = [group for one in self.each for group in one.param_groups]

    def step(self, closure=None):
        for one in self.each:
            one.step()


@pytest.mark.parametrize("precision", ["bf16", accelcore.Policy(model_dtype="bfloat16", cast_boundary=True)])
@pytest.mark.parametrize("shares", [True, False])
def test_an_optimizer_of_optimizers_trains_or_is_refused(accel, precision, shares):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = Both(model.parameters(), shares=shares)
    options = {"loss": lambda m, b: m(b).square().mean(), "precision": precision}
    if not shares and precision != "bf16":
        with pytest.raises(accelcore.ConfigurationError, match=r"Both\.each has parameter groups(.|\n)*param_groups"):
            accel.trainer(model, optimizer, **options)
        assert model.weight.dtype == torch.float32
        return
    trainer = accel.trainer(model, optimizer, **options)
    trainer(batches()[0])
    assert (model.weight.float() - before).abs().max() > 1e-3
