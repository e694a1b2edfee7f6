"""A backward pass under autocast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.flow import BACKWARD, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script

_AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast")


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        for backward in flow.of(BACKWARD):
            regions = [block.node for block in backward.blocks if isinstance(block.node, ast.With)]
            if any(_is_autocast(script, item.context_expr) for region in regions for item in region.items):
                yield Mark(
                    backward.node,
                    "The backward pass runs under autocast: recomputed and custom operators may use another "
                    "precision than in forward.",
                    "End the region before backward: operators run in the precision of their forward by themselves.",
                )


def _is_autocast(script: Script, context: ast.expr) -> bool:
    value = context if isinstance(context, ast.Call) else script.names.value(context)
    if not isinstance(value, ast.Call) or script.names.resolve(value.func) not in _AUTOCASTS:
        return False
    off = [
        keyword for keyword in value.keywords if keyword.arg == "enabled" and isinstance(keyword.value, ast.Constant)
    ]
    return not any(keyword.value.value is False for keyword in off)  # type: ignore[attr-defined]


RULE = Rule(
    code="ACC312",
    name="autocast-backward",
    about="`loss.backward()` inside of `with torch.autocast(...)`. torch advises against it. What is called in "
    "backward, such as the second forward of activation checkpointing or the backward of a custom function, may be "
    "cast in another way.",
    check=_check,
    found="""
        import torch

        def step(model, batch, device, optimizer):
            with torch.autocast(device.type):
                loss = model(batch)
                loss.backward()
            optimizer.step()
    """,
    clean="""
        import torch

        def step(model, batch, device, optimizer):
            with torch.autocast(device.type):
                loss = model(batch)
            loss.backward()
            optimizer.step()
    """,
)
