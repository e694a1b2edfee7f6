"""The loss of a micro-batch, divided twice or never by the number of micro-batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accelcore_lint.flow import Flow, Window, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument, last_name, mentions

_ACCUMULATES = re.compile(r"accum", re.ASCII | re.IGNORECASE)
_MEANS = ("cross_entropy", "mse_loss", "nll_loss", "l1_loss", "binary_cross_entropy_with_logits", "kl_div")
_MEAN_CLASSES = ("CrossEntropyLoss", "MSELoss", "NLLLoss", "L1Loss", "BCEWithLogitsLoss", "SmoothL1Loss")


def divisions(window: Window) -> list[ast.AST]:
    """Return where the loss of a window is divided by its count: in the loop, or in the call of backward."""
    loss = window.backward.loss
    count = ast.unparse(window.count)
    found: list[ast.AST] = []
    if loss is None:
        return found
    names = {part.id for part in ast.walk(loss) if isinstance(part, ast.Name)}
    for node in [*ast.walk(window.loop), *ast.walk(loss)]:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            if last_name(node.target) in names and ast.unparse(node.value) == count:
                found.append(node)
        elif isinstance(node, ast.Assign) and any(last_name(target) in names for target in node.targets):
            found += [node.value] if isinstance(node.value, ast.BinOp) and divides(node.value, count) else []
    found += [part for part in ast.walk(loss) if isinstance(part, ast.BinOp) and divides(part, count)]
    return list(dict.fromkeys(found))


def divides(node: ast.BinOp, count: str) -> bool:
    """Return whether an expression divides by the count, compared as code."""
    return isinstance(node.op, ast.Div) and ast.unparse(node.right) == count


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        for window in () if flow.foreign else flow.windows:
            divided = divisions(window)
            if len(divided) == 2 and not _branches(script, window, divided):
                yield Mark(
                    divided[1],
                    f"The loss is divided by {ast.unparse(window.count)} a second time: the gradients are that many "
                    "times too small.",
                    "Divide once; accel.trainer(accumulate=...) does it for you.",
                )
            elif not divided and _never(flow, window):
                yield Mark(
                    window.backward.node,
                    f"The gradients of {ast.unparse(window.count)} micro-batches are added, and the mean loss is "
                    "never divided by their number.",
                    f"Write (loss / {ast.unparse(window.count)}).backward(), or accel.trainer(accumulate=...).",
                )


def _branches(script: Script, window: Window, divided: list[ast.AST]) -> bool:
    """Return whether one of the divisions is under a condition in the loop."""
    for node in divided:
        for above in script.names.ancestors(node):
            if above is window.loop:
                break
            if isinstance(above, ast.If | ast.IfExp | ast.Try):
                return True
    return False


def _never(flow: Flow, window: Window) -> bool:
    """Return whether it is certain that nothing divides: the count is used in the guard and nowhere in arithmetic."""
    script, count = flow.script, window.count
    if isinstance(count, ast.Constant) or not _ACCUMULATES.search(ast.unparse(count)) or ".grad" in script.text:
        return False
    loss = window.backward.loss
    made = _made_in(window.loop, loss) if isinstance(loss, ast.Name) else loss
    if made is None or not _is_mean(script, made):
        return False
    arithmetic = (node for node in script.all(ast.BinOp) if isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv))
    if any(mentions(node, count) for node in (*arithmetic, *script.all(ast.AugAssign))):
        return False
    return not any(mentions(argument, count) for call in script.all(ast.Call) for argument in call.args)


def _made_in(loop: ast.stmt, loss: ast.Name) -> ast.expr | None:
    """Return the only expression that is assigned to the loss in the loop."""
    stores = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and _stores(node, loss)
    ]
    return stores[0].value if len(stores) == 1 and isinstance(stores[0], ast.Assign) else None


def _stores(node: ast.Assign | ast.AugAssign | ast.AnnAssign, name: ast.Name) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(part, ast.Name) and part.id == name.id for target in targets for part in ast.walk(target))


def _is_mean(script: Script, made: ast.expr) -> bool:
    """Return whether an expression is the mean of one of torch's losses, or a mean as a whole."""
    if not isinstance(made, ast.Call) or argument(made, "reduction") is not None:
        return False
    if last_name(made.func) == "mean" and not made.keywords:
        return len(made.args) == (script.names.resolve(made.func) == "torch.mean")
    if script.names.resolve(made.func).startswith("torch.nn.functional."):
        return script.names.resolve(made.func).endswith(_MEANS)
    criterion = script.names.value(made.func)
    if not isinstance(criterion, ast.Call) or argument(criterion, "reduction") is not None:
        return False
    return script.names.made_by(made.func).endswith(_MEAN_CLASSES)


RULE = Rule(
    code="ACC305",
    name="divided-loss",
    about="Gradients of micro-batches are added up, so each loss is divided by the number of micro-batches, once. "
    "Found are a loss that is divided twice, and a mean loss that nothing divides. The second is found only if no "
    "arithmetic in the script uses the number and no call is given it.",
    check=_check,
    found="""
        import torch

        def train(model, optimizer, loader, accumulate):
            for i, batch in enumerate(loader):
                loss = model(batch) / accumulate
                (loss / accumulate).backward()
                if (i + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    clean="""
        import torch
        import torch.nn.functional as F

        def train(model, optimizer, loader, args):
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y)
                loss = loss / args.accum_steps
                loss.backward()
                if (i + 1) % args.accum_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
