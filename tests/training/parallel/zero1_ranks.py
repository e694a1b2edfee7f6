"""One rank of a job that divides its optimizer's state: `zero1_ranks.py FOLDER`. It writes FOLDER/RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import accelcore
from accelcore import Policy
from accelcore.testing.support.options import NINE
from tests.training.parallel.fsdp_models import LR, MODELS, loss_of, made, replicated, run, state

OF_ALL = {"lamb": {"use_global_grad_norm": True}, "bertadam": {"max_grad_norm": 1.0}}
ALONE = {"bertadam": {"max_grad_norm": -1.0}}


def trained(accel, name, optimizer, parallel, **options):
    rank = accel.collectives.rank
    model = made(name, seed=rank)
    if optimizer == "torch":
        made_first = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    else:
        own = {"eps": 1e-3} if optimizer == "adamw" else ALONE.get(optimizer, {})
        made_first = accel.optimizers.create(optimizer, model.parameters(), lr=LR, **own)
    trainer = accel.trainer(model, made_first, loss=loss_of, parallel=parallel, **options)
    run(name, rank, trainer, accumulate=options.get("accumulate", 1))
    return trainer


def held(trainer):
    """Of which parameters this rank has a state, and of how many elements."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    entries = {names[parameter]: entry for parameter, entry in trainer.optimizer.state.items() if entry}
    moments = [value for entry in entries.values() for value in entry.values() if getattr(value, "dim", int)()]
    return {"names": sorted(entries), "elements": sum(moment.numel() for moment in moments)}


def equal(accel, rank):
    found = {}
    for name in MODELS:
        found[name] = {"by hand": replicated(name, rank)}
        for way, optimizer, options in (
            ("tensors", "adamw", {"flat": False}),
            ("flat", "adamw", {"flat": True}),
            ("torch", "torch", {}),
            ("torch, flat", "torch", {"flat": True}),
        ):
            trainer = trained(accel, name, optimizer, "zero1", **options)
            found[name][way] = state(trainer.model)
            found[name][f"{way} held"] = held(trainer)
        found[name]["held by all"] = held(trained(accel, name, "adamw", "ddp"))
    return found


def nine(accel):
    return {
        (name, parallel, flat): state(trained(accel, "partly", name, parallel, flat=flat).model)
        for name in NINE
        for parallel in ("ddp", "zero1")
        for flat in (False, None)
    }


def options(accel):
    cases = {
        "accumulated": {"accumulate": 2, "clip_norm": 0.1},
        "scaled": {"loss_scale": "dynamic", "clip_norm": 0.1},
        "function": {"clip": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)},
        "masters": {"precision": Policy(model_dtype="bfloat16")},
        "masters, flat": {"precision": Policy(model_dtype="bfloat16"), "flat": True},
    }
    return {
        (case, parallel): state(trained(accel, "transformer", "adamw", parallel, **own).model)
        for case, own in cases.items()
        for parallel in ("combine_ddp", "zero1")
    }


def frozen(accel):
    """A parameter that is frozen, and another that is unfrozen, keep their owners and their states."""
    found = {}
    for parallel in ("combine_ddp", "zero1"):
        trainer = trained(accel, "partly", "adamw", parallel)
        for part, trains in ((trainer.model.frozen, True), (trainer.model.blocks[0], False)):
            part.requires_grad_(trains)
        trainer.refresh()
        run("partly", accel.collectives.rank, trainer)
        trainer.model.blocks[0].requires_grad_(True)
        trainer.refresh()
        run("partly", accel.collectives.rank, trainer)
        found[parallel] = state(trainer.model)
    return found


def kept(accel, folder):
    """A state of what is frozen is saved, and resumed, like any."""
    trainer = trained(accel, "partly", "adamw", "zero1")
    trainer.model.blocks[0].requires_grad_(False)
    trainer.refresh()
    trainer.save(folder / "frozen")
    model = made("partly")
    model.blocks[0].requires_grad_(False)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=LR, eps=1e-3)
    resumed = accel.trainer(model, optimizer, loss=loss_of, parallel="zero1")
    resumed.resume(folder / "frozen")
    return [held(trainer)["names"], held(resumed)["names"]]


def refused(accel):
    found = {}
    for name, own in OF_ALL.items():
        model = made("partly")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        optimizer = accel.optimizers.create(name, model.parameters(), lr=LR, **own)
        try:
            accel.trainer(model, optimizer, loss=loss_of, parallel="zero1")
            found[name] = "not refused"
        except accelcore.UnsupportedError as error:
            found[name] = str(error)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        found = {"equal": equal(accel, job.rank)}
        if job.world_size == 2:
            found |= {
                "nine": nine(accel),
                "options": options(accel),
                "frozen": frozen(accel),
                "kept": kept(accel, folder),
                "refused": refused(accel),
            }
        torch.save(found, folder / f"{job.rank}.pt")


if __name__ == "__main__":
    main()
