"""Mixed precision by a vendor's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument
from accelcore_lint.vendors import DEVICES, is_device_text

_TORCHS = {
    "torch.autocast",
    "torch.amp.autocast",
    "torch.amp.autocast_mode.autocast",
    "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
    "torch.amp.custom_fwd",
    "torch.amp.custom_bwd",
    "torch.amp.autocast_mode.custom_fwd",
    "torch.amp.autocast_mode.custom_bwd",
}
_DEVICE_FIRST = {"torch.amp.GradScaler": "GradScaler()", "torch.amp.grad_scaler.GradScaler": "GradScaler()"}
_VENDORS = (*tuple(f"{root}.{device}.amp." for device in DEVICES for root in ("torch", "torch_npu")), "apex.amp.")
_DECORATORS = ("custom_fwd", "custom_bwd")


def _check(script: Script) -> Iterator[Mark]:
    for call, name in script.calls(lambda name: name in _TORCHS or name.startswith(_VENDORS)):
        if name.startswith(_VENDORS):
            yield _mark(call.func, name)
            continue
        device = argument(call, "device" if name in _DEVICE_FIRST else "device_type", 0)
        if name in _DEVICE_FIRST and (device is None and not call.args):
            yield Mark(
                call,
                "GradScaler() without a device is the one of cuda, and turns itself off on other devices with a "
                "warning.",
                'Write torch.amp.GradScaler(device.type); accel.trainer(precision="fp16") has a scaler for every '
                "device.",
            )
        elif device is not None and is_device_text(device):
            yield Mark(device, f"{name.rpartition('.')[2]} names one vendor's device.", _write(name))
    for function in script.functions():
        for decorator in function.decorator_list:
            if (name := script.names.resolve(decorator)).startswith(_VENDORS):
                yield _mark(decorator, name)


def _mark(node: ast.AST, name: str) -> Mark:
    return Mark(node, f"`{name}` is mixed precision of one vendor's device.", _write(name))


def _write(name: str) -> str:
    if name.endswith(_DECORATORS):
        return "Write torch.amp.custom_fwd(device_type=...) with the type of the tensors' device."
    return (
        "Write accel.autocast() or accel.trainer(precision=...); or torch.autocast(device.type) and "
        "torch.amp.GradScaler(device.type)."
    )


RULE = Rule(
    code="ACC115",
    name="vendor-amp",
    about='`torch.cuda.amp.autocast()`, `torch.autocast("cuda")`, `GradScaler()` without a device, '
    '`custom_fwd(device_type="cuda")` and apex\'s `amp`. On another device the region runs in fp32, or the scaler '
    "turns itself off.",
    check=_check,
    found="from torch.cuda.amp import GradScaler, autocast\nscaler = GradScaler()\nwith autocast():\n    pass",
    clean="import torch\n\ndef run(device):\n    with torch.autocast(device.type, dtype=torch.bfloat16):\n        pass",
)
