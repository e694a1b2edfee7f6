"""Moves by a vendor's method: `.cuda()`, `.npu()`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script
from accelcore_lint.vendors import DEVICES


def _check(script: Script) -> Iterator[Mark]:
    maps = {
        part for function in script.all(ast.Lambda) if len(function.args.args) == 2 for part in ast.walk(function.body)
    }  # of `map_location`, which another rule speaks of
    for call in script.all(ast.Call):
        method = call.func
        if call in maps:
            continue
        # A class or module may have a function of that name: `torch.cuda` is no call, and `thing.cuda(x=1)` no move.
        if not isinstance(method, ast.Attribute) or method.attr not in DEVICES or method.attr == "mps":
            continue
        if len(call.args) <= 1 and all(keyword.arg in {"device", "non_blocking"} for keyword in call.keywords):
            yield Mark(
                call,
                f"`.{method.attr}()` moves to one vendor's device only.",
                "Write `.to(device)` with the device that was chosen once (accel.device, or "
                "torch.accelerator.current_accelerator()).",
            )


RULE = Rule(
    code="ACC102",
    name="vendor-move",
    about="`.cuda()` and its relatives move a tensor or module to one vendor's device. `.to(device)` does the same "
    "on every device; accelcore's trainer moves the model and the batches by itself.",
    check=_check,
    found="import torch\nmodel = torch.nn.Linear(2, 2).cuda()",
    clean="import torch\n\ndef move(x, device):\n    return x.to(device, non_blocking=True)",
)
