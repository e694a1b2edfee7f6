"""A host that waits for the loss in each training step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import cast

from accelcore_lint.flow import BACKWARD, STEP, Event, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name

_CONDITIONS = (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While)
_SCOPES = (ast.Lambda, ast.FunctionDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # other names
_NOT_EACH_STEP = (*_CONDITIONS, *_SCOPES)


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        marked: set[ast.AST] = set()
        for backward in flow.of(BACKWARD):
            loop = backward.loop
            steps = [step.loop for step in flow.of(STEP) if step.loop is not None]
            if loop is not None and loop not in marked and any(map(backward.in_loop, steps)):
                waits = [call for call in _waits(script, loop, backward) if not _guarded(script, call, loop)]
                if waits:
                    marked.add(loop)
                    yield Mark(
                        waits[0],
                        "The host waits for the device in each step to read the loss: the next step is not prepared "
                        "meanwhile.",
                        "Add up loss.detach() and read it every so many steps, or after the epoch.",
                    )


def _waits(script: Script, loop: ast.stmt, backward: Event) -> Iterator[ast.Call]:
    """Yield where the value of the loss of backward is read: `.item()`, `float()`."""
    if not isinstance(backward.loss, ast.Name):
        return
    same = _same(loop, backward.loss.id)
    for call in (node for node in ast.walk(loop) if isinstance(node, ast.Call)):
        read, names = cast("ast.AST | None", None), {backward.loss.id}
        if isinstance(call.func, ast.Attribute) and call.func.attr == "item":
            read, names = call.func.value, same
        elif script.names.resolve(call.func) == "float" and len(call.args) == 1:
            read = call.args[0]
        while isinstance(read, ast.Call) and isinstance(read.func, ast.Attribute):  # loss.detach().cpu().item()
            read = read.func.value
        if isinstance(read, ast.Attribute) and read.attr == "data":
            read = read.value
        if isinstance(read, ast.Name) and read.id in names:
            yield call


def _same(loop: ast.stmt, loss: str) -> set[str]:
    """Return the names of a loss: that from which apex has scaled it, and those of what is made of it alone."""
    names = {loss}
    for node in ast.walk(loop):
        if isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Call) and node.optional_vars:
            call = node.context_expr
            if last_name(call.func) == "scale_loss" and ast.unparse(node.optional_vars) == loss and call.args:
                names |= {call.args[0].id} if isinstance(call.args[0], ast.Name) else set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            made = node.value.args if isinstance(node.value, ast.Call) else [node.value]
            if len(made) == 1 and isinstance(made[0], ast.Name) and made[0].id in names:
                names.add(node.targets[0].id)
    return names


def _guarded(script: Script, call: ast.Call, loop: ast.stmt) -> bool:
    """Return whether the loss is read under a condition, in an inner loop, or in a function called later."""
    for above in script.names.ancestors(call):
        if above is loop:
            return False
        if isinstance(above, ast.Assign) and isinstance(loop, ast.While):
            asked = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
            if any(isinstance(target, ast.Name) and target.id in asked for target in above.targets):
                return True  # the loop ends by it
        if isinstance(above, _NOT_EACH_STEP):
            return True
    return True


RULE = Rule(
    code="ACC314",
    name="item-each-step",
    about="`loss.item()` or `float(loss)` in each training step. The host waits until the device has computed the "
    "loss, and launches nothing meanwhile. Small models lose much by it. Reads under a condition, and those by which a "
    "loop ends, are not found.",
    check=_check,
    found="""
        import torch

        def train(model, optimizer, loader):
            total = 0.0
            for batch in loader:
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                optimizer.step()
                total += loss.item()
    """,
    clean="""
        import torch

        def train(model, optimizer, loader):
            for i, batch in enumerate(loader):
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                optimizer.step()
                if i % 100 == 0:
                    print(loss.item())
    """,
)
