"""Clipping of gradients that are still multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from accelcore_lint.flow import BACKWARD, CLIP, HELPER, STEP, UNSCALE, Flow, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        if not flow.foreign:
            yield from _in_flow(flow)


def _in_flow(flow: Flow) -> Iterator[Mark]:
    marked = set()
    for step in (event for event in flow.of(STEP) if event.scaler):
        scaled = [event for event in flow.of(BACKWARD) if event.scaler and flow.order(event) < flow.order(step)]
        if not scaled or scaled[-1].excludes(step):
            continue
        backward = scaled[-1]
        between = flow.between(backward, step, CLIP, UNSCALE, HELPER)
        for clip in (event for event in between if event.kind == CLIP):
            # What a helper of the script does is not followed: it may unscale.
            before = [event for event in between[: between.index(clip)] if event.kind != CLIP]
            apart = clip.excludes(backward) or clip.excludes(step)
            if not before and not apart and clip.node not in marked:
                marked.add(clip.node)
                yield Mark(
                    clip.node,
                    "This clips gradients that are still multiplied by the loss scale: the limit is that many times "
                    "too low.",
                    f"Call {step.scaler}.unscale_({step.key}) before it; accel.trainer(clip_norm=...) keeps the order.",
                )


RULE = Rule(
    code="ACC301",
    name="clip-before-unscale",
    about="`clip_grad_norm_` between `scaler.scale(loss).backward()` and `scaler.step(optimizer)` without "
    "`scaler.unscale_(optimizer)`. The gradients are 65536 times too large at that point, so that nearly every step "
    "is clipped to a tiny length, and training hardly moves.",
    check=_check,
    found="""
        import torch

        def train(model, optimizer, scaler, loader):
            for batch in loader:
                optimizer.zero_grad()
                loss = model(batch)
                scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
    """,
    clean="""
        import torch

        def train(model, optimizer, scaler, loader):
            for batch in loader:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
    """,
)
