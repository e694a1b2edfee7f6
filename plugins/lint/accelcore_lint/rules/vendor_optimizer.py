"""Optimizers of one vendor: `NpuFusedAdamW`, apex's `FusedAdam`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name


def _check(script: Script) -> Iterator[Mark]:
    for call in script.all(ast.Call):
        name = script.names.resolve(call.func) or last_name(call.func)
        kind = name.rpartition(".")[2]
        apex = name.startswith("apex.optimizers.") and kind.startswith("Fused")
        if name.startswith("accelcore."):
            continue  # accelcore.apex has them on every device
        if kind.startswith("NpuFused"):
            plain = kind.removeprefix("NpuFused").lower()
            write = (
                f'Write accel.optimizers.create("{plain}", model.parameters(), ...), which takes this kernel on an NPU.'
            )
        elif apex:
            # apex's FusedLAMB and FusedNovoGrad are other formulas than those of the same name here.
            write = (
                "Write accel.optimizers.create(...) or torch.optim with fused=True, and compare the options one by one."
            )
        else:
            continue
        yield Mark(call, f"{kind} has a kernel for one vendor's device only.", write)


RULE = Rule(
    code="ACC114",
    name="vendor-optimizer",
    about="`NpuFusedAdamW` of torch_npu, `FusedAdam` of apex and relatives. accelcore makes the same optimizers by "
    "name, with the same state on every device, and takes the vendor's kernel where there is one.",
    check=_check,
    found="import torch_npu\n\ndef make(model):\n    return torch_npu.optim.NpuFusedAdamW(model.parameters(), lr=1e-3)",
    clean="import torch\n\ndef make(model):\n    return torch.optim.AdamW(model.parameters(), lr=1e-3)",
)
