"""A learning rate schedule that steps before the optimizer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.flow import HELPER, SCHEDULE, STEP, Flow, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name


def _check(script: Script) -> Iterator[Mark]:
    if not any("lr_scheduler." in name for _, name in script.calls(bool)):
        return  # an object of the same name may be anything
    trains: set[ast.AST | None] = {None} | {flow.node for flow in flows(script) if flow.of(STEP)}
    schedules: set[ast.AST] = {flow.node for flow in flows(script) if flow.of(SCHEDULE)}
    for flow in flows(script):
        if not flow.foreign:
            yield from _in_flow(flow, trains, schedules, is_round=_is_round(flow.node, script))


def _is_round(node: ast.AST, script: Script) -> bool:
    """Return whether the script calls a function in loops only, and no optimizer steps above them."""
    calls = [(flow, event) for flow in flows(script) for event in flow.of(HELPER) if event.function is node]
    steps = [any(flow.order(step) < flow.order(event) for step in flow.of(STEP)) for flow, event in calls]
    return bool(calls) and all(event.loop is not None for _, event in calls) and not any(steps)


def _in_flow(flow: Flow, trains: set[ast.AST | None], schedules: set[ast.AST], *, is_round: bool) -> Iterator[Mark]:
    steps = [
        event for event in flow.events if event.kind == STEP or (event.kind == HELPER and event.function in trains)
    ]
    for schedule in flow.of(SCHEDULE):
        call, loop = schedule.node, schedule.loop
        assert isinstance(call, ast.Call)
        if (loop is None and not is_round) or call.args or call.keywords or schedule.guards(loop):
            continue  # with an argument it sets a value, and under an `if` it may not run in the first round
        inside = [event for event in steps if event.in_loop(loop)]
        helped = any(event.function in schedules for event in inside)
        if (
            inside
            and not helped
            and all(flow.order(schedule) < flow.order(event) and not schedule.excludes(event) for event in inside)
        ):
            yield Mark(
                call,
                "The schedule steps before the optimizer: the first learning rate is never used, and each later one "
                "comes a step early.",
                f"Move {last_name(call.func.value) if isinstance(call.func, ast.Attribute) else 'it'}.step() after "
                "optimizer.step(); accel.trainer(scheduler=...) keeps the order.",
            )


RULE = Rule(
    code="ACC302",
    name="schedule-first",
    about="`scheduler.step()` before `optimizer.step()` in the same round of a loop, also in a function that the loop "
    "calls. Since torch 1.1 this skips the schedule's first value. A call with an argument, or under an `if`, is not "
    "found.",
    check=_check,
    found="""
        import torch
        from torch.optim.lr_scheduler import StepLR

        def main(model, loader, loss_of):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = StepLR(optimizer, 30)
            for epoch in range(90):
                scheduler.step()
                for batch in loader:
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
    """,
    clean="""
        import torch
        from torch.optim.lr_scheduler import StepLR

        def main(model, loader):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = StepLR(optimizer, 30)
            for epoch in range(90):
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch).backward()
                    optimizer.step()
                scheduler.step()
    """,
)
