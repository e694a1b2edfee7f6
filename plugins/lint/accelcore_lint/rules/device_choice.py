"""Choices between one vendor's device and the CPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script
from accelcore_lint.vendors import asks_for_vendor, is_device_text, runtime_call


def _check(script: Script) -> Iterator[Mark]:
    for choice in script.all(ast.IfExp):
        outermost = not isinstance(script.names.parents.get(choice), ast.IfExp)
        names = is_device_text(choice.body) or is_device_text(choice.orelse) or _makes_device(script, choice)
        if outermost and names and asks_for_vendor(script, choice.test) is not None:
            yield Mark(
                choice,
                "This chooses between the devices that it names; on another accelerator it trains on the CPU, and "
                "nothing reports it.",
                "Write accelcore.select(), which takes the best device that works and logs why; or "
                "torch.accelerator.current_accelerator().",
            )
    for call, name in script.calls(lambda name: name.endswith(".is_available")):
        if (runtime := runtime_call(name)) is not None:
            yield Mark(
                call,
                f"This asks for {runtime[0]} only: other accelerators count as none.",
                "Ask torch.accelerator.is_available(), or let accelcore.select() choose.",
            )


def _makes_device(script: Script, choice: ast.IfExp) -> bool:
    parts = [part for part in (choice.body, choice.orelse) if isinstance(part, ast.Call)]
    return any(
        script.names.resolve(part.func) == "torch.device" and any(is_device_text(value) for value in part.args)
        for part in parts
    )


RULE = Rule(
    code="ACC104",
    name="device-choice",
    about='`"cuda" if torch.cuda.is_available() else "cpu"` and its relatives. On an Ascend NPU or any other '
    "accelerator this trains on the CPU and reports nothing; on a machine whose driver is broken, too.",
    check=_check,
    general=True,
    found='import torch\ndevice = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
    clean="import torch\ndevice = torch.accelerator.current_accelerator() or torch.device('cpu')",
)
