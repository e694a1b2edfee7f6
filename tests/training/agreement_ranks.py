"""One rank of a job of three whose trainings differ, each time in another way: for test_agreement.py."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import accelcore


class Steps(accelcore.Observer):
    def step(self, steps):
        pass


class Measuring(torch.optim.SGD):
    """Measures over all parameters that have a gradient, as Prodigy does."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["distance"] = self.defaults.setdefault("distance", 1.0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["distance"] += sum(p.grad.norm().item() for p in group["params"] if p.grad is not None)
        super().step(closure)


class Wrapping(torch.optim.Optimizer):
    """Updates by another optimizer, and has not called `Optimizer.__init__`, as torch_optimizer's Lookahead."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        self.inner.step(closure)


def main() -> None:
    accel = accelcore.select("cpu")
    with accel.distributed(timeout=timedelta(seconds=60)) as job:
        rank = job.rank

        def attempt(*, width=3, frozen=False, lr=0.1, name="sgd", norm=nn.BatchNorm1d, **options):
            model = nn.Sequential(nn.Linear(2, width), norm(width))
            model[0].bias.requires_grad_(not frozen)
            optimizer = accel.optimizers.create(name, model.parameters(), lr=lr)
            before = [parameter.data_ptr() for parameter in model.parameters()]
            try:
                accel.trainer(model, optimizer, **{"parallel": "ddp", **options})
            except accelcore.AccelError as error:
                same = before == [parameter.data_ptr() for parameter in model.parameters()]
                return [type(error).__name__, error.what, error.why, same]
            return []

        def drift(what, *, saves=False, **options):
            """Change rate or weights on rank 1 after a step, and take more steps or save."""
            model = nn.Linear(2, 3)
            kinds = {"measures": Measuring, "wraps": Wrapping}
            kind = kinds.get(what, partial(accel.optimizers.create, "sgd"))
            optimizer = kind(model.parameters(), lr=0.1)
            trainer = accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).square().mean(), **options)
            rows = torch.ones(1, 2) * (1 + rank)
            try:
                for step in range(3):
                    trainer(rows)
                    if step == 0 and rank == 1 and what == "rate":
                        optimizer.param_groups[0]["lr"] = 0.01
                    if step == 0 and rank == 1 and what == "weights":
                        model.load_state_dict({name: 2 * each for name, each in model.state_dict().items()})
                    if saves:
                        trainer.save(Path(sys.argv[1], what or "no drift"))
            except accelcore.DistributedError as error:
                return [error.what, error.why, trainer.steps]
            return []

        def twice(parallel):
            """Add up the gradients of two forward passes in each of two steps; return the weights."""
            torch.manual_seed(0)
            model = nn.Linear(2, 3)
            trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), parallel=parallel)
            for rows in torch.randn(2, 2, 4, 2) + rank:
                for each in rows:
                    trainer.backward(trainer.forward(each).square().mean())
                trainer.update()
            return model.weight.tolist()

        def redundant():
            model = nn.Linear(2, 3)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            try:
                accel.trainer(model, optimizer, parallel="ddp")
            except accelcore.ConfigurationError as error:
                return [error.what, error.remedy]
            return []

        found = {
            "twice": [twice("ddp"), twice("combine_ddp")],
            "no drift": drift(None, parallel="ddp", saves=True),
            "ddp": drift("weights", parallel="ddp"),
            "combine_ddp": drift("rate", parallel="combine_ddp"),
            "fsdp": drift("rate", parallel="fsdp"),
            "save": drift("weights", parallel="ddp", saves=True, on_nonfinite=None),
            "zero1": drift("measures", parallel="zero1"),
            "measures": drift("measures", parallel="ddp"),
            "wraps": drift("wraps", parallel="ddp"),
            "nothing": attempt(loss=lambda model, batch: model(batch).sum()),
            "observers": attempt(observers=[Steps()] if rank == 0 else []),
            "shape": attempt(width=4 if rank == 1 else 3),
            "precision": attempt(precision="bf16" if rank == 2 else "fp32"),
            "policy": attempt(precision=accelcore.Policy(autocast="bfloat16"), accumulate=1 + rank),
            "frozen": attempt(frozen=rank == 0),
            "rate": attempt(lr=0.2 if rank == 2 else 0.1),
            "optimizer": attempt(name="adamw" if rank == 1 else "sgd"),
            "loss": attempt(loss=None if rank == 1 else lambda model, batch: model(batch).sum()),
            "schedule": attempt(scheduler="cosine" if rank == 1 else "linear", total_steps=5),
            "refused": attempt(graph=rank == 1),
            "redundant": redundant(),
            "statistics": [attempt(norm=nn.SyncBatchNorm, parallel=each) for each in ("ddp", "combine_ddp", "fsdp")],
            "frozen statistics": [
                attempt(norm=lambda width: nn.SyncBatchNorm(width).eval(), parallel=each) for each in ("ddp", "zero1")
            ],
        }
        whole, torch.__version__ = torch.__version__, torch.__version__ if rank else "2.0.0"
        found["version"] = attempt()
        torch.__version__ = whole
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
