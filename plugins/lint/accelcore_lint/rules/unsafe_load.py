"""Checkpoints that may run code when they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument

_NEW = re.compile(r"(?m)^[ \t]*(import|from) +accelcore\b")
"""An import of accelcore, whose oldest torch reads tensors only unless it is told otherwise."""


def _check(script: Script) -> Iterator[Mark]:
    for call, _ in script.calls(lambda name: name == "torch.load") if not _NEW.search(script.text) else ():
        if argument(call, "weights_only") is not None or any(keyword.arg is None for keyword in call.keywords):
            continue  # the script decides; **options may have it
        yield Mark(
            call,
            "torch before 2.6 runs the code that a file contains, unless weights_only=True is given.",
            "Write weights_only=True and save tensors and numbers only; or trainer.save() and trainer.resume(), "
            "whose files have no code. If you trust the file, write weights_only=False.",
        )


RULE = Rule(
    code="ACC310",
    name="unsafe-load",
    about="`torch.load` without `weights_only` unpickles the file before torch 2.6. A pickle can run any code, so a "
    "checkpoint of other people owns the machine. A script that writes `weights_only=False` has decided to trust it.",
    check=_check,
    found='import torch\nstate = torch.load("a.pt")',
    clean='import torch\nstate = torch.load("a.pt", weights_only=True)\nown = torch.load("own.pt", weights_only=False)',
)
