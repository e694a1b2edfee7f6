"""Means over tokens that are averaged once more over micro-batches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.flow import Flow, Window, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.rules.divided_loss import divisions
from accelcore_lint.script import Script, argument, last_name

_LOSSES = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}

_SHAPES = {"view", "reshape", "flatten", "transpose", "permute", "swapaxes", "movedim", "rearrange"}
_MASK = 255
"""The label of pixels that do not count, in the usual data sets."""


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        for window in () if flow.foreign else flow.windows:
            if divisions(window):
                yield from _losses(script, flow, window)


def _losses(script: Script, flow: Flow, window: Window) -> Iterator[Mark]:
    loss = window.backward.loss
    names = {part.id for part in ast.walk(loss) if isinstance(part, ast.Name)} if loss is not None else set()
    assigned = (
        node.value
        for node in ast.walk(window.loop)
        if isinstance(node, ast.Assign) and any(last_name(target) in names for target in node.targets)
    )
    for expression in assigned:
        for call in (part for part in ast.walk(expression) if isinstance(part, ast.Call)):
            made = script.names.value(call.func)
            settings = made if isinstance(made, ast.Call) else call
            kind = script.names.resolve(settings.func)
            ignored = argument(settings, "ignore_index")
            ignores = ignored is not None and argument(settings, "reduction") is None
            ignores = ignores and (not _is_label(ignored) or _has_tokens(script, call))
            if kind.startswith("torch.nn.") and kind.rpartition(".")[2] in _LOSSES and ignores:
                yield Mark(
                    call,
                    "This is the mean over the targets that are not ignored, whose number differs between "
                    "micro-batches: the mean of the means is not the mean.",
                    "Sum the losses and divide by the number of targets in the window; or give "
                    "accel.trainer(accumulate=...) a function weight= that counts them.",
                )


def _is_label(ignored: ast.expr | None) -> bool:
    """Return whether `ignore_index` is a number that scripts also give if no target is ignored, such as -1."""
    number = ignored.operand if isinstance(ignored, ast.UnaryOp) else ignored
    return isinstance(number, ast.Constant) and number.value != _MASK


def _has_tokens(script: Script, loss: ast.Call) -> bool:
    """Return whether what a loss gets is reshaped before, as tokens are, and labels of samples are not."""
    given = [*loss.args, *(keyword.value for keyword in loss.keywords)]
    given += [value for each in given if (value := script.names.value(each)) is not None]
    parts = [part for each in given for part in ast.walk(each)]
    shaped = any(isinstance(part, ast.Call) and last_name(part.func) in _SHAPES for part in parts)
    return shaped or any(isinstance(part, ast.Slice) and (part.lower or part.upper) for part in parts)


RULE = Rule(
    code="ACC307",
    name="token-mean",
    about="A loss with `ignore_index` is the mean over the targets that count. Micro-batches have different numbers "
    "of them. Dividing each mean by the number of micro-batches gives short ones too much weight, and the result "
    "differs from that of one large batch. If the index is a number other than 255 and nothing is reshaped, each "
    "sample may have one label: nothing is found.",
    check=_check,
    found="""
        import torch
        import torch.nn.functional as F

        def train(model, optimizer, loader, n):
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
                (loss / n).backward()
                if (i + 1) % n == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    clean="""
        import torch
        import torch.nn.functional as F

        def train(model, optimizer, loader, n):
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y)
                (loss / n).backward()
                if (i + 1) % n == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
)
