"""Indices of devices given to DistributedDataParallel."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument, last_name


def _check(script: Script) -> Iterator[Mark]:
    for call in script.all(ast.Call):
        ids = argument(call, "device_ids")
        # A name or a condition may be None on devices where it has to be.
        if isinstance(ids, ast.List | ast.Tuple) and "Parallel" in (
            script.names.resolve(call.func).rpartition(".")[2] or last_name(call.func)
        ):
            yield Mark(
                ids,
                "Indices of devices are an error for a model on the CPU.",
                "Leave device_ids out: the model is on its device before it is wrapped; "
                'accel.trainer(parallel="ddp") does both.',
            )


RULE = Rule(
    code="ACC109",
    name="device-ids",
    about="`DistributedDataParallel(model, device_ids=[rank])`. The argument only moves inputs to the device, and "
    "raises an error if the model is on the CPU. A script that has moved its model does not need it.",
    check=_check,
    found=(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n\ndef wrap(model, rank):\n"
        "    return DDP(model, device_ids=[rank])"
    ),
    clean=(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n\ndef wrap(model, ids):\n"
        "    return DDP(model, device_ids=ids)"
    ),
)
