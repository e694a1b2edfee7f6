"""Checkpoints that load onto one vendor's device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument
from accelcore_lint.vendors import DEVICES, is_device_text


def _names_vendor(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):  # of the places in the file to those in memory
        return any(map(_names_vendor, value.values))
    for node in ast.walk(value):
        if isinstance(node, ast.IfExp) and not (_names_vendor(node.body) and _names_vendor(node.orelse)):
            return False  # where the script has no such device, it takes another one
        if is_device_text(node):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DEVICES:
            return True
    return False


def _check(script: Script) -> Iterator[Mark]:
    for call in script.all(ast.Call):
        place = argument(call, "map_location")
        if place is None and script.names.resolve(call.func) == "torch.load":
            place = argument(call, "map_location", 1)
        place = place and (script.names.value(place) or place)
        if place is not None and _names_vendor(place):
            yield Mark(
                place,
                "This loads a checkpoint onto one vendor's device, and fails where there is none.",
                'Write map_location="cpu", or device; load_state_dict copies to where the parameters are. '
                "trainer.resume() needs no place.",
            )


RULE = Rule(
    code="ACC107",
    name="map-location",
    about='`map_location="cuda"` in `torch.load`. The checkpoint can then be read on one vendor\'s device only. On '
    "each rank of a job it also takes device memory a second time.",
    check=_check,
    found='import torch\nstate = torch.load("a.pt", map_location="cuda:0", weights_only=True)',
    clean='import torch\nstate = torch.load("a.pt", map_location="cpu", weights_only=True)',
)
