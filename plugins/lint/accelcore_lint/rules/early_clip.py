"""Clipping of gradients before backward, or while they are still multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from accelcore_lint.flow import BACKWARD, CLIP, HELPER, STEP, UNSCALE, Flow, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script


def _check(script: Script) -> Iterator[Mark]:
    for flow in flows(script):
        if not flow.foreign:
            yield from _before_backward(flow)
            yield from _before_unscale(flow)


def _before_backward(flow: Flow) -> Iterator[Mark]:
    """Find a clip above all backward passes of its loop, which the step follows."""
    for clip in (event for event in flow.of(CLIP) if event.loop is not None):
        inside = [event for event in flow.of(BACKWARD, HELPER, STEP, CLIP) if event.in_loop(clip.loop)]
        place = inside.index(clip)
        kinds = [event.kind for event in inside[place + 1 :] if not event.excludes(clip)]
        if kinds == [BACKWARD, STEP] and not any(event.kind in (BACKWARD, HELPER) for event in inside[:place]):
            yield Mark(
                clip.node,
                "This clips before backward computes the gradients: those of the step are not clipped.",
                "Call it between backward and the step; accel.trainer(clip_norm=...) does.",
            )


def _before_unscale(flow: Flow) -> Iterator[Mark]:
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
    name="early-clip",
    about="`clip_grad_norm_` between `scaler.scale(loss).backward()` and `scaler.step(optimizer)` without "
    "`scaler.unscale_(optimizer)`. The gradients are 65536 times too large at that point, so that nearly every step "
    "is clipped to a tiny length, and training hardly moves. Or a clip above the backward pass of "
    "a loop: it clips the gradients of an earlier batch, or none.",
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
