"""Settings of a vendor's libraries: by torch's word for all devices, or removed if they repeat torch's default."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.removed import removed
from accelcore_lint.port.rule import Example, Level, Rewrite, Rule
from accelcore_lint.port.syntax import text_of

_CUDNN = "torch.backends.cudnn."
_DEFAULTS = {
    f"{_CUDNN}benchmark": "False",
    f"{_CUDNN}deterministic": "False",
    f"{_CUDNN}enabled": "True",
    f"{_CUDNN}allow_tf32": "True",
}
_OTHERWISE = re.compile(r"\bsetattr\([^,\n]*\bcudnn *,|\bcudnn\.set_flags\(")
_TF32 = "torch.backends.cuda.matmul.allow_tf32"
_PRECISIONS = {"True": '"high"', "False": '"highest"'}


def _decide(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | None:
    assign = node.body[0]
    if len(node.body) != 1 or not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return None
    target = assign.targets[0].target
    name, value = facts.name(target) or "", text_of(assign.value)
    if _DEFAULTS.get(name) == value and _takes_nothing_back(target, name, facts):
        return Rewrite(removed, node.body)
    if name != _TF32:
        return _by_full_name(node, target, name, facts)
    if isinstance(assign.value, (cst.IfExp, cst.Lambda)):
        value = f"({value})"
    precision = _PRECISIONS.get(value, f'"high" if {value} else "highest"')
    new = cst.Expr(cst.parse_expression(f"{facts.torch}.set_float32_matmul_precision({precision})"))
    return Rewrite(lambda updated: updated.with_changes(body=[new]), node.body, facts.needs_torch)


def _takes_nothing_back(target: cst.BaseExpression, name: str, facts: Facts) -> bool:
    """Return whether no other line of the program has set something else before, so that torch's default holds."""
    default, key = _DEFAULTS[name], name.removeprefix(_CUDNN)
    if _OTHERWISE.search(facts.code):
        return False
    beside = [given for setting, given in facts.known.settings if setting == key]
    here = [
        text_of(value)
        for text, values in facts.assigned.items()
        if text == text_of(target) or text.endswith(f"cudnn.{key}")
        for value in values
    ]
    return all(given == default for given in (*here, *beside))


def _by_full_name(node: cst.SimpleStatementLine, target: cst.BaseExpression, name: str, facts: Facts) -> Rewrite | None:
    """Write `cudnn.benchmark = True` with its full name, so that the import of `cudnn` goes; torch has no other."""
    base = target.value if isinstance(target, cst.Attribute) else target
    if not name.startswith(_CUDNN) or not isinstance(base, cst.Name):
        return None
    settings = sum(len(values) for key, values in facts.assigned.items() if key.startswith(f"{base.value}."))
    if facts.uses[base.value] != settings:
        return None
    full = cst.parse_expression(f"{facts.torch}.{name.removeprefix('torch.')}")
    new = cst.AssignTarget(cst.ensure_type(full, cst.Attribute))
    return Rewrite(
        lambda updated: updated.with_changes(body=[updated.body[0].with_changes(targets=[new])]),
        node.body,
        facts.needs_torch,
    )


SWITCHES = Rule(
    "switch",
    "settings of cuDNN and cuBLAS that all devices have, or that are torch's default",
    (cst.SimpleStatementLine,),
    _decide,
    (
        Example(
            Level.TORCH,
            "torch.backends.cuda.matmul.allow_tf32 = True",
            'torch.set_float32_matmul_precision("high")',
        ),
        Example(
            Level.ROLES,
            "loss.backward()\ntorch.backends.cudnn.benchmark = False",
            "loss.backward()",
        ),
        Example(
            Level.ROLES,
            "import torch.backends.cudnn as cudnn\ncudnn.benchmark = True",
            "torch.backends.cudnn.benchmark = True",
        ),
    ),
)
