"""A last window of micro-batches that is shorter than the others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accelcore_lint.flow import STEP, Flow, Window, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.rules.divided_loss import divisions
from accelcore_lint.script import Script, argument, last_name, mentions

_ENDLESS = re.compile("range|cycle|count|infinite")


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        for window in () if flow.foreign else flow.windows:
            if not (_counts_batches(script, window) or _counts_again(flow, window)):
                continue
            if _leaves_out(script, window) or _has_whole_windows(script, window):
                continue
            count = ast.unparse(window.count)
            if window.flushes and divisions(window):
                yield Mark(
                    window.guard.test,
                    f"The last window may have fewer than {count} micro-batches, and its losses are divided by "
                    f"{count}: its gradient is too small.",
                    "Divide by the number of micro-batches that the window has; accel.trainer(accumulate=...) does.",
                )
            elif not window.flushes and not _steps_elsewhere(flow, window):
                yield Mark(
                    window.guard.test,
                    f"If {count} does not divide the number of batches, the gradients of the last ones go into the "
                    "next epoch's first step, or are lost.",
                    "Step after the last batch, too, divided by what the window has; accel.trainer(accumulate=...) "
                    "does.",
                )


def _counts_batches(script: Script, window: Window) -> bool:
    """Return whether the counter starts again with each run through a loader."""
    loop, count = window.loop, window.count
    if isinstance(count, ast.Constant) and count.value == 1:
        return False
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return False
    enumerated = loop.iter
    while (
        last_name(enumerated.func) in {"tqdm", "trange"}
        and enumerated.args
        and isinstance(enumerated.args[0], ast.Call)
    ):
        enumerated = enumerated.args[0]
    if script.names.resolve(enumerated.func) != "enumerate" or not isinstance(loop.target, ast.Tuple):
        return False
    source = enumerated.args[0] if enumerated.args else None
    return (
        source is not None
        and not _ENDLESS.search(ast.unparse(source))
        and (ast.unparse(loop.target.elts[0]) == window.counter)
    )


def _counts_again(flow: Flow, window: Window) -> bool:
    """Return whether a counter by hand is set above the loop, in what is done for each epoch."""
    loop, blocks = window.loop, window.step.blocks
    if not isinstance(loop, ast.For) or _ENDLESS.search(ast.unparse(loop.iter)):
        return False
    outer = blocks[: next(place for place, block in enumerate(blocks) if block.node is loop)]
    names = [argument.arg for argument in ast.walk(flow.node) if isinstance(argument, ast.arg)]
    if not (any(block.loops for block in outer) or any("epoch" in name for name in names)):
        return False
    body: list[ast.stmt] = getattr(outer[-1].node, outer[-1].branch, []) if outer else flow.node.body
    begins = [ast.unparse(line) for line in body if line.lineno < loop.lineno and isinstance(line, ast.Assign)]
    counts = [ast.unparse(line) for line in loop.body if isinstance(line, ast.AugAssign)]
    return f"{window.counter} = 0" in begins and f"{window.counter} += 1" in counts


def _leaves_out(script: Script, window: Window) -> bool:
    """Return whether the loop skips batches before backward, by a condition on its counter."""
    counter = ast.Name(window.counter)
    begin = window.backward.node.lineno  # type: ignore[attr-defined]  # a call
    for statement in getattr(window.loop, "body", ()):
        if (
            isinstance(statement, ast.If)
            and statement.lineno < begin
            and isinstance(statement.body[-1], ast.Continue | ast.Break)
        ):
            parts = [part for part in ast.walk(statement.test) if isinstance(part, ast.Name)]
            values = [value for part in parts if (value := script.names.value(part)) is not None]
            if any(mentions(value, counter) for value in (*parts, *values)):
                return True
    return False


def _has_whole_windows(script: Script, window: Window) -> bool:
    """Return whether the file may give the loader as many batches as whole windows have.

    It draws them by a sampler that is not torch's, or computes a number as in `size // n * n` and `size - size % n`.
    """
    for call in script.all(ast.Call):
        makes = last_name(call.func).endswith("DataLoader")
        for name in ("batch_sampler", "sampler") if makes else ():
            value = argument(call, name)
            if value is not None and not (isinstance(value, ast.Constant) or _is_torchs(script, value)):
                return True
    return any(
        isinstance(each.op, ast.Mult | ast.Sub)
        and any(
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.FloorDiv if isinstance(each.op, ast.Mult) else ast.Mod)
            and mentions(part.right, window.count)
            for part in (each.left, each.right)
        )
        for each in script.all(ast.BinOp)
    )


def _is_torchs(script: Script, sampler: ast.expr) -> bool:
    """Return whether a sampler can only be None or one of torch's, which know nothing of windows."""
    values = script.names.values(sampler) if isinstance(sampler, ast.Name | ast.Attribute) else [sampler]
    parts = [part for each in values for part in ([each.body, each.orelse] if isinstance(each, ast.IfExp) else [each])]
    made = [each for each in parts if not isinstance(each, ast.Constant)]
    names = [script.names.resolve(each.func) if isinstance(each, ast.Call) else "" for each in made]
    return bool(values) and all(name.startswith("torch.utils.data.") for name in names)


def _steps_elsewhere(flow: Flow, window: Window) -> bool:
    """Return whether the optimizer, or one of unknown name, steps at another place of the function."""
    return any(event.node is not window.step.node for event in flow.of(STEP) if window.guard not in event.guards(None))


RULE = Rule(
    code="ACC306",
    name="short-window",
    about="Gradient accumulation with `(i + 1) % n == 0`, where `i` counts the batches of an epoch. If `n` does not "
    "divide their number, the last window is short. Without a further condition its gradients stay until the next "
    "epoch's first step, or are lost. With one such as `or i + 1 == len(loader)` its losses are still divided by "
    "`n`.",
    check=_check,
    found="""
        import torch

        def train(model, optimizer, loader, n):
            for i, batch in enumerate(loader):
                (model(batch) / n).backward()
                if (i + 1) % n == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    clean="""
        import torch

        def train(model, optimizer, loader, n):
            for i, batch in enumerate(loader):
                (model(batch) / n).backward()
                if (i + 1) % n == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    """,
)
