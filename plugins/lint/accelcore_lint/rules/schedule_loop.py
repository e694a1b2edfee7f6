"""A learning rate schedule that counts epochs, stepped for each batch, or the reverse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accelcore_lint.flow import HELPER, SCHEDULE, STEP, Event, Flow, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument, mentions

_EPOCHS = re.compile(r"(^|_)(n_?|num_|max_)?epochs?$", re.ASCII | re.IGNORECASE)


def _check(script: Script) -> Iterator[Mark]:
    loops: set[ast.AST] = {
        flow.node for flow in flows(script) if any(event.loop is not None for event in flow.of(STEP))
    }
    for flow in flows(script):
        if flow.foreign:
            continue
        for schedule in flow.of(SCHEDULE):
            counts = _counts(script, schedule)
            if counts == "steps" and _once_an_epoch(flow, schedule, loops):
                yield _mark(schedule, "each optimizer step", "once an epoch", "in the loop over batches")
            elif counts == "epochs" and _each_batch(flow, schedule):
                yield _mark(schedule, "epochs", "in each batch", "after the loop over batches")


def _mark(schedule: Event, counts: str, stepped: str, where: str) -> Mark:
    return Mark(
        schedule.node,
        f"The schedule is made for {counts}, and steps {stepped}.",
        f"Step it {where}, or give it the number of its steps.",
    )


def _counts(script: Script, schedule: Event) -> str:
    """Return what the schedule's constructor counts, as far as its arguments tell: `steps`, `epochs` or ''."""
    call = schedule.node
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    made = script.names.value(call.func.value)
    kind = script.names.made_by(call.func.value).rpartition(".")[2]
    if not isinstance(made, ast.Call):
        return ""
    if kind == "OneCycleLR":
        length = argument(made, "total_steps", 2)
        batches = length is not None and any(
            script.names.resolve(part.func) == "len" for part in ast.walk(length) if isinstance(part, ast.Call)
        )
        return "steps" if batches or argument(made, "steps_per_epoch", 4) is not None else ""
    if kind == "CosineAnnealingLR":
        period = argument(made, "T_max", 1)
        text = ast.unparse(period) if isinstance(period, ast.Name | ast.Attribute) else ""
        return "epochs" if _EPOCHS.search(text.rpartition(".")[2]) else ""
    return ""


def _once_an_epoch(flow: Flow, schedule: Event, loops: set[ast.AST]) -> bool:
    """Return whether the optimizer steps only in a loop, or a helper's loop, inside of the schedule's loop."""
    if schedule.loop is None or schedule.guards(schedule.loop):
        return False
    inside = [event for event in flow.of(STEP, HELPER) if event.in_loop(schedule.loop)]
    deeper = [event for event in inside if event.kind == STEP and event.loop is not schedule.loop]
    helped = [event for event in inside if event.kind == HELPER and event.function in loops]
    same = [event for event in inside if event.kind == STEP and event.loop is schedule.loop]
    return bool(deeper or helped) and not same


def _each_batch(flow: Flow, schedule: Event) -> bool:
    """Return whether the schedule is in the same loop as the optimizer, and that one in a loop over epochs."""
    loop = schedule.loop
    outer = next((block.node for block in schedule.blocks if block.loops), None)
    beside = [event for event in flow.of(STEP) if event.loop is loop]
    if loop is None or outer is loop or not beside or schedule.guards(loop) != beside[-1].guards(loop):
        return False
    return isinstance(outer, ast.For) and "epoch" in ast.unparse(outer.target) and not mentions(loop, outer.target)


RULE = Rule(
    code="ACC303",
    name="schedule-loop",
    about="A schedule that steps in the wrong loop: `OneCycleLR(..., steps_per_epoch=...)` stepped once an epoch "
    "never leaves its warm-up, and `CosineAnnealingLR(T_max=epochs)` stepped for each batch goes up and down many "
    "times an epoch. Only schedules whose arguments tell what they count are found.",
    check=_check,
    found="""
        import torch

        def main(model, loader, epochs):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, epochs=epochs, steps_per_epoch=len(loader)
            )
            for epoch in range(epochs):
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch).backward()
                    optimizer.step()
                scheduler.step()
    """,
    clean="""
        import torch

        def main(model, loader, epochs):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            steps = epochs * len(loader)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
            for epoch in range(epochs):
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch).backward()
                    optimizer.step()
                    scheduler.step()
    """,
)
