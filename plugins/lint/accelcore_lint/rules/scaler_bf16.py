"""A loss scale for bf16, which needs none."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.flow import STEP, flows
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument, last_name


def _check(script: Script) -> Iterator[Mark]:
    regions = [call for call in script.all(ast.Call) if last_name(call.func) == "autocast"]
    dtypes = [argument(call, "dtype", 1) for call in regions]
    # Only if each region says bf16 itself is it certain that fp16 is never meant.
    literal = [dtype is not None and script.names.resolve(dtype) == "torch.bfloat16" for dtype in dtypes]
    if not regions or not all(literal) or not any(event.scaler for flow in flows(script) for event in flow.of(STEP)):
        return
    for call, _ in script.calls(lambda name: name.startswith("torch.") and name.endswith(".GradScaler")):
        if argument(call, "enabled") is None:
            yield Mark(
                call,
                "The script trains in bf16, which has the range of fp32: a loss scale gains nothing, and waits for "
                "the device in each step.",
                'Leave the scaler out; accel.trainer(precision="bf16") has none.',
            )


RULE = Rule(
    code="ACC313",
    name="scaler-bf16",
    about="A `GradScaler` beside `autocast(dtype=torch.bfloat16)`. bf16 has the range of fp32, so nothing "
    "underflows. The scaler costs a pass over all gradients and a wait for the device, and may skip steps.",
    check=_check,
    found="""
        import torch

        def train(model, optimizer, loader, device):
            scaler = torch.amp.GradScaler(device.type)
            for batch in loader:
                optimizer.zero_grad()
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    clean="""
        import torch

        def train(model, optimizer, loader, device, dtype):
            scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
            for batch in loader:
                optimizer.zero_grad()
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
)
