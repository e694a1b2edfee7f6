"""What laying parameters and gradients flat does to a step, and that it never harms where the trainer decides.

Two models of the usual kind: the trainer's own choice beside both answers to it. Then many parameters of one size, from
small to large: the size from which flat memory no longer pays is what the trainer decides by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import accelcore
from benchmarks.gpu.gpt import GPT, Shape
from benchmarks.gpu.resnet import ResNet
from benchmarks.paired import Timing, compare, sample
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-cpu", "torch")
GOAL = 1.01
TENSORS, TWIN, CHOSEN, FLAT = "flat=False", "flat=False, again", "flat=None", "flat=True"
ANSWERS = {TENSORS: False, TWIN: False, CHOSEN: None, FLAT: True}
SMALL_GPT = Shape(layers=4, heads=4, width=256, context=64, vocabulary=512)
LAYERS, ROWS = 400, 8
WIDTHS = (16, 32, 64, 128, 256, 512)
# A last bit that is rounded differently, and what a few steps make of it.
TOLERANCE = 1e-4


def run(quick: bool) -> Iterator[Table]:
    """A table for each model, then one of all sizes of parameters."""
    torch.set_num_threads(1)
    rounds = 30 if quick else 150
    for title, make in {"GPT, 4 layers of 256": _gpt, "ResNet, 32 x 32 pixels": _resnet}.items():
        trainings = {name: _Training(*make(), flat) for name, flat in ANSWERS.items()}
        _check_alike(trainings)
        timings = _compare({name: training.step for name, training in trainings.items()}, rounds)
        weights = trainings[TENSORS].weights
        elements = sum(weight.numel() for weight in weights)
        yield Table(
            title=f"{title}: one step",
            base=TENSORS,
            unit="ms",
            settings={**_settings(rounds), "parameters": len(weights), "elements": elements},
            rows=[Row(name, timings[name], _lies(training)) for name, training in trainings.items()],
            goals=[Goal(f"{title}: {CHOSEN} / {TENSORS}", GOAL, timings[CHOSEN].ratio.median)],
        )
    yield _sizes(WIDTHS[:4] if quick else WIDTHS, 8 if quick else 24)


def _sizes(widths: Sequence[int], rounds: int) -> Table:
    """Steps of as many parameters of each size."""
    rows = []
    for width in widths:
        trainings = {name: _Training(*_chain(width), ANSWERS[name]) for name in (TENSORS, FLAT)}
        for training in trainings.values():
            training.step()
            training.freeze()
        # Small ones are done so soon that they can be measured more often.
        more = rounds * max(1, 128 // width)
        found = _compare({name: training.step for name, training in trainings.items()}, more)[FLAT]
        rows.append(Row(f"{width * width} elements", found))
    return Table(
        title=f"{LAYERS} parameters of one size: {FLAT}, relative to {TENSORS}",
        base=f"{TENSORS}, the same size",
        unit="ms",
        settings={**_settings(rounds), "model": f"{LAYERS} x Linear(width, width), no bias", "batch": ROWS},
        rows=rows,
    )


class _Training:
    """A model that a trainer trains with AdamW, on one batch."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor] | None, batch: Sequence[Tensor], flat: bool | None
    ):
        accel = accelcore.select("cpu")
        self.weights, self.batch = list(model.parameters()), batch
        self.optimizer = accel.optimizers.create("adamw", self.weights, lr=1e-3)
        self.trainer = accel.trainer(model, self.optimizer, loss=loss, flat=flat)

    def step(self) -> None:
        self.trainer(self.batch)

    def freeze(self) -> None:
        """Let the weights be, so that what is timed is the same arithmetic from first to last."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0


def _check_alike(trainings: Mapping[str, _Training]) -> None:
    """Train all of them a little; AssertionError where they do not come to the same weights."""
    start = [weight.detach().clone() for weight in trainings[TENSORS].weights]
    for training in trainings.values():
        for _ in range(5):
            training.step()
        training.freeze()
    assert not any(map(torch.equal, trainings[TENSORS].weights, start)), "a weight stayed as it was"
    for training in trainings.values():
        for weight, expected in zip(training.weights, trainings[TENSORS].weights, strict=True):
            torch.testing.assert_close(weight, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _compare(cases: Mapping[str, Callable[[], None]], rounds: int) -> Mapping[str, Timing]:
    return compare(sample(cases, rounds=rounds, seconds=0.01, clock=process_time), TENSORS)


def _lies(training: _Training) -> str:
    bound = training.optimizer.bound
    assert bound is not None, "the trainer did not bind its optimizer"
    return "flat" if len(bound) < len(training.weights) else "a tensor each"


def _settings(rounds: int) -> dict[str, object]:
    return {"optimizer": "adamw", "threads": 1, "rounds": rounds, "seconds a sample": 0.01, "clock": "process_time"}


def _gpt() -> tuple[nn.Module, None, Sequence[Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(SMALL_GPT.vocabulary, (2, SMALL_GPT.context + 1))
    return GPT(SMALL_GPT), None, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _resnet() -> tuple[nn.Module, Callable[..., Tensor], Sequence[Tensor]]:
    torch.manual_seed(0)
    model = ResNet((2, 2, 2, 2), classes=10, width=16)
    return model, _classify, (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))


def _chain(width: int) -> tuple[nn.Module, Callable[..., Tensor], Sequence[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    turn, _ = torch.linalg.qr(torch.randn(width, width))  # neither output nor gradients vanish or explode
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(turn)
    return model, _square, (torch.randn(ROWS, width),)


def _classify(model: Callable[..., Tensor], batch: Sequence[Tensor]) -> Tensor:
    images, targets = batch
    return cross_entropy(model(images), targets)


def _square(model: Callable[..., Tensor], batch: Sequence[Tensor]) -> Tensor:
    return model(*batch).square().mean()
