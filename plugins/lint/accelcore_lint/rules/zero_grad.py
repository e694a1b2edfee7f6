"""Gradients that are cleared before they are used, or never."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import cast

from accelcore_lint.flow import BACKWARD, STEP, ZERO, Event, Flow, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script


def _check(script: Script) -> Iterator[Mark]:
    # Gradients may be cleared in many ways, of which each has one of these words.
    never = not any(word in script.text for word in ("zero_grad", ".grad", "zero_()", "autograd", "clear_grad"))
    for flow in flows(script):
        if not flow.foreign:
            yield from _between(flow)
            if never:
                yield from _never(flow)


def _between(flow: Flow) -> Iterator[Mark]:
    for step in flow.of(STEP):
        for zero in flow.of(ZERO):
            if zero.key != step.key or zero.loop is not step.loop or zero.guards(step.loop) != step.guards(step.loop):
                continue
            earlier = [event for event in flow.of(BACKWARD) if flow.order(event) < flow.order(zero)]
            same = [event for event in earlier if event.loop is step.loop and not event.excludes(step)]
            order = flow.order(zero) < flow.order(step)
            if (
                order
                and same
                and not flow.between(zero, step, BACKWARD, STEP)
                and not flow.between(same[-1], zero, STEP)
                and not _skips(flow, step)
            ):
                yield Mark(
                    zero.node,
                    f"The gradients are cleared between backward and {step.key}.step(): the step uses none.",
                    "Clear them before backward, or after the step.",
                )


def _skips(flow: Flow, step: Event) -> bool:
    """Return whether a step only runs in some cases, beside the usual one: the update is skipped on purpose."""
    guards = step.guards(step.loop)
    steps = [other for other in flow.of(STEP) if other.key == step.key and other.loop is step.loop]
    return any(len(other.guards(other.loop)) < len(guards) for other in steps)


def _never(flow: Flow) -> Iterator[Mark]:
    for step in flow.of(STEP):
        backward = [event for event in flow.of(BACKWARD) if event.loop is step.loop and not event.excludes(step)]
        made = _made_here(flow, step)
        if step.loop is not None and backward and made and flow.order(backward[0]) < flow.order(step):
            yield Mark(
                step.node,
                "Nothing in this script clears the gradients: each step uses the sum of all batches so far.",
                f"Call {step.key}.zero_grad() after it, or before backward; accel.trainer() does.",
            )
            return


def _made_here(flow: Flow, step: Event) -> bool:
    """Return whether an optimizer of torch is made in this script, and not again for each step of it."""
    call, names = cast("ast.Call", step.node), flow.script.names
    of = call.func.value if isinstance(call.func, ast.Attribute) else call
    values = [value for each in (of, *call.args) if (value := names.value(each)) is not None]
    if any(above is step.loop for value in values for above in names.ancestors(value)):
        return False  # as in a test, of parameters that are new, too
    made = {names.made_by(of), *(names.made_by(argument) for argument in call.args)}
    return any(name.startswith("torch.optim.") for name in made)


RULE = Rule(
    code="ACC304",
    name="zero-grad",
    about="`optimizer.zero_grad()` between `loss.backward()` and `optimizer.step()` makes a step without gradients. "
    "A script that never clears them adds up the gradients of all batches. The second is found only if the script "
    "makes the optimizer itself.",
    check=_check,
    found="""
        import torch

        def train(model, optimizer, loader):
            for batch in loader:
                model(batch).backward()
                optimizer.zero_grad()
                optimizer.step()
    """,
    clean="""
        import torch

        def train(model, optimizer, loader):
            for batch in loader:
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """,
)
