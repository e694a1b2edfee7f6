"""Settings of one vendor's libraries: `torch.backends.cudnn.benchmark`."""

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
    stored = (node for node in script.all(ast.Attribute) if isinstance(node.ctx, ast.Store))
    called = (call.func for call in script.all(ast.Call))
    for node in (*stored, *called):
        name = script.names.resolve(node)
        if name.startswith(_MODULES) and not name.endswith(".is_available"):
            exactness = name.endswith(_EXACTNESS)
            yield Mark(
                node,
                f"`{name}` sets one vendor's library; other devices keep their own setting.",
                'Write fp32="fast" or fp32="ieee" in accel.trainer(), which every backend translates.'
                if exactness
                else "Write accel.runtime.seed(n, deterministic=True) for exact runs; leave the search for quick "
                "kernels to the backend, or set it where the job starts.",
            )


RULE = Rule(
    code="ACC112",
    name="backend-settings",
    about="`torch.backends.cudnn.benchmark = True`, `torch.backends.cuda.matmul.allow_tf32 = True` and relatives. "
    "They change speed and numbers on one vendor's device. On others the same script is slower, or exact where it "
    "was not, and nothing says so.",
    check=_check,
    found=(
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "import torch.backends.cudnn as cudnn\ncudnn.deterministic = True",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "import torch\ntorch.backends.cuda.enable_flash_sdp(False)",
    ),
    clean=(
        'import torch\ntorch.set_float32_matmul_precision("high")',
        "import torch\nversion = torch.backends.cudnn.version",
    ),
)
