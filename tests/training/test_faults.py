"""Whatever raises in a step, its window is lost and nothing else: what follows equals a loop that never saw it."""

from __future__ import annotations

import contextlib
import errno
import os

import pytest
import torch
from thinned import diagonals
from torch import nn
from torch.nn.functional import mse_loss

import accelcore
from accelcore.precision.policy import Policy
from accelcore.training.observers import Observer

FAULTY = 2  # the window in which something is raised, of
WINDOWS = 6


class Trap:
    """Raises once, at a place, in the FAULTY window, in the last of its micro-batches or in the one before."""

    def __init__(self, place, error, micro):
        self.place, self.error, self.micro = place, error, micro
        self.now = (0, 0)

    def __call__(self, place):
        if place == self.place and self.now == (FAULTY, self.micro):
            self.place = None
            raise self.error("planted")


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trap):
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.trap("backward")
        return gradient, None


class Model(nn.Module):
    def __init__(self, trap=lambda place: None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.trap = nn.Linear(3, 5), nn.Linear(5, 2), trap

    def forward(self, x):
        return self.last(torch.tanh(Backward.apply(self.first(x), self.trap)))


class Watching(Observer):
    def __init__(self, trap):
        self.trap = trap

    def loss(self, loss):
        self.trap("observer of losses")

    def gradient_norm(self, norm):
        self.trap("observer of norms")

    def step(self, steps):
        self.trap("observer of steps")

    def output(self, module, output):
        self.trap("observer of outputs")


def data(accumulate, seed=1):
    generator = torch.Generator().manual_seed(seed)
    one = lambda: (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator))  # noqa: E731
    return [[one() for _ in range(accumulate)] for _ in range(WINDOWS)]


def loss_of(model, batch):
    dtype = next(model.parameters()).dtype
    return mse_loss(model(batch[0].to(dtype)).float(), batch[1])


CONFIGS = {
    "plain": {},
    "accumulating": {"accumulate": 3},
    "flat": {"flat": True, "accumulate": 3},
    "static scale": {"loss_scale": 128.0, "flat": False},
    "dynamic scale, clipping": {"loss_scale": "dynamic", "clip_norm": 0.1, "accumulate": 3},
    "fp16": {"precision": "fp16", "clip_norm": 0.1},
    "masters": {"precision": Policy(model_dtype="bfloat16"), "flat": False, "clip_norm": 0.1},
    "all": {
        "precision": Policy(model_dtype="bfloat16"), "loss_scale": "dynamic", "flat": True, "accumulate": 3,
        "clip_norm": 0.1,
    },
}  # fmt: skip
# Where something is raised, and whether the window's update has been made by then.
PLACES = {
    "loss": False,
    "backward": False,
    "clipping": False,
    "schedule": True,
    "observer of losses": True,
    "observer of norms": True,
    "observer of steps": True,
    "observer of outputs": False,
}


def make(accel, trap, options):
    model = Model(trap)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.05, eps=1e-3)

    def rate(step):
        trap("schedule")
        return 0.9**step

    def loss(m, batch):
        trap("loss")
        return loss_of(m, batch)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    observers = [Watching(trap)] if (trap.place or "").startswith("observer") else []
    return accel.trainer(model, optimizer, loss=loss, scheduler=schedule, observers=observers, **options)


