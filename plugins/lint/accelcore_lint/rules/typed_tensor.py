"""Tensor classes of one vendor: `torch.cuda.FloatTensor`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, text_of
from accelcore_lint.vendors import runtime_call


def _is_class(name: str) -> bool:
    runtime = runtime_call(name)
    return runtime is not None and runtime[1].endswith("Tensor") and "." not in runtime[1]


def _check(script: Script) -> Iterator[Mark]:
    attributes = (node for node in script.all(ast.Attribute) if _is_class(script.names.resolve(node)))
    strings = (node for node in script.all(ast.Constant) if _is_class(text_of(node)))
    for node in (*attributes, *strings):
        yield Mark(
            node,
            "This is a tensor class of one vendor's device, in an interface that torch has deprecated.",
            "Write torch.empty(..., dtype=..., device=device), or tensor.to(device, dtype).",
        )


RULE = Rule(
    code="ACC106",
    name="typed-tensor",
    about="`torch.cuda.FloatTensor` and its relatives join a device and a dtype in one class. They exist for few "
    "devices and dtypes.",
    check=_check,
    found="import torch\nTensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor",
    clean="import torch\nx = torch.empty(3, dtype=torch.float16)",
)
