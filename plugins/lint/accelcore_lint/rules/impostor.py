"""Packages that make another device answer as cuda."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, text_of

_MODULES = {"torchada", "musa_patch", "transfer_to_npu", "gpu_migration"}
_PATCHED = ("torch.cuda", "torch.Tensor.cuda", "torch.nn.Module.cuda")


def _check(script: Script) -> Iterator[Mark]:
    imports: list[ast.Import | ast.ImportFrom] = [*script.all(ast.Import), *script.all(ast.ImportFrom)]
    for node in imports:
        module = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
        names = [part for alias in node.names for part in alias.name.split(".")]
        found = _MODULES & {*module.split("."), *(names if module or isinstance(node, ast.Import) else [])}
        if found:
            yield _mark(node, f"{min(found)} makes another device answer as cuda, for the whole process.")
    for target in script.all(ast.Attribute):
        name = script.names.resolve(target)
        if isinstance(target.ctx, ast.Store) and (name in _PATCHED or name.startswith("torch.cuda.")):
            yield _mark(target, f"This replaces `{name}` for the whole process.")
    for item in script.all(ast.Subscript):
        stored = isinstance(item.ctx, ast.Store) and script.names.resolve(item.value) == "sys.modules"
        if stored and text_of(item.slice).startswith("torch.cuda"):
            yield _mark(item, "This replaces the module torch.cuda for the whole process.")


def _mark(node: ast.AST, why: str) -> Mark:
    return Mark(
        node,
        f"{why} Libraries then take the wrong path, and their errors name the wrong device.",
        "Delete it and name no device: accelcore port rewrites such scripts.",
    )


RULE = Rule(
    code="ACC201",
    name="impostor",
    about="`transfer_to_npu`, `torchada`, `gpu_migration` and patches of `torch.cuda` let another vendor's device "
    'answer as cuda. They change torch for the whole process: `torch.jit.script` is disabled, tests for `"nccl"` '
    "fail, and libraries that ask for the device choose the wrong branch.",
    check=_check,
    found="import torch\nimport torch_npu\nfrom torch_npu.contrib import transfer_to_npu",
    clean="import torch\nimport torch_npu",
)