class Hand:
    """The same training, written by hand in torch; windows can be left out."""

    def __init__(self, options):
        self.model, self.options = Model(), options
        policy = options.get("precision")
        self.trained = [nn.Parameter(parameter.detach().clone()) for parameter in self.model.parameters()]
        if isinstance(policy, Policy):
            self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.05, eps=1e-3, fused=True)
        self.broken_schedule = False
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        scale = "dynamic" if policy == "fp16" else options.get("loss_scale")
        init = scale if isinstance(scale, float) else 65536.0
        self.scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=init)

    def rate(self, step):
        if self.broken_schedule:
            raise ArithmeticError
        return 0.9**step

    def window(self, batches, *, broken_schedule=False):
        self.optimizer.zero_grad()
        self.model.zero_grad()
        for batch in batches:
            with torch.autocast("cpu", torch.float16, enabled=self.options.get("precision") == "fp16"):
                loss = loss_of(self.model, batch)
            self.scaler.scale(loss / len(batches)).backward()
        for master, parameter in zip(self.trained, self.model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        self.scaler.unscale_(self.optimizer)
        if "clip_norm" in self.options:
            nn.utils.clip_grad_norm_(self.trained, self.options["clip_norm"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.broken_schedule = broken_schedule
        with contextlib.suppress(ArithmeticError):
            self.schedule.step()
        with torch.no_grad():
            for master, parameter in zip(self.trained, self.model.parameters(), strict=True):
                parameter.copy_(master)


def train(trainer, trap, windows, first=0):
    """Train on windows; one in which something is raised is left at that point. How often that was."""
    caught = 0
    for number, batches in enumerate(windows, start=first):
        for micro, batch in enumerate(batches):
            trap.now = (number, len(batches) - 1 - micro)
            try:
                trainer(batch)
            except trap.error:
                caught += 1
                assert all(parameter.grad is None for parameter in trainer.model.parameters())
                break
    return caught


def same(trainer, hand):
    for one, other in zip(trainer.model.parameters(), hand.model.parameters(), strict=True):
        tolerance = 2**-7 if one.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-6)
    if hand.scaler.is_enabled() and "dynamic" in (hand.options.get("loss_scale", "dynamic"),):
        state = trainer.scaler.state_dict()
        assert (state["scale"], state["_growth_tracker"]) == (
            hand.scaler.get_scale(),
            hand.scaler._get_growth_tracker(),
        )


ERRORS = (torch.OutOfMemoryError, KeyboardInterrupt)  # in turn: each at every place, and in every configuration


@pytest.mark.parametrize(("config", "place"), diagonals(CONFIGS, PLACES, count=3))
def test_a_window_in_which_something_is_raised_is_lost_and_nothing_else(accel, monkeypatch, tmp_path, config, place):
    error = ERRORS[(list(CONFIGS).index(config) + list(PLACES).index(place)) % 2]
    options = dict(CONFIGS[config])
    if place == "clipping":
        options["clip_norm"] = 0.1
    early = options.get("accumulate", 1) > 1 and place in ("loss", "backward", "observer of outputs")
    trap = Trap(place, error, micro=1 if early else 0)
    norms = torch._foreach_norm
    if place == "clipping":
        monkeypatch.setattr(torch, "_foreach_norm", lambda *given: (trap("clipping"), norms(*given))[1])

    windows = data(options.get("accumulate", 1))
    trainer, hand = make(accel, trap, options), Hand(options)
    assert train(trainer, trap, windows[:-2]) == 1
    monkeypatch.undo()
    made = [number for number in range(WINDOWS - 2) if number != FAULTY or PLACES[place]]
    for number in made:
        hand.window(windows[number], broken_schedule=place == "schedule" and number == FAULTY)
    assert trainer.steps == len(made)
    same(trainer, hand)

    trainer.save(tmp_path)
    resumed = make(accel, Trap(None, error, 0), options)
    resumed.resume(tmp_path)
    for each in (trainer, resumed):
        assert train(each, trap, windows[-2:], first=FAULTY + 1) == 0
        assert each.steps == len(made) + 2
    for window in windows[-2:]:
        hand.window(window)
    same(trainer, hand)
    same(resumed, hand)


def test_a_disk_that_is_full_leaves_training_and_older_checkpoints_as_they_were(accel, tmp_path, monkeypatch):
    options = {"accumulate": 2, "loss_scale": "dynamic"}
    trap = Trap(None, OSError, 0)
    trainer, hand = make(accel, trap, options), Hand(options)
    windows = data(2)
    trainer(windows[0][0])
    whole = trainer.save(tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(accelcore.CheckpointError, match="No space left"):
            trainer.save(tmp_path)
    assert list(tmp_path.iterdir()) == [whole]
    trainer(windows[0][1])  # the window that was open goes on
    train(trainer, trap, windows[1:])
    for window in windows:
        hand.window(window)
    same(trainer, hand)
    resumed = make(accel, trap, options)
    assert resumed.resume(tmp_path) == whole
