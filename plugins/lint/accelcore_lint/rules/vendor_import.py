"""Imports of vendors' packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script

_PACKAGES = {
    "apex": "accelcore.apex has the same words on every device (accelcore run --apex, or accelcore port)",
    "torch_npu": "the backend imports it when it is selected",
    "torch_xla": "the device's backend is where it belongs",
    "torch_musa": "the device's backend is where it belongs",
    "torch_mlu": "the device's backend is where it belongs",
    "torch_gcu": "the device's backend is where it belongs",
    "habana_frameworks": "the device's backend is where it belongs",
    "intel_extension_for_pytorch": "the device's backend is where it belongs",
    "torch_directml": "the device's backend is where it belongs",
    "pynvml": "torch.accelerator has figures of memory",
    "cupy": "torch's own functions work on every device",
}
_IMPOSTORS = ("transfer_to_npu", "gpu_migration")


def _check(script: Script) -> Iterator[Mark]:
    for node in script.all(ast.Import):
        for alias in node.names:
            yield from _mark(node, alias.name)
    for line in script.all(ast.ImportFrom):
        # `from torch_npu.contrib import transfer_to_npu` is the impostor's.
        if line.level == 0 and line.module and not any(alias.name in _IMPOSTORS for alias in line.names):
            yield from _mark(line, line.module)


def _mark(node: ast.AST, module: str) -> Iterator[Mark]:
    package = module.partition(".")[0]
    if package in _PACKAGES and not module.endswith(_IMPOSTORS):
        yield Mark(
            node,
            f"{package} is a vendor's package: where it is not installed, the script does not start.",
            f"Delete the import: {_PACKAGES[package]}.",
        )


RULE = Rule(
    code="ACC113",
    name="vendor-import",
    about="Imports of `torch_npu`, `apex`, `torch_xla`, `habana_frameworks` and other vendors' packages. A training "
    "script that imports one starts on that vendor's machines only.",
    check=_check,
    found="import torch\nimport torch_npu",
    clean="import torch\nfrom .apex import amp",
)
