"""A training forward that goes around DistributedDataParallel."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.flow import BACKWARD, STEP, Flow, flows
from accelcore_lint.kinds import is_wrapper
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name

_EVALUATES = ("no_grad", "inference_mode", "eval")


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        for backward in flow.of(BACKWARD):
            if not flow.foreign and backward.loop is not None and flow.of(STEP):
                yield from _in_loop(script, flow, backward.loop)
                break


def _in_loop(script: Script, flow: Flow, loop: ast.stmt) -> Iterator[Mark]:
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    wrappers = {last_name(call.func) for call in calls if is_wrapper(script.names, call.func)}
    for call in calls:
        inner = call.func
        if not isinstance(inner, ast.Attribute) or inner.attr != "module" or not is_wrapper(script.names, inner.value):
            continue
        # Where the wrapper is called, too, the second forward may be meant; and without gradients nothing is missing.
        if last_name(inner.value) not in wrappers and not _evaluates(script, call, loop):
            yield Mark(
                call,
                "This forward goes around DistributedDataParallel: the ranks' gradients are not averaged, and the "
                "models drift apart.",
                f"Call {ast.unparse(inner.value)}(...) itself in training; keep .module for saving.",
            )


def _evaluates(script: Script, call: ast.Call, loop: ast.stmt) -> bool:
    for above in script.names.ancestors(call):
        if above is loop:
            return False
        if isinstance(above, ast.With) and any(
            last_name(part) in _EVALUATES for item in above.items for part in ast.walk(item.context_expr)
        ):
            return True
        if isinstance(above, ast.If):
            return True  # a condition may tell training from something else
    return False


RULE = Rule(
    code="ACC311",
    name="around-wrapper",
    about="`ddp.module(x)` in the training loop. The gradients are averaged by hooks that the wrapper's own forward "
    "prepares. Without it each rank trains a model of its own, and only rank 0's is saved.",
    check=_check,
    found="""
        from torch.nn.parallel import DistributedDataParallel as DDP

        def train(net, optimizer, loader, criterion):
            model = DDP(net)
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model.module(x), y)
                loss.backward()
                optimizer.step()
    """,
    clean="""
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        def train(net, optimizer, loader, criterion):
            model = DDP(net)
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    model.module(x)
    """,
)
