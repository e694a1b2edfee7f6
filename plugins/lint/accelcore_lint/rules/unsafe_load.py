"""Checkpoints that may run code when they are read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument

__all__ = ["RULE"]


def _check(script: Script) -> Iterator[Mark]:
    for call, _ in script.calls(lambda name: name == "torch.load"):
        only = argument(call, "weights_only")
        if isinstance(only, ast.Constant) and only.value is False:
            yield Mark(
                call,
                "With weights_only=False, torch runs the code that the file contains.",
                "Write weights_only=True and save tensors and numbers only; or trainer.save() and trainer.resume(), "
                "whose files have no code.",
            )


RULE = Rule(
    code="ACC310",
    name="unsafe-load",
    about="`torch.load` with `weights_only=False` unpickles the file. A pickle can run any code, so a checkpoint of "
    "other people owns the machine. torch before 2.6 does so without the argument, too.",
    check=_check,
    found=('import torch\nstate = torch.load("a.pt", map_location="cpu", weights_only=False)',),
    clean=(
        'import torch\nstate = torch.load("a.pt", weights_only=True)',
        'import torch\nstate = torch.load("a.pt")',
        "import torch\n\ndef load(path, **options):\n    return torch.load(path, **options)",
    ),
)
