"""Names of vendors' devices in strings: `"cuda"`, `f"cuda:{rank}"`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script
from accelcore_lint.vendors import is_device_text


def _check(script: Script) -> Iterator[Mark]:
    strings: list[ast.expr] = [*script.all(ast.Constant), *script.all(ast.JoinedStr)]
    for string in strings:
        if not is_device_text(string):
            continue
        parent = script.names.parents.get(string)
        # A comparison is a question, of which other rules speak; an f-string is found as a whole.
        if isinstance(
            parent, ast.Compare | ast.Expr | ast.JoinedStr | ast.FormattedValue | ast.Subscript | ast.MatchValue
        ):
            continue
        if isinstance(parent, ast.Dict) and string in parent.keys:
            continue
        collection = isinstance(parent, ast.List | ast.Tuple | ast.Set)
        if parent and collection and isinstance(script.names.parents.get(parent), ast.Compare):
            continue
        if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "startswith":
            continue
        shown = ast.unparse(string)
        yield Mark(
            string,
            f"{shown} names one vendor's device.",
            "Choose the device once and pass it on: accel = accelcore.select(), then accel.device; or "
            "torch.accelerator.current_accelerator().",
        )


RULE = Rule(
    code="ACC103",
    name="device-string",
    about='A string such as `"cuda"` or `f"cuda:{rank}"` in a call, an assignment or a default of an option. '
    "The script then runs on one vendor's device only. Comparisons are left to the other rules.",
    check=_check,
    general=True,
    found='import torch\ndevice = torch.device("cuda")',
    clean='import torch\ndevice = torch.device("cpu")',
)
