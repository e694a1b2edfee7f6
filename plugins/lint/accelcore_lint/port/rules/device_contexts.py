"""`with torch.cuda.device(index):`, which makes another device of the same kind current."""

from __future__ import annotations

import libcst as cst

from accelcore_lint.port.device_names import index_source
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import whole


def _decide(node: cst.Call, facts: Facts) -> Rewrite | None:
    """Take the context of the device's module: that of torch.accelerator needs torch 2.8."""
    if facts.name(node.func) != "torch.cuda.device" or node in facts.contexts:
        return None
    facts.place.check_question(node)
    index = index_source(node.args[0].value)
    return whole(node, f"{facts.torch}.get_device_module().device({index})", facts.needs_torch)


CONTEXTS = Rule(
    "context",
    "`with torch.cuda.device(index):`, if it only runs where there is an accelerator",
    (cst.Call,),
    _decide,
    (
        Example(
            Level.ROLES,
            "if gpu_id >= 0:\n    with torch.cuda.device(gpu_id):\n        train()",
            "if gpu_id >= 0:\n    with torch.get_device_module().device(gpu_id):\n        train()",
        ),
    ),
)
