"""A host that waits for the loss in each training step."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import cast

from accelcore_lint.flow import BACKWARD, STEP, Event, flows
from accelcore_lint.kinds import is_loss
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
            inner = any(_is_epoch(script, loop, other) for other in flow.of(BACKWARD) if other.loop in steps)
            steps_here = loop is not None and any(map(backward.in_loop, steps)) and not inner
            if loop is not None and steps_here and loop not in marked and not _asks(script, loop, backward.loss):
                waits = [call for call in _waits(script, loop, backward) if not _guarded(script, call, loop)]
                if waits:
                    marked.add(loop)
                    yield Mark(
                        waits[0],
                        "The host waits for the device in each step to read the loss: the next step is not prepared "
                        "meanwhile.",
                        "Add up loss.detach() and read it every so many steps, or after the epoch.",
                    )


def _is_epoch(script: Script, loop: ast.stmt | None, backward: Event) -> bool:
    """Return whether the steps of a loop are in a loop over the data within it, and it runs once an epoch."""
    inner = backward.loop
    data = inner.iter if isinstance(inner, ast.For) else None
    counts = isinstance(data, ast.Call) and script.names.resolve(data.func) == "range"
    return loop is not None and inner is not loop and backward.in_loop(loop) and data is not None and not counts


def _waits(script: Script, loop: ast.stmt, backward: Event) -> Iterator[ast.Call]:
    """Yield where the value of a loss is read: `.item()`, also of a part of it or its mean over ranks; `float()`."""
    if not isinstance(backward.loss, ast.Name):
        return
    for call in (node for node in ast.walk(loop) if isinstance(node, ast.Call)):
        read, is_item = cast("ast.AST | None", None), last_name(call.func) == "item"
        if is_item and isinstance(call.func, ast.Attribute):
            read = call.func.value
        elif script.names.resolve(call.func) == "float" and len(call.args) == 1:
            read = call.args[0]
        while isinstance(read, ast.Call) and isinstance(read.func, ast.Attribute):  # loss.detach().cpu().item()
            read = read.func.value
        if isinstance(read, ast.Attribute) and read.attr == "data":
            read = read.value
        if isinstance(read, ast.Name) and (read.id == backward.loss.id or (is_item and is_loss(read))):
            yield call


def _asks(script: Script, loop: ast.stmt, loss: ast.expr | None) -> bool:
    """Return whether a condition asks the loss itself in each step, as `if loss < best:`: the host waits for that."""
    for branch in (node for node in ast.walk(loop) if isinstance(node, ast.If)):
        around = itertools.takewhile(lambda node: node is not loop, script.names.ancestors(branch))
        if any(isinstance(node, _NOT_EACH_STEP) for node in around):
            continue
        for part in ast.walk(branch.test):
            given: list[ast.expr] = []
            if isinstance(part, ast.Compare) and not isinstance(part.ops[0], (ast.Is, ast.IsNot)):
                given = [part.left, *part.comparators]
            elif isinstance(part, ast.Call) and last_name(part.func) in ("isnan", "isfinite", "isinf"):
                given = part.args
            if loss is not None and any(ast.unparse(each) == ast.unparse(loss) for each in given):
                return True
    return False


def _guarded(script: Script, call: ast.Call, loop: ast.stmt) -> bool:
    """Return whether the loss is read under a condition, in an inner loop, or in a function called later."""
    for above in script.names.ancestors(call):
        if above is loop:
            return False
        if isinstance(above, ast.Assign):
            tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If | ast.While)]
            asked = {node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)}
            if any(isinstance(target, ast.Name) and target.id in asked for target in above.targets):
                return True  # the loop ends by it, or keeps the best
        if isinstance(above, _NOT_EACH_STEP):
            return True
    return True


RULE = Rule(
    code="ACC314",
    name="item-each-step",
    about="`loss.item()`, also of a part of the loss, or `float(loss)`, in each training step. The host waits until "
    "the device has computed it, and launches nothing meanwhile. Small models lose much by it. Reads under a "
    "condition, and those by which a condition decides, are not found.",
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
