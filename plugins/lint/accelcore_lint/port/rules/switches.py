"""Settings of a vendor's libraries: by torch's word for all devices, or removed if they repeat torch's default."""

from __future__ import annotations

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.model import Example, Level, Rewrite, Rule
from accelcore_lint.port.removed import removed
from accelcore_lint.port.tree import text_of

_CUDNN = "torch.backends.cudnn."
_DEFAULTS = {
    f"{_CUDNN}benchmark": "False",
    f"{_CUDNN}deterministic": "False",
    f"{_CUDNN}enabled": "True",
    f"{_CUDNN}allow_tf32": "True",
}
_STRICT = "use_deterministic_algorithms"
_GENERIC = {
    ("torch.backends.cuda.matmul.allow_tf32", "True"): 'set_float32_matmul_precision("high")',
    ("torch.backends.cuda.matmul.allow_tf32", "False"): 'set_float32_matmul_precision("highest")',
}


def _decide(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | None:
    assign = node.body[0]
    if len(node.body) != 1 or not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return None
    target = assign.targets[0].target
    if isinstance(target, cst.Tuple):
        return _in_lines(node, target, assign.value, facts)
    name, value = facts.name(target) or "", text_of(assign.value)
    if _DEFAULTS.get(name) == value and all(text_of(other) == value for other in facts.values(target)):
        return Rewrite(removed, node.body)
    source = _GENERIC.get((name, value))
    if name == f"{_CUDNN}deterministic" and _STRICT not in facts.code:
        source = f"{_STRICT}({value}, warn_only=True)"
    if source is None:
        return _by_full_name(node, target, name, facts)
    new = cst.Expr(cst.parse_expression(f"{facts.torch}.{source}"))
    return Rewrite(lambda updated: updated.with_changes(body=[new]), node.body, facts.needs_torch)


def _in_lines(
    node: cst.SimpleStatementLine, target: cst.Tuple, value: cst.BaseExpression, facts: Facts
) -> Rewrite | None:
    """Write `cudnn.benchmark, cudnn.deterministic = False, True` as a line for each."""
    names = [facts.name(element.value) or "" for element in target.elements]
    known = {f"{_CUDNN}benchmark": "torch.backends.cudnn.benchmark = {}"}
    known |= {} if _STRICT in facts.code else {f"{_CUDNN}deterministic": f"torch.{_STRICT}({{}}, warn_only=True)"}
    if not isinstance(value, cst.Tuple) or len(value.elements) != len(names) or not set(names) <= set(known):
        return None
    values = [text_of(element.value) for element in value.elements]
    sources = [known[name].format(given) for name, given in zip(names, values, strict=True)]
    sources = [source.replace("torch.", f"{facts.torch}.", 1) for source in sources]

    def build(updated: cst.SimpleStatementLine) -> cst.FlattenSentinel[cst.SimpleStatementLine]:
        lines = [cst.ensure_type(cst.parse_statement(source), cst.SimpleStatementLine) for source in sources]
        lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated.trailing_whitespace)
        return cst.FlattenSentinel(lines)

    return Rewrite(build, node.body, facts.needs_torch)


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
            "torch.backends.cudnn.deterministic = args.exact",
            "torch.use_deterministic_algorithms(args.exact, warn_only=True)",
        ),
        Example(
            Level.ROLES,
            "import torch.backends.cudnn as cudnn\ncudnn.benchmark = True",
            "torch.backends.cudnn.benchmark = True",
        ),
        Example(
            Level.ROLES,
            "import torch.backends.cudnn as cudnn\ncudnn.benchmark, cudnn.deterministic = False, True",
            "torch.backends.cudnn.benchmark = False\ntorch.use_deterministic_algorithms(True, warn_only=True)",
        ),
    ),
)
