"""One rank of a job that trains divided models: `fsdp_ranks.py FOLDER WAY...`; what it found goes to FOLDER/RANK.pt."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import accelcore
from accelcore import FSDP, Policy
from accelcore.optim.engine import Engine
from tests.training.parallel.fsdp_models import (
    BASIC,
    GROUPS,
    LR,
    MODELS,
    Block,
    Momentum,
    Transformer,
    batch_of,
    by_hand,
    loss_of,
    made,
    replicated,
    run,
    state,
)


def trained(accel, name, *, parallel="fsdp", optimizer="ours", seed=None, accumulate=1, model=None, **options):
    """The optimizer is made first; ranks start from other weights, which they must not keep."""
    rank = accel.collectives.rank
    model = model or made(name, rank if seed is None else seed)
    make = {
        "ours": lambda: accel.optimizers.create("adamw", model.parameters(), lr=LR, eps=1e-3),
        "torch": lambda: torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3),
        "fused": lambda: torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, fused=True),
    }[optimizer]
    trainer = accel.trainer(model, make(), loss=loss_of, parallel=parallel, accumulate=accumulate, **options)
    run(name, rank, trainer, accumulate=accumulate)
    return trainer


def equal(accel, rank, chosen):
    """Every model, in the ways that were chosen, and what torch makes of it by hand; of one way, one model."""
    found = {}
    for name in MODELS if len(chosen) > 1 else ["transformer"]:
        wrap = FSDP(wrap=GROUPS[name])
        found[name] = {
            "start": {key: value.double() for key, value in made(name).state_dict().items()},
            "by hand": by_hand(name, rank, GROUPS[name]),
            "replicated": replicated(name, rank),
        }
        ways = {
            "ours": {"parallel": wrap},
            "torch": {"parallel": wrap, "optimizer": "torch"},
            "fused": {"parallel": wrap, "optimizer": "fused"},
            **{word: {"parallel": word} for word in ("fsdp", "zero2", "zero3")},
            "offloaded": {"parallel": FSDP(cpu_offload=True)},
        }
        for way in chosen if name == "transformer" else [way for way in chosen if way in BASIC]:
            found[name][way] = state(trained(accel, name, **ways[way]).model)
    return found


def options(accel, rank):
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    bf16 = {"precision": Policy(model_dtype="bfloat16")}
    compiled = {"compile": {"backend": "eager"}}  # traced: to import what follows takes each rank seconds
    given = trained(accel, "transformer", model=made("transformer").bfloat16()).model
    return {
        "plain by hand": by_hand("transformer", rank, Block),
        "accumulated by hand": by_hand("transformer", rank, Block, accumulate=2, clip=0.1),
        "accumulated": state(trained(accel, "transformer", accumulate=2, clip_norm=0.1).model),
        "accumulated torch": state(trained(accel, "transformer", accumulate=2, clip_norm=0.1, optimizer="torch").model),
        "scaled": state(trained(accel, "transformer", accumulate=2, clip_norm=0.1, loss_scale="dynamic").model),
        "partly by hand": by_hand("partly", rank, Block),
        "compiled partly": state(trained(accel, "partly", parallel=FSDP(wrap=Block), **compiled).model),
        "bf16 by hand": by_hand("transformer", rank, Block, policy=low),
        "bf16": state(trained(accel, "transformer", seed=0, **bf16).model),
        "given in bf16": {str(parameter.dtype) for parameter in given.parameters()},
        **{
            f"anew {parallel}": state(trained(accel, "transformer", seed=0, parallel=parallel, checkpoint=Block).model)
            for parallel in ("ddp", "combine_ddp", "fsdp", "zero2")
        },
        "O2": state(trained(accel, "convolutions", precision="O2").model),
        "O2 ddp": state(trained(accel, "convolutions", precision="O2", parallel="ddp").model),
        "autocast": state(trained(accel, "transformer", precision="bf16").model),
        "autocast ddp": state(trained(accel, "transformer", precision="bf16", parallel="ddp").model),
        "O1": state(trained(accel, "transformer", precision="O1").model),
        "O1 ddp": state(trained(accel, "transformer", precision="O1", parallel="ddp").model),
    }


def groups(accel, rank):
    """What is a group, how much of it a rank holds, and what there is after an evaluation."""
    found = {}
    for name, parallel in (
        ("list", "fsdp"),
        ("type", FSDP(wrap=nn.LayerNorm)),
        ("function", FSDP(wrap=lambda module: isinstance(module, Block))),
        ("tied", FSDP(wrap=(nn.Embedding, Block))),
    ):
        trainer = trained(accel, "transformer", parallel=parallel)
        found[name] = [key for key, part in trainer.model.named_modules() if isinstance(part, FSDPModule)]
    model = trainer.model
    parameters = list(model.parameters())
    found["elements"] = [sum(p.numel() for p in parameters), sum(p.to_local().numel() for p in parameters)]
    with torch.no_grad():
        out = trainer.forward(batch_of("transformer", 0, 0))
    found["evaluated"] = out
    found["kinds"] = Counter(type(p.data).__name__ for p in model.parameters())
    entry = trainer.optimizer.state[next(model.parameters())]
    found["moment"] = [tuple(entry["exp_avg"].shape), tuple(entry["exp_avg"].to_local().shape)]
    found["route"] = trainer.optimizer.route
    batches = [batch_of("transformer", 0, 0)] * (dist.get_world_size() + 1)
    try:
        found["uneven"] = [trainer.forward(batch) for batch in trainer.evaluate(batches)]
    except accelcore.TrainingError as error:
        found["uneven"] = str(error)
    return found


class Normed(Engine, torch.optim.SGD):
    """An optimizer of a third party, which takes the norm of each parameter."""

    def place_runs(self, runs):
        raise AssertionError


def refused(accel, rank):
    """What is refused says why, and leaves model and optimizer as they were."""
    found = {}
    accel.optimizers.register("normed", "own", Normed, memory="any")
    cases = {
        "flat": ({"flat": True}, None, "adamw"),
        "graph": ({"graph": True}, None, "adamw"),
        "clip": ({"clip": lambda parameters: None}, None, "adamw"),
        "lamb": ({}, None, "lamb"),
        "bertadam": ({}, None, "bertadam"),
        "third party": ({}, None, "normed"),
        "offload": ({"parallel": FSDP(cpu_offload=True), "loss_scale": "dynamic"}, None, "adamw"),
        "wrap": ({"parallel": FSDP(wrap=nn.LSTM)}, None, "adamw"),
        "scalar": ({}, lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(()))), "adamw"),
        "empty": ({}, lambda model: model.register_parameter("none", nn.Parameter(torch.ones(0, 4))), "adamw"),
        "complex": ({}, lambda model: model.register_parameter("wave", nn.Parameter(torch.ones(4) * 1j)), "adamw"),
        "dtypes": ({}, lambda model: model.blocks[0].double(), "adamw"),
        "sparse": ({}, lambda model: setattr(model.embedding, "sparse", True), "adamw"),
        "comm_dtype": ({"comm_dtype": "int8"}, None, "adamw"),
    }
    for name, (options, change, optimizer) in cases.items():
        model = made("transformer")
        if change:
            change(model)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        made_first = accel.optimizers.create(optimizer, model.parameters(), lr=LR)
        held = list(model.parameters())
        try:
            accel.trainer(model, made_first, loss=loss_of, **{"parallel": "fsdp", **options})
            found[name] = "not refused"
        except accelcore.AccelError as error:
            found[name] = f"{type(error).__name__}: {error}"
        now = list(model.parameters())
        same = all(a is b for a, b in zip(held, now, strict=True)) and type(model) is Transformer
        same = same and all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        params = [parameter for group in made_first.param_groups for parameter in group["params"]]
        found[name + " unchanged"] = same and all(a is b for a, b in zip(params, held, strict=True))
    return found


def again(accel, rank):
    """State that an optimizer had before; a second trainer of a model that is divided; one that the user divided."""
    found = {}
    model = made("partly")
    for kind in ("ours", "torch"):
        model = made("partly")
        make = accel.optimizers.create if kind == "ours" else lambda name, *a, **k: torch.optim.AdamW(*a, **k)
        optimizer = make("adamw", model.parameters(), lr=LR, eps=1e-3)
        loss_of(model, batch_of("partly", 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer = accel.trainer(model, optimizer, loss=loss_of, parallel="fsdp")
        run("partly", rank, trainer)
        found[kind] = state(model)
    found["shown"] = repr(trainer)
    second = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=LR), loss=loss_of, parallel="fsdp")
    run("partly", rank, second)
    found["second"] = state(model)
    own = made("partly")
    fully_shard(own.blocks[0], mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    fully_shard(own, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    found["own"] = state(trained(accel, "partly", model=own).model)
    found["theirs"] = state(trained(accel, "partly").model)
    return found


def written(accel, rank):
    """What parameters that a forward pass or the script writes to say and do."""
    found = {}
    for way in ("data", "in place", None):
        torch.manual_seed(0)
        model = Momentum(way)
        trainer = accel.trainer(
            model, torch.optim.SGD(model.trained.parameters(), lr=LR), loss=lambda m, b: m(b), parallel="fsdp"
        )
        try:
            for _ in range(3):
                trainer(torch.ones(2, 4))
                model.follow()
            found[way] = [state(model.trained), state(model.slow)]
        except accelcore.TrainingError as error:
            found[way] = str(error)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        found = {"equal": equal(accel, job.rank, sys.argv[2:]), "groups": groups(accel, job.rank)}
        if job.world_size == 2:
            found |= {
                "options": options(accel, job.rank),
                "refused": refused(accel, job.rank),
                "again": again(accel, job.rank),
                "written": written(accel, job.rank),
            }
        torch.save(found, folder / f"{job.rank}.pt")


if __name__ == "__main__":
    main()
