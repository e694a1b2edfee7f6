"""Settings of one vendor's libraries by which numbers differ: `torch.backends.cuda.matmul.allow_tf32`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script

_MODULES = (
    "torch.backends.cudnn.",
    "torch.backends.cuda.",
    "torch.backends.mps.",
    "torch.npu.matmul.",
    "torch.npu.conv.",
)
_EXACTNESS = ("allow_tf32", "allow_hf32", "fp32_precision")


def _check(script: Script) -> Iterator[Mark]:
    for node in script.all(ast.Attribute):
        name = script.names.resolve(node) if isinstance(node.ctx, ast.Store) else ""
        if name.startswith(_MODULES) and name.endswith(_EXACTNESS):
            yield Mark(
                node,
                f"`{name}` sets one vendor's library; other devices keep their own setting.",
                'Write fp32="fast" or fp32="ieee" in accel.trainer(), which every backend translates.',
            )


RULE = Rule(
    code="ACC112",
    name="backend-settings",
    about="`torch.backends.cuda.matmul.allow_tf32 = True` and relatives. They change numbers on one vendor's device. "
    "On others the same script is exact where it was not, without a message. Settings that only choose quick or "
    "reproducible kernels, such as `torch.backends.cudnn.benchmark`, are not reported: other devices ignore them.",
    check=_check,
    found="import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
    clean='import torch\ntorch.set_float32_matmul_precision("high")',
)
