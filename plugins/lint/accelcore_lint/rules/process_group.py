"""Process groups by a vendor's name: `"nccl"`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, text_of
from accelcore_lint.vendors import GROUPS


def _check(script: Script) -> Iterator[Mark]:
    for string in script.all(ast.Constant):
        words = text_of(string).lower().replace(",", ":").split(":")
        parent = script.names.parents.get(string)
        if not {*words} & {*GROUPS} or isinstance(parent, ast.Expr | ast.JoinedStr | ast.Dict):
            continue
        asks = isinstance(parent, ast.Compare)
        yield Mark(
            string,
            f"{text_of(string)!r} is the process group of one vendor"
            + ("; of others this test says no." if asks else "."),
            "Let accel.distributed() choose; or write torch.distributed.get_default_backend_for_device(device).",
        )


RULE = Rule(
    code="ACC110",
    name="process-group",
    about='`init_process_group("nccl")`, also as the default of an option. Each vendor has its own: nccl, hccl, '
    "xccl. torch knows the one of a device.",
    check=_check,
    found='import torch.distributed as dist\ndist.init_process_group(backend="nccl")',
    clean='import torch.distributed as dist\ndist.init_process_group("gloo")',
)
