"""Checkpoints that may run code when they are read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument

_NEW = re.compile(r"(?m)^[ \t]*(import|from) +accelcore\b")
"""An import of accelcore, whose oldest torch reads tensors only unless it is told otherwise."""


def _check(script: Script) -> Iterator[Mark]:
    is_new = _NEW.search(script.text) is not None
    for call, _ in script.calls(lambda name: name == "torch.load"):
        only = argument(call, "weights_only")
        if any(keyword.arg is None for keyword in call.keywords):
            continue  # **options may have it
        if only is None and is_new:
            continue
        if only is None:
            why = "torch before 2.6 runs the code that a file contains, unless weights_only=True is given."
        elif isinstance(only, ast.Constant) and only.value is False:
            why = "With weights_only=False, torch runs the code that the file contains."
        else:
            continue
        yield Mark(
            call,
            why,
            "Write weights_only=True and save tensors and numbers only; or trainer.save() and trainer.resume(), "
            "whose files have no code.",
        )


RULE = Rule(
    code="ACC310",
    name="unsafe-load",
    about="`torch.load` without `weights_only=True` unpickles the file, before torch 2.6 by default. A pickle can "
    "run any code, so a checkpoint of other people owns the machine.",
    check=_check,
    found='import torch\nstate = torch.load("a.pt")',
    clean='import torch\nstate = torch.load("a.pt", weights_only=True)',
)
